"""A job that stays, and takes cases one after the other: tests ask for them by name, and each is run once.

On ranks, a script of ``workers`` calls `serve` with its cases, functions of no arguments that return what the test is
to judge. In pytest, ``pool[rank][case]`` is what that rank answered: when a test first asks, the script is launched and
all ranks are told the case's name. A case that raises or hangs on any rank ends the job, and its test fails with what
every rank said; the next case begins another job.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import IO, Any

from hvd_hetero.testing.reports import as_json

ADDRESS = "HVD_HETERO_TEST_POOL"
LIMIT_S = 240.0  # of a case: several times what the longest takes on a busy machine
FOREVER_S = 7200.0
_POLL_S = 0.1


class Pool(Sequence["Answers"]):
    """What each rank of a job answers, in the order of ranks."""

    def __init__(
        self, launch: Callable[..., Any], worker: str, ranks: int, args: Sequence[object], **options: Any
    ) -> None:
        self._launch = lambda env: launch(worker, ranks, args, timeout_s=FOREVER_S, env=env, **options)
        self._size = ranks
        self._answers: dict[str, list[Any]] = {}
        self._job: Future[Any] | None = None
        self._ranks: list[Any] = []
        self._open = ExitStack()

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, rank: Any) -> Any:
        return [Answers(self, each) for each in range(self._size)][rank]

    def ask(self, case: str) -> list[Any]:
        """The answers of all ranks."""
        if case not in self._answers:
            if self._job is None:
                try:
                    self._begin()
                except BaseException:
                    self.__exit__()
                    raise
            self._answers[case] = self._heard(case)
        return self._answers[case]

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        """The ranks end as they read the end of what they are told."""
        job, self._job = self._job, None
        self._open.close()
        if job is not None:
            job.result()

    def _begin(self) -> None:
        thread = self._open.enter_context(ThreadPoolExecutor(1))  # closed last: a closed listener frees its job's ranks
        directory = self._open.enter_context(tempfile.TemporaryDirectory())
        listener = self._open.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(address := os.path.join(directory, "pool"))
        listener.listen(self._size)
        listener.settimeout(_POLL_S)
        self._job = thread.submit(self._launch, {ADDRESS: address})
        found: dict[int, Any] = {}
        while len(found) < self._size:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if self._job.done():
                    self._broken("no case")
                continue
            connection.settimeout(None)
            file = connection.makefile("rw")
            self._open.callback(_close, file)
            connection.close()  # the file keeps it open
            found[int(file.readline())] = file
        self._ranks = [found[rank] for rank in range(self._size)]

    def _heard(self, case: str) -> list[Any]:
        try:
            for rank in self._ranks:
                rank.write(case + "\n")
                rank.flush()
            answers = [rank.readline() for rank in self._ranks]
        except ConnectionError:
            answers = [""]
        except BaseException:  # what is answered from now on would be taken for the answer to the next case
            self.__exit__()
            raise
        if not all(answers):
            self._broken(case)
        return [json.loads(answer) for answer in answers]

    def _broken(self, case: str) -> None:
        """Raise what the job's launch raises."""
        try:
            self.__exit__()
        except Exception as error:
            error.add_note(f"in {case}")
            raise
        raise AssertionError(f"{case}: the ranks ended without saying why")


def _close(file: IO[str]) -> None:
    with suppress(OSError):  # what a dead rank has not read is flushed once more
        file.close()


class Answers:
    """What one rank answers to each case."""

    def __init__(self, pool: Pool, rank: int) -> None:
        self._pool, self._rank = pool, rank

    def __getitem__(self, case: str) -> Any:
        return self._pool.ask(case)[self._rank]


def serve(hvd: Any, cases: Mapping[str, Callable[[], Any]], before: Callable[[], None] = lambda: None) -> None:
    """Run the cases that the pool names, each after ``before``, until it names no more; then end this process."""
    hvd.init()
    if "tensorflow" in sys.modules:
        gc.disable()  # it finds next to nothing while a step is traced, and took a twentieth of the time
    # Ranks that wait for one that has failed are ended by horovodrun: each then says where it was.
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[ADDRESS])
        with connection.makefile("rw") as pool:
            answer = str(hvd.rank())
            while True:
                print(answer, file=pool, flush=True)
                faulthandler.cancel_dump_traceback_later()
                if not (case := pool.readline().strip()):
                    break
                faulthandler.dump_traceback_later(LIMIT_S, exit=True)
                if "tensorflow" in sys.modules:
                    # Dead models and iterators of former cases go here, where no thread of TensorFlow is at work: one
                    # that finds them by chance, in a call from a pipeline, may wait for itself.
                    gc.collect()
                    gc.freeze()  # what is left stays for good, and would be looked through before each case
                try:
                    before()
                    answer = as_json(cases[case]())
                except BaseException:  # noqa: BLE001 - told in full, and the process ends
                    traceback.print_exc()
                    sys.stderr.flush()
                    os._exit(1)  # at once: an interpreter that ends in order may wait for ranks that have failed, too
    hvd.shutdown()
    sys.stdout.flush()
    os._exit(0)  # taking a framework down in order takes seconds
