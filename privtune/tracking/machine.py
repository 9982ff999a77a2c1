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
from privtune.views.record import Sample

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
        self._gpus, self._state = _gpus(device)
        self._thread = threading.Thread(target=self._watch, name="privtune-machine", daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, Any]:
        """End the sampling after a last sample; return what was watched, and the samples."""
        self._done.set()
        self._thread.join()
        self._take()
        return {"state": f"{self._state}{UNCOVERED}", "samples": self._samples}

    def keep(self, path: Path) -> None:
        """End the sampling, and keep the samples beside the release: they may be logged later."""
        private_folder(path.parent)
        with open_private(path) as file:
            json.dump(self.stop(), file)

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


def _gpus(device: str) -> tuple[dict[int, Any], str]:
    """Return NVML's handle of a training's own GPU by its number, none on the CPU; and what is watched."""
    try:
        import pynvml

        pynvml.nvmlInit()
        place = check_device(device)
        if place == "cpu":
            return {}, "CPU and memory"
        number = int(place.partition(":")[2] or 0)
        return {number: pynvml.nvmlDeviceGetHandleByUUID(_uuid_of(place))}, "CPU, memory and GPU"
    except Exception as error:  # NVML raises its own types, and none at all without a driver
        return {}, f"CPU and memory; GPU off: {error}"


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
