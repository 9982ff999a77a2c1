"""Strategies of a single training, with fixed hyperparameters or ones adapted during the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, cast

from privtune.errors import InvalidInputError
from privtune.names import did_you_mean, refuse_fields, refuse_name
from privtune.spaces import without_numpy
from privtune.strategies.context import PlanningContext
from privtune.strategies.options import check_types
from privtune.strategies.plan import SEALED_STEPS, Plan, TrainingPlan
from privtune.strategies.release import Outcome
from privtune.strategies.requests import NamedTraining, StrategyRun
from privtune.strategies.strategy import Needs, Round
from privtune.tasks.pretrained import PART, check_part, for_candidate
from privtune.training.methods import METHODS
from privtune.training.methods.method import check_hyperparameter
from privtune.training.methods.rate_schedule import SEARCHED, check_given

if TYPE_CHECKING:
    from privtune.training.mechanism.schedule import Schedule
    from privtune.training.methods.method import Method


@dataclass(frozen=True, kw_only=True)
class InRun:
    """Train once with a method that adapts its own hyperparameters from its noisy releases.

    Args:
        arm: Name of the arm.
        method: Name of a training method (``privtune strategies`` lists them).
        parameters: Hyperparameters that the method leaves to the user.
        options: Further options of the method (``interval``, ``loss_batch``, ...).

    Example:
        >>> strategy = InRun(arm="quantile", method="quantile-clipping", parameters={"learning_rate": 0.5})
        >>> strategy.plan(study.spec.planning_context(), epsilon=2.0).released
        ('the model', 'its hyperparameters', 'every noisy step and what follows from it')
    """

    name: ClassVar[str] = "in-run"
    summary: ClassVar[str] = "one training that adapts its own hyperparameters"
    needs: ClassVar[Needs] = Needs(draws=False)

    arm: str
    method: str
    parameters: Mapping[str, float] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def plan(self, context: PlanningContext, *, epsilon: float) -> Plan:
        """Plan one training of at most ``epsilon``, without touching data."""
        method = method_class(self.method)
        if not context.define_by_run:
            require_parameters(self.arm, method, self.parameters)
        require_suited(self.arm, method, self.options, context)
        trainable = self.parameters.get(PART)
        planned_method = budgeted(
            context,
            self.method,
            self.options,
            epsilon=epsilon,
            trainable=trainable,
        )
        training = TrainingPlan(context.schedule, planned_method)
        details = {}
        if context.declared is None and not context.define_by_run:
            # Counting parameters makes the model, which imports torch: for those alone that ask.
            count = partial(trained_parameters, context, self.parameters)
            advice = training.method.advice(context.schedule, count)
            if advice:
                details["advice"] = advice
        return Plan(
            arm=self.arm,
            strategy=self.method if self.name == "in-run" else self.name,
            event=training.event,
            training=training,
            params=dict(self.parameters),
            released=(
                "the model",
                "its hyperparameters",
                "every noisy step and what follows from it",
            ),
            sealed=SEALED_STEPS,
            details=details,
        )

    def run(self, plan: Plan, trials: Round) -> StrategyRun:
        """Train once and release the model with its curves."""
        (result,) = yield NamedTraining("final", plan.training, plan.params)
        return Outcome(result)


@dataclass(frozen=True, kw_only=True)
class Fixed(InRun):
    """Train once with hyperparameters given in advance, chosen without looking at the data.

    Args:
        arm: Name of the arm.
        method: Name of a training method.
        parameters: Its hyperparameters.
        options: Further options of the method.

    Example:
        >>> strategy = Fixed(parameters={"learning_rate": 0.5, "max_grad_norm": 1.0})
        >>> strategy.plan(study.spec.planning_context(), epsilon=2.0).training.method.name
        'dpsgd'
    """

    name: ClassVar[str] = "fixed"
    summary: ClassVar[str] = "one training with hyperparameters fixed in advance"

    arm: str = "fixed"
    method: str = "dpsgd"


def trained_parameters(context: PlanningContext, params: Mapping[str, object]) -> int:
    """Return how many parameters of the task's model a candidate of these ``params`` trains.

    Touches no data, but makes the model, which takes seconds where weights are read.
    """
    model = for_candidate(context.task, params).model()
    sizes = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    return sum(sizes)


def method_class(name: str) -> type[Method]:
    """Return a training method by its name, or refuse an unknown name."""
    if name not in METHODS:
        refuse_name("method", name, METHODS.names())
    return METHODS[name]


def budgeted(
    context: PlanningContext,
    name: str,
    options: Mapping[str, object],
    *,
    epsilon: float,
    schedule: Schedule | None = None,
    trainable: object = None,
) -> Method:
    """Return a method with its options, the task's facts, and the noise that meets ``epsilon``.

    Args:
        context: Public facts.
        name: Of the method.
        options: Its options, as a spec or a user's Python gives them.
        epsilon: What one training costs alone.
        schedule: The training's schedule; that of the context unless given.
        trainable: Which part of the task's model is trained; the task's own unless given.
    """
    if context.declared is not None:
        mechanism = context.declared.calibrated(
            epsilon=epsilon,
            delta=context.delta,
            adjacency=context.adjacency,
        )
        # It stands where a method does, though nothing here trains by it.
        return cast("Method", mechanism)
    method = method_class(name)
    options = without_numpy(options)
    # Those of a spec were checked when it was read; those given in Python are first seen here.
    check_types(method, options, where=f"method {name!r}")
    if not context.define_by_run:
        options = method.complete(
            options,
            part=trainable or context.task.trainable,
            constants=context.task.constants,
            dimension=lambda: trained_parameters(context, {}),
            adjacency=context.adjacency.value,
        )
    return method.for_budget(
        schedule or context.schedule,
        epsilon=epsilon,
        delta=context.delta,
        **options,
    )


def require_parameters(
    arm: str,
    method: type[Method],
    parameters: Mapping[str, object],
    space: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Check that the hyperparameters of an arm are those that its method leaves to the user.

    Args:
        arm: Name of the arm, for messages.
        method: The training method.
        parameters: Hyperparameters that are held fixed.
        space: Distributions of those that are drawn.

    Raises:
        InvalidInputError: If one is missing or unknown, or may have a value that no training can run with.
    """
    expected = set(method.parameters)
    check_given(parameters)
    if PART in parameters:
        check_part(parameters[PART])
    # A part and a schedule go with every method, and have just been checked.
    values: dict[str, Any] = {}
    for name, value in parameters.items():
        if name not in (*SEARCHED, PART):
            values[name] = value
    names = {*values, *space}
    missing = sorted(expected - names)
    extra = sorted(names - expected)
    if missing:
        raise InvalidInputError(
            f"parameters of arm {arm!r}",
            sorted(names),
            f"method {method.name!r} also needs {', '.join(missing)}",
            did_you_mean(extra, missing),
        )
    if extra:
        allowed = [*sorted(expected), *SEARCHED, PART]
        refuse_fields(f"parameters of arm {arm!r}", extra, allowed, f"method {method.name}")
    for name, value in values.items():
        check_hyperparameter(f"{name} of arm {arm!r}", name, value)
    for name, distribution in space.items():
        for value in _extremes(distribution):
            check_hyperparameter(f"space.{name}", name, value)


def _extremes(distribution: object) -> list[Any]:
    """Return the choices of a distribution, or the ends of its interval."""
    if hasattr(distribution, "choices"):
        return list(distribution.choices)
    extremes: list[Any] = []
    for end in ("low", "high"):
        if hasattr(distribution, end):
            extremes.append(getattr(distribution, end))
    return extremes


def require_suited(
    arm: str,
    method: type[Method],
    options: Mapping[str, object],
    context: PlanningContext,
) -> None:
    """Check that constants needed by a method are proven, and that its adjacency is the budget's."""
    constants = {} if context.define_by_run else context.task.constants
    missing: list[str] = []
    for name in method.proven:
        if name not in options and name not in constants:
            missing.append(name)
    if missing:
        raise InvalidInputError(
            f"strategy of arm {arm!r}",
            method.name,
            f"needs {' and '.join(missing)}, proven for every possible record, which the task does not "
            "declare",
            "It is for linear models on features of public bounds (iris-logistic); for a network take "
            "public-rate or prodigy.",
        )
    default = getattr(method, "adjacency", None)
    if default is None:
        return
    budget_adjacency = context.adjacency.value
    # A method of a task takes the budget's; where a function trains, nobody tells it.
    adjacency = options.get("adjacency", default if context.define_by_run else budget_adjacency)
    if adjacency != budget_adjacency:
        raise InvalidInputError(
            f"adjacency of arm {arm!r}",
            adjacency,
            f"must be the budget's, {budget_adjacency}",
            "Set the option adjacency.",
        )
