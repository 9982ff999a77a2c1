"""The life of an arm: planned → charged → started → trained → released → announced.

One function a transition, each idempotent: whatever stops a study, the next call of the same functions finds
done what is done. How far an arm is stands in the ledger and in rows beside it, changed in the ledger's own
transactions.
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
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from privtune.accounting import Guarantee, epsilon
from privtune.errors import PrivTuneError
from privtune.execution.files import unpack_result
from privtune.files import forget_times, made_private
from privtune.ledger import Charge, ChargeRequest, ChargeState, ChargeStateError, Ledger
from privtune.ledger.chain import Kind
from privtune.strategies import Outcome, Plan, Release
from privtune.strategies.stage_plan import StagePlan
from privtune.study._trials import StudyTrials
from privtune.study.failures import StageRefusedError, stopping
from privtune.study.observer import ArmStatus, StageStatus
from privtune.study.release import MODEL, load_release, make_release
from privtune.study.rows import Arm, Results, StudyStore, check_there
from privtune.study.seal import sealed
from privtune.study.spec import StudySpec
from privtune.tasks import declared_note
from privtune.training.mechanism.streams import Streams

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

    from privtune.strategies import Strategy
    from privtune.strategies._base import Round
    from privtune.study.observer import Observer
    from privtune.tasks import Task
    from privtune.training.mechanism.scoring import Measured


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


class StudyBusyError(PrivTuneError):
    """Another process is running the study, or the arm, at this moment."""


class Trainer(Protocol):
    """Who trains an arm: the tasks of a spec and functions of the user's differ in nothing else."""

    def rehearse(self, plan: Plan) -> float | None:
        """Try the arm on made-up records, before anything is charged.

        Returns:
            The seconds that it will take in expectation, if they are known.
        """
        ...

    def prepare(self, plan: Plan) -> tuple[Strategy, Round]:
        """Return the arm's strategy and its round; may touch the data, for the arm has started."""
        ...

    def finish(self, plan: Plan, outcome: Outcome) -> tuple[Outcome, Mapping[str, Measured]]:
        """Return the outcome as it is to be stored, and its metrics on the test split."""
        ...

    def machine(self) -> Mapping[str, str]:
        """Return what the arm was computed on: device and versions."""
        ...


class Life:
    """One study in its storage: its rows, charges and results, and the transitions of its arms.

    **Guarantee**: an arm is charged once, for its plan's digest, before it starts; its first release
    stays; with the settlement its secret and the models that lost are forgotten.
    """

    _placed = False

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

    def delete(self, *, leave_objects: bool = False) -> list[Path]:
        """Delete the study, its trials and its models. Its charges are the ledger's and stay.

        Stopped anywhere, it is completed by another call: the study's rows go last.

        Args:
            leave_objects: Leave what is in an object store that cannot be reached any more.

        Returns:
            The study's folders that stay, since they hold files of others.

        Raises:
            StudyBusyError: If another process runs it: what that trains would be lost.
            PrivTuneError: If a file or an object cannot be deleted now.
        """
        from privtune.ledger.audits import note_deleted

        with self.ledger.log.storage.read() as connection:
            # Before anything else of that name is deleted.
            check_there(connection, self._row, deleting=True)
        arms = list(self.rows())
        with ExitStack() as held:
            with suppress(OSError):  # where no lock can be put, nobody has one
                for arm in arms:
                    with self.alone(arm):
                        pass
                held.enter_context(self.alone())
            self._store.begin_deletion(self._row)
            self.trials.delete(arms)
            note_deleted(self.ledger.log, self.budget, self.name)
            return self._store.delete(self._row, leave_objects=leave_objects)

    def check_results(self) -> None:
        """Try where large results go, before anything is charged."""
        self._results.check()

    @contextmanager
    def seal(self, plan: AnyPlan, *, rehearsal: bool = False) -> Iterator[None]:
        """Run code of an arm within: sealed, unless its trials are paid for.

        Raises:
            PrivTuneError: If the code ends the program: an exit would pass every handler of errors, and a
                command that stopped half-way would report success.
        """
        seal = sealed(self._log(plan), rehearsal=rehearsal) if plan.is_sealed else nullcontext()
        try:
            with seal:
                yield
        except SystemExit as error:
            raise PrivTuneError(
                f"The code that arm {plan.arm!r} runs ends the program (exit {error.code!r}). Let it "
                "return or raise an error instead of calling sys.exit."
            ) from error

    @contextmanager
    def alone(self, arm: str | None = None) -> Iterator[None]:
        """Run the study, or one arm of it, while no other process does.

        Raises:
            StudyBusyError: If one does.
        """
        held = self.name if arm is None else f"{self.name}/{arm}"
        self.note_place()
        with self.ledger.log.storage.hold(held, self.place) as alone:
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

    def place(self, name: str) -> Path:
        """Return the path of a study's file that is no result, and make its folder.

        Args:
            name: Its path in the study's folder; one that ends in ``/`` is a folder.
        """
        self.note_place()
        return self.files.file(name)

    def note_place(self) -> None:
        """Record which folder the study writes to, before its first file: a deletion looks there, too."""
        if not self._placed:
            self._store.note_place(self._row)
            self._placed = True

    def charge(self, plans: Sequence[AnyPlan]) -> None:
        """Charge arms, all or none: planned → charged. Arms of an open study are added with it.

        Raises:
            BudgetExceededError: If they do not fit what is left.
            PrivTuneError: If an arm of a name exists with another plan.
        """
        known = self.rows()
        asked = [
            known.get(plan.arm) or new_arm(self.spec, self._row.uid, plan)
            for plan in plans
            if plan.is_private
        ]

        def add(connection: Connection) -> None:
            check_there(connection, self._row)
            for arm in asked:
                there = self._store.add_arm(connection, self.name, arm)
                self.check_same(arm.plan, there.plan)

        requests = [
            ChargeRequest(
                event=arm.plan.event,
                study=self.name,
                arm=arm.plan.arm,
                plan_digest=arm.digest,
                public=arm.plan.public_facts,
                unit=arm.plan.unit,
                note="; ".join(
                    filter(
                        None,
                        (
                            arm.plan.noise_note,
                            self.spec.weakened,
                            declared_note(arm.plan.public_facts),
                        ),
                    )
                ),
            )
            for arm in asked
        ]
        if requests:
            self.ledger.reserve(self.budget, requests, work=add)

    def start(self, plan: AnyPlan) -> None:
        """Mark an arm's charge as started, with the rows of its round: charged → started."""
        charge = self.charge_of(plan)
        if charge is None or self._there(plan).release is not None:
            return
        if plan.runs is not None:
            from privtune.execution.table import make_rounds

            secret = self.secret(plan)
            # Drawn from the arm's secret, so the same whenever it is drawn; opened once.
            count = plan.runs.sample(Streams(secret).numpy("runs", 0))
            make_rounds(self.ledger).open(charge.id, count=count, secret=secret)
        elif charge.state is ChargeState.RESERVED:
            self._move(charge, Kind.STARTED)

    def keep(
        self,
        plan: Plan,
        outcome: Outcome,
        *,
        seconds: float | None,
        utility: Mapping[str, Measured],
        machine: Mapping[str, str],
    ) -> None:
        """Store what an arm releases, the first time: started → trained."""
        document, files = make_release(
            plan,
            outcome,
            guarantee=self.guarantee(plan),
            seconds=seconds,
            utility=utility,
            machine=machine,
        )
        results = self.released(plan.arm)
        staged = {name: results.stage(name, content) for name, content in files.items()}

        def put(connection: Connection) -> None:
            for name, one in staged.items():
                results.insert(name, one, connection)

        first = False
        try:
            first = self._store.set_release(self._row, plan.arm, document, put)
        finally:
            if not first:
                for name, one in staged.items():
                    results.discard(name, one)

    def keep_stage(self, plan: StagePlan, document: Mapping[str, Any]) -> None:
        """Store what a stage releases, the first time: started → trained."""
        self._store.set_release(self._row, plan.arm, document, lambda _: None)

    def announce_stage(self, plan: StagePlan) -> None:
        """Note that a stage is through: released → announced."""
        self._store.set_announced(self._row, plan.arm)

    def settle(self, plan: AnyPlan) -> None:
        """Settle an arm's charge and forget what is sealed, in one transaction: trained → released."""
        from privtune.ledger.rounds import forget_secret

        charge = self.charge_of(plan)

        def forget(connection: Connection) -> bool:
            check_there(connection, self._row)
            self.sealed(plan.arm).forget(connection)
            self._store.forget_secret(connection, self.name, plan.arm)
            if charge is not None:
                forget_secret(connection, charge.id)
            return True

        if charge is None or charge.state is ChargeState.SETTLED:
            with self.ledger.log.storage.write() as connection:
                forget(connection)
            return
        if isinstance(plan, StagePlan):
            digest = _digest_of(self._there(plan).release)
        else:
            digest = unpack_result(self.released(plan.arm).get(MODEL) or b"").transcript_digest
        # Public: whether a declared training was checked belongs into the certificate.
        note = (self._there(plan).release or {}).get("checked", "")  # a stage's has none
        told = {"sealed": {"transcript_digest": digest}, "note": note}
        self._move(charge, Kind.SETTLED, work=forget, **told)

    def announce(self, plan: Plan, tell: Callable[[Plan, Release], None]) -> Release:
        """Write the model and the budget's certificate, and tell who hears: released → announced."""
        release = self.release(plan)
        if release is None:
            raise PrivTuneError(f"Arm {plan.arm!r} of study {self.name!r} has not been trained.")
        if not self._there(plan).announced:
            results = self.released(plan.arm)
            for name in results.names():
                self.write(plan.arm, name)
            text = json.dumps(self.certificate(), indent=2, allow_nan=False)
            self.files.write(f"{plan.arm}/certificate.json", text.encode())
            tell(plan, release)
            forget_times(results.folder, within=True)
            self._store.set_announced(self._row, plan.arm)
        return release

    def write(self, arm: str, name: str) -> Path:
        """Return where a released file is; put it there if it is not."""
        results = self.released(arm)
        path = results.folder / name
        if not path.exists() and (content := results.get(name)) is not None:
            self.note_place()
            self.files.write(f"{arm}/{name}", content)
        return path

    def record_failure(self, arm: str, error: BaseException) -> None:
        """Keep the whole traceback of an error for the curator alone: it may come from the data."""
        self._store.add_failure(self._row, arm, "".join(traceback.format_exception(error)))

    def _move(self, charge: Charge, kind: Kind, **options: object) -> None:
        try:
            self.ledger.move(charge.id, kind, **options)  # type: ignore[arg-type]
        except ChargeStateError:
            # Another process was faster, which is all that was wanted.
            if str(self.ledger.charge(charge.id).state) != str(kind):
                raise

    def _log(self, plan: AnyPlan) -> Path:
        try:
            return self.place(f"sealed/{plan.arm}.log")
        except OSError:  # a worker of another user: the seal writes to nowhere then
            return self.folder / "sealed" / f"{plan.arm}.log"


def _word(plan: AnyPlan, charges: Mapping[str, Charge]) -> str:
    if plan.arm in charges:
        return str(charges[plan.arm].state)
    return "planned" if plan.is_private else "not charged"


def new_arm(spec: StudySpec, uid: str, plan: AnyPlan) -> Arm:
    """Return a new arm of a study.

    Its secret is OS entropy, unless the study sets a seed, which it records.
    """
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
    measure: Callable[[StagePlan], Mapping[str, Any]] | None = None,
    look: Callable[[], None] | None = None,
    anyway: bool = False,
) -> tuple[Release, ...]:
    """Lead arms from wherever they are to their announcement; charge all of them before any starts.

    Args:
        life: The study; nobody else runs these arms.
        plans: The arms' plans.
        trainer: Trains them.
        observer: Hears of it.
        tell: Hears of releases in the observer's place.
        measure: Makes the release of a stage; may touch the data.
        look: Looks at the records before the charge, for the curator alone; raises where the budget would
            be spent for nothing.
        anyway: Whether arms run although a stage released that most records cannot be used.

    Returns:
        One release an arm.

    Raises:
        StageRefusedError: If a stage released that; no arm has started.
    """
    life.check_results()
    seconds: dict[str, float | None] = {}
    for plan in plans:
        if life.stage(plan) in (Stage.PLANNED, Stage.CHARGED, Stage.STARTED):
            with life.seal(plan, rehearsal=True):
                seconds[plan.arm] = trainer.rehearse(plan)
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


def _release_stage(
    life: Life, plan: StagePlan, measure: Callable[[StagePlan], Mapping[str, Any]] | None
) -> None:
    """Lead a stage from wherever it is to its announcement. A release that is stored is not drawn again."""
    if life.stage(plan) in (Stage.CHARGED, Stage.STARTED) and measure is not None:
        life.start(plan)
        with stopping(life.name, plan.arm, life.record_failure), life.seal(plan):
            life.keep_stage(plan, measure(plan))
    if life.stage(plan) is Stage.TRAINED:
        life.settle(plan)
    life.announce_stage(plan)


def _digest_of(document: Mapping[str, Any] | None) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _train(
    life: Life, plan: Plan, trainer: Trainer, observer: Observer, seconds: float | None
) -> None:
    """Train an arm inside its seal, and store what it releases."""
    observer.arm_started(plan)
    try:
        with stopping(life.name, plan.arm, life.record_failure), life.seal(plan):
            strategy, trials = trainer.prepare(plan)
            started = time.perf_counter()
            outcome = strategy.run(plan, trials)
            if not plan.is_private:  # else it tells how many records there are
                seconds = time.perf_counter() - started
            outcome, utility = trainer.finish(plan, outcome)
            machine = trainer.machine()
        with stopping(life.name, plan.arm, life.record_failure):
            life.keep(plan, outcome, seconds=seconds, utility=utility, machine=machine)
    except BaseException:
        observer.arm_failed(plan)
        raise
