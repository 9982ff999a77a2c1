"""What a certificate says of a study, in the words that officers and registries ask for.

Every number here is one of the certificate's, or follows from its events alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from privtune.accounting import Adjacency, Guarantee, epsilon, event_from_dict
from privtune.accounting.registry import formula
from privtune.errors import PrivTuneError
from privtune.ledger import ChargeState
from privtune.ledger.audits import contradictions
from privtune.numbers import show_epsilon
from privtune.tasks import MECHANISM
from privtune.views.text import stage_line, together, weakened

if TYPE_CHECKING:
    from privtune.strategies import Plan
    from privtune.study import Study

OPEN = "To be answered by you"
"""Marks what no tool can know."""

_NEIGHBOURS = {
    Adjacency.ADD_REMOVE: "one has one {unit} more than the other (add or remove)",
    Adjacency.REPLACE_ONE: "one {unit} of the one is replaced by any other",
}


@dataclass(frozen=True)
class Line:
    """One charge that was not voided.

    Args:
        id: The charge.
        study: The study that it is for; empty for a release made outside of one.
        arm: The study's arm.
        text: The whole of it in one line.
    """

    id: str
    study: str
    arm: str
    text: str


@dataclass(frozen=True)
class Evidence:
    """A study that has released something, and the certificate of its budget.

    Args:
        study: Name of the study.
        task: Name of its task.
        plans: The plans of its arms.
        weakened: What weakens its guarantee; empty if nothing does.
        certificate: The certificate.
        unprotected: Arms that released something without any guarantee, which no budget holds.
        stages: What stages before the arms released, a line each.
    """

    study: str
    task: str
    plans: tuple[Plan, ...]
    weakened: str
    certificate: Mapping[str, Any]
    unprotected: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()

    @property
    def terms(self) -> Mapping[str, Any]:
        """The budget's terms."""
        terms: Mapping[str, Any] = self.certificate["budget"]["terms"]
        return terms

    @property
    def unit(self) -> str:
        """What is protected, in a word."""
        return str(self.terms["unit"])

    @property
    def guarantee(self) -> Guarantee:
        """What everything charged to the budget costs together."""
        said = self.certificate["guarantee"]
        adjacency = Adjacency(said["adjacency"])
        return Guarantee(float(said["epsilon"]), float(said["delta"]), said["method"], adjacency)

    @property
    def neighbours(self) -> str:
        """What neighbouring datasets are."""
        said = _NEIGHBOURS[self.guarantee.adjacency].format(unit=self.unit)
        return f"two datasets are neighbours if {said}"

    @property
    def dataset(self) -> str:
        """The protected dataset, as the budget describes it, or the task."""
        return self.terms["dataset"] or f"the private data of task {self.task}"

    @property
    def spent(self) -> str:
        """ε and δ of everything, and how they are known."""
        spent = self.guarantee
        return (
            f"ε = {show_epsilon(spent.epsilon, 4)} at δ = {spent.delta:g}, {spent.adjacency} "
            f"({together(spent)})"
        )

    @property
    def limit(self) -> str:
        """What was fixed before anything was released."""
        kept = "kept" if self.certificate["within_budget"] else "BROKEN"
        ended = "closed for good" if self.certificate["budget"]["closed"] else "not closed"
        return (
            f"fixed beforehand, for everything ever released on this budget: ε = "
            f"{self.terms['epsilon']:g} at δ = {self.terms['delta']:g}; it is {kept}, and {ended}"
        )

    @property
    def loud(self) -> tuple[str, ...]:
        """What takes away from the guarantee, a sentence each."""
        found = []
        if self.unprotected:
            names = ", ".join(self.unprotected)
            found.append(f"No guarantee at all covers what these arms released: {names}.")
        if self.weakened:
            found.append(f"{self.weakened[:1].upper()}{self.weakened[1:]}.")
        if not self.certificate["within_budget"]:
            found.append("The budget is broken: what was charged costs more than it promises.")
        return (*found, *contradictions(self.certificate.get("audits", ())))

    @property
    def noises(self) -> tuple[str, ...]:
        """Where noise comes from, each source once; that of a declared training is its own."""
        said: dict[str, None] = {}
        for plan in self.plans:
            own = plan.training.noise
            said[f"{own.source}, {own.floating_point}"] = None
            if MECHANISM in plan.public_facts:
                said[f"in the training of {plan.arm}, that of another library"] = None
        return tuple(said)

    @cached_property
    def charges(self) -> tuple[Line, ...]:
        """Every charge that was not voided, oldest first."""
        adjacency, delta = self.guarantee.adjacency, self.guarantee.delta
        lines = []
        for charge in self.certificate["charges"]:
            if charge["state"] == ChargeState.VOIDED:
                continue
            event = event_from_dict(charge["event"])
            alone = epsilon(event, delta, adjacency=adjacency).epsilon
            who = "/".join(filter(None, (charge["study"], charge["arm"]))) or "outside of a study"
            note = f" ({charge['note']})" if charge["note"] else ""
            lines.append(
                Line(
                    charge["id"],
                    charge["study"],
                    charge["arm"],
                    f"{charge['id']}, {who}{note}: {formula(event)}; alone ε = "
                    f"{show_epsilon(alone, 4)}; {charge['state']}",
                )
            )
        return tuple(lines)


def evidence(study: Study) -> Evidence:
    """Collect what a study's certificate says, once something was released.

    Raises:
        PrivTuneError: Nothing was released yet.
        LedgerCorruptedError: The budget's log does not verify.
    """
    released = [arm.plan for arm in study.status() if arm.release is not None]
    if not released:
        raise PrivTuneError(
            f"study {study.name!r} has released nothing yet, so there is nothing to answer for; run "
            f"it first: privtune study run {study.name}"
        )
    return Evidence(
        study.name,
        study.spec.task_name,
        tuple(study.plans),
        weakened(study),
        study.certificate(),
        tuple(plan.arm for plan in released if not plan.is_private),
        tuple(stage_line(stage) for stage in study.stages),
    )
