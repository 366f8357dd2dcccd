"""What the tools for tests refuse: each error names the parameter, and nothing was started or ordered."""

import math

import pytest

from hvd_hetero.testing import (
    CpuQuota,
    Elastic,
    Faults,
    ProportionalSleep,
    QuotaSlowDown,
    launch,
    slow_down,
)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda _: launch("module", 0), r"ranks.* 0\b"),
        (lambda _: launch("module", 1, timeout_s=math.nan), r"timeout_s.* nan"),
        (lambda _: launch("not/there.py", 1), r"'not/there\.py'"),
        *((lambda _, factor=factor: slow_down(factor, method="sleep"), "factor") for factor in (0.5, -1.0, math.nan)),
        (lambda _: slow_down(2.0, method="naps"), r"method.*'auto', 'quota' or 'sleep'.*'naps'"),
        (lambda _: ProportionalSleep(2.0).pay(-0.1), "compute_s"),
        (lambda _: QuotaSlowDown(1.0, cores=0), "cores"),
        *((lambda _, share=share: CpuQuota(share), "share") for share in (0.0, -0.5, math.inf)),
        (lambda _: CpuQuota(0.5, period_us=500), "period_us"),
        (lambda folder: Faults(folder).kill(rank=-1, at=0), "rank and at"),
        (lambda folder: Faults(folder).slow(0, 0, 0), r"factor.* 0\b"),
        (lambda folder: Faults(folder).freeze(0, 0, -1), "seconds"),
        (lambda folder: Elastic(least=3).options(folder, 2), r"least.* 2 ranks"),
        (lambda _: Faults().kill(0, 0).happened(), "directory"),
    ],
)
def test_it_is_refused_by_the_name_of_the_parameter(call, told, tmp_path, monkeypatch):
    monkeypatch.delenv("HVD_HETERO_RUN_DIR", raising=False)
    with pytest.raises(ValueError, match=told):
        call(tmp_path)
    assert list(tmp_path.iterdir()) == []
