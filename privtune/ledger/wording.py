"""What a budget promises, in words: by its unit, for every page, note and command that says it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from privtune.accounting import Adjacency
from privtune.ledger.values import RECORD
from privtune.numbers import ceil_to


@dataclass(frozen=True)
class PromiseWording:
    """Words what a budget promises by its unit: a promise about records does not speak of persons.

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
        """Return the adjacency, with the unit where that is not the record."""
        return str(adjacency) if self.is_of_records else f"{adjacency} of one {self.unit}"

    def state_change(self, adjacency: Adjacency) -> str:
        """Return in what one unit differs between neighbouring datasets, as the end of a clause."""
        if adjacency is Adjacency.ADD_REMOVE:
            return "is in the data or not"
        return "is what it is or is replaced by any other"

    def define_neighbours(self, adjacency: Adjacency) -> str:
        """Return a clause that defines neighbouring datasets."""
        if adjacency is Adjacency.ADD_REMOVE:
            difference = f"one has one {self.unit} more than the other (add or remove)"
        else:
            difference = f"one {self.unit} of the one is replaced by any other"
        return f"two datasets are neighbours if {difference}"

    def explain_epsilon(self, spent: float, delta: float) -> str:
        """Return what (ε, δ) means for one unit.

        Args:
            spent: ε, at least 0, perhaps infinite.
            delta: δ, in (0, 1).
        """
        if not math.isfinite(spent):
            return "Nothing: something that was charged has no guarantee at all."
        # Source: Kairouz, Oh and Viswanath (2015), theorem 2.1, at equal odds of both datasets.
        factor = math.exp(min(spent, 700.0))
        certainty = (factor + delta) / (factor + 1.0)
        # Shown with enough digits that it never rounds up to certainty.
        digits = max(1, math.ceil(-math.log10(max(1.0 - certainty, 1e-12))) - 1)
        right = f"{ceil_to(certainty, digits + 2):.{digits}%}"
        return (
            f"No outcome becomes more than e^{spent:.3f} = {ceil_to(factor, 1):,.1f} times as likely through "
            f"one {self.unit}, but for a part of probability {delta:g}. Somebody who is 50% sure that a "
            f"certain {self.unit} is in the data, who knows everything else and can compute without limits, "
            f"is right at most {right} of the time after seeing all releases. This is a worst case; "
            "smaller is better, and values below 1 are strong."
        )

    @property
    def caveat(self) -> str:
        """Whom the promise covers less, with the numbers of group privacy."""
        # Source: group privacy, Vadhan (2017), lemma 2.2: δ grows by the sum of e^(iε), i below k.
        cost = "by up to k times ε, at δ times (e^(kε) − 1)/(e^ε − 1)"
        less = f"is protected k times less: {cost} (group privacy)"
        if self.is_of_records:
            return f"The number protects one record. Someone with k records {less}."
        protected = f"The number protects one {self.unit}, as the data name them"
        return f"{protected}. Whoever stands under k names {less}."

    @property
    def short_caveat(self) -> str:
        """The caveat as one line under a table of numbers."""
        if self.is_of_records:
            return "ε is of one record: someone with k records is protected k times less, by up to k times ε."
        return f"ε is of one {self.unit}, as the data name them."

    @property
    def open_question(self) -> str:
        """What only the curator can know of the unit."""
        if self.is_of_records:
            return f"whether someone can have several records. {self.caveat}"
        return f"whether the rows' groups are right. {self.caveat}"
