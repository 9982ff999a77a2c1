"""Which GPU each of several processes on one machine may see."""

from __future__ import annotations

import os

from privtune.errors import InvalidInputError


def gpu_slots(jobs: int, *, gpus: float, device: str) -> list[str | None]:
    """Return what ``CUDA_VISIBLE_DEVICES`` shall be for each of some processes.

    Args:
        jobs: How many processes.
        gpus: GPUs of each; a fraction shares one; 0 gives them out in turn, however many there are.
        device: Where they train, as :class:`~privtune.training.engine.compute.Compute` says it.

    Returns:
        One value a process, as wide apart as can be; ``None`` leaves the environment as it is: for the
        CPU, and for a GPU that was named.

    Raises:
        InvalidInputError: If there are too few GPUs.
    """
    there = [] if device not in {"auto", "cuda"} else _visible()
    if not gpus:
        return [there[n % len(there)] if there else None for n in range(jobs)]
    if gpus < 1:
        slots = there * int(1 / gpus + 1e-9)
    else:
        each = int(gpus)
        slots = [",".join(there[n : n + each]) for n in range(0, len(there) - each + 1, each)]
    if jobs > len(slots):
        raise InvalidInputError(
            "gpus",
            gpus,
            f"for each of {jobs} processes on device {device} needs more GPUs than the {len(there)} "
            "that can be used here",
            "Ask for fewer jobs, or for a fraction.",
        )
    return list(slots[:jobs])


def _visible() -> list[str]:
    """Return the GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(n) for n in range(count)] if named is None else named.split(",")[:count]
