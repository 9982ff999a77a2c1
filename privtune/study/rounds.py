"""A round: the trials of one arm on the ledger's table, resumable without a second charge; its trainers."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

from optuna.exceptions import TrialPruned

from privtune.errors import InvalidInputError
from privtune.execution.table import Handed, make_rounds, patiently, work_through
from privtune.execution.training import OnStep, part_of, pruned, train_built, train_trials
from privtune.ledger.rounds import SKIPPED
from privtune.names import check_text
from privtune.numbers import is_number
from privtune.spaces import IndependentSampler, check_hyperparameter, plain
from privtune.strategies import (
    Ending,
    Outcome,
    Plan,
    Strategy,
    StrategyError,
    TrainingPlan,
    TrialResult,
)
from privtune.strategies.everything import sampler_of
from privtune.study._objects import DamagedResultError
from privtune.study.build import Built, build_candidate
from privtune.study.failures import StudyInterruptedError
from privtune.study.rehearsal import DependentTrialsError, described
from privtune.study.release import pack_result, request_of, unpack_result
from privtune.study.trials import suggested
from privtune.training.engine.compute import Compute
from privtune.training.mechanism.streams import Streams

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

    from privtune.ledger.rounds import Lease, Rounds
    from privtune.spaces import SearchSpace
    from privtune.study.lifecycle import Life
    from privtune.study.rows import Results
    from privtune.study.trials import ShownTrial, ShownTrials
    from privtune.tasks import Task, TaskData
    from privtune.training.engine.train import Made


STACK = 16  # candidates that are trained together
_SMALL = 2**18  # bytes of a result below which those of a stack are handed in together
_CAUTIOUS = 4  # likewise, where a known score ends the round: what is trained after it is wasted
_LOSSES = 3  # how often a round trains anew what its object store has lost, before it says so


@dataclass(frozen=True)
class Asked:
    """A training that a strategy asked for, beside the rows of a sealed round."""

    # Everything random in it derives from all of these: with the same noise, the difference of two
    # releases that differ in the candidate alone would be free of it.
    key: str | int
    training: TrainingPlan
    params: Mapping[str, Any]
    scored: bool = True
    repetition: int = 0

    @cached_property
    def request(self) -> str:
        """The request as one JSON text."""
        parts = [self.key, self.training.to_dict(), dict(self.params), self.scored, self.repetition]
        return json.dumps(parts, sort_keys=True)

    def secret(self, streams: Streams) -> bytes:
        """Return the 32 bytes that everything random in the training derives from."""
        return streams.key(f"training/{_hash(self.request)}")

    @property
    def file(self) -> str:
        """The name of its result: no part of a name that a strategy chose becomes part of a path."""
        if isinstance(self.key, int):
            return _trial_file(self.key)
        return f"{_hash(json.dumps([self.key, self.repetition]))}.safetensors"

    def check_same(self, content: bytes) -> None:
        """Refuse a result that was stored under the same key for something else."""
        if request_of(content) != self.request:
            what = "Trial" if isinstance(self.key, int) else "The training of name"
            raise StrategyError(
                f"{what} {self.key!r} was trained before with other hyperparameters, by another plan of its "
                "training, or with a score where there is none now. Give each training a name of its own."
            )


def _plain(params: Mapping[str, Any]) -> dict[str, Any]:
    return {check_hyperparameter(name): plain(name, value) for name, value in params.items()}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _trial_file(number: int) -> str:
    return f"trial-{number:06d}.safetensors"


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Candidates of one training, by number; everything random in each derives from its secret."""

    training: TrainingPlan
    trials: Mapping[int, Mapping[str, Any]]
    secrets: Mapping[int, bytes]
    scored: bool = True
    alone: bool = True  # no other process is at the same candidates
    named: bool = False  # a training with a name, whose number is no row's and no trial's
    repetition: int = 0  # whose part of the records is trained on, where it is not all of them


class _Waits(BaseException):  # no error: a strategy that handles its errors must not handle this
    """Ends a repetition's strategy where it asks for trainings that all repetitions then do together."""


@dataclass(frozen=True, kw_only=True)
class Files(ABC):
    """Trains candidates of an arm, each under a secret of its own, and keeps their results."""

    plan: Plan
    secret: bytes
    results: Results  # inside the trust boundary
    space: SearchSpace
    sampler: IndependentSampler | None = None  # of the user's own, for sealed trials
    deadline: float = math.inf  # on the monotonic clock; no trial begins after it
    live: dict[int, ShownTrial] = field(default_factory=dict)  # Optuna's trials that are open here
    shown: Callable[[int], ShownTrials] | None = None  # opens a repetition's in a worker's process

    @property
    def at_once(self) -> int:
        """How many rows to take at once."""
        return 1

    @property
    def defines_by_run(self) -> bool:
        """Whether a function of the user's suggests hyperparameters while a trial is made."""
        return True

    @property
    def streams(self) -> Streams:
        """The streams of the arm as a whole: numbers of runs, candidates."""
        return Streams(self.secret)

    def streams_of(self, repetition: int) -> Streams:
        """Return the streams of a repetition: ties, subset, searches."""
        return Streams(self.streams.key("repetition", repetition)) if repetition else self.streams

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Where the rows of each repetition begin, and where the last one's end."""
        search = self.plan.search
        trials = 0 if search is None else search.trials or 0
        counts = self.plan.drawn_runs(self.streams) or (trials,) * self.plan.repeats
        return (0, *itertools.accumulate(counts))

    def within(self, number: int) -> tuple[int, int]:
        """Return the repetition of a row, or of a trial that is shown, and its number there."""
        repetition = min(bisect_right(self.bounds, number), self.plan.repeats) - 1
        return repetition, number - self.bounds[repetition]

    def candidate(self, number: int) -> dict[str, Any]:
        """Return the hyperparameters of a row: a function of the secret and its number alone."""
        if not self.plan.is_sealed:
            drawn = suggested(self.results, number)
            # What a build suggested to the trial is drawn again where it is built.
            of_space = {name: value for name, (value, _) in drawn.items() if name in self.space}
            return {**self.plan.params, **of_space}
        return self.plan.candidate(self.space, self.streams, number)

    @abstractmethod
    def train(self, batch: Batch) -> Iterable[TrialResult]:
        """Train some candidates; a list is what is done at the same moment."""

    def check_deadline(self) -> None:
        """Stop before a trial begins that the time is over for."""
        if time.monotonic() > self.deadline:
            raise StudyInterruptedError(
                "The time is over before every trial was run. Nothing was released and the charge "
                "stays; call optimize again with the same arm to go on."
            )

    def run_rows(self, leases: Sequence[Lease]) -> Iterator[Handed]:
        """Train leased rows; a worker opens the trials that are shown, which their driver has open."""
        if self.shown is None or self.plan.is_sealed:
            yield from self._rows(leases)
            return
        shown = cache(self.shown)
        for lease in leases:
            repetition, number = self.within(lease.number)
            sampler = sampler_of(self.plan, self.streams_of(repetition), number, self.space)
            trial = shown(repetition).ask(lease.number, sampler=sampler)
            trial.take(suggested(self.results, lease.number))  # by a worker that died at it
            self.live[lease.number] = trial
        for handed in self._rows(leases):
            shown(self.within(handed.lease.number)[0]).hand_over(handed.lease.number)
            yield handed
            del self.live[handed.lease.number]

    def _rows(self, leases: Sequence[Lease]) -> Iterator[Handed]:
        """Train rows, those of one training together, on the seeds of their leases."""
        search = self.plan.search
        if search is None:
            return
        rows = {lease.number: self.candidate(lease.number) for lease in leases}
        by_number = {lease.number: lease for lease in leases}
        repetition = {n: self.within(n)[0] for n in rows}
        # What is trained on a part of the records is trained on that of its repetition.
        parts = [
            (training, place)
            for training in search.trainings
            for place in ((0,) if training.part == "all" else sorted(set(repetition.values())))
        ]
        for training, place in parts:
            # Taken out: of a list of candidates, two trainings may be equal.
            own = {
                n: rows.pop(n)
                for n, p in list(rows.items())
                if search.training_of(p) == training
                and (training.part == "all" or repetition[n] == place)
            }
            if not own:
                continue
            # A trial that is shown has the same noise here as in the process of its strategy.
            asked = {
                n: Asked(n, training, p, repetition=repetition[n])
                for n, p in own.items()
                if not self.plan.is_sealed
            }
            shown = {n: a.secret(self.streams_of(a.repetition)) for n, a in asked.items()}
            secrets = {number: by_number[number].seed for number in own} | shown
            batch = Batch(
                training=training, trials=own, secrets=secrets, alone=False, repetition=place
            )
            results = self.train(batch)
            left = len(results) if isinstance(results, list) else 0
            for result in results:
                lease, name = by_number[result.index], _trial_file(result.index)
                request = asked[result.index].request if asked else ""
                content = pack_result(result, request=request)
                staged, left = self.results.stage(name, content), left - 1
                yield Handed(
                    lease,
                    -math.inf if result.score is None else result.score,
                    {"file": name},
                    keep=partial(self.results.insert, name, staged),
                    drop=partial(self.results.discard, name, staged),
                    more=left > 0 and len(content) <= _SMALL,
                )


@dataclass(frozen=True, kw_only=True)
class TrialFiles(Files):
    """Trains candidates of a task with the engine, whole stacks at once."""

    task: Task
    data: TaskData
    compute: Compute = field(default_factory=Compute)
    on_step: OnStep | None = None
    prunes: bool = False  # trials that are shown report their public scores to a pruner as they go

    @property
    def at_once(self) -> int:
        """How many rows to take at once: those of a stack."""
        if self.task.build is not None and not self.plan.is_sealed:
            return 1  # a trial that is shown may be suggested by the scores of those before it
        return STACK if self.compute.stack == "auto" else self.compute.stack

    @property
    def defines_by_run(self) -> bool:
        """See ``Files``: a ``build`` suggests hyperparameters beside those of the space."""
        return self.task.build is not None

    def train(self, batch: Batch) -> list[TrialResult]:
        """Train some candidates together; one that nobody else is at goes on from its checkpoint."""
        from privtune.training.engine.checkpoint import Keeper

        self.check_deadline()
        name, results, training = "checkpoint", self.results, batch.training
        kept = Keeper(partial(results.find, name), partial(results.put, name, replace=True))
        how: dict[str, Any] = {
            "data": self.data,
            "records": part_of(
                self.data.train,
                training.part,
                self.plan.rate,
                self.streams_of(batch.repetition),
            ),
            "score": self.plan.score if batch.scored else None,
            "compute": self.compute,
            "on_step": self.on_step,
            # Rows are trained again whole: another worker may be at the same one.
            "keeper": kept if batch.alone else None,
        }
        if self.task.build is not None:
            return self._train_built(batch, how)
        # Sealed trials and private splits have no curves: nothing would have paid for them.
        validated = self.task.public_validation and not self.plan.is_sealed
        secrets, trials = batch.secrets, batch.trials
        return train_trials(
            training, task=self.task, trials=trials, secrets=secrets, validated=validated, **how
        )

    def _train_built(self, batch: Batch, how: Mapping[str, Any]) -> list[TrialResult]:
        """Build candidates one after the other, train those that are alike together."""
        live: Mapping[int, ShownTrial] = {} if batch.named else self.live
        first, *others = batch.trials
        built: dict[int, Built] = {}
        told: list[object] = []

        def build(number: int) -> Built:
            return build_candidate(
                self.task,
                batch.training,
                secret=batch.secrets[number],
                fixed=batch.trials[number],
                sealed=self.plan.is_sealed,
                number=0 if batch.named else self.within(number)[1],
                sampler=self.sampler,
                live=live.get(number),
            )

        def made() -> Iterator[tuple[int, Made]]:
            for number in batch.trials:
                built[number] = build(number)
                if self.plan.is_sealed and not told:
                    told.append(described(built[number]))
                yield number, built[number].made

        reporting = live.get(first) if self.prunes and not others else None

        def look(done: int, score: float) -> None:
            if reporting is not None:
                reporting.report(score, done)
                if reporting.should_prune():
                    raise TrialPruned

        try:
            results = [
                replace(result, params=built[result.index].params)
                for result in train_built(
                    batch.training,
                    task=self.task,
                    made=made(),
                    look=None if reporting is None else look,
                    **how,
                )
            ]
        except TrialPruned as error:
            if reporting is None:
                raise StrategyError(
                    "A trial raised TrialPruned, and nothing that was paid for asked it to end. The engine "
                    "reports and prunes: study.optimize(..., strategy=Everything(), pruner=...)."
                ) from error
            return [pruned(first, built[first].params)]
        # State that changes late passes a rehearsal: a counter, a list that a score function fills.
        if told and described(build(first)) != told[0]:
            raise DependentTrialsError(
                "build gives another trial from the same random numbers once trials have been trained and "
                "scored, so later trials depend on earlier ones. Let build read nothing but its trial."
            )
        return sorted(results, key=lambda result: list(batch.trials).index(result.index))


def work_on_rows(
    rounds: Rounds, charge_id: str, files: Files, *, workers: int = 1, most: int | None = None
) -> int:
    """Work through a round's rows in this process; return how many were run here."""
    threshold = files.plan.threshold
    return work_through(
        rounds,
        charge_id,
        files.run_rows,
        stack=files.at_once if threshold is None else min(files.at_once, _CAUTIOUS),
        workers=workers,
        most=most,
        enough=threshold,
    )


@dataclass(frozen=True)
class StudyRound:
    """The round of one arm, as its strategy sees it."""

    life: Life
    files: Files
    give_out: Callable[[Rounds, str], None] | None = None  # has a charge's rows trained elsewhere
    sampler: BaseSampler | None = None
    pruner: BasePruner | None = None
    repetition: int = 0
    waits: dict[str, Asked] = field(default_factory=dict)  # what its strategy asked for last

    def run(self, strategy: Strategy) -> list[Outcome]:
        """Run the arm as often as it repeats; what its repetitions ask for, they train together.

        A strategy that waits for a training is run again when it is there: all that it asked for before
        is there, too.

        Raises:
            StrategyError: If a strategy that is run again asks for something else.
        """
        plan = self.files.plan
        rounds = [replace(self, repetition=number, waits={}) for number in range(plan.repeats)]
        trained: set[str] = set()
        while True:
            outcomes: list[Outcome] = []
            for each in rounds:
                with suppress(_Waits):
                    outcomes.append(strategy.run(plan, each))
            asked = [one for each in rounds for one in each.waits.values()]
            if not asked:
                return outcomes
            if not trained.isdisjoint(each.file for each in asked):
                raise self._changed()
            self._train_together(asked)
            trained |= {each.file for each in asked}

    def _changed(self) -> StrategyError:
        # Each run would train something else, which nobody has paid for.
        return StrategyError(
            f"The strategy of arm {self.files.plan.arm!r}, run again from its start, does not ask for the "
            "trainings that it waited for. Let run be a function of the plan and of what the round returns: "
            "random numbers come from its streams, and what train raises is not caught."
        )

    def _numbered(self, number: int) -> int:
        """Return a trial's number among those of all repetitions."""
        first, end = self.files.bounds[self.repetition : self.repetition + 2]
        if not 0 <= number < end - first:
            raise StrategyError(
                f"The plan of arm {self.files.plan.arm!r} pays for {end - first} trials, and its strategy "
                f"asks for trial {number}. The first is trial 0."
            )
        return first + number

    @cached_property
    def charge_id(self) -> str | None:
        """The id of the arm's charge; None without any guarantee."""
        charge = self.life.charge_of(self.files.plan)
        return None if charge is None else charge.id

    @property
    def streams(self) -> Streams:
        """The streams of the repetition."""
        return self.files.streams_of(self.repetition)

    @property
    def space(self) -> SearchSpace:
        """What candidates are drawn from."""
        return self.files.space

    def select(self, plan: Plan) -> Sequence[TrialResult]:
        """Run the sealed round: rows that have no result yet, then read all of them."""
        self._check_kind(sealed=True)
        if self.charge_id is None:
            return ()
        rounds = make_rounds(self.life.ledger)
        losses = 0
        while True:
            if self.give_out is None:
                work_on_rows(rounds, self.charge_id, self.files)
            elif patiently(partial(rounds.open_count, self.charge_id)):
                self.give_out(rounds, self.charge_id)
            try:
                results = self._read(rounds, self.charge_id)
                break
            except DamagedResultError:
                losses += 1
                if losses > _LOSSES:
                    raise
        self.life.trials.record(plan.arm, space=self.space, results=results)
        return results

    def _read(self, rounds: Rounds, charge_id: str) -> list[TrialResult]:
        """Return the repetition's results of a round; a row whose result is damaged is open again."""
        results, damaged = [], None
        own = range(*self.files.bounds[self.repetition : self.repetition + 2])
        there = patiently(partial(rounds.results, charge_id))
        rows = [row for row in there if SKIPPED not in row.result and row.number in own]
        stored = self.files.results.get_small([row.result["file"] for row in rows])
        for row in rows:
            name = row.result["file"]
            try:
                content = stored.pop(name, None) or self.files.results.get(name)
                results.append(unpack_result(content or b""))
            except DamagedResultError as error:
                rounds.reopen(charge_id, row.number, partial(self.files.results.lose, name))
                damaged = error
        if damaged is not None:
            raise damaged
        return results

    def train(
        self,
        plan: Plan,
        training: TrainingPlan,
        params: Mapping[str, Any],
        *,
        name: str,
        scored: bool = False,
    ) -> TrialResult:
        """Train one candidate, unless its result is there."""
        key = check_text(name, "name")
        return self._trained([Asked(key, training, _plain(params), scored, self.repetition)])[0]

    @property
    def at_once(self) -> int:
        """How many candidates it pays to train together: those of a stack; all, by several workers."""
        search = self.files.plan.search
        if self.give_out is None or search is None or search.trials is None:
            return self.files.at_once
        return search.trials

    def train_numbered(
        self, plan: Plan, trials: Mapping[int, Mapping[str, Any]]
    ) -> Sequence[TrialResult]:
        """Train some trials together, those of one training as one stack, or as rows of the table."""
        self._check_kind(sealed=False)
        if plan.search is None:
            return ()
        asked = [
            Asked(
                self._numbered(int(n)),
                plan.search.training_of(params),
                _plain(params),
                repetition=self.repetition,
            )
            for n, params in trials.items()
        ]
        if len(trials) > 1:
            self._distribute(asked)
        return self._trained(asked)

    def _check_kind(self, *, sealed: bool) -> None:
        """Refuse sealed rows and trials that are shown in one arm: both are numbered from 0."""
        if self.files.plan.is_sealed is sealed:
            return
        raise StrategyError(
            f"Arm {self.files.plan.arm!r} "
            + (
                "has no law of runs, so there is no sealed round to select from: train what it pays for "
                "with train or train_numbered."
                if sealed
                else "is a sealed selection, whose trials are drawn by select and are not shown: ask and "
                "train_numbered are for plans without a law of runs."
            )
        )

    def _distribute(self, asked: Sequence[Asked]) -> None:
        """Have trials that have no result worked through as rows, if others shall train them."""
        there = set(self.files.results.names())
        # Others train what was drawn; a candidate that the strategy made up is trained here.
        missing = [
            int(each.key)
            for each in asked
            if each.file not in there and self.files.candidate(int(each.key)) == each.params
        ]
        if self.give_out is None or self.charge_id is None or not missing:
            return
        rounds = make_rounds(self.life.ledger)
        patiently(partial(rounds.propose, self.charge_id, missing, secret=self.files.secret))
        self.give_out(rounds, self.charge_id)
        if self.files.defines_by_run:  # what a function suggests was drawn where it ran
            self.shown.take(missing)

    def _trained(self, asked: Sequence[Asked]) -> list[TrialResult]:
        """Return results that are stored, and train the others; of a repetition, with those of all."""
        found = [self.files.results.find(each.file) for each in asked]
        missing = [each for each, content in zip(asked, found, strict=True) if content is None]
        for each, content in zip(asked, found, strict=True):
            if content is not None:
                each.check_same(content)
                self.waits.pop(each.file, None)
        if missing and self.files.plan.repeats > 1:
            if self.waits:
                raise self._changed()
            self.waits.update((each.file, each) for each in missing)
            raise _Waits
        new = iter(self._train_together(missing))
        return [next(new) if content is None else unpack_result(content) for content in found]

    def _train_together(self, asked: Sequence[Asked]) -> list[TrialResult]:
        """Train the requests of one training as a stack, and store their results."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for place, each in enumerate(asked):
            part = 0 if each.training.part == "all" else each.repetition
            kind = (
                json.dumps(each.training.to_dict()),
                each.scored,
                part,
                isinstance(each.key, str),
            )
            groups.setdefault(kind, []).append(place)
        done: dict[int, TrialResult] = {}
        for places in groups.values():
            first = asked[places[0]]
            named = isinstance(first.key, str)
            numbered = {place if named else int(asked[place].key): place for place in places}
            batch = Batch(
                training=first.training,
                trials={number: asked[place].params for number, place in numbered.items()},
                secrets={
                    number: asked[place].secret(self.files.streams_of(asked[place].repetition))
                    for number, place in numbered.items()
                },
                scored=first.scored,
                named=named,
                repetition=first.repetition,
            )
            for result in self.files.train(batch):
                place = numbered[result.index]
                done[place] = result
                packed = pack_result(result, request=asked[place].request)
                self.files.results.put(asked[place].file, packed)
        return [done[place] for place in range(len(asked))]

    @cached_property
    def shown(self) -> ShownTrials:
        """Optuna's trials, where every trial is paid for."""
        arm, results = self.files.plan.arm, self.files.results
        return self.life.trials.shown(arm, results, repetition=self.repetition)

    def ask(self, number: int, make: Callable[[SearchSpace], BaseSampler]) -> Mapping[str, Any]:
        """Draw a trial with Optuna, once; where no space is declared, a function's suggestions define it."""
        self._check_kind(sealed=False)
        sampler, number = self.sampler or make(self.space), self._numbered(number)
        trial = self.shown.ask(number, sampler=sampler, pruner=self.pruner)
        if self.files.defines_by_run:
            self.files.live[number] = trial
        return {name: trial.suggest(name, law) for name, law in self.space.items()}

    def tell(self, number: int, result: TrialResult) -> None:
        """Tell Optuna how a trial ended, once."""
        score = -math.inf if result.score is None else result.score
        self.shown.tell(self._numbered(number), score=score, pruned=result.ended is Ending.PRUNED)


def own_sampler(sampler: Any) -> Any:
    """Return a sampler of the user's own; None for one of Optuna's."""
    import optuna

    return None if isinstance(sampler, optuna.samplers.BaseSampler) else sampler


def in_threads(files: Files, jobs: int) -> Callable[[Rounds, str], None]:
    """Return a function that trains a round's rows in threads: its code is in this process alone."""

    def give(rounds: Rounds, charge_id: str) -> None:
        with ThreadPoolExecutor(jobs) as pool:
            done = [pool.submit(work_on_rows, rounds, charge_id, files) for _ in range(jobs)]
            for job in done:
                job.result()

    return give


def deadline_of(timeout: float | None) -> float:
    """Return when a timeout is over, on the monotonic clock."""
    if timeout is None:
        return math.inf
    if not is_number(timeout) or timeout <= 0.0:
        allowed = "must be finite seconds above 0, or None for no end"
        raise InvalidInputError("timeout", timeout, allowed)
    return time.monotonic() + timeout
