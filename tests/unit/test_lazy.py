"""A training imports what it needs: names of a package are loaded when they are first used."""

import importlib
import subprocess
import sys

import pytest

import hvd_hetero.policies
from hvd_hetero.lazy import lazily

LB_BSP = """
import sys
from hvd_hetero.session import Session
Session("lb-bsp", 0, 2, 8)
print(*sorted(name for name in sys.modules if name.startswith(("hvd_hetero.", "scipy"))))
"""
NOT_NEEDED = (
    *("scipy", "hvd_hetero.topology", "hvd_hetero.barriers", "hvd_hetero.prediction.narx", "hvd_hetero.tools"),
    *("hvd_hetero.prediction.baselines", "hvd_hetero.policies.self_adaptive", "hvd_hetero.measurement.device_profile"),
    *("hvd_hetero.telemetry.run", "hvd_hetero.telemetry.writer"),
)


def test_lb_bsp_loads_no_other_policy_no_other_predictor_and_no_scipy():
    ran = subprocess.run([sys.executable, "-c", LB_BSP], capture_output=True, text=True, check=True)
    assert "hvd_hetero.policies.lb_bsp" in ran.stdout.split()
    assert [name for name in ran.stdout.split() if name.startswith(NOT_NEEDED)] == []


@pytest.mark.parametrize("package", ["policies", "prediction", "allocation", "telemetry"])
def test_all_that_a_package_declares_is_there(package):
    module = importlib.import_module(f"hvd_hetero.{package}")
    assert set(module.__all__) <= set(dir(module))
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'LBBPS'"):
        hvd_hetero.policies.LBBPS  # noqa: B018
    assert lazily("hvd_hetero.policies")("BSP") is hvd_hetero.policies.BSP
