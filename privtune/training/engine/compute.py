"""Where trainings are computed, how many at once, and on what hardware.

Importing this module does not import torch.
"""

from __future__ import annotations

import os
import platform
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from privtune.errors import InvalidInputError

if TYPE_CHECKING:
    import torch

_DEVICE = re.compile(r"auto|cpu|cuda(:(0|[1-9]\d{0,3}))?")


@dataclass(frozen=True)
class Compute:
    """How to compute trainings."""

    device: str = "auto"
    stack: int | Literal["auto"] = "auto"

    def given(self, device: str | None, stack: int | Literal["auto"] | None) -> Compute:
        """Return it with a device and a stack in place of its own, where they are given, and checked."""
        device = self.device if device is None else device
        check_device(device)
        return Compute(device, self.stack if stack is None else check_stack(stack))


def check_stack(value: object) -> int | Literal["auto"]:
    """Return how many candidates to train at once, from what a user gave."""
    if value == "auto":
        return "auto"
    number = str(value)
    if not number.isdecimal() or int(number) < 1:
        raise InvalidInputError("stack", value, "must be a whole number of at least 1, or auto")
    return int(number)


def check_device(device: str, *, here: bool = True) -> str:
    """Return where to train, as torch names it; ``"auto"`` is CUDA where there is one."""
    if not isinstance(device, str) or not _DEVICE.fullmatch(device):
        raise InvalidInputError("device", device, "must be auto, cpu, cuda or cuda:N")
    if not here or device == "cpu":
        return device
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return "cuda" if count else "cpu"
    number = int(device.partition(":")[2] or 0)
    if number < count:
        return device
    has = (
        f"this machine shows {count}, cuda:0 to cuda:{count - 1}" if count else "there is none here"
    )
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    raise InvalidInputError(
        "device",
        device,
        f"needs a CUDA device that is there, and {has}",
        "" if hidden is None else f"CUDA_VISIBLE_DEVICES is {hidden!r}.",
    )


def full_precision(device: torch.device) -> bool:
    """Say whether products of float32 keep all digits there: torch may be told to take fewer."""
    import torch

    backend = torch.backends.mkldnn if device.type == "cpu" else torch.backends.cuda
    told = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
    if told is None:  # before torch 2.9 one setting stands for all
        return torch.get_float32_matmul_precision() == "highest"
    return told in ("none", "ieee")


def is_autocasting() -> bool:
    """Say whether torch chooses the numbers of what is computed now."""
    import torch

    return any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


def refuse_autocast() -> None:
    """Refuse a training inside of autocast, which would say nothing about its clipped sums."""
    if is_autocasting():
        raise InvalidInputError(
            "precision",
            "torch.autocast",
            "must not stand around a training, whose clipped sums are computed in float32",
            "Leave it out, and pass precision='bfloat16' for fewer digits in the passes.",
        )


_sums = threading.Lock()
_summing: list[bool] = []  # for each training under way, what the setting was before the first


@contextmanager
def sums_in_float32() -> Iterator[None]:
    """Let no product of bfloat16 on CUDA add its parts in bfloat16: no self-check would bound that."""
    import torch

    flags = torch.backends.cuda.matmul
    # The setting is the process's: of trainings in several threads the last one puts it back.
    with _sums:
        _summing.append(_summing[0] if _summing else flags.allow_bf16_reduced_precision_reduction)
        flags.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        with _sums:
            before = _summing.pop()
            if not _summing:
                flags.allow_bf16_reduced_precision_reduction = before


def hardware(device: str | torch.device) -> str:
    """Return the class of hardware: on the same, the same program repeats its results."""
    import torch

    place = torch.device(check_device(str(device)))
    if place.type == "cuda":
        return torch.cuda.get_device_name(place)
    return f"{platform.machine()} {_processor()}, {torch.backends.cpu.get_cpu_capability()}"


def versions() -> dict[str, str]:
    """Return the versions of what computes a training, and of the driver where there is one."""
    from importlib.metadata import version

    import numpy as np
    import torch

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


@lru_cache(maxsize=1)
def _processor() -> str:
    """Return the processor's name."""
    facts = Path("/proc/cpuinfo")
    if not facts.exists():
        return platform.processor()
    named = (line for line in facts.read_text().splitlines() if line.startswith("model name"))
    name = next(named, platform.processor())
    return name.partition(":")[2].strip() or name
