"""Samples of the machine during a training: CPU, memory, and the GPU if NVML sees one.

Only where it is asked for, since load and memory tell how many records there are; for arms that are
not sealed alone, and before the first sealed round of a process: a load that rises and falls tells how
many trials a round ran, and so does the memory that it leaves behind.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path
from typing import Any

from privtune.files import private_folder, write_whole
from privtune.training.engine.compute import check_device
from privtune.views.arm import Sample

UNCOVERED = "; no ε covers what they tell of the records"


class MachineSampler:
    """A sampler of the machine in a thread, which holds its samples in memory until :meth:`stop`.

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
        """End the sampling, and write the samples to a file beside the release, to be logged later.

        Args:
            path: The file that they are written to, as JSON, for its owner alone.
        """
        private_folder(path.parent)
        write_whole(path, json.dumps(self.stop()))

    def _watch(self) -> None:
        """Take a sample at every interval until the end, as the body of the thread."""
        import psutil

        psutil.cpu_percent()  # the first call only sets the mark that the next one measures from
        while not self._done.wait(self._interval):
            self._take()

    def _take(self) -> None:
        """Take a sample: the seconds since the start, and values by MLflow's names of system metrics."""
        import psutil

        system_memory = psutil.virtual_memory()
        process_memory = psutil.Process().memory_info()
        values = {
            "system/cpu_utilization_percentage": float(psutil.cpu_percent()),
            "system/system_memory_usage_megabytes": system_memory.used / 1e6,
            "system/process_memory_megabytes": process_memory.rss / 1e6,
        }
        for index, handle in self._gpus.items():
            values |= _gpu_values(index, handle)
        seconds = time.monotonic() - self._started
        self._samples.append((seconds, values))


def _gpus(device: str) -> tuple[dict[int, Any], str]:
    """Return the training's GPU as NVML's handle by number (none on the CPU), and what is watched."""
    try:
        import pynvml

        pynvml.nvmlInit()
        place = check_device(device)
        if place == "cpu":
            return {}, "CPU and memory"
        _, _, number = place.partition(":")
        handle = pynvml.nvmlDeviceGetHandleByUUID(_uuid_of(place))
        return {int(number or 0): handle}, "CPU, memory and GPU"
    except Exception as error:  # NVML raises its own types, and none at all without a driver
        return {}, f"CPU and memory; GPU off: {error}"


def _uuid_of(device: str) -> str:
    """Return the UUID of a CUDA device: it stays the same when CUDA_VISIBLE_DEVICES hides others."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(torch.device(device)).uuid}"


def _gpu_values(index: int, handle: Any) -> dict[str, float]:
    """Return the memory and utilisation of a GPU, by MLflow's names of system metrics.

    One reading that fails (MIG slices have no utilisation) does not lose the other.
    """
    import pynvml

    values: dict[str, float] = {}
    with contextlib.suppress(pynvml.NVMLError):
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        values[f"system/gpu_{index}_memory_usage_megabytes"] = memory.used / 1e6
    with contextlib.suppress(pynvml.NVMLError):
        rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
        values[f"system/gpu_{index}_utilization_percentage"] = float(rates.gpu)
    return values
