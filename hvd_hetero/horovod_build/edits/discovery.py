"""Edits by which a host discovery script that hangs is ended, instead of stopping an elastic job in silence."""

from hvd_hetero.horovod_build.edits.edit import Edit

__all__ = ["DISCOVERY_EDITS"]

_FILE = "horovod/runner/elastic/discovery.py"
_REASON = "the launcher holds its lock while the script runs, so that all of it waits for a script that never ends"

DISCOVERY_EDITS = (
    Edit(
        _FILE,
        "import random\nimport threading\n",
        "import os\nimport random\nimport shlex\nimport threading\n",
        _REASON,
    ),
    Edit(
        _FILE,
        "class HostState(object):\n",
        """# Seconds after which a discovery script is ended, as if it had failed
DISCOVERY_TIMEOUT_SECONDS = os.environ.get('HOROVOD_DISCOVERY_TIMEOUT_SECONDS', '60')


class HostState(object):
""",
        _REASON,
    ),
    Edit(
        _FILE,
        """        exit_code = safe_shell_exec.execute(
            self._discovery_script, stdout=stdout)
        if exit_code != 0:
""",
        """        # Ends all that the script has started, which else would keep its output open
        exit_code = safe_shell_exec.execute(
            'timeout -k 5 {} sh -c {}'.format(shlex.quote(DISCOVERY_TIMEOUT_SECONDS),
                                              shlex.quote(self._discovery_script)), stdout=stdout)
        if exit_code in (124, 137):
            raise RuntimeError(
                'Discovery script {} was not done after {} s, and was ended. Let it print what it knows in time, '
                'or set HOROVOD_DISCOVERY_TIMEOUT_SECONDS.'.format(self._discovery_script, DISCOVERY_TIMEOUT_SECONDS))
        if exit_code != 0:
""",
        _REASON,
    ),
)
