"""Rehearsals of trials on made-up records, before anything is charged."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from privtune.errors import InvalidInputError
from privtune.execution.fine_tuned import check_remembers_nothing, reduce_task
from privtune.execution.trial_training import domain_of, dry_run, made_up_records, make_candidate
from privtune.spaces import inside
from privtune.strategies import Plan, Strategy, StrategyError, TrialResult
from privtune.strategies.arms import check_given
from privtune.strategies.searching import CHANGING, parts_of
from privtune.study.build import BuildResult, build_candidate
from privtune.study.stored_results import check_end, measure_release
from privtune.tasks.pretrained import PART, for_candidate
from privtune.training.mechanism.streams import Streams

if TYPE_CHECKING:
    import torch
    from optuna.distributions import BaseDistribution
    from torch import nn

    from privtune.spaces import IndependentSampler, SearchSpace
    from privtune.tasks import Task
    from privtune.training.engine.compute import Compute
    from privtune.training.mechanism.data import TensorData

T = TypeVar("T")

_DRAWS = 10
"""How many draws are tried before a value that none of them asked for is refused."""

_ANY = 1e-3
"""A value that every hyperparameter can have."""

_SOME = 100
"""Steps of a schedule that are compared."""

_SECRETS = tuple(bytes([number] * 32) for number in range(_DRAWS))


class DependentTrialsError(StrategyError):
    """A trial depends on other trials or on chance, not only on its own random numbers.

    Private selection covers independent trials alone, and a trial whose worker died is run again with
    the same random numbers: another result then would tell of the death.
    """


def rehearse(
    plan: Plan,
    task: Task,
    strategy: Strategy,
    *,
    space: SearchSpace,
    compute: Compute,
    sampler: IndependentSampler | None = None,
    timings: MutableMapping[object, float] | None = None,
) -> float:
    """Train, score, pack, release, load and measure a trial on made-up records.

    Args:
        plan: The arm's plan.
        task: Its task; public facts alone are read.
        strategy: Its strategy, which may fix hyperparameters or parts that are trained.
        space: What candidates are drawn from.
        compute: The device, and how many candidates are a stack.
        sampler: The user's own.
        timings: Seconds of rehearsals before this one, which need not be measured again.

    Returns:
        The expected seconds of one training.
    """
    if task.build is not None:
        return _rehearse_build(plan, task, strategy, space=space, compute=compute, sampler=sampler)
    training = plan.first_training
    streams = Streams(_SECRETS[0])
    candidate = plan.candidate(space, streams, 0)
    # A strategy may give values that neither the space nor its plan has.
    defaults = dict.fromkeys(training.method.parameters, _ANY)
    durations: list[float] = []
    # Each part of a model that may be trained has a cost and an end of its own.
    for part in parts_of(strategy, space, plan) or (None,):
        params = dict(candidate)
        if part is not None:
            params[PART] = part
        part_task = for_candidate(task, params)
        records = made_up_records(part_task, 2)
        make, reduce = reduce_task(part_task, records)
        values = {**defaults, **params}
        result, seconds = dry_run(
            plan,
            part_task,
            partial(make_candidate, make, training, values),
            compute=compute,
            reduce=reduce,
            timings=timings,
            key=part,
        )
        check_end(plan, replace(result, params=params))
        _measure(plan, part_task, part_task.model(), records)
        durations.append(seconds)
    return sum(durations) / len(durations)


def _rehearse_build(
    plan: Plan,
    task: Task,
    strategy: Strategy,
    *,
    space: SearchSpace,
    compute: Compute,
    sampler: IndependentSampler | None,
) -> float:
    """Rehearse trials of a ``build``, which must be independent; return the expected seconds."""
    training = plan.first_training
    fixed_params = plan.example(space)

    def make(secret: bytes, fixed: Mapping[str, object] = fixed_params) -> BuildResult:
        try:
            built = build_candidate(
                task,
                training,
                secret=secret,
                fixed=fixed,
                sealed=plan.is_sealed,
                sampler=sampler,
            )
            if built.optimizer is not None:
                _check_rates(built, built.optimizer, training.schedule.steps)
            return built
        except Exception as error:
            error.add_note("This was a rehearsal, before the charge: nothing was spent.")
            raise

    built = make(_SECRETS[0])
    check_given(strategy, built.params)
    refuse_unasked(
        plan,
        built.params,
        lambda draw: make(_SECRETS[draw]).params,
        "build suggests",
        space=space,
    )
    check_ranges(space, built.trial.distributions)
    # With the values of the first: another draw may be a model of another shape.
    params = {**fixed_params, **built.params}

    def train() -> tuple[TrialResult, float]:
        others = (make(secret).made for secret in _SECRETS[2:])
        return dry_run(
            plan,
            task,
            lambda secret: make(secret, params).made,
            compute=compute,
            others=others,
        )

    # Before anything else is run, which a loss that remembers would remember.
    _check_memory(task, built, made_up_records(task, 2))
    few = made_up_records(task, 2, domain_of(task, built.made))

    def program(built: BuildResult) -> object:
        from privtune.training.engine.capture import program_of

        loss = built.made.trained_on(task.record_loss, few)
        return program_of(built.model, loss, *few.like, few.domain)

    _check_memory(task, built, few)
    if plan.is_sealed:
        result, seconds = check_repeated(make, train, program)
    else:
        result, seconds = train()
    check_end(plan, replace(result, params=built.params))
    _measure(plan, task, built.model, few)
    return seconds


def _check_memory(task: Task, built: BuildResult, records: TensorData) -> None:
    """Refuse a loss that gives another value for the same record when it is called again.

    A loss that remembers records makes a gradient depend on others than its own record: its clipping
    bounds nothing.
    """
    loss_of = built.made.trained_on(task.record_loss, records)
    check_remembers_nothing(loss_of, built.model, records)


def _measure(plan: Plan, task: Task, model: nn.Module, records: TensorData) -> None:
    """Compute a model's test metrics on made-up records, to find a metric that does not suit its outputs."""
    test = replace(records, unit=task.unit)
    rng = Streams(_SECRETS[0]).numpy("score", 0)
    measure_release(plan, task, model, test, rng)


def _check_rates(built: BuildResult, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Refuse an optimizer whose learning rates are not finite, or 0 in every step."""
    from privtune.training.engine.optimizers import checked, walked

    checked(optimizer, built.model, built.scheduler)
    walk = [optimizer.param_groups]
    if built.scheduler is not None:
        walk = walked(built.scheduler, steps)
    rates: list[float] = []
    for groups in walk:
        rates.extend(float(group.get("lr", 1.0)) for group in groups)
    are_finite = all(map(math.isfinite, rates))
    if not are_finite or not any(rates):
        raise InvalidInputError(
            "optimizer",
            f"learning rates like {rates[0]}",
            "must have learning rates that are finite, and not all 0",
        )


def check_repeated(
    make: Callable[[bytes], BuildResult],
    between: Callable[[], T],
    program: Callable[[BuildResult], object] = lambda _: None,
) -> T:
    """Build trials again in another order and after training; refuse a ``build`` that changes them.

    Args:
        make: Builds the trial of a secret.
        between: Trains and scores trials; state that training leaves behind shows after it.
        program: Returns what a model computes, in a form that can be compared; None where that is not
            known.

    Returns:
        What ``between`` returned.

    Raises:
        DependentTrialsError: If a trial is not the same the second time.
    """
    one, other = _SECRETS[:2]
    descriptions: dict[bytes, dict[str, Any]] = {}

    def check(
        secret: bytes, built: BuildResult | None = None, refusal: str = _OTHER
    ) -> BuildResult:
        built = built or make(secret)
        description = described(built)
        passes = program(built)
        if passes is not None:
            description["passes"] = passes
        before = descriptions.setdefault(secret, description)
        for what in before.keys() & description:
            if description[what] != before[what]:
                raise DependentTrialsError(refusal.format(what))
        return built

    first = check(one)
    for secret in (other, *_SECRETS[2:]):  # a setting of few values may be the same in some
        built = make(secret)
        check(one, first, _CHANGED)
        if secret == other:
            check(other, built)
    check(other)
    check(one)
    outcome = between()
    check(one)
    return outcome


_CHANGED = (
    "build changes the {} of a trial that was built before: models share a setting, a table or a global "
    "variable that every call of build changes, and trials are trained after others were built. Private "
    "selection covers independent trials alone: make what a trial reads anew in build, and hand it to the "
    "model. Nothing was charged."
)


_OTHER = (
    "build gives other {} when it is called again with the same random numbers, so a trial depends on the "
    "trials before it, or on chance of its own: an iterator over a grid, a warm start, a range narrowed by "
    "earlier trials, NumPy's or Python's random numbers. Private selection covers independent trials alone: "
    "suggest choices with trial.suggest_categorical, and draw other random numbers with torch. Nothing was "
    "charged."
)


def described(built: BuildResult) -> dict[str, object]:
    """Return a trial's ranges, first weights and settings in comparable form, by what they are in words.

    Its keys are words for a refusal, which names the first that differs.
    """
    from privtune.training.engine.optimizers import walked

    trial = built.trial
    suggestions = []
    for name, law in trial.distributions.items():
        value = trial.params[name]
        suggestions.append((name, repr(law), repr(value)))
    optimizer = built.optimizer
    groups: Sequence[dict[str, Any]] = []
    if optimizer is not None:
        groups = optimizer.param_groups
    settings = []
    for group in groups:
        texts = {name: repr(value) for name, value in group.items() if name != "params"}
        settings.append(texts)
    candidate = built.candidate
    schedule: Any = candidate.schedule
    if not isinstance(schedule, str | Mapping | None):
        # A scheduler of torch's shows itself in the rates that it sets.
        is_scheduler = hasattr(schedule, "optimizer")
        schedule = walked(schedule, _SOME) if is_scheduler else type(schedule).__name__
    parts = (
        dict(built.values),
        candidate.method,
        candidate.trainable,
        candidate.max_grad_norm,
        candidate.multiplicity,
    )
    return {
        "hyperparameters or ranges": suggestions,
        "first weights": _digest(built.model),
        "optimizer settings": (type(optimizer).__name__, settings, repr(schedule)),
        "clipping, methods or trained parts": repr(parts),
        "attributes of the model": _attributes(built.model),
    }


def _attributes(model: nn.Module) -> list[tuple[str, str]]:
    """Return the plain attributes of a model's parts: numbers, texts, and lists of them."""
    plain_types = (int, float, str, bool, type(None), tuple, list)
    attributes: list[tuple[str, str]] = []
    for name, part in model.named_modules():
        for key, value in sorted(vars(part).items()):
            if not isinstance(value, plain_types):
                continue
            text = repr(value)
            # An address is another each time, and so is torch's number of each compiled model.
            if " at 0x" not in text and not key.startswith("_torchdynamo"):
                attributes.append((f"{name}.{key}", text))
    return attributes


def _digest(model: nn.Module) -> str:
    """Return the SHA-256 of a model's parameters and buffers, with their names, types and shapes."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        head = f"{name} {tensor.dtype} {tuple(tensor.shape)}"
        values = tensor.detach().cpu().contiguous().flatten()
        octets = values.view(torch.uint8).numpy()
        digest.update(head.encode())
        digest.update(octets.data)
    return digest.hexdigest()


def check_ranges(space: SearchSpace, suggested: Mapping[str, BaseDistribution]) -> None:
    """Refuse a space with values outside of the range that ``build`` asks for under the same name.

    Args:
        space: The arm's space, from which the value is drawn.
        suggested: The laws that ``build`` asked for, by name.

    Raises:
        InvalidInputError: If an end of a range, or a choice, lies outside of the law.
    """
    for name, law in suggested.items():
        if name not in space:
            continue
        of_space = space[name]
        ends = [getattr(of_space, end) for end in ("low", "high") if hasattr(of_space, end)]
        values = getattr(of_space, "choices", ends)
        # A choice that build does not know would stop a trial after the charge.
        beyond = [value for value in values if not inside(law, value)]
        if beyond:
            raise InvalidInputError(
                f"space.{name}",
                beyond,
                f"must lie within what build suggests it from, {law}",
                "Write the same values in both, or leave the name out of the space.",
            )


def refuse_unasked(
    plan: Plan,
    suggested: Iterable[str],
    again: Callable[[int], Iterable[str]],
    how: str,
    *,
    space: Iterable[str] = (),
) -> None:
    """Refuse given values under names that a function asks for in none of several rehearsals.

    Args:
        plan: The plan, with the values of an arm that fixes them.
        suggested: The names that the function asked for in its first rehearsal.
        again: Runs it once more, with the secret of a number, and returns the names that it asked for.
        how: Where the function gets its values, as the end of "under the names that".
        space: The names of the arm's space.

    Raises:
        InvalidInputError: If none of several rehearsals asked for a name.
    """
    # What the plan holds of a candidate is used by the engine, and is drawn by the space alone.
    names = set(space).difference(CHANGING).union(plan.params)
    used = set(suggested).difference(CHANGING)
    for draw in range(2, _DRAWS):
        if not names <= used:
            used |= set(again(draw)).difference(CHANGING)
    unused = sorted(names - used)
    if unused:
        of_plan = [name for name in unused if name in plan.params]
        used_names = ", ".join(sorted(used)) or "nothing"
        raise InvalidInputError(
            f"parameters of arm {plan.arm!r}" if of_plan else "space",
            of_plan or unused,
            f"were suggested in none of {_DRAWS} rehearsals, which asked for {used_names}",
            f"Give values under the names that {how}, or leave these out. Nothing was charged.",
        )
