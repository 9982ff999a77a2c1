"""The life of an arm: planned → charged → started → trained → released → announced.

One function a transition, each idempotent: after whatever stopped a study, the next call goes on. How far an
arm is stands in the ledger and in rows beside it, changed in the ledger's own transactions.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from privtune.accounting import Guarantee, epsilon
from privtune.errors import PrivTuneError
from privtune.execution.launchers import WorkerStoppedError
from privtune.files import made_private
from privtune.ledger import Charge, ChargeRequest, ChargeState, ChargeStateError, Ledger
from privtune.ledger.chain import Kind
from privtune.strategies import Outcome, Plan, Release
from privtune.strategies.plan import StagePlan
from privtune.study.failures import WITHOUT_DATA, ArmStoppedError, StageRefusedError
from privtune.study.observer import ArmStatus, StageStatus
from privtune.study.release import load_release, make_release
from privtune.study.rows import AnyPlan, Arm, Results, StoredStudy, check_there
from privtune.study.seal import kept_for_curator, sealed
from privtune.study.spec import StudySpec
from privtune.study.trials import StudyTrials
from privtune.tasks._facts import declared_note
from privtune.training.engine.compute import versions
from privtune.training.mechanism.streams import Streams

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

    from privtune.strategies import Strategy
    from privtune.study.observer import Observer
    from privtune.tasks import Task
    from privtune.training.mechanism.estimates import ScoreEstimate


class Stage(StrEnum):
    """How far an arm is."""

    PLANNED = "planned"
    CHARGED = "charged"
    STARTED = "started"
    TRAINED = "trained"
    RELEASED = "released"
    ANNOUNCED = "announced"


class StudyBusyError(PrivTuneError):
    """Another process is running the study, or the arm, at this moment."""


class Repeated(Protocol):
    """The round of an arm, which runs its strategy as often as the arm repeats."""

    def run(self, strategy: Strategy) -> list[Outcome]:
        """Return one outcome a repetition."""
        ...


class Trainer(Protocol):
    """Who trains an arm: the engine, or another library under a declared mechanism."""

    @property
    def device(self) -> str:
        """What the arm is computed on."""
        ...

    @property
    def shows_output(self) -> bool:
        """Whether the arm's records are declared public, so that what a training prints may be shown."""
        ...

    def rehearse(self, plan: Plan) -> float | None:
        """Try the arm on made-up records, before the charge; return its expected seconds, if known."""
        ...

    def prepare(self, plan: Plan) -> tuple[Strategy, Repeated]:
        """Return the arm's strategy and its round; may touch the data, for the arm has started."""
        ...

    def finish(self, plan: Plan, outcome: Outcome, repetition: int) -> Mapping[str, ScoreEstimate]:
        """Return the metrics of a repetition's released model on the test split, as planned."""
        ...


class Life(StoredStudy):
    """One study in its storage, and the transitions of its arms.

    **Guarantee**: an arm is charged once, for its plan's digest, before it starts; its first release
    stays; with the settlement its secret and the models that lost are forgotten.
    """

    _placed = False

    def __init__(self, name: str, url: str) -> None:
        self.url, self.ledger = url, Ledger(url)
        try:
            super().__init__(self.ledger.log.storage, name)
            self.spec = StudySpec.parse(dict(self.row.spec), stored=True)
        except BaseException:
            self.ledger.close()
            raise
        if self.files.names():  # a study's own folder is its owner's, whoever made it how
            made_private(self.folder)
            if "PRIVTUNE_ARTIFACTS" not in os.environ:  # which may name a folder of others
                made_private(self.folder.parent)
        self.budget = self.spec.budget.name
        self.trials = StudyTrials(self.storage, name)

    def close(self) -> None:
        """Close the connections."""
        self.trials.close()
        self.ledger.close()

    # How far it is: what rows and charges say.

    def plans(self) -> dict[str, Plan]:
        """Return the plans of the arms by name, in order."""
        return {n: arm.plan for n, arm in self.arms().items() if isinstance(arm.plan, Plan)}

    def stages(self) -> dict[str, StagePlan]:
        """Return the plans of the stages by name, in order."""
        return {n: arm.plan for n, arm in self.arms().items() if isinstance(arm.plan, StagePlan)}

    def stage_releases(self) -> dict[str, Mapping[str, Any]]:
        """Return what stages have released, by name."""
        return {
            name: arm.release
            for name, arm in self.arms().items()
            if isinstance(arm.plan, StagePlan) and arm.release is not None
        }

    def finished(self) -> bool:
        """Return whether every arm that the spec declares is released, and observers have heard of it."""
        return self.spec.task is not None and all(a.announced for a in self.arms().values())

    def task(self) -> Task:
        """Return the study's task with what its stages released."""
        return self.spec.load_task(self.stage_releases())

    def charges(self, arms: Mapping[str, Arm] | None = None) -> dict[str, Charge]:
        """Return the charges by arm."""
        arms = self.arms() if arms is None else arms
        known = {
            charge.plan_digest: charge
            for charge in self.ledger.charges(self.budget)
            if charge.state is not ChargeState.VOIDED
        }
        return {n: known[arm.digest] for n, arm in arms.items() if arm.digest in known}

    def charge_of(self, plan: AnyPlan) -> Charge | None:
        """Return an arm's charge; None for an arm without any guarantee."""
        charge = self.charges(self._one(plan)).get(plan.arm)
        if charge is None and plan.is_private:
            raise ChargeStateError(f"Arm {plan.arm!r} of study {self.name!r} is not charged.")
        return charge

    def _one(self, plan: AnyPlan) -> dict[str, Arm]:
        arm = self.arm(plan.arm)
        return {} if arm is None else {plan.arm: arm}

    def _there(self, plan: AnyPlan) -> Arm:
        if (arm := self.arm(plan.arm)) is None:
            raise PrivTuneError(f"Study {self.name!r} has no arm {plan.arm!r} any more.")
        return arm

    def stage(self, plan: AnyPlan) -> Stage:
        """Return how far an arm is. Without any guarantee it has no charge to wait for."""
        one = self._one(plan)
        arm, charge = one.get(plan.arm), self.charges(one).get(plan.arm)
        if arm is None or (plan.is_private and charge is None):
            return Stage.PLANNED
        if arm.announced:
            return Stage.ANNOUNCED
        if arm.release is not None:
            settled = charge is None or charge.state is ChargeState.SETTLED
            return Stage.RELEASED if settled and arm.secret is None else Stage.TRAINED
        started = charge is None or charge.state is not ChargeState.RESERVED
        return Stage.STARTED if started else Stage.CHARGED

    def release(self, plan: Plan, arm: Arm | None = None) -> Release | None:
        """Return an arm's release, None until it is trained."""
        document = (arm or self._there(plan)).release
        if document is None:
            return None
        results, kept = self.released(plan.arm), partial(self.trials.of, plan.arm)
        return load_release(plan, results, document, self.guarantee(plan), kept)

    def guarantee(self, plan: AnyPlan) -> Guarantee:
        """Return what an arm costs alone."""
        budget = self.spec.budget
        if not plan.is_private:
            return Guarantee(math.inf, budget.delta, "non_private", budget.adjacency)
        return epsilon(plan.charged, budget.delta, adjacency=budget.adjacency)

    def statuses(self) -> tuple[ArmStatus, ...]:
        """Return how far every arm is, in order, for people."""
        return tuple(
            ArmStatus(arm.plan, self.guarantee(arm.plan), state, self.release(arm.plan, arm))
            for arm, state in self._states()
            if isinstance(arm.plan, Plan)
        )

    def stage_statuses(self) -> tuple[StageStatus, ...]:
        """Return how far every stage is, in order, for people."""
        return tuple(
            StageStatus(arm.plan, self.guarantee(arm.plan), state, arm.release)
            for arm, state in self._states()
            if isinstance(arm.plan, StagePlan)
        )

    def _states(self) -> Iterator[tuple[Arm, str]]:
        arms = self.arms()
        charges = self.charges(arms)
        for name, arm in arms.items():
            planned = "planned" if arm.plan.is_private else "not charged"
            yield arm, str(charges[name].state) if name in charges else planned

    def secret(self, plan: AnyPlan) -> bytes:
        """Return the 32 secret bytes that everything random in an arm derives from."""
        secret = self._there(plan).secret
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

    def certificate(self) -> dict[str, Any]:
        """Return the certificate of the budget, JSON-ready."""
        from privtune.ledger import export_certificate

        return export_certificate(self.storage, self.budget)

    def planned(self, plan: Plan) -> Plan:
        """Return the plan that an arm of this name exists with, which runs; or this one."""
        arm = self.arm(plan.arm)
        if arm is None or not isinstance(arm.plan, Plan):
            return plan
        self.check_same(plan, arm.plan)
        return arm.plan

    # What runs: locks, seals, files.

    @contextmanager
    def alone(self, arm: str | None = None) -> Iterator[None]:
        """Run the study, or one arm of it, while no other process does."""
        held = self.name if arm is None else f"{self.name}/{arm}"
        self._note_place()
        with self.storage.hold(held, self.place) as alone:
            if not alone:
                what = f"Study {self.name!r}" if arm is None else f"Arm {held!r}"
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
                error.add_note(f"What was charged stays charged; go on with: {again}")
                raise

    @contextmanager
    def seal(
        self, plan: AnyPlan, *, rehearsal: bool = False, private: bool = True
    ) -> Iterator[None]:
        """Run a block of an arm's code under the seal; keep its output if all of its trials are paid for.

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
        """Turn whatever stops a charged arm into ``ArmStoppedError``, errors of PrivTune's own included."""
        stopped = False
        try:
            yield
        except WITHOUT_DATA:
            raise
        except WorkerStoppedError:  # the worker has kept what stopped it
            stopped = True
        except Exception as error:
            with suppress(PrivTuneError):  # its context would be the error
                self.record_failure(arm, error)
            stopped = True
        if stopped:
            stop = ArmStoppedError(self.name, arm)
            try:
                raise stop from None
            finally:
                stop.__context__ = None  # it would show the failure to whoever looks at the error

    def _log(self, plan: AnyPlan) -> Path:
        try:
            return self.place(f"sealed/{plan.arm}.log")
        except OSError:  # a worker of another user or machine: the folder is not its own
            return Path(os.devnull)

    def place(self, name: str) -> Path:
        """Return the path of a study's file that is no result, and make its folder."""
        self._note_place()
        return self.files.file(name)

    def _note_place(self) -> None:
        if not self._placed:
            self.note_place()
            self._placed = True

    def write(self, arm: str, name: str) -> Path:
        """Return where a released file is; put it there if it is not."""
        results = self.released(arm)
        path = results.folder / name
        if not path.exists() and (content := results.get(name)) is not None:
            self._note_place()
            self.files.write(f"{arm}/{name}", content)
        return path

    def record_failure(self, arm: str, error: BaseException) -> None:
        """Keep the whole traceback of an error for the curator alone: it may come from the data."""
        self.add_failure(arm, "".join(traceback.format_exception(error)))

    def delete(self, *, leave_objects: bool = False) -> list[Path]:
        """Delete the study, its trials and its models; return the folders that hold files of others.

        Stopped anywhere, it is completed by another call: the study's rows go last.
        """
        from privtune.ledger.audits import note_deleted

        with self.storage.read() as connection:
            # Before anything else of that name is deleted.
            check_there(connection, self.row, deleting=True)
        arms = list(self.arms())
        with ExitStack() as held:
            with suppress(OSError):  # where no lock can be put, nobody has one
                for arm in arms:
                    with self.alone(arm):
                        pass
                held.enter_context(self.alone())
            self.begin_deletion()
            self.trials.delete(arms, repeats=self.spec.repeats)
            note_deleted(self.ledger.log, self.budget, self.name)
            return self.remove(leave_objects=leave_objects)

    # The transitions.

    def charge(self, plans: Sequence[AnyPlan]) -> None:
        """Charge arms, all or none: planned → charged. Arms of an open study are added with it."""
        known = self.arms()
        asked = [
            known.get(plan.arm) or new_arm(self.spec, self.row.uid, plan)
            for plan in plans
            if plan.is_private
        ]
        requests = [
            ChargeRequest(
                event=arm.plan.charged,
                study=self.name,
                arm=arm.plan.arm,
                plan_digest=arm.digest,
                public=arm.plan.public_facts,
                unit=arm.plan.unit,
                note=self._note_of(arm.plan),
            )
            for arm in asked
        ]
        if requests:
            work = partial(self.add_arms, asked=asked)
            self.ledger.reserve(self.budget, requests, work=work)

    def _note_of(self, plan: AnyPlan) -> str:
        notes = plan.noise_note, self.spec.weakened, declared_note(plan.public_facts)
        return "; ".join(filter(None, notes))

    def start(self, plan: AnyPlan) -> None:
        """Mark an arm's charge as started, with the rows of its round: charged → started."""
        charge = self.charge_of(plan)
        if charge is None or self._there(plan).release is not None:
            return
        if plan.runs is not None:
            from privtune.execution.table import make_rounds

            secret = self.secret(plan)
            # Drawn from the arm's secret, so the same whenever it is drawn; opened once.
            count = sum(plan.drawn_runs(Streams(secret)))
            make_rounds(self.ledger).open(charge.id, count=count, secret=secret)
        elif charge.state is ChargeState.RESERVED:
            self._move(charge, Kind.STARTED)

    def keep(self, plan: Plan, document: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        """Store what an arm releases, the first time: started → trained."""
        results = self.released(plan.arm)
        staged = {name: results.stage(name, content) for name, content in files.items()}

        def put(connection: Connection) -> None:
            for name, one in staged.items():
                results.insert(name, one, connection)

        first = False
        try:
            first = self.set_release(plan.arm, document, put)
        finally:
            if not first:
                for name, one in staged.items():
                    results.discard(name, one)

    def settle(self, plan: AnyPlan) -> None:
        """Settle an arm's charge and forget what is sealed, in one transaction: trained → released."""
        charge, release = self.charge_of(plan), self._there(plan).release or {}
        forget = partial(self.forget_sealed, arm=plan.arm)
        if charge is None or charge.state is ChargeState.SETTLED:
            with self.storage.write() as connection:
                forget(connection)
            return
        digest = release.get("transcript_digest")
        if isinstance(plan, StagePlan):
            digest = hashlib.sha256(json.dumps(release, sort_keys=True).encode()).hexdigest()
        # Public: whether a declared training was checked belongs into the certificate.
        told = {"sealed": {"transcript_digest": digest}, "note": release.get("checked", "")}
        self._move(charge, Kind.SETTLED, work=forget, **told)

    def announce(self, plan: Plan, tell: Callable[[Plan, Release], None]) -> Release:
        """Write the model and the budget's certificate, and tell who hears: released → announced."""
        arm = self._there(plan)
        release = self.release(plan, arm)
        if release is None:
            raise PrivTuneError(f"Arm {plan.arm!r} of study {self.name!r} has not been trained.")
        if not arm.announced:
            results = self.released(plan.arm)
            for name in results.names():
                self.write(plan.arm, name)
            text = json.dumps(self.certificate(), indent=2, allow_nan=False)
            self.files.write(f"{plan.arm}/certificate.json", text.encode())
            tell(plan, release)
            self.files.forget_times(plan.arm)
            self.set_announced(plan.arm)
        return release

    def _move(self, charge: Charge, kind: Kind, **options: object) -> None:
        try:
            self.ledger.move(charge.id, kind, **options)  # type: ignore[arg-type]
        except ChargeStateError:
            # Another process was faster, which is all that was wanted.
            if str(self.ledger.charge(charge.id).state) != str(kind):
                raise


def new_arm(spec: StudySpec, uid: str, plan: AnyPlan) -> Arm:
    """Return a new arm. Its secret is OS entropy, unless the study sets a seed, which it records."""
    digest = hashlib.sha256(json.dumps([uid, plan.digest()]).encode()).hexdigest()
    if spec.seed is None:
        return Arm(plan, digest, secrets.token_bytes(32))
    return Arm(plan, digest, Streams(spec.seed.to_bytes(32, "big")).key(f"arm/{plan.arm}"))


def carry_on(
    life: Life,
    plans: Sequence[Plan],
    trainer: Trainer,
    observer: Observer,
    tell: Callable[[Plan, Release], None] | None = None,
    *,
    measure: Callable[[StagePlan], Mapping[str, Any]] | None = None,  # may touch the data
    look: Callable[[], None] | None = None,  # raises where the budget would be spent for nothing
    anyway: bool = False,
) -> tuple[Release, ...]:
    """Lead arms from wherever they are to their announcement; charge all of them before any starts."""
    life.results.check()
    seconds: dict[str, float | None] = {}
    for plan in plans:
        if life.stage(plan) in (Stage.PLANNED, Stage.CHARGED, Stage.STARTED):
            with life.seal(plan, rehearsal=True, private=False):
                seconds[plan.arm] = trainer.rehearse(plan)
            observer.rehearsed(plan, seconds[plan.arm])
    if look is not None:
        look()
    stages = () if measure is None else tuple(life.stages().values())
    life.charge([*stages, *plans])
    for stage in stages:
        _release_stage(life, stage, measure)
        refusal = stage.stage.refusal(life.stage_releases()[stage.arm])
        if refusal and not anyway:
            raise StageRefusedError(life.name, refusal)
    releases = []
    for plan in plans:
        if plan.arm in seconds:
            life.start(plan)
            _train(life, plan, trainer, observer, seconds[plan.arm])
        if life.stage(plan) is Stage.TRAINED:
            life.settle(plan)
        releases.append(life.announce(plan, tell or observer.released))
    return tuple(releases)


def _release_stage(life: Life, plan: StagePlan, measure: Any) -> None:
    """Lead a stage from wherever it is to its announcement. A release that is stored is not drawn again."""
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
    """Train an arm inside its seal, and store what it releases."""
    observer.arm_started(plan)
    try:
        with life.stopping(plan.arm):
            with life.seal(plan, private=not trainer.shows_output):
                strategy, trials = trainer.prepare(plan)
                started = time.perf_counter()
                outcomes = trials.run(strategy)
                if not plan.is_private:  # else it tells how many records there are
                    seconds = time.perf_counter() - started
                measured = [trainer.finish(plan, each, n) for n, each in enumerate(outcomes)]
                machine = {**versions(), "device": trainer.device}
            cost = life.guarantee(plan)
            document, files = make_release(
                plan, outcomes, guarantee=cost, seconds=seconds, measured=measured, machine=machine
            )
            life.keep(plan, document, files)
    except BaseException:
        observer.arm_failed(plan)
        raise
