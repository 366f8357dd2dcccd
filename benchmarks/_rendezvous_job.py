"""One start of n ranks, which this process serves as their launcher: its requests, and their cost for it."""

from __future__ import annotations

import collections
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

RETRIES = "ListenOverflows"  # connections that the kernel drops; the client tries again after a second


def plan_of(ranks: int, hosts: int) -> list[dict[str, object]]:
    """Return each rank's place, on hosts with equally many."""
    each = ranks // hosts
    return [
        {
            "hostname": f"host{rank // each}", "rank": rank, "size": ranks, "local_rank": rank % each,
            "local_size": each, "cross_rank": rank // each, "cross_size": hosts,
        }
        for rank in range(ranks)
    ]  # fmt: skip


def dropped_connections() -> int:
    """Return how many connections this machine's kernel has dropped because they were not accepted."""
    names, values = (line.split() for line in Path("/proc/net/netstat").read_text().splitlines()[:2])
    return int(values[names.index(RETRIES)])


def rank_main(hvd: Any, place: dict[str, object], port: int) -> tuple[float, float]:
    """Start Horovod at this place; return when that began and ended."""
    given = {f"HOROVOD_{name.upper()}": str(value) for name, value in place.items()}
    os.environ |= given | {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": "lo", "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "120",
    }  # fmt: skip
    began = time.monotonic()
    hvd.init()
    return began, time.monotonic()


def main(ranks: int, hosts: int) -> dict[str, float]:
    """Start the ranks together, and return the figures of their start."""
    import horovod.torch as hvd
    from horovod.runner.common.util import secret
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousServer

    requests: collections.Counter[str] = collections.Counter()

    class Counting(RendezvousHandler):
        def parse_request(self) -> bool:
            accepted = super().parse_request()
            requests[self.command] += 1
            return bool(accepted)

    secret.job_key()
    plan = plan_of(ranks, hosts)
    pipes = []
    for place in plan:
        told, tell = os.pipe()
        heard, say = os.pipe()
        if os.fork() == 0:
            try:
                for _, other, _ in pipes:  # else ranks would keep one another's pipes open
                    os.close(other)
                os.close(tell)
                times = rank_main(hvd, place, int(os.read(told, 64)))
                os.write(say, json.dumps(times).encode())
                os.read(told, 64)  # until all have begun: a shutdown takes the others' connections
                hvd.shutdown()
            finally:
                os._exit(0)
        os.close(told)
        os.close(say)
        pipes.append((heard, tell, place))
    time.sleep(1.0)
    server = RendezvousServer(0)
    port = server.start(Counting)
    server.init([SlotInfo(**place) for place in plan])  # type: ignore[arg-type]
    dropped, cpu_s = dropped_connections(), time.process_time()
    for _, tell, _ in pipes:
        os.write(tell, str(port).encode())
    times = [json.loads(os.read(heard, 256) or "null") for heard, _, _ in pipes]
    if None in times:
        raise SystemExit(f"rank {times.index(None)} of {ranks} did not start")
    cpu_s, dropped = time.process_time() - cpu_s, dropped_connections() - dropped
    for _, tell, _ in pipes:
        os.write(tell, b"end")
    for _ in pipes:
        os.wait()
    server.stop()
    start_s = max(end for _, end in times) - max(began for began, _ in times)
    return {"requests": sum(requests.values()), "cpu_s": cpu_s, "start_s": start_s, "dropped": dropped, **requests}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]))))
