"""Searches for what a budget still holds, for refusals and for planning."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import privtune.accounting as acc
from privtune.accounting.registry import training
from privtune.ledger.admission import block_epsilon, by_curves, fits, odometer
from privtune.ledger.history import History
from privtune.ledger.values import Admission, Budget, ChargeState

_LAW = acc.Geometric(10, minimum=2)
"""The number of runs of a selection that is told nothing else."""

_TRAINING, _SELECTION, _NUMBER = "a training", "a selection", "a noisy number"
_RUNS = "of 10 such trainings on average, 2 at least"
_NOISE = "or table, with Gaussian noise"

_USUAL = (1000, 0.01)  # steps and sampling rate of a training, where none was charged
_LARGEST = 1e4
_DIGITS = 3
_STEP = 1.03  # between the noises of which the smallest that fits is looked for, for an overview
_LOUDER = (1.05, 1.15, 1.3, 1.6, 2.2, 3.0)
"""How much more noise than one training a selection is tried with: an account of one takes seconds."""

_FEW = 10  # different declared events with which one more is composed exactly, for an overview

MORE = "more fits than is left, since charges together cost less than their sum"
LESS = (
    "less fits than is left, since the privacy filter asks more of what comes after the first start"
)


@dataclass(frozen=True)
class NextArm:
    """A kind of arm that may be charged next, with the largest ε that one such arm may cost.

    Attributes:
        kind: What it is, in a few words.
        shape: Its length and sampling, or its number of runs, in words.
        epsilon: The largest ε found, alone and at the budget's δ, with which the budget holds one such
            arm; two digits, rounded down. 0 where it holds none.
    """

    kind: str
    shape: str
    epsilon: float

    def to_dict(self) -> dict[str, Any]:
        """Return the proposed arm as JSON-ready data."""
        return asdict(self)


def next_arms(history: History) -> tuple[NextArm, ...]:
    """Return the kinds of arms that may be charged next, each with the largest ε that one may cost.

    Trainings are as long as the last one that was charged. Each line is by itself.

    **Guarantee**: a kind whose noise is calibrated to its ε, or below, is admitted as long as nothing else
    is charged.
    """
    if closed_to_all(history):
        return ()
    number, count, rate = _last_training(history)
    suffix = f", as charge {number}" if number else ""
    length = f"DP-SGD of {count} steps at sample_rate {rate:.3g}{suffix}"
    budget = history.terms()
    if not history.frozen and not history.block:  # then one charge may be all of the budget
        epsilon = _two_digits(budget.epsilon)
        return _arms(
            length,
            training=epsilon,
            selection=epsilon,
            number=epsilon,
        )

    block = tuple(history.block.values())
    is_large = not history.frozen and len(set(block)) > _FEW

    def holds(event: acc.Event) -> bool:
        """Return whether the budget holds an event, by Rényi curves alone beside many declared charges."""
        if is_large:
            return by_curves((*block, event), budget) <= budget.epsilon
        return fits(history, [event])

    def holds_training(sigma: float) -> bool:
        return holds(_train(count, rate, sigma))

    def holds_number(sigma: float) -> bool:
        return holds(acc.Gaussian(sigma))

    training_sigma = _smallest(holds_training, 1.0, _STEP)
    number_sigma = _smallest(holds_number, 1.0, _STEP)
    training_epsilon = 0.0
    selection_epsilon = 0.0
    number_epsilon = 0.0
    if training_sigma is not None:
        training_epsilon = _from_below(_train(count, rate, training_sigma), budget)
        for factor in _LOUDER:
            selection = _select(count, rate, training_sigma * factor)
            if holds(selection):
                selection_epsilon = _from_below(selection, budget)
                break
    if number_sigma is not None:
        number_epsilon = _from_below(acc.Gaussian(number_sigma), budget)
    return _arms(
        length,
        training=training_epsilon,
        selection=selection_epsilon,
        number=number_epsilon,
    )


def _arms(
    length: str, *, training: float, selection: float, number: float
) -> tuple[NextArm, NextArm, NextArm]:
    """Return the three kinds of next arms, from the ε of each and a training's length in words."""
    return (
        NextArm(_TRAINING, length, training),
        NextArm(_SELECTION, _RUNS, selection),
        NextArm(_NUMBER, _NOISE, number),
    )


def _train(count: int, rate: float, sigma: float) -> acc.Event:
    """Return the event of a DP-SGD training from its steps, sampling rate and noise multiplier."""
    step = acc.PoissonSampled(rate, acc.Gaussian(sigma))
    return acc.Repeated(count, step)


def _select(count: int, rate: float, sigma: float) -> acc.Event:
    """Return the event of a private selection among trainings of one length and noise."""
    return acc.PrivateSelection(_train(count, rate, sigma), _LAW)


def closed_to_all(history: History) -> str:
    """Return why a budget admits no charge of any kind, or an empty text if it admits some."""
    if history.closed:
        return "the budget was closed for good"
    if history.frozen and history.terms().admission is Admission.DECLARED:
        return "its admission is declared, and it has started"
    return ""


def say_difference(arms: Sequence[NextArm], unspent: float) -> str:
    """Return why the ε that fits differs from the ε that is left, or an empty text if it hardly does.

    Args:
        arms: What fits.
        unspent: The ε that the odometer leaves.

    Example:
        >>> say_difference([NextArm("a training", "of 100 steps", 1.2)], 1.0)
        'more fits than is left, since charges together cost less than their sum'
    """
    dear = [arm for arm in arms if arm.epsilon > unspent]
    # What is merely rounded down is no difference.
    cheap = [arm for arm in arms if arm.epsilon < 0.85 * unspent]
    concerns_all = len(arms) in (len(dear), len(cheap))
    sentences = []
    for reason, some_arms in ((MORE, dear), (LESS, cheap)):
        if not some_arms:
            continue
        kinds = " and ".join(arm.kind for arm in some_arms)
        sentences.append(reason if concerns_all else f"of {kinds} {reason}")
    return "; ".join(sentences)


def _last_training(history: History) -> tuple[int, int, float]:
    """Return the charge number, steps and sampling rate of the last training, or 0 and usual values."""
    for number, charge in reversed(history.charges.items()):
        if charge.state is ChargeState.VOIDED:
            continue
        shape = training(charge.event)
        if shape is not None:
            return number, *shape
    return 0, *_USUAL


def suggestions(
    history: History, events: Sequence[acc.Event], *, of_study: bool = True
) -> tuple[str, ...]:
    """Return phrases on what would fit in place of a refused request.

    Args:
        history: What the budget's log says.
        events: What was refused.
        of_study: Whether a study asks, whose spec says an ε.
    """
    shape = training(events[0]) if len(events) == 1 else None
    # A study's noise follows from its ε, which is what its author changes.
    if shape is None or of_study:
        return (_together(history, events, of_study=of_study),)
    return tuple(_trainings(history, *shape))


def _trainings(history: History, count: int, rate: float) -> Iterator[str]:
    """Yield phrases on how much noise a training, or a selection among trainings, needs in order to fit."""
    budget = history.terms()

    def holds_training(sigma: float) -> bool:
        return fits(history, [_train(count, rate, sigma)])

    def holds_selection(sigma: float) -> bool:
        return fits(history, [_select(count, rate, sigma)])

    sigma = _smallest(holds_training, 1.0)
    if sigma is None:
        yield "no DP-SGD training of this length, at any noise"
        return
    cost = _from_below(_train(count, rate, sigma), budget)
    yield (
        f"a DP-SGD training of {count} steps at sample_rate {rate:g} with noise_multiplier ≥ {sigma:g} "
        f"(ε = {cost:g} alone)"
    )
    selection_sigma = _smallest(holds_selection, 1.15 * sigma)
    if selection_sigma is not None:
        selection_cost = _from_below(_select(count, rate, selection_sigma), budget)
        yield (
            f"a private selection among {_LAW.mean:g} such trainings on average, 2 at least, with "
            f"noise_multiplier ≥ {selection_sigma:g} (ε = {selection_cost:g} alone)"
        )
        cost = max(cost, selection_cost)
    unspent = budget.epsilon - odometer(history).epsilon
    if cost > unspent:
        yield MORE


def _together(history: History, events: Sequence[acc.Event], *, of_study: bool) -> str:
    """Return a phrase on how much more noise makes a refused request fit, and on its ε then."""

    def louder(factor: float) -> tuple[acc.Event, ...]:
        return tuple(acc.scale_noise(event, factor) for event in events)

    factor = _smallest(lambda by: fits(history, louder(by)), 1.0)
    if factor is None:
        return "nothing of this kind, at any noise"
    budget = history.terms()
    guarantee = block_epsilon(louder(factor), budget.delta, budget.adjacency)
    cost = guarantee.epsilon
    phrase = f"the same charge with {factor:g} times the noise"
    if not 0.0 < cost < math.inf:
        return phrase
    unspent = max(0.0, budget.epsilon - odometer(history).epsilon)
    least = _two_digits(cost)
    if least > unspent:
        phrase = f"{phrase} ({MORE})"
    if of_study:
        phrase = f"epsilon: {least:g} in the study's spec (in Python epsilon={least:g}), {phrase}"
    return phrase


def _from_below(event: acc.Event, budget: Budget) -> float:
    """Return the ε that an event costs alone, rounded down to two digits; 0 if it is infinite."""
    guarantee = block_epsilon((event,), budget.delta, budget.adjacency)
    cost = guarantee.epsilon
    if not 0.0 < cost < math.inf:
        return 0.0
    # Bounds of two nearby noises may differ in the order by as much as their lattices do.
    return _two_digits(0.998 * cost)


def _two_digits(cost: float) -> float:
    """Return an ε above 0 rounded down to two significant digits."""
    exponent = math.floor(math.log10(cost))
    step = 10.0 ** (exponent - 1)
    steps = math.floor(cost / step)
    return round(steps * step, 12)


def _smallest(holds: Callable[[float], bool], start: float, within: float = 1.01) -> float | None:
    """Return nearly the smallest number with which an event fits a budget; None if that is above 10⁴.

    Args:
        holds: Whether a number is large enough.
        start: Where to begin.
        within: The factor by which the number may be larger than need be.
    """
    high = start
    while not holds(high):
        high *= 2
        if high > _LARGEST:
            return None
    low = high / 2
    while low > 1e-2 and holds(low):
        high = low
        low = low / 2
    while high / low > within:
        middle = math.sqrt(low * high)
        if holds(middle):
            high = middle
        else:
            low = middle
    exponent = math.floor(math.log10(high))
    step = 10.0 ** (exponent + 1 - _DIGITS)
    steps = math.ceil(high / step)
    return round(steps * step, 12)
