"""Find the noise that meets a target ε, by the same function that reports ε.

The search ends on a point at which the accountant itself was asked, on the safe side. Before, quicker
functions that bound nothing say where to look (`Gains`, `sketch`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import NamedTuple

from privtune.accounting.accountant import Guarantee, quick_epsilon
from privtune.accounting.accountant import epsilon as report
from privtune.accounting.checks import check_delta, check_number
from privtune.accounting.events import Adjacency, Composed, Event, Gaussian, flatten
from privtune.accounting.pairs import Gains, shape
from privtune.accounting.registry import entry, scaled
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.numbers import ceil_digits

LARGEST = 1e6
SMALLEST = 1e-4
_ROUNDS = 60


def rounded_up(x: float, tolerance: float) -> float:
    """Round x up to a number of few digits, by less than a tenth of a relative tolerance."""
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
    """Return x of few digits, near the least at which a falling function meets a target.

    The function was evaluated at the x that is returned, and found above the target at an x within the
    tolerance.

    Args:
        function: Falls in x; each call takes long.
        target: The value that it may not exceed.
        tolerance: Relative accuracy of x.
        impossible: Makes the error to raise where no x up to 10^6 meets the target.
        start: The first x.
        steep: How much faster x changes than the function's value, in logarithms.
        enough: A share of the target: any value between it and the target ends the search.
    """
    search = _SecantSearch(
        function,
        target,
        tolerance,
        impossible,
        steep,
        enough,
    )
    high = search.evaluate(rounded_up(start, tolerance))
    if search.is_met_by(high):
        return high.x
    bracket = search.bracket(high)
    if bracket.low is None:
        return bracket.high.x
    return search.narrow(bracket.low, bracket.high)


class _Point(NamedTuple):
    """A value x and the searched function's value there."""

    x: float
    value: float


class _Bracket(NamedTuple):
    """Two points around the root: `low`, below it or None, and `high`, at or above it."""

    low: _Point | None
    high: _Point


@dataclass
class _SecantSearch:
    """A search for the root of a falling function by secants of the logarithms.

    Attributes:
        passed: Points of the search outward, on the side that it leaves.
    """

    function: Callable[[float], float]
    target: float
    tolerance: float
    impossible: Callable[[], PrivTuneError]
    steep: float
    enough: float
    passed: list[_Point] = field(default_factory=list)

    @property
    def _aim(self) -> float:
        """The function value that the search aims at: the middle of the values that count as met."""
        return 0.5 * (1.0 + self.enough) * self.target

    def evaluate(self, x: float) -> _Point:
        """Return the point (x, function value) at x."""
        return _Point(x, self.function(x))

    def is_met_by(self, point: _Point) -> bool:
        """Return whether a point's value is between `enough` times the target and the target."""
        return self.enough * self.target <= point.value <= self.target

    def bracket(self, first: _Point) -> _Bracket:
        """Return a bracket of the root, searched outward from a first point."""
        if first.value > self.target:
            return self._bracket_upwards(first)
        return self._bracket_downwards(first)

    def _bracket_upwards(self, high: _Point) -> _Bracket:
        """Return a bracket found by raising x until the function's value meets the target."""
        low = high
        while high.value > self.target:
            if high.x >= LARGEST:
                raise self.impossible()
            low = high
            x = min(high.x * self._outward(high), LARGEST)
            high = self.evaluate(rounded_up(x, self.tolerance))
        return _Bracket(low, high)

    def _bracket_downwards(self, low: _Point) -> _Bracket:
        """Return a bracket found by lowering x until the target is exceeded or nearly met."""
        high = low
        while low.value <= self.target:
            high = low
            if self.enough < 1.0 and self.enough * self.target <= high.value:
                return _Bracket(None, high)
            x = rounded_up(low.x / self._outward(low), self.tolerance)
            if x < SMALLEST:
                return _Bracket(None, high)
            low = self.evaluate(x)
        return _Bracket(low, high)

    def _outward(self, point: _Point) -> float:
        """Return the factor, 16 at most, by which the search moves x; it grows with every failed step."""
        self.passed.append(point)
        value = point.value
        ratio = 4.0
        if 0.0 < value < math.inf:
            ratio = max(value / self._aim, self._aim / value)
        ratio = min(ratio, 1e6)
        if self.enough < 1.0 and len(self.passed) <= 3:
            # A band is met by a secant, where an edge is not.
            power = _slope(*self.passed[-2:], usual=self.steep)
            return _power(max(ratio**power, 1.0), 1.0)
        stride = 3.0 ** (len(self.passed) - 1)
        least = 1.0 + 2.0 * self.tolerance
        return _power(max(ratio**self.steep, least), stride)

    def narrow(self, low: _Point, high: _Point) -> float:
        """Return an x above the root: within the tolerance of it, or with a function value close enough."""
        widths = [math.inf, math.inf]
        for _ in range(_ROUNDS):
            width = math.log(high.x / low.x)
            is_enough = self.enough < 1.0 and self.enough * self.target <= high.value
            if width <= self.tolerance or is_enough:
                break
            root = self._root(low, high, width, widths[-2])
            widths.append(width)
            x = low.x * math.exp(root)
            middle = self.evaluate(rounded_up(x, self.tolerance))
            if middle.value > self.target:
                low = middle
            else:
                high = middle
        return high.x

    def _root(
        self,
        low: _Point,
        high: _Point,
        width: float,
        last_width: float,
    ) -> float:
        """Return the distance of the next point from `low`, in log x.

        Args:
            low: Below the root: its value exceeds the target.
            high: Above the root.
            width: Between them, in log x.
            last_width: The same two steps before.
        """
        above = low.value / self._aim
        below = high.value / self._aim
        # A secant that did not halve the interval in two steps is no guide.
        is_line = math.isfinite(above) and below > 0.0 and width < 0.5 * last_width
        if not is_line:
            return 0.5 * width
        root = width * math.log(above) / math.log(above / below)
        if self.enough < 1.0:
            return root
        # Near an end, so that the other side of the root is found within the tolerance.
        margin = 0.9 * self.tolerance
        if root > width - margin:
            return width - margin
        return max(root + 0.2 * self.tolerance, margin)


def _slope(*points: _Point, usual: float) -> float:
    """Return -Δ log x / Δ log f(x) between two points, or `usual` where that is implausible."""
    first = points[0]
    last = points[-1]
    for point in (first, last):
        if not 0.0 < point.value < math.inf:
            return usual
    if first.value == last.value:
        return usual
    fall = math.log(first.value / last.value)
    slope = math.log(last.x / first.x) / fall
    return slope if 0.25 * usual < slope < 4.0 * usual else usual


def _power(base: float, stride: float) -> float:
    """Return ``base ** stride``, limited to 16, the largest factor by which a search moves."""
    if stride * math.log(base) > 3.0:
        return 16.0
    return min(float(base**stride), 16.0)


# Fineness of the lattices of a search.
_FIRST = 0.5
_SECOND = 2.0
_NEAR = 1e-2  # how close, in log ε, the first lattice must come
_GUESSES = 12  # on the first lattice
_FINER = 3  # guesses on the second
_ANSWERS = 8  # of the accountant, until one counts
# Where selections stand inside other events, ε jumps by some 0.1% as the noise moves the lattice. From this
# answer on, the nearest one that meets the target counts if its log ε is within `_JUMP` of it.
_JUMPY_ANSWERS = 3
_JUMP = 2e-3
_APART = 1e-2  # two places that tell a slope
_STEEPEST = -20.0
_FLATTEST = -0.05
_LESS = 4e-4
# Of the estimates of what several arms cost together: how near the target rough gains lead, from where better
# ones go on, and from where the accountant does.
_ROUGH_BAND = 5e-2
_FIRST_BAND = 1e-2
_CORRECTIONS = 3  # by better gains
_STRIDE = math.log(16.0)
_SMALL_FACTOR = 0.1  # in logarithms: of parts that meet a target each alone


class _Guess(NamedTuple):
    """The log of a noise factor from which a search goes on, and the slope of log ε there."""

    place: float
    slope: float


class _Answer(NamedTuple):
    """A noise factor, the log of the place it was rounded up from, and the accountant's ε there."""

    scale: float
    place: float
    epsilon: float


_NOWHERE = _Guess(0.0, -1.2)  # the factor 1, and how ε usually falls


class CalibrationError(PrivTuneError):
    """The error that no noise meets the target, with the reason in its message."""


@dataclass(frozen=True)
class Calibration:
    """The event scaled so that its noise meets the target, with the factor and the guarantee.

    Args:
        event: The event, every noise multiplier multiplied by `scale`.
        scale: The factor.
        guarantee: What the accountant reports for the event; never above the target.

    Example:
        >>> from privtune.accounting import Gaussian
        >>> answer = calibrate(Gaussian(1.0), epsilon=1.0, delta=1e-5)
        >>> round(answer.scale, 2), answer.event.noise_multiplier == answer.scale
        (3.73, True)
    """

    event: Event
    scale: float
    guarantee: Guarantee


@dataclass(frozen=True)
class SharedBudget:
    """The events of arms that share one budget, with each arm's target ε and the guarantees.

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
        tolerance: Relative accuracy of the factor. Where selections stand inside other events, ε jumps as
            the noise changes, and may stay 0.2% below the target.

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
        >>> answer = calibrate(training, epsilon=1.0, delta=1e-5)
        >>> round(answer.event.event.event.noise_multiplier, 2), 0.99 < answer.guarantee.epsilon <= 1.0
        (1.41, True)
    """
    target = check_number("epsilon", epsilon, above=0.0)
    level = check_delta(delta)
    accuracy = check_number("tolerance", tolerance, above=0.0, below=0.5)
    if scaled(event, 2.0) == event:
        raise InvalidInputError("event", event.type, "has no noise multiplier to scale")
    memory = _memory.get() or _SearchMemory()
    question = (event, target, level, adjacency, accuracy)
    if question in memory.answers:
        return memory.answers[question]

    def reported(scale: float) -> float:
        return report(scaled(event, scale), level, adjacency=adjacency).epsilon

    scale = _search_noise(
        memory,
        event,
        target,
        delta=level,
        accuracy=accuracy,
        reported=reported,
    )
    if scale is None:
        impossible = partial(_impossible_error, event, target, level)
        scale = solve_decreasing(reported, target, accuracy, impossible)
    calibrated = scaled(event, scale)
    guarantee = report(calibrated, level, adjacency=adjacency)
    answer = Calibration(calibrated, scale, guarantee)
    memory.answers[question] = answer
    return answer


def sketch(
    event: Event,
    *,
    epsilon: float,
    delta: float,
    adjacency: Adjacency = Adjacency.ADD_REMOVE,
    tolerance: float = 1e-4,
) -> float:
    """Estimate the factor that `calibrate` finds, for searches that end in a calibration.

    Args:
        event: The event.
        epsilon: Target, above 0.
        delta: Target, in (0, 1).
        adjacency: The relation of neighbouring datasets.
        tolerance: Relative accuracy of the factor.
    """
    # Where selections stand inside other events the accountant, which takes long, is not asked.
    if _has_nested_choices(event) and adjacency is Adjacency.ADD_REMOVE:
        memory = _memory.get() or _SearchMemory()
        guess = _guess_noise(
            memory,
            event,
            epsilon,
            delta,
            tolerance,
        )
        if guess is not None and SMALLEST <= math.exp(guess.place) <= LARGEST:
            memory.remember(event, delta, guess, math.log(epsilon))
            return rounded_up(math.exp(guess.place), tolerance)
    answer = calibrate(
        event,
        epsilon=epsilon,
        delta=delta,
        adjacency=adjacency,
        tolerance=tolerance,
    )
    return answer.scale


@dataclass(frozen=True)
class _End:
    """The end of a search for noise: log of the noise, log of ε, and the slope between the two.

    Attributes:
        noise: Logarithm of the event's noise.
        place: Logarithm of the factor by which it was scaled to this noise.
        value: Logarithm of its ε.
        slope: Of `value` in `noise`.
        excess: Log of the ratio of the accountant's ε to the lattice's, where both were asked; else 0.
    """

    noise: float
    place: float
    value: float
    slope: float
    excess: float = 0.0

    def place_for(self, target: float, noise: float) -> float:
        """Return the log of the factor for another target ε of a like event, extrapolated on a line.

        Args:
            target: The other ε.
            noise: The other event's noise, of which the factor is asked.
        """
        step = _limit_step((math.log(target) - self.value) / self.slope)
        shift = math.log(noise) - (self.noise - self.place)
        if abs(self.place) < _SMALL_FACTOR and abs(step - shift) < 0.5 * abs(step):
            return self.place  # its parts were moved to the other target before, one by one
        return self.place + step - shift


@dataclass(frozen=True)
class _SearchMemory:
    """The searches that one planning has made so far: their answers, and where they ended.

    Attributes:
        answers: Confirmed answers, by question.
        ends: Places where the next search begins, by the event's shape and δ.
        gains: What the rearrangement gained.
    """

    answers: dict[object, Calibration] = field(default_factory=dict)
    ends: dict[object, list[_End]] = field(default_factory=dict)
    gains: Gains = field(default_factory=Gains)

    def remember(
        self,
        event: Event,
        delta: float,
        guess: _Guess,
        log_epsilon: float,
        excess: float = 0.0,
    ) -> None:
        """Store where a search ended, for later searches of events of the same shape."""
        kind, noise = shape(event)
        end = _End(
            guess.place + math.log(noise),
            guess.place,
            log_epsilon,
            guess.slope,
            excess,
        )
        self.ends.setdefault((kind, delta), []).append(end)


_memory: ContextVar[_SearchMemory | None] = ContextVar("memory", default=None)


@contextmanager
def searches_learn() -> Iterator[None]:
    """Let every calibration in this block start from the ends of earlier, similar searches."""
    token = _memory.set(_memory.get() or _SearchMemory())
    try:
        yield
    finally:
        _memory.reset(token)


@contextmanager
def _searches_are_rough() -> Iterator[None]:
    """Let the searches of this block estimate by rough gains; where they end is learnt."""
    memory = _memory.get() or _SearchMemory()
    rough = replace(memory, gains=Gains(is_rough=True))
    token = _memory.set(rough)
    try:
        yield
    finally:
        _memory.reset(token)


@contextmanager
def searches_apart() -> Iterator[None]:
    """Keep the calibrations of a ``with`` block apart: they learn from each other alone, and teach no other.

    Else an answer that is cached once would change where the searches after it begin, and so the last
    digits of their noise, by whether it was computed or read.
    """
    token = _memory.set(_SearchMemory())
    try:
        yield
    finally:
        _memory.reset(token)


def _guess_noise(
    memory: _SearchMemory,
    event: Event,
    target: float,
    delta: float,
    accuracy: float,
) -> _Guess | None:
    """Estimate the noise factor that meets a target, by lattices alone; None if none answers.

    Args:
        memory: Earlier searches: the nearest end among events of the same shape is where this one begins.
        event: The event.
        target: ε.
        delta: δ.
        accuracy: Relative accuracy of the factor.
    """
    height = partial(_height, event, delta, target)
    excess = 0.0
    kind, noise = shape(event)
    ends = memory.ends.get((kind, delta))
    if ends:
        nearest = min(ends, key=lambda end: abs(end.value - math.log(target)))
        guess = _Guess(nearest.place_for(target, noise), nearest.slope)
        if not _has_slow_parts(event):
            return guess  # the accountant answers as fast as a lattice
        if memory.gains.is_rough:
            return guess  # better gains follow
        excess = nearest.excess
    else:
        coarse = _guess_coarsely(lambda scale: height(scale, fineness=_FIRST))
        if coarse is None:
            return None
        guess = coarse
    return _refine_guess(
        lambda scale: height(scale, fineness=_SECOND, gains=memory.gains) + excess,
        guess,
        accuracy,
    )


def _height(
    event: Event,
    delta: float,
    target: float,
    scale: float,
    *,
    fineness: float,
    gains: Gains | None = None,
) -> float:
    """Return log(ε / target) of an event of scaled noise on one lattice; NaN where that gives no ε."""
    value = quick_epsilon(
        scaled(event, scale),
        delta,
        target,
        fineness,
        gains,
    )
    if value is None or not math.isfinite(value):
        return math.nan
    if value <= 0.0:
        return -math.inf
    return math.log(value / target)


def _search_noise(
    memory: _SearchMemory,
    event: Event,
    target: float,
    *,
    delta: float,
    accuracy: float,
    reported: Callable[[float], float],
) -> float | None:
    """Return a noise factor at which the accountant reports at most the target, or None.

    Args:
        memory: Earlier searches; the end of this one is added.
        event: The event.
        target: ε.
        delta: δ.
        accuracy: Relative accuracy of the factor.
        reported: ε of the accountant at a factor.
    """
    guess = (
        _guess_noise(
            memory,
            event,
            target,
            delta,
            accuracy,
        )
        or _NOWHERE
    )
    place = guess.place
    slope = guess.slope
    below = 0.5 * accuracy * -slope
    jumps = _jumps(event)
    last: tuple[float, float] | None = None
    nearest: _Answer | None = None
    for number in range(1, _ANSWERS + 1):
        scale = math.exp(place)
        if not SMALLEST <= scale <= LARGEST:
            return None
        scale = rounded_up(scale, accuracy)
        value = reported(scale)
        if not math.isfinite(value) or value <= 0.0:
            return None
        height = math.log(value / target)
        if value <= target and (nearest is None or value > nearest.epsilon):
            nearest = _Answer(scale, place, value)
        allowed = 2.0 * below
        if jumps and number >= _JUMPY_ANSWERS:
            allowed = max(allowed, _JUMP)
        if nearest is not None and -allowed <= math.log(nearest.epsilon / target):
            excess = _excess(event, delta, target, nearest, memory.gains)
            guess = _Guess(nearest.place, slope)
            memory.remember(event, delta, guess, math.log(nearest.epsilon), excess)
            return nearest.scale
        slope = _secant(last, place, height, slope)
        if not _STEEPEST < slope < _FLATTEST:
            return None
        last = (place, height)
        # Aim half the accuracy below the target, in units of the factor.
        below = 0.5 * accuracy * -slope
        place += _limit_step(-(height + below) / slope)
    return None


def _excess(
    event: Event,
    delta: float,
    target: float,
    answer: _Answer,
    gains: Gains,
) -> float:
    """Return how far the accountant's log ε is above the second lattice's; 0 without slow parts."""
    if not _has_slow_parts(event):
        return 0.0
    by_lattice = _height(
        event,
        delta,
        target,
        answer.scale,
        fineness=_SECOND,
        gains=gains,
    )
    if not math.isfinite(by_lattice):
        return 0.0
    return math.log(answer.epsilon / target) - by_lattice


def _secant(
    last: tuple[float, float] | None,
    place: float,
    height: float,
    slope: float,
) -> float:
    """Return the slope between the last two points, or `slope` if they are too close."""
    if last is None or abs(place - last[0]) <= _APART:
        return slope
    return (height - last[1]) / (place - last[0])


def _guess_coarsely(height: Callable[[float], float]) -> _Guess | None:
    """Estimate the noise factor on a coarse, quick lattice; return None where that fails."""
    place, slope = _NOWHERE
    last: tuple[float, float] | None = None
    for _ in range(_GUESSES):
        here = height(math.exp(place))
        if here == -math.inf:  # far too much noise: there is no line to follow yet
            place -= math.log(2.0)
            continue
        slope = _secant(last, place, here, slope)
        if math.isnan(here) or not _STEEPEST < slope < _FLATTEST:
            return None
        away = -here / slope
        if abs(here) < _NEAR and last is not None:
            return _Guess(place - here / slope, slope)
        # Two places tell the slope, also where the first is right.
        last = (place, here)
        place += _limit_step(away) if abs(away) > _APART else 3.0 * _APART
    return None


def _refine_guess(
    height: Callable[[float], float],
    guess: _Guess,
    accuracy: float,
) -> _Guess | None:
    """Improve an estimate of the noise factor on a finer, slower lattice; None where that fails."""
    place = guess.place
    slope = guess.slope
    last: tuple[float, float] | None = None
    for _ in range(_FINER):
        here = height(math.exp(place))
        if not math.isfinite(here):
            return None
        steeper = _secant(last, place, here, slope)
        if _STEEPEST < steeper < _FLATTEST:
            slope = steeper
        last = (place, here)
        below = 0.5 * accuracy * -slope
        if abs(here + below) < 0.5 * below:
            break
        place += _limit_step(-(here + below) / slope)
    return _Guess(place, slope)


def _as_gaussians(
    target: float,
    delta: float,
    shares: Sequence[float],
) -> float:
    """Estimate the ratio of the budget's ε to the arms' common ε, as if arms were Gaussian.

    Args:
        target: The budget's ε.
        delta: Its δ.
        shares: Proportions of the arms' targets.
    """

    @cache
    def precision(epsilon: float) -> float:
        release = calibrate(Gaussian(1.0), epsilon=epsilon, delta=delta)
        return release.scale**-2

    def total(inverse: float) -> float:
        return math.fsum(precision(target / inverse * share) for share in shares)

    most = math.sqrt(len(shares)) * max(shares)
    try:
        return solve_decreasing(
            total,
            precision(target),
            1e-2,
            PrivTuneError,
            start=most,
            steep=0.6,
            enough=0.98,
        )
    except PrivTuneError:  # no noise is so large, or so small
        return most


def _is_slow(part: Event) -> bool:
    """Return whether the part needs a lattice of its own, so that its account takes long."""
    return entry(part).own_lattice


def _has_slow_parts(event: Event) -> bool:
    """Return whether a lattice answers much faster than the accountant does."""
    return any(map(_is_slow, flatten(event)))


def _has_nested_choices(event: Event) -> bool:
    """Return whether a slow part is no selection itself: it holds one, or has sides in parallel."""
    slow = filter(_is_slow, flatten(event))
    return any(entry(part).choice(part) is None for part in slow)


def _jumps(event: Event) -> bool:
    """Return whether a part holds selections inside other events, so that its ε jumps with the noise."""
    return any(_holds_choice(child) for part in flatten(event) for child in part.children())


def _holds_choice(event: Event) -> bool:
    """Return whether an event is a selection, or holds one."""
    return entry(event).choice(event) is not None or any(map(_holds_choice, event.children()))


def _limit_step(step: float) -> float:
    """Return a step in log noise, limited to log 16 in either direction."""
    return min(max(step, -_STRIDE), _STRIDE)


def _impossible_error(
    event: Event,
    target: float,
    delta: float,
) -> CalibrationError:
    """Return the error for an unreachable target, which names the ε that remains without the noise."""
    floor = report(scaled(event, LARGEST), delta).epsilon
    reason = "the parts without noise multipliers alone give"
    if not math.isfinite(floor):
        reason = "some part has no finite guarantee at this delta: epsilon is"
    return CalibrationError(
        f"epsilon = {target:g} at delta = {delta:g} cannot be reached by any noise: "
        f"{reason} {floor:.4g}."
    )


def _shares(count: int, weights: Sequence[float] | None) -> list[float]:
    """Return the checked weights of the arms, all 1 by default."""
    if not count:
        raise InvalidInputError("arms", (), "must hold at least one arm")
    if weights is not None and len(weights) != count:
        raise InvalidInputError("weights", tuple(weights), "must hold one number for each arm")
    shares = weights or [1.0] * count
    return [check_number("weights", share, above=0.0) for share in shares]


def _estimate_total(event: Event, delta: float, near: float) -> float | None:
    """Estimate the total ε of arms on a lattice, by what the searches so far learnt; None without one."""
    gains = (_memory.get() or _SearchMemory()).gains
    return quick_epsilon(
        event,
        delta,
        near,
        _SECOND,
        gains,
    )


def _start_by_estimates(
    estimated: Callable[[float], float],
    search: Callable[..., float],
    target: float,
    start: float,
    accuracy: float,
) -> float:
    """Return an x near where a slow falling function meets a target, by estimates of it.

    Rough gains lead near the place and tell the slope there; better ones are learnt at that place alone.

    Args:
        estimated: The function's estimate, by the gains of the context.
        search: The search for an x at which a function is little below the target.
        target: What the function is to meet.
        start: The first x.
        accuracy: By how much less than the target the function may be.
    """
    points: list[_Point] = []

    def remembered(x: float) -> float:
        points.append(_Point(x, estimated(x)))
        return points[-1].value

    with _searches_are_rough():
        search(remembered, target, start=start, enough=1.0 - _ROUGH_BAND)
    slope = _slope(points[0], points[-1], usual=1.0)
    aim = (1.0 - 0.5 * accuracy) * target
    place = points[-1].x
    for turn in range(1 + _CORRECTIONS):
        height = math.log(points[-1].value / aim)
        place = rounded_up(points[-1].x * math.exp(slope * height), accuracy)
        is_near = turn > 0 and abs(height) < _FIRST_BAND
        if is_near or not 0.0 < remembered(place) < math.inf:
            break
    return place


def share_budget(
    arms: Sequence[Callable[[float], Event]],
    *,
    epsilon: float,
    delta: float,
    adjacency: Adjacency = Adjacency.ADD_REMOVE,
    weights: Sequence[float] | None = None,
    sketches: Sequence[Callable[[float], Event]] = (),
) -> SharedBudget:
    """Split one budget among the arms of a study, by the account of all arms together.

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
        `total.epsilon` is at most `epsilon`, as the accountant reports it. It is within 0.1% of it where
        the arms come as near to their own targets. One arm that `calibrate` leaves 0.2% below its target is
        not planned again.

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
    plans: dict[float, tuple[Event, ...]] = {}

    def planned(inverse: float, by: Sequence[Callable[[float], Event]]) -> tuple[Event, ...]:
        common = target / inverse
        events = []
        for arm, share in zip(by, shares, strict=True):
            events.append(arm(common * share))
        return tuple(events)

    def reported(event: Event) -> Guarantee:
        return report(event, level, adjacency=adjacency)

    def total(inverse: float) -> float:
        plans[inverse] = planned(inverse, arms)
        return reported(Composed(plans[inverse])).epsilon

    def about(inverse: float) -> float:
        """Return the accountant's ε of all arms at estimated noise: planning them changes it by little."""
        return reported(Composed(planned(inverse, sketches))).epsilon

    def estimated(inverse: float) -> float:
        event = Composed(planned(inverse, sketches))
        estimate = _estimate_total(event, level, target)
        return reported(event).epsilon if estimate is None else estimate

    def impossible() -> PrivTuneError:
        return CalibrationError(
            f"no common target of {len(arms)} arms keeps their composition within "
            f"epsilon = {target:g} at delta = {level:g}."
        )

    accuracy = 1e-3
    search = partial(
        solve_decreasing,
        tolerance=accuracy,
        impossible=impossible,
        steep=1.0,
        # How near one arm comes to the budget is decided by its own search alone.
        enough=1.0 - (accuracy if len(arms) > 1 else _JUMP),
    )
    with searches_learn():
        start = _as_gaussians(target, level, shares)
        if len(sketches) > 1:
            with suppress(CalibrationError):
                with _searches_are_rough():
                    first = Composed(planned(rounded_up(start, accuracy), sketches))
                if adjacency is Adjacency.ADD_REMOVE and _has_nested_choices(first):
                    start = _start_by_estimates(
                        estimated,
                        search,
                        target,
                        start,
                        accuracy,
                    )
                else:  # of which the accountant says a little less
                    start = search(about, (1.0 + _LESS) * target, start=start)
        inverse = search(total, target, start=start)
    events = plans[inverse]
    common = target / inverse
    return SharedBudget(
        events=events,
        arm_epsilons=tuple(common * share for share in shares),
        guarantees=tuple(reported(event) for event in events),
        total=reported(Composed(events)),
    )
