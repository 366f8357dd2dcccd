"""One rank of `benchmarks/signals.py`: signal in two ways, compute meanwhile, and report the times."""

from __future__ import annotations

import itertools
import random
import sys
import threading
import time
import timeit
from collections.abc import Callable
from typing import Protocol

WAYS = ("channel", "collectives")
SWITCHING = "Python, switching at 0.5 ms"
WORKS = ("nothing", "torch", "Python", SWITCHING)
IDLE_S = 1.0
IDLE_TURNS = 7


class Way(Protocol):
    """A way to signal; a round makes these calls, in this order."""

    def begin(self, round: int) -> None:
        """Get ready for the signal of the round's end."""

    def raise_signal(self, round: int) -> None:
        """Signal to the others, if we are the first."""

    def raised(self, round: int) -> bool:
        """Return True if another rank has signalled."""

    def end(self) -> None:
        """Clean up."""


def by_channel() -> Way:
    import horovod.torch as hvd

    from hvd_hetero.communication.addresses import gather_directory, listen
    from hvd_hetero.communication.side_channel import SideChannel

    def gather(payload: bytes) -> list[bytes]:
        return hvd.allgather_object(payload, name="signals")

    class Channel(SideChannel):
        def begin(self, round: int) -> None:
            pass

        def end(self) -> None:
            pass

        def close(self) -> None:
            over.set()
            self.wake()
            thread.join()
            super().close()

    over = threading.Event()
    sockets, troubles = listen()
    directory = gather_directory(hvd.rank(), hvd.size(), sockets, troubles, gather)
    channel = Channel(hvd.rank(), 0, directory, sockets, bytes, lambda *_: None)

    def serve() -> None:
        while not over.is_set():
            channel.listen(1.0)

    thread = threading.Thread(target=serve, name="hvd-hetero-signals", daemon=True)
    thread.start()
    return channel


def by_collectives() -> Way:
    import horovod.torch as hvd
    import torch

    class Collectives:
        def __init__(self) -> None:
            self._flags = [torch.zeros(1) for _ in range(hvd.size())]
            self._own: int | None = None

        def _post(self, rank: int) -> int:
            # One name per rank and not per round, so that Horovod's response cache knows them after the first round.
            return hvd.allreduce_async_(self._flags[rank], op=hvd.Sum, name=f"finished.{rank}")

        def begin(self, round: int) -> None:
            self._own = None
            self._others = [self._post(rank) for rank in range(hvd.size()) if rank != hvd.rank()]

        def raise_signal(self, round: int) -> None:
            self._own = self._post(hvd.rank())

        def raised(self, round: int) -> bool:
            return any(map(hvd.poll, self._others))

        def end(self) -> None:
            if self._own is None:
                self.raise_signal(0)
            for handle in (*self._others, self._own):
                hvd.synchronize(handle)

    return Collectives()


def pieces_of_work() -> dict[str, Callable[[], object]]:
    """Return pieces of work of about 0.1 ms each."""
    import torch

    def in_torch(size: int) -> Callable[[], object]:
        matrix = torch.rand(size, size)
        return lambda: matrix @ matrix

    def in_python(size: int) -> Callable[[], object]:
        return lambda: sum(i * i for i in range(size))

    def long_enough(kind: Callable[[int], Callable[[], object]]) -> Callable[[], object]:
        size = 64
        while min(timeit.repeat(kind(size), number=1, repeat=20)) < 1e-4:
            size += size // 8
        return kind(size)

    python = long_enough(in_python)
    return dict(zip(WORKS, (lambda: time.sleep(1e-4), long_enough(in_torch), python, python), strict=True))


def rank_main(rounds: int) -> None:
    import horovod.torch as hvd
    import torch

    from hvd_hetero.testing import report

    hvd.init()
    torch.set_num_threads(1)
    ways = {"channel": by_channel(), "collectives": by_collectives()}
    works = pieces_of_work()
    chance = random.Random(0)  # the same on all ranks
    found: dict[str, list[tuple[bool, float]]] = {f"{way} {work}": [] for way in WAYS for work in WORKS}
    calls: dict[str, dict[str, list[float]]] = {way: {"raise": [], "look": [], "begin and end": []} for way in WAYS}
    warm_up = 10

    def meet() -> None:
        """Let all ranks go on within about a millisecond; early ranks do not take the others' cores."""
        handle = hvd.allreduce_async_(torch.zeros(1), op=hvd.Sum, name="meet")
        while not hvd.poll(handle):
            time.sleep(2e-4)
        hvd.synchronize(handle)

    for round in range(-warm_up, rounds):
        number = round + warm_up
        if hvd.rank() == 0 and round >= 0:
            print("round", flush=True)
        for (name, way), (kind, work) in itertools.product(ways.items(), works.items()):
            number_here = number * len(works) + list(works).index(kind)
            finisher, after_s = chance.randrange(hvd.size()), chance.uniform(5e-3, 15e-3)
            began = time.monotonic()
            sys.setswitchinterval(5e-4 if kind == SWITCHING else 5e-3)
            way.begin(number_here)
            spent = time.monotonic() - began
            meet()
            if hvd.rank() == finisher:
                time.sleep(after_s)
                moment = time.monotonic()
                way.raise_signal(number_here)
                calls[name]["raise"].append(time.monotonic() - moment)
            else:
                while True:
                    work()
                    before = time.monotonic()
                    seen = way.raised(number_here)
                    moment = time.monotonic()
                    if seen:
                        break
                calls[name]["look"].append(moment - before)
            meet()
            began = time.monotonic()
            way.end()
            spent += time.monotonic() - began
            if round >= 0:
                found[f"{name} {kind}"].append((hvd.rank() == finisher, moment))
                calls[name]["begin and end"].append(spent)

    # `raised` that finds nothing, at its own cost: many in a row.
    for name, way in ways.items():
        number = 10 * (rounds + warm_up)
        way.begin(number)
        meet()
        began = time.perf_counter()
        for _ in range(1000):
            way.raised(number)
        calls[name]["look"] = [(time.perf_counter() - began) / 1000]
        meet()
        way.end()

    ways["channel"].close()
    idle: dict[str, list[float]] = {"nothing": [], **{way: [] for way in WAYS}, "thread": []}
    for _ in range(IDLE_TURNS):
        for name in ("nothing", *WAYS):
            way = by_channel() if name == "channel" else by_collectives()
            if name != "nothing":
                way.begin(0)
            meet()
            time.sleep(0.1)
            threads = [t.ident for t in threading.enumerate() if t.name.startswith("hvd-hetero-signals")]
            clocks = [time.pthread_getcpuclockid(thread) for thread in threads]
            assert len(clocks) == (name == "channel")
            of_threads = sum(map(time.clock_gettime, clocks))
            began, began_cpu = time.monotonic(), time.process_time()
            time.sleep(IDLE_S)
            idle[name].append((time.process_time() - began_cpu) / (time.monotonic() - began))
            if name == "channel":
                idle["thread"].append((sum(map(time.clock_gettime, clocks)) - of_threads) / IDLE_S)
            meet()
            if name != "nothing":
                way.end()
            if name == "channel":
                way.close()
        if hvd.rank() == 0:
            print("idle", flush=True)
    report({"found": found, "calls": calls, "idle": idle})


if __name__ == "__main__":
    rank_main(int(sys.argv[1]))
