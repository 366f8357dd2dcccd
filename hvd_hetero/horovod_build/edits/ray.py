"""Edits by which Horovod's executors for Ray, of 2023, run on Ray's current release without warnings.

They replace calls that Ray has deprecated by those that it has offered since its version 2.0. Elastic ranks find their
launcher at the address that Ray knows it by, as those of ``RayExecutor`` do. And one whose process is slow to start is
not given up.
"""

from hvd_hetero.horovod_build.edits.edit import Edit

__all__ = ["RAY_EDITS"]

_DEPRECATED = "Ray warns on each rank that it will remove this"
_OWN_NAME = "many systems resolve the host's own name to a loopback address, which leads ranks on other hosts nowhere"
_SLOW = "on a busy host Ray took longer to start a process, and the job then waited for ranks that did not come"

RAY_EDITS = (
    Edit("horovod/ray/worker.py", "get_runtime_context().node_id.hex()", "get_runtime_context().get_node_id()",
         _DEPRECATED),
    *(
        edit
        for path in ("horovod/ray/elastic.py", "horovod/ray/elastic_v2.py")
        for edit in (
            Edit(path, "ray.state.current_node_id()", "f'node:{ray.util.get_node_ip_address()}'", _DEPRECATED),
            Edit(path, "socket.gethostbyname(socket.gethostname())", "ray.util.get_node_ip_address()", _OWN_NAME),
            Edit(path, "ray.get(ping, timeout=10)", "ray.get(ping, timeout=60)", _SLOW),
        )
    ),
)  # fmt: skip
