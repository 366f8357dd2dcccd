"""What looks on at a training of PyTorch neither stops it nor tears its ranks apart."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
from test_torch_on_threads import dense, train  # noqa: E402

from hvd_hetero.policies import StaticAllocation  # noqa: E402
from hvd_hetero.telemetry import Telemetry  # noqa: E402
from hvd_hetero.testing import run_on_threads  # noqa: E402
from torch_hooks import LoadBalance  # noqa: E402

ROUNDS = 6  # two epochs of 26 samples in rounds of 8, the last of each with two more
MODELS = [dense().state_dict()] * 3  # the same for every case


def trained(path=None, look_on=lambda balance, rank: None, ranks=3):
    """Train on threads; return the parameters of every rank."""

    def job(rank):
        telemetry = None if path is None else Telemetry(path / f"of rank {rank}.jsonl", every=2)
        balance = LoadBalance(
            StaticAllocation([1, 2, 1]), global_batch=8, telemetry=telemetry, progress=path is not None
        )
        look_on(balance, rank)
        model = dense()
        model.load_state_dict(MODELS[rank])
        parameters, _ = train(model, balance)
        return parameters, balance.rounds

    return run_on_threads(job, ranks=ranks)


def test_rank_0_calls_what_is_registered_on_all_ranks(tmp_path):
    calls = {rank: [] for rank in range(3)}

    def look_on(balance, rank):
        balance.on_round(calls[rank].append)

    trained(tmp_path, look_on)
    assert [record["round"] for record in calls[0]] == list(range(ROUNDS))
    assert (calls[1], calls[2]) == ([], [])
    assert [sum(record["samples"]) for record in calls[0]] == [8, 8, 10] * 2
    assert calls[0][-1]["wait_s"] == [None] * 3
    (file,) = tmp_path.iterdir()
    assert file.name == "of rank 0.jsonl", "no other rank writes one"
    written = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    for line, record in zip(written, calls[0][::2], strict=True):
        assert list(line) == list(record)
        assert (line["round"], line["samples"]) == (record["round"], record["samples"])
        assert line["compute_s"] == pytest.approx(record["compute_s"], rel=1e-6)


def test_a_function_that_raises_changes_nothing_and_is_told_once(caplog):
    called = []

    def look_on(balance, rank):
        def fails(record):
            called.append(record["round"])
            if record["round"] == 3:
                raise RuntimeError("no space left")

        balance.on_round(fails)

    plain, watched = trained(), trained(None, look_on)
    assert called == [0, 1, 2, 3]
    assert [rounds for _, rounds in watched] == [ROUNDS] * 3
    for (one, _), (other, _) in zip(plain, watched, strict=True):
        assert torch.equal(one, other)
    assert [record.levelname for record in caplog.records if "called no more" in record.getMessage()] == ["ERROR"]


def test_every_k_th_round_on_demand():
    seen = []
    trained(None, lambda balance, rank: balance.on_round(lambda record: seen.append(record["round"]), every=3))
    assert seen == [0, 3]
