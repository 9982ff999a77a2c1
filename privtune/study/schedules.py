"""Epochs and batch size that a spec leaves to the rule: what may be spent, and the numbers it gets."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import TYPE_CHECKING

from privtune.accounting import Adjacency
from privtune.errors import InvalidInputError
from privtune.numbers import is_number
from privtune.public_priors import fall_of
from privtune.strategies.in_run import InRun
from privtune.strategies.schedule_rule import (
    ScheduleCurve,
    SchedulePoint,
    TrainingFacts,
    best_schedule,
    choose_schedule,
    schedule_curve,
    with_exact_noise,
)
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.streams import Streams

if TYPE_CHECKING:
    from torch import nn

    from privtune.strategies import Plan, PlanningContext, Strategy
    from privtune.study.spec import ArmSpec, StudySpec
    from privtune.tasks import Task

AUTO = "auto"
"""What a spec writes for epochs or batch that the rule shall choose."""
FIELDS = ("epochs", "expected_batch_size", "compute")
"""The fields of a spec that a choice depends on, and that it replaces by numbers."""
DETAIL = "schedule"
"""The detail of a plan that says which epochs and batch the rule chose, and why."""

FLOPS_PER_SECOND = 2e10
"""Floating-point operations of one CPU core in a second, by which minutes are converted."""
SECONDS_PER_GRADIENT = 5e-6
"""What a per-sample gradient costs beside its model's operations: clipping and its share of a step."""
_PASSES_PER_GRADIENT = 3.0  # one forward, and two backward: for activations and for weights
_UNKNOWN_SECONDS = 1e-4  # of a gradient of a model that is not known before its build is called
_TWICE = 2.0  # signal at equal work from which on a spec's own numbers are worth a sentence
_SECONDS = {"second": 1.0, "minute": 60.0, "hour": 3600.0}
_TIME = re.compile(r"\s*([0-9.]+(?:[eE][-+]?[0-9]+)?)\s*(second|minute|hour)s?\s*")
_FORMS = (
    "must be a number of gradient evaluations of at least 1, such as 2e6, or a time of one CPU core, such as "
    "15 minutes"
)


@dataclass(frozen=True)
class ComputeLimit:
    """What one training may spend: gradient evaluations, or seconds of one CPU core.

    Args:
        evaluations: Per-sample gradients; infinite where a time limits them.
        seconds: Time of one core; infinite where a number of gradients is given.

    Example:
        >>> read_compute("15 minutes").seconds, read_compute(2e6).evaluations
        (900.0, 2000000.0)
    """

    evaluations: float = math.inf
    seconds: float = math.inf


def read_compute(value: object) -> ComputeLimit:
    """Return what one training may spend, from a number of gradient evaluations or a time in words.

    Args:
        value: As a spec's ``compute`` has it: ``2e6``, ``"15 minutes"``, ``"1 hour"``.

    Raises:
        InvalidInputError: If it is neither.

    Example:
        >>> read_compute("90 seconds")
        ComputeLimit(evaluations=inf, seconds=90.0)
    """
    if is_number(value) and value >= 1.0:
        return ComputeLimit(evaluations=float(value))
    time = _TIME.fullmatch(value) if isinstance(value, str) else None
    if time is None:
        raise InvalidInputError("compute", value, _FORMS)
    try:
        amount = float(time[1])
    except ValueError:
        raise InvalidInputError("compute", value, _FORMS) from None
    seconds = amount * _SECONDS[time[2]]
    if not 0.0 < seconds < math.inf:
        raise InvalidInputError("compute", value, _FORMS)
    return ComputeLimit(seconds=seconds)


def check_compute(value: float | str) -> float | str:
    """Refuse what :func:`read_compute` cannot read; return the value as it was written."""
    read_compute(value)
    return value


def seconds_per_gradient(task: Task) -> float:
    """Return the seconds of one CPU core that a per-sample gradient is reckoned to take.

    Three times the operations of a forward pass on a made-up record, at 2e10 a second, and 5 microseconds: a
    documented rate of public numbers, so that the same spec has the same plan on every machine. Of a
    ``build``, whose model is not known yet, it is a tenth of a millisecond.

    Args:
        task: Its model and the declared shape of its inputs are read, and no record.
    """
    if task.build is not None:
        return _UNKNOWN_SECONDS
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from privtune.tasks.task import made_up_inputs

    model = _model_of(task)
    record = made_up_inputs(1, task.input_shape, task.tokens)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(record)
    operations: float = _PASSES_PER_GRADIENT * counter.get_total_flops()
    return SECONDS_PER_GRADIENT + operations / FLOPS_PER_SECOND


def count_weights(task: Task, spec: StudySpec) -> int:
    """Return the number of weights of a task's model that are trained; 1 at least.

    Args:
        task: Its model is made, or its ``build`` is called with public random numbers.
        spec: The study: its space and the parameters of its first arm are what a ``build`` may ask for.
    """
    if task.build is not None:
        from privtune.study.build import weights_of_build

        candidate = spec.search_space().draw(Streams(bytes(32)), 0)
        options = dict(spec.arms[0].model_extra or {}) if spec.arms else {}
        return weights_of_build(task, {**candidate, **options.get("parameters", {})})
    sizes = [weight.numel() for weight in _model_of(task).parameters() if weight.requires_grad]
    return max(1, sum(sizes))


def _model_of(task: Task) -> nn.Module:
    """Return a task's model, on a copy of torch's random state: planning moves no stream of a training."""
    import torch

    with torch.random.fork_rng(devices=[]):
        return task.model()


def is_auto(spec: StudySpec) -> bool:
    """Return whether a spec leaves epochs or batch to the rule."""
    return AUTO in (spec.epochs, spec.expected_batch_size)


def asked(spec: StudySpec) -> dict[str, object]:
    """Return what a spec asks of the rule, as plans keep it: the same question has the stored answer."""
    return {name: getattr(spec, name) for name in FIELDS}


def training_facts(spec: StudySpec, task: Task, weights: int | None = None) -> TrainingFacts:
    """Return the public numbers that the schedule of a study is chosen from.

    Every arm with a guarantee counts as one training, and so does each repetition that is charged. A
    selection counts as one, too: its candidates are charged more, and share the schedule with the other arms.
    What a ``build`` returns has a rate that its user wrote or lets a search draw: it counts as given.

    Args:
        spec: The study.
        task: Its task; public facts alone are read.
        weights: Number of weights that are trained; those of the task's model unless given.
    """
    arms = sum(not arm.to_strategy().needs.non_private for arm in spec.arms)
    repeats = 1 if task.benchmark else spec.repeats
    return TrainingFacts(
        records=task.train_records,
        weights=count_weights(task, spec) if weights is None else weights,
        epsilon=spec.target_epsilon,
        delta=spec.budget.delta,
        adjacency=Adjacency(spec.budget.adjacency),
        trainings=max(1, arms) * repeats,
        given_rate=task.build is not None or any(map(_has_rate, spec.arms)),
        step_length=None if task.build is not None else _step_length(spec.arms),
    )


def _step_length(arms: Sequence[ArmSpec]) -> float | None:
    """Return how far a step of the arms leads, in the geometric mean, or None if some rate is not given."""
    lengths = []
    for arm in arms:
        strategy = arm.to_strategy()
        if strategy.needs.non_private:
            continue
        length = _length_of(strategy)
        if length is None:
            return None
        lengths.append(length)
    return geometric_mean(lengths) if lengths else None


def _length_of(strategy: Strategy) -> float | None:
    """Return the rate times the clipping norm of one training by SGD at a constant rate; None of others."""
    if not isinstance(strategy, InRun) or strategy.method != "dpsgd":
        return None
    rate = strategy.parameters.get("learning_rate")
    norm = strategy.parameters.get("max_grad_norm")
    momentum = strategy.options.get("momentum", 0.0)
    is_constant = fall_of(strategy.options.get("schedule", "constant")) == "constant"
    if not (is_constant and is_number(rate) and is_number(norm) and is_number(momentum)):
        return None
    if not (0.0 < rate * norm < math.inf and 0.0 <= momentum < 1.0):
        return None  # the method refuses them in its own words
    return rate * norm / (1.0 - momentum)


def _has_rate(arm: ArmSpec) -> bool:
    """Return whether an arm's user gives its learning rate."""
    options = arm.model_extra or {}
    return "learning_rate" in options.get("parameters", {})


def choose(
    spec: StudySpec, task: Task, weights: int | None = None
) -> tuple[Schedule, dict[str, object]]:
    """Return the schedule that the rule gives a spec, with the detail that plans keep of it.

    Args:
        spec: A spec with ``auto`` for epochs, batch or both.
        task: Its task; public facts alone are read.
        weights: Number of weights that are trained; those of the task's model unless given.

    Returns:
        The schedule; what was asked, the numbers that were chosen, and the reason.

    Raises:
        InvalidInputError: If a field is neither a number in its range nor ``auto``, or ``compute`` is less
            than one step.
    """
    for name in FIELDS[:2]:
        value = getattr(spec, name)
        if isinstance(value, str) and value != AUTO:
            raise InvalidInputError(name, value, "must be a number above 0, or auto")
    facts = training_facts(spec, task, weights)
    epochs = spec.epochs
    batch = spec.expected_batch_size
    if is_number(epochs):
        check_batch_of(facts.records, 1, epochs)
        point = best_schedule(facts, max(1.0, epochs * facts.records))
        schedule = check_batch_of(facts.records, point.batch, epochs)
        reason = f"{point.batch:,} records a step, the best of {epochs:g} epochs"
    else:
        given_batch = None if isinstance(batch, str) else batch
        if given_batch is not None:
            check_batch_of(facts.records, given_batch, 1.0)
        choice = choose_schedule(facts, compute_of(spec, task, facts), given_batch)
        point = choice.point
        schedule = check_batch_of(facts.records, point.batch, point.epochs)
        reason = choice.reason
    detail = {
        "asked": asked(spec),
        "epochs": epochs if is_number(epochs) else point.epochs,
        "expected_batch_size": point.batch,
        "why": reason,
    }
    return schedule, detail


def check_batch_of(records: int, batch: int, epochs: float) -> Schedule:
    """Return the schedule of a batch and epochs; refuse numbers that make none."""
    return Schedule.from_epochs(records=records, expected_batch_size=batch, epochs=epochs)


def compute_of(spec: StudySpec, task: Task, facts: TrainingFacts) -> float:
    """Return the gradient evaluations that one training may spend, by the spec or by default.

    The default is twenty passes over the records.
    """
    if spec.compute is None:
        return float(facts.usual_compute)
    limit = read_compute(spec.compute)
    if math.isinf(limit.seconds):
        return limit.evaluations
    return max(1.0, limit.seconds / seconds_per_gradient(task))


def with_chosen_numbers(spec: StudySpec, plans: Sequence[Plan]) -> StudySpec:
    """Return a spec with the numbers that plans were made with for the same question; else the spec itself.

    What is stored holds numbers, so that another rule changes no study that is there.

    Args:
        spec: A spec that may leave epochs or batch to the rule.
        plans: Plans of its arms, made now or stored.
    """
    if not is_auto(spec):
        return spec
    question = asked(spec)
    for plan in plans:
        detail = plan.details.get(DETAIL)
        if detail is not None and detail["asked"] == question:
            return with_numbers(spec, detail)
    return spec


def with_rule(spec: StudySpec, task: Task) -> StudySpec:
    """Return a spec with the numbers that the rule chooses, or the spec itself if it has numbers.

    Args:
        spec: A spec that may leave epochs or batch to the rule.
        task: Its task; public facts alone are read.
    """
    if not is_auto(spec):
        return spec
    _, detail = choose(spec, task)
    return with_numbers(spec, detail)


def with_numbers(spec: StudySpec, detail: Mapping[str, object]) -> StudySpec:
    """Return a spec with the epochs and batch of a plan's detail, and without what might be spent."""
    numbers = {
        "epochs": detail["epochs"],
        "expected_batch_size": detail["expected_batch_size"],
        "compute": None,
    }
    return spec.model_copy(update=numbers)


def far_from_rule(spec: StudySpec, context: PlanningContext) -> str:
    """Return a sentence if another batch at equal work has twice the signal of a spec's own; else nothing.

    Args:
        spec: A spec with numbers of its own.
        context: Its public facts, with its schedule.
    """
    task = context.task
    if is_auto(spec) or not spec.arms or task.build is not None:
        return ""
    facts = training_facts(spec, task)
    given = _point_of(facts, context.schedule)
    best = best_schedule(facts, given.work)
    ratio = given.shortfall / best.shortfall
    if ratio < _TWICE:
        return ""
    return (
        f"At equal work, {best.epochs:.4g} epochs of {best.batch:,} records would have {ratio:.2g} times "
        f"less noise and missing steps than {given.epochs:.4g} epochs of {given.batch:,}. Write epochs: auto "
        "and expected_batch_size: auto, and see the choice with --curve."
    )


def curve_of(spec: StudySpec, context: PlanningContext) -> ScheduleCurve:
    """Return the curve of a study's schedule, its own or a chosen one: noise and work of others.

    Args:
        spec: The study.
        context: Its public facts, with its schedule.
    """
    facts = training_facts(spec, context.task)
    point = _point_of(facts, context.schedule)
    return schedule_curve(facts, with_exact_noise(facts, point))


def _point_of(facts: TrainingFacts, schedule: Schedule) -> SchedulePoint:
    """Return a schedule as the rule compares it, with estimated noise."""
    batch = round(schedule.expected_batch_size)
    return SchedulePoint(
        records=schedule.records,
        weights=facts.weights,
        batch=batch,
        steps=schedule.steps,
        noise_multiplier=facts.estimate_noise(batch, schedule.steps),
        exact=False,
        needed_steps=facts.needed_steps,
        step_length=facts.step_length,
    )
