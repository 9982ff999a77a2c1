"""Rounds: the trials of one arm as rows of the ledger, which resume without a second charge."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from optuna.exceptions import TrialPruned

from privtune.errors import InvalidInputError
from privtune.execution.table import RowResult, make_rounds, patiently, work_through
from privtune.execution.trial_training import (
    OnStep,
    TrialWork,
    part_of,
    pruned,
    train_built,
    train_trials,
)
from privtune.ledger.errors import Place
from privtune.ledger.rounds import SKIPPED
from privtune.names import check_text
from privtune.numbers import is_number
from privtune.spaces import IndependentSampler, check_hyperparameter, plain
from privtune.strategies import (
    Ending,
    NamedTraining,
    NumberedTrials,
    Outcome,
    Plan,
    Request,
    Round,
    SealedRound,
    Strategy,
    StrategyError,
    TrainingPlan,
    TrialResult,
    advance,
)
from privtune.strategies.everything import sampler_of
from privtune.study._objects import DamagedResultError
from privtune.study.build import BuildResult, build_candidate
from privtune.study.failures import StudyInterruptedError
from privtune.study.lifecycle import RepeatedRound
from privtune.study.rehearsal import DependentTrialsError, described
from privtune.study.stored_results import pack_result, request_of, unpack_result
from privtune.study.trials import suggested
from privtune.training.engine.compute import Compute
from privtune.training.mechanism.streams import Streams

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

    from privtune.ledger.rounds import Lease, Rounds, TaskResult
    from privtune.spaces import SearchSpace
    from privtune.study.lifecycle import Life
    from privtune.study.rows import Results
    from privtune.study.trials import ShownTrial, ShownTrials
    from privtune.tasks import Task, TaskData
    from privtune.training.engine.train import TrainableCandidate


STACK = 16
"""Candidates that are trained together."""

_CAUTIOUS = 4
"""Likewise, where a known score ends the round: what is trained after it is wasted."""

_SMALL = 2**18
"""Bytes of a result up to which those of a stack are handed in together."""

_LOSSES = 3
"""How often a round trains anew what its object store has lost, before it says so."""

_ROUND = Place("privtune_tasks", "result")


@dataclass(frozen=True)
class TrainingRequest:
    """A training that a strategy asked for, beside the rows of a sealed round.

    Everything random in it derives from all of its fields: with the same noise, the difference of two
    releases that differ in the candidate alone would be free of it.

    Attributes:
        key: The number of a trial among those of all repetitions, or a name that the strategy chose.
        training: What is trained, and how long.
        params: The hyperparameters.
        scored: Whether the candidate is scored.
        repetition: Which repetition of the arm asked for it.
    """

    key: str | int
    training: TrainingPlan
    params: Mapping[str, Any]
    scored: bool = True
    repetition: int = 0

    @cached_property
    def request(self) -> str:
        """The request as one JSON text."""
        parts = [
            self.key,
            self.training.to_dict(),
            dict(self.params),
            self.scored,
            self.repetition,
        ]
        return json.dumps(parts, sort_keys=True)

    def secret(self, streams: Streams) -> bytes:
        """Return the 32 bytes that everything random in the training derives from."""
        return streams.key(f"training/{_hash(self.request)}")

    @property
    def file(self) -> str:
        """The file name of the training's result, in which a name that a strategy chose is hashed."""
        if isinstance(self.key, int):
            return _trial_file(self.key)
        text = json.dumps([self.key, self.repetition])
        return f"{_hash(text)}.safetensors"

    def check_same(self, content: bytes) -> None:
        """Refuse a stored result that another request left under the same key."""
        if request_of(content) != self.request:
            what = "Trial" if isinstance(self.key, int) else "The training of name"
            raise StrategyError(
                f"{what} {self.key!r} was trained before with other hyperparameters, by another plan of its "
                "training, or with a score where there is none now. Give each training a name of its own."
            )


def _plain(params: Mapping[str, object]) -> dict[str, object]:
    """Return hyperparameters as plain values of Python, or refuse what no file can hold."""
    plain_params: dict[str, Any] = {}
    for name, value in params.items():
        plain_params[check_hyperparameter(name)] = plain(name, value)
    return plain_params


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _trial_file(number: int) -> str:
    """Return the file name of a trial's result, by its number among those of all repetitions."""
    return f"trial-{number:06d}.safetensors"


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Candidates of one training, by number, each with a secret that seeds all of its randomness.

    Attributes:
        training: What is trained, and how long.
        trials: Hyperparameters by number.
        secrets: 32 bytes by number.
        scored: Whether the candidates are scored.
        alone: Whether no other process is at the same candidates, so that a checkpoint is this one's.
        has_name: Whether the training has a name; its numbers are then no row's and no trial's.
        repetition: Whose part of the records is trained on, where it is not all of them.
    """

    training: TrainingPlan
    trials: Mapping[int, Mapping[str, Any]]
    secrets: Mapping[int, bytes]
    scored: bool = True
    alone: bool = True
    has_name: bool = False
    repetition: int = 0


@dataclass(frozen=True, kw_only=True)
class Files(ABC):
    """A trainer of an arm's candidates, which stores their sealed results.

    Attributes:
        plan: The arm's plan.
        secret: The arm's 32 bytes, from which everything random in it derives.
        results: Its sealed results, inside the trust boundary.
        space: What candidates are drawn from.
        sampler: The user's own, for sealed trials.
        deadline: On the monotonic clock, in seconds; no trial begins after it.
        live: Optuna's trials that are open here, by number.
        open_trials: Opens a repetition's trials in a worker's process, where they are shown.
    """

    plan: Plan
    secret: bytes
    results: Results
    space: SearchSpace
    sampler: IndependentSampler | None = None
    deadline: float = math.inf
    live: dict[int, ShownTrial] = field(default_factory=dict)
    open_trials: Callable[[int], ShownTrials] | None = None

    @property
    def at_once(self) -> int:
        """The number of rows that are leased together."""
        return 1

    @property
    def defines_by_run(self) -> bool:
        """Whether the user's function suggests hyperparameters while it runs."""
        return True

    @property
    def streams(self) -> Streams:
        """The random streams of the whole arm, which draw the numbers of runs and the candidates."""
        return Streams(self.secret)

    def streams_of(self, repetition: int) -> Streams:
        """Return the random streams of a repetition, which draw its ties, subset and searches."""
        if repetition == 0:
            return self.streams
        return Streams(self.streams.key("repetition", repetition))

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """The number of each repetition's first row, and the total number of rows at the end."""
        counts = self.plan.drawn_runs(self.streams)
        if not counts:
            search = self.plan.search
            trials = 0 if search is None else search.trials or 0
            counts = (trials,) * self.plan.repeats
        ends = itertools.accumulate(counts)
        return (0, *ends)

    def within(self, number: int) -> tuple[int, int]:
        """Return the repetition of a row or a shown trial, and its number within that repetition."""
        place = bisect_right(self.bounds, number)
        repetition = min(place, self.plan.repeats) - 1
        first = self.bounds[repetition]
        return repetition, number - first

    def candidate(self, number: int) -> dict[str, Any]:
        """Return the hyperparameters of a row by its number."""
        if self.plan.is_sealed:
            return self.plan.candidate(self.space, self.streams, number)
        candidate = dict(self.plan.params)
        for name, (value, _) in suggested(self.results, number).items():
            # What a build suggested to the trial is drawn again where it is built.
            if name in self.space:
                candidate[name] = value
        return candidate

    @abstractmethod
    def train(self, batch: Batch) -> Iterable[TrialResult]:
        """Train the candidates of a batch; return a list if all results are ready at the same moment.

        Results that are yielded one by one are stored one by one, so that a stop loses none of them.
        """

    def check_deadline(self) -> None:
        """Refuse to begin a trial after the deadline."""
        if time.monotonic() > self.deadline:
            raise StudyInterruptedError(
                "The time is over before every trial was run. Nothing was released and the charge "
                "stays; call optimize again with the same arm to go on."
            )

    def run_rows(self, leases: Sequence[Lease]) -> Iterator[RowResult]:
        """Train leased rows and yield their results; a worker process opens shown trials itself."""
        if self.open_trials is None or self.plan.is_sealed:
            yield from self._train_rows(leases)
            return
        trials_of = cache(self.open_trials)
        for lease in leases:
            repetition, number = self.within(lease.number)
            streams = self.streams_of(repetition)
            sampler = sampler_of(self.plan, streams, number, self.space)
            trial = trials_of(repetition).ask(lease.number, sampler=sampler)
            trial.take(suggested(self.results, lease.number))  # by a worker that died at it
            self.live[lease.number] = trial
        for handed in self._train_rows(leases):
            number = handed.lease.number
            repetition, _ = self.within(number)
            trials_of(repetition).hand_over(number)
            yield handed
            del self.live[number]

    def _train_rows(self, leases: Sequence[Lease]) -> Iterator[RowResult]:
        """Train leased rows, batch by batch, and yield each result for its row."""
        by_number = {lease.number: lease for lease in leases}
        for batch in self._batches(leases):
            requests = self._requests_of(batch)
            secrets = {**batch.secrets, **self._secrets_of(requests)}
            results = self.train(replace(batch, secrets=secrets))
            # Results that come one by one are handed in one by one: none waits for the next.
            remaining = len(results) if isinstance(results, list) else 0
            for result in results:
                remaining -= 1
                name = _trial_file(result.index)
                request = requests[result.index].request if requests else ""
                content = pack_result(result, request=request)
                staged = self.results.stage(name, content)
                yield RowResult(
                    by_number[result.index],
                    _stored_score(result),
                    {"file": name},
                    keep=partial(self.results.insert, name, staged),
                    drop=partial(self.results.discard, name, staged),
                    more=remaining > 0 and len(content) <= _SMALL,
                )

    def _batches(self, leases: Sequence[Lease]) -> Iterator[Batch]:
        """Yield leased rows as batches of one training, and of one repetition if it trains on a subset."""
        search = self.plan.search
        if search is None:
            return
        seeds = {lease.number: lease.seed for lease in leases}
        candidates = {number: self.candidate(number) for number in seeds}
        repetitions = {number: self.within(number)[0] for number in seeds}
        for training in search.trainings:
            on_all = training.part == "all"
            places = [0] if on_all else sorted(set(repetitions.values()))
            for place in places:
                trials: dict[int, dict[str, Any]] = {}
                for number, params in list(candidates.items()):
                    is_of_training = search.training_of(params) == training
                    if is_of_training and (on_all or repetitions[number] == place):
                        # Taken out: of a list of candidates, two trainings may be equal.
                        trials[number] = candidates.pop(number)
                if trials:
                    yield Batch(
                        training=training,
                        trials=trials,
                        secrets={number: seeds[number] for number in trials},
                        alone=False,
                        repetition=place,
                    )

    def _requests_of(self, batch: Batch) -> dict[int, TrainingRequest]:
        """Return the training requests of a batch's shown trials by number; empty for a sealed round."""
        if self.plan.is_sealed:
            return {}
        requests: dict[int, TrainingRequest] = {}
        for number, params in batch.trials.items():
            repetition, _ = self.within(number)
            request = TrainingRequest(number, batch.training, params, repetition=repetition)
            requests[number] = request
        return requests

    def _secrets_of(self, requests: Mapping[int, TrainingRequest]) -> dict[int, bytes]:
        """Return secrets that make trials draw the same noise here as in the process of their strategy."""
        secrets: dict[int, bytes] = {}
        for number, request in requests.items():
            streams = self.streams_of(request.repetition)
            secrets[number] = request.secret(streams)
        return secrets


def _stored_score(result: TrialResult) -> float:
    """Return a result's score as the ledger's table takes it: −∞ where there is none."""
    return -math.inf if result.score is None else result.score


@dataclass(frozen=True, kw_only=True)
class TrialFiles(Files):
    """A trainer of a task's candidates with the engine, in stacks.

    Attributes:
        task: The task.
        data: Its records.
        compute: The device, and how many candidates are a stack.
        on_step: Hears of steps; never of a sealed arm's.
        prunes: Whether trials that are shown report their public scores to a pruner as they go.
    """

    task: Task
    data: TaskData
    compute: Compute = field(default_factory=Compute)
    on_step: OnStep | None = None
    prunes: bool = False

    @property
    def at_once(self) -> int:
        """The number of rows that are leased together: a stack, or 1 for shown trials of a ``build``."""
        if self.task.build is not None and not self.plan.is_sealed:
            return 1  # a trial that is shown may be suggested by the scores of those before it
        return STACK if self.compute.stack == "auto" else self.compute.stack

    @property
    def defines_by_run(self) -> bool:
        """Whether the task has a ``build``, which suggests hyperparameters while it runs."""
        return self.task.build is not None

    def train(self, batch: Batch) -> list[TrialResult]:
        """Train a batch of candidates together, from their checkpoint if no other process trains them."""
        from privtune.training.engine.checkpoint import Keeper

        self.check_deadline()
        name = "checkpoint"
        training = batch.training
        # Both may be done twice, and a training that has begun waits for the database like its rows.
        keeper = Keeper(
            lambda: patiently(partial(self.results.find, name)),
            lambda content: patiently(partial(self.results.put, name, content, replace=True)),
        )
        streams = self.streams_of(batch.repetition)
        work = TrialWork(
            training=training,
            task=self.task,
            data=self.data,
            records=part_of(self.data.train, training.part, self.plan.rate, streams),
            score=self.plan.score if batch.scored else None,
            compute=self.compute,
            on_step=self.on_step,
            # Rows are trained again whole: another worker may be at the same one.
            keeper=keeper if batch.alone else None,
        )
        if self.task.build is not None:
            return self._train_built(batch, work)
        # Sealed trials and private splits have no curves: nothing would have paid for them.
        validated = self.task.public_validation and not self.plan.is_sealed
        return train_trials(
            replace(work, validated=validated), trials=batch.trials, secrets=batch.secrets
        )

    def _train_built(self, batch: Batch, work: TrialWork) -> list[TrialResult]:
        """Build the candidates of a batch one by one, and train those of equal structure together."""
        numbers = list(batch.trials)
        first = numbers[0]
        built: dict[int, BuildResult] = {}
        descriptions: list[object] = []  # of the first, of a sealed round

        def candidates() -> Iterator[tuple[int, TrainableCandidate]]:
            for number in numbers:
                built[number] = self._build(batch, number)
                if self.plan.is_sealed and not descriptions:
                    descriptions.append(described(built[number]))
                yield number, built[number].made

        # A pruner judges one trial at a time; those of a stack end together.
        reporting = None
        if self.prunes and not batch.has_name and len(numbers) == 1:
            reporting = self.live.get(first)
        report_score = None if reporting is None else partial(_report_score, reporting)
        try:
            trained = train_built(work, candidates(), report_score=report_score)
            results = [replace(each, params=built[each.index].params) for each in trained]
        except TrialPruned as error:
            if reporting is None:
                raise StrategyError(
                    "A trial raised TrialPruned, and nothing that was paid for asked it to end. The engine "
                    "reports and prunes: study.optimize(..., strategy=Everything(), pruner=...)."
                ) from error
            return [pruned(first, built[first].params)]
        # State that changes late passes a rehearsal: a counter, a list that a score function fills.
        if descriptions and described(self._build(batch, first)) != descriptions[0]:
            raise DependentTrialsError(
                "build gives another trial from the same random numbers once trials have been trained and "
                "scored, so later trials depend on earlier ones. Let build read nothing but its trial."
            )
        return sorted(results, key=lambda result: numbers.index(result.index))

    def _build(self, batch: Batch, number: int) -> BuildResult:
        """Build one candidate of a batch from its secret and its fixed hyperparameters."""
        return build_candidate(
            self.task,
            batch.training,
            secret=batch.secrets[number],
            fixed=batch.trials[number],
            sealed=self.plan.is_sealed,
            number=0 if batch.has_name else self.within(number)[1],
            sampler=self.sampler,
            live=None if batch.has_name else self.live.get(number),
        )


def _report_score(trial: ShownTrial, step: int, score: float) -> None:
    """Report a trial's public score at a step to the pruner, which may end the trial.

    Raises:
        TrialPruned: If the pruner ends the trial.
    """
    trial.report(score, step)
    if trial.should_prune():
        raise TrialPruned


def work_on_rows(
    rounds: Rounds, charge_id: str, files: Files, *, workers: int = 1, most: int | None = None
) -> int:
    """Work through a round's rows in this process; return how many were run here.

    Args:
        rounds: The ledger's table of rounds.
        charge_id: The charge that the round belongs to.
        files: Trains the rows.
        workers: How many processes share them, so that none takes all at once.
        most: How many to run at most; all that are open unless it is given.
    """
    threshold = files.plan.threshold
    stack = files.at_once
    if threshold is not None:
        stack = min(stack, _CAUTIOUS)
    return work_through(
        rounds,
        charge_id,
        files.run_rows,
        stack=stack,
        workers=workers,
        most=most,
        enough=threshold,
    )


Return = TypeVar("Return")
_Trainings: TypeAlias = Generator[list[TrainingRequest], list[TrialResult], Return]
"""What yields trainings that have no result yet, is sent their results, and returns something."""


@dataclass(frozen=True)
class StudyRound(RepeatedRound, Round):
    """The round of one arm, from which its strategy requests trainings and gets their results.

    Attributes:
        life: The study.
        files: Trains the arm's candidates.
        give_out: Has a charge's rows trained elsewhere; None where they are trained in this process.
        sampler: Optuna's, of the user's own, in the place of the strategy's.
        pruner: Optuna's.
        repetition: Which repetition of the arm it is.
    """

    life: Life
    files: Files
    give_out: Callable[[Rounds, str], None] | None = None
    sampler: BaseSampler | None = None
    pruner: BasePruner | None = None
    repetition: int = 0

    def run(self, strategy: Strategy) -> list[Outcome]:
        """Run all repetitions of the arm, and train together what they request at the same time."""
        repetitions = range(self._plan.repeats)
        runs = [replace(self, repetition=number)._follow(strategy) for number in repetitions]
        steps = [advance(run) for run in runs]
        while True:
            requests: list[TrainingRequest] = []
            for step in steps:
                if not isinstance(step, Outcome):
                    requests.extend(step)
            if not requests:
                break
            results = iter(self._train_together(requests))
            for number, step in enumerate(steps):
                if not isinstance(step, Outcome):
                    awaited = list(itertools.islice(results, len(step)))
                    steps[number] = advance(runs[number], awaited)
        return [step for step in steps if isinstance(step, Outcome)]

    def _follow(self, strategy: Strategy) -> _Trainings[Outcome]:
        """Run the strategy for one repetition; yield the trainings that it waits for, return its outcome."""
        run = strategy.run(self._plan, self)
        request = advance(run)
        while not isinstance(request, Outcome):
            # No name keeps the results: a sealed round's are many, and the strategy keeps what it needs.
            request = advance(run, (yield from self._answer(request)))
        return request

    def _answer(self, request: Request) -> _Trainings[Sequence[TrialResult]]:
        """Return the results of a strategy's request; first yield its trainings without a stored result."""
        match request:
            case SealedRound():
                return self._select()
            case NumberedTrials():
                requests = self._numbered_requests(request)
            case NamedTraining():
                key = check_text(request.name, "name")
                params = _plain(request.params)
                named_request = TrainingRequest(
                    key, request.training, params, request.scored, self.repetition
                )
                requests = [named_request]
            case _:
                raise StrategyError(
                    f"The strategy of arm {self._plan.arm!r} yields {type(request).__name__}, which is no "
                    "request: yield SealedRound(), NumberedTrials(...) or NamedTraining(...) of "
                    "privtune.strategies."
                )
        return (yield from self._results_of(requests))

    def _numbered(self, number: int) -> int:
        """Return a trial's number counted over all repetitions; refuse a trial that the plan lacks."""
        row_numbers = self._row_numbers()
        if not 0 <= number < len(row_numbers):
            raise StrategyError(
                f"The plan of arm {self._plan.arm!r} pays for {len(row_numbers)} trials, and its strategy "
                f"asks for trial {number}. The first is trial 0."
            )
        return row_numbers[number]

    @property
    def _plan(self) -> Plan:
        """The arm's plan."""
        return self.files.plan

    @property
    def _results(self) -> Results:
        """The arm's sealed results."""
        return self.files.results

    def _row_numbers(self) -> range:
        """Return the numbers of the repetition's rows, among those of all repetitions."""
        first = self.files.bounds[self.repetition]
        end = self.files.bounds[self.repetition + 1]
        return range(first, end)

    @cached_property
    def charge_id(self) -> str | None:
        """The id of the arm's charge; None without any guarantee."""
        charge = self.life.charge_of(self._plan)
        return None if charge is None else charge.id

    @property
    def streams(self) -> Streams:
        """The random streams of this repetition."""
        return self.files.streams_of(self.repetition)

    @property
    def space(self) -> SearchSpace:
        """The search space that candidates are drawn from."""
        return self.files.space

    def _select(self) -> Sequence[TrialResult]:
        """Train the rows of the sealed round that have no result; return this repetition's results.

        Returns:
            The results of this repetition, in the order of their numbers; nothing without a charge.
        """
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
                results = self._read_results(rounds, self.charge_id)
                break
            except DamagedResultError:
                losses += 1
                if losses > _LOSSES:
                    raise
        trials = self.life.trials
        record = partial(
            trials.record,
            self._plan.arm,
            space=self.space,
            results=results,
            repetition=self.repetition,
        )
        self.life.outlast(record)
        return results

    def _read_results(self, rounds: Rounds, charge_id: str) -> list[TrialResult]:
        """Return the results of this repetition's rows, checked against the scores in the ledger.

        Raises:
            DamagedResultError: If one is damaged; its row is open again, and is trained anew.
            StudyCorruptedError: If rows are others than the arm's secret says.
        """
        results: list[TrialResult] = []
        damage: DamagedResultError | None = None
        rows = self._read_rows(rounds, charge_id)
        # Those in the database itself come in one question; the others one by one.
        names = [_trial_file(row.number) for row in rows]
        contents = self._results.get_small(names)
        for row in rows:
            name = _trial_file(row.number)
            try:
                result = self._read_result(name, contents.pop(name, None))
                score = _stored_score(result)
                if math.isnan(score):
                    score = -math.inf  # the table holds no NaN
                if row.score != score:
                    raise _ROUND.error("holds a score that is not that of the stored result")
                results.append(result)
            except DamagedResultError as error:
                lose = partial(self._results.lose, name)
                rounds.reopen(charge_id, row.number, lose)
                damage = error
        if damage is not None:
            raise damage
        return results

    def _read_rows(self, rounds: Rounds, charge_id: str) -> list[TaskResult]:
        """Return the repetition's rows that were run; check that each names its own result file."""
        all_rows = patiently(partial(rounds.results, charge_id))
        numbers = [row.number for row in all_rows]
        # How many there are is a function of the arm's secret.
        if numbers != list(range(self.files.bounds[-1])):
            raise _ROUND.error("holds other tasks than the arm's secret says")
        row_numbers = self._row_numbers()
        rows: list[TaskResult] = []
        for row in all_rows:
            if SKIPPED in row.result or row.number not in row_numbers:
                continue
            if row.result != {"file": _trial_file(row.number)}:
                raise _ROUND.error("names a result that is not the task's own")
            rows.append(row)
        return rows

    def _read_result(self, name: str, content: bytes | None) -> TrialResult:
        """Return a result unpacked from its content, or read by its name if there is no content."""
        content = content or self._results.get(name)
        if content is None:
            raise self._results.damaged(name)
        return unpack_result(content)

    @property
    def at_once(self) -> int:
        """The number of candidates to request together: a stack, or all of them with several workers."""
        search = self._plan.search
        if self.give_out is None or search is None or search.trials is None:
            return self.files.at_once
        return search.trials

    def _numbered_requests(self, trials: NumberedTrials) -> list[TrainingRequest]:
        """Return the requests of numbered trials, once other workers, if any, have trained them."""
        self._check_kind(sealed=False)
        search = self._plan.search
        if search is None:
            return []
        requests: list[TrainingRequest] = []
        for number, params in trials.candidates.items():
            request = TrainingRequest(
                self._numbered(int(number)),
                search.training_of(params),
                _plain(params),
                repetition=self.repetition,
            )
            requests.append(request)
        if len(requests) > 1:
            self._distribute(requests)
        return requests

    def _check_kind(self, *, sealed: bool) -> None:
        """Refuse a sealed round in an arm without one, and shown trials in a sealed arm."""
        if self._plan.is_sealed is sealed:
            return
        if sealed:
            refusal = (
                "has no law of runs, so there is no sealed round to select from: train what it pays for "
                "by NamedTraining or NumberedTrials."
            )
        else:
            refusal = (
                "is a sealed selection, whose trials SealedRound draws and nobody is shown: ask and "
                "NumberedTrials are for plans without a law of runs."
            )
        raise StrategyError(f"Arm {self._plan.arm!r} {refusal}")

    def _distribute(self, requests: Sequence[TrainingRequest]) -> None:
        """Give trials without a result to the round's other workers, if it has any, and wait for them."""
        names = set(self._results.names())
        missing: list[int] = []
        for request in requests:
            number = int(request.key)
            # Others train what was drawn; a candidate that the strategy made up is trained here.
            if request.file not in names and self.files.candidate(number) == request.params:
                missing.append(number)
        if self.give_out is None or self.charge_id is None or not missing:
            return
        rounds = make_rounds(self.life.ledger)
        secret = self.files.secret
        patiently(partial(rounds.propose, self.charge_id, missing, secret=secret))
        self.give_out(rounds, self.charge_id)
        if self.files.defines_by_run:  # what a function suggests was drawn where it ran
            self.optuna_trials.take(missing)

    def _results_of(self, requests: Sequence[TrainingRequest]) -> _Trainings[list[TrialResult]]:
        """Return the results of requests; first yield the requests without a stored result."""
        contents = [self._results.find(request.file) for request in requests]
        missing: list[TrainingRequest] = []
        for request, content in zip(requests, contents, strict=True):
            if content is None:
                missing.append(request)
            else:
                request.check_same(content)
        new_results: Iterator[TrialResult] = iter(())
        if missing:
            new_results = iter((yield missing))
        results: list[TrialResult] = []
        for content in contents:
            result = next(new_results) if content is None else unpack_result(content)
            results.append(result)
        return results

    def _train_together(self, requests: Sequence[TrainingRequest]) -> list[TrialResult]:
        """Train requests, those of one kind as a batch, and store and return their results."""
        stacks: dict[tuple[object, ...], dict[int, TrainingRequest]] = {}
        for place, request in enumerate(requests):
            # A name is no number: such trainings are numbered by their places.
            number = request.key if isinstance(request.key, int) else place
            stack = stacks.setdefault(_kind_of(request), {})
            stack[number] = request
        results: dict[str, TrialResult] = {}
        for stack in stacks.values():
            batch = self._batch_of(stack)
            for result in self.files.train(batch):
                request = stack[result.index]
                results[request.file] = result
                content = pack_result(result, request=request.request)
                put = partial(self._results.put, request.file, content)
                self.life.outlast(put)  # else what took hours would be trained again
        return [results[request.file] for request in requests]

    def _batch_of(self, stack: Mapping[int, TrainingRequest]) -> Batch:
        """Return requests of one kind, by number, as one batch."""
        trials: dict[int, Mapping[str, Any]] = {}
        secrets: dict[int, bytes] = {}
        for number, request in stack.items():
            streams = self.files.streams_of(request.repetition)
            trials[number] = request.params
            secrets[number] = request.secret(streams)
        first = next(iter(stack.values()))
        return Batch(
            training=first.training,
            trials=trials,
            secrets=secrets,
            scored=first.scored,
            has_name=isinstance(first.key, str),
            repetition=first.repetition,
        )

    @cached_property
    def optuna_trials(self) -> ShownTrials:
        """The arm's shown trials in Optuna's storage, for this repetition."""
        results = self._results
        return self.life.trials.shown(self._plan.arm, results, repetition=self.repetition)

    def ask(self, number: int, make: Callable[[SearchSpace], BaseSampler]) -> Mapping[str, object]:
        """Draw a trial once by Optuna's sampler; return its values for the declared space."""
        self._check_kind(sealed=False)
        sampler = self.sampler or make(self.space)
        number = self._numbered(number)
        trial = self.optuna_trials.ask(number, sampler=sampler, pruner=self.pruner)
        if self.files.defines_by_run:
            self.files.live[number] = trial
        candidate: dict[str, Any] = {}
        for name, law in self.space.items():
            candidate[name] = trial.suggest(name, law)
        return candidate

    def tell(self, number: int, result: TrialResult) -> None:
        """Tell Optuna how a trial ended, once."""
        self.optuna_trials.tell(
            self._numbered(number),
            score=_stored_score(result),
            pruned=result.ended is Ending.PRUNED,
        )


def _kind_of(request: TrainingRequest) -> tuple[object, ...]:
    """Return the key that requests must share to be trained as one batch."""
    training = json.dumps(request.training.to_dict())
    has_name = isinstance(request.key, str)
    # A training on a part of the records is on that of its repetition.
    part = request.repetition
    if request.training.part == "all":
        part = 0
    return training, request.scored, part, has_name


def own_sampler(sampler: BaseSampler | IndependentSampler | None) -> IndependentSampler | None:
    """Return a sampler that the user wrote; None for one of Optuna's own."""
    import optuna

    return None if isinstance(sampler, optuna.samplers.BaseSampler) else sampler


def optuna_sampler(sampler: BaseSampler | IndependentSampler | None) -> BaseSampler | None:
    """Return a sampler of Optuna's; None for one of the user's own."""
    import optuna

    return sampler if isinstance(sampler, optuna.samplers.BaseSampler) else None


def in_threads(files: Files, jobs: int) -> Callable[[Rounds, str], None]:
    """Return a function that trains a round's rows in ``jobs`` threads of this process."""

    def give(rounds: Rounds, charge_id: str) -> None:
        with ThreadPoolExecutor(jobs) as pool:
            threads = [pool.submit(work_on_rows, rounds, charge_id, files) for _ in range(jobs)]
            for thread in threads:
                thread.result()  # raises what stopped it

    return give


def deadline_of(timeout: float | None) -> float:
    """Return the end of a timeout in seconds on the monotonic clock; infinite for None.

    Args:
        timeout: Seconds from now; None for no end.

    Raises:
        InvalidInputError: If it is no finite number above 0.
    """
    if timeout is None:
        return math.inf
    if not is_number(timeout) or timeout <= 0.0:
        allowed = "must be finite seconds above 0, or None for no end"
        raise InvalidInputError("timeout", timeout, allowed)
    return time.monotonic() + timeout
