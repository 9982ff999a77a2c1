"""Devices, stack sizes, precision and hardware names of trainings.

Importing this module does not import torch.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from privtune.errors import InvalidInputError
from privtune.names import refuse_name

if TYPE_CHECKING:
    import torch

_DEVICE = re.compile(r"auto|cpu|cuda(:(0|[1-9]\d{0,3}))?")


@dataclass(frozen=True)
class Compute:
    """The device of trainings, and how many candidates are stacked.

    Attributes:
        device: As ``check_device`` takes it.
        stack: Candidates that are trained as one tensor, or ``"auto"`` by the memory model.
    """

    device: str = "auto"
    stack: int | Literal["auto"] = "auto"

    def given(self, device: str | None, stack: int | Literal["auto"] | None) -> Compute:
        """Return the settings with another device or stack size where one is given; check both."""
        device = self.device if device is None else device
        check_device(device)
        return Compute(device, self.stack if stack is None else check_stack(stack))


def check_stack(value: object) -> int | Literal["auto"]:
    """Return the number of candidates to train at once, checked: a whole number above 0, or ``"auto"``.

    From the command line it comes as text, from Python as a number.
    """
    if value == "auto":
        return "auto"
    number = str(value)
    if not number.isdecimal() or int(number) < 1:
        raise InvalidInputError("stack", value, "must be a whole number of at least 1, or auto")
    return int(number)


def check_device(device: str, *, here: bool = True) -> str:
    """Return a checked device name; ``"auto"`` becomes CUDA if the machine has it, else the CPU.

    A device that is not there is refused when it is named, and not by torch's own error in the middle
    of a study.

    Args:
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        here: Whether it must be there on this machine; a spec may be written for another one.
    """
    if not isinstance(device, str) or not _DEVICE.fullmatch(device):
        refuse_name(
            "device",
            device,
            ("auto", "cpu", "cuda"),
            also="or cuda:N",
        )
    if not here or device == "cpu":
        return device
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        if count:
            return "cuda"
        return "cpu"
    number = int(device.partition(":")[2] or 0)
    if number < count:
        return device
    if count:
        has = f"this machine shows {count}, cuda:0 to cuda:{count - 1}"
    else:
        has = "there is none here"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    raise InvalidInputError(
        "device",
        device,
        f"needs a CUDA device that is there, and {has}",
        "Give auto or cpu." if hidden is None else f"CUDA_VISIBLE_DEVICES is {hidden!r}.",
    )


def full_precision(device: torch.device) -> bool:
    """Say whether torch computes float32 products on a device with all digits, without TF32.

    TF32 keeps 10 binary digits of a factor, and the bounds on rounding in ``rules`` count on 23.
    """
    import torch

    backend: Any = torch.backends.mkldnn if device.type == "cpu" else torch.backends.cuda
    products = getattr(backend, "matmul", None)
    precision = getattr(products, "fp32_precision", None)
    if precision is None:  # before torch 2.9 one setting stands for all
        return torch.get_float32_matmul_precision() == "highest"
    return precision in ("none", "ieee")


def is_autocasting() -> bool:
    """Say whether torch's autocast is active, which picks the precision of each operation."""
    import torch

    return any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


def refuse_autocast() -> None:
    """Refuse to train inside of ``torch.autocast``, as clipped sums are computed in float32."""
    if is_autocasting():
        raise InvalidInputError(
            "precision",
            "torch.autocast",
            "must not stand around a training, whose clipped sums are computed in float32",
            "Leave it out, and pass precision='bfloat16' for fewer digits in the passes.",
        )


_settings = threading.Lock()
_settings_before: list[
    dict[str, Any]
] = []  # one for each training under way, all of them the first one's


@contextmanager
def full_float32() -> Iterator[None]:
    """Make CUDA compute float32 with all digits in the ``with`` block, and add up bfloat16 in it.

    cuDNN's convolutions and recurrent layers use TF32 unless told otherwise, which keeps 10 binary digits
    of a factor. The engine's own rules use 23, so its check would find that the two differ and would train
    such models a record at a time. A factor of bfloat16 has an error that is the same for norm and sum; a
    sum that is rounded to bfloat16 on the way would lose what no made-up record of a check shows.
    """
    wanted: dict[str, Any] = {"sums": False}
    for name in _cudnn_precisions():
        wanted[name] = "ieee"
    if len(wanted) == 1:  # before torch 2.9 one setting stands for all of cuDNN
        wanted["cudnn"] = False
    # The settings are the process's: of trainings in several threads the last one puts them back.
    with _settings:
        before = _settings_before[0] if _settings_before else {n: _setting(n) for n in wanted}
        _settings_before.append(before)
        for name, value in wanted.items():
            _set(name, value)
    try:
        yield
    finally:
        with _settings:
            before = _settings_before.pop()
            if not _settings_before:
                for name, value in before.items():
                    _set(name, value)


def _cudnn_precisions() -> Iterator[str]:
    """Yield the parts of cuDNN whose precision this version of torch sets apart."""
    import torch

    for name in ("conv", "rnn"):
        if hasattr(getattr(torch.backends.cudnn, name, None), "fp32_precision"):
            yield name


def _place_of_setting(name: str) -> tuple[Any, str]:
    """Return the object that holds one of torch's settings of precision, and the attribute's name."""
    import torch

    backends: Any = torch.backends
    if name == "sums":
        return backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"
    if name == "cudnn":
        return backends.cudnn, "allow_tf32"
    return getattr(backends.cudnn, name), "fp32_precision"


def _setting(name: str) -> Any:
    """Return one of torch's settings of precision."""
    holder, attribute = _place_of_setting(name)
    return getattr(holder, attribute)


def _set(name: str, value: Any) -> None:
    """Change one of torch's settings of precision."""
    holder, attribute = _place_of_setting(name)
    setattr(holder, attribute, value)


def release_memory() -> None:
    """Give memory that is free in this process back to the system, where the C library can (glibc).

    A check or a capture leaves holes between what it keeps, which a pass of another shape does not fill.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def hardware(device: str | torch.device) -> str:
    """Return a GPU's name, or a CPU's model and vector width: on equal hardware, results repeat exactly.

    Of a CPU its model and widest vectors count, since libraries choose their kernels by them.
    """
    import torch

    place = torch.device(check_device(str(device)))
    if place.type == "cuda":
        return torch.cuda.get_device_name(place)
    return f"{platform.machine()} {_processor()}, {torch.backends.cpu.get_cpu_capability()}"


def versions() -> dict[str, str]:
    """Return the versions of Python, the libraries and the GPU driver, by name; leave out absent ones.

    Part of a checkpoint and of what a study records: another version may give other last digits.
    """
    from importlib.metadata import version

    import numpy as np
    import torch

    numbers = {
        "python": platform.python_version(),
        "privtune": version("privtune"),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "opacus": version("opacus"),
        "numpy": np.__version__,
        "cuda": torch.version.cuda or "",
        "driver": driver(),
    }
    return {name: value for name, value in numbers.items() if value}


@lru_cache(maxsize=1)
def driver() -> str:
    """Return the version of NVIDIA's driver, or an empty text if there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # NVML raises types of its own, and none at all without its library
        return ""


@lru_cache(maxsize=1)
def _processor() -> str:
    """Return the model name of the processor."""
    facts = Path("/proc/cpuinfo")
    if not facts.exists():
        return platform.processor()
    models = (line for line in facts.read_text().splitlines() if line.startswith("model name"))
    name = next(models, platform.processor())
    return name.partition(":")[2].strip() or name
