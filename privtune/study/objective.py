"""Arms whose trials are trained by the user's own function: ``study.optimize``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

from optuna.exceptions import TrialPruned

from privtune.errors import InvalidInputError
from privtune.execution.training import pruned
from privtune.ledger import RECORD
from privtune.numbers import is_number
from privtune.priors import IndependentSampler
from privtune.spaces import SearchSpace
from privtune.strategies import (
    STRATEGIES,
    InRun,
    Plan,
    PlanningContext,
    Scoring,
    Strategy,
    TrainingPlan,
    TrialResult,
    plan_arm,
)
from privtune.strategies._check_needs import check_given, check_objective
from privtune.strategies.everything import sampler_of
from privtune.strategies.release import split
from privtune.study._loop_data import SealedTrialError
from privtune.study._release import check_end
from privtune.study._round import STACK, Files, StudyRound, work_on_rows
from privtune.study._shown import suggested
from privtune.study._together import by_itself, can_meet, run_together
from privtune.study.failures import StudyInterruptedError
from privtune.study.rehearsal import (
    MadeAnew,
    Rehearsal,
    check_saved,
    is_more_than_trained,
    refuse_other_ways,
)
from privtune.study.split import Split
from privtune.study.trial import Trial
from privtune.study.user_training import DPSGD, Validation, objective_task
from privtune.training.mechanism.noise_options import NoiseOptions
from privtune.training.mechanism.streams import Streams

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

    from privtune.execution.table import Handed
    from privtune.ledger import Budget, Lease, Rounds
    from privtune.study._shown import ShownTrial, ShownTrials
    from privtune.study.lifecycle import Life
    from privtune.training.mechanism.records import RecordFacts
    from privtune.training.own_loop.stacked import Offer

__all__ = [
    "OBJECTIVE",
    "Objective",
    "ObjectiveFiles",
    "ObjectiveRound",
    "plan_objective",
]

Objective = Callable[[Trial], float]
"""Trains one candidate through ``trial.make_private`` and returns ``trial.score``."""


_DRAWS = 10
"""How many draws a rehearsal tries before it refuses a value that none of them asked for."""


OBJECTIVE = "objective.json"
"""Name of the sealed result that says where workers find an arm's function."""


def plan_objective(
    strategy: Strategy,
    training: DPSGD,
    validation: Validation | None,
    *,
    budget: Budget,
    epsilon: float,
    sampler: object | None,
    pruner: object | None,
    noise: NoiseOptions | str | Mapping[str, Any] | None = None,
    unit: str = RECORD,
) -> Plan:
    """Plan an arm that the user's own function trains. Touches no data.

    Raises:
        StrategyError: If the strategy needs a task, or a validation split that was not declared, or
            does not cover the pruner.
        DependentSamplerError: If it does not cover the sampler.
    """
    check_objective(
        strategy,
        scored=validation is not None,
        sampler=sampler,
        pruner=pruner,
        others=[InRun.name, *(s.name for s in STRATEGIES.values() if not s.needs.task)],
    )
    context = PlanningContext(
        task=objective_task(training, validation),
        schedule=training.schedule,
        space=SearchSpace({}),
        delta=budget.delta,
        adjacency=budget.adjacency,
        define_by_run=True,
        noise=NoiseOptions.of(noise),
        scoring=Scoring() if validation is None else validation.scoring,
    )
    plan = plan_arm(strategy, context, epsilon=epsilon)
    # The loop must bring records of the budget's unit: `make_private` and `score` look.
    of_units = {} if unit == RECORD else {"unit": unit}
    return replace(plan, details={**plan.details, "records": training.records, **of_units})


@dataclass(frozen=True, kw_only=True)
class ObjectiveFiles(Files):
    """Trains candidates by calling the user's function.

    Args:
        objective: The function.
        sampler: A sampler of the user's own for sealed trials.
        deadline: When to stop beginning trials, on the monotonic clock.
        live: Optuna's trials, where every trial is paid for, by number.
        shown: Opens Optuna's trials in a process of a worker, which draws by the plan's sampler.
        facts: Public ranges of whole numbers, as the rehearsal found them.
        stack: How many trials to run at once, each in a thread of its own, so that those that are
            alike are trained as one stack; 1 for one after the other.
    """

    objective: Objective
    sampler: IndependentSampler | None = None
    deadline: float = math.inf
    live: dict[int, ShownTrial] = field(default_factory=dict)
    shown: Callable[[], ShownTrials] | None = None
    facts: RecordFacts | None = None
    stack: int | Literal["auto"] = "auto"

    @property
    def at_once(self) -> int:
        """How many rows to take at once; trials that are shown may wait for each other's scores."""
        if not self.plan.is_sealed:
            return 1
        return STACK if self.stack == "auto" else self.stack

    @classmethod
    def make(cls, life: Life, plan: Plan, objective: Objective, **rest: Any) -> ObjectiveFiles:
        """Return what trains the candidates of an arm."""
        return cls(
            plan=plan,
            secret=life.secret(plan),
            results=life.sealed(plan.arm),
            space=SearchSpace({}),
            objective=objective,
            **rest,
        )

    @cached_property
    def split(self) -> Split:
        """What the trials are scored on."""
        return Split(self.results)

    def candidate(self, number: int) -> dict[str, Any]:
        """Return the hyperparameters that are fixed; the function suggests the others."""
        return dict(self.plan.params)

    def run_rows(self, leases: Sequence[Lease]) -> Iterator[Handed]:
        """Train leased rows; trials that are shown are opened here, unless whoever asked did so."""
        if self.shown is None or self.plan.is_sealed:
            yield from super().run_rows(leases)
            return
        shown = self.shown()
        numbers = [lease.number for lease in leases]
        for number in numbers:
            sampler = sampler_of(self.plan, self.streams, number, self.space)
            trial = self.live[number] = shown.ask(number, sampler=sampler)
            trial.take(suggested(self.results, number))  # by a worker that died at it
        for handed, number in zip(super().run_rows(leases), numbers, strict=True):
            shown.hand_over(number)
            yield handed
            del self.live[number]

    def train(
        self,
        training: TrainingPlan,
        trials: Mapping[int, Mapping[str, Any]],
        *,
        secrets: Mapping[int, bytes],
        scored: bool,
        alone: bool = True,
        named: bool = False,
    ) -> Iterable[TrialResult]:
        """Call the function for each trial; those that wait for each other share a stack."""
        live = {} if named else self.live
        runs = [
            partial(self._one, training, n, p, secrets[n], live.get(n)) for n, p in trials.items()
        ]
        return run_together(runs) if self.at_once > 1 else map(by_itself, runs)

    def _one(
        self,
        training: TrainingPlan,
        number: int,
        given: Mapping[str, Any],
        secret: bytes,
        live: ShownTrial | None,
    ) -> TrialResult:
        if time.monotonic() > self.deadline:
            raise StudyInterruptedError(
                "The time is over before every trial was run. Nothing was released and the charge "
                "stays; call optimize again with the same arm to go on."
            )
        from privtune.training.engine.initialisation import Initialisation

        streams = Streams(secret)
        with Initialisation(streams) as initialisation:
            trial = Trial(
                self.plan,
                training,
                number=number,
                streams=streams,
                subset=self.streams,
                given=given,
                sampler=self.sampler,
                live=live,
                split=self.split,
                facts=self.facts,
                initialised=initialisation.done,
            )
            try:
                value = self.objective(trial)
            except TrialPruned:
                return _pruned(trial, number)
            finally:
                trial.close()
        return trial.finish(value, number)


def _pruned(trial: Trial, number: int) -> TrialResult:
    """Return the result of a trial that was stopped, if paid-for numbers stopped it."""
    if not trial.pruned:
        raise SealedTrialError(
            "The objective raised TrialPruned although trial.should_prune() did not say so: when a "
            "trial ends must not hang on data that nobody paid for."
        )
    return pruned(number, trial.params)


@dataclass(frozen=True)
class Rehearsed:
    """What a rehearsal has shown.

    Args:
        facts: The ranges of whole numbers that the loop showed.
        stack: How many trials to run at once; 1 where they do not wait in ``fit``, or must not.
    """

    facts: RecordFacts | None
    stack: int | Literal["auto"]


def rehearse(
    objective: Objective,
    plan: Plan,
    strategy: Strategy | None = None,
    *,
    sampler: IndependentSampler | None = None,
    stack: int | Literal["auto"] = "auto",
) -> Rehearsed:
    """Call the function once on made-up records of the dataset's shapes, for two steps.

    What a program does wrong (a layer of a wrong size, a mean loss, a step that is skipped, a name
    that does not exist) is found here, before anything is charged, and raised as it is: no record
    was looked at but for its shape. So is a hyperparameter that the strategy needs and the function
    does not suggest, and one that the arm fixes and no rehearsal asks for; a worker, whose driver has seen
    to that, gives no strategy.

    Where the model holds more than what is trained, the function is called another time, as far as it
    makes its model: what would be released, loaded into that, must be what was trained.

    Where its loop reads batches, the function is called once more, on other made-up records: what it
    computes losses by, and steps along, must be the same.

    Where its trials could wait for each other in ``fit``, it is called twice more, as trials that do: in
    threads, one while the other waits. If that fails, they are run one by one.

    Raises:
        PrivTuneError: Whatever a trial would be refused for.
    """
    training = plan.training if plan.search is None else plan.search.trainings[0]
    point = {} if plan.search is None else plan.search.points[0]
    from privtune.training.engine.initialisation import Initialisation
    from privtune.training.engine.stacks import STACK_BYTES

    asked = set[str]()

    def run(
        given: Mapping[str, Any], kind: Rehearsal = "steps", draw: int = 0
    ) -> tuple[Trial, object]:
        """Call the function; as far as its model, from other first weights."""
        streams = Streams(bytes([draw] * 32))
        with Initialisation(Streams(bytes([kind == "model"] * 32))) as initialisation:
            trial = Trial(
                plan,
                training,
                number=0,
                streams=streams,
                subset=streams,
                given=given,
                sampler=sampler,
                initialised=initialisation.done,
                rehearsal=kind,
            )
            try:
                return trial, objective(trial)
            except TrialPruned:
                _pruned(trial, 0)
                raise
            except Exception as error:
                error.add_note(
                    "This was a rehearsal on made-up records (whole numbers in them are 0 and 1): "
                    "nothing was charged and no data was used."
                )
                raise
            finally:
                asked.update(trial.asked)
                trial.close()

    could_meet = False

    def waits(offer: Offer) -> bool:
        nonlocal could_meet
        could_meet = plan.is_sealed and stack != 1 and 2 * offer.held_bytes <= STACK_BYTES
        return False

    rehearsal = partial(run, {**plan.params, **point})
    trial, value = by_itself(rehearsal, waits)
    result, loop = trial.finish(value, 0), trial.loop
    check_end(plan, result)
    known = {**plan.params, **point, **trial.params}
    if loop is not None and loop.has_read:
        refuse_other_ways(loop, lambda kind: by_itself(partial(run, known, kind))[0].loop)
    if loop is not None and is_more_than_trained(loop.bare):
        try:
            run(known, "model")
        except MadeAnew as made:
            check_saved(
                loop.bare, made.model, split(result.weights, result.shapes), loop.calls.last
            )
        else:
            raise SealedTrialError(
                "A rehearsal that ends where the function makes its model did not end there, so what would "
                "be released cannot be checked. Catch Exception, not everything (a bare except), and make "
                "the model every time. Nothing was charged."
            )
    if strategy is not None:
        check_given(strategy, trial.params)
        _refuse_unasked(plan, asked, lambda draw: by_itself(partial(rehearsal, draw=draw)))
    together = could_meet and can_meet(rehearsal)
    return Rehearsed(None if loop is None else loop.facts, stack if together else 1)


def _refuse_unasked(plan: Plan, asked: set[str], again: Callable[[int], object]) -> None:
    """Refuse values for names that the function does not use: others would be drawn, and charged.

    Args:
        plan: The arm's plan.
        asked: The names that rehearsals have asked for; ``again`` adds to them.
        again: Rehearses the function on another draw, which may take another branch.
    """
    for draw in range(1, _DRAWS):
        if not plan.params.keys() <= asked:
            again(draw)
    if unasked := sorted(set(plan.params) - asked):
        raise InvalidInputError(
            f"parameters of arm {plan.arm!r}",
            unasked,
            f"were suggested in none of {_DRAWS} rehearsals on made-up records, which asked for "
            f"{', '.join(sorted(asked)) or 'nothing'}",
            "Give values under the names that the function suggests, or leave these out. Nothing was "
            "charged.",
        )


@dataclass(frozen=True, kw_only=True)
class ObjectiveRound(StudyRound):
    """The round of an arm that the user's function trains.

    Args:
        sampler: Optuna's sampler, where every trial is paid for.
        pruner: Optuna's pruner, likewise.
        own: The same object as ``files``, under its own type: ``ask`` hands it Optuna's trials.
    """

    own: ObjectiveFiles
    sampler: BaseSampler | None = None
    pruner: BasePruner | None = None

    def ask(self, number: int, make: Callable[[SearchSpace], BaseSampler]) -> Mapping[str, Any]:
        """Open Optuna's trial; the function's suggestions define the space."""
        self._check_kind(sealed=False)
        sampler = make(self.space) if self.sampler is None else self.sampler
        trial = self.shown.ask(number, sampler=sampler, pruner=self.pruner)
        self.own.live[number] = trial
        return {}


def in_threads(files: ObjectiveFiles, charge_id: str, jobs: int) -> Callable[[Rounds], None]:
    """Return what works through a round in threads: for a function that only this process knows."""
    files = replace(files, stack=1)  # they wait for each other in one thread at a time

    def give(rounds: Rounds) -> None:
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
