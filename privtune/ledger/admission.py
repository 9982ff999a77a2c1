"""Decides whether a budget admits events, and computes the ε that its charges have spent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import privtune.accounting as acc
from privtune.accounting.rdp import confirm_composition
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
_ROUNDING = 1 + 1e-9  # sums of floats are above what they add by no more than this

Block = tuple[acc.Event, ...]
"""Events that are all fixed before the first release."""


def admit(history: History, events: Sequence[acc.Event]) -> tuple[str, list[Weight]]:
    """Return the rule by which a budget admits events, with their weights, or refuse the events.

    Args:
        history: What the budget's log says.
        events: What is to be charged, together.

    Returns:
        The basis, and the weight of each event in the filter; no weights before the first start.

    Raises:
        BudgetClosedError: The budget was closed.
        DeclarationClosedError: The budget is declared, and has started.
        BudgetExceededError: The events do not fit.
        PrivTuneError: autodp's composition of everything charged is not ours.
    """
    budget = history.terms()
    if history.closed:
        raise BudgetClosedError(
            f"budget {budget.name!r} was closed for good: it admits no charge any more."
        )
    if history.frozen and budget.admission is Admission.DECLARED:
        raise DeclarationClosedError(
            f"budget {budget.name!r} has started: what was not declared before cannot be added; "
            "a budget with adaptive admission admits later studies."
        )
    verdict = admission_of(history, events)
    if verdict is None:
        raise _excess_error(history, events)
    # A second opinion on everything charged: autodp's composition must be ours.
    declared = Counter(history.block.values())
    everything = declared + history.later + Counter(events)
    confirm_composition(frozenset(everything.items()), budget.adjacency)
    return verdict


def _excess_error(history: History, events: Sequence[acc.Event]) -> BudgetExceededError:
    """Return the error for events that exceed a budget, with the ε requested and the ε spent."""
    budget = history.terms()
    spent = odometer(history).epsilon
    requested = _compose(tuple(events), budget).epsilon
    return BudgetExceededError(
        budget,
        requested=requested,
        spent=spent,
        remaining=max(0.0, budget.epsilon - spent),
        used=filter_state(history).share,
    )


def fits(history: History, events: Sequence[acc.Event]) -> bool:
    """Return whether a budget holds more events, as :func:`admission_of` decides."""
    return admission_of(history, events) is not None


def admission_of(history: History, events: Sequence[acc.Event]) -> tuple[str, list[Weight]] | None:
    """Return the rule by which a budget would admit events, with their weights; None if it refuses them.

    Args:
        history: What the budget's log says.
        events: What would be charged, together.
    """
    budget = history.terms()
    # Before the first start all is fixed before the first release: any bound says what it costs.
    if not history.frozen:
        block = (*history.block.values(), *events)
        return (BASIS_DECLARED, []) if _holds(block, budget) else None
    room, room_delta = filter_room(history)
    if room < 0:
        return None
    part = math.inf
    weights: list[Weight] = []
    if not history.late:
        weights = weights_of(history, events)
        divergence_part, delta_part = _parts(weights, room, room_delta)
        part = max(divergence_part, delta_part)
        total = filter_state(history).capacity or 0.0
        room_after = float(room) * (1.0 - divergence_part)
        # By divergences as long as that leaves a quarter; from there on the smaller part decides.
        if part <= 1.0 and room_after >= _LAST * total:
            return BASIS_FILTER, weights
    # What the filter admitted by divergence must be over before the first Gaussian charge.
    if not history.open:
        gaussian_part, gaussian_weights = _as_gaussian(
            history,
            events,
            room,
            room_delta,
        )
        if gaussian_part <= 1.0 and gaussian_part < part:
            return BASIS_GAUSSIAN, gaussian_weights
    return (BASIS_FILTER, weights) if part <= 1.0 else None


def _holds(events: Block, budget: Budget) -> bool:
    """Return whether a budget holds events that were all fixed before the first release."""
    # Most of a large block is admitted while there is room: then sums of curves say so at once.
    if by_curves(events, budget) <= budget.epsilon:
        return True
    return _compose(events, budget).epsilon <= budget.epsilon


def by_curves(events: Sequence[acc.Event], budget: Budget, share: float = 1.0) -> float:
    """Return an upper bound on ε of events fixed beforehand, computed quickly by Rényi curves.

    Args:
        events: The events.
        budget: The terms whose δ and adjacency count.
        share: The part of δ at which ε is asked.
    """
    if not events:
        return 0.0
    parts: list[acc.Event] = []
    for event, count in Counter(events).items():
        part = acc.Repeated(count, event) if count > 1 else event
        parts.append(part)
    guarantee = acc.epsilon(
        _compose_events(parts),
        share * budget.delta,
        adjacency=budget.adjacency,
        method="rdp",
    )
    return guarantee.epsilon


def _as_gaussian(
    history: History,
    events: Sequence[acc.Event],
    room: Fraction,
    room_delta: Fraction,
) -> tuple[float, list[Weight]]:
    """Return what share of the filter events would use up as Gaussian charges, and their weights.

    With a larger d beside it an event has a smaller variance. The slack that is tried begins at a 1,024th
    of the filter's δ and moves at most four times, to where both take about the same part.

    Args:
        history: What the budget's log says.
        events: What would be charged, together.
        room: The Rényi divergence that the filter has left.
        room_delta: The δ that it has left.

    Returns:
        The larger of the parts of both; infinite where the events do not fit.
    """
    budget = history.terms()
    order = order_of(budget)
    spent = _gaussian_divergence(history.variance, budget)
    total_room = room + spent
    total_variance = privacy_filter.gaussian_room(order, float(total_room))
    variance_room = Fraction(total_variance) - history.variance
    share = privacy_filter.APPROXIMATE_SHARE * budget.delta
    best_part = math.inf
    best_weights: list[Weight] = []
    halving = _MIDDLE
    for _ in range(4):
        slack = share * 2.0**-halving
        weights = [weigh_as_gaussian(event, budget.adjacency, slack) for event in events]
        variance_part, delta_part = _parts(weights, variance_room, room_delta)
        part = max(variance_part, delta_part)
        if part < best_part:
            best_part = part
            best_weights = weights
        if not delta_part:
            break
        step = _step_of_halving(halving, variance_part, delta_part)
        halving += step
        is_in_reach = 1 <= halving <= 2 * _MIDDLE
        if not step or not is_in_reach:
            break
    # What decides is the theorem's own condition; parts only compare.
    variances, _ = _sum_weights(best_weights)
    divergence = _gaussian_divergence(history.variance + variances, budget)
    if divergence > total_room:
        return math.inf, []
    return best_part, best_weights


def _gaussian_divergence(variance: Fraction, budget: Budget) -> Fraction:
    """Return the Rényi divergence that Gaussian charges of a total variance use up in a budget's filter."""
    divergence = privacy_filter.gaussian_divergence(order_of(budget), float(variance))
    return Fraction(divergence)


def _step_of_halving(halving: int, variance_part: float, delta_part: float) -> int:
    """Return how often to halve the failure δ of Gaussian charges again; below 0, how often to double it."""
    if variance_part == math.inf:
        return -(halving // 2)
    if delta_part == math.inf:
        return halving
    # About as large a part of δ as of the variance, and not above it.
    ratio = delta_part / variance_part
    return math.ceil(math.log2(ratio))


def _parts(weights: Sequence[Weight], room: Fraction, room_delta: Fraction) -> tuple[float, float]:
    """Return what shares of the filter's capacity and of its δ weights use up, infinite above 1."""
    if not all(math.isfinite(weight.divergence) for weight in weights):
        return math.inf, math.inf
    divergence, delta = _sum_weights(weights)
    return _part(divergence, room), _part(delta, room_delta)


def _part(amount: Fraction, available: Fraction) -> float:
    """Return the fraction of an available amount that another amount takes, infinite above 1."""
    if amount > available:
        return math.inf
    return float(amount / available) if available else 0.0


def _sum_weights(weights: Sequence[Weight]) -> tuple[Fraction, Fraction]:
    """Return the exact sums of the divergences (or variances) and of the δ of weights."""
    total_divergence = Fraction(0)
    total_delta = Fraction(0)
    for weight in weights:
        divergence, delta = weight.exact()
        total_divergence += divergence
        total_delta += delta
    return total_divergence, total_delta


@dataclass(frozen=True)
class FilterState:
    """The state of a budget's privacy filter: whether it is in force, its capacity, and its use.

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
        """The fraction of the capacity that is used, at most 1; None while the filter is not in force."""
        if not self.in_force:
            return None
        if not self.capacity:
            return 1.0
        return min(1.0, self.used / self.capacity)

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON-ready data."""
        document = asdict(self)
        if not math.isfinite(self.used):
            document["used"] = "inf"
        # Only a filter that went over has Gaussian charges: others say nothing of them.
        if not self.variance:
            del document["variance"]
        return document


def weights_of(history: History, events: Sequence[acc.Event]) -> list[Weight]:
    """Return each event's Rényi divergence at the filter's order, and the δ with which it may fail."""
    budget = history.terms()
    order = order_of(budget)
    slack = slack_of(budget.delta)
    return [weigh(event, order, budget.adjacency, slack) for event in events]


def filter_state(history: History) -> FilterState:
    """Return the state of a budget's privacy filter, computed from its history."""
    budget = history.terms()
    order = order_of(budget)
    total = -math.inf
    if history.frozen:
        block = tuple(history.block.values())
        total = _room(block, budget, order)
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
    """Return the Rényi divergence and the δ that the filter has left, below 0 where nothing is left."""
    state = filter_state(history)
    if history.unbounded or state.capacity is None:
        return Fraction(-1), Fraction(-1)
    room = Fraction(state.capacity) - _used(history)
    room_delta = Fraction(state.delta_capacity) - history.used_delta
    return room, room_delta


def _used(history: History) -> Fraction:
    """Return the Rényi divergence that a filter has admitted, that of Gaussian charges included."""
    if not history.variance:
        return history.used
    return history.used + _gaussian_divergence(history.variance, history.terms())


def filter_excess(history: History) -> float:
    """Return how far the filter is overdrawn, as a fraction of its capacity; 0 while it is not."""
    room, room_delta = filter_room(history)
    if room >= 0 and room_delta >= 0:
        return 0.0
    total = filter_state(history).capacity
    if room_delta < 0 or not total:
        return math.inf
    return float(-room) / total


def odometer(history: History, *, allowed: float = 0.0) -> acc.Guarantee:
    """Return the ε of all charges together, valid even if charging stops depending on what was released.

    Args:
        history: What the budget's log says.
        allowed: By what share today's divergences of later charges may lie above those of the version that
            made a certificate, as long as the certificate is held against them.

    Returns:
        The smallest of the readings that the odometer's theorem allows, and all of them.
    """
    budget = history.terms()
    block = tuple(history.block.values())
    grows = _may_grow(history)
    if not history.later and not grows:
        return _compose(block, budget)
    bounds = {"odometer": _reading(history, budget, block, allowed)}
    # A filter of a capacity larger by x keeps ε + x: its theorem knows their difference alone.
    excess = filter_excess(history) + max(history.drift.values(), default=0.0)
    is_drift = excess <= 2.0 * DRIFT and not history.recorded
    if grows and (excess == 0.0 or is_drift):
        room, _ = filter_room(history)
        unused = 0.0 if history.late else max(float(room), 0.0)
        bounds["filter"] = budget.epsilon * (1.0 + excess) - unused
    method = min(bounds, key=lambda name: bounds[name])
    parts = 1.0
    if not grows:  # then the block was read at the whole δ
        parts = 1.0 + privacy_filter.APPROXIMATE_SHARE + privacy_filter.ODOMETER_SHARE
    return acc.Guarantee(
        epsilon=bounds[method],
        delta=parts * budget.delta,
        method=method,
        adjacency=budget.adjacency,
        bounds=bounds,
    )


def _may_grow(history: History) -> bool:
    """Return whether a budget has started and its filter may still admit charges."""
    is_adaptive = history.terms().admission is Admission.ADAPTIVE
    if not history.frozen or not is_adaptive:
        return False
    return filter_state(history).capacity is not None


_EXACT = 10
"""Of how many different events at most the parts of a declared block are composed exactly."""


def odometer_by_charge(history: History) -> dict[int, float]:
    """Return, for each charge by number, ε of all charges up to and including it.

    The parts of a large declared block are bounded by Rényi curves, which are quick. The last number is the
    odometer's, and what more charges cost bounds what fewer cost.

    **Guarantee**: each number is an upper bound at the odometer's δ.
    """
    budget = history.terms()
    numbers = sorted(history.charges)
    share = privacy_filter.BLOCK_SHARE if _may_grow(history) else 1.0
    different_events = set(history.block.values())
    is_exact = len(different_events) <= _EXACT
    last_declared = max(history.block, default=0)

    def block_cost(last: int) -> float:
        """Return ε of the declared charges up to and including the number ``last``."""
        events = []
        for number, event in history.block.items():
            if number <= last:
                events.append(event)
        if not is_exact:
            return by_curves(events, budget, share)
        delta = share * budget.delta
        return block_epsilon(tuple(events), delta, budget.adjacency).epsilon

    costs: dict[int, float] = {}
    for count, number in enumerate(numbers, 1):
        if count == len(numbers):
            costs[number] = odometer(history).epsilon
        elif number < last_declared:
            costs[number] = block_cost(number)
        else:
            part = history.only(numbers[:count])
            costs[number] = odometer(part).epsilon
    lowest = math.inf
    for number in reversed(numbers):
        lowest = min(lowest, costs[number])
        costs[number] = lowest
    return costs


def _reading(history: History, budget: Budget, block: Block, allowed: float) -> float:
    """Return the odometer's reading, an ε, or infinity if failures exceed their part of δ."""
    lines = privacy_filter.lines(budget.epsilon, budget.delta)
    orders = {order for order, _ in lines}
    orders.add(order_of(budget))
    gaussian_failures = _sum_failures(history.late, orders, budget)
    # What is not quite Gaussian is no failure: the filter's δ pays for it, a line's for failures.
    used_delta = float(history.used_delta) if history.late else 0.0
    all_failures = _sum_failures(history.later, orders, budget)
    other_failures = all_failures - gaussian_failures + used_delta
    other_room = privacy_filter.APPROXIMATE_SHARE * budget.delta
    gaussian_room = privacy_filter.FAILING_SHARE * budget.delta
    if other_failures * _ROUNDING > other_room:
        return math.inf
    if gaussian_failures * _ROUNDING > gaussian_room:
        return math.inf

    def spent(order: float) -> float:
        total = _sum_divergences(history.later, order, budget)
        return total * _ROUNDING / (1.0 + allowed)

    by_lines = privacy_filter.odometer_epsilon(
        _profile(block, budget),
        spent,
        epsilon=budget.epsilon,
        delta=budget.delta,
    )
    if history.later:
        return by_lines
    block_delta = privacy_filter.BLOCK_SHARE * budget.delta
    by_block = block_epsilon(block, block_delta, budget.adjacency).epsilon
    return min(by_lines, by_block)


def _sum_failures(events: Counter[acc.Event], orders: Collection[float], budget: Budget) -> float:
    """Return a bound on the probability that any of some events fails, at whichever order."""
    slack = slack_of(budget.delta)
    bounds = []
    for event, count in list(events.items()):
        weights = [weigh(event, order, budget.adjacency, slack) for order in orders]
        largest = max(weight.delta for weight in weights)
        bounds.append(count * largest)
    return math.fsum(bounds)


def _sum_divergences(events: Counter[acc.Event], order: float, budget: Budget) -> float:
    """Return the sum of the Rényi divergences of events at an order, with repetitions."""
    slack = slack_of(budget.delta)
    divergences = []
    for event, count in list(events.items()):
        weight = weigh(event, order, budget.adjacency, slack)
        divergences.append(count * weight.divergence)
    return math.fsum(divergences)


def _compose(events: Block, budget: Budget) -> acc.Guarantee:
    """Return the best bound on ε of events fixed beforehand, at a budget's whole δ."""
    return block_epsilon(events, budget.delta, budget.adjacency)


@lru_cache(maxsize=512)
def block_epsilon(events: Block, delta: float, adjacency: acc.Adjacency) -> acc.Guarantee:
    """Return the best bound on ε, at a δ, of events that were all fixed before the first release."""
    if not events:
        return acc.Guarantee(0.0, delta, "nothing", adjacency, {"nothing": 0.0})
    return acc.epsilon(_compose_events(events), delta, adjacency=adjacency)


def _room(block: Block, budget: Budget, order: float) -> float:
    """Return the Rényi divergence that a filter may admit on top of declared charges, −∞ if none."""
    share = privacy_filter.FILTER_SHARE * budget.delta
    if _is_full(block, budget, order, share):
        return -math.inf
    profile = _profile(block, budget)
    return _capacity(profile, order, budget.epsilon, share)


@lru_cache(maxsize=64)
def _is_full(block: Block, budget: Budget, order: float, share: float) -> bool:
    """Return whether few nodes show that declared charges leave a filter no room; what they leave open is no.

    Most blocks use their budget up.
    """
    if not block:
        return False
    floors = privacy_filter.floors(
        _delta_of(block, budget),
        _highest(budget),
        order,
        budget.epsilon,
    )
    # A thousandth is for what rounding makes rise in a table that falls.
    return any(floor > 1.001 * share for floor in floors)


@lru_cache(maxsize=64)
def _profile(events: Block, budget: Budget) -> privacy_filter.Profile:
    """Return the privacy profile of declared charges, tabulated to beyond twice the budget's ε."""
    if not events:
        return privacy_filter.empty_profile
    return privacy_filter.tabulate(_delta_of(events, budget), _highest(budget))


def _highest(budget: Budget) -> float:
    """Return the largest ε to which a profile is tabulated: from there on it is constant, from above."""
    # Beyond e^700 there are no numbers.
    return min(2 * budget.epsilon + 4, 700.0)


def _delta_of(events: Block, budget: Budget) -> Callable[[float], float]:
    """Return a function of ε that bounds δ of events that were all fixed before the first release."""
    block = _compose_events(events)

    def delta_at(epsilon: float) -> float:
        return acc.delta(block, epsilon, adjacency=budget.adjacency).delta

    return delta_at


_capacity = lru_cache(maxsize=256)(privacy_filter.capacity)


def _compose_events(events: Iterable[acc.Event]) -> acc.Event:
    """Return the composition of events as one event."""
    parts = tuple(events)
    return parts[0] if len(parts) == 1 else acc.Composed(parts)
