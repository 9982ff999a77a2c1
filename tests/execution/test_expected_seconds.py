"""What an arm is expected to take: CPU time, whatever else the machine does."""

from __future__ import annotations

import multiprocessing as mp
import os
from contextlib import closing
from pathlib import Path

import pytest

from privtune.execution.trial_training import _never_below_one
from privtune.study import Study
from tests.study.conftest import FIXED, toy_spec

pytestmark = pytest.mark.slow


def spin(stop: object) -> None:
    while not stop.is_set():  # type: ignore[attr-defined]
        sum(range(10_000))


def seconds_of(folder: Path, name: str) -> dict[str, float]:
    """Return the expected CPU seconds of the arms of a study, as it shows them."""
    arms = [FIXED, {"name": "selection", "strategy": "papernot-steinke", "mean_runs": 4}]
    spec = toy_spec(name=name, arms=arms, budget={"name": name, "epsilon": 6.0, "delta": 1e-5})
    with closing(Study.create(spec, f"sqlite:///{folder / 'privtune.db'}")) as study:
        study.run()
        return dict(study.compare()["cpu_seconds"])


def test_a_loaded_minute_is_not_an_arm_s_cost(tmp_path: Path) -> None:
    """Four times as many busy processes as cores: the clock on the wall would say three times as much."""
    quiet = seconds_of(tmp_path, "quiet")
    context = mp.get_context("spawn")
    stop = context.Event()
    busy = [context.Process(target=spin, args=(stop,)) for _ in range(4 * (os.cpu_count() or 1))]
    for process in busy:
        process.start()
    try:
        loaded = seconds_of(tmp_path, "loaded")
    finally:
        stop.set()
        for process in busy:
            process.join()
    for arm, seconds in quiet.items():
        assert loaded[arm] < 2.5 * seconds, (quiet, loaded)


def test_a_selection_never_looks_cheaper_than_one_training(tmp_path: Path) -> None:
    seconds = seconds_of(tmp_path, "toy")
    assert seconds["selection"] >= 0.999 * seconds["defaults"]


def test_stacks_and_single_trainings_are_told_in_one_order() -> None:
    one = (None, "schedule", "noise", 1, 16)
    ten = (None, "schedule", "noise", 10, 16)
    other = (None, "another schedule", "noise", 10, 16)
    assert _never_below_one({one: 1.0}, ten, 0.05) == 0.1
    assert _never_below_one({one: 1.0}, ten, 0.5) == 0.5
    assert _never_below_one({ten: 0.05}, one, 1.0) == 0.5
    assert _never_below_one({other: 0.05}, one, 1.0) == 1.0
