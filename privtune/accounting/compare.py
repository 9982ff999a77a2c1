"""What other accountants say of an event, beside ours, and the witnesses of a certificate.

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

from privtune.accounting._checks import json_number
from privtune.accounting.accountant import Guarantee, epsilon, lower_bound
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
    """A tool has no word for the event; the message says for what."""


class _Release(NamedTuple):
    """One kind of release of an event, and how often it is made."""

    kind: str
    rate: float
    noise: float
    times: int


class _Choice(NamedTuple):
    """A best of K, and how often it is made."""

    event: Event
    runs: RunLaw
    times: int


@dataclass(frozen=True)
class Answer:
    """What one tool says: an ε, or why it has none."""

    tool: str
    epsilon: float | None
    why: str

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        known = None if self.epsilon is None else json_number(self.epsilon)
        return {"tool": self.tool, "epsilon": known, "why": self.why}


@dataclass(frozen=True)
class Comparison:
    """Our guarantee and lower bound, and the answers of other tools."""

    ours: Guarantee
    lower: float
    others: tuple[Answer, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return {
            "ours": self.ours.to_dict(),
            "lower": json_number(self.lower),
            "others": [answer.to_dict() for answer in self.others],
        }


def compare(event: Event, delta: float, *, tools: Sequence[str] = ()) -> Comparison:
    """Ask tools for ε of one event at one δ, under add-remove."""
    ours = epsilon(event, delta)
    lower = lower_bound(event, delta)
    answers = []
    for name in tools or TOOLS:
        ask = TOOLS[name]
        try:
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                found = float(ask(_parts(event), delta))
        except PrivTuneError as error:
            answers.append(Answer(name, None, str(error)))
        except _CannotError as error:
            answers.append(Answer(name, None, f"It has no word for {error}."))
        except Exception as error:  # whatever another library does with an odd event
            answers.append(Answer(name, None, f"It fails ({type(error).__name__})."))
        else:
            if math.isnan(found):
                answers.append(Answer(name, None, "It fails (its number is none)."))
            else:
                answers.append(Answer(name, found, _why(name, found, ours, lower)))
    return Comparison(ours, lower, tuple(answers))


def _why(tool: str, found: float, ours: Guarantee, lower: float) -> str:
    """Return one sentence on why this package's ε differs from that of another tool."""
    if found < lower * (1.0 - 1e-6):
        return "Its number is no upper bound: some mechanism with this event costs more."
    if math.isinf(found):
        same = "as is ours" if math.isinf(ours.epsilon) else "ours has a bound that is finite"
        return f"Its bound is infinite; {same}."
    if abs(found - ours.epsilon) <= _ALIKE * ours.epsilon:
        return "They agree."
    if found < ours.epsilon:
        return f"Ours is larger: both are bounds, and ours, by {ours.method}, is the looser here."
    if tool == "Opacus PRV":
        return "It allows itself an error of 0.01 in ε and reports the upper end; ours refines until 1e-3."
    if "RDP" not in tool:
        return "Its lattice is the same for every event; ours is chosen for this one."
    if ours.method == "rdp":
        return "Both compose Rényi divergences; ours has more orders and a tighter divergence."
    return (
        f"Converting Rényi divergences to (ε, δ) loses; ours, by {ours.method}, does not convert."
    )


def _parts(event: Event) -> list[_Release | _Choice]:
    """Return what every tool may know about an event."""
    parts: list[_Release | _Choice] = []
    for part, count in flatten(event).items():
        known = entry(part)
        choice, rho = known.choice(part), known.rho(part)
        if choice is not None and not choice.threshold:
            parts.append(_Choice(choice.selection.event, choice.selection.runs, count))
            continue
        if rho is not None:
            parts.append(_Release("zcdp", 1.0, rho, count))
            continue
        try:
            found = looks(part)
        except UnknownEventError:
            raise _CannotError(f"events of type {part.type}") from None
        for (rate, atoms), times in found.items():
            sigma = known.sampled_gaussian(part)
            if len(atoms) > 1 and sigma is None:
                raise _CannotError("Gaussian and Laplace releases about one sample")
            kind, noise = atoms[0] if sigma is None else ("gaussian", sigma[1])
            parts.append(_Release(kind, rate, noise, count * times))
    return parts


def _plain(parts: list[_Release | _Choice], *kinds: str) -> list[_Release]:
    """Return the releases, if they are of kinds that a tool knows."""
    for part in parts:
        if isinstance(part, _Choice):
            raise _CannotError("the best of several runs")
        if part.kind not in kinds:
            raise _CannotError("zero-concentrated DP" if part.kind == "zcdp" else "Laplace noise")
    return [part for part in parts if isinstance(part, _Release)]


def need_dp_accounting() -> None:
    """Refuse in one sentence where dp-accounting, an extra, is not installed."""
    find_extra("dp_accounting", extra="check", what=f"{NOT_MADE}: this independent check")


def _as_dp_event(parts: list[_Release | _Choice]) -> Any:
    import dp_accounting as dp
    from dp_accounting.dp_event import RepeatAndSelectDpEvent

    events = []
    for part in parts:
        if isinstance(part, _Choice):
            law = part.runs.to_dict()
            shape = law.get("shape", _SHAPES.get(part.runs.law))
            if shape is None or "maximum" in law or "minimum" in law:
                raise _CannotError("a fixed, binomial or bounded number of runs")
            base = _as_dp_event(_parts(part.event))
            one = RepeatAndSelectDpEvent(base, float(law["mean"]), float(shape))
        elif part.kind == "zcdp":
            one = dp.ZCDpEvent(part.noise)
        else:
            release = dp.GaussianDpEvent if part.kind == "gaussian" else dp.LaplaceDpEvent
            one = release(part.noise)
            if part.rate < 1.0:
                one = dp.PoissonSampledDpEvent(part.rate, one)
        events.append(dp.SelfComposedDpEvent(one, part.times))
    return dp.ComposedDpEvent(events)


def _by_dp_accounting(parts: list[_Release | _Choice], delta: float, *, pld: bool) -> float:
    need_dp_accounting()
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    accountant, event = PLDAccountant() if pld else RdpAccountant(), _as_dp_event(parts)
    if not accountant.supports(event):
        choices = any(isinstance(part, _Choice) for part in parts)
        missing = "the best of several runs" if choices else "one of these releases"
        raise _CannotError(missing)
    return float(accountant.compose(event).get_epsilon(delta))


def proved_by_dp_accounting(event: Event, delta: float) -> float:
    """Return an ε that the event exceeds at this δ, by dp-accounting; 0 where it cannot tell."""
    # Its buckets round every loss down: the profile of their sum is at most the true one. What its
    # transforms round, and the masses of 1e-15 that it cuts off, are paid by a larger δ.
    try:
        from dp_accounting.pld import privacy_loss_distribution as buckets

        total = buckets.identity(pessimistic_estimate=False)
        for part in _plain(_parts(event), "gaussian", "laplace"):
            gaussian = part.kind == "gaussian"
            make = buckets.from_gaussian_mechanism if gaussian else buckets.from_laplace_mechanism
            one = make(
                part.noise,
                pessimistic_estimate=False,
                sampling_prob=part.rate,
                use_connect_dots=False,
            )
            total = total.compose(one.self_compose(part.times))
        found = float(total.get_epsilon_for_delta(delta * (1.0 + 1e-3) + 1e-10))
    except Exception:  # not installed, or whatever another library does with an odd event
        return 0.0
    return found if math.isfinite(found) else 0.0


def _autodp_rdp(parts: list[_Release | _Choice], delta: float) -> float:
    from autodp.mechanism_zoo import ExactGaussianMechanism, LaplaceMechanism, zCDP_Mechanism
    from autodp.transformer_zoo import AmplificationBySampling, Composition

    mechanisms, counts = [], []
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


def _opacus_rdp(parts: list[_Release | _Choice], delta: float) -> float:
    from opacus.accountants.analysis import rdp

    total = 0.0
    for part in _plain(parts, "gaussian"):
        total = total + rdp.compute_rdp(
            q=part.rate, noise_multiplier=part.noise, steps=part.times, orders=_ORDERS
        )
    return float(rdp.get_privacy_spent(orders=_ORDERS, rdp=total, delta=delta)[0])


def _opacus_prv(parts: list[_Release | _Choice], delta: float) -> float:
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(p.noise, p.rate, p.times) for p in _plain(parts, "gaussian")]
    return float(accountant.get_epsilon(delta))


TOOLS: dict[str, Callable[[list[_Release | _Choice], float], float]] = {
    "dp-accounting PLD": partial(_by_dp_accounting, pld=True),
    "dp-accounting RDP": partial(_by_dp_accounting, pld=False),
    "autodp RDP": _autodp_rdp,
    "Opacus RDP": _opacus_rdp,
    "Opacus PRV": _opacus_prv,
}


AUTODP = "autodp RDP"
_WITNESSES = (AUTODP, "dp-accounting PLD", "dp-accounting RDP")


class DisputedAccountError(PrivTuneError):
    """What was charged is proved to cost more than our account says."""


@dataclass(frozen=True)
class Witnessed:
    """What our account and its witnesses say of one event; an objection if ours is below what is proved."""

    ours: float
    composed: float
    lower: float
    witnesses: tuple[Answer, ...]
    objection: str

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return {
            "ours": json_number(self.ours),
            "composed_by_autodp": json_number(self.composed),
            "lower": json_number(self.lower),
            "witnesses": [answer.to_dict() for answer in self.witnesses],
        }


def ask_witnesses(
    event: Event, delta: float, *, adjacency: Adjacency = Adjacency.ADD_REMOVE
) -> Witnessed:
    """Ask autodp and dp-accounting for ε of an event, and hold what is proved against ours."""
    if isinstance(event, NonPrivate):
        return Witnessed(math.inf, math.inf, math.inf, (), "")
    event = under(event, adjacency)
    found = compare(event, delta, tools=_WITNESSES)
    composed = rdp_epsilon(composed_by_autodp(flatten(event)), delta)
    lower, by = max(
        (found.lower, "an explicit mechanism"),
        (proved_by_dp_accounting(event, delta), "dp-accounting, every loss rounded down"),
    )
    objection = ""
    if (ours := min(found.ours.epsilon, composed)) < lower:
        objection = (
            f"our account says epsilon = {ours:.6g}, but at least {lower:.6g} is proved by {by}. "
            "Nothing is certified; please report it (SECURITY.md)."
        )
    return Witnessed(found.ours.epsilon, composed, lower, found.others, objection)


def autodp_epsilon(event: Event, delta: float, *, adjacency: Adjacency) -> float:
    """Return ε by autodp's own mechanisms, sampling and composition."""
    [answer] = compare(under(event, adjacency), delta, tools=(AUTODP,)).others
    if answer.epsilon is None:
        raise DisputedAccountError(
            f"autodp cannot answer: {answer.why} Ask with --method rdp, by our curves."
        )
    return answer.epsilon
