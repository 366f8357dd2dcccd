"""Edits by which n ranks find each other with some requests each, instead of some for each other rank.

Ranks meet through the launcher's key-value store: each puts its addresses there, and fetches those of all others. A
released Horovod asks for each other rank at least twice, and again every 10 ms until it is there: at least 10 n²
requests of n ranks on one host, to one Python process, for which all wait at a start and at every recovery. The
server's queue takes six connections at a time. What comes on top the kernel drops, and a rank tries again after 1 s,
3 s, 7 s. On two cores 8 ranks of this build without these edits needed 6.6 s to find each other, and 16 ranks 22 s.
With them they need 0.2 and 0.5 s, of which the launcher works for 0.02 and 0.05 s
(``benchmarks/results/rendezvous.md``). With a longer queue alone, 32 ranks sent 10,500 requests, for which the launcher
worked 4.2 s (beside other work). With all edits it is 192 requests and 0.14 s.

- One request fetches a rank's address at all others. The launcher holds it until all are there, or for a second. Each
  rank puts one address for each other rank there; an answer with all of them, as before, would make n³ of n ranks.
- Where all ranks are one process set (``hvd.global_process_set``), that uses the connections of the job as a whole,
  which it would make once more. Horovod's one thread sends over both, so that they cannot get into each other's way.
- A rank alone, as one on a host of its own, asks for nobody. Host names, from which Gloo derives a number that nothing
  uses, are not exchanged.

Ranks with these edits ask a launcher without them key by key, and a launcher with them answers both.
"""

from hvd_hetero.horovod_build.edits.edit import Edit

__all__ = ["ASKING_EDITS", "RENDEZVOUS_EDITS"]

_STORE, _HEADER = "horovod/common/gloo/http_store.cc", "horovod/common/gloo/http_store.h"
_CONTEXT = "horovod/common/gloo/gloo_context.cc"
_SERVER = "horovod/runner/http/http_server.py"
_ELASTIC = "horovod/runner/elastic/rendezvous.py"
_REASON = "each rank asks for each other one, again and again, one process for all of them"
_TWICE = "all ranks connect to all others a second time"
_ALONE = "a rank that is alone asks the launcher for itself"
_NAMES = "nothing uses the local rank, for which each rank asks for the host names of those before it"
_QUEUE = "what does not fit into the queue of new connections is dropped, and tried again after seconds"
_GONE = "a rank that is gone before its answer comes leaves a stack trace"
_FORMER = "a scope that is done forgets who is done with others, whose former addresses the next meeting then finds"

# What C++ asks.
ASKING_EDITS = (
    Edit(
        _HEADER,
        """            int rank)
      : rank_(rank) {
""",
        """            int rank, int size = 1)
      : rank_(rank), size_(size), asks_for_all_(size > 1) {
""",
        _REASON,
    ),
    Edit(
        _HEADER,
        """  std::string url_prefix_;
  int rank_;
""",
        """  // Asks for a rank's address, and for those of all others with it. Returns whether it is there.
  bool Ask(const std::string& key);

  std::string url_prefix_;
  int rank_;
  int size_;
  bool asks_for_all_;
  std::map<std::string, std::vector<char>> known_;
""",
        _REASON,
    ),
    Edit(_HEADER, '#include "HTTPRequest.hpp"\n', '#include <map>\n\n#include "HTTPRequest.hpp"\n', _REASON),
    Edit(
        _STORE,
        """  std::vector<char> result;
  HTTP_GET(key, result);
  return result;
}
""",
        """  auto known = known_.find(key);
  if (known != known_.end()) {
    return known->second;
  }
  std::vector<char> result;
  HTTP_GET(key, result);
  return result;
}
""",
        _REASON,
    ),
    Edit(
        _STORE,
        """  std::vector<char> result;
  for (const auto& key : keys) {
    if (!HTTP_GET(key, result)) {
      return false;
    }
  }
  return true;
}
""",
        """  for (const auto& key : keys) {
    if (known_.count(key) == 0 && !Ask(key)) {
      return false;
    }
  }
  return true;
}

bool HTTPStore::Ask(const std::string& key) {
  std::vector<char> answer;
  // The launcher answers when all ranks are there, or after a second with those that are
  std::string all = "all_of_" + std::to_string(size_) + "_for_" + std::to_string(rank_);
  if (asks_for_all_ && HTTP_GET(all, answer)) {
    std::istringstream entries(std::string(answer.begin(), answer.end()));
    int other;
    size_t length;
    while (entries >> other >> length && entries.get() == '\\n') {
      // Gloo looks for it where this rank's address is among those of the other one for all ranks
      std::vector<char> value(length * (size_ - 1));
      if (entries.read(value.data() + length * (rank_ > other ? rank_ - 1 : rank_), length)) {
        known_[std::to_string(other)] = std::move(value);
      }
    }
    return known_.count(key) > 0;
  }
  asks_for_all_ = false; // a launcher without these edits does not know the question
  if (!HTTP_GET(key, answer)) {
    return false;
  }
  known_[key] = std::move(answer);
  return true;
}
""",
        _REASON,
    ),
    Edit(_STORE, "#include <ostream>\n", "#include <ostream>\n#include <sstream>\n", _REASON),
    Edit(
        _CONTEXT,
        """  if (server_addr_env != nullptr) {
    std::string server_addr = server_addr_env;
    store.reset(new HTTPStore(server_addr, server_port, prefix, rank));
""",
        """  if (server_addr_env != nullptr && size > 1) {
    std::string server_addr = server_addr_env;
    store.reset(new HTTPStore(server_addr, server_port, prefix, rank, size));
""",
        _ALONE,
    ),
    Edit(
        _CONTEXT,
        """  assert(global_context.IsEnabled());

""",
        """  assert(global_context.IsEnabled());

  if (registered_ranks.empty()) { // all ranks. No device, which would look the host's name up
    global_ctx = ctx = global_context.ctx;
    local_ctx = global_context.local_ctx;
    cross_ctx = global_context.cross_ctx;
    timeout_ = global_context.timeout_;
    hostname_ = global_context.hostname_;
    return;
  }

""",
        _TWICE,
    ),
    Edit(
        "third_party/gloo/gloo/rendezvous/context.cc",
        """  // Get Hostname using syscall
  char hostname[HOSTNAME_MAX_SIZE]; // NOLINT
  int rv = gethostname(hostname, HOSTNAME_MAX_SIZE);
  if (rv != 0) {
    throw std::system_error(errno, std::system_category());
  }

  auto localHostName = std::string(hostname);
  // Add global rank <> hostname pair to the Store. This store is then passed
  // to Gloo when connectFullMesh is called, where Gloo uses the global rank <>
  // hostname mapping to compute local ranks.
  std::string localKey("rank_" + std::to_string(rank));
  const std::vector<char> value(localHostName.begin(), localHostName.end());
  store.set(localKey, value);

  for (int i = 0; i < size; i++) {
    if (i == rank) {
      break;
    }

    std::string key("rank_" + std::to_string(i));
    auto val = store.get(key);
    auto hostName = std::string((const char*)val.data(), val.size());

    if (hostName == localHostName) {
      localRank++;
    }
  }
""",
        "",
        _NAMES,
    ),
)

# What the launcher answers.
RENDEZVOUS_EDITS = (
    Edit(
        _SERVER,
        """class RendezvousHandler(KVStoreHandler):
""",
        """class RendezvousHandler(KVStoreHandler):
    def _get_value(self, scope, key):
        if not key.startswith(ALL_OF):
            return super()._get_value(scope, key)
        size, asker = map(int, key[len(ALL_OF):].split('_for_'))
        ranks = [str(rank) for rank in range(size)]
        with self.server.has_come:
            self.server.has_come.wait_for(lambda: self._has_all(scope, ranks), HOLD_SECONDS)
            there = dict(self.server.cache.get(scope, {}))
        answer = []
        for rank in range(size):
            addresses = there.get(str(rank))  # as many as there are other ranks, one for each
            if rank != asker and addresses is not None:
                length = len(addresses) // (size - 1)
                begin = length * (asker - 1 if asker > rank else asker)
                answer += f'{rank} {length}\\n'.encode(), addresses[begin:begin + length]
        return b''.join(answer)

    def _has_all(self, scope, ranks):
        there = self.server.cache.get(scope, {})
        return len(there) >= len(ranks) and all(rank in there for rank in ranks)

    def _put_value(self, scope, key, value):
        super()._put_value(scope, key, value)
        with self.server.has_come:
            # Of a scope that the plan does not know the size is unknown, so those who wait count at each new key
            if len(self.server.cache.get(scope, {})) >= self.server.scope_size.get(scope, 0):
                self.server.has_come.notify_all()

""",
        _REASON,
    ),
    Edit(
        _SERVER,
        """        # Lists for finished rendezvous workers
""",
        """        # Told when all ranks of a scope have put their addresses into it
        self.has_come = threading.Condition(self.cache_lock)

        # Lists for finished rendezvous workers
""",
        _REASON,
    ),
    Edit(
        _SERVER,
        """BAD_REQUEST = 400
""",
        """ALL_OF = 'all_of_'  # all_of_<n>_for_<rank> asks for a rank's address at each other one of a scope's n ranks
HOLD_SECONDS = 1.0  # for which they are waited for; then the rank hears what is there, and asks again

BAD_REQUEST = 400
""",
        _REASON,
    ),
    Edit(
        _ELASTIC,
        "            return super(RendezvousHandler, self)._get_value(scope, key)\n",
        "            return super()._get_value(scope, key)\n",
        _REASON,
    ),
    Edit(
        _ELASTIC,
        "            super(RendezvousHandler, self)._put_value(scope, key, value)\n",
        "            super()._put_value(scope, key, value)\n",
        _REASON,
    ),
    Edit(
        _SERVER,
        """class RendezvousHTTPServer(socketserver.ThreadingMixIn, HTTPServer, object):
""",
        """class RendezvousHTTPServer(socketserver.ThreadingMixIn, HTTPServer, object):
    request_queue_size = 4096  # of connections that wait; Linux takes net.core.somaxconn if that is less

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], ConnectionError):  # that is a rank that is gone
            super(RendezvousHTTPServer, self).handle_error(request, client_address)

""",
        f"{_QUEUE}; {_GONE}",
    ),
    Edit(
        _SERVER, "import socketserver\nimport threading\n", "import socketserver\nimport sys\nimport threading\n", _GONE
    ),
    Edit(
        _SERVER,
        "                        self.server.finished_list.clear()\n",
        "                        del self.server.finished_list[scope]\n",
        _FORMER,
    ),
)
