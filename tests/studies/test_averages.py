"""The study of averages: a cell of it comes out again, and its page says what its file says."""

from __future__ import annotations

import csv

import pytest

from studies.four_tasks.averages import AVERAGES, FILE, RATES, SEARCHES, fill, summary
from studies.four_tasks.run import EPSILONS, SEEDS, TASKS
from studies.sheet import by


def recorded() -> list[dict[str, str]]:
    with FILE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_recorded_cell_comes_out_again():
    found = fill("table", 4.0, 0, "dowg")
    (kept,) = (
        row
        for row in recorded()
        if (row["task"], row["epsilon"], row["seed"], row["method"])
        == ("table", "4.0", "0", "dowg")
    )
    for average in AVERAGES:
        assert found[0][average] == pytest.approx(float(kept[average]), abs=0.005), average


@pytest.mark.quick
def test_every_training_is_there_and_the_page_shows_the_file():
    rows = recorded()
    trained = [row for row in rows if row["method"] not in SEARCHES]
    each = len(TASKS) * len(EPSILONS) * SEEDS
    assert len(trained) == each * sum(max(1, len(rates)) for rates in RATES.values())
    assert all(
        len(group) == SEEDS
        for group in by(trained, "task", "epsilon", "method", "learning_rate").values()
    )
    assert summary(rows) in FILE.with_name("AVERAGES.md").read_text("utf-8")
