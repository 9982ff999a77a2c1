"""Texts that explain a budget's promise in terms of its unit of privacy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from privtune.accounting import Adjacency
from privtune.ledger.values import RECORD
from privtune.numbers import ceil_to


@dataclass(frozen=True)
class PromiseWording:
    """Texts on what a budget promises, in terms of its unit of privacy.

    Args:
        unit: What the budget protects, in a word: ``"record"``, ``"patient"``.

    Example:
        >>> PromiseWording("patient").state_adjacency("add-remove")
        'add-remove of one patient'
        >>> PromiseWording("record").state_adjacency("add-remove")
        'add-remove'
    """

    unit: str

    @property
    def is_of_records(self) -> bool:
        """Whether the budget protects single records, also where one person has several."""
        return self.unit == RECORD

    def state_adjacency(self, adjacency: str) -> str:
        """Return the adjacency in words, with the name of any unit other than the record."""
        return str(adjacency) if self.is_of_records else f"{adjacency} of one {self.unit}"

    def state_change(self, adjacency: Adjacency) -> str:
        """Return a clause on how one unit differs between neighbouring datasets."""
        if adjacency is Adjacency.ADD_REMOVE:
            return "is in the data or not"
        return "is what it is or is replaced by any other"

    def define_neighbours(self, adjacency: Adjacency) -> str:
        """Return a clause that defines neighbouring datasets."""
        if adjacency is Adjacency.ADD_REMOVE:
            difference = f"one has one {self.unit} more than the other (add or remove)"
        else:
            difference = f"they differ in one {self.unit}, which is replaced by any other"
        return f"two datasets are neighbours if {difference}"

    def explain_epsilon(self, spent: float, delta: float) -> str:
        """Return an explanation of (ε, δ) for one unit, with an attacker's best guess.

        Args:
            spent: ε, at least 0, perhaps infinite.
            delta: δ, in (0, 1).
        """
        if not math.isfinite(spent):
            return "Nothing: something on this budget was released without a privacy guarantee."
        # Source: Kairouz, Oh and Viswanath (2015), theorem 2.1, at equal odds of both datasets.
        factor = math.exp(min(spent, 700.0))
        certainty = (factor + delta) / (factor + 1.0)
        # Shown with enough digits that it never rounds up to certainty.
        doubt = max(1.0 - certainty, 1e-12)
        zeros = math.ceil(-math.log10(doubt))
        digits = max(1, zeros - 1)
        right = f"{ceil_to(certainty, digits + 2):.{digits}%}"
        return (
            f"One {self.unit} makes no outcome more than e^{spent:.3f} = {ceil_to(factor, 1):,.1f} times as "
            f"likely, except with probability {delta:g}. Suppose that somebody knows all other data, has "
            f"unlimited computing power, and is 50% sure that a certain {self.unit} is in the data. After "
            f"seeing all releases, their guess is right at most {right} of the time. This is a worst case; "
            "smaller is better, and values below 1 are strong."
        )

    @property
    def caveat(self) -> str:
        """The sentences on who is protected less than the unit, with group privacy's numbers."""
        # Source: group privacy, Vadhan (2017), lemma 2.2: δ grows by the sum of e^(iε), i below k.
        cost = "by up to k times ε, at δ times (e^(kε) − 1)/(e^ε − 1)"
        less = f"is protected less: {cost} (group privacy)"
        if self.is_of_records:
            return f"ε protects one record. Someone with k records {less}."
        protected = f"ε protects one {self.unit}, as the data identify them"
        return f"{protected}. Someone who appears under k identifiers {less}."

    @property
    def short_caveat(self) -> str:
        """The caveat as one line under a table of numbers."""
        if self.is_of_records:
            return (
                "ε protects one record. Someone with k records is protected less: by up to k times ε, "
                "at δ times (e^(kε) − 1)/(e^ε − 1)."
            )
        return f"ε protects one {self.unit}, as the data identify them."

    @property
    def open_question(self) -> str:
        """The question about the unit that only the curator can answer, and the caveat."""
        if self.is_of_records:
            return f"whether someone can have several records. {self.caveat}"
        return f"whether the rows are grouped correctly. {self.caveat}"
