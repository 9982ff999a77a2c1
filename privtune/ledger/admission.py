"""Decides whether a budget admits what is asked, says what is spent, and what would still fit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import privtune.accounting as acc
from privtune.accounting.rdp import confirm_composition
from privtune.accounting.registry import training
from privtune.ledger import privacy_filter
from privtune.ledger.errors import BudgetClosedError, DeclarationClosedError
from privtune.ledger.history import BASIS_DECLARED, BASIS_FILTER, BASIS_GAUSSIAN, History, order_of
from privtune.ledger.values import Admission, Budget, BudgetExceededError
from privtune.ledger.weights import Weight, slack_of, weigh, weigh_as_gaussian

DRIFT = 0.01
"""By what share another version's account of an admission may lie above the one it rested on.

Bounds get tighter and, rarely, a little looser (a lattice chosen otherwise). An honest ledger is not
corrupted by that; what is printed is today's number.
"""

_LAST = 0.25
"""From which part of its capacity on the filter may go over to Gaussian charges, for good."""

_MIDDLE = 10  # of the halvings of its δ among which the filter looks for what one request may take


def admit(history: History, asked: Sequence[acc.Event]) -> tuple[str, list[Weight]]:
    """Return the basis on which a budget admits a request as a whole, and the weights; else refuse."""
    budget = history.terms()
    if history.closed:
        raise BudgetClosedError(f"budget {budget.name!r} was closed for good.")
    if history.frozen and budget.admission is Admission.DECLARED:
        raise DeclarationClosedError(
            f"budget {budget.name!r} has started: what was not declared before cannot be added; "
            "a budget with adaptive admission admits later studies."
        )
    found = admission_of(history, asked)
    if found is None:
        spent = odometer(history).epsilon
        raise BudgetExceededError(
            budget,
            requested=_composed(tuple(asked), budget).epsilon,
            spent=spent,
            remaining=max(0.0, budget.epsilon - spent),
            used=filter_state(history).share,
        )
    # A second opinion on everything charged: autodp's composition must be ours.
    charged = Counter(history.block.values()) + history.later + Counter(asked)
    confirm_composition(frozenset(charged.items()), budget.adjacency)
    return found


def fits(history: History, asked: Sequence[acc.Event]) -> bool:
    """Return whether the budget holds more events, by the rule that is now in force."""
    return admission_of(history, asked) is not None


def admission_of(history: History, asked: Sequence[acc.Event]) -> tuple[str, list[Weight]] | None:
    """Return the basis on which a budget holds more events and what they weigh; None if on none."""
    budget = history.terms()
    # Before the first start all is fixed before the first release: any bound says what it costs.
    if not history.frozen:
        together = (*history.block.values(), *asked)
        return (BASIS_DECLARED, []) if _holds(together, budget) else None
    room, room_delta = filter_room(history)
    part, weights = math.inf, []
    if room >= 0 and not history.late:
        weights = weights_of(history, asked)
        divergence, delta = _parts(weights, room, room_delta)
        part = max(divergence, delta)
        total = filter_state(history).capacity or 0.0
        # By divergences as long as that leaves a quarter; from there on the smaller part decides.
        if part <= 1.0 and float(room) * (1.0 - divergence) >= _LAST * total:
            return BASIS_FILTER, weights
    if room >= 0 and not history.open:
        gaussian, as_gaussian = _as_gaussian(history, asked, room, room_delta)
        if gaussian <= 1.0 and gaussian < part:
            return BASIS_GAUSSIAN, as_gaussian
    return (BASIS_FILTER, weights) if part <= 1.0 else None


def _holds(events: tuple[acc.Event, ...], budget: Budget) -> bool:
    """Whether a budget holds events that were all fixed before the first release."""
    # Most of a large block is admitted while there is room: then sums of curves say so at once.
    kinds = Counter(events).items()
    block = _one(acc.Repeated(count, event) if count > 1 else event for event, count in kinds)
    quick = acc.epsilon(block, budget.delta, adjacency=budget.adjacency, method="rdp").epsilon
    return quick <= budget.epsilon or _composed(events, budget).epsilon <= budget.epsilon


def _as_gaussian(
    history: History, asked: Sequence[acc.Event], room: Fraction, room_delta: Fraction
) -> tuple[float, list[Weight]]:
    """Return the part of the filter's room that events take as Gaussian charges, and their weights."""
    budget = history.terms()
    order, best = order_of(budget), (math.inf, list[Weight]())
    before = Fraction(privacy_filter.gaussian_divergence(order, float(history.variance)))
    left = Fraction(privacy_filter.gaussian_room(order, float(room + before))) - history.variance
    share, halving = privacy_filter.APPROXIMATE_SHARE * budget.delta, _MIDDLE
    for _ in range(4):
        slack = share * 2.0**-halving
        weights = [weigh_as_gaussian(event, budget.adjacency, slack) for event in asked]
        variance, delta = _parts(weights, left, room_delta)
        if max(variance, delta) < best[0]:
            best = max(variance, delta), weights
        if not delta:
            break
        if math.inf in (variance, delta):
            step = -(halving // 2) if variance == math.inf else halving
        else:  # about as large a part of δ as of the variance, and not above it
            step = math.ceil(math.log2(delta / variance))
        if not step or not 1 <= halving + step <= 2 * _MIDDLE:
            break
        halving += step
    # What decides is the theorem's own condition; parts only compare.
    total = history.variance + sum(weight.exact()[0] for weight in best[1])
    if Fraction(privacy_filter.gaussian_divergence(order, float(total))) > room + before:
        return math.inf, []
    return best


def _parts(weights: Sequence[Weight], room: Fraction, room_delta: Fraction) -> tuple[float, float]:
    """Return the parts of the filter's room, and of its δ, that weights take; infinite if they do not fit."""
    if not all(math.isfinite(weight.divergence) for weight in weights):
        return math.inf, math.inf
    exact = [weight.exact() for weight in weights]

    def part(asked: Fraction, left: Fraction) -> float:
        if asked > left:
            return math.inf
        return float(asked / left) if left else 0.0

    return (
        part(sum((w for w, _ in exact), Fraction(0)), room),
        part(sum((d for _, d in exact), Fraction(0)), room_delta),
    )


@dataclass(frozen=True)
class FilterState:
    """A budget's privacy filter, as it stands.

    Attributes:
        in_force: Whether something has started, so that every further charge must pass it.
        order: Its Rényi order.
        capacity: The divergence that it may admit on top of the declared block; None for nothing.
        used: The divergence that it has admitted, d_α of the variance of Gaussian charges included;
            infinite after a recorded release without one.
        delta_capacity, delta_used: The δ that it may admit, and has admitted, for approximate DP.
        variance: The variance of what it has admitted as Gaussian charges.

    Example:
        >>> state = FilterState(True, 8.0, capacity=2.0, used=0.5, delta_capacity=1e-6, delta_used=0.0)
        >>> state.share, state.to_dict()["used"]
        (0.25, 0.5)
    """

    in_force: bool
    order: float
    capacity: float | None
    used: float
    delta_capacity: float
    delta_used: float
    variance: float = 0.0

    @property
    def share(self) -> float | None:
        """The part of the room that is used; None while the filter is not in force."""
        if not self.in_force:
            return None
        return 1.0 if not self.capacity else min(1.0, self.used / self.capacity)

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        used = self.used if math.isfinite(self.used) else "inf"
        there = {**asdict(self), "used": used}
        if not self.variance:
            del there["variance"]
        return there


def weights_of(history: History, asked: Sequence[acc.Event]) -> list[Weight]:
    """Return each event's Rényi divergence at the filter's order, and the δ with which it may fail."""
    budget = history.terms()
    slack = slack_of(budget.delta)
    return [weigh(event, order_of(budget), budget.adjacency, slack) for event in asked]


def filter_state(history: History) -> FilterState:
    """Return the filter as it stands."""
    budget = history.terms()
    order = order_of(budget)
    total = -math.inf
    if history.frozen:
        total = _room(tuple(history.block.values()), budget, order)
    return FilterState(
        in_force=history.frozen,
        order=order,
        capacity=total if math.isfinite(total) else None,
        used=math.inf if history.unbounded else float(_used(history)),
        delta_capacity=privacy_filter.APPROXIMATE_SHARE * budget.delta,
        delta_used=float(history.used_delta),
        variance=float(history.variance),
    )


def filter_room(history: History) -> tuple[Fraction, Fraction]:
    """Return what the filter has left: Rényi divergence at its order, and δ. Below 0: nothing."""
    state = filter_state(history)
    if history.unbounded or state.capacity is None:
        return Fraction(-1), Fraction(-1)
    return (
        Fraction(state.capacity) - _used(history),
        Fraction(state.delta_capacity) - history.used_delta,
    )


def _used(history: History) -> Fraction:
    if not history.variance:
        return history.used
    order = order_of(history.terms())
    return history.used + Fraction(
        privacy_filter.gaussian_divergence(order, float(history.variance))
    )


def filter_excess(history: History) -> float:
    """Return by what share of its capacity the filter is overdrawn; 0 while it is not."""
    room, room_delta = filter_room(history)
    if room >= 0 and room_delta >= 0:
        return 0.0
    total = filter_state(history).capacity
    return math.inf if room_delta < 0 or not total else float(-room) / total


def odometer(history: History, *, allowed: float = 0.0) -> acc.Guarantee:
    """Return ε of everything charged, valid whenever it is read: by whoever stops on what was released."""
    # Who reads at any time, and stops by what was released, learns at most this: the odometer's theorem.
    budget = history.terms()
    block = tuple(history.block.values())
    adaptive = history.frozen and budget.admission is Admission.ADAPTIVE
    grows = adaptive and filter_state(history).capacity is not None
    if not history.later and not grows:
        return _composed(block, budget)
    bounds = {"odometer": _reading(history, budget, block, allowed)}
    # A filter of a capacity larger by x keeps ε + x: its theorem knows their difference alone.
    excess = filter_excess(history) + max(history.drift.values(), default=0.0)
    if grows and (excess == 0.0 or (excess <= 2.0 * DRIFT and not history.recorded)):
        left = 0.0 if history.late else max(float(filter_room(history)[0]), 0.0)
        bounds["filter"] = budget.epsilon * (1.0 + excess) - left
    method = min(bounds, key=lambda name: bounds[name])
    # Where nothing could be added, the block was read at the whole δ.
    whole = 1.0 if grows else 1.0 + privacy_filter.APPROXIMATE_SHARE + privacy_filter.ODOMETER_SHARE
    return acc.Guarantee(bounds[method], whole * budget.delta, method, budget.adjacency, bounds)


def _reading(
    history: History, budget: Budget, block: tuple[acc.Event, ...], allowed: float
) -> float:
    slack, orders = slack_of(budget.delta), {order_of(budget)}
    orders |= {order for order, _ in privacy_filter.lines(budget.epsilon, budget.delta)}

    def failing(events: Counter[acc.Event]) -> float:
        """Bound the probability that any of these events fails, at whichever order it is weighed."""
        return math.fsum(
            count * max(weigh(event, at, budget.adjacency, slack).delta for at in orders)
            for event, count in list(events.items())
        )

    late = failing(history.late)
    # What is not quite Gaussian is no failure: the filter's δ pays for it, a line's for failures.
    beside = failing(history.later) - late + (float(history.used_delta) if history.late else 0.0)
    if (
        beside * (1 + 1e-9) > privacy_filter.APPROXIMATE_SHARE * budget.delta
        or late * (1 + 1e-9) > privacy_filter.FAILING_SHARE * budget.delta
    ):
        return math.inf

    def spent(order: float) -> float:
        total = math.fsum(
            count * weigh(event, order, budget.adjacency, slack).divergence
            for event, count in list(history.later.items())
        )
        return total * (1 + 1e-9) / (1.0 + allowed)

    profile = _profile(block, budget)
    read = privacy_filter.odometer_epsilon(
        profile, spent, epsilon=budget.epsilon, delta=budget.delta
    )
    if history.later:
        return read
    return min(
        read,
        block_epsilon(block, privacy_filter.BLOCK_SHARE * budget.delta, budget.adjacency).epsilon,
    )


def _composed(events: tuple[acc.Event, ...], budget: Budget) -> acc.Guarantee:
    return block_epsilon(events, budget.delta, budget.adjacency)


@lru_cache(maxsize=512)
def block_epsilon(
    events: tuple[acc.Event, ...], at: float, adjacency: acc.Adjacency
) -> acc.Guarantee:
    """Return the best bound for events that were all fixed before the first release."""
    if not events:
        return acc.Guarantee(0.0, at, "nothing", adjacency, {"nothing": 0.0})
    return acc.epsilon(_one(events), at, adjacency=adjacency)


def _room(block: tuple[acc.Event, ...], budget: Budget, order: float) -> float:
    """Return the capacity of the filter beside a block, −∞ where it has none."""
    share = privacy_filter.FILTER_SHARE * budget.delta
    # Most blocks use their budget up, and a fifth of the nodes shows that, with room for rounding.
    below = _profile(block, budget, privacy_filter.below_tabulated)
    if privacy_filter.total_delta(below, order, 0.0, budget.epsilon) > 1.001 * share:
        return -math.inf
    return _capacity(_profile(block, budget), order, budget.epsilon, share)


@lru_cache(maxsize=64)
def _profile(
    events: tuple[acc.Event, ...],
    budget: Budget,
    table: Callable[..., privacy_filter.Profile] = privacy_filter.tabulate,
) -> privacy_filter.Profile:
    if not events:
        return privacy_filter.empty_profile
    event = _one(events)
    # Beyond e^700 there are no numbers; a profile is constant where its table ends, from above.
    highest, adjacency = min(2 * budget.epsilon + 4, 700.0), budget.adjacency
    return table(lambda at: acc.delta(event, at, adjacency=adjacency).delta, highest)


_capacity = lru_cache(maxsize=256)(privacy_filter.capacity)


def _one(events: Iterable[acc.Event]) -> acc.Event:
    fixed = tuple(events)
    return fixed[0] if len(fixed) == 1 else acc.Composed(fixed)


_MEAN = 10
_LARGEST = 1e4
_DIGITS = 3


def suggestions(history: History, asked: Sequence[acc.Event]) -> tuple[str, ...]:
    """Return what would fit in place of a refused request, one phrase each."""
    found = training(asked[0]) if len(asked) == 1 else None
    if found is None:
        return (_together(history, asked),)
    count, rate = found

    def plain(sigma: float) -> acc.Event:
        return acc.Repeated(count, acc.PoissonSampled(rate, acc.Gaussian(sigma)))

    alone = _smallest(lambda sigma: fits(history, [plain(sigma)]), 1.0)
    if alone is None:
        return ("no DP-SGD training of this length, at any noise",)
    phrases = [f"a DP-SGD training with q = {rate:g}, T = {count} from σ ≥ {alone:g}"]
    tuned = _smallest(
        lambda sigma: fits(history, [acc.PrivateSelection(plain(sigma), acc.Geometric(_MEAN))]),
        1.7 * alone,
    )
    if tuned is not None:
        phrases.append(f"a selection of mean {_MEAN} over it from σ ≥ {tuned:g}")
    return tuple(phrases)


def _together(history: History, asked: Sequence[acc.Event]) -> str:
    """Say in one phrase by how much all noise of a request has to grow to fit, and what that costs."""

    def louder(factor: float) -> tuple[acc.Event, ...]:
        return tuple(acc.scale_noise(event, factor) for event in asked)

    factor = _smallest(lambda by: fits(history, louder(by)), 1.0)
    if factor is None:
        return "nothing of this kind, at any noise"
    budget = history.terms()
    cost = block_epsilon(louder(factor), budget.delta, budget.adjacency).epsilon
    phrase = f"the same with all noise multiplied by {factor:g}"
    if not 0.0 < cost < math.inf:
        return phrase
    step = 10.0 ** (math.floor(math.log10(cost)) - 1)  # two digits, from below: what is lower fits
    return (
        f"{phrase}; in a study's spec, about epsilon: {round(math.floor(cost / step) * step, 12):g}"
    )


def _smallest(holds: Callable[[float], bool], start: float) -> float | None:
    """Return the smallest number found that holds, up to a percent, rounded up; None beyond 1e4."""
    high = start
    while not holds(high):
        high *= 2
        if high > _LARGEST:
            return None
    low = high / 2
    while low > 1e-2 and holds(low):
        low, high = low / 2, low
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        if holds(middle):
            high = middle
        else:
            low = middle
    step = 10.0 ** (math.floor(math.log10(high)) + 1 - _DIGITS)
    return round(math.ceil(high / step) * step, 12)
