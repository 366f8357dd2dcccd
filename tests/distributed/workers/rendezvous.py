"""Three ranks meet through a launcher of their own, on one host or as on two, which notes what it is asked."""

from __future__ import annotations

import collections
import os
import time

import horovod.torch as hvd
import torch
from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.http import http_server
from horovod.runner.http.http_client import put_data_into_kvstore, read_data_from_kvstore

from hvd_hetero.testing import report

RANK = int(os.environ["HOROVOD_RANK"])
HOST = "127.0.0.1"
ADDRESS, PORT = (f"HOROVOD_GLOO_RENDEZVOUS_{name}" for name in ("ADDR", "PORT"))
PLANS = {
    "one host": [SlotInfo("a", rank, rank, 0, 3, 3, 1) for rank in range(3)],
    "two hosts": [SlotInfo("a", 0, 0, 0, 3, 2, 2), SlotInfo("a", 1, 1, 0, 3, 2, 1), SlotInfo("b", 2, 0, 1, 3, 1, 2)],
}
MEETINGS = 3


class Launcher:
    """A server for ranks of this plan; one of a released Horovod does not know a question for all."""

    def __init__(self, plan: list[SlotInfo], released: bool) -> None:
        self.asked = asked = collections.Counter()

        class Handler(http_server.RendezvousHandler):
            def parse_request(self):
                accepted = super().parse_request()
                of_all = "/all_of_" in self.path
                asked[f"{self.command} of all" if of_all else self.command] += 1
                if of_all and released:
                    self.path = self.path.replace("all_of_", "")  # a key that is not there
                return accepted

        self.server = http_server.RendezvousServer()
        self.port = self.server.start(Handler, host=HOST)
        self.server.init(plan)


def meet(plan: list[SlotInfo]) -> dict[str, object]:
    """Start Horovod, with a process set of two ranks, and end it; return what this rank found."""
    slot = plan[RANK]
    for name in ("hostname", "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"):
        os.environ[f"HOROVOD_{name.upper()}"] = str(getattr(slot, name))
    pair = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[pair])
    mine = torch.tensor([10.0**RANK])
    sums = [] if RANK == 1 else [hvd.allreduce(mine, op=hvd.Sum, name="of two", process_set=pair).item()]
    sums.append(hvd.allreduce(mine, op=hvd.Sum, name="of all").item())  # last, for who is done ends Horovod for all
    place = hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
    hvd.shutdown()
    return {"sums": sums, "place": place}


def main() -> None:
    http_server.HOLD_SECONDS = 60.0  # so that nobody asks twice, however late another rank is
    known = os.environ[ADDRESS], os.environ[PORT]
    kinds = [(hosts, released) for hosts in PLANS for released in (False, True)]
    launchers = []
    if RANK == 0:
        launchers = [Launcher(PLANS[hosts], released) for hosts, released in kinds]
        put_data_into_kvstore(*known, "mine", "ports", [launcher.port for launcher in launchers])
    ports = None
    while ports is None:
        try:
            ports = read_data_from_kvstore(*known, "mine", "ports")
        except RuntimeError:  # not there yet
            time.sleep(0.01)
    found = {}
    for number, (hosts, released) in enumerate(kinds):
        os.environ[ADDRESS], os.environ[PORT] = HOST, str(ports[number])
        met = [meet(PLANS[hosts]) for _ in range(MEETINGS)]
        asked = dict(launchers[number].asked) if launchers else None
        found[f"{hosts}, {'released' if released else 'edited'}"] = {"met": met, "asked": asked}
    report(found)


if __name__ == "__main__":
    main()
