"""What a ledger tells: budgets, charges, what is spent and what is left."""

from __future__ import annotations

from privtune.accounting import Guarantee
from privtune.errors import InvalidInputError
from privtune.ledger.admission import FilterState, filter_state, odometer
from privtune.ledger.errors import UnknownChargeError
from privtune.ledger.history import History
from privtune.ledger.log import Log
from privtune.ledger.values import Budget, Charge


class LedgerReading:
    """The half of a ledger that writes nothing.

    Args:
        log: The log that is read.
    """

    def __init__(self, log: Log) -> None:
        self.log = log

    @property
    def url(self) -> str:
        """The storage's URL, without a password."""
        return self.log.storage.safe_url

    def budget(self, name: str) -> Budget:
        """Return the terms of a budget.

        Args:
            name: The budget's name.
        """
        return self.log.current(name).terms()

    def budgets(self) -> tuple[Budget, ...]:
        """Return the terms of every budget, by name."""
        return tuple(self.budget(name) for name in self.log.names())

    def is_closed(self, name: str) -> bool:
        """Return whether a budget was closed for good.

        Args:
            name: The budget's name.
        """
        return self.log.current(name).closed

    def charge(self, charge_id: str) -> Charge:
        """Return one charge.

        Args:
            charge_id: The charge's id, as ``"clinic-1"``.
        """
        budget, number = self.parse(charge_id)
        return charge_of(self.log.current(budget), number)

    def charges(
        self, budget: str, *, study: str | None = None, arm: str | None = None
    ) -> tuple[Charge, ...]:
        """Return the charges of a budget, oldest first; of one study or arm, if named.

        Args:
            budget: The budget's name.
            study: The study that asked.
            arm: The arm that it asked for.
        """
        return tuple(
            charge
            for charge in self.log.current(budget).charges.values()
            if (study is None or charge.study == study) and (arm is None or charge.arm == arm)
        )

    def spent(self, budget: str) -> Guarantee:
        """Return what everything charged costs together, at the budget's δ (the odometer).

        Args:
            budget: The budget's name.
        """
        return odometer(self.log.current(budget))

    def remaining(self, budget: str) -> float:
        """Return the ε that the odometer leaves, never below 0.

        Args:
            budget: The budget's name.
        """
        history = self.log.current(budget)
        return max(0.0, history.terms().epsilon - odometer(history).epsilon)

    def filter_state(self, budget: str) -> FilterState:
        """Return the filter beside the odometer: whether it is in force, and what it has left.

        Args:
            budget: The budget's name.
        """
        return filter_state(self.log.current(budget))

    def head(self, budget: str) -> str:
        """Return the hash of the log's last entry. Note it elsewhere: it proves what was there.

        Args:
            budget: The budget's name.
        """
        return self.log.current(budget).head

    @staticmethod
    def parse(charge_id: str) -> tuple[str, int]:
        """Return the budget's name and the charge's number of an id.

        Args:
            charge_id: The charge's id, as ``"clinic-1"``.

        Raises:
            InvalidInputError: It is none.

        Example:
            >>> from privtune.ledger import Ledger
            >>> Ledger.parse("clinic-1")
            ('clinic', 1)
        """
        budget, _, number = str(charge_id).rpartition("-")
        if not budget or not number.isdecimal() or len(number) > 9:
            raise InvalidInputError("charge_id", charge_id, "must be an id, like 'digits-3'")
        return budget, int(number)


def charge_of(history: History, number: int) -> Charge:
    """Return a charge of a budget.

    Raises:
        UnknownChargeError: If it has none of this number.
    """
    try:
        return history.charges[number]
    except KeyError:
        raise UnknownChargeError(f"budget {history.name!r} has no charge {number}.") from None
