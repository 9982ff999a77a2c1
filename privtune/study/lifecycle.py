"""The life of an arm: planned → charged → started → trained → released → announced.

One function a transition, each idempotent: after whatever stopped a study, the next call goes on. A step
whose connection to PostgreSQL was lost is taken again in the same call (``Life.outlast``). How far an arm is
stands in the ledger and in rows beside it, changed in the ledger's own transactions.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from copy import deepcopy
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from privtune.accounting import Guarantee
from privtune.errors import PrivTuneError, interruptible
from privtune.execution.launchers import WorkerStoppedError
from privtune.execution.table import PATIENCE, make_rounds, patiently
from privtune.facts import declared_note
from privtune.files import (
    UntrustedPathError,
    folder_problem,
    json_lines,
    made_private,
    owner_of,
)
from privtune.ledger import (
    Charge,
    ChargeRequest,
    ChargeState,
    ChargeStateError,
    Ledger,
    LedgerConnectionError,
)
from privtune.ledger.chain import Kind
from privtune.ledger.errors import HoldLostError, Place
from privtune.ledger.log import forget_round
from privtune.ledger.places import database_path
from privtune.ledger.reading import parsing
from privtune.names import CERTIFICATE
from privtune.stages.stage_plan import StagePlan
from privtune.strategies import Outcome, Plan, Release
from privtune.study.failures import WITHOUT_DATA, ArmStoppedError, StageRefusedError
from privtune.study.observer import ArmStatus, StageStatus
from privtune.study.rows import (
    AnyPlan,
    Arm,
    Results,
    Staged,
    StoredStudy,
    StudyRow,
    arm_digest,
    arm_place,
    check_database,
    check_there,
    plan_text,
)
from privtune.study.seal import kept_for_curator, sealed
from privtune.study.spec import StudySpec
from privtune.study.stored_results import Measurement, load_release, make_release
from privtune.study.trials import StudyTrials, digest_of_trials
from privtune.training.engine.compute import versions
from privtune.training.mechanism.streams import Streams

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial
    from sqlalchemy.engine import Connection

    from privtune.strategies import Strategy
    from privtune.study.observer import Observer
    from privtune.tasks import Task


T = TypeVar("T")

_EVERY = 10  # of many releases, by how many one certificate lies behind another
_WRITERS = 4  # attempts at a certificate that others overtake
_LOSSES = 10
"""How often a connection may be lost in one step: a step that ends its server must end itself."""


class Stage(StrEnum):
    """The states of an arm's life, in their order.

    No column holds it: it follows from the charge's state, the release, the secret and the announcement.
    """

    PLANNED = "planned"
    CHARGED = "charged"
    STARTED = "started"
    TRAINED = "trained"
    RELEASED = "released"
    ANNOUNCED = "announced"


class StudyBusyError(PrivTuneError):
    """Another process is running the study, or the arm, at this moment."""


class FilesMissingError(PrivTuneError):
    """Some folders with a study's files were not found, so the study is deleted in part only."""

    def __init__(self, name: str, folders: Sequence[Path]) -> None:
        places = ", ".join(map(str, folders))
        super().__init__(
            f"Study {name!r} is not deleted completely: it put files in {places}, which is not found "
            "from here. If it was moved, say where it is, or run where it is: "
            f"PRIVTUNE_ARTIFACTS=FOLDER privtune study delete {name}. If it is gone for good: "
            f"privtune study delete {name} --leave-files."
        )


class RepeatedRound(Protocol):
    """A round of an arm that runs the arm's strategy once for each repetition.

    What a declared mechanism and the engine have in common, so that both are driven by ``carry_on``.
    """

    def run(self, strategy: Strategy) -> list[Outcome]:
        """Return the outcome of each repetition."""
        ...


class Trainer(Protocol):
    """A trainer of an arm: the engine, or another library under a declared mechanism."""

    @property
    def device(self) -> str:
        """The device that the arm is trained on, in words for certificates."""
        ...

    @property
    def shows_output(self) -> bool:
        """Whether the arm's records are declared public, so that what a training prints may be shown."""
        ...

    def rehearse(self, plan: Plan) -> float | None:
        """Try the arm on made-up records, before the charge; return its expected seconds, if known."""
        ...

    def prepare(self, plan: Plan) -> tuple[Strategy, RepeatedRound]:
        """Return the arm's strategy and its round; may touch the data, for the arm has started."""
        ...

    def finish(self, plan: Plan, outcome: Outcome, repetition: int) -> Measurement:
        """Return the measurement of a repetition's released model on the test split, as planned."""
        ...


class Life(StoredStudy):
    """One study in its storage, and the transitions of its arms.

    **Guarantee**: an arm is charged once, for its plan's digest, before it starts; its first release
    stays; with the settlement its secret and the models that lost are forgotten.
    """

    def __init__(self, name: str, url: str) -> None:
        self.url = url
        check_database(name, url)
        self.ledger = Ledger(url)
        try:
            super().__init__(self.ledger.log.storage, name)
            place = Place("privtune_studies", "spec", f"name = {name!r}")
            with parsing(place, refusals=False):
                self.spec = StudySpec.parse(dict(self.row.spec), stored=True)
        except BaseException:
            self.ledger.close()
            raise
        self._check_folders()
        self._close_folders()
        self.budget = self.spec.budget.name
        # Releases that were held against their charges: name, digest of the arm, digest of the release.
        self._proved: set[tuple[str, str, str]] = set()
        self.trials = StudyTrials(self.storage, name, self.results.within("trials"))

    def _check_folders(self) -> None:
        """Refuse study folders that other users may have written to."""
        if self._is_another_users():  # whose ledger is trusted as well
            return
        for folder in (self.folder.parent, self.folder):
            problem = folder_problem(folder)
            if problem is not None:
                raise UntrustedPathError(problem)

    def _is_another_users(self) -> bool:
        """Return whether both database and folder belong to another user, as when a curator reads them."""
        database = database_path(self.storage.url)
        if database is None:
            return False
        owner = owner_of(database)
        return owner == owner_of(self.folder.parent) and owner != os.geteuid()

    def _close_folders(self) -> None:
        """Make the folder of a study's files private to its owner, if it has files."""
        if not self.files.names():
            return
        made_private(self.folder)  # a study's own folder is its owner's, whoever made it how
        if "PRIVTUNE_ARTIFACTS" not in os.environ:  # which may name a folder of others
            made_private(self.folder.parent)

    def close(self) -> None:
        """Close the connections to trials and ledger."""
        self.trials.close()
        self.ledger.close()

    # How far it is: what rows and charges say.

    def arms(self) -> dict[str, Arm]:
        """Return the stages and the arms by name, in order; check new releases against their charges."""
        arms = super().arms()
        # All that a spec declares was stored with it.
        if len(arms) < len(self.spec.stages) + len(self.spec.arms):
            place = Place("privtune_arms", "study", f"study = {self.name!r}")
            raise place.error("names fewer arms than the study's spec declares")
        self._prove(arms)
        return arms

    def arm(self, name: str) -> Arm | None:
        """Return one stage or arm after checking its release against its charge; None for an unknown name."""
        arm = super().arm(name)
        if arm is not None:
            self._prove({name: arm})
        return arm

    def _prove(self, arms: Mapping[str, Arm]) -> None:
        """Refuse a release whose charge is missing or differs from it; check each release once.

        Before the settlement nothing tells a forged release, or a forged result of a sealed trial, from a
        true one: the ledger has not seen either. An arm without any guarantee has no charge at all.
        """
        new_releases: dict[str, Arm] = {}
        for name, arm in arms.items():
            if arm.release is not None and _proof_key(arm) not in self._proved:
                new_releases[name] = arm
        if not new_releases:
            return
        charges = self.charges(new_releases)
        for name, arm in new_releases.items():
            if arm.plan.is_private and name not in charges:
                place = arm_place(self.name, name, "release")
                raise place.error(f"holds a release that budget {self.budget!r} has no charge for")
            self._proved.add(_proof_key(arm))

    def _check_charge(self, name: str, arm: Arm, charge: Charge) -> None:
        """Refuse an arm whose charge is for another event, or was settled by another release."""
        if arm.plan.charged != charge.event:
            place = arm_place(self.name, name, "plan")
            raise place.error(f"is of another event than charge {charge.id} is for")
        if charge.release_digest in ("", arm.release_digest):
            return
        # It may have been released since it was read.
        again = super().arm(name)
        if again is None or again.release_digest != charge.release_digest:
            place = arm_place(self.name, name, "release")
            raise place.error(f"is not the release that settled charge {charge.id}")

    def plans(self) -> dict[str, Plan]:
        """Return the plans of the arms by name, in order."""
        plans = [arm.plan for arm in self.arms().values()]
        return {plan.arm: plan for plan in plans if isinstance(plan, Plan)}

    def stages(self) -> dict[str, StagePlan]:
        """Return the plans of the stages by name, in order."""
        plans = [arm.plan for arm in self.arms().values()]
        return {plan.arm: plan for plan in plans if isinstance(plan, StagePlan)}

    def stage_releases(self) -> dict[str, Mapping[str, object]]:
        """Return the releases of stages by stage name."""
        releases: dict[str, Mapping[str, Any]] = {}
        for name, arm in self.arms().items():
            if isinstance(arm.plan, StagePlan) and arm.release is not None:
                releases[name] = deepcopy(arm.release)
        return releases

    def finished(self) -> bool:
        """Return whether every arm of the spec is released and announced; False for an open study."""
        if self.spec.task is None:  # an open study may get another arm at any time
            return False
        return all(arm.announced for arm in self.arms().values())

    def task(self) -> Task:
        """Return the study's task, updated by the releases of its stages."""
        return self.spec.load_task(self.stage_releases())

    def charges(self, arms: Mapping[str, Arm] | None = None) -> dict[str, Charge]:
        """Return the charges of ``arms``, or of all arms, by name, without voided ones."""
        if arms is None:
            arms = self.arms()
        if not arms:
            return {}
        by_digest = {
            charge.plan_digest: charge
            for charge in self.ledger.charges(self.budget)
            if charge.state is not ChargeState.VOIDED
        }
        charges: dict[str, Charge] = {}
        for name, arm in arms.items():
            charge = by_digest.get(arm.digest)
            if charge is not None:
                charges[name] = charge
        for name, charge in charges.items():
            self._check_charge(name, arms[name], charge)
        return charges

    def charge_of(self, plan: AnyPlan) -> Charge | None:
        """Return an arm's charge; None for an arm without any guarantee."""
        charge = self.charges(self._one(plan)).get(plan.arm)
        if charge is None and plan.is_private:
            raise ChargeStateError(f"Arm {plan.arm!r} of study {self.name!r} is not charged.")
        return charge

    def _one(self, plan: AnyPlan) -> dict[str, Arm]:
        """Return a dict of one arm by its name; empty if the arm has no row."""
        arm = self.arm(plan.arm)
        if arm is None:
            return {}
        return {plan.arm: arm}

    def _existing_arm(self, plan: AnyPlan) -> Arm:
        """Return an arm's row; refuse where it was deleted."""
        arm = self.arm(plan.arm)
        if arm is None:
            raise PrivTuneError(f"Study {self.name!r} has no arm {plan.arm!r} any more.")
        return arm

    def stage(self, plan: AnyPlan) -> Stage:
        """Return the state of an arm in its life, from its charge, release and announcement."""
        one = self._one(plan)
        arm = one.get(plan.arm)
        charge = self.charges(one).get(plan.arm)
        if arm is None or (plan.is_private and charge is None):
            return Stage.PLANNED
        if arm.announced:
            return Stage.ANNOUNCED
        if arm.release is not None:
            is_settled = charge is None or charge.state is ChargeState.SETTLED
            if is_settled and arm.secret is None:
                return Stage.RELEASED
            return Stage.TRAINED
        if charge is not None and charge.state is ChargeState.RESERVED:
            return Stage.CHARGED
        return Stage.STARTED

    def release(self, plan: Plan, arm: Arm | None = None) -> Release | None:
        """Return an arm's release, None until it is trained.

        Args:
            plan: The arm's plan.
            arm: Its row, where it has been read already.
        """
        if arm is None:
            arm = self._existing_arm(plan)
        if arm.release is None:
            return None
        results = self.released(plan.arm)
        trials = partial(self.kept_trials, plan)
        document = deepcopy(arm.release)
        return load_release(plan, results, document, self.guarantee(plan), trials)

    def kept_trials(self, plan: Plan) -> list[FrozenTrial]:
        """Return an arm's trials as they were recorded; refuse trials changed since the settlement.

        Before the settlement nobody can tell.
        """
        trials = self.trials.of(plan.arm)
        charge = self.charges(self._one(plan)).get(plan.arm)
        if charge is None or not charge.trials_digest:
            return trials
        if digest_of_trials(trials) != charge.trials_digest:
            arm = f"study {self.name!r}, arm {plan.arm!r}"
            what = "other trials than those that were settled"
            if plan.is_sealed:
                raise Place("privtune_blobs", "data", arm).error(f"holds {what}")
            raise Place("trials", "value", arm).error(f"and Optuna's other tables hold {what}")
        return trials

    def lay_out_trials(self, plan: Plan) -> None:
        """Write an arm's sealed trials to Optuna's tables for its dashboard, unless this store is a copy."""
        if self.storage.original() is None:
            self.trials.lay_out(plan.arm)

    def guarantee(self, plan: AnyPlan) -> Guarantee:
        """Return the guarantee that an arm costs by itself, at the δ of the study's budget."""
        budget = self.spec.budget
        if not plan.is_private:
            return Guarantee(math.inf, budget.delta, "non_private", budget.adjacency)
        return budget.guarantee_of(plan.charged)

    def statuses(self) -> tuple[ArmStatus, ...]:
        """Return the status of every arm with its release, in order."""
        statuses: list[ArmStatus] = []
        for arm, state in self._states(self.arms()):
            if isinstance(arm.plan, Plan):
                release = self.release(arm.plan, arm)
                status = ArmStatus(arm.plan, self.guarantee(arm.plan), state, release)
                statuses.append(status)
        return tuple(statuses)

    def stage_statuses(self) -> tuple[StageStatus, ...]:
        """Return the status of every stage with its release, in order."""
        statuses: list[StageStatus] = []
        stages = {name: arm for name, arm in self.arms().items() if isinstance(arm.plan, StagePlan)}
        for arm, state in self._states(stages):
            if isinstance(arm.plan, StagePlan):
                guarantee = self.guarantee(arm.plan)
                status = StageStatus(arm.plan, guarantee, state, deepcopy(arm.release))
                statuses.append(status)
        return tuple(statuses)

    def _states(self, arms: Mapping[str, Arm]) -> Iterator[tuple[Arm, str]]:
        """Yield stages and arms with the states of their charges, in words."""
        charges = self.charges(arms)
        for name, arm in arms.items():
            if name in charges:
                yield arm, str(charges[name].state)
            elif arm.plan.is_private:
                yield arm, "planned"
            else:
                yield arm, "not charged"

    def secret(self, plan: AnyPlan) -> bytes:
        """Return the 32 secret bytes that everything random in an arm derives from."""
        secret = self._existing_arm(plan).secret
        if secret is None:
            raise PrivTuneError(
                f"Arm {plan.arm!r} of study {self.name!r} has no secret any more: it was released."
            )
        return secret

    def sealed(self, arm: str) -> Results:
        """Return the results of an arm that stay inside the trust boundary."""
        return self.results.within(f"sealed/{arm}")

    def released(self, arm: str) -> Results:
        """Return the results of an arm that are released."""
        return self.results.within(arm)

    def certificate(self) -> dict[str, object]:
        """Return the certificate of the budget, JSON-ready."""
        from privtune.ledger import export_certificate

        return export_certificate(self.storage, self.budget)

    def planned(self, plan: Plan) -> Plan:
        """Return the stored plan of an arm of this name if there is one, else ``plan``."""
        arm = self.arm(plan.arm)
        if arm is None or not isinstance(arm.plan, Plan):
            return plan
        self.check_same(plan, arm.plan)
        return arm.plan

    # What runs: locks, seals, files.

    def outlast(self, step: Callable[[], T]) -> T:
        """Call a step and return its value; call it again after a lost connection is restored.

        For steps that may be taken twice, as all transitions may: whether the first reached the database
        is not known.
        """
        losses = 0
        stages: list[Stage] = []
        with self.storage.outlasting(PATIENCE):
            while True:
                try:
                    return step()
                except LedgerConnectionError:
                    if self.storage.dialect != "postgresql" or losses == _LOSSES:
                        raise
                    stages_now = patiently(self._all_stages)
                    # Where nothing moved since, the step itself may be what ends the connection.
                    if stages_now == stages:
                        losses += 1
                    else:
                        losses = 1
                    stages = stages_now

    def _all_stages(self) -> list[Stage]:
        """Return the life state of each stage and arm, in order."""
        return [self.stage(arm.plan) for arm in self.arms().values()]

    @contextmanager
    def alone(self, arm: str | None = None) -> Iterator[None]:
        """Hold the lock of the study, or of one arm, for a ``with`` block.

        Args:
            arm: The arm's name; None for the whole study.

        Raises:
            StudyBusyError: If another process is running it, or has taken it over since.
        """
        key = self.name
        what = f"Study {key!r}"
        if arm is not None:
            key = f"{self.name}/{arm}"
            what = f"Arm {key!r}"
        with (
            self.storage.outlasting(PATIENCE),
            self._not_taken_over(what),
            self.storage.hold(key, self.place) as alone,
        ):
            if not alone:
                raise StudyBusyError(
                    f"{what} is being run by another process at this moment; nothing was done or "
                    f"charged here. See how far it is: privtune study show {self.name}."
                )
            try:
                yield
            except KeyboardInterrupt as error:
                again = f"privtune study run {self.name}"
                if arm is not None:
                    again = (
                        "the same call. Trials that are done stay; one that was stopped begins again "
                        "from its seed, and ends with the same release."
                    )
                error.add_note(f"Charges stay. To continue, run: {again}")
                raise

    @contextmanager
    def _not_taken_over(self, what: str) -> Iterator[None]:
        """Raise ``StudyBusyError`` if another process has taken over the lock during a ``with`` block."""
        try:
            yield
        except HoldLostError as error:
            raise StudyBusyError(
                f"{what} was taken over by another process while this one could not reach the database, and "
                "this one stops here. What was charged stays charged. See how far it is: privtune study "
                f"show {self.name}."
            ) from error

    @contextmanager
    def seal(
        self, plan: AnyPlan, *, rehearsal: bool = False, private: bool = True
    ) -> Iterator[None]:
        """Seal a ``with`` block of a sealed arm; for other arms, only send its output to the curator's file.

        Args:
            plan: The arm's plan.
            rehearsal: Whether the block is a rehearsal.
            private: Whether the block sees private records. If not, the output of an arm whose trials are
                paid for is shown: it tells nothing that must stay secret.
        """
        seal: AbstractContextManager[None] = nullcontext()
        if plan.is_sealed:
            seal = sealed(self._log(plan), rehearsal=rehearsal)
        elif private:
            seal = kept_for_curator(self._log(plan))
        try:
            with seal:
                yield
        except SystemExit as error:
            # An exit would pass every handler of errors, and a command that stopped half-way report success.
            raise PrivTuneError(
                f"The code that arm {plan.arm!r} runs ends the program (exit {error.code!r}). Let it "
                "return or raise an error instead of calling sys.exit."
            ) from error

    @contextmanager
    def stopping(self, arm: str) -> Iterator[None]:
        """Turn errors that may come from the data into ``ArmStoppedError``, with a record for the curator."""
        has_stopped = False
        try:
            with interruptible():
                yield
        except WITHOUT_DATA:
            raise
        except WorkerStoppedError:  # the worker has kept what stopped it
            has_stopped = True
        except Exception as error:
            with suppress(PrivTuneError):  # its context would be the error
                self.record_failure(arm, error)
            has_stopped = True
        if has_stopped:
            stop = ArmStoppedError(self.name, arm)
            try:
                raise stop from None
            finally:
                stop.__context__ = None  # it would show the failure to whoever looks at the error

    def _log(self, plan: AnyPlan) -> Path:
        """Return the path of the curator's file for an arm's output; the null device if it cannot be made."""
        try:
            return self.place(f"sealed/{plan.arm}.log")
        except OSError:  # a worker of another user or machine: the folder is not its own
            return Path(os.devnull)

    def place(self, name: str) -> Path:
        """Return the path of a study's file that is no result, and make its folder."""
        self.storage.check_original()
        return self.outlast(partial(self.files.file, name))  # the first notes the folder

    def write(self, arm: str, name: str) -> Path:
        """Return the path of a released file, which is written there first if it is missing."""
        results = self.released(arm)
        path = results.folder / name
        if path.exists():
            return path
        content = results.get(name)
        if content is not None:
            self.storage.check_original()
            self.files.write(f"{arm}/{name}", content)
        return path

    def record_failure(self, arm: str, error: BaseException) -> None:
        """Store the whole traceback of an error for the curator alone, since it may show data."""
        lines = traceback.format_exception(error)
        self.add_failure(arm, "".join(lines))

    def delete(self, *, leave_objects: bool = False, leave_files: bool = False) -> list[Path]:
        """Delete the study, its trials and its models; return the folders that hold files of others.

        Stopped anywhere, it is completed by another call: the study's rows go last. What was charged
        stays charged.

        Args:
            leave_objects: Whether objects stay in the object store.
            leave_files: Whether folders that are not found are taken for gone.

        Raises:
            StudyBusyError: If another process is running the study.
            FilesMissingError: Folders were not found. What was found is deleted.
        """
        from privtune.ledger.audits import note_deleted

        self.storage.check_original()
        with self.storage.read() as connection:
            # Before anything else of that name is deleted.
            check_there(connection, self.row, deleting=True)
        arms = self.arm_names()  # the rest of their rows may be damaged
        with ExitStack() as lock:
            with suppress(OSError):  # where no lock can be put, nobody has one
                for arm in arms:
                    with self.alone(arm):
                        pass
                lock.enter_context(self.alone())
            self.begin_deletion()
            self.trials.delete(arms, repeats=self.spec.repeats)
            self._forget_rounds()
            note_deleted(self.ledger.log, self.budget, self.name)
            staying, missing = self.remove(leave_objects=leave_objects, leave_files=leave_files)
        if missing:
            raise FilesMissingError(self.name, missing)
        return staying

    def _forget_rounds(self) -> None:
        """Delete the rows of sealed rounds in the ledger's database: numbers, scores, times."""
        charges = self.charges().values()
        with self.writing(deleting=True) as connection:
            for charge in charges:
                _, number = Ledger.parse(charge.id)
                forget_round(connection, self.budget, number)

    # The transitions.

    def charge(self, plans: Sequence[AnyPlan]) -> None:
        """Charge all of these arms or none: planned → charged.

        Args:
            plans: The plans; those without any guarantee have nothing to be charged.

        Raises:
            BudgetExceededError: If the budget does not admit all of them; none is charged then.
        """
        present = self.arms()
        private_arms: list[Arm] = []
        for plan in plans:
            if plan.is_private:
                # A row's own plan and secret stay: a new secret would be another arm.
                arm = present.get(plan.arm)
                if arm is None:
                    arm = new_arm(self.spec, self.row, plan)
                private_arms.append(arm)
        requests = [self._charge_request(arm) for arm in private_arms]
        if requests:
            work = partial(self.add_arms, new_arms=private_arms)
            self.ledger.reserve(self.budget, requests, work=work)

    def _charge_request(self, arm: Arm) -> ChargeRequest:
        """Return the request to the ledger for an arm's charge, identified by the plan's digest."""
        plan = arm.plan
        return ChargeRequest(
            event=plan.charged,
            study=self.name,
            arm=plan.arm,
            plan_digest=arm.digest,
            public=plan.public_facts,
            unit=plan.unit,
            dataset=self.spec.dataset_of(plan.dataset),
            note=self._note_of(plan),
        )

    def _note_of(self, plan: AnyPlan) -> str:
        """Return what weakens an arm's guarantee, in words, for the note of its charge."""
        notes = [plan.noise_note, self.spec.weakened, declared_note(plan.public_facts)]
        return "; ".join(filter(None, notes))

    def start(self, plan: AnyPlan) -> None:
        """Mark an arm's charge as started, with the rows of its round: charged → started.

        From here on the charge is spent, whatever happens: data may be touched.
        """
        charge = self.charge_of(plan)
        if charge is None or self._existing_arm(plan).release is not None:
            return
        if plan.runs is not None:
            secret = self.secret(plan)
            # Drawn from the arm's secret, so the same whenever it is drawn; opened once.
            count = sum(plan.drawn_runs(Streams(secret)))
            rounds = make_rounds(self.ledger)
            rounds.open(charge.id, count=count, secret=secret)
        elif charge.state is ChargeState.RESERVED:
            self._move(charge, Kind.STARTED)

    def keep(self, plan: Plan, document: Mapping[str, object], files: Mapping[str, bytes]) -> None:
        """Store an arm's release with its files, unless it has one: started → trained.

        Args:
            plan: The arm's plan.
            document: The release, ready for JSON.
            files: The released files by name, such as the model; they are stored with the release or
                not at all.
        """
        results = self.released(plan.arm)
        staged_files: dict[str, Staged] = {}
        for name, content in files.items():
            staged_files[name] = results.stage(name, content)

        def put(connection: Connection) -> None:
            for name, staged in staged_files.items():
                results.insert(name, staged, connection)

        is_first = False
        try:
            is_first = self.set_release(plan.arm, document, put)
        finally:
            if not is_first:
                for name, staged in staged_files.items():
                    results.discard(name, staged)

    def settle(self, plan: AnyPlan) -> None:
        """Settle an arm's charge and delete what is sealed, in one transaction: trained → released.

        The charge notes the digests of the release, of its transcript and of sealed trials: what is
        changed in the rows later is found by them.
        """
        charge = self.charge_of(plan)
        arm = self._existing_arm(plan)
        release = arm.release or {}
        forget = partial(self.forget_sealed, arm=plan.arm)
        if charge is None or charge.state is ChargeState.SETTLED:
            with self.storage.write() as connection:
                forget(connection)
            return
        digests = self._digests_of(plan, arm)
        # Public: whether a declared training was checked belongs into the certificate.
        note = release.get("checked", "")
        self._move(charge, Kind.SETTLED, work=forget, sealed=digests, note=note)

    def _digests_of(self, plan: AnyPlan, arm: Arm) -> dict[str, object]:
        """Return the digests of a release, its transcript and its sealed trials, by the ledger's names."""
        release = arm.release or {}
        transcript_digest = release.get("transcript_digest")
        if isinstance(plan, StagePlan):
            # A stage has no transcript: what it released is all there is.
            text = json.dumps(release, sort_keys=True)
            transcript_digest = hashlib.sha256(text.encode()).hexdigest()
        digests = {"transcript_digest": transcript_digest, "release_digest": arm.release_digest}
        if isinstance(plan, Plan) and plan.search is not None:
            trials = self.trials.of(plan.arm)
            digests["trials_digest"] = digest_of_trials(trials)
        return digests

    def announce(self, plan: Plan, notify: Callable[[Plan, Release], None]) -> Release:
        """Write the model, and the certificate from time to time; notify the observer: released → announced.

        Args:
            plan: The arm's plan.
            notify: Hears of the release; called again only if the call was stopped before it was noted.

        Returns:
            The release.

        Raises:
            PrivTuneError: If the arm has not been trained.
        """
        arm = self._existing_arm(plan)
        release = self.release(plan, arm)
        if release is None:
            raise PrivTuneError(f"Arm {plan.arm!r} of study {self.name!r} has not been trained.")
        if arm.announced:
            return release
        results = self.released(plan.arm)
        for name in results.names():
            self.write(plan.arm, name)
        # Before the announcement is noted: where the process is stopped here, all of it is done again.
        if self._certificate_is_due(plan):
            self.write_certificate()
        notify(plan, release)
        # Times of files would tell how long the arm took, and with that how many trials it had.
        self.files.forget_times(plan.arm)
        self.outlast(partial(self.set_announced, plan.arm))  # who heard hears no second time
        return release

    def _certificate_is_due(self, plan: Plan) -> bool:
        """Return whether a release brings the certificate up to date; of many releases each tenth does."""
        if self.spec.task is None:  # an open study may be at its end with any arm
            return True
        others = [arm for name, arm in self.arms().items() if name != plan.arm]
        announced = sum(arm.announced for arm in others)
        is_last = announced == len(others)
        return is_last or announced < _EVERY or announced % _EVERY == 0

    def write_certificate(self) -> None:
        """Write the budget's certificate into the study's folder: it holds all charges, so one is enough."""
        head = ""
        # Another arm's process may write its own between reading the log and writing the file.
        for _ in range(_WRITERS):
            if head == self.ledger.head(self.budget):
                return
            certificate = self.certificate()
            head = str(certificate["head"])
            self.files.write(CERTIFICATE, json_lines(certificate).encode())
            self.files.forget_times(CERTIFICATE)

    def _move(self, charge: Charge, kind: Kind, **options: object) -> None:
        """Move a charge to its next state; accept that another process has done so."""
        try:
            self.ledger.move(charge.id, kind, **options)  # type: ignore[arg-type]
        except ChargeStateError:
            # Another process was faster, which is all that was wanted.
            state = self.ledger.charge(charge.id).state
            if str(state) != str(kind):
                raise


def _proof_key(arm: Arm) -> tuple[str, str, str]:
    """Return the arm name, arm digest and release digest that identify a checked release."""
    return arm.plan.arm, arm.digest, arm.release_digest


def new_arm(spec: StudySpec, row: StudyRow, plan: AnyPlan) -> Arm:
    """Return a new arm whose secret is OS entropy, or derived from the study's seed if it sets one."""
    digest = arm_digest(row, plan_text(plan))
    if spec.seed is None:
        return Arm(plan, digest, secrets.token_bytes(32))
    streams = Streams(spec.seed.to_bytes(32, "big"))
    # A key of the arm's name: two arms with one noise would tell the difference of their releases.
    return Arm(plan, digest, streams.key(f"arm/{plan.arm}"))


def carry_on(
    life: Life,
    plans: Sequence[Plan],
    trainer: Trainer,
    observer: Observer,
    notify: Callable[[Plan, Release], None] | None = None,
    *,
    measure: Callable[[StagePlan], Mapping[str, object]] | None = None,
    check_data: Callable[[], None] | None = None,
    force: bool = False,
) -> tuple[Release, ...]:
    """Take arms through their life from any state to announcement; charge all of them before any starts.

    Args:
        life: The study.
        plans: The plans of the arms; what the study's spec declares, or one more of an open study.
        trainer: Trains them, each rehearsed before anything is charged.
        observer: Hears of each step; of a sealed arm when it begins and ends.
        notify: Hears of each release, once; ``observer.released`` unless it is given.
        measure: Measures a stage; may touch the data. Without it no stage runs.
        check_data: Looks at the records before the charge, and raises where the budget would be spent for
            nothing.
        force: Whether to go on where a stage's release says that it is not worth it.

    Returns:
        The releases, in the order of the plans.

    Raises:
        StageRefusedError: If a stage's release is a reason to stop, unless ``force``.
        ArmStoppedError: If a charged arm failed; its words say nothing of the data.
    """
    life.results.check()
    seconds: dict[str, float | None] = {}
    for plan in plans:
        stage = life.outlast(partial(life.stage, plan))
        if stage in (Stage.PLANNED, Stage.CHARGED, Stage.STARTED):
            with life.seal(plan, rehearsal=True, private=False):
                seconds[plan.arm] = trainer.rehearse(plan)
            observer.rehearsed(plan, seconds[plan.arm])
    if check_data is not None:
        life.outlast(check_data)
    stages: tuple[StagePlan, ...] = ()
    if measure is not None:
        stages = tuple(life.outlast(life.stages).values())
    life.outlast(partial(life.charge, [*stages, *plans]))
    for stage_plan in stages:
        life.outlast(partial(_release_stage, life, stage_plan, measure))
        released = life.outlast(life.stage_releases)[stage_plan.arm]
        refusal = stage_plan.stage.refusal(released)
        if refusal and not force:
            raise StageRefusedError(life.name, refusal)
    releases = []
    for plan in plans:
        lead = partial(
            _lead,
            life,
            plan,
            trainer,
            observer,
            seconds=seconds.get(plan.arm),
            notify=notify or observer.released,
        )
        releases.append(life.outlast(lead))
    return tuple(releases)


def _lead(
    life: Life,
    plan: Plan,
    trainer: Trainer,
    observer: Observer,
    *,
    seconds: float | None,
    notify: Callable[[Plan, Release], None],
) -> Release:
    """Take one charged arm from any later state of its life to announcement; return its release."""
    if life.stage(plan) in (Stage.CHARGED, Stage.STARTED):
        life.start(plan)
        _train(life, plan, trainer, observer, seconds)
    if life.stage(plan) is Stage.TRAINED:
        life.settle(plan)
    return life.announce(plan, notify)


def _release_stage(life: Life, plan: StagePlan, measure: Any) -> None:
    """Take one charged stage from any later state of its life to announcement; keep a stored release."""
    if life.stage(plan) in (Stage.CHARGED, Stage.STARTED):
        life.start(plan)
        with life.stopping(plan.arm), life.seal(plan):
            life.set_release(plan.arm, measure(plan))
    if life.stage(plan) is Stage.TRAINED:
        life.settle(plan)
    life.set_announced(plan.arm)


def _train(
    life: Life, plan: Plan, trainer: Trainer, observer: Observer, seconds: float | None
) -> None:
    """Train an arm inside its seal, and store its release.

    Args:
        life: The study.
        plan: The arm's plan; its charge has started.
        trainer: Trains it.
        observer: Hears that it begins, and that it was interrupted.
        seconds: What its rehearsal expected; stands in the release beside what it took.
    """
    observer.arm_started(plan)
    try:
        with life.stopping(plan.arm):
            with life.seal(plan, private=not trainer.shows_output):
                strategy, trials = trainer.prepare(plan)
                outcomes = trials.run(strategy)
                measured: list[Measurement] = []
                for number, outcome in enumerate(outcomes):
                    measured.append(trainer.finish(plan, outcome, number))
                machine = {**versions(), "device": trainer.device}
            cost = life.guarantee(plan)
            document, files = make_release(
                plan, outcomes, guarantee=cost, seconds=seconds, measured=measured, machine=machine
            )
            life.outlast(partial(life.keep, plan, document, files))
    except BaseException:
        observer.arm_failed(plan)
        raise
