"""Where the rows of rounds are trained, and which GPU each of several processes sees."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import cycle, islice
from numbers import Integral
from typing import Any, Literal, get_args

from privtune.errors import InvalidInputError
from privtune.names import refuse_name
from privtune.numbers import is_number

ExecutorName = Literal["inline", "processes", "external", "ray", "slurm"]

_ALONE = {"inline": "is this process alone", "external": "starts no worker by itself"}
"""Executors that take no number of jobs, and why."""


@dataclass(frozen=True)
class Executor:
    """The place where rows of rounds are trained: in this process, in others, on Ray or on SLURM.

    Attributes:
        name: What starts the workers.
        jobs: How many there are at once.
        gpus: Of each worker; a fraction shares one. With 0, processes on CUDA take the GPUs in turn,
            workers on Ray get none.
        options: Those of submitit, for SLURM.
    """

    name: ExecutorName = "inline"
    jobs: int = 1
    gpus: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = get_args(ExecutorName)
        if self.name not in names:
            refuse_name("executor", self.name, names)
        if not isinstance(self.jobs, Integral) or self.jobs < 1:
            allowed = "must be a whole number of at least 1, or -1 for one a processor"
            raise InvalidInputError("n_jobs", self.jobs, allowed)
        if self.jobs > 1 and self.name in _ALONE:
            allowed = f"is not for executor {self.name}, which {_ALONE[self.name]}"
            raise InvalidInputError("n_jobs", self.jobs, allowed, "Leave it out, or say processes.")
        if not _is_share(self.gpus):
            allowed = "must be 0, a fraction below 1, or a whole number"
            raise InvalidInputError("gpus", self.gpus, allowed)
        if self.gpus and self.name not in {"processes", "ray"}:
            allowed = f"is for processes and ray, not for {self.name}"
            raise InvalidInputError("gpus", self.gpus, allowed)

    @classmethod
    def of(
        cls,
        executor: str | Mapping[str, Any] | None,
        jobs: int,
    ) -> Executor:
        """Return the executor of a name or mapping; if none is given, processes for more than one job.

        Args:
            executor: Its name; or a mapping of its ``type`` and ``gpus``, for SLURM of submitit's options.
            jobs: How many workers; -1 for one a processor.

        Raises:
            InvalidInputError: If an option is unknown, or goes with another executor.
        """
        if jobs == -1:
            jobs = os.cpu_count() or 1
        if not isinstance(executor, Mapping):
            name = executor or ("inline" if jobs == 1 else "processes")
            return cls(name, jobs)  # type: ignore[arg-type]
        options = dict(executor)
        name = options.pop("type", None)
        if name == "slurm":
            # GPUs are among submitit's options there, by names of its own.
            return cls(name, jobs, 0.0, options)
        gpus = options.pop("gpus", 0.0)
        if options:
            raise InvalidInputError("executor", sorted(options), "takes type and gpus")
        if not is_number(gpus):
            raise InvalidInputError("gpus", gpus, "must be a number")
        return cls(name, jobs, float(gpus), options)

    def slots(self, device: str) -> list[str | None]:
        """Return ``CUDA_VISIBLE_DEVICES`` of each process; None leaves it as it is.

        Raises:
            InvalidInputError: If there are fewer GPUs than the processes ask for. Two that share one without
                a word could run out of its memory in the middle of a round.
        """
        if self.name != "processes":
            return []
        gpus = _visible_gpus() if device in {"auto", "cuda"} else []
        if not self.gpus and not gpus:
            return [None] * self.jobs
        if not self.gpus:
            return list(islice(cycle(gpus), self.jobs))
        slots = self._shares_of(gpus)
        if self.jobs > len(slots):
            raise InvalidInputError(
                "gpus",
                self.gpus,
                f"for each of {self.jobs} processes on device {device} needs more GPUs than the "
                f"{len(gpus)} that can be used here",
                "Ask for fewer jobs, or for a fraction.",
            )
        return list(slots[: self.jobs])

    def _shares_of(self, gpus: list[str]) -> list[str]:
        """Return ``CUDA_VISIBLE_DEVICES`` of each process: one GPU, which several may share, or several."""
        if self.gpus < 1:
            # The quotient of a fraction in binary may lie just below a whole number of sharers.
            sharers = int(1 / self.gpus + 1e-9)
            return gpus * sharers
        count = int(self.gpus)
        shares = []
        for first in range(0, len(gpus) - count + 1, count):
            share = gpus[first : first + count]
            shares.append(",".join(share))
        return shares


def _is_share(gpus: float) -> bool:
    """Return whether a number of GPUs is 0, a fraction below 1, or a whole number."""
    if not math.isfinite(gpus) or gpus < 0:
        return False
    return gpus < 1 or gpus == int(gpus)


def _visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    import torch

    count = 0
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return [str(number) for number in range(count)]
    return names.split(",")[:count]
