"""Workers that somebody starts anywhere: one charge, the same release, nothing told but names."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import privtune
from privtune.ledger import Ledger
from privtune.strategies import PapernotSteinke
from privtune.study import Study
from privtune.study.failures import ArmStoppedError
from privtune.study.lifecycle import Life, Stage
from privtune.study.workers import serve
from tests.ledger.campaigns import processes
from tests.study.conftest import toy_spec
from tests.study.elsewhere import BREAK, PATHS, TERMS
from tests.study.test_lifecycle import WARMED
from tests.tiers import PATIENCE

ARM = {"name": "arm", "strategy": "papernot-steinke", "mean_runs": 4}


def work(url: str, options: dict[str, Any], environment: dict[str, str]) -> None:
    """Be a worker. Module level, to be started elsewhere."""
    os.environ.update(environment)
    serve(url, **{"idle_exit": PATIENCE, **options})


@contextmanager
def worker(url: str, environment: dict[str, str] | None = None, **options: Any) -> Iterator[Any]:
    """Start a worker, and end it at last."""
    args = (url, options, environment or {})
    process = processes(WARMED).Process(target=work, args=args)
    process.start()
    try:
        yield process
    finally:
        process.terminate()
        process.join()


def drive(url: str) -> None:
    """Run the study `toy` on workers. Module level, to be started elsewhere."""
    with closing(Study("toy", url)) as study:
        study.run(executor="external")


def charges(url: str, budget: str = "toy") -> int:
    with Ledger(url) as ledger:
        return len(ledger.charges(budget))


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    limit = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.1)


@pytest.fixture
def inline(tmp_path: Path) -> privtune.Study:
    study = Study.create(toy_spec(arms=[ARM], seed=4), f"sqlite:///{tmp_path / 'inline.db'}")
    study.run()
    return study


def test_a_driver_that_is_killed_comes_back_to_what_workers_did(
    storage: str, inline: privtune.Study
) -> None:
    Study.create(toy_spec(arms=[ARM], seed=4), storage).close()
    driver = processes(WARMED).Process(target=drive, args=(storage,))
    driver.start()
    with closing(Life("toy", storage)) as life:
        (arm,) = life.arms().values()
        eventually(lambda: life.stage(arm.plan) is Stage.STARTED)
    driver.kill()
    driver.join()
    assert serve(storage, study="toy", idle_exit=0.0) > 0, "workers need no driver"
    with closing(Study("toy", storage)) as study:
        (release,) = study.run(executor="external")
    (expected,) = inline.releases()
    assert release.params == expected.params
    assert torch.allclose(release.weights, expected.weights, atol=1e-5)
    assert charges(storage) == 1


@pytest.mark.slow
def test_workers_import_what_is_given_by_its_path(storage: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"strategy": PapernotSteinke(mean_runs=3), **TERMS}
    task = privtune.make_task("tests.study.elsewhere:conditional", **PATHS)
    budget = privtune.Budget(4.0, 1e-5, name="b")

    def make(url: str, executor: str) -> privtune.Study:
        return privtune.create_study("s", budget=budget, storage=url, seed=3, executor=executor)

    expected = make(f"sqlite:///{tmp_path / 'inline.db'}", "inline").optimize(task, **options)
    with worker(storage, study=None):
        release = make(storage, "external").optimize(task, **options)
    assert release.params == expected.params
    assert torch.allclose(release.weights, expected.weights, atol=1e-5)
    assert charges(storage, "b") == 1


@pytest.mark.slow
def test_an_error_in_a_worker_stops_the_arm_and_is_the_curators(
    storage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    spec = toy_spec(arms=[ARM], seed=4, task="tests.study.elsewhere:fragile")
    study = Study.create(spec, storage)
    with worker(storage, {BREAK: "record 17 is odd"}), pytest.raises(ArmStoppedError):
        study.run(executor="external")
    assert "record 17" in Study("toy", storage, curator=True).failures("arm")[0]["traceback"]
    assert "record 17" not in capfd.readouterr().err


def test_a_worker_leaves_after_the_rows_that_it_was_given(storage: str) -> None:
    study = Study.create(toy_spec(arms=[{**ARM, "mean_runs": 12}], seed=2), storage)
    caught: list[BaseException] = []

    def run() -> None:
        try:
            study.run(executor="external")
        except BaseException as error:
            caught.append(error)

    driver = threading.Thread(target=run)
    driver.start()
    with closing(Life("toy", storage)) as life:
        (arm,) = life.arms().values()
        eventually(lambda: life.stage(arm.plan) is Stage.STARTED)
    with worker(storage, study="toy", most=1) as one:
        one.join(120)
        assert one.exitcode == 0
    with worker(storage, study="toy"):
        driver.join(120)
    assert not driver.is_alive()
    assert not caught
    assert len(study.releases()) == 1
