"""The observer of a running study, and the status of its arms and stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from privtune.accounting import Guarantee
from privtune.stages.stage_plan import StagePlan
from privtune.strategies import Plan, Release


class Observer:
    """A base class for observers of a running study, whose methods do nothing.

    A sealed arm tells it only when it begins and when it ends.

    Example:
        >>> class Bell(Observer):
        ...     def released(self, plan, release):
        ...         print(plan.arm, "is out:", release.params)
        >>> bell, plan = Bell(), study.plans[0]
        >>> bell.rehearsed(plan, 2.5); bell.arm_started(plan); bell.step(plan, 1, 3); bell.arm_failed(plan)
        >>> bell.released(plan, study.release("defaults"))
        defaults is out: {'learning_rate': 0.5, 'max_grad_norm': 1.0}
    """

    def rehearsed(self, plan: Plan, seconds: float | None) -> None:
        """Observe how many ``seconds`` a run of a ``plan`` is expected to take, before it is charged."""

    def arm_started(self, plan: Plan) -> None:
        """Observe that the arm of a ``plan`` has been charged and begins."""

    def step(self, plan: Plan, done: int, steps: int) -> None:
        """Observe that ``done`` of the ``steps`` of a ``plan``'s training are done; never of a sealed arm."""

    def released(self, plan: Plan, release: Release) -> None:
        """Observe that the arm of a ``plan`` has been released, and its ``release``."""

    def arm_failed(self, plan: Plan) -> None:
        """Observe that the arm of a ``plan`` was interrupted; its charge stays."""


@dataclass(frozen=True)
class ArmStatus:
    """The state of an arm, with its plan, its guarantee and its release.

    Args:
        plan: Its plan.
        guarantee: What it costs alone.
        state: ``planned``, the state of its charge, or ``not charged`` without any guarantee.
        release: Its release, once there is one.

    Example:
        >>> [(status.plan.arm, status.state, status.release is None) for status in study.status()]
        [('defaults', 'settled', False), ('selection', 'settled', False)]
    """

    plan: Plan
    guarantee: Guarantee
    state: str
    release: Release | None


Arms = Sequence[ArmStatus]
"""How far the arms of a study are, in its order."""


def releases_of(arms: Arms) -> list[Release]:
    """Return the releases that there are, in the order of the arms."""
    return [arm.release for arm in arms if arm.release is not None]


@dataclass(frozen=True)
class StageStatus:
    """The state of a stage, with its plan, its guarantee and its release.

    Attributes:
        plan: Its plan.
        guarantee: What it costs alone.
        state: As of ``ArmStatus``.
        release: What it released, JSON-ready; None before.
    """

    plan: StagePlan
    guarantee: Guarantee
    state: str
    release: Mapping[str, Any] | None

    @property
    def words(self) -> str:
        """The stage's release in words; empty before there is one."""
        return "" if self.release is None else self.plan.stage.words(self.release)

    def to_dict(self) -> dict[str, Any]:
        """Return the stage's status as a JSON-ready dict."""
        return {
            "stage": self.plan.arm,
            "plan": self.plan.to_dict(),
            "state": self.state,
            "guarantee": self.guarantee.to_dict(),
            "release": None if self.release is None else dict(self.release),
        }
