"""Choice of the number of steps over which an arm's noise is correlated, from public facts alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from privtune.accounting import Adjacency, CalibrationError, Gaussian, PoissonSampled, Repeated
from privtune.accounting import calibrate as calibrate_event
from privtune.accounting import epsilon as account
from privtune.accounting.calibration import searches_apart
from privtune.strategies.context import PlanningContext
from privtune.strategies.plan import Plan, TrainingPlan
from privtune.training.mechanism.banded import prefix_error
from privtune.training.mechanism.schedule import MOST_BANDS, Schedule
from privtune.training.methods.method import check_correlation

if TYPE_CHECKING:
    from privtune.strategies.strategy import Strategy

_GRID = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, MOST_BANDS)
_WORSE = 3  # numbers of bands in a row that are worse than the best, after which the search ends
_TOLERANCE = 1e-3


def plan_with_noise(strategy: Strategy, context: PlanningContext, *, epsilon: float) -> Plan:
    """Return a strategy's plan with the study's noise, correlated over the number of steps that it asks for.

    For ``bands: auto``, a plan with independent noise is made first. Then the number of bands is chosen
    with which one training of the same ε has the least error in sums of noise, and the arm is planned with
    it. If its sums have less error than those of the first plan, it is returned, else the first one. A
    method whose steps do not depend on the gradient's scale, such as DP-Adam, keeps independent noise: it
    divides by the noise of single steps, which correlation makes several times as large.

    Args:
        strategy: How the arm chooses.
        context: Public facts, with the noise options of the study.
        epsilon: Target of one run of the arm.

    Raises:
        InvalidInputError: If noise is to be correlated for a method whose noise or clipping differs between
            steps.
    """
    noise = context.noise
    if not noise.is_correlated:
        return strategy.plan(context, epsilon=epsilon).with_noise(noise)
    if noise.bands != "auto":
        return _plan_over(strategy, context, noise.bands, epsilon=epsilon)
    plain = _plan_over(strategy, context, 1, epsilon=epsilon)
    for training in _trainings(plain):
        check_correlation(training.method, 2)
    is_divided = any(training.method.scale_free for training in _trainings(plain))
    if is_divided or not plain.is_private:
        return plain
    bands = _choose_bands(plain, context)
    if bands > 1:
        banded = _plan_over(strategy, context, bands, epsilon=epsilon)
        share = error_of_sums(banded.training) / error_of_sums(plain.training)
        if share < 1.0:
            details = {**banded.details, "error_of_sums": share}
            return replace(banded, details=details)
    return plain


def error_of_sums(training: TrainingPlan) -> float:
    """Return the root mean square error of a training's prefix sums of noise, over the sensitivity."""
    schedule = training.schedule
    return training.method.noise_multiplier * prefix_error(schedule.bands, schedule.steps)


def _plan_over(strategy: Strategy, context: PlanningContext, bands: int, *, epsilon: float) -> Plan:
    """Return a strategy's plan with noise that is correlated over so many steps."""
    schedule = replace(context.schedule, bands=bands)
    plan = strategy.plan(replace(context, schedule=schedule), epsilon=epsilon)
    return plan.with_noise(context.noise)


def _trainings(plan: Plan) -> Iterator[TrainingPlan]:
    """Yield the trainings of an arm: the released model's, and those of its trials."""
    yield plan.training
    if plan.search is not None:
        yield from plan.search.trainings


def _choose_bands(plan: Plan, context: PlanningContext) -> int:
    """Return the number of bands with the least error of sums, at the ε of one training of a plan."""
    training = plan.training
    rate = max(each.schedule.sample_rate for each in _trainings(plan))
    guarantee = account(training.event, context.delta, adjacency=context.adjacency)
    # Rounded, so that plans of nearly the same ε share an answer.
    target = float(f"{guarantee.epsilon:.6g}")
    if not math.isfinite(target):
        return 1
    return best_bands(
        training.schedule,
        most=int(1.0 / rate),
        epsilon=target,
        delta=context.delta,
        adjacency=context.adjacency,
    )


@lru_cache(maxsize=64)
def best_bands(
    schedule: Schedule,
    *,
    most: int,
    epsilon: float,
    delta: float,
    adjacency: Adjacency = Adjacency.ADD_REMOVE,
) -> int:
    """Return over how many steps correlated noise has the least error of sums in a training.

    Args:
        schedule: Rate and steps of the training.
        most: The largest number to try: one over the largest sampling rate of the arm.
        epsilon: What the training costs.
        delta: δ at which it does.
        adjacency: The neighbouring relation.

    Returns:
        A number of a public grid up to 256, or 1 where independent noise has the least error.
    """
    best = 1
    least = math.inf
    worse = 0
    with searches_apart():
        for bands in (1, *_GRID):
            if bands > min(most, schedule.steps):
                break
            trial = replace(schedule, bands=bands)
            event = Repeated(trial.rounds, PoissonSampled(trial.group_rate, Gaussian(1.0)))
            try:
                calibration = calibrate_event(
                    event,
                    epsilon=epsilon,
                    delta=delta,
                    adjacency=adjacency,
                    tolerance=_TOLERANCE,
                )
            except CalibrationError:
                break
            error = calibration.scale * prefix_error(bands, schedule.steps)
            if error < least:
                best = bands
                least = error
                worse = 0
                continue
            worse += 1
            if worse == _WORSE:
                break
    return best
