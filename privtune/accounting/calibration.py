"""The noise that meets a target ε, found by the same function that reports ε.

The search ends on a point at which the accountant itself was asked, on the safe side. Before, quicker
functions that bound nothing say where to look (`Gains`, `sketch`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial

from privtune.accounting._checks import check_delta, check_number
from privtune.accounting.accountant import Guarantee, quick_epsilon
from privtune.accounting.accountant import epsilon as report
from privtune.accounting.events import Adjacency, Composed, Event, Gaussian, flatten
from privtune.accounting.pairs import Gains, shape
from privtune.accounting.registry import entry, scaled
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.numbers import ceil_digits

LARGEST = 1e6
SMALLEST = 1e-4
_ROUNDS = 60


def rounded_up(x: float, tolerance: float) -> float:
    """Return the next number of few digits, above x by less than a tenth of a relative tolerance."""
    # The last digits of exp and log differ between platforms, and a training's noise derives from all of
    # its plan: with 2e-13 more of it, every released bit would be another.
    return ceil_digits(x, 2 - math.floor(math.log10(tolerance)))


def solve_decreasing(
    function: Callable[[float], float],
    target: float,
    tolerance: float,
    impossible: Callable[[], PrivTuneError],
    *,
    start: float = 1.0,
    steep: float = 1.2,
    enough: float = 1.0,
) -> float:
    """Return x of few digits, near the least at which a falling function meets a target."""
    # Secants of the logarithms: the function takes long. It was evaluated at the x that is returned, and
    # found above the target at an x within the tolerance. `steep`: how much faster x changes than it.
    aim = 0.5 * (1.0 + enough) * target
    seen: list[tuple[float, float]] = []  # the points on the side that is left

    def outward(x: float, value: float) -> float:
        """Return how far to go from a point, as a factor; further each time it was not enough."""
        seen.append((x, value))
        ratio = max(value / aim, aim / value) if 0.0 < value < math.inf else 4.0
        power, stride, least = steep, 3.0 ** (len(seen) - 1), 1.0 + 2.0 * tolerance
        if enough < 1.0 and len(seen) <= 3:  # a band is met by a secant, where an edge is not
            power, stride, least = _slope(*seen[-2:], usual=steep), 1.0, 1.0
        return _power(max(min(ratio, 1e6) ** power, least), stride)

    rounded = partial(rounded_up, tolerance=tolerance)
    low = high = rounded(start)
    low_value = high_value = function(high)
    if enough * target <= high_value <= target:
        return high
    if high_value > target:
        while high_value > target:
            if high >= LARGEST:
                raise impossible()
            low, low_value = high, high_value
            high = rounded(min(high * outward(high, high_value), LARGEST))
            high_value = function(high)
    else:
        while low_value <= target:
            high, high_value = low, low_value
            if enough < 1.0 and enough * target <= high_value:
                return high
            low = rounded(low / outward(low, low_value))
            if low < SMALLEST:
                return high
            low_value = function(low)
    widths = [math.inf, math.inf]
    for _ in range(_ROUNDS):
        width = math.log(high / low)
        if width <= tolerance or (enough < 1.0 and enough * target <= high_value):
            break
        above, below = low_value / aim, high_value / aim
        # A secant that did not halve the interval in two steps is no guide.
        straight = math.isfinite(above) and below > 0.0 and width < 0.5 * widths[-2]
        root = width * math.log(above) / math.log(above / below) if straight else 0.5 * width
        widths.append(width)
        # Near an end, so that the other side of the root is found within the tolerance.
        if straight and enough == 1.0:
            near = width - 0.9 * tolerance
            root = near if root > near else max(root + 0.2 * tolerance, 0.9 * tolerance)
        middle = rounded(low * math.exp(root))
        value = function(middle)
        if value > target:
            low, low_value = middle, value
        else:
            high, high_value = middle, value
    return high


def _slope(*seen: tuple[float, float], usual: float) -> float:
    """Return Δ log x over -Δ log f(x) between two points of a falling function, or the usual value."""
    (x, value), (other, beyond) = seen[0], seen[-1]
    if not 0.0 < beyond < math.inf or not 0.0 < value < math.inf or value == beyond:
        return usual
    found = math.log(other / x) / math.log(value / beyond)
    return found if 0.25 * usual < found < 4.0 * usual else usual


def _power(base: float, stride: float) -> float:
    """Return ``base ** stride``, 16 at most; floats do not hold what strides grow to."""
    return 16.0 if stride * math.log(base) > 3.0 else min(base**stride, 16.0)


_FIRST, _SECOND = 0.5, 2.0  # fineness of the lattices of a search
_NEAR = 1e-2  # how close, in log ε, the first lattice must come
_GUESSES, _FINER = 12, 3  # on the first lattice, and on the second
_ANSWERS = 8  # of the accountant, until one counts
_APART = 1e-2  # two places that tell a slope
_STEEPEST, _FLATTEST = -20.0, -0.05
_NOWHERE = (0.0, -1.2)  # the factor 1, and how ε usually falls
_LESS = 4e-4
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
    memory = _memory.get() or _Memory()
    asked = (event, target, level, adjacency, accuracy)
    if asked in memory.found:
        return memory.found[asked]

    def reported(scale: float) -> float:
        return report(scaled(event, scale), level, adjacency=adjacency).epsilon

    def impossible() -> CalibrationError:
        return _impossible(event, target, level)

    scale = _near(memory, event, target, delta=level, accuracy=accuracy, reported=reported)
    if scale is None:
        scale = solve_decreasing(reported, target, accuracy, impossible)
    found = scaled(event, scale)
    answer = Calibration(found, scale, report(found, level, adjacency=adjacency))
    memory.found[asked] = answer
    return answer


def sketch(
    event: Event,
    *,
    epsilon: float,
    delta: float,
    adjacency: Adjacency = Adjacency.ADD_REMOVE,
    tolerance: float = 1e-4,
) -> float:
    """Estimate the factor that `calibrate` finds, for searches that end in a calibration."""
    # Where selections stand inside other events the accountant, which takes long, is not asked.
    if _nests(event) and adjacency is Adjacency.ADD_REMOVE:
        memory = _memory.get() or _Memory()
        guess = _guessed(memory, event, epsilon, delta, tolerance)
        if guess is not None and SMALLEST <= math.exp(guess[0]) <= LARGEST:
            end = _End(guess[0] + math.log(shape(event)[1]), math.log(epsilon), guess[1])
            memory.ends.setdefault((shape(event)[0], delta), []).append(end)
            return rounded_up(math.exp(guess[0]), tolerance)
    found = calibrate(event, epsilon=epsilon, delta=delta, adjacency=adjacency, tolerance=tolerance)
    return found.scale


@dataclass(frozen=True)
class _End:
    """Where a search ended: the logarithms of the noise and of ε, and the slope of one in the other."""

    noise: float
    value: float
    slope: float

    def noise_for(self, target: float) -> float:
        """Return the logarithm of the noise for another ε, on a line."""
        return self.noise + _bounded((math.log(target) - self.value) / self.slope)


@dataclass(frozen=True)
class _Memory:
    """Earlier searches of one planning: confirmed answers, and places where the next search begins."""

    found: dict[object, Calibration] = field(default_factory=dict)
    ends: dict[object, list[_End]] = field(default_factory=dict)
    gains: Gains = field(default_factory=Gains)


_memory: ContextVar[_Memory | None] = ContextVar("memory", default=None)


@contextmanager
def searches_learn() -> Iterator[None]:
    """Let every calibration in this block start from the noise that earlier, similar ones found."""
    token = _memory.set(_memory.get() or _Memory())
    try:
        yield
    finally:
        _memory.reset(token)


def _guessed(
    memory: _Memory, event: Event, target: float, delta: float, accuracy: float
) -> tuple[float, float] | None:
    """Estimate the log of the noise factor that meets a target, and the slope of log ε there; or None."""

    def height(scale: float, fineness: float, gains: Gains | None = None) -> float:
        """Return log(ε / target) on one lattice; NaN where that does not answer."""
        value = quick_epsilon(scaled(event, scale), delta, target, fineness, gains)
        if value is None or not math.isfinite(value):
            return math.nan
        return math.log(value / target) if value > 0.0 else -math.inf

    kind, noise = shape(event)
    if ends := memory.ends.get((kind, delta)):
        end = min(ends, key=lambda end: abs(end.value - math.log(target)))
        guess = end.noise_for(target) - math.log(noise), end.slope
        if not any(map(_is_slow, flatten(event))):
            return guess  # the accountant answers as fast as a lattice
    else:
        coarse = _coarsely(lambda scale: height(scale, _FIRST))
        if coarse is None:
            return None
        guess = coarse
    return _finely(lambda scale: height(scale, _SECOND, memory.gains), *guess, accuracy)


def _near(
    memory: _Memory,
    event: Event,
    target: float,
    *,
    delta: float,
    accuracy: float,
    reported: Callable[[float], float],
) -> float | None:
    """Search a noise factor at which the accountant itself reports at most the target, or return None."""
    kind, noise = shape(event)
    place, slope = _guessed(memory, event, target, delta, accuracy) or _NOWHERE
    below = 0.5 * accuracy * -slope
    last = None
    for _ in range(_ANSWERS):
        scale = math.exp(place)
        if not SMALLEST <= scale <= LARGEST:
            return None
        scale = rounded_up(scale, accuracy)
        value = reported(scale)
        if not math.isfinite(value) or value <= 0.0:
            return None
        now = math.log(value / target)
        if -2.0 * below <= now and value <= target:
            end = _End(place + math.log(noise), math.log(value), slope)
            memory.ends.setdefault((kind, delta), []).append(end)
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


def _coarsely(height: Callable[[float], float]) -> tuple[float, float] | None:
    """Estimate the same on the coarsest lattice, where each answer is quick; None where it gives none."""
    place, slope = _NOWHERE
    last = None
    for _ in range(_GUESSES):
        now = height(math.exp(place))
        if now == -math.inf:  # far too much noise: there is no line to follow yet
            place -= math.log(2.0)
            continue
        if last is not None and abs(place - last[0]) > _APART:
            slope = (now - last[1]) / (place - last[0])
        if math.isnan(now) or not _STEEPEST < slope < _FLATTEST:
            return None
        if abs(now) < _NEAR and last is not None:
            return place - now / slope, slope
        # Two places tell the slope, also where the first is right.
        away = -now / slope
        last = place, now
        place += _bounded(away) if abs(away) > _APART else 3.0 * _APART
    return None


def _finely(
    height: Callable[[float], float], place: float, slope: float, accuracy: float
) -> tuple[float, float] | None:
    """Improve that estimate on a finer lattice, on which each answer takes longer."""
    last = None
    for _ in range(_FINER):
        now = height(math.exp(place))
        if not math.isfinite(now):
            return None
        if last is not None and abs(place - last[0]) > _APART:
            steeper = (now - last[1]) / (place - last[0])
            slope = steeper if _STEEPEST < steeper < _FLATTEST else slope
        last = place, now
        below = 0.5 * accuracy * -slope
        if abs(now + below) < 0.5 * below:
            break
        place += _bounded(-(now + below) / slope)
    return place, slope


def _as_gaussians(target: float, delta: float, shares: Sequence[float]) -> float:
    """Estimate the budget's ε over the arms' common ε, as if each arm were one Gaussian release."""

    @cache
    def precision(epsilon: float) -> float:
        release = calibrate(Gaussian(1.0), epsilon=epsilon, delta=delta)
        return release.scale**-2

    def total(inverse: float) -> float:
        return math.fsum(precision(target / inverse * share) for share in shares)

    most = math.sqrt(len(shares)) * max(shares)
    try:
        return solve_decreasing(
            total, precision(target), 1e-2, PrivTuneError, start=most, steep=0.6, enough=0.98
        )
    except PrivTuneError:  # no noise is so large, or so small
        return most


def _is_slow(part: Event) -> bool:
    return entry(part).own_lattice


def _nests(event: Event) -> bool:
    """Return whether a composition has selections beside other events, which takes long to account."""
    return any(_is_slow(part) and entry(part).choice(part) is None for part in flatten(event))


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


def _shares(count: int, weights: Sequence[float] | None) -> list[float]:
    """Return the proportions of the arms' targets, checked."""
    if not count:
        raise InvalidInputError("arms", (), "must hold at least one arm")
    if weights is not None and len(weights) != count:
        raise InvalidInputError("weights", tuple(weights), "must hold one number for each arm")
    return [check_number("weights", share, above=0.0) for share in weights or [1.0] * count]


def share_budget(
    arms: Sequence[Callable[[float], Event]],
    *,
    epsilon: float,
    delta: float,
    adjacency: Adjacency = Adjacency.ADD_REMOVE,
    weights: Sequence[float] | None = None,
    sketches: Sequence[Callable[[float], Event]] = (),
) -> SharedBudget:
    """Give every arm of a study its share of one budget, by the account of all arms together.

    Args:
        arms: Each maps its target ε (at the same delta) to an event that meets it.
        epsilon: The budget, above 0.
        delta: The budget's delta, in (0, 1).
        adjacency: The relation of neighbouring datasets.
        weights: Proportions of the arms' targets; equal by default.
        sketches: The same arms, each planned with about as much noise in less time: the search
            begins with them.

    Returns:
        The events for the largest common target whose composition stays within the budget.

    Raises:
        CalibrationError: No common target fits.

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
    shares = _shares(len(arms), weights)
    made: dict[float, tuple[Event, ...]] = {}

    def planned(inverse: float, by: Sequence[Callable[[float], Event]]) -> tuple[Event, ...]:
        common = target / inverse
        return tuple(arm(common * share) for arm, share in zip(by, shares, strict=True))

    def total(inverse: float) -> float:
        made[inverse] = planned(inverse, arms)
        return report(Composed(made[inverse]), level, adjacency=adjacency).epsilon

    def about(inverse: float) -> float:
        whole, gains = Composed(planned(inverse, sketches)), (_memory.get() or _Memory()).gains
        slow = adjacency is Adjacency.ADD_REMOVE and _nests(whole)
        found = quick_epsilon(whole, level, target, _SECOND, gains) if slow else None
        return report(whole, level, adjacency=adjacency).epsilon if found is None else found

    def impossible() -> PrivTuneError:
        return CalibrationError(
            f"no common target of {len(arms)} arms keeps their composition within "
            f"epsilon = {target:g} at delta = {level:g}."
        )

    search = partial(
        solve_decreasing, tolerance=1e-3, impossible=impossible, steep=1.0, enough=1.0 - 1e-3
    )
    with searches_learn():
        start = _as_gaussians(target, level, shares)
        if len(sketches) > 1:  # of which the accountant says a little less
            with suppress(CalibrationError):
                start = search(about, (1.0 + _LESS) * target, start=start)
        inverse = search(total, target, start=start)
    events = made[inverse]
    common = target / inverse
    return SharedBudget(
        events,
        tuple(common * share for share in shares),
        tuple(report(event, level, adjacency=adjacency) for event in events),
        report(Composed(events), level, adjacency=adjacency),
    )
