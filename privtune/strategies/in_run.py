"""One training and nothing chosen between trainings: fixed hyperparameters, or adapted in the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, cast

from privtune.errors import InvalidInputError
from privtune.spaces import without_numpy
from privtune.strategies._base import Needs, Round
from privtune.strategies.context import PlanningContext
from privtune.strategies.options import check_types
from privtune.strategies.plan import SEALED_STEPS, Plan, TrainingPlan
from privtune.strategies.release import Outcome
from privtune.tasks._fine_tuning import PART, check_part, for_candidate
from privtune.training.methods import METHODS
from privtune.training.methods._base import check_hyperparameter
from privtune.training.methods._rate_schedule import SEARCHED, check_given

if TYPE_CHECKING:
    from privtune.training.mechanism.schedule import Schedule
    from privtune.training.methods._base import Method


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
        """Plan one training of at most ``epsilon``. Touches no data."""
        method = method_class(self.method)
        if not context.define_by_run:
            require_parameters(self.arm, method, self.parameters)
        require_suited(self.arm, method, self.options, context)
        training = TrainingPlan(
            context.schedule,
            budgeted(
                context,
                self.method,
                self.options,
                epsilon=epsilon,
                trainable=self.parameters.get(PART),
            ),
        )
        advice = ""
        if context.declared is None and not context.define_by_run:
            # Counting parameters makes the model, which imports torch: for those alone that ask.
            count = partial(trained_parameters, context, self.parameters)
            advice = training.method.advice(context.schedule, count)
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
            details={"advice": advice} if advice else {},
        )

    def run(self, plan: Plan, trials: Round) -> Outcome:
        """Train once and release the model with its curves."""
        return Outcome(trials.train(plan, plan.training, plan.params, name="final"))


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
    summary: ClassVar[str] = "one training with hyperparameters given in advance"

    arm: str = "fixed"
    method: str = "dpsgd"


def trained_parameters(context: PlanningContext, given: Mapping[str, Any]) -> int:
    """Return how many parameters of the task's model a candidate trains. Touches no data."""
    model = for_candidate(context.task, given).model()
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def method_class(name: str) -> type[Method]:
    """Return the training method of this name, or say which there are."""
    if name not in METHODS:
        raise InvalidInputError("method", name, f"must be one of {', '.join(METHODS.names())}")
    return METHODS[name]


def budgeted(
    context: PlanningContext,
    name: str,
    options: Mapping[str, Any],
    *,
    epsilon: float,
    schedule: Schedule | None = None,
    trainable: object = None,
) -> Method:
    """Return a method with its options, what it takes from the task, and the noise of a target."""
    if context.declared is not None:
        target = {"epsilon": epsilon, "delta": context.delta}
        # It stands where a method does, though nothing here trains by it.
        return cast("Method", context.declared.calibrated(adjacency=context.adjacency, **target))
    method, options = method_class(name), without_numpy(options)
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
        schedule or context.schedule, epsilon=epsilon, delta=context.delta, **options
    )


def require_parameters(
    arm: str,
    method: type[Method],
    given: Mapping[str, Any],
    drawn: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Check that exactly the hyperparameters are given that the method leaves to the user."""
    needed = set(method.parameters)
    check_given(given)
    if PART in given:
        check_part(given[PART])
    given = {name: value for name, value in given.items() if name not in (*SEARCHED, PART)}
    names = {*given, *drawn}
    if missing := sorted(needed - names):
        raise InvalidInputError(
            f"parameters of arm {arm!r}",
            sorted(names),
            f"method {method.name!r} also needs {', '.join(missing)}",
        )
    if extra := sorted(names - needed):
        raise InvalidInputError(
            f"parameters of arm {arm!r}",
            extra,
            f"method {method.name!r} takes {', '.join([*sorted(needed), *SEARCHED, PART])} and no others",
        )
    for name, value in given.items():
        check_hyperparameter(f"{name} of arm {arm!r}", name, value)
    for name, law in drawn.items():
        ends = [getattr(law, end) for end in ("low", "high") if hasattr(law, end)]
        for value in getattr(law, "choices", ends):
            check_hyperparameter(f"space.{name}", name, value)


def require_suited(
    arm: str, method: type[Method], options: Mapping[str, Any], context: PlanningContext
) -> None:
    """Check that a method's proven bounds are known, and that its noise is for the budget's adjacency."""
    known = {} if context.define_by_run else context.task.constants
    if missing := [name for name in method.proven if name not in options and name not in known]:
        raise InvalidInputError(
            f"strategy of arm {arm!r}",
            method.name,
            f"needs {' and '.join(missing)}, proven for every possible record, which the task does not "
            "declare",
            "It is for linear models on features of public bounds (iris-logistic); for a network take "
            "public-rate or prodigy.",
        )
    default = getattr(method, "adjacency", None)
    own = default if context.define_by_run else context.adjacency.value
    stated = options.get("adjacency", own)
    if default is not None and stated != context.adjacency.value:
        raise InvalidInputError(
            f"adjacency of arm {arm!r}",
            stated,
            f"must be the budget's, {context.adjacency.value}",
            "Set the option adjacency.",
        )
