"""System metrics: the GPU's through NVML, of which a test has only the interface."""

from __future__ import annotations

import sys
import types

import pytest

from privtune.tracking import machine
from privtune.tracking.machine import UNCOVERED, MachineSampler

pytestmark = pytest.mark.quick


class NVMLError(Exception):
    pass


def nvml(*, driver: bool = True, mig: bool = False) -> types.ModuleType:
    """An NVML with two GPUs; of MIG slices it cannot tell the utilisation."""
    module = types.ModuleType("pynvml")

    def init() -> None:
        if not driver:
            raise NVMLError("Driver Not Loaded")

    def rates(handle: int) -> types.SimpleNamespace:
        if mig:
            raise NVMLError("Not Supported")
        return types.SimpleNamespace(gpu=40 + handle)

    contents = {
        "NVMLError": NVMLError,
        "nvmlInit": init,
        "nvmlDeviceGetHandleByUUID": lambda uuid: int(uuid.removeprefix("GPU-")),
        "nvmlDeviceGetMemoryInfo": lambda h: types.SimpleNamespace(used=1_000_000 * (h + 1)),
        "nvmlDeviceGetUtilizationRates": rates,
    }
    for name, value in contents.items():
        setattr(module, name, value)
    return module


@pytest.fixture(autouse=True)
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(machine, "_uuid_of", lambda device: f"GPU-{device[5:] or 0}")


def watched(device: str = "auto") -> tuple[str, dict[str, float]]:
    kept = MachineSampler(interval=60.0, device=device).stop()
    (*_, (_, values)) = kept["samples"]
    assert values["system/process_memory_megabytes"] > 1
    return kept["state"], {name: value for name, value in values.items() if "gpu" in name}


@pytest.mark.parametrize(("device", "number"), [("auto", 0), ("cuda", 0), ("cuda:1", 1)])
def test_memory_and_utilisation_of_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, number: int
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    values = {
        f"system/gpu_{number}_memory_usage_megabytes": number + 1.0,
        f"system/gpu_{number}_utilization_percentage": number + 40.0,
    }
    assert watched(device) == (f"CPU, memory and GPU{UNCOVERED}", values)
    assert watched("cpu") == (f"CPU and memory{UNCOVERED}", {})


def test_a_reading_that_fails_loses_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(mig=True))
    assert watched()[1] == {"system/gpu_0_memory_usage_megabytes": 1.0}


@pytest.mark.parametrize(
    ("package", "why"), [(nvml(driver=False), "Driver Not Loaded"), (None, "")]
)
def test_without_a_driver_or_the_package_the_tag_says_why(
    monkeypatch: pytest.MonkeyPatch, package: types.ModuleType | None, why: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", package)
    state, values = watched()
    assert state.startswith(f"CPU and memory; GPU off: {why}")
    assert values == {}
