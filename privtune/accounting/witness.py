"""Witnesses: what autodp and dp-accounting say of what was charged, beside our own account.

Ours decides. A witness can only object: where it accounts for the same releases by the same theory, and
ours promises more privacy than it does by more than numbers may differ, nothing is certified.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from privtune.accounting.algebra import Adjacency, Event, flatten
from privtune.accounting.compare import Answer, compare
from privtune.accounting.curves import rdp_epsilon
from privtune.accounting.events import NonPrivate
from privtune.accounting.mechanisms.entry import UnknownEventError
from privtune.accounting.rdp import composed_by_autodp
from privtune.accounting.registry import looks, under
from privtune.errors import PrivTuneError

__all__ = ["AUTODP", "DisputedAccountError", "Witnessed", "ask_witnesses", "autodp_epsilon"]

AUTODP = "autodp RDP"
_PLD = "dp-accounting PLD"
_WITNESSES = (AUTODP, _PLD, "dp-accounting RDP")
_SHARE, _LATTICE = 0.1, 0.02  # by which ours may be below: relative, and a fixed lattice's in ε


class DisputedAccountError(PrivTuneError):
    """Another accountant says that what was charged costs more than our account does."""


@dataclass(frozen=True)
class Witnessed:
    """What our account and its witnesses say of one event at one δ.

    Args:
        ours: Our ε, which decides.
        composed: Ours by Rényi divergences alone: our curves, composed by autodp.
        lower: What some mechanism with this event costs.
        witnesses: Their answers, and why ours differs.
        objection: Which witness objects, and why; empty if none does.
    """

    ours: float
    composed: float
    lower: float
    witnesses: tuple[Answer, ...]
    objection: str

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        numbers = {"ours": self.ours, "composed_by_autodp": self.composed, "lower": self.lower}
        return {
            **{k: v if math.isfinite(v) else "inf" for k, v in numbers.items()},
            "witnesses": [answer.to_dict() for answer in self.witnesses],
        }


def ask_witnesses(
    event: Event, delta: float, *, adjacency: Adjacency = Adjacency.ADD_REMOVE
) -> Witnessed:
    """Ask autodp and dp-accounting for ε of an event, and hold it against ours.

    Args:
        event: What touched the data.
        delta: In (0, 1).
        adjacency: The relation of neighbouring datasets; the event is rewritten for it first.

    Returns:
        What all say. Nothing is raised: see :attr:`Witnessed.objection`.

    Example:
        >>> from privtune.accounting import Gaussian, PoissonSampled, Repeated
        >>> said = ask_witnesses(Repeated(400, PoissonSampled(0.05, Gaussian(2.0))), 1e-5)
        >>> round(said.ours, 2), [round(answer.epsilon, 2) for answer in said.witnesses]
        (2.25, [2.46, 2.25, 2.46])
        >>> said.objection
        ''
    """
    if isinstance(event, NonPrivate):
        return Witnessed(math.inf, math.inf, math.inf, (), "")
    event = under(event, adjacency)
    found = compare(event, delta, tools=_WITNESSES)
    composed = rdp_epsilon(composed_by_autodp(flatten(event)), delta)
    numbers = {a.tool: a.epsilon for a in found.others if a.epsilon is not None}
    objection = ""
    for tool, mine in ((_PLD, found.ours.epsilon), (AUTODP, composed)):
        # autodp knows no tight rule for samples with Laplace noise: it is larger there for a reason.
        if tool not in numbers or (tool == AUTODP and _sampled_laplace(event)):
            continue
        theirs = numbers[tool]
        if math.isfinite(theirs) and mine < theirs * (1.0 - _SHARE) - _LATTICE:
            objection = (
                f"{tool} says epsilon = {theirs:.6g}, our account by the same theory {mine:.6g}: "
                "one of the two is wrong. Nothing is certified; please report it (SECURITY.md)."
            )
    return Witnessed(found.ours.epsilon, composed, found.lower, found.others, objection)


def autodp_epsilon(event: Event, delta: float, *, adjacency: Adjacency) -> float:
    """Return ε by autodp's own mechanisms, sampling and composition.

    Args:
        event: What touched the data.
        delta: In (0, 1).
        adjacency: The relation of neighbouring datasets.

    Raises:
        DisputedAccountError: If autodp has no word for a part of the event, or fails.
    """
    [answer] = compare(under(event, adjacency), delta, tools=(AUTODP,)).others
    if answer.epsilon is None:
        raise DisputedAccountError(
            f"autodp cannot answer: {answer.why} Ask with --method rdp, by our curves."
        )
    return answer.epsilon


def _sampled_laplace(event: Event) -> bool:
    try:
        found = looks(event)
    except UnknownEventError:
        return False
    return any(rate < 1.0 and kind == "laplace" for rate, atoms in found for kind, _ in atoms)
