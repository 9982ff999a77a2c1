"""A study: create, load, run, resume, compare."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from privtune.accounting import Guarantee, epsilon
from privtune.errors import PrivTuneError
from privtune.execution.inline import accuracy, estimate_seconds
from privtune.ledger import Charge, ChargeRequest, Ledger
from privtune.spaces import SearchSpace
from privtune.strategies import Cost, Plan, Release, TrialResult
from privtune.study._round import StudyRound, read_result, write_result
from privtune.study._store import StudyStore, artifact_root
from privtune.study.planning import plan_study
from privtune.study.spec import StudySpec
from privtune.training.streams import Streams

if TYPE_CHECKING:
    from privtune.tasks import Task, TaskData

__all__ = ["ArmStatus", "NullObserver", "Observer", "Study", "StudyFinishedError"]


class StudyFinishedError(PrivTuneError):
    """Every arm of the study has been released already."""


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
        state: ``planned``, or the state of its charge.
        release: Its release, once there is one.
    """

    plan: Plan
    guarantee: Guarantee
    state: str
    release: Release | None


class Study:
    """One task, one budget, several arms; each charged before it touches data.

    Make one with :func:`privtune.create_study` or :func:`privtune.load_study`. A study survives
    interruption: :meth:`run` goes on where it was, without a second charge.
    """

    def __init__(self, name: str, storage: str) -> None:
        self.name = name
        self.storage = storage
        self._store = StudyStore(storage)
        self._ledger = Ledger(storage)
        document = self._store.document(name)
        self.spec = StudySpec.parse(document["spec"])
        self._uid: str = document["uid"]
        self.plans: tuple[Plan, ...] = tuple(Plan.from_dict(d) for d in document["plans"])
        self.folder: Path = artifact_root(storage) / name

    @classmethod
    def create(cls, spec: StudySpec, storage: str) -> Study:
        """Plan the study, create its budget if needed, and store it. Touches no data, spends nothing.

        Raises:
            PrivTuneError: If the name is taken, the budget exists with other terms, or an arm
                cannot be planned.
        """
        store = StudyStore(storage)
        try:
            if spec.name in store.names():
                # Before the planning, which takes seconds; `create` checks again.
                store.create(spec.name, (), {})
            planned = plan_study(spec)
            with Ledger(storage) as ledger:
                if spec.budget.name not in {budget.name for budget in ledger.budgets()}:
                    ledger.create_budget(spec.budget.to_budget())
                else:
                    _check_terms(ledger, spec)
            store.create(
                spec.name,
                [arm.name for arm in spec.arms],
                {
                    "uid": uuid.uuid4().hex,
                    "spec": spec.model_dump(mode="json"),
                    "plans": [plan.to_dict() for plan in planned.plans],
                },
            )
        finally:
            store.close()
        return cls(spec.name, storage)

    def run(self, observer: Observer | None = None) -> tuple[Release, ...]:
        """Run every arm that has not been released, and return all releases.

        All arms are charged in one transaction before the first of them touches data.

        Args:
            observer: Hears of the progress.

        Returns:
            One release an arm, in the spec's order.

        Raises:
            StudyFinishedError: If every arm has been released. Nothing is spent.
            BudgetExceededError: If the arms do not fit what is left. Nothing is spent.
        """
        observer = observer or NullObserver()
        charges = self._reserve()
        if all(
            charge.state == "settled" and self._store.get(self.name, arm, "announced")
            for arm, charge in charges.items()
        ):
            raise StudyFinishedError(
                f"Study {self.name!r} is finished: every arm has been released, nothing was run and "
                f"nothing was spent. See it with: privtune study compare {self.name}."
            )
        task = self.spec.load_task()
        loaded: TaskData | None = None
        releases = []
        for plan in self.plans:
            release = self._stored_release(plan)
            if release is None:
                if charges[plan.arm].state == "reserved":
                    self._ledger.start(charges[plan.arm].id)
                loaded = task.load_checked() if loaded is None else loaded
                release = self._run_arm(plan, task, loaded, observer)
            if charges[plan.arm].state != "settled":
                digest = read_result(self.model_path(plan.arm)).transcript_digest
                self._ledger.settle(charges[plan.arm].id, transcript_digest=digest)
            if not self._store.get(self.name, plan.arm, "announced"):
                observer.released(plan, release)
                self._store.set(self.name, plan.arm, "announced", True)
            releases.append(release)
        return tuple(releases)

    def status(self) -> tuple[ArmStatus, ...]:
        """Return how far every arm is. Reads the storage only."""
        charges = self._charges()
        return tuple(
            ArmStatus(
                plan,
                self._guarantee(plan),
                charges[plan.arm].state if plan.arm in charges else "planned",
                self._stored_release(plan),
            )
            for plan in self.plans
        )

    def releases(self) -> tuple[Release, ...]:
        """Return the releases there are, in the spec's order."""
        return tuple(s.release for s in self.status() if s.release is not None)

    def release(self, arm: str) -> Release:
        """Return the release of one arm.

        Raises:
            PrivTuneError: If there is no such arm, or it has not been released.
        """
        for release in self.releases():
            if release.arm == arm:
                return release
        names = ", ".join(plan.arm for plan in self.plans)
        raise PrivTuneError(
            f"Study {self.name!r} has no release of an arm {arm!r}; its arms are {names}, and "
            f"{', '.join(r.arm for r in self.releases()) or 'none'} of them are released."
        )

    def sealed_trials(self, arm: str) -> Sequence[Mapping[str, Any]]:
        """Return the trials of an arm with their scores. For the curator alone, never to be shown."""
        return [
            {"number": t.number, "state": t.state.name, "params": t.params, "score": t.value}
            for t in self._store.trials(self.name, arm)
        ]

    def model_path(self, arm: str) -> Path:
        """Return where the released model of an arm is, as safetensors."""
        return self.folder / arm / "model.safetensors"

    def spent(self) -> Guarantee:
        """Return what the whole budget has spent, every study of it included."""
        return self._ledger.spent(self.spec.budget.name)

    def remaining(self) -> float:
        """Return the ε that is left of the budget."""
        return self._ledger.remaining(self.spec.budget.name)

    def close(self) -> None:
        """Close the connections."""
        self._store.close()
        self._ledger.close()

    def _reserve(self) -> Mapping[str, Charge]:
        known = self._charges()
        if missing := [plan for plan in self.plans if plan.arm not in known]:
            self._ledger.reserve(
                self.spec.budget.name,
                [
                    ChargeRequest(
                        event=plan.event,
                        study=self.name,
                        arm=plan.arm,
                        plan_digest=self._charge_digest(plan),
                    )
                    for plan in missing
                ],
            )
        return self._charges()

    def _charges(self) -> Mapping[str, Charge]:
        # Found by digest, not by a note of ours: a crash right after the reservation loses nothing.
        by_digest = {
            charge.plan_digest: charge
            for charge in self._ledger.charges(self.spec.budget.name)
            if charge.state != "voided"
        }
        digests = {plan.arm: self._charge_digest(plan) for plan in self.plans}
        return {arm: by_digest[digest] for arm, digest in digests.items() if digest in by_digest}

    def _charge_digest(self, plan: Plan) -> str:
        text = json.dumps([self._uid, plan.digest()])
        return hashlib.sha256(text.encode()).hexdigest()

    def _guarantee(self, plan: Plan) -> Guarantee:
        return epsilon(plan.event, self.spec.budget.delta, adjacency=self.spec.budget.adjacency)

    def _run_arm(self, plan: Plan, task: Task, data: TaskData, observer: Observer) -> Release:
        observer.arm_started(plan)
        try:
            trials = StudyRound(
                study=self.name,
                arm=plan.arm,
                secret=self._round_secret(plan),
                store=self._store,
                folder=self.folder / "sealed" / plan.arm,
                task=task,
                data=data,
                space=SearchSpace.from_dict(self.spec.space),
                device=self.spec.device,
                on_step=None
                if plan.is_sealed
                else lambda done, steps: observer.step(plan, done, steps),
            )
            seconds = (
                estimate_seconds(plan, task, device=self.spec.device) if plan.is_sealed else None
            )
            started = time.perf_counter()
            result = _strategy(self.spec, plan).run(plan, trials)
            if seconds is None:
                seconds = time.perf_counter() - started
        except BaseException:
            observer.arm_failed(plan)
            raise
        if plan.is_sealed:
            # The plan promises no curves; the winner's position would bound the number of runs.
            result = replace(result, curves={}, index=0)
        release = self._make_release(plan, result, task, data, seconds)
        write_result(result, self.model_path(plan.arm))
        self._store.set(self.name, plan.arm, "release", _release_document(release))
        trials.discard(keep=-1)
        # With the secret, noise could be drawn again and subtracted.
        self._store.set(self.name, plan.arm, "secret", None)
        return release

    def _round_secret(self, plan: Plan) -> bytes:
        stored = self._store.get(self.name, plan.arm, "secret")
        if stored is not None:
            return bytes.fromhex(stored)
        secret = (
            secrets.token_bytes(32)
            if self.spec.seed is None
            else Streams(self.spec.seed.to_bytes(32, "big")).key(f"arm/{plan.arm}")
        )
        self._store.set(self.name, plan.arm, "secret", secret.hex())
        return secret

    def _make_release(
        self, plan: Plan, result: TrialResult, task: Task, data: TaskData, seconds: float
    ) -> Release:
        utility = (
            {"test_accuracy": accuracy(task, result.weights, data.test)} if task.public_test else {}
        )
        return Release(
            arm=plan.arm,
            strategy=plan.strategy,
            params=dict(result.params),
            weights=result.weights,
            score=result.score,
            curves=result.curves,
            guarantee=self._guarantee(plan),
            utility=utility,
            cost=Cost(plan.expected_gradient_evaluations, seconds, expected=plan.is_sealed),
            sealed=plan.is_sealed,
        )

    def _stored_release(self, plan: Plan) -> Release | None:
        document = self._store.get(self.name, plan.arm, "release")
        if document is None:
            return None
        result = read_result(self.model_path(plan.arm))
        return Release(
            arm=plan.arm,
            strategy=plan.strategy,
            params=result.params,
            weights=result.weights,
            score=result.score,
            curves=result.curves,
            guarantee=self._guarantee(plan),
            utility=document["utility"],
            cost=Cost(**document["cost"]),
            sealed=plan.is_sealed,
        )


def _check_terms(ledger: Ledger, spec: StudySpec) -> None:
    budget = ledger.budget(spec.budget.name)
    asked = (spec.budget.epsilon, spec.budget.delta, spec.budget.adjacency)
    if (budget.epsilon, budget.delta, budget.adjacency) != asked:
        raise PrivTuneError(
            f"Budget {budget.name!r} exists with epsilon = {budget.epsilon}, delta = "
            f"{budget.delta}, {budget.adjacency} adjacency, and cannot be changed; the spec of study "
            f"{spec.name!r} says epsilon = {asked[0]}, delta = {asked[1]}, {asked[2]}. Write the "
            "budget's own terms, and the study's share as 'epsilon' of the study."
        )


def _strategy(spec: StudySpec, plan: Plan) -> Any:
    (arm,) = (arm for arm in spec.arms if arm.name == plan.arm)
    return arm.to_strategy()


def _release_document(release: Release) -> dict[str, Any]:
    return {
        "utility": dict(release.utility),
        "cost": {
            "gradient_evaluations": release.cost.gradient_evaluations,
            "wall_seconds": release.cost.wall_seconds,
            "expected": release.cost.expected,
        },
    }
