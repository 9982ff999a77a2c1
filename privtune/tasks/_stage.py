"""What a stage is: one noised release about a table, made before the arms, that all of them share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from privtune.accounting import Adjacency
from privtune.errors import InvalidInputError
from privtune.numbers import is_number
from privtune.training.mechanism.metrics import Floats

TaskSpec = Mapping[str, Any]
"""A task as a spec describes it."""

_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class TaskStage(ABC):
    """What is released once, before the arms.

    Args:
        name: Its name among the study's arms and stages; its type unless given.
        epsilon_share: What it may cost alone, as a share of the study's ε; 0.05 unless given.
        noise_multiplier: Its noise over its sensitivity, in the place of a share.

    Raises:
        InvalidInputError: If a field is outside its domain.
    """

    type: ClassVar[str]
    name: str = ""
    epsilon_share: float | None = None
    noise_multiplier: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise InvalidInputError("stages.name", self.name, "must be text")
        if not self.name:
            object.__setattr__(self, "name", self.type)
        if self.epsilon_share is None and self.noise_multiplier is None:
            object.__setattr__(self, "epsilon_share", _SHARE)
        elif self.epsilon_share is not None and self.noise_multiplier is not None:
            self._refuse("epsilon_share", self.epsilon_share, "goes without a noise_multiplier")
        if self.epsilon_share is not None and not 0.0 < as_number(self.epsilon_share) < 1.0:
            self._refuse(
                "epsilon_share", self.epsilon_share, "must be a number above 0 and below 1"
            )
        if self.noise_multiplier is not None and not 0 < as_number(self.noise_multiplier) < 1e6:
            self._refuse("noise_multiplier", self.noise_multiplier, "must be a number above 0")

    def _refuse(self, field: str, value: object, allowed: str) -> None:
        raise InvalidInputError(f"stages.{self.name}.{field}", value, allowed)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Self:
        """Read a stage's fields.

        Raises:
            InvalidInputError: If one is unknown, or outside its domain.
        """
        known = [field.name for field in fields(cls)]
        if unknown := sorted(map(str, set(data) - {*known, "type"})):
            raise InvalidInputError(
                "stages", unknown, f"are no fields of {cls.type}; these are: {', '.join(known)}"
            )
        return cls(**{name: value for name, value in data.items() if name != "type"})

    def to_dict(self) -> dict[str, Any]:
        """Return the stage as a spec has it."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {name: value for name, value in values.items() if value is not None}
        return {"type": self.type, **given}

    @abstractmethod
    def check(self, task: TaskSpec) -> None:
        """Refuse a task that it has nothing to release for. Touches no data."""

    def planned(self, task: TaskSpec) -> TaskSpec:
        """Return the task as it is planned with: shapes are public, what is released is not known."""
        return task

    @abstractmethod
    def sensitivity(self, task: TaskSpec, adjacency: Adjacency) -> float:
        """Return how far :meth:`sums` can move between neighbours, in the L2 norm."""

    @abstractmethod
    def sums(self, task: TaskSpec) -> Floats:
        """Read the records, and sum what each adds."""

    @abstractmethod
    def document(self, task: TaskSpec, noised: Floats, scale: float) -> dict[str, Any]:
        """Return what is released, JSON-ready: a function of the noised sums and of public facts.

        Args:
            task: The task.
            noised: The sums with noise.
            scale: Its standard deviation.
        """

    def applied(self, task: TaskSpec, document: Mapping[str, Any]) -> TaskSpec:
        """Return the task with what was released in its place."""
        return task

    def refusal(self, document: Mapping[str, Any]) -> str:
        """Return why the study stops after what was released; nothing where it goes on. Public."""
        return ""

    @abstractmethod
    def words(self, document: Mapping[str, Any]) -> str:
        """Return what was released, for people."""


def as_number(value: object) -> float:
    """Return a number, NaN for what is none: it is in no range."""
    return float(value) if is_number(value) else math.nan
