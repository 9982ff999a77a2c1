"""Witnesses: what autodp and dp-accounting say of what was charged, beside our own account.

Ours decides. Their upper bounds are recorded, whether they are above or below ours: a looser bound proves
nothing, and a tighter one contradicts nothing. Only a lower bound can object. Where the true ε is proved to
be above ours, nothing is certified.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from privtune.accounting.algebra import Adjacency, Event, flatten
from privtune.accounting.compare import Answer, compare, proved_by_dp_accounting
from privtune.accounting.curves import rdp_epsilon
from privtune.accounting.events import NonPrivate
from privtune.accounting.rdp import composed_by_autodp
from privtune.accounting.registry import under
from privtune.errors import PrivTuneError

AUTODP = "autodp RDP"
_WITNESSES = (AUTODP, "dp-accounting PLD", "dp-accounting RDP")


class DisputedAccountError(PrivTuneError):
    """What was charged is proved to cost more than our account says."""


@dataclass(frozen=True)
class Witnessed:
    """What our account and its witnesses say of one event at one δ.

    Args:
        ours: Our ε, which decides.
        composed: Ours by Rényi divergences alone: our curves, composed by autodp.
        lower: What the event is proved to cost at least: by an explicit mechanism, or by dp-accounting
            with every loss rounded down.
        witnesses: Their upper bounds, and why ours differs.
        objection: Why ours is too small; empty unless it is below ``lower``.
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
    """Ask autodp and dp-accounting for ε of an event, and hold what is proved against ours.

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
