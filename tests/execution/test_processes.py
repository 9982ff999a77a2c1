"""Rounds in spawned processes: a death is a retry, and nothing is counted or charged twice."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest

from privtune.accounting import Gaussian, Geometric, PrivateSelection
from privtune.errors import InvalidInputError
from privtune.execution import launchers
from privtune.execution.executor import Executor
from privtune.execution.launchers import WorkersDiedError, run_in_processes
from privtune.execution.table import make_rounds, work_through
from privtune.ledger import Budget, ChargeRequest, Ledger
from tests.execution import workers
from tests.tiers import FULL

EVENT = PrivateSelection(Gaussian(20.0), Geometric(10))
ROWS, DEATHS = (50, 20) if FULL else (16, 5)


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'p.db'}"
    with Ledger(url) as ledger:
        ledger.create_budget(Budget(4.0, 1e-5, name="b"))
    return url


def open_round(ledger: Ledger, count: int) -> str:
    [charge] = ledger.reserve("b", [ChargeRequest(EVENT)])
    return make_rounds(ledger).open(charge.id, count=count).charge_id


def test_two_processes_finish_a_round(url: str) -> None:
    with Ledger(url) as ledger:
        charge = open_round(ledger, 12)
        rounds = make_rounds(ledger)
        run_in_processes(
            workers.honest,
            (url, charge),
            slots=[None, None],
            open_count=lambda: rounds.open_count(charge),
        )
        results = rounds.results(charge)
        opened = rounds.find(charge)
    assert opened is not None
    expected = [int.from_bytes(opened.seed(n)[:6]) / 2**48 for n in range(12)]
    assert [r.score for r in results] == expected


@pytest.mark.slow
def test_killed_workers_lose_no_row(url: str, tmp_path: Path) -> None:
    with Ledger(url) as ledger:
        charge = open_round(ledger, ROWS)
        rounds = make_rounds(ledger)
        run_in_processes(
            workers.dying,
            (url, charge, str(tmp_path), DEATHS),
            slots=[None, None],
            open_count=lambda: rounds.open_count(charge),
        )
        results = rounds.results(charge)
        assert len(ledger.charges("b")) == 1, "one charge"
    assert len(list(tmp_path.glob("death-*"))) == DEATHS
    assert len(results) == ROWS
    outputs: dict[str, set[str]] = defaultdict(set)
    for path in tmp_path.glob("output-*"):
        outputs[path.name.split("-")[1]].add(path.read_text())
    assert len(list(tmp_path.glob("output-*"))) == ROWS + DEATHS, "rows were taken over"
    assert all(len(values) == 1 for values in outputs.values()), "one output a run"
    assert all(str(r.score) in outputs[str(r.number)] for r in results)


@pytest.mark.slow
def test_workers_that_only_die_are_given_up_and_the_round_goes_on(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchers, "_QUICK_DEATHS", 2)
    with Ledger(url) as ledger:
        charge = open_round(ledger, 3)
        rounds = make_rounds(ledger)

        def left() -> int:
            return rounds.open_count(charge)

        with pytest.raises(WorkersDiedError, match="What was charged stays charged"):
            run_in_processes(workers.hopeless, (url, charge), slots=[None], open_count=left)
        run_in_processes(workers.honest, (url, charge), slots=[None], open_count=left)
        assert len(rounds.results(charge)) == 3
        assert len(ledger.charges("b")) == 1


def test_an_error_lets_go_of_the_leases(url: str) -> None:
    with Ledger(url) as ledger:
        charge = open_round(ledger, 4)
        rounds = make_rounds(ledger, lease_seconds=600.0)

        def fails(_: object) -> list:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            work_through(rounds, charge, fails, stack=4)
        # Without waiting ten minutes for the leases to end:
        work_through(rounds, charge, workers.numbers, stack=4)
        assert rounds.open_count(charge) == 0


def test_no_run_at_all_is_a_round_that_is_over(url: str) -> None:
    with Ledger(url) as ledger:
        charge = open_round(ledger, 0)
        rounds = make_rounds(ledger)
        work_through(rounds, charge, workers.numbers, stack=4)
        assert rounds.results(charge) == ()


def test_an_executor_is_read_from_a_spec_and_has_as_many_jobs_as_processors() -> None:
    assert Executor.of({"type": "ray", "gpus": 0.5}, 3) == Executor("ray", 3, 0.5)
    assert Executor.of("processes", -1) == Executor.of("processes", os.cpu_count() or 1)
    with pytest.raises(InvalidInputError, match="n_jobs = -2: must be"):
        Executor.of(None, -2)
