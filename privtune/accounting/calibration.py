"""Calibration: the noise that meets a target, from the same function that reports.

The search ends on a point at which the reporting function itself was evaluated, on the safe side.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from privtune.accounting._checks import check_delta, check_number
from privtune.accounting.accountant import Guarantee
from privtune.accounting.accountant import epsilon as report
from privtune.accounting.algebra import Adjacency, Event
from privtune.accounting.bounds import quick_epsilon
from privtune.accounting.events import Composed
from privtune.accounting.hints import Search, ends, target_moves
from privtune.accounting.registry import scaled
from privtune.accounting.solving import LARGEST, SMALLEST, solve_decreasing
from privtune.errors import InvalidInputError, PrivTuneError

__all__ = [
    "Calibration",
    "CalibrationError",
    "SharedBudget",
    "calibrate",
    "scale_noise",
    "share_budget",
]

_FIRST, _SECOND = 0.5, 2.0  # fineness of the lattices of a search
_NEAR = 3e-3  # how close, in log ε, the first lattice must come
_GUESSES = 12  # on the first lattice
_ANSWERS = 8  # of the accountant, until one counts
_APART = 1e-2  # two places that tell a slope
_STEEPEST, _FLATTEST = -20.0, -0.05
_NOWHERE = (0.0, -1.2)  # the factor 1, and how ε usually falls
_STRIDE = math.log(16.0)


class CalibrationError(PrivTuneError):
    """No noise meets the target; the message says why."""


@dataclass(frozen=True)
class Calibration:
    """The event whose noise meets the target.

    Args:
        event: The event, every noise multiplier multiplied by `scale`.
        scale: The factor.
        guarantee: What the accountant reports for the event; never above the target.

    Example:
        >>> from privtune.accounting import Gaussian
        >>> found = calibrate(Gaussian(1.0), epsilon=1.0, delta=1e-5)
        >>> round(found.scale, 2), found.event.noise_multiplier == found.scale
        (3.73, True)
    """

    event: Event
    scale: float
    guarantee: Guarantee


@dataclass(frozen=True)
class SharedBudget:
    """Arms that share one budget.

    Args:
        events: One event for each arm.
        arm_epsilons: The target ε that each arm was given.
        guarantees: What the accountant reports for each arm alone.
        total: What it reports for all arms together; never above the budget.

    Example:
        >>> from privtune.accounting import Gaussian
        >>> def arm(target):
        ...     return calibrate(Gaussian(1.0), epsilon=target, delta=1e-5).event
        >>> shared = share_budget([arm, arm], epsilon=2.0, delta=1e-5)
        >>> shared.total.epsilon <= 2.0, sum(shared.arm_epsilons) > 2.0
        (True, True)
    """

    events: tuple[Event, ...]
    arm_epsilons: tuple[float, ...]
    guarantees: tuple[Guarantee, ...]
    total: Guarantee


def scale_noise(event: Event, factor: float) -> Event:
    """Return the event with every noise multiplier multiplied by `factor`.

    Args:
        event: Any event; parts without a noise multiplier stay as they are.
        factor: Above 0.

    Returns:
        The event, of the same shape.

    Raises:
        InvalidInputError: The factor is not above 0.

    Example:
        >>> from privtune.accounting import Gaussian, Repeated
        >>> scale_noise(Repeated(100, Gaussian(2.0)), 1.5)
        Repeated(count=100, event=Gaussian(noise_multiplier=3.0))
    """
    return scaled(event, check_number("factor", factor, above=0.0))


def calibrate(
    event: Event,
    *,
    epsilon: float,
    delta: float,
    adjacency: Adjacency = Adjacency.ADD_REMOVE,
    tolerance: float = 1e-4,
) -> Calibration:
    """Scale all noise multipliers of an event so that it meets a target.

    Args:
        event: The event; its noise multipliers are the proportions, their common factor is found.
        epsilon: Target, above 0.
        delta: Target, in (0, 1).
        adjacency: The relation of neighbouring datasets.
        tolerance: Relative accuracy of the factor.

    Returns:
        The scaled event and its guarantee.

    Raises:
        CalibrationError: No factor up to 10^6 meets the target.
        InvalidInputError: A value out of its range, or no noise multiplier to scale.

    Guarantee:
        The reported ε of the returned event, by the accountant itself, is at most the target.

    Example:
        >>> from privtune.accounting import Gaussian, PoissonSampled, Repeated
        >>> training = Repeated(1000, PoissonSampled(0.01, Gaussian(1.0)))
        >>> found = calibrate(training, epsilon=1.0, delta=1e-5)
        >>> round(found.event.event.event.noise_multiplier, 2), 0.99 < found.guarantee.epsilon <= 1.0
        (1.41, True)
    """
    target = check_number("epsilon", epsilon, above=0.0)
    level = check_delta(delta)
    accuracy = check_number("tolerance", tolerance, above=0.0, below=0.5)
    if scaled(event, 2.0) == event:
        raise InvalidInputError("event", event.type, "has no noise multiplier to scale")

    def reported(scale: float) -> float:
        return report(scaled(event, scale), level, adjacency=adjacency).epsilon

    def impossible() -> CalibrationError:
        return _impossible(event, target, level)

    def searched() -> float:
        near = _near(event, target, level, accuracy, reported)
        return solve_decreasing(reported, target, accuracy, impossible) if near is None else near

    what = (event.to_dict(), target, level, str(adjacency), accuracy)
    search = Search("factor", *what, near=-_STEEPEST * accuracy)
    scale = search.end(reported, target, searched)
    found = scaled(event, scale)
    return Calibration(found, scale, report(found, level, adjacency=adjacency))


def _near(
    event: Event,
    target: float,
    delta: float,
    accuracy: float,
    reported: Callable[[float], float],
) -> float | None:
    """Return a factor found on coarse lattices and confirmed by the accountant, or None.

    The logarithm of ε is nearly a line in the logarithm of the factor. Its slope is learnt on a
    coarse lattice, its place on a finer one (or both from a search for another target) and then
    from the accountant itself, whose answer counts: within the accuracy and on the safe side, or
    nothing.
    """

    def height(scale: float, fineness: float) -> float:
        """Return log(ε / target) on one lattice; NaN where that does not answer."""
        value = quick_epsilon(scaled(event, scale), delta, target, fineness)
        if value is None or not math.isfinite(value):
            return math.nan
        return math.log(value / target) if value > 0.0 else -math.inf

    what = _shape(event, delta)
    before = ends().get(what)
    if before is None:
        place, slope = _coarsely(height)
    else:
        place, slope = before[0] + _bounded((math.log(target) - before[1]) / before[2]), before[2]
    below = 0.5 * accuracy * -slope
    last = None
    for _ in range(_ANSWERS):
        scale = math.exp(place)
        if not SMALLEST <= scale <= LARGEST:
            return None
        value = reported(scale)
        if not math.isfinite(value) or value <= 0.0:
            return None
        now = math.log(value / target)
        if -2.0 * below <= now and value <= target:
            ends()[what] = place, math.log(value), slope
            return scale
        if last is not None and abs(place - last[0]) > _APART:
            slope = (now - last[1]) / (place - last[0])
        if not _STEEPEST < slope < _FLATTEST:
            return None
        last = place, now
        # Aim half the accuracy below the target, in units of the factor.
        below = 0.5 * accuracy * -slope
        place += _bounded(-(now + below) / slope)
    return None


def _shape(event: Event, delta: float) -> tuple[str, float]:
    """Tell events apart by all but their noise: what a factor for one says about that of another."""
    return re.sub(r'("noise_multiplier": )[^,}]+', r"\1", json.dumps(event.to_dict())), delta


def _coarsely(height: Callable[[float, float], float]) -> tuple[float, float]:
    """Return the logarithm of a factor that is about right, and the slope of log ε there.

    Where coarse lattices do not answer, it is that of no change, and the usual slope.
    """
    place, slope = _NOWHERE
    last = None
    for _ in range(_GUESSES):
        now = height(math.exp(place), _FIRST)
        if now == -math.inf:  # far too much noise: there is no line to follow yet
            place -= math.log(2.0)
            continue
        if last is not None and abs(place - last[0]) > _APART:
            slope = (now - last[1]) / (place - last[0])
        if math.isnan(now) or not _STEEPEST < slope < _FLATTEST:
            return _NOWHERE
        last, place = (place, now), place + _bounded(-now / slope)
        if abs(now) < _NEAR:
            finer = height(math.exp(place), _SECOND)
            return (place - finer / slope, slope) if math.isfinite(finer) else _NOWHERE
    return _NOWHERE


def _bounded(step: float) -> float:
    return min(max(step, -_STRIDE), _STRIDE)


def _impossible(event: Event, target: float, delta: float) -> CalibrationError:
    floor = report(scaled(event, LARGEST), delta).epsilon
    reason = (
        "the parts without noise multipliers alone give"
        if math.isfinite(floor)
        else "some part has no finite guarantee at this delta: epsilon is"
    )
    return CalibrationError(
        f"epsilon = {target:g} at delta = {delta:g} cannot be reached by any noise: "
        f"{reason} {floor:.4g}."
    )


def share_budget(
    arms: Sequence[Callable[[float], Event]],
    *,
    epsilon: float,
    delta: float,
    adjacency: Adjacency = Adjacency.ADD_REMOVE,
    weights: Sequence[float] | None = None,
    search: Search | None = None,
) -> SharedBudget:
    """Give every arm of a study its share of one budget, by the account of all arms together.

    Args:
        arms: Each maps its target ε (at the same delta) to an event that meets it.
        epsilon: The budget, above 0.
        delta: The budget's delta, in (0, 1).
        adjacency: The relation of neighbouring datasets.
        weights: Proportions of the arms' targets; equal by default.
        search: What the arms are, for whoever has hints of earlier searches.

    Returns:
        The events for the largest common target whose composition stays within the budget.

    Raises:
        CalibrationError: No common target fits.
        InvalidInputError: A value out of its range.

    Guarantee:
        `total.epsilon` is at most `epsilon`, as the accountant reports it.

    Example:
        >>> from privtune.accounting import Gaussian
        >>> def arm(target):
        ...     return calibrate(Gaussian(1.0), epsilon=target, delta=1e-5).event
        >>> shared = share_budget([arm, arm], epsilon=2.0, delta=1e-5, weights=[1, 3])
        >>> [round(target, 1) for target in shared.arm_epsilons]
        [0.6, 1.9]
    """
    target = check_number("epsilon", epsilon, above=0.0)
    level = check_delta(delta)
    if not arms:
        raise InvalidInputError("arms", (), "must hold at least one arm")
    shares = [1.0] * len(arms) if weights is None else [float(w) for w in weights]
    if len(shares) != len(arms):
        raise InvalidInputError("weights", tuple(shares), "must hold one number for each arm")
    for share in shares:
        check_number("weights", share, above=0.0)
    made: dict[float, tuple[Event, ...]] = {}

    def total(inverse: float) -> float:
        common = target / inverse
        made[inverse] = tuple(arm(common * share) for arm, share in zip(arms, shares, strict=True))
        return report(Composed(made[inverse]), level, adjacency=adjacency).epsilon

    def impossible() -> PrivTuneError:
        return CalibrationError(
            f"no common target of {len(arms)} arms keeps their composition within "
            f"epsilon = {target:g} at delta = {level:g}."
        )

    @target_moves()
    def searched() -> float:
        return solve_decreasing(
            total,
            target,
            1e-3,
            impossible,
            start=math.sqrt(len(arms)) * max(shares),
            steep=1.0,
            enough=1.0 - 1e-3,
        )

    inverse = searched() if search is None else search.end(total, target, searched)
    events = made[inverse]
    common = target / inverse
    return SharedBudget(
        events,
        tuple(common * share for share in shares),
        tuple(report(event, level, adjacency=adjacency) for event in events),
        report(Composed(events), level, adjacency=adjacency),
    )
