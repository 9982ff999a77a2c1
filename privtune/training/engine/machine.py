"""What a training runs on: the class of its hardware, and the versions that may change its bits."""

from __future__ import annotations

import platform
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from privtune.training.engine.compute import check_device


def hardware(device: str | torch.device) -> str:
    """Return the class of hardware: on the same, the same program repeats its results.

    Args:
        device: As :class:`~privtune.training.engine.compute.Compute` has it.
    """
    place = torch.device(check_device(str(device)))
    if place.type == "cuda":
        return torch.cuda.get_device_name(place)
    return f"{platform.machine()} {_processor()}, {torch.backends.cpu.get_cpu_capability()}"


def versions() -> dict[str, str]:
    """Return the versions of what computes a training, and of the driver where there is one."""
    found = {
        "python": platform.python_version(),
        "privtune": version("privtune"),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "opacus": version("opacus"),
        "numpy": np.__version__,
        "cuda": torch.version.cuda or "",
        "driver": driver(),
    }
    return {name: value for name, value in found.items() if value}


@lru_cache(maxsize=1)
def driver() -> str:
    """Return the version of NVIDIA's driver; nothing without one."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # NVML raises types of its own, and none at all without its library
        return ""


def uuid_of(device: str) -> str:
    """Return the UUID by which NVML knows a CUDA device, whatever hides the others."""
    return f"GPU-{torch.cuda.get_device_properties(torch.device(device)).uuid}"


@lru_cache(maxsize=1)
def _processor() -> str:
    """Return the processor's name."""
    facts = Path("/proc/cpuinfo")
    if not facts.exists():
        return platform.processor()
    named = (line for line in facts.read_text().splitlines() if line.startswith("model name"))
    name = next(named, platform.processor())
    return name.partition(":")[2].strip() or name
