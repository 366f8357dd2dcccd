"""What `scripts/gpu_proof.sh` runs on a GPU, on CPUs: memory, whose end is made up here, and scaled losses."""

from __future__ import annotations

from pathlib import Path

import pytest
from limits import TORCH_S

from hvd_hetero.testing import torchrun

pytestmark = pytest.mark.distributed
RANK = Path(__file__).parents[2] / "benchmarks" / "gpu" / "_rank.py"
NAMES = {"bsp", "lb-bsp", "lb-bsp, gpu", "non-blocking", "elastic-bsp"}


def test_the_proof_for_gpus_survives_the_end_of_memory_and_compares_with_one_process(launch):
    arguments = ["memory", "convolutional", "cpu", "gloo", "", 0]
    done = launch(RANK, 2, arguments, framework="torch.distributed", timeout_s=TORCH_S, starter=torchrun(2))
    told = done.reports[1]
    assert set(told) == NAMES
    for name, found in told.items():
        assert found["failures"][0] > 0, name
        assert found["difference"] < 1e-10 < found["moved"], name
        assert found["between_ranks"] == 0.0, name
        assert found["epochs"] > 1, name
        assert found["each_once"], name


def test_the_proof_for_gpus_scales_losses_beside_fsdp2_and_compares_with_one_process(launch):
    arguments = ["exact beside FSDP2", "convolutional", "cpu", "gloo", "", 0]
    done = launch(RANK, 2, arguments, framework="torch.distributed", timeout_s=TORCH_S, starter=torchrun(2))
    for told in done.reports:
        assert told["difference"] < 1e-10 < told["moved"]
        assert told["splits"] > 5, "it climbs"
