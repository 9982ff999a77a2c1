"""Stages: a stage is one noised release before the arms, which becomes a part of their common task.

A stage takes what a table leaves open (bounds of a column, weights of the classes, directions to
project on) from the records, and writes what it released into the task's own description: an arm then
sees a table like any other, whose public facts were paid for.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from privtune.accounting import Adjacency
from privtune.errors import InvalidInputError
from privtune.names import refuse_fields
from privtune.numbers import is_number
from privtune.tasks.described import TaskSpec
from privtune.tasks.tabular import Table, read_table
from privtune.training.mechanism.metrics import (
    Floats,
)

Document = Mapping[str, Any]
"""What a stage released, as the ledger stores it: JSON-ready, and public."""

_SHARE = 0.05  # of the study's ε, unless given
_MOST_NOISE = 1e6  # times the sensitivity


@dataclass(frozen=True, kw_only=True)
class TaskStage(ABC):
    """One noised release about a task, made once before the arms.

    Attributes:
        type: Its name in a spec.
        name: Among the study's arms and stages; its type unless given.
        epsilon_share: What it may cost alone, as a part of the study's ε.
        noise_multiplier: Noise over sensitivity, in the place of a share.

    Raises:
        InvalidInputError: If a field is outside of its domain, or both say how much noise there is.
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
        self._check_cost()

    def _check_cost(self) -> None:
        """Refuse an invalid share of ε or noise multiplier, and a stage that sets both of them."""
        share = self.epsilon_share
        noise = self.noise_multiplier
        if share is not None and noise is not None:
            self._refuse("epsilon_share", share, "goes without a noise_multiplier")
        if share is not None and not 0.0 < as_number(share) < 1.0:
            self._refuse("epsilon_share", share, "must be a number above 0 and below 1")
        if noise is not None and not 0 < as_number(noise) < _MOST_NOISE:
            self._refuse("noise_multiplier", noise, "must be a number above 0")

    def _refuse(self, field: str, value: object, allowed: str) -> None:
        """Raise the error for an invalid field of the stage, with the field's place in the spec."""
        raise InvalidInputError(f"stages.{self.name}.{field}", value, allowed)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Self:
        """Return the stage with the fields of a spec, or refuse an unknown field."""
        names = [field.name for field in fields(cls)]
        values = dict(data)
        values.pop("type", None)
        unknown = set(values) - set(names)
        if unknown:
            refuse_fields("stages", unknown, names, f"a stage of {cls.type}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the stage as its fields in a spec."""
        spec: dict[str, Any] = {"type": self.type}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                spec[field.name] = value
        return spec

    @abstractmethod
    def check(self, task: TaskSpec) -> None:
        """Refuse a task that gives the stage nothing to release, from declared facts alone."""

    def planned(self, task: TaskSpec) -> TaskSpec:
        """Return the task for planning, with public shapes in the place of what is yet to be released."""
        return task

    @abstractmethod
    def sensitivity(self, task: TaskSpec, adjacency: Adjacency) -> float:
        """Return the sensitivity of :meth:`sums`, the largest L2 distance between neighbours."""

    @abstractmethod
    def sums(self, task: TaskSpec) -> Floats:
        """Read the records, and return the sums of their contributions."""

    @abstractmethod
    def document(self, task: TaskSpec, noised: Floats, scale: float) -> dict[str, Any]:
        """Return the stage's release as JSON-ready data, computed from noised sums.

        Args:
            task: The task as stages before this one have left it.
            noised: :meth:`sums`, with Gaussian noise.
            scale: The standard deviation of the noise.
        """

    def applied(self, task: TaskSpec, document: Document) -> TaskSpec:
        """Return the task with the stage's release filled in, unchanged by default."""
        return task

    def refusal(self, document: Document) -> str:
        """Return the public reason why the study stops after this release, or an empty text."""
        return ""

    @abstractmethod
    def words(self, document: Document) -> str:
        """Return the release in words."""


def as_number(value: object) -> float:
    """Return a value as a number, or NaN, which lies in no range, if it is anything else.

    So one comparison refuses texts and numbers alike that are outside of a field's domain.
    """
    return float(value) if is_number(value) else math.nan


def checked_table(task: TaskSpec) -> Table:
    """Return the table that a task describes, after checking its header."""
    table = read_table(task)
    table.check()
    return table
