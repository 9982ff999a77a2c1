"""One charge asks the database as often however long the log is."""

from __future__ import annotations

import sqlalchemy as sa

from privtune.accounting import Gaussian
from privtune.ledger import Budget, ChargeRequest, Ledger


def test_a_charge_reads_and_writes_as_much_however_long_the_log_is(sqlite_url: str) -> None:
    asked: list[int] = []

    def count(_conn, _cursor, _statement, parameters, _context, many) -> None:
        asked.append(len(parameters) if many else 1)

    def charge(ledger: Ledger) -> int:
        asked.clear()
        ledger.reserve("b", [ChargeRequest(Gaussian(100.0))])
        return sum(asked)

    sa.event.listen(sa.Engine, "before_cursor_execute", count)
    try:
        with Ledger(sqlite_url) as ledger:
            ledger.create_budget(Budget(8.0, 1e-5, name="b"))
            ledger.settle(
                ledger.start(ledger.reserve("b", [ChargeRequest(Gaussian(9.0))])[0].id).id
            )
            costs = [charge(ledger) for _ in range(20)]
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", count)
    assert 0 < costs[-1] <= costs[1]
