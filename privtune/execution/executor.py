"""Where the rows of rounds are trained, and which GPU each of several processes sees."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal, get_args

from privtune.errors import InvalidInputError
from privtune.numbers import is_number

ExecutorName = Literal["inline", "processes", "external", "ray", "slurm"]


@dataclass(frozen=True)
class Executor:
    """Where the rows of rounds are trained, as ``Study.run`` says. It changes no result."""

    name: ExecutorName = "inline"
    jobs: int = 1
    # Of each worker; a fraction shares one. With 0, processes on CUDA take the GPUs in turn, workers on
    # Ray get none.
    gpus: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)  # submitit's, for SLURM

    def __post_init__(self) -> None:
        if self.name not in get_args(ExecutorName):
            allowed = f"must be one of {', '.join(get_args(ExecutorName))}"
            raise InvalidInputError("executor", self.name, allowed)
        if not isinstance(self.jobs, Integral) or self.jobs < 1:
            allowed = "must be a whole number of at least 1, or -1 for one a processor"
            raise InvalidInputError("n_jobs", self.jobs, allowed)
        if self.jobs > 1 and self.name in {"inline", "external"}:
            why = {"inline": "is this process alone", "external": "starts no worker by itself"}
            allowed = f"is not for executor {self.name}, which {why[self.name]}"
            raise InvalidInputError("n_jobs", self.jobs, allowed, "Leave it out, or say processes.")
        gpus = self.gpus
        if not (math.isfinite(gpus) and (0 <= gpus < 1 or (gpus > 0 and gpus == int(gpus)))):
            allowed = "must be 0, a fraction below 1, or a whole number"
            raise InvalidInputError("gpus", self.gpus, allowed)
        if gpus and self.name not in {"processes", "ray"}:
            raise InvalidInputError("gpus", gpus, f"is for processes and ray, not for {self.name}")

    @classmethod
    def of(cls, given: str | Mapping[str, Any] | None, jobs: int) -> Executor:
        """Return an executor: processes for more than one job, unless one is given."""
        if jobs == -1:
            jobs = os.cpu_count() or 1
        if not isinstance(given, Mapping):
            name = given or ("inline" if jobs == 1 else "processes")
            return cls(name, jobs)  # type: ignore[arg-type]
        options = dict(given)
        name = options.pop("type", None)
        gpus = options.pop("gpus", 0.0) if name != "slurm" else 0.0
        if options and name != "slurm":
            raise InvalidInputError("executor", sorted(options), "takes type and gpus")
        if not is_number(gpus):
            raise InvalidInputError("gpus", gpus, "must be a number")
        return cls(name, jobs, float(gpus), options)

    def slots(self, device: str) -> list[str | None]:
        """Return ``CUDA_VISIBLE_DEVICES`` of each process; None leaves it as it is."""
        if self.name != "processes":
            return []
        there = _visible() if device in {"auto", "cuda"} else []
        if not self.gpus:
            return [there[n % len(there)] if there else None for n in range(self.jobs)]
        each = int(self.gpus)
        if self.gpus < 1:
            slots = there * int(1 / self.gpus + 1e-9)
        else:
            slots = [",".join(there[n : n + each]) for n in range(0, len(there) - each + 1, each)]
        if self.jobs > len(slots):
            raise InvalidInputError(
                "gpus",
                self.gpus,
                f"for each of {self.jobs} processes on device {device} needs more GPUs than the "
                f"{len(there)} that can be used here",
                "Ask for fewer jobs, or for a fraction.",
            )
        return list(slots[: self.jobs])


def _visible() -> list[str]:
    """Return the GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(n) for n in range(count)] if named is None else named.split(",")[:count]
