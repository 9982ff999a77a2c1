"""What a training does to the machine: CPU, memory, and the GPU where NVML sees one.

Only where it is asked for, since load and memory tell how many records there are; for arms that are
not sealed alone, and before the first sealed round of a process: a load that rises and falls tells how
many trials a round ran, and so does the memory that it leaves behind.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from privtune.files import open_private, private_folder
from privtune.training.engine.compute import check_device

Sample = tuple[float, dict[str, float]]

SEALED_STATE = "off: they would show how long a sealed round took"
SWITCH = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"  # MLflow's own
UNWATCHED_STATE = (
    "off: they tell how many records there are, or how large a sealed round before them was; "
    f"{SWITCH}=true logs them for arms that are not sealed, before the first sealed one"
)
UNCOVERED = "; no ε covers what they tell of the records"


class MachineSampler:
    """Samples the machine in a thread, into memory, from the start to :meth:`stop`.

    Args:
        interval: Seconds between two samples.
        device: Where the training runs: of other GPUs, which others may use, nothing is said.
    """

    def __init__(self, interval: float = 1.0, device: str = "auto") -> None:
        self._interval = interval
        self._started = time.monotonic()
        self._samples: list[Sample] = []
        self._done = threading.Event()
        self._gpus = _gpus(device)
        self._thread = threading.Thread(target=self._watch, name="privtune-machine", daemon=True)
        self._thread.start()

    def stop(self) -> list[Sample]:
        """End the sampling, take a last sample, and return all as (seconds since start, values)."""
        self._done.set()
        self._thread.join()
        self._take()
        return self._samples

    def _watch(self) -> None:
        import psutil

        psutil.cpu_percent()  # the first call only sets the mark that the next one measures from
        while not self._done.wait(self._interval):
            self._take()

    def _take(self) -> None:
        import psutil

        memory = psutil.virtual_memory()
        values = {
            "system/cpu_utilization_percentage": float(psutil.cpu_percent()),
            "system/system_memory_usage_megabytes": memory.used / 1e6,
            "system/process_memory_megabytes": psutil.Process().memory_info().rss / 1e6,
        }
        for index, handle in self._gpus.items():
            values |= _gpu_values(index, handle)
        self._samples.append((time.monotonic() - self._started, values))


def machine_state(*, sealed: bool, watched: bool = True) -> str:
    """Return which system metrics an arm has, or why it has none, for its tag."""
    if sealed or not watched:
        return SEALED_STATE if sealed else UNWATCHED_STATE
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # NVML raises its own types, and none at all without a driver
        return f"CPU and memory; GPU off: {error}{UNCOVERED}"
    return f"CPU, memory and GPU{UNCOVERED}"


def write_samples(samples: list[Sample], path: Path) -> None:
    """Keep samples beside the release, so that they can still be logged later."""
    private_folder(path.parent)
    with open_private(path) as file:
        json.dump(samples, file)


def read_samples(path: Path) -> list[Sample]:
    """Read what :func:`write_samples` wrote; nothing if there is nothing."""
    if not path.exists():
        return []
    return [(seconds, values) for seconds, values in json.loads(path.read_text(encoding="utf-8"))]


def _gpus(device: str) -> dict[int, Any]:
    """Return NVML's handle of a training's own GPU, by its number; nothing on the CPU."""
    try:
        import pynvml

        place = check_device(device)
        if place == "cpu":
            return {}
        pynvml.nvmlInit()
        number = int(place.partition(":")[2] or 0)
        return {number: pynvml.nvmlDeviceGetHandleByUUID(_uuid_of(place))}
    except Exception:  # no NVML, no driver, no permission: the tag says which
        return {}


def _uuid_of(device: str) -> str:
    """Return the UUID by which NVML knows a CUDA device, whatever hides the others."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(torch.device(device)).uuid}"


def _gpu_values(index: int, handle: Any) -> dict[str, float]:
    import pynvml

    readings: dict[str, Callable[[], float]] = {
        "memory_usage_megabytes": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used / 1e6,
        "utilization_percentage": lambda: float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu),
    }
    values: dict[str, float] = {}
    for name, read in readings.items():
        # One reading that fails (MIG slices have no utilisation) must not lose the other.
        with contextlib.suppress(pynvml.NVMLError):
            values[f"system/gpu_{index}_{name}"] = read()
    return values
