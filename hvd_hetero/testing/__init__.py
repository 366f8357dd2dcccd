"""Tests of distributed jobs: launch ranks under a watchdog, make some of them slow, collect their reports."""

from hvd_hetero.testing.faults import Faults
from hvd_hetero.testing.hosts import Elastic
from hvd_hetero.testing.launch import (
    KEEP_MEMORY,
    HangError,
    LaunchError,
    LaunchResult,
    RankError,
    launch,
    torchrun,
)
from hvd_hetero.testing.quota import CpuQuota, QuotaSupport, QuotaUnavailableError, quota_available, remove_stale_groups
from hvd_hetero.testing.reports import report
from hvd_hetero.testing.slowdown import ProportionalSleep, QuotaSlowDown, SlowDown, pin_to_core, slow_down
from hvd_hetero.testing.thread_ranks import ThreadHangError, ThreadRankError, run_on_threads

__all__ = [
    "KEEP_MEMORY",
    "CpuQuota",
    "Elastic",
    "Faults",
    "HangError",
    "LaunchError",
    "LaunchResult",
    "ProportionalSleep",
    "QuotaSlowDown",
    "QuotaSupport",
    "QuotaUnavailableError",
    "RankError",
    "SlowDown",
    "ThreadHangError",
    "ThreadRankError",
    "launch",
    "pin_to_core",
    "quota_available",
    "remove_stale_groups",
    "report",
    "run_on_threads",
    "slow_down",
    "torchrun",
]
