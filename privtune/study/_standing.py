"""How far a study and its arms are: what their rows and charges say, and nothing that changes them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

from privtune.accounting import Guarantee, epsilon
from privtune.errors import PrivTuneError
from privtune.files import made_private
from privtune.ledger import Charge, ChargeState, ChargeStateError, Ledger
from privtune.strategies import Plan, Release
from privtune.strategies.plan import StagePlan
from privtune.study._release import load_release
from privtune.study._results import Results
from privtune.study._store import Arm, StudyStore
from privtune.study._trials import StudyTrials
from privtune.study.observer import ArmStatus, StageStatus
from privtune.study.spec import StudySpec

if TYPE_CHECKING:
    from privtune.tasks import Task

AnyPlan = Plan | StagePlan
"""Of an arm, or of a stage before the arms: both live alike."""


class Stage(StrEnum):
    """How far an arm is."""

    PLANNED = "planned"
    CHARGED = "charged"
    STARTED = "started"
    TRAINED = "trained"
    RELEASED = "released"
    ANNOUNCED = "announced"


class Standing:
    """One study in its storage as it stands: its rows, its charges, its results.

    Args:
        name: Name of the study.
        url: URL of the storage.

    Raises:
        StudyNotFoundError: If there is no such study.
    """

    def __init__(self, name: str, url: str) -> None:
        self.name, self.url = name, url
        self.ledger = Ledger(url)
        try:
            self._store = StudyStore(self.ledger.log.storage)
            self._row = self._store.study(name)
            self.spec = StudySpec.parse(dict(self._row.spec), stored=True)
        except BaseException:
            self.ledger.close()
            raise
        self.folder = self._row.folder
        self.files = self._row.files
        if self.files.names():  # a study's own folder is its owner's, whoever made it how
            made_private(self.folder)
            if "PRIVTUNE_ARTIFACTS" not in os.environ:  # which may name a folder of others
                made_private(self.folder.parent)
        self.budget = self.spec.budget.name
        self.trials = StudyTrials(self.ledger.log.storage, name)
        self._results = Results(self.ledger.log.storage, self._row)

    def close(self) -> None:
        """Close the connections."""
        self.trials.close()
        self.ledger.close()

    def rows(self) -> dict[str, Arm]:
        """Return the stages and the arms by name, in order."""
        return self._store.arms(self.name)

    def plans(self) -> dict[str, Plan]:
        """Return the plans of the arms by name, in order."""
        return {n: row.plan for n, row in self.rows().items() if isinstance(row.plan, Plan)}

    def stages(self) -> dict[str, StagePlan]:
        """Return the plans of the stages by name, in order."""
        return {n: row.plan for n, row in self.rows().items() if isinstance(row.plan, StagePlan)}

    def stage_releases(self) -> dict[str, Mapping[str, Any]]:
        """Return what stages have released, by name."""
        return {
            name: row.release
            for name, row in self.rows().items()
            if isinstance(row.plan, StagePlan) and row.release is not None
        }

    def finished(self) -> bool:
        """Return whether every arm that the spec declares is released, and observers have heard of it."""
        rows = self.rows()
        return self.spec.task is not None and all(arm.announced for arm in rows.values())

    def task(self) -> Task:
        """Return the study's task with what its stages released."""
        return self.spec.load_task(self.stage_releases())

    def charges(self, rows: Mapping[str, Arm] | None = None) -> dict[str, Charge]:
        """Return the charges by arm.

        Args:
            rows: The stages and arms, if they were read.
        """
        by_digest = self._by_digest()
        return {
            name: by_digest[arm.digest]
            for name, arm in (self.rows() if rows is None else rows).items()
            if arm.digest in by_digest
        }

    def _by_digest(self) -> dict[str, Charge]:
        charges = self.ledger.charges(self.budget)
        return {c.plan_digest: c for c in charges if c.state is not ChargeState.VOIDED}

    def _charge_in(self, arm: Arm | None) -> Charge | None:
        return None if arm is None else self._by_digest().get(arm.digest)

    def row(self, name: str) -> Arm | None:
        """Return one stage or arm, None if there is none of this name."""
        return self._store.arm(self.name, name)

    def _there(self, plan: AnyPlan) -> Arm:
        """Return the row of an arm that is there."""
        if (row := self.row(plan.arm)) is None:
            raise PrivTuneError(f"Study {self.name!r} has no arm {plan.arm!r} any more.")
        return row

    def stage(self, plan: AnyPlan) -> Stage:
        """Return how far an arm is. Without any guarantee it has no charge to wait for."""
        arm = self.row(plan.arm)
        charge = self._charge_in(arm)
        if arm is None or (plan.is_private and charge is None):
            return Stage.PLANNED
        if arm.announced:
            return Stage.ANNOUNCED
        if arm.release is not None:
            settled = charge is None or charge.state is ChargeState.SETTLED
            return Stage.RELEASED if settled and arm.secret is None else Stage.TRAINED
        started = charge is None or charge.state is not ChargeState.RESERVED
        return Stage.STARTED if started else Stage.CHARGED

    def release(self, plan: Plan) -> Release | None:
        """Return an arm's release, ``None`` until it is trained."""
        return self._release_in(self._there(plan), plan)

    def _release_in(self, row: Arm, plan: Plan) -> Release | None:
        """Return the release that an arm's row has, ``None`` until it is trained."""
        if row.release is None:
            return None
        results, kept = self.released(plan.arm), partial(self.trials.of, plan.arm)
        return load_release(plan, results, row.release, self.guarantee(plan), kept)

    def guarantee(self, plan: AnyPlan) -> Guarantee:
        """Return what an arm costs alone."""
        budget = self.spec.budget
        if not plan.is_private:
            return Guarantee(math.inf, budget.delta, "non_private", budget.adjacency)
        return epsilon(plan.event, budget.delta, adjacency=budget.adjacency)

    def statuses(self) -> tuple[ArmStatus, ...]:
        """Return how far every arm is, in order, for people."""
        rows = self.rows()
        charges = self.charges(rows)
        return tuple(
            ArmStatus(
                row.plan,
                self.guarantee(row.plan),
                _word(row.plan, charges),
                self._release_in(row, row.plan),
            )
            for row in rows.values()
            if isinstance(row.plan, Plan)
        )

    def stage_statuses(self) -> tuple[StageStatus, ...]:
        """Return how far every stage is, in order, for people."""
        rows = self.rows()
        charges = self.charges(rows)
        return tuple(
            StageStatus(
                row.plan,
                self.guarantee(row.plan),
                _word(row.plan, charges),
                row.release if name in charges else None,
            )
            for name, row in rows.items()
            if isinstance(row.plan, StagePlan)
        )

    def secret(self, plan: AnyPlan) -> bytes:
        """Return what everything random in an arm derives from."""
        secret = self._there(plan).secret
        if secret is None:
            raise PrivTuneError(
                f"Arm {plan.arm!r} of study {self.name!r} has no secret any more: it was released."
            )
        return secret

    def sealed(self, arm: str) -> Results:
        """Return the results of an arm that stay inside the trust boundary."""
        return self._results.within(f"sealed/{arm}")

    def released(self, arm: str) -> Results:
        """Return the results of an arm that are released."""
        return self._results.within(arm)

    def charge_of(self, plan: AnyPlan) -> Charge | None:
        """Return an arm's charge, ``None`` for an arm without any guarantee.

        Raises:
            ChargeStateError: If it has none.
        """
        charge = self._charge_in(self.row(plan.arm))
        if charge is None and plan.is_private:
            raise ChargeStateError(f"Arm {plan.arm!r} of study {self.name!r} is not charged.")
        return charge

    def certificate(self) -> dict[str, Any]:
        """Return the certificate of the budget, JSON-ready."""
        from privtune.ledger import export_certificate

        return export_certificate(self.ledger.log.storage, self.budget)

    def failures(self, arm: str) -> list[dict[str, Any]]:
        """Return what stopped an arm, the latest last: ``time`` and ``traceback``."""
        return self._store.failures(self.name, arm)

    def planned(self, plan: Plan) -> Plan:
        """Return the plan that an arm of this name exists with, which runs; or this one.

        Raises:
            PrivTuneError: If it is another one.
        """
        arm = self.row(plan.arm)
        if arm is None or not isinstance(arm.plan, Plan):
            return plan
        self.check_same(plan, arm.plan)
        return arm.plan

    def check_same(self, plan: AnyPlan, there: AnyPlan) -> None:
        """Raise ``PrivTuneError`` if an arm's plan is not the one it exists with."""
        if there.digest() != plan.digest():
            raise PrivTuneError(
                f"Arm {plan.arm!r} of study {self.name!r} exists with another plan, and what was "
                "planned does not change. Say arm='another-name' for a new arm."
            )


def _word(plan: AnyPlan, charges: Mapping[str, Charge]) -> str:
    if plan.arm in charges:
        return str(charges[plan.arm].state)
    return "planned" if plan.is_private else "not charged"
