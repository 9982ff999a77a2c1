"""Who hears of a running study."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from privtune.accounting import Guarantee
from privtune.strategies import Plan, Release

__all__ = ["ArmStatus", "NullObserver", "Observer"]


class Observer(Protocol):
    """Hears of a running study. A sealed arm tells it when it begins and ends, and nothing else."""

    def arm_started(self, plan: Plan) -> None:
        """An arm has been charged and begins."""

    def step(self, plan: Plan, done: int, steps: int) -> None:
        """A step of an arm that is not sealed is done."""

    def released(self, plan: Plan, release: Release) -> None:
        """An arm has been released."""

    def arm_failed(self, plan: Plan) -> None:
        """An arm was interrupted; its charge stays."""


class NullObserver:
    """Hears and does nothing."""

    def arm_started(self, plan: Plan) -> None:
        """Do nothing."""

    def step(self, plan: Plan, done: int, steps: int) -> None:
        """Do nothing."""

    def released(self, plan: Plan, release: Release) -> None:
        """Do nothing."""

    def arm_failed(self, plan: Plan) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class ArmStatus:
    """How far an arm is.

    Args:
        plan: Its plan.
        guarantee: What it costs alone.
        state: ``planned``, the state of its charge, or ``not charged`` without any guarantee.
        release: Its release, once there is one.
    """

    plan: Plan
    guarantee: Guarantee
    state: str
    release: Release | None
