"""Plans: frozen values that say what will touch the data, and therefore what it costs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from privtune.accounting import Adjacency, Event, RunLaw, event_from_dict, run_law_from_dict
from privtune.spaces import SearchSpace
from privtune.tasks import Task
from privtune.training.methods import METHODS
from privtune.training.methods._base import Method
from privtune.training.schedule import Schedule

__all__ = ["Plan", "PlanningContext", "ScorePlan", "TrainingPlan"]


@dataclass(frozen=True, kw_only=True)
class PlanningContext:
    """What a strategy may look at when it plans: public facts only.

    Args:
        task: The task, of which only the public facts are read.
        schedule: Records, rate and steps of one training.
        space: Distributions of the hyperparameters.
        delta: The budget's δ, in (0, 1).
        adjacency: The budget's neighbouring relation.
    """

    task: Task
    schedule: Schedule
    space: SearchSpace
    delta: float
    adjacency: Adjacency


@dataclass(frozen=True)
class TrainingPlan:
    """One training: its clockwork and its method, noise included.

    The event is derived from the two, so the noise that runs is the noise that is charged.
    """

    schedule: Schedule
    method: Method[Any]

    @property
    def event(self) -> Event:
        """What one such training costs."""
        return self.method.event(self.schedule)

    @property
    def expected_gradient_evaluations(self) -> float:
        """Expected per-sample gradients of one such training."""
        return self.method.gradients_per_step * self.schedule.expected_gradient_evaluations

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-ready data."""
        return {
            "schedule": dataclasses.asdict(self.schedule),
            "method": {"name": self.method.name, **_fields(self.method)},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrainingPlan:
        """Read what :meth:`to_dict` wrote."""
        fields = dict(data["method"])
        method = METHODS[fields.pop("name")](**fields)
        return cls(Schedule(**data["schedule"]), method)


@dataclass(frozen=True)
class ScorePlan:
    """How a trial is scored: the accuracy on the validation split, noised if the split is private.

    Args:
        records: Public number of validation records; the accuracy's sensitivity is 1/records under
            add/remove with this number public.
        noise_multiplier: Gaussian noise over that sensitivity; ``None`` if the split is declared
            public.
    """

    records: int
    noise_multiplier: float | None

    @property
    def standard_deviation(self) -> float:
        """Standard deviation of the noise on the accuracy, as a fraction of 1."""
        return 0.0 if self.noise_multiplier is None else self.noise_multiplier / self.records


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one arm will do to the data, before it does anything.

    Args:
        arm: Name of the arm.
        strategy: Name of the strategy.
        event: What the arm costs; the ledger charges exactly this.
        training: What one trial runs.
        params: Hyperparameters given in advance; empty where they are drawn or adapted.
        runs: Law of the secret number of runs; ``None`` for a single training.
        score: How trials are scored; ``None`` where nothing is chosen.
        released: What leaves the trust boundary, in words.
        sealed: What does not, in words.
    """

    arm: str
    strategy: str
    event: Event
    training: TrainingPlan
    params: Mapping[str, float]
    runs: RunLaw | None
    score: ScorePlan | None
    released: tuple[str, ...]
    sealed: tuple[str, ...]

    @property
    def is_sealed(self) -> bool:
        """Whether anything about the trials, their number or their time must stay secret."""
        return self.runs is not None

    @property
    def expected_runs(self) -> float:
        """Expected number of trainings."""
        return 1.0 if self.runs is None else self.runs.expected_runs

    @property
    def expected_gradient_evaluations(self) -> float:
        """Expected per-sample gradients of the whole arm."""
        return self.expected_runs * self.training.expected_gradient_evaluations

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-ready data."""
        return {
            "arm": self.arm,
            "strategy": self.strategy,
            "event": self.event.to_dict(),
            "training": self.training.to_dict(),
            "params": dict(self.params),
            "runs": None if self.runs is None else self.runs.to_dict(),
            "score": None if self.score is None else dataclasses.asdict(self.score),
            "released": list(self.released),
            "sealed": list(self.sealed),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Read what :meth:`to_dict` wrote."""
        return cls(
            arm=data["arm"],
            strategy=data["strategy"],
            event=event_from_dict(data["event"]),
            training=TrainingPlan.from_dict(data["training"]),
            params=data["params"],
            runs=None if data["runs"] is None else run_law_from_dict(data["runs"]),
            score=None if data["score"] is None else ScorePlan(**data["score"]),
            released=tuple(data["released"]),
            sealed=tuple(data["sealed"]),
        )

    def digest(self) -> str:
        """Return the SHA-256 of the plan's canonical JSON, kept with its charge."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
