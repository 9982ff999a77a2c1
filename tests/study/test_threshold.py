"""Selection up to a known score: the round ends at the first row that reaches it, and keeps quiet."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from privtune.execution.table import make_rounds
from privtune.ledger import Ledger
from privtune.ledger.rounds import SKIPPED
from privtune.strategies import Release
from privtune.study import Study
from tests.study.conftest import toy_spec
from tests.study.test_workers import worker
from tests.toy import curated

NEVER = 0.0  # a loss is above 0, and this seed's noise is less
SEED = 5


def make(folder: Path, threshold: float) -> Study:
    arm = {"name": "arm", "strategy": "liu-talwar", "mean_runs": 12, "threshold": threshold}
    budget = {"name": "toy", "epsilon": 40.0, "delta": 1e-5}
    scoring = {"metric": "loss", "bound": 4.0}
    spec = toy_spec(arms=[arm], seed=SEED, budget=budget, scoring=scoring)
    return Study.create(spec, f"sqlite:///{folder / f'{threshold}.db'}")


def run(folder: Path, threshold: float, workers: int = 0) -> tuple[Study, Release]:
    study = make(folder, threshold)
    with ExitStack() as running:
        for _ in range(workers):
            running.enter_context(worker(study.storage))
        (release,) = study.run(executor="external" if workers else None)
    return study, release


def rows(study: Study) -> list[bool]:
    """Whether each row of the round was run."""
    with Ledger(study.storage) as ledger:
        (charge,) = ledger.charges("toy")
        return [SKIPPED not in row.result for row in make_rounds(ledger).results(charge.id)]


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The scores of all K rows, from a study of the same seed whose threshold nothing reaches."""
    study, release = run(tmp_path_factory.mktemp("all"), NEVER)
    assert release.is_nothing
    assert all(rows(study)), "without a row that reaches it, every row runs"
    return [trial["score"] for trial in curated(study).sealed_trials("arm")]


@pytest.fixture(scope="module")
def first(scores: list[float]) -> int:
    """A row whose score is clearly above those before it, with many rows after it."""
    found = [n for n in range(1, 5) if scores[n] > max(scores[:n]) + 1e-3]
    assert found
    assert len(scores) > found[0] + 8, "the seed was chosen so that there is something to save"
    return found[0]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_the_first_row_that_reaches_it_is_released_and_ends_the_round(
    tmp_path: Path, scores: list[float], first: int, workers: int
) -> None:
    study, release = run(tmp_path, scores[first] - 5e-4, workers)
    assert release.score == pytest.approx(scores[first], abs=1e-6)
    ran = rows(study)
    assert len(ran) == len(scores), "K was drawn as ever"
    assert all(ran[: first + 1])
    assert not all(ran)


def test_how_many_ran_stays_sealed(tmp_path: Path, scores: list[float], first: int) -> None:
    study, release = run(tmp_path, scores[first] - 5e-4)
    whole = make(tmp_path, NEVER)
    (plan,) = study.plans
    assert release.cost.gradient_evaluations == plan.expected_gradient_evaluations
    assert plan.expected_gradient_evaluations == whole.plans[0].expected_gradient_evaluations
    assert plan.event == whole.plans[0].event
    exported = json.dumps(study.export())
    assert SKIPPED not in exported
    assert repr(scores[0]) not in exported
    assert not (study.folder / "sealed" / "arm").exists()
