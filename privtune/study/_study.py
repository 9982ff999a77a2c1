"""A study: create, load, run, resume, compare."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from privtune.accounting import Guarantee, epsilon
from privtune.errors import PrivTuneError
from privtune.execution.files import read_result
from privtune.execution.table import make_rounds
from privtune.ledger import Charge, ChargeRequest, Ledger, export_certificate
from privtune.names import check_name, is_reserved
from privtune.strategies import Outcome, Plan, Release
from privtune.study._create import arm_secret, store_study
from privtune.study._release import (
    load_release,
    release_document,
    save_release,
    write_certificate,
)
from privtune.study._store import StudyStore, all_params, artifact_root
from privtune.study.observer import ArmStatus, NullObserver, Observer
from privtune.study.spec import StudySpec
from privtune.training.streams import Streams

if TYPE_CHECKING:
    import optuna
    import pandas

    from privtune.strategies import Strategy
    from privtune.study.objective import Objective
    from privtune.study.user_training import DPSGD, Validation
    from privtune.training.noise_options import NoiseOptions

__all__ = ["SealedTrialsError", "Study", "StudyFinishedError", "delete_study"]


class SealedTrialsError(PrivTuneError):
    """Sealed trials were asked for outside of the trust boundary."""


class StudyFinishedError(PrivTuneError):
    """Every arm of the study has been released already."""


class Study:
    """One task, one budget, several arms; each charged before it touches data.

    Make one with :func:`privtune.create_study` or :func:`privtune.load_study`. A study survives
    interruption: :meth:`run` goes on where it was, without a second charge.
    """

    def __init__(self, name: str, storage: str, *, curator: bool = False) -> None:
        self.name = name
        self.storage = storage
        self._store = StudyStore(storage)
        self._ledger = Ledger(storage)
        document = self._store.document(name)
        self.spec = StudySpec.parse(document["spec"], stored=True)
        self._uid: str = document["uid"]
        self.plans: tuple[Plan, ...] = tuple(Plan.from_dict(d) for d in document["plans"])
        self.folder: Path = artifact_root(storage) / name
        self.observer: Observer = NullObserver()
        self._curator = curator or os.environ.get("PRIVTUNE_CURATOR", "") not in ("", "0")

    @classmethod
    def create(cls, spec: StudySpec, storage: str) -> Study:
        """Plan the study, create its budget if needed, and store it. Touches no data, spends nothing.

        Raises:
            PrivTuneError: If the name is taken, the budget exists with other terms, or an arm
                cannot be planned.
        """
        store_study(spec, storage)
        return cls(spec.name, storage)

    def run(
        self,
        observer: Observer | None = None,
        *,
        n_jobs: int = 1,
        stack: int | Literal["auto"] | None = None,
        non_private: bool = False,
    ) -> tuple[Release, ...]:
        """Run every arm that has not been released, and return all releases.

        All arms are charged in one transaction before the first of them touches data.

        Args:
            observer: Hears of the progress; the study's own :attr:`observer` unless given.
            n_jobs: Worker processes for the rounds of selections; 1 trains whole stacks here.
            stack: How many candidates to train in one pass, or ``"auto"``; what the spec says
                unless given. It changes no result.
            non_private: Whether arms without any guarantee may run.

        Returns:
            One release an arm, in the spec's order.

        Raises:
            StudyFinishedError: If every arm has been released. Nothing is spent.
            BudgetExceededError: If the arms do not fit what is left. Nothing is spent.
            NonPrivateError: If an arm has no guarantee and ``non_private`` does not allow that.
        """
        from privtune.study._run import run_study

        return run_study(
            self,
            observer or self.observer,
            n_jobs=n_jobs,
            stack=stack,
            non_private=non_private,
        )

    def optimize(
        self,
        objective: Objective,
        *,
        strategy: Strategy,
        training: DPSGD,
        validation: Validation | None = None,
        epsilon: float | None = None,
        arm: str | None = None,
        sampler: object | None = None,
        pruner: object | None = None,
        n_jobs: int = 1,
        timeout: float | None = None,
        callbacks: Sequence[Callable[[Study, Release], None]] = (),
        observer: Observer | None = None,
        show_progress_bar: bool = False,
        noise: NoiseOptions | str | Mapping[str, Any] | None = None,
    ) -> Release:
        """Run one arm whose trials are trained by a function of one's own, and release it.

        Args:
            objective: Suggests hyperparameters, trains through ``trial.make_private``, returns
                ``trial.score(model, validation)``.
            strategy: How to choose, as in ``privtune.strategies``.
            training: Records, epochs and batch size of one training.
            validation: The split that trials are scored on, where the strategy chooses.
            epsilon: What the arm may cost; the whole budget, if nothing was charged to it yet.
            arm: Name of the arm; the strategy's own unless given.
            sampler: Optuna's sampler for ``everything``, or one of your own that declares that its
                draws are independent.
            pruner: Optuna's pruner, for ``everything`` with a public validation split.
            n_jobs: How many trials at once, in threads.
            timeout: Seconds after which no trial begins; the arm stays open and can go on.
            callbacks: Called with the study and the release; never with a sealed trial.
            observer: Hears when the arm begins, fails and is released, as
                ``privtune.tracking.mlflow.MlflowObserver``; the study's own unless given.
            show_progress_bar: Show that the arm runs; of a sealed arm nothing else is shown.
            noise: ``"secure"``, or the fields of :class:`privtune.NoiseOptions`: where noise comes
                from and how it is treated; the study's own unless given.

        Returns:
            The release.

        Raises:
            StudyFinishedError: If the arm has been released. Nothing is spent.
            BudgetExceededError: If it does not fit what is left. Nothing is spent.

        **Guarantee**: what is released is covered by the arm's event, if the objective touches the
        training records through ``make_private`` and the validation records through ``score`` only.
        """
        from privtune.study._optimize import optimize

        return optimize(
            self,
            objective,
            strategy=replace(strategy, arm=arm or strategy.arm),  # type: ignore[type-var]
            training=training,
            validation=validation,
            epsilon=epsilon,
            sampler=sampler,
            pruner=pruner,
            n_jobs=n_jobs,
            timeout=timeout,
            callbacks=callbacks,
            observer=observer or self.observer,
            show_progress_bar=show_progress_bar,
            noise=self.spec.noise if noise is None else noise,
        )

    @property
    def arms(self) -> tuple[str, ...]:
        """Names of the arms, in order."""
        return tuple(plan.arm for plan in self.plans)

    @property
    def trials(self) -> list[optuna.trial.FrozenTrial]:
        """Every trial of every arm, as Optuna has them. For the curator alone.

        Raises:
            SealedTrialsError: Outside of the trust boundary.
        """
        self._check_curator()
        return [trial for arm in self.arms for trial in self._store.trials(self.name, arm)]

    def _check_curator(self) -> None:
        if not self._curator:
            raise SealedTrialsError(
                f"The trials of study {self.name!r} are sealed: whoever sees them is inside the "
                "trust boundary. If you are, set PRIVTUNE_CURATOR=1 or load the study with "
                "curator=True; else ask for study.releases()."
            )

    def compare(self) -> pandas.DataFrame:
        """Return one row an arm: what it reached, at what ε, at what cost."""
        from privtune.study._compare import comparison

        return comparison(self)

    def export(self) -> dict[str, Any]:
        """Return all that may leave the trust boundary, JSON-ready: plans, releases, certificate."""
        from privtune.study._export import export

        return export(self)

    def delete(self) -> None:
        """Delete the study, its trials and its models. Its charges are the ledger's and stay.

        Raises:
            StudyNotFoundError: If there is no such study.
        """
        delete_study(self.name, self.storage)

    def status(self) -> tuple[ArmStatus, ...]:
        """Return how far every arm is. Reads the storage only."""
        charges = self._charges()
        return tuple(
            ArmStatus(
                plan,
                self._guarantee(plan),
                str(charges[plan.arm].state)
                if plan.arm in charges
                else ("planned" if plan.is_private else "not charged"),
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
        """Return the trials of an arm with their scores. For the curator alone, never to be shown.

        Raises:
            SealedTrialsError: Outside of the trust boundary.
        """
        self._check_curator()
        return [
            {"number": t.number, "state": t.state.name, "params": all_params(t), "score": t.value}
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
        if missing := [p for p in self.plans if p.arm not in known and p.is_private]:
            self._ledger.reserve(
                self.spec.budget.name,
                [
                    ChargeRequest(
                        event=plan.event,
                        study=self.name,
                        arm=plan.arm,
                        plan_digest=self._charge_digest(plan),
                        public=plan.public_facts,
                        note=plan.training.noise.note,
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
        if not plan.is_private:
            budget = self.spec.budget
            return Guarantee(math.inf, budget.delta, "non_private", budget.adjacency)
        return epsilon(plan.event, self.spec.budget.delta, adjacency=self.spec.budget.adjacency)

    def _add_arm(self, plan: Plan) -> None:
        """Add an arm to an open study, or find it there with the same plan."""
        known = {p.arm: p for p in self.plans}
        if plan.arm in known:
            if known[plan.arm].digest() != plan.digest():
                raise PrivTuneError(
                    f"Arm {plan.arm!r} of study {self.name!r} exists with another plan, and what was "
                    "planned does not change. Say arm='another-name' for a new arm."
                )
            return
        check_name(plan.arm, "arm")
        self._store.add_arm(self.name, plan.arm)
        self._store.set(self.name, plan.arm, "secret", arm_secret(self.spec, plan.arm))
        document = self._store.document(self.name)
        plans = [*document["plans"], plan.to_dict()]
        self._store.update(self.name, {**document, "plans": plans})
        self.plans = (*self.plans, plan)

    def _start(self, plan: Plan, charge: Charge | None) -> None:
        """Mark the arm's charge as started, with the rows of its round in the same transaction."""
        if charge is None:
            return
        if plan.runs is not None:
            # Drawn from the arm's secret, so the same whenever it is drawn; opened once.
            count = plan.runs.sample(Streams(self._secret_of(plan)).numpy("runs", 0))
            make_rounds(self._ledger).open(charge.id, count=count)
        elif charge.state == "reserved":
            self._ledger.start(charge.id)

    def _save(
        self, plan: Plan, outcome: Outcome, seconds: float | None, utility: Mapping[str, float]
    ) -> Release:
        release = save_release(
            plan,
            outcome,
            guarantee=self._guarantee(plan),
            seconds=seconds,
            folder=self.folder / plan.arm,
            utility=utility,
        )
        self._store.set(self.name, plan.arm, "release", release_document(release))
        return release

    def _settle(self, plan: Plan, charge: Charge | None) -> None:
        """Forget what is sealed, settle the charge, and certify the release."""
        # Whole: a worker that was stopped may have left a part of a file.
        shutil.rmtree(self.folder / "sealed" / plan.arm, ignore_errors=True)
        # With the secret, noise could be drawn again and subtracted.
        self._store.set(self.name, plan.arm, "secret", None)
        if charge is None or self._ledger.charge(charge.id).state == "settled":
            return
        digest = read_result(self.model_path(plan.arm)).transcript_digest
        self._ledger.settle(charge.id, transcript_digest=digest)
        certificate = export_certificate(self._ledger.log.storage, self.spec.budget.name)
        write_certificate(self.folder / plan.arm, certificate)

    def _secret_of(self, plan: Plan) -> bytes:
        return bytes.fromhex(self._store.get(self.name, plan.arm, "secret"))

    def _stored_release(self, plan: Plan) -> Release | None:
        document = self._store.get(self.name, plan.arm, "release")
        if document is None:
            return None
        return load_release(plan, self.folder / plan.arm, document, self._guarantee(plan))


def delete_study(name: str, storage: str) -> None:
    """Delete a study, its trials and its models, also one that was never completely created.

    Its charges are the ledger's and stay: what was released cannot be taken back.

    Raises:
        StudyNotFoundError: If there is no such study.
    """
    store = StudyStore(storage)
    try:
        arms = store.arms(name)
        store.delete(name, arms)
    finally:
        store.close()
    # A study of an older version may share the folder of something else, or name arms outside of it.
    folder = artifact_root(storage) / name
    places = [folder / part for part in ("sealed", *arms)] if is_reserved(name) else [folder]
    for place in places:
        if artifact_root(storage) in Path(os.path.normpath(place)).parents:
            shutil.rmtree(place, ignore_errors=True)
