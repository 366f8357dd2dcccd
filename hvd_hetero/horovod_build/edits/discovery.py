"""Edits by which an elastic job finds its hosts at little cost, and a discovery script that hangs is ended.

Horovod runs the script every second, from a new Python process that watches over it: a tenth of a core of the first
host, taken from the rank there. Run from the launcher itself, it costs a hundredth.
"""

from hvd_hetero.horovod_build.edits.edit import Edit

__all__ = ["DISCOVERY_EDITS"]

_FILE = "horovod/runner/elastic/discovery.py"
_HANGS = "the launcher holds its lock while the script runs, so that all of it waits for a script that never ends"
_DROPPED = "a thread that asks for the hosts at this moment finds a forgiven host still given up, and drops it for ever"
_COSTS = "a new Python process each second costs a tenth of a core"

DISCOVERY_EDITS = (
    Edit(
        _FILE,
        "import io\nimport logging\nimport random\nimport threading\nimport time\n",
        "import contextlib\nimport logging\nimport os\nimport random\nimport signal\nimport subprocess\n"
        "import tempfile\nimport threading\nimport time\n",
        _COSTS,
    ),
    Edit(
        _FILE,
        "class HostState(object):\n",
        """# Seconds after which a discovery script is ended, as if it had failed
_timeout = os.environ.get('HOROVOD_DISCOVERY_TIMEOUT_SECONDS') or '60'
try:
    DISCOVERY_TIMEOUT_SECONDS = float(_timeout)
except ValueError:
    DISCOVERY_TIMEOUT_SECONDS = 0.0
if not DISCOVERY_TIMEOUT_SECONDS > 0:
    raise ValueError('HOROVOD_DISCOVERY_TIMEOUT_SECONDS must be a number of seconds above 0, got {}; leave it out '
                     'for 60'.format(_timeout))


class HostState(object):
""",
        _HANGS,
    ),
    Edit(
        _FILE,
        """        stdout = io.StringIO()
        exit_code = safe_shell_exec.execute(
            self._discovery_script, stdout=stdout)
        if exit_code != 0:
""",
        """        # What the script leaves behind would keep a pipe open; and it is ended, as one session
        with tempfile.TemporaryFile('w+') as output:
            script = subprocess.Popen(self._discovery_script, shell=True, stdin=subprocess.DEVNULL, stdout=output,
                                      start_new_session=True)
            try:
                exit_code = script.wait(DISCOVERY_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                raise RuntimeError(
                    'Discovery script {} was not done after {:g} s, and was ended. Let it print what it knows in '
                    'time, or set HOROVOD_DISCOVERY_TIMEOUT_SECONDS.'
                    .format(self._discovery_script, DISCOVERY_TIMEOUT_SECONDS))
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(script.pid, signal.SIGKILL)
                script.wait()
            output.seek(0)
            stdout = output.read()
        if exit_code != 0:
""",
        _COSTS,
    ),
    Edit(
        _FILE,
        "        return stdout.getvalue()\n",
        "        return stdout\n",
        _COSTS,
    ),
    Edit(
        _FILE,
        """            for host in host_slots.keys():
                if self._hosts_state[host].is_resurrected():
                    self._hosts_state[host].whitelist()
""",
        """            for host in available_hosts:  # as of the moment at which they were counted
                if self._hosts_state[host].is_resurrected():
                    self._hosts_state[host].whitelist()
""",
        _DROPPED,
    ),
    Edit(
        _FILE,
        """            self._current_hosts = DiscoveredHosts(host_slots=host_slots,
                                                  host_assignment_order=host_assignment_order)
            host_update_state = check_update(self._current_hosts.host_slots, prev_host_slots)
            whitelist_all_hosts()
""",
        """            host_update_state = check_update(host_slots, prev_host_slots)
            whitelist_all_hosts()
            self._current_hosts = DiscoveredHosts(host_slots=host_slots,
                                                  host_assignment_order=host_assignment_order)
""",
        _DROPPED,
    ),
)
