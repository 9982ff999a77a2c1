"""Compare ε of an event with other accountants, some of which certificates quote as witnesses.

Ours decides. Upper bounds of others are recorded: a looser one proves nothing, and a tighter one
contradicts nothing. Only a lower bound can object: where the true ε is proved to be above ours, nothing
is certified.
"""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from privtune.accounting.accountant import Guarantee, epsilon, lower_bound
from privtune.accounting.checks import json_number
from privtune.accounting.curves import rdp_epsilon
from privtune.accounting.events import Adjacency, Event, NonPrivate, flatten
from privtune.accounting.rdp import composed_by_autodp
from privtune.accounting.registry import UnknownEventError, entry, looks, under
from privtune.accounting.runs import RunLaw
from privtune.errors import PrivTuneError
from privtune.imports import find_extra

NOT_MADE = "Not made"  # how the answer of a tool begins that is not installed
_ALIKE = 5e-3  # relative difference that is not worth a reason
_SHAPES = {"geometric": 1.0, "logarithmic": 0.0, "poisson": math.inf}
_ORDERS = [1 + x / 10.0 for x in range(1, 100)] + list(range(12, 64))  # those of Opacus


class _CannotError(Exception):
    """The error that a tool cannot express the event; its message names the unknown part."""


class _ReleaseCount(NamedTuple):
    """One kind of release in an event, with its sampling rate, noise and number of times."""

    kind: str
    rate: float
    noise: float
    times: int


class _BestOfK(NamedTuple):
    """A selection of the best of K runs in an event, with the number of times it is made."""

    event: Event
    runs: RunLaw
    times: int


@dataclass(frozen=True)
class Answer:
    """The answer of one tool: its ε, or None, and a sentence that explains it."""

    tool: str
    epsilon: float | None
    why: str

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as JSON-ready data."""
        epsilon = None if self.epsilon is None else json_number(self.epsilon)
        return {"tool": self.tool, "epsilon": epsilon, "why": self.why}


@dataclass(frozen=True)
class Comparison:
    """Our guarantee and lower bound of an event, and the answers of other tools."""

    ours: Guarantee
    lower: float
    others: tuple[Answer, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON-ready data."""
        return {
            "ours": self.ours.to_dict(),
            "lower": json_number(self.lower),
            "others": [answer.to_dict() for answer in self.others],
        }


def compare(
    event: Event,
    delta: float,
    *,
    tools: Sequence[str] = (),
) -> Comparison:
    """Compare our ε of one event at one δ with that of other tools, under add-remove.

    Args:
        event: What touched the data.
        delta: In (0, 1).
        tools: Names among `TOOLS`; all by default.

    Returns:
        Our guarantee and lower bound, and an answer of each tool, in this order.
    """
    ours = epsilon(event, delta)
    lower = lower_bound(event, delta)
    answers = [_ask(name, event, ours, lower) for name in tools or TOOLS]
    return Comparison(ours, lower, tuple(answers))


def _ask(
    name: str,
    event: Event,
    ours: Guarantee,
    lower: float,
) -> Answer:
    """Return one tool's answer at our δ; an exception in the tool becomes an answer without ε."""
    ask = TOOLS[name]
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            theirs = float(ask(_parts(event), ours.delta))
    except PrivTuneError as error:
        return Answer(name, None, str(error))
    except _CannotError as error:
        return Answer(name, None, f"It has no word for {error}.")
    except Exception as error:  # whatever another library does with an odd event
        return Answer(name, None, f"It fails ({type(error).__name__}).")
    if math.isnan(theirs):
        return Answer(name, None, "It fails (its number is none).")
    return Answer(name, theirs, _why(name, theirs, ours, lower))


def _why(
    tool: str,
    theirs: float,
    ours: Guarantee,
    lower: float,
) -> str:
    """Return one sentence on why this package's ε differs from that of another tool."""
    if theirs < lower * (1.0 - 1e-6):
        return "Not an upper bound: some mechanism with this event costs more."
    if math.isinf(theirs):
        same = "so is PrivTune's" if math.isinf(ours.epsilon) else "PrivTune's is finite"
        return f"Its bound is infinite; {same}."
    if abs(theirs - ours.epsilon) <= _ALIKE * ours.epsilon:
        return "They agree."
    if theirs < ours.epsilon:
        return f"Both are upper bounds; PrivTune's ({ours.method}) is the looser one here."
    if tool == "Opacus PRV":
        return "It allows an error of 0.01 in ε and reports the upper end; PrivTune allows 1e-3."
    if "RDP" not in tool:
        return "It rounds losses to a fixed grid; PrivTune chooses the grid for each event."
    if ours.method == "rdp":
        return "Both use RDP; PrivTune tries more orders and has tighter divergences."
    return f"RDP is looser: its conversion to (ε, δ) loses. PrivTune's {ours.method} needs no conversion."


def _parts(event: Event) -> list[_ReleaseCount | _BestOfK]:
    """Return the selections, zCDP releases and noisy releases of an event, with their counts."""
    parts: list[_ReleaseCount | _BestOfK] = []
    for part, count in flatten(event).items():
        choice = entry(part).choice(part)
        rho = entry(part).rho(part)
        if choice is not None and not choice.threshold:
            selection = choice.selection
            parts.append(_BestOfK(selection.event, selection.runs, count))
        elif rho is not None:
            parts.append(_ReleaseCount("zcdp", 1.0, rho, count))
        else:
            parts += _releases(part, count)
    return parts


def _releases(part: Event, count: int) -> list[_ReleaseCount]:
    """Return the Gaussian and Laplace releases of one part, by sampling rate."""
    try:
        looks_at_data = looks(part)
    except UnknownEventError:
        raise _CannotError(f"events of type {part.type}") from None
    sampled = entry(part).sampled_gaussian(part)
    releases = []
    for (rate, atoms), times in looks_at_data.items():
        kind, noise = atoms[0]
        if sampled is not None:
            # Several Gaussians about one sample are one.
            kind = "gaussian"
            _, noise = sampled
        elif len(atoms) > 1:
            raise _CannotError("Gaussian and Laplace releases about one sample")
        releases.append(_ReleaseCount(kind, rate, noise, count * times))
    return releases


def _plain(parts: list[_ReleaseCount | _BestOfK], *kinds: str) -> list[_ReleaseCount]:
    """Return the releases of an event if all of them are of the given kinds; raise otherwise.

    Raises:
        _CannotError: Some part is of another kind, which the message names.
    """
    for part in parts:
        if isinstance(part, _BestOfK):
            raise _CannotError("the best of several runs")
        if part.kind not in kinds:
            raise _CannotError("zero-concentrated DP" if part.kind == "zcdp" else "Laplace noise")
    return [part for part in parts if isinstance(part, _ReleaseCount)]


def need_dp_accounting() -> None:
    """Refuse if dp-accounting, an optional dependency, is not installed."""
    find_extra("dp_accounting", extra="check", what=f"{NOT_MADE}: this independent check")


def _shape_of(runs: RunLaw) -> float:
    """Return dp-accounting's shape number for a law of the number of runs, or raise if it has none."""
    fields = runs.to_dict()
    shape = fields.get("shape", _SHAPES.get(runs.law))
    if shape is None or "maximum" in fields or "minimum" in fields:
        raise _CannotError("a fixed, binomial or bounded number of runs")
    return float(shape)


def _as_dp_event(parts: list[_ReleaseCount | _BestOfK]) -> Any:
    """Return the parts as one composed event of dp-accounting."""
    import dp_accounting as dp
    from dp_accounting.dp_event import RepeatAndSelectDpEvent

    events = []
    for part in parts:
        if isinstance(part, _BestOfK):
            shape = _shape_of(part.runs)
            base = _as_dp_event(_parts(part.event))
            one = RepeatAndSelectDpEvent(base, float(part.runs.mean), shape)
        elif part.kind == "zcdp":
            one = dp.ZCDpEvent(part.noise)
        else:
            release = dp.GaussianDpEvent if part.kind == "gaussian" else dp.LaplaceDpEvent
            one = release(part.noise)
            if part.rate < 1.0:
                one = dp.PoissonSampledDpEvent(part.rate, one)
        events.append(dp.SelfComposedDpEvent(one, part.times))
    return dp.ComposedDpEvent(events)


def _by_dp_accounting(
    parts: list[_ReleaseCount | _BestOfK],
    delta: float,
    *,
    pld: bool,
) -> float:
    """Return ε by dp-accounting, from privacy loss distributions if `pld`, else from Rényi DP.

    Raises:
        PrivTuneError: It is not installed.
        _CannotError: It has no account for one of the parts.
    """
    need_dp_accounting()
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    accountant = PLDAccountant() if pld else RdpAccountant()
    event = _as_dp_event(parts)
    if not accountant.supports(event):
        choices = any(isinstance(part, _BestOfK) for part in parts)
        missing = "the best of several runs" if choices else "one of these releases"
        raise _CannotError(missing)
    return float(accountant.compose(event).get_epsilon(delta))


def proved_by_dp_accounting(event: Event, delta: float) -> float:
    """Return a lower bound on ε at this δ by dp-accounting; 0 where it has none."""
    # Its buckets round every loss down: the profile of their sum is at most the true one. What its
    # transforms round, and the masses of 1e-15 that it cuts off, are paid by a larger δ.
    try:
        from dp_accounting.pld import privacy_loss_distribution as buckets

        total = buckets.identity(pessimistic_estimate=False)
        for part in _plain(_parts(event), "gaussian", "laplace"):
            make = buckets.from_laplace_mechanism
            if part.kind == "gaussian":
                make = buckets.from_gaussian_mechanism
            one = make(
                part.noise,
                pessimistic_estimate=False,
                sampling_prob=part.rate,
                use_connect_dots=False,
            )
            total = total.compose(one.self_compose(part.times))
        larger = delta * (1.0 + 1e-3) + 1e-10
        proved = float(total.get_epsilon_for_delta(larger))
    except Exception:  # not installed, or whatever another library does with an odd event
        return 0.0
    return proved if math.isfinite(proved) else 0.0


def _autodp_rdp(parts: list[_ReleaseCount | _BestOfK], delta: float) -> float:
    """Return ε of the parts by autodp's own mechanisms, sampling and composition."""
    from autodp.mechanism_zoo import ExactGaussianMechanism, LaplaceMechanism, zCDP_Mechanism
    from autodp.transformer_zoo import AmplificationBySampling, Composition

    mechanisms = []
    counts = []
    for number, part in enumerate(_plain(parts, "gaussian", "laplace", "zcdp")):
        name = f"part{number}"
        if part.kind == "zcdp":
            one = zCDP_Mechanism(rho=part.noise, xi=0, name=name)
        elif part.kind == "laplace":
            one = LaplaceMechanism(part.noise, name=name)
        else:
            one = ExactGaussianMechanism(part.noise, name=name)
        if part.rate < 1.0:
            # Its tight rule for Poisson samples is known to hold for Gaussian noise.
            one.replace_one = False
            sampling = AmplificationBySampling(PoissonSampling=True)
            one = sampling(one, part.rate, improved_bound_flag=part.kind == "gaussian")
        mechanisms.append(one)
        counts.append(part.times)
    return float(Composition()(mechanisms, counts).get_approxDP(delta))


def _opacus_rdp(parts: list[_ReleaseCount | _BestOfK], delta: float) -> float:
    """Return ε by Opacus' Rényi accountant, at Opacus' own orders."""
    from opacus.accountants.analysis import rdp

    total = 0.0
    for part in _plain(parts, "gaussian"):
        total = total + rdp.compute_rdp(
            q=part.rate, noise_multiplier=part.noise, steps=part.times, orders=_ORDERS
        )
    return float(rdp.get_privacy_spent(orders=_ORDERS, rdp=total, delta=delta)[0])


def _opacus_prv(parts: list[_ReleaseCount | _BestOfK], delta: float) -> float:
    """Return ε by Opacus' PRV accountant, the upper end of its interval."""
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    releases = _plain(parts, "gaussian")
    accountant.history = [(part.noise, part.rate, part.times) for part in releases]
    return float(accountant.get_epsilon(delta))


TOOLS: dict[str, Callable[[list[_ReleaseCount | _BestOfK], float], float]] = {
    "dp-accounting PLD": partial(_by_dp_accounting, pld=True),
    "dp-accounting RDP": partial(_by_dp_accounting, pld=False),
    "autodp RDP": _autodp_rdp,
    "Opacus RDP": _opacus_rdp,
    "Opacus PRV": _opacus_prv,
}


AUTODP = "autodp RDP"
_WITNESSES = (AUTODP, "dp-accounting PLD", "dp-accounting RDP")


class DisputedAccountError(PrivTuneError):
    """The error that another accountant contradicts our ε of a charged event, or gives no answer."""


@dataclass(frozen=True)
class Testimony:
    """Our ε of an event beside other accountants' answers, with an objection if it is below a lower bound."""

    ours: float
    composed: float
    lower: float
    witnesses: tuple[Answer, ...]
    objection: str

    def to_dict(self) -> dict[str, Any]:
        """Return our ε and the other accountants' answers as JSON-ready data."""
        return {
            "ours": json_number(self.ours),
            "composed_by_autodp": json_number(self.composed),
            "lower": json_number(self.lower),
            "witnesses": [answer.to_dict() for answer in self.witnesses],
        }


def ask_witnesses(
    event: Event,
    delta: float,
    *,
    adjacency: Adjacency = Adjacency.ADD_REMOVE,
) -> Testimony:
    """Ask autodp and dp-accounting for ε of an event, and compare ours with proved lower bounds.

    Args:
        event: What was charged.
        delta: In (0, 1).
        adjacency: The relation of neighbouring datasets.

    Returns:
        What was said, with an objection where our ε is below what is proved.
    """
    if isinstance(event, NonPrivate):
        return Testimony(
            math.inf,
            math.inf,
            math.inf,
            (),
            "",
        )
    event = under(event, adjacency)
    comparison = compare(event, delta, tools=_WITNESSES)
    composed = rdp_epsilon(composed_by_autodp(flatten(event)), delta)
    lower, by = max(
        (comparison.lower, "an explicit mechanism"),
        (proved_by_dp_accounting(event, delta), "dp-accounting, every loss rounded down"),
    )
    ours = min(comparison.ours.epsilon, composed)
    objection = ""
    if ours < lower:
        objection = (
            f"our account says epsilon = {ours:.6g}, but at least {lower:.6g} is proved by {by}. "
            "Nothing is certified; please report it (SECURITY.md)."
        )
    return Testimony(
        ours=comparison.ours.epsilon,
        composed=composed,
        lower=lower,
        witnesses=comparison.others,
        objection=objection,
    )


def autodp_epsilon(
    event: Event,
    delta: float,
    *,
    adjacency: Adjacency,
) -> float:
    """Return ε of an event by autodp, under one adjacency.

    Raises:
        DisputedAccountError: autodp has no answer for the event.
    """
    [answer] = compare(under(event, adjacency), delta, tools=(AUTODP,)).others
    if answer.epsilon is None:
        raise DisputedAccountError(
            f"autodp cannot answer: {answer.why} Ask with --method rdp, by our curves."
        )
    return answer.epsilon
