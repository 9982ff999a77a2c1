"""A database that is restarted in mid-round: workers wait and go on, and nothing is counted twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from privtune.accounting import Gaussian, Geometric, PrivateSelection
from privtune.execution import table
from privtune.execution.launchers import wait_for
from privtune.execution.table import RowResult, make_rounds, patiently, work_through
from privtune.files import OwnFolder
from privtune.ledger import Budget, ChargeRequest, Ledger, LedgerConnectionError
from privtune.ledger.rounds import Lease, Rounds
from privtune.ledger.schema import tasks
from tests.execution import workers
from tests.ledger.conftest import postgres_url

__all__ = ["postgres_url"]

EVENT = PrivateSelection(Gaussian(20.0), Geometric(10))


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_LONGEST_PAUSE", 0.01)


def open_round(ledger: Ledger, count: int) -> str:
    ledger.create_budget(Budget(4.0, 1e-5, name="b"))
    [charge] = ledger.reserve("b", [ChargeRequest(EVENT)])
    return make_rounds(ledger).open(charge.id, count=count).charge_id


def restarting(monkeypatch: pytest.MonkeyPatch, name: str, *, late: bool) -> list[int]:
    """Let every second call of a method of rounds meet a restart: before its commit, or after."""
    calls: list[int] = []
    whole = getattr(Rounds, name)

    def call(self: Rounds, *args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) % 2 and not late:
            raise LedgerConnectionError("the connection failed")
        done = whole(self, *args, **options)
        if len(calls) % 2:
            raise LedgerConnectionError("the connection failed")
        return done

    monkeypatch.setattr(Rounds, name, call)
    return calls


@pytest.mark.quick
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["lease_some", "complete_some", "open_count"])
def test_a_restart_at_any_question_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, late: bool
) -> None:
    with Ledger(f"sqlite:///{tmp_path / 'p.db'}") as ledger:
        charge = open_round(ledger, 6)
        rounds = make_rounds(ledger, lease_seconds=600.0)  # nobody waits for one to end
        with monkeypatch.context() as patch:
            calls = restarting(patch, name, late=late)
            work_through(rounds, charge, workers.numbers, stack=2, lease_seconds=600.0)
        assert len(calls) >= 2
        opened = rounds.find(charge)
        assert opened is not None
        expected = [int.from_bytes(opened.seed(n)[:6]) / 2**48 for n in range(6)]
        assert [row.score for row in rounds.results(charge)] == expected
        assert len(ledger.charges("b")) == 1
        with ledger.log.storage.read() as connection:
            assert set(connection.execute(sa.select(tasks.c.attempts)).scalars()) == {1}


@pytest.mark.quick
@pytest.mark.parametrize("late", [False, True])
def test_a_restart_while_results_are_handed_in_together_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    dropped: list[int] = []

    def run(leases: Sequence[Lease]) -> Iterator[RowResult]:
        for done in workers.numbers(leases):
            number = done.lease.number
            more = number != leases[-1].number
            yield replace(done, drop=partial(dropped.append, number), more=more)

    with Ledger(f"sqlite:///{tmp_path / 'p.db'}") as ledger:
        charge = open_round(ledger, 6)
        rounds = make_rounds(ledger, lease_seconds=600.0)
        with monkeypatch.context() as patch:
            calls = restarting(patch, "complete_some", late=late)
            work_through(rounds, charge, run, stack=3, lease_seconds=600.0)
        assert len(calls) == 4, "a stack is one transaction, which is asked for twice"
        opened = rounds.find(charge)
        assert opened is not None
        expected = [int.from_bytes(opened.seed(n)[:6]) / 2**48 for n in range(6)]
        assert [row.score for row in rounds.results(charge)] == expected
        # Asked twice, what was committed the first time came second: it is dropped as ever.
        assert dropped == (list(range(6)) if late else [])


@pytest.mark.quick
def test_a_database_that_stays_away_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "PATIENCE", 0.05)

    def away() -> int:
        raise LedgerConnectionError("the connection failed")

    with pytest.raises(LedgerConnectionError):
        patiently(away)
    with pytest.raises(LedgerConnectionError):
        wait_for(lambda: patiently(away), lambda: False)


@pytest.mark.postgres
def test_every_session_is_ended_in_mid_round(postgres_url: str) -> None:
    with Ledger(postgres_url) as ledger, Ledger(postgres_url) as other:
        charge = open_round(ledger, 5)
        rounds = make_rounds(ledger, lease_seconds=2.0)
        sessions: set[int] = set()

        def note(connection: Any, _record: object, _proxy: object) -> None:
            sessions.add(connection.info.backend_pid)

        sa.event.listen(ledger.log.storage.engine, "checkout", note)

        def run(leases: Sequence[Lease]) -> Iterator[RowResult]:
            for done in workers.numbers(leases):
                with other.log.storage.write() as connection:
                    for pid in sessions:
                        connection.execute(sa.select(sa.func.pg_terminate_backend(pid)))
                sessions.clear()
                yield done

        assert work_through(rounds, charge, run, stack=2, lease_seconds=2.0) == 5
        assert len(rounds.results(charge)) == 5
        assert len(ledger.charges("b")) == 1


@pytest.mark.postgres
def test_a_lock_whose_session_was_ended_is_let_go_of_without_a_word(
    postgres_url: str, tmp_path: Path
) -> None:
    with Ledger(postgres_url) as ledger, Ledger(postgres_url) as other:
        sessions: list[int] = []
        sa.event.listen(
            ledger.log.storage.engine,
            "checkout",
            lambda connection, *_: sessions.append(connection.info.backend_pid),
        )
        with ledger.log.storage.hold("study", OwnFolder(tmp_path, "id").file) as alone:
            assert alone
            with other.log.storage.write() as connection:
                for pid in sessions:
                    connection.execute(sa.select(sa.func.pg_terminate_backend(pid)))
        with other.log.storage.hold("study", OwnFolder(tmp_path, "id").file) as alone:
            assert alone


@pytest.mark.quick
def test_a_worker_that_was_cut_off_loses_its_rows_and_not_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ledger(f"sqlite:///{tmp_path / 'p.db'}") as ledger:
        charge = open_round(ledger, 4)
        rounds = make_rounds(ledger, lease_seconds=0.05)
        dropped: list[int] = []

        def late(leases: Sequence[Lease]) -> Iterator[RowResult]:
            with monkeypatch.context() as patch:
                patch.setattr(Rounds, "renew_some", lambda self, leases: tuple(leases))
                # Beyond the end of its leases, somebody else does the round.
                work_through(rounds, charge, workers.numbers, stack=4, lease_seconds=60.0)
            for lease in leases:
                yield RowResult(lease, -1.0, {}, drop=lambda: dropped.append(1))

        work_through(rounds, charge, late, stack=3, lease_seconds=60.0)
        assert len(dropped) == 3
        assert [row.number for row in rounds.results(charge)] == [0, 1, 2, 3]
        assert all(row.score >= 0 for row in rounds.results(charge))
        assert len(ledger.charges("b")) == 1


@pytest.mark.parametrize(("short", "fewest"), [(float("inf"), 6), (-1.0, 40)])
def test_short_rows_are_leased_many_at_once_and_run_in_their_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: float, fewest: int
) -> None:
    monkeypatch.setattr(table, "_SHORT", short)
    stacks: list[int] = []
    leases: list[int] = []
    whole = Rounds.lease_some

    def lease_some(self: Rounds, *args: Any, **options: Any) -> Any:
        found = whole(self, *args, **options)
        leases.extend([len(found)] if found else [])
        return found

    def run(rows: Sequence[Lease]) -> Iterator[RowResult]:
        stacks.append(len(rows))
        return workers.numbers(rows)

    monkeypatch.setattr(Rounds, "lease_some", lease_some)
    with Ledger(f"sqlite:///{tmp_path / 'p.db'}") as ledger:
        charge = open_round(ledger, 120)
        assert work_through(make_rounds(ledger), charge, run, stack=3) == 120
        assert max(stacks) == 3
        assert sum(leases) == 120
        assert len(leases) == fewest, leases
