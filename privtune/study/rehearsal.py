"""Rehearsals of trials on made-up records, before anything is charged."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from privtune.errors import InvalidInputError
from privtune.execution.fine_tuned import check_remembers_nothing, reduced
from privtune.execution.training import domain_of, dry_run, made_of, made_up_records
from privtune.spaces import inside
from privtune.strategies import Plan, Strategy, StrategyError, TrialResult
from privtune.strategies.arms import check_given
from privtune.strategies.searching import CHANGING, parts_of
from privtune.study.build import Built, build_candidate
from privtune.study.release import check_end, utility_of
from privtune.tasks._fine_tuning import PART, for_candidate
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

_DRAWS = 10  # how many draws are tried before a value that none of them asked for is refused
_ANY = 1e-3  # a value that every hyperparameter can have
_SOME = 100  # steps of a schedule that are compared
_SECRETS = tuple(bytes([number] * 32) for number in range(_DRAWS))


class DependentTrialsError(StrategyError):
    """A trial is not a function of its own random numbers: it hangs on other trials, or on chance."""


def rehearse(
    plan: Plan,
    task: Task,
    strategy: Strategy,
    *,
    space: SearchSpace,
    compute: Compute,
    sampler: IndependentSampler | None = None,
    known: MutableMapping[object, float] | None = None,
) -> float:
    """Train, score, pack, release, load and measure a trial on made-up records."""
    if task.build is not None:
        return _rehearse_build(plan, task, strategy, space=space, compute=compute, sampler=sampler)
    training = plan.first_training
    drawn = plan.candidate(space, Streams(_SECRETS[0]), 0)
    each = []
    for part in parts_of(strategy, space, plan) or (None,):
        params = drawn if part is None else {**drawn, PART: part}
        own = for_candidate(task, params)
        make, reduce = reduced(own, made_up_records(own, 2))
        # A strategy may give values that neither the space nor its plan has.
        whole = {**dict.fromkeys(training.method.parameters, _ANY), **params}
        result, seconds = dry_run(
            plan,
            own,
            partial(made_of, make, training, whole),
            compute=compute,
            reduce=reduce,
            known=known,
            key=part,
        )
        check_end(plan, replace(result, params=params))
        _measure(plan, own, own.model(), made_up_records(own, 2))
        each.append(seconds)
    return sum(each) / len(each)


def _rehearse_build(
    plan: Plan,
    task: Task,
    strategy: Strategy,
    *,
    space: SearchSpace,
    compute: Compute,
    sampler: IndependentSampler | None,
) -> float:
    training = plan.first_training
    fixed = plan.example(space)

    def make(secret: bytes, given: Mapping[str, Any] = fixed) -> Built:
        try:
            built = build_candidate(
                task, training, secret=secret, fixed=given, sealed=plan.is_sealed, sampler=sampler
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
        plan, built.params, lambda draw: make(_SECRETS[draw]).params, "build suggests", space=space
    )
    check_ranges(space, built.trial.distributions)
    known = {**fixed, **built.params}

    def trained() -> tuple[TrialResult, float]:
        others = (make(secret).made for secret in _SECRETS[2:])
        return dry_run(
            plan, task, lambda secret: make(secret, known).made, compute=compute, others=others
        )

    # Before anything else is run, which a loss that remembers would remember.
    _check_memory(task, built, made_up_records(task, 2))
    few = made_up_records(task, 2, domain_of(task, built.made))

    def program(built: Built) -> Any:
        from privtune.training.engine.capture import program_of

        return program_of(
            built.model, built.made.trained_on(task.record_loss, few), *few.like, few.domain
        )

    _check_memory(task, built, few)
    result, seconds = check_repeated(make, trained, program) if plan.is_sealed else trained()
    check_end(plan, replace(result, params=built.params))
    _measure(plan, task, built.model, few)
    return seconds


def _check_memory(task: Task, built: Built, records: TensorData) -> None:
    """Refuse a loss that is another number for the same record the second time."""
    loss_of = built.made.trained_on(task.record_loss, records)
    check_remembers_nothing(loss_of, built.model, records)


def _measure(plan: Plan, task: Task, model: nn.Module, records: TensorData) -> None:
    """Compute the test metrics of a model on made-up records: a metric may not suit its outputs."""
    test = replace(records, unit=task.unit)
    utility_of(plan, task, model, test, Streams(_SECRETS[0]).numpy("score", 0))


def _check_rates(built: Built, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Refuse an optimizer that cannot step, or steps nowhere, in all of a training."""
    from privtune.training.engine.optimizers import checked, walked

    checked(optimizer, built.model, built.scheduler)
    walk = [optimizer.param_groups] if built.scheduler is None else walked(built.scheduler, steps)
    rates = [float(group.get("lr", 1.0)) for groups in walk for group in groups]
    if not all(map(math.isfinite, rates)) or not any(rates):
        raise InvalidInputError(
            "optimizer",
            f"learning rates like {rates[0]}",
            "must have learning rates that are finite, and not all 0",
        )


def check_repeated(
    make: Callable[[bytes], Built],
    between: Callable[[], T],
    program: Callable[[Built], Any] = lambda _: None,
) -> T:
    """Build two trials twice, in both orders, and refuse a ``build`` that gives another trial."""
    one, other = _SECRETS[:2]
    seen: dict[bytes, dict[str, Any]] = {}

    def check(secret: bytes, built: Built | None = None, said: str = _SAID) -> Built:
        built = built or make(secret)
        now, told = described(built), program(built)
        now |= {} if told is None else {"passes": told}
        before = seen.setdefault(secret, now)
        if differing := [what for what in before.keys() & now if now[what] != before[what]]:
            raise DependentTrialsError(said.format(differing[0]))
        return built

    kept = check(one)
    for secret in (other, *_SECRETS[2:]):  # a setting of few values may be the same in some
        built = make(secret)
        check(one, kept, _CHANGED)
        if secret == other:
            check(other, built)
    check(other)
    check(one)
    found = between()
    check(one)
    return found


_CHANGED = (
    "build changes the {} of a trial that was built before: models share a setting, a table or a global "
    "variable that every call of build changes, and trials are trained after others were built. Private "
    "selection covers independent trials alone: make what a trial reads anew in build, and hand it to the "
    "model. Nothing was charged."
)


_SAID = (
    "build gives other {} when it is called again with the same random numbers, so a trial depends on the "
    "trials before it, or on chance of its own: an iterator over a grid, a warm start, a range narrowed by "
    "earlier trials, NumPy's or Python's random numbers. Private selection covers independent trials alone: "
    "suggest choices with trial.suggest_categorical, and draw other random numbers with torch. Nothing was "
    "charged."
)


def described(built: Built) -> dict[str, Any]:
    """Return a trial's ranges, first weights and settings: equal whenever its random numbers are."""
    from privtune.training.engine.optimizers import walked

    candidate, trial = built.candidate, built.trial
    optimizer = built.optimizer
    groups = [] if optimizer is None else optimizer.param_groups
    settings = [{n: repr(v) for n, v in group.items() if n != "params"} for group in groups]
    schedule = candidate.schedule
    told: Any = schedule
    parts = candidate.method, candidate.trainable, candidate.max_grad_norm, candidate.multiplicity
    if not isinstance(schedule, str | Mapping | None):
        known = hasattr(schedule, "optimizer")
        told = walked(schedule, _SOME) if known else type(schedule).__name__
    return {
        "hyperparameters or ranges": [
            (name, repr(law), repr(trial.params[name])) for name, law in trial.distributions.items()
        ],
        "first weights": _digest(built.model),
        "optimizer settings": (type(optimizer).__name__, settings, repr(told)),
        "clipping, methods or trained parts": repr((dict(built.values), *parts)),
        "attributes of the model": _attributes(built.model),
    }


def _attributes(model: nn.Module) -> list[tuple[str, str]]:
    """Return the plain attributes of a model's parts: numbers, texts, and lists of them."""
    plain = (int, float, str, bool, type(None), tuple, list)
    return [
        (f"{name}.{key}", repr(value))
        for name, part in model.named_modules()
        for key, value in sorted(vars(part).items())
        if isinstance(value, plain)
        and " at 0x" not in repr(value)
        and not key.startswith("_torchdynamo")  # a number of each compiled model
    ]


def _digest(model: nn.Module) -> str:
    import torch

    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(raw)
    return found.hexdigest()


def check_ranges(space: SearchSpace, suggested: Mapping[str, BaseDistribution]) -> None:
    """Refuse a space with values that ``build``, which asks for the same name, does not expect."""
    for name, law in suggested.items():
        if name not in space:
            continue
        drawn = space[name]
        ends = [getattr(drawn, end) for end in ("low", "high") if hasattr(drawn, end)]
        # A choice that build does not know would stop a trial after the charge.
        if beyond := [value for value in getattr(drawn, "choices", ends) if not inside(law, value)]:
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
    """Refuse values for names that a function does not use: others would be drawn, and charged."""
    # What the plan holds of a candidate is used by the engine, and is drawn by the space alone.
    names = {*plan.params, *(name for name in space if name not in CHANGING)}
    asked = set(suggested) - set(CHANGING)
    for draw in range(2, _DRAWS):
        if not names <= asked:
            asked |= set(again(draw)) - set(CHANGING)
    if unasked := sorted(names - asked):
        given = [name for name in unasked if name in plan.params]
        raise InvalidInputError(
            f"parameters of arm {plan.arm!r}" if given else "space",
            given or unasked,
            f"were suggested in none of {_DRAWS} rehearsals, which asked for "
            f"{', '.join(sorted(asked)) or 'nothing'}",
            f"Give values under the names that {how}, or leave these out. Nothing was charged.",
        )
