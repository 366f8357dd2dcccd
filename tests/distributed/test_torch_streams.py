"""A stream that is killed in the middle, and goes on with other ranks and processes: every sample once, exactly."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path

import pytest
from limits import TORCH_S

from hvd_hetero.testing import RankError

pytestmark = pytest.mark.distributed
pytest.importorskip("datasets")
KILLED_AT = 93


@pytest.fixture(scope="module")
def job():
    pytest.importorskip("torch")
    path = Path(__file__).parent / "workers" / "torch_streams.py"
    spec = importlib.util.spec_from_file_location("torch_streams_job", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def steps(path, attempt, ranks):
    """The indices of each rank in each round."""
    rounds = {}
    for rank in range(ranks):
        for line in (path / f"steps {attempt} {rank}").read_text().splitlines():
            number, indices = json.loads(line)
            rounds.setdefault(number, {})[rank] = indices
    return rounds


def test_a_stream_that_is_killed_goes_on_with_other_ranks_and_processes(launch, tmp_path, job):
    import torch

    with pytest.raises(RankError):
        launch(
            "torch_streams.py", 3, [tmp_path, "first", KILLED_AT, 0], framework="torch.distributed", timeout_s=TORCH_S
        )
    launch("torch_streams.py", 2, [tmp_path, "second", -1, 2], framework="torch.distributed", timeout_s=TORCH_S)
    before, after = steps(tmp_path, "first", 3), steps(tmp_path, "second", 2)
    resumed_at = min(after)
    assert KILLED_AT - job.SAVES_EVERY <= resumed_at <= KILLED_AT
    rounds = [ranks for number, ranks in sorted(before.items()) if number < resumed_at]
    done = [i for ranks in rounds for indices in ranks.values() for i in indices]
    rounds += [ranks for _, ranks in sorted(after.items())]
    visited = Counter(i for ranks in rounds for indices in ranks.values() for i in indices)
    assert visited == Counter(range(job.SAMPLES))

    fast, *_, slow = (sum(len(ranks[rank]) for ranks in rounds[20:resumed_at]) for rank in range(3))
    assert fast > 1.5 * slow
    again = [int(line) for log in tmp_path.glob("read second-*") for line in log.read_text().split()]
    assert len(set(again)) == len(again), "the second job reads no sample twice"
    window = 3 * 64 + 5 * job.GLOBAL_BATCH  # what three ranks had read of a turn, and ahead
    assert len(set(again) & set(done)) <= window < len(done) / 5

    model = job.model_of()
    optimizer = job.optimizer_of(model)
    for ranks in rounds:
        optimizer.zero_grad()
        job.step(model, [i for indices in ranks.values() for i in indices]).backward()
        optimizer.step()
    trained = torch.load(tmp_path / "run.pt", weights_only=True)["parts"]["model"]
    for name, value in model.state_dict().items():
        assert (trained[name] - value).abs().max() <= 1e-9
