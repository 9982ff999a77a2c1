"""A round: the trials of one arm, on the ledger's table, resumable without a second charge."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from privtune.execution.files import pack_result, unpack_result
from privtune.execution.table import Handed, make_rounds, patiently, work_through
from privtune.execution.training import OnStep, part_of, train_trials
from privtune.ledger import SKIPPED
from privtune.strategies import PRUNED, Plan, TrainingPlan, TrialResult
from privtune.study._objects import DamagedResultError
from privtune.study._shown import suggested
from privtune.training.engine.compute import Compute
from privtune.training.mechanism.streams import Streams

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

    from privtune.ledger import Lease, Ledger, Rounds
    from privtune.spaces import SearchSpace
    from privtune.study._results import Results
    from privtune.study._shown import ShownTrials
    from privtune.study._trials import StudyTrials
    from privtune.tasks import Task, TaskData

__all__ = ["STACK", "TRIALS", "Files", "StudyRound", "TrialFiles", "work_on_rows"]

STACK = 16  # candidates that are trained together
_SMALL = 2**18  # bytes of a result below which those of a stack are handed in together
_CAUTIOUS = 4  # likewise, where a known score ends the round: what is trained after it is wasted
_LOSSES = 3  # how often a round trains anew what its object store has lost, before it says so
TRIALS, _FINAL = 10_000_000, 20_000_000  # first numbers of trainings with a name, above all rows


@dataclass(frozen=True, kw_only=True)
class Files(ABC):
    """Trains candidates of an arm, each under a secret of its own, and keeps their results.

    Args:
        plan: The arm's plan.
        secret: 32 secret bytes of the arm: everything random derives from them.
        results: Where results are kept; inside the trust boundary.
        space: What candidates are drawn from.
    """

    plan: Plan
    secret: bytes
    results: Results
    space: SearchSpace

    @property
    def at_once(self) -> int:
        """How many rows to take at once."""
        return 1

    @property
    def hardware(self) -> str:
        """The class of hardware, part of the row's digest: on another, a row need not repeat."""
        return "the function's own"

    @property
    def streams(self) -> Streams:
        """The streams of the arm as a whole: number of runs, candidates, ties, subset."""
        return Streams(self.secret)

    def candidate(self, number: int) -> dict[str, Any]:
        """Return the hyperparameters of a row: a function of the secret and its number alone.

        Those of a trial that is shown were drawn by a sampler, and are kept beside the row.
        """
        if number >= TRIALS:
            drawn = suggested(self.results, number - TRIALS)
            return {**self.plan.params, **{name: value for name, (value, _) in drawn.items()}}
        return self.plan.candidate(self.space, self.streams, number)

    @abstractmethod
    def train(
        self,
        training: TrainingPlan,
        trials: Mapping[int, Mapping[str, Any]],
        *,
        secrets: Mapping[int, bytes],
        scored: bool,
        alone: bool = True,
    ) -> Iterable[TrialResult]:
        """Train some candidates; everything random in each derives from its secret.

        Args:
            training: What to run.
            trials: Candidates by number.
            secrets: Their secrets.
            scored: Whether to score them.
            alone: Whether no other process may be at the same ones.

        Returns:
            A result a candidate, in any order, each as soon as it is done; a list where all are done
            at the same moment.
        """

    def run_rows(self, leases: Sequence[Lease]) -> Iterator[Handed]:
        """Train leased rows, those of one training together, on the seeds of their leases."""
        search = self.plan.search
        if search is None:
            return
        rows = {lease.number: self.candidate(lease.number) for lease in leases}
        by_number = {lease.number: lease for lease in leases}
        for training in search.trainings:
            own = {n: p for n, p in rows.items() if search.training_of(p) == training}
            if not own:
                continue
            secrets = {number: by_number[number].seed for number in own}
            results = self.train(training, own, secrets=secrets, scored=True, alone=False)
            left = len(results) if isinstance(results, list) else 0
            for result in results:
                lease = by_number[result.index]
                shown = lease.number >= TRIALS
                index = lease.number - TRIALS if shown else lease.number
                name = f"trial-{index if shown else f'{index:06d}'}.safetensors"
                content = pack_result(replace(result, index=index))
                staged, left = self.results.stage(name, content), left - 1
                yield Handed(
                    lease,
                    -math.inf if result.score is None else result.score,
                    {"file": name, "hardware": self.hardware},
                    keep=partial(self.results.insert, name, staged),
                    drop=partial(self.results.discard, name, staged),
                    more=left > 0 and len(content) <= _SMALL,
                )


@dataclass(frozen=True, kw_only=True)
class TrialFiles(Files):
    """Trains candidates of a task with the engine, whole stacks at once.

    Args:
        task: The task.
        data: Its data; the arm's charge has been started.
        compute: Where, how many at once, compiled or not.
        on_step: Progress.
    """

    task: Task
    data: TaskData
    compute: Compute = field(default_factory=Compute)
    on_step: OnStep | None = None

    @property
    def at_once(self) -> int:
        """How many rows to take at once: those of a stack."""
        return STACK if self.compute.stack == "auto" else self.compute.stack

    @property
    def hardware(self) -> str:
        """The class of hardware that trains."""
        from privtune.training.engine.machine import hardware

        return hardware(self.compute.device)

    def train(
        self,
        training: TrainingPlan,
        trials: Mapping[int, Mapping[str, Any]],
        *,
        secrets: Mapping[int, bytes],
        scored: bool,
        alone: bool = True,
    ) -> list[TrialResult]:
        """Train some candidates together; a training with a name goes on from its checkpoint."""
        from privtune.training.engine.checkpoint import Keeper

        name = "checkpoint"
        keeper = Keeper(
            partial(self.results.find, name), partial(self.results.put, name, replace=True)
        )
        return train_trials(
            training,
            task=self.task,
            data=self.data,
            records=part_of(self.data.train, training.part, self.plan.rate, self.streams),
            score=self.plan.score if scored else None,
            trials=trials,
            secrets=secrets,
            compute=self.compute,
            on_step=self.on_step,
            # Sealed trials and private splits have no curves: nothing would have paid for them.
            validated=self.task.public_validation and not self.plan.is_sealed,
            # Rows are trained again whole: another worker may be at the same one.
            keeper=keeper if alone and min(trials) >= TRIALS else None,
        )


def work_on_rows(
    rounds: Rounds, charge_id: str, files: Files, *, workers: int = 1, most: int | None = None
) -> int:
    """Work through a round's rows in this process; return how many were run here.

    Args:
        rounds: The rounds.
        charge_id: The round's charge.
        files: Trains and keeps results.
        workers: How many share the round at least.
        most: How many rows to run before leaving; all unless given.
    """
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


@dataclass(frozen=True, kw_only=True)
class StudyRound:
    """The round of one arm, as its strategy sees it.

    Args:
        kept: The study's trials in Optuna's storage, for the curator.
        ledger: Holds the round's rows.
        charge_id: The arm's charge; None for an arm without any guarantee.
        files: Trains and keeps results.
        give_out: Has the rows worked through by others; they are trained in this process unless
            given.
    """

    kept: StudyTrials
    ledger: Ledger
    charge_id: str | None
    files: Files
    give_out: Callable[[Rounds], None] | None = None

    @property
    def streams(self) -> Streams:
        """The streams of the arm."""
        return self.files.streams

    @property
    def space(self) -> SearchSpace:
        """What candidates are drawn from."""
        return self.files.space

    def select(self, plan: Plan) -> Sequence[TrialResult]:
        """Run the sealed round: rows that have no result yet, then read all of them."""
        if self.charge_id is None:
            return ()
        rounds = make_rounds(self.ledger)
        for last in (False,) * _LOSSES + (True,):
            if self.give_out is None:
                work_on_rows(rounds, self.charge_id, self.files)
            else:
                self.give_out(rounds)
            try:
                results = self._read(rounds, self.charge_id)
            except DamagedResultError:
                if last:
                    raise
                continue
            self.kept.record(plan.arm, space=self.space, results=results)
            return results
        raise AssertionError

    def _read(self, rounds: Rounds, charge_id: str) -> list[TrialResult]:
        """Return the results of a finished round; a row whose result is damaged is open again."""
        results, damaged = [], None
        rows = [r for r in patiently(partial(rounds.results, charge_id)) if SKIPPED not in r.result]
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
        (result,) = self._named(training, {name: params}, scored=scored)
        return result

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
        if plan.search is None:
            return ()
        if len(trials) > 1:
            self._distribute(trials)
        done: dict[int, TrialResult] = {}
        for training in plan.search.trainings:
            named = {
                f"trial-{number}": params
                for number, params in trials.items()
                if plan.search.training_of(params) == training
            }
            done |= {result.index: result for result in self._named(training, named, scored=True)}
        return [done[number] for number in trials]

    def _distribute(self, trials: Iterable[int]) -> None:
        """Have trials that have no result worked through as rows, if others shall train them."""
        there = set(self.files.results.names())
        missing = [n for n in trials if f"trial-{n}.safetensors" not in there]
        if self.give_out is None or self.charge_id is None or not missing:
            return
        rounds = make_rounds(self.ledger)
        # Numbered as the streams of trainings with a name: a row's seed is what it is in one process.
        rows = [TRIALS + number for number in missing]
        patiently(partial(rounds.propose, self.charge_id, rows, secret=self.files.secret))
        self.give_out(rounds)
        if not self.space:  # what a function defines while it runs was drawn where it ran
            self.shown.take(missing)

    def _named(
        self, training: TrainingPlan, named: Mapping[str, Mapping[str, Any]], *, scored: bool
    ) -> list[TrialResult]:
        """Train candidates by name together, but for those whose results are there."""
        done: dict[str, TrialResult] = {}
        missing: dict[int, str] = {}
        for name in named:
            if (content := self.files.results.find(f"{name}.safetensors")) is not None:
                done[name] = unpack_result(content)
                continue
            # Rows are numbered from 0. A training with a name ("final", "trial-3") gets a number far
            # above theirs, so that it never draws the random numbers of a row.
            first = TRIALS if "-" in name else _FINAL
            missing[first + _number(name)] = name
        if missing:
            secrets = {number: self.streams.key("trial", number) for number in missing}
            trials = {number: named[name] for number, name in missing.items()}
            results = self.files.train(training, trials, secrets=secrets, scored=scored)
            for result in results:
                name = missing[result.index]
                done[name] = replace(result, index=_number(name))
                self.files.results.put(f"{name}.safetensors", pack_result(done[name]))
        return [done[name] for name in named]

    @cached_property
    def shown(self) -> ShownTrials:
        """Optuna's trials, where every trial is paid for."""
        return self.kept.shown(self.files.plan.arm, self.files.results)

    def ask(self, number: int, make: Callable[[SearchSpace], BaseSampler]) -> Mapping[str, Any]:
        """Draw a trial with Optuna; a candidate that was drawn is used again."""
        trial = self.shown.ask(number, sampler=make(self.space))
        return {name: trial.suggest(name, law) for name, law in self.space.items()}

    def tell(self, number: int, result: TrialResult) -> None:
        """Tell Optuna how a trial ended, once."""
        score = -math.inf if result.score is None else result.score
        self.shown.tell(number, score=score, pruned=result.failed == PRUNED)


def _number(name: str) -> int:
    """Return the number of a training with a name: 3 of ``trial-3``, 0 of ``final``."""
    return int(name.rpartition("-")[2]) if "-" in name else 0
