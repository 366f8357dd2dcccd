"""Edits that let a job talk to its own processes only.

The launcher of a job listens for its ranks, and elastic ranks for their launcher. Released Horovod listens at every
address, takes requests from any sender, and unpickles some of what they hold: whoever reaches the port runs code as the
user of the job (CVE-2024-10190 of the elastic launcher, CVE-2026-31234 of ``horovod.run``).

With these edits launcher and ranks share a key, through their environment, which other users cannot read. Each request
to the launcher carries a token made from the key. A pickle is read only if it carries a digest made with the key: the
token travels in the clear, so that who listens on the network could repeat it, but cannot make a digest.
"""

from hvd_hetero.horovod_build.edits.edit import Edit

__all__ = ["AUTHENTICATION_EDITS", "TOKEN_EDITS"]

_NO_KEY = "the key must not be in a command line, which every user of the machine can read"
_ONE_KEY = "launcher and ranks share one key, so that neither takes the other's from the network"
_ONE_ADDRESS = "the address that the ranks are told is the only one they need"
_REQUESTS = "the launcher answers requests with the job's token only"
_PROXIES = "launcher and ranks reach each other without a proxy, which would see the token and end long questions"
_ONLY_OURS = "what is unpickled was made by a process of this job"

_KEY = Edit(
    "horovod/runner/common/util/secret.py",
    "def compute_digest(",
    '''def job_key():
    """
    The key that the launcher of a job shares with its ranks through their environment. Other users cannot read that,
    unlike a command line. The process that asks first makes the key; this is the launcher.
    """
    if not os.environ.get(HOROVOD_SECRET_KEY):
        os.environ[HOROVOD_SECRET_KEY] = make_secret_key().hex()
    return os.environ[HOROVOD_SECRET_KEY].encode()


def request_token():
    """What a request to the launcher must carry. It does not give the key away, but does travel in the clear."""
    return compute_digest(job_key(), b'request').hex()


def check_request_token(token):
    return hmac.compare_digest(request_token().encode(), (token or '').encode())


def sign(scope, key, data):
    """Data with a digest before it, good for this place of the store only."""
    return compute_digest(job_key(), '{}/{}\\n'.format(scope, key).encode() + data) + data


def verified(scope, key, signed):
    """The data behind a digest, or an error if no process of this job has put it here."""
    digest, data = signed[:DIGEST_LENGTH], signed[DIGEST_LENGTH:]
    if not hmac.compare_digest(compute_digest(job_key(), '{}/{}\\n'.format(scope, key).encode() + data), digest):
        raise PermissionError('{}/{} was not put there by a process of this job'.format(scope, key))
    return data


def compute_digest(''',
    "the key, what is derived from it, and how it is checked",
)

_SERVERS = (
    Edit(
        "horovod/runner/http/http_server.py",
        "from http.server import HTTPServer, SimpleHTTPRequestHandler\n\n",
        "from http.server import HTTPServer, BaseHTTPRequestHandler\n\nfrom horovod.runner.common.util import secret\n",
        "the simple handler answers HEAD with what it knows of the files in the launcher's directory",
    ),
    Edit(
        "horovod/runner/http/http_server.py",
        "class KVStoreHandler(SimpleHTTPRequestHandler):\n    # Set timeout\n    timeout = SINGLE_REQUEST_TIMEOUT\n",
        """class KVStoreHandler(BaseHTTPRequestHandler):
    # Set timeout
    timeout = SINGLE_REQUEST_TIMEOUT

    # Every request passes here, whatever its method
    def parse_request(self):
        if not super(KVStoreHandler, self).parse_request():
            return False
        if not secret.check_request_token(self.headers.get('X-Horovod-Token')):
            self.send_error(403)
            return False
        return True
""",
        "strangers neither read nor write what the ranks exchange, nor stand in for a rank",
    ),
    Edit(
        "horovod/runner/http/http_server.py",
        "def start(self, handler_cls=RendezvousHandler):",
        "def start(self, handler_cls=RendezvousHandler, host=''):",
        _ONE_ADDRESS,
    ),
    Edit(
        "horovod/runner/http/http_server.py",
        "                addr, handler_cls, self._verbose))",
        "                addr, handler_cls, self._verbose), host)",
        _ONE_ADDRESS,
    ),
    Edit(
        "horovod/runner/http/http_server.py",
        "def start_server(self):",
        "def start_server(self, host=''):",
        _ONE_ADDRESS,
    ),
    Edit(
        "horovod/runner/http/http_server.py",
        "                addr, KVStoreHandler, self.verbose))",
        "                addr, KVStoreHandler, self.verbose), host)",
        _ONE_ADDRESS,
    ),
    Edit("horovod/runner/util/network.py", "def find_port(server_factory):", "def find_port(server_factory, host=''):",
         _ONE_ADDRESS),
    Edit("horovod/runner/util/network.py", "addr = ('', port)", "addr = (host, port)", _ONE_ADDRESS),
    Edit(
        "horovod/runner/common/util/network.py",
        "                addr, self._make_handler()))\n",
        "                addr, self._make_handler()), self._sole_address())\n",
        _ONE_ADDRESS,
    ),
    Edit(
        "horovod/runner/common/util/network.py",
        "    def _make_handler(self):\n",
        '''    def _sole_address(self):
        """Where to listen: at the address of the interface that was named, or everywhere if there are several."""
        found = [addr.address for intf, addrs in psutil.net_if_addrs().items() if self._nics and intf in self._nics
                 for addr in addrs if addr.family == socket.AF_INET]
        return found[0] if len(found) == 1 else ''

    def _make_handler(self):
''',
        _ONE_ADDRESS,
    ),
)  # fmt: skip

_CLIENTS = (
    Edit(
        "horovod/runner/http/http_client.py",
        "from urllib.request import urlopen\n",
        "from urllib.request import ProxyHandler, build_opener\n",
        _PROXIES,
    ),
    Edit(
        "horovod/runner/http/http_client.py",
        """

def read_data_from_kvstore(addr, port, scope, key):
""",
        """
urlopen = build_opener(ProxyHandler({})).open  # whatever http_proxy says


def read_data_from_kvstore(addr, port, scope, key, timeout=None):
""",
        _PROXIES,
    ),
    Edit(
        "horovod/runner/http/http_client.py",
        "resp = urlopen(req)\n",
        "resp = urlopen(req, timeout=timeout)\n",
        _PROXIES,
    ),
    Edit("horovod/runner/http/http_client.py", "import codec\n", "import codec, secret\n", _ONLY_OURS),
    Edit(
        "horovod/runner/http/http_client.py",
        "        req = Request(url)\n",
        "        req = Request(url, headers={'X-Horovod-Token': secret.request_token()})\n",
        _REQUESTS,
    ),
    Edit(
        "horovod/runner/http/http_client.py",
        "codec.loads_base64(resp.read())",
        "codec.loads_base64(secret.verified(scope, key, resp.read()))",
        _ONLY_OURS,
    ),
    Edit(
        "horovod/runner/http/http_client.py",
        "req = Request(url, data=codec.dumps_base64(value, to_ascii=False))",
        "req = Request(url, data=secret.sign(scope, key, codec.dumps_base64(value, to_ascii=False)),\n"
        "                      headers={'X-Horovod-Token': secret.request_token()})",
        _ONLY_OURS,
    ),
)

_RANKS = (
    Edit(
        "horovod/common/basics.py",
        "from horovod.common import util as util\n",
        "from horovod.common import util as util\nfrom horovod.runner.common.util import secret\n",
        _REQUESTS,
    ),
    Edit(
        "horovod/common/basics.py",
        "        atexit.register(self.shutdown)\n",
        """        if 'HOROVOD_GLOO_RENDEZVOUS_ADDR' in os.environ:
            # For C++. A name that begins like the key's is kept out of command lines, like the key.
            os.environ[secret.HOROVOD_SECRET_KEY + '_TOKEN'] = secret.request_token()

        atexit.register(self.shutdown)
""",
        _REQUESTS,
    ),
)

_ELASTIC = (
    Edit("horovod/runner/elastic/rendezvous.py", "import codec\n", "import codec, secret\n", _ONLY_OURS),
    Edit(
        "horovod/runner/elastic/rendezvous.py",
        "addresses, secret_key = codec.loads_base64(value)",
        "addresses = codec.loads_base64(secret.verified(scope, key, value))",
        _ONLY_OURS,
    ),
    Edit(
        "horovod/runner/elastic/rendezvous.py",
        "self._put_worker_addresses(host, int(local_rank), addresses, secret_key)",
        "self._put_worker_addresses(host, int(local_rank), addresses, secret.job_key())",
        _ONE_KEY,
    ),
    Edit(
        "horovod/runner/elastic/worker.py",
        "secret_key = secret.make_secret_key()",
        "secret_key = secret.job_key()",
        _ONE_KEY,
    ),
    Edit(
        "horovod/runner/elastic/worker.py",
        "value = (self._service.addresses(), secret_key)",
        "value = self._service.addresses()",
        _ONE_KEY,
    ),
)

_LAUNCHER = (
    Edit("horovod/runner/gloo_run.py", "safe_shell_exec\n", "safe_shell_exec, secret\n", _ONE_KEY),
    Edit(
        "horovod/runner/gloo_run.py",
        "        'NCCL_SOCKET_IFNAME': ','.join(nics),\n",
        "        'NCCL_SOCKET_IFNAME': ','.join(nics),\n"
        "        secret.HOROVOD_SECRET_KEY: secret.job_key().decode(),  # for launchers that hand on an environment\n",
        "Ray gives these variables to its workers",
    ),
    Edit(
        "horovod/runner/gloo_run.py",
        """for k, v in env_vars.items()])
    run_command = (""",
        """for k, v in env_vars.items() if env_util.is_exportable(k)])
    run_command = (""",
        _NO_KEY,
    ),
    Edit(
        "horovod/runner/gloo_run.py",
        "global_rendezv_port = rendezvous.start()",
        "global_rendezv_port = rendezvous.start(host=server_ip)",
        _ONE_ADDRESS,
    ),
    Edit("horovod/runner/gloo_run.py", "    global_rendezv_port = rendezvous.start(handler)\n", "", _ONE_ADDRESS),
    Edit(
        "horovod/runner/gloo_run.py",
        "    server_ip = network.get_driver_ip(nics)\n    run_func_server = None\n",
        "    server_ip = network.get_driver_ip(nics)\n"
        "    global_rendezv_port = rendezvous.start(handler, host=server_ip)\n"
        "    run_func_server = None\n",
        _ONE_ADDRESS,
    ),
    Edit("horovod/runner/gloo_run.py", ".start_server()", ".start_server(server_ip)", _ONE_ADDRESS),
    Edit("horovod/runner/launch.py", ".start_server()", ".start_server(driver_ip)", _ONE_ADDRESS),
    Edit(
        "horovod/runner/launch.py",
        "binding_args=args.binding_args,\n                                     key=secret.make_secret_key(),",
        "binding_args=args.binding_args,\n                                     key=secret.job_key(),",
        _ONE_KEY,
    ),
    Edit(
        "horovod/runner/launch.py",
        "extra_mpi_args=args.mpi_args,\n                                                key=secret.make_secret_key(),",
        "extra_mpi_args=args.mpi_args,\n                                                key=secret.job_key(),",
        _ONE_KEY,
    ),
    Edit("horovod/runner/driver/driver_service.py", "import io\n", "import copy\nimport io\n", _NO_KEY),
    Edit(
        "horovod/runner/driver/driver_service.py",
        "    args_list = []\n",
        "    args_list = []\n    without_key = copy.copy(settings)\n    without_key.key = None\n",
        _NO_KEY,
    ),
    Edit(
        "horovod/runner/driver/driver_service.py",
        "settings=codec.dumps_base64(settings))",
        "settings=codec.dumps_base64(without_key))",
        _NO_KEY,
    ),
    Edit("horovod/runner/task_fn.py", "codec, host_hash\n", "codec, host_hash, secret\n", _NO_KEY),
    Edit(
        "horovod/runner/task_fn.py",
        "    settings = codec.loads_base64(sys.argv[4])\n",
        "    settings = codec.loads_base64(sys.argv[4])\n    settings.key = secret.job_key()\n",
        _NO_KEY,
    ),
    Edit(
        "horovod/runner/util/remote.py",
        "import env as env_util\n",
        "import env as env_util, secret\n",
        _NO_KEY,
    ),
    Edit(
        "horovod/runner/util/remote.py",
        "    return f'{SSH_COMMAND_PREFIX} {host} {port_arg} {identity_file_arg} {timeout_arg} {local_command}'\n",
        """    name = secret.HOROVOD_SECRET_KEY  # it travels on standard input
    return f'printenv {name} | {SSH_COMMAND_PREFIX} {host} {port_arg} {identity_file_arg} {timeout_arg} ' \\
           f'"read -r {name}; export {name};" {local_command}'
""",
        _NO_KEY,
    ),
    Edit(
        "horovod/runner/util/remote.py",
        "    return f'{env_util.KUBEFLOW_MPI_EXEC} {host} {local_command}' if",
        """    # Only the job's own pods see this command line.
    exported = f'"export {secret.HOROVOD_SECRET_KEY}={secret.job_key().decode()};"'
    return f'{env_util.KUBEFLOW_MPI_EXEC} {host} {exported} {local_command}' if""",
        "there the command has no standard input",
    ),
)

_OTHER_LAUNCHERS = (
    Edit(
        "horovod/ray/runner.py",
        """            "HOROVOD_CPU_OPERATIONS": "gloo",
        }
""",
        """            "HOROVOD_CPU_OPERATIONS": "gloo",
            secret.HOROVOD_SECRET_KEY: secret.job_key().decode(),
        }
""",
        _ONE_KEY,
    ),
    Edit("horovod/spark/gloo_run.py", "import sys\n", "import os\nimport sys\n", _ONE_KEY),
    Edit(
        "horovod/spark/gloo_run.py",
        "    key = settings.key\n",
        "    key = settings.key\n    os.environ[secret.HOROVOD_SECRET_KEY] = codec.dumps_base64(key)\n",
        _ONE_KEY,
    ),
    Edit(
        "horovod/spark/gloo_run.py",
        "    env[secret.HOROVOD_SECRET_KEY] = codec.dumps_base64(settings.key)\n",
        "    env[secret.HOROVOD_SECRET_KEY] = codec.dumps_base64(settings.key)\n"
        "    os.environ[secret.HOROVOD_SECRET_KEY] = env[secret.HOROVOD_SECRET_KEY]\n",
        _ONE_KEY,
    ),
)

AUTHENTICATION_EDITS = (_KEY, *_SERVERS, *_CLIENTS, *_RANKS, *_ELASTIC, *_LAUNCHER, *_OTHER_LAUNCHERS)

# The ranks' own requests, which C++ sends.
TOKEN_EDITS = (
    Edit(
        "horovod/common/gloo/http_store.cc",
        "// Perform http request to rendezvous server with retry logic\n",
        """namespace {
// The launcher answers requests with the job's token only. Python has put it into the environment.
std::vector<std::string> RequestHeaders() {
  const char* token = std::getenv("_HOROVOD_SECRET_KEY_TOKEN");
  if (token == nullptr) {
    return {};
  }
  return {std::string("X-Horovod-Token: ") + token};
}
} // namespace

// Perform http request to rendezvous server with retry logic
""",
        _REQUESTS,
    ),
    Edit(
        "horovod/common/gloo/http_store.cc",
        "request.send(method, body);",
        "request.send(method, body, RequestHeaders());",
        _REQUESTS,
    ),
    Edit(
        "horovod/common/gloo/http_store.cc",
        "#include <cstring>\n",
        "#include <cstdlib>\n#include <cstring>\n",
        _REQUESTS,
    ),
)
