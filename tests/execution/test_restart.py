"""A PostgreSQL server that is restarted, and loses sessions to SIGKILL, while processes work on a round."""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa

from privtune.accounting import Gaussian, Geometric, PrivateSelection
from privtune.execution.launchers import run_in_processes
from privtune.execution.table import make_rounds, patiently
from privtune.ledger import Budget, ChargeRequest, Ledger, verify
from tests.execution import workers
from tests.execution.cluster import Cluster

EVENT = PrivateSelection(Gaussian(20.0), Geometric(10))
FULL = os.environ.get("PRIVTUNE_CAMPAIGN") == "full"
KILLS = 200 if FULL else 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    try:
        yield made
    finally:
        made.remove()


def disturbed(cluster: Cluster, rows: int, at: list[int], disturb: Callable[[], None]) -> list[int]:
    """Have two processes finish a round that is disturbed when so many rows are open; say when it was."""
    budget = f"b{rows}"
    with Ledger(cluster.url) as ledger:
        ledger.create_budget(Budget(4.0, 1e-5, name=budget))
        [charge] = ledger.reserve(budget, [ChargeRequest(EVENT)])
        rounds = make_rounds(ledger)
        secret = bytes(range(32))
        opened = rounds.open(charge.id, count=rows, secret=secret)
        open_count = partial(patiently, partial(rounds.open_count, charge.id))
        done: list[int] = []
        failed: list[BaseException] = []
        over = threading.Event()

        def watch() -> None:
            try:
                for left in at:
                    while open_count() > left:
                        if over.wait(0.002):
                            return
                    disturb()
                    done.append(left)
            except BaseException as error:
                failed.append(error)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            run_in_processes(
                workers.slow, (cluster.url, charge.id), slots=[None, None], open_count=open_count
            )
        finally:
            over.set()
            watcher.join()
        assert not failed, failed
        results = patiently(partial(rounds.results, charge.id))
        expected = [int.from_bytes(opened.seed(n)[:6]) / 2**48 for n in range(rows)]
        assert [row.score for row in results] == expected, "none lost, none from another seed"
        assert [row.number for row in results] == list(range(rows)), "none doubled"
        assert len(ledger.charges(budget)) == 1
        verify(ledger.log.storage, budget)
    return done


@pytest.mark.slow
@pytest.mark.postgres
def test_a_server_is_restarted_in_mid_round(cluster: Cluster) -> None:
    assert disturbed(cluster, 30, [20, 8], cluster.restart) == [20, 8]


@pytest.mark.slow
@pytest.mark.postgres
def test_sessions_are_killed_in_mid_round(cluster: Cluster) -> None:
    """Every kill ends all sessions: workers, driver and whoever looks on go on with new ones."""
    rng, engine = random.Random(5), sa.create_engine(f"{cluster.url}".replace("://", "+psycopg://"))
    killed: list[Any] = []

    def kill() -> None:
        query = sa.text(
            "SELECT pid, query FROM pg_stat_activity WHERE backend_type = 'client backend' "
            "AND pid <> pg_backend_pid() ORDER BY pid"
        )
        with suppress(sa.exc.OperationalError), engine.connect() as connection:
            sessions = connection.execute(query).all()
            if sessions:
                chosen = rng.choice(sessions)
                cluster.kill(chosen.pid)
                killed.append(chosen.query.split("\n")[0][:60])
        engine.dispose()

    rows = 5 * KILLS + 20
    at = [rows - 5 * (n + 1) for n in range(KILLS)]
    disturbed(cluster, rows, at, kill)
    logging.getLogger(__name__).info("%d sessions killed, at: %s", len(killed), set(killed))
    assert len(killed) > KILLS // 2
