"""Jobs that run beside one another, since much of each is waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

AT_ONCE = 3


@contextmanager
def side_by_side(request: Any, jobs: Mapping[Any, Callable[[], Any]]) -> Iterator[dict[Any, Future[Any]]]:
    """Start those of the jobs that are parameters of tests of this file which are to run."""
    own = [item for item in request.session.items if item.path == request.path]
    here = [item.callspec.params for item in own if hasattr(item, "callspec")]
    wanted = {value: jobs[value] for params in here for value in params.values() if value in jobs}
    with ThreadPoolExecutor(AT_ONCE) as threads:
        started = {name: threads.submit(job) for name, job in wanted.items()}
        try:
            yield started
        finally:
            threads.shutdown(cancel_futures=True)
