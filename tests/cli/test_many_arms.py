"""What commands read of a study grows as the number of its arms does, not as its square."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from privtune import plots
from privtune.plots.study_charts import shares
from privtune.plots.style import MOST_TRACES
from privtune.study import Study, rows
from privtune.study import run as running
from tests.cli.conftest import Cli
from tests.study.conftest import toy_spec

COMMANDS = {
    "show": ("study", "show", "toy"),
    "compare": ("study", "compare", "toy"),
    "html": ("study", "compare", "toy", "--html", "page.html"),
    "budget": ("budget", "show", "toy"),
}


def made(folder: Path, count: int, *, run: bool = True) -> str:
    """Make a study of so many arms, and release them; their noise is of three kinds."""
    folder.mkdir()
    arms = [
        {
            "name": f"arm-{number:02d}",
            "strategy": "fixed",
            "weight": 1.0 + 0.1 * (number % 3),
            "parameters": {"learning_rate": 0.5 + 0.01 * number, "max_grad_norm": 1.0},
        }
        for number in range(count)
    ]
    storage = f"sqlite:///{folder / 'privtune.db'}"
    budget = {"name": "toy", "epsilon": 40.0, "delta": 1e-5}
    with closing(Study.create(toy_spec(arms=arms, epochs=1, budget=budget), storage)) as study:
        if run:
            study.run()
    return storage


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count statements that are sent to databases, and rows of arms that are read."""
    found: Counter[str] = Counter()
    read = rows._read_arm

    def counting(row: sa.Row, study: rows.StudyRow) -> rows.Arm:  # type: ignore[type-arg]
        found["rows"] += 1
        return read(row, study)

    def sent(*_: object) -> None:
        found["statements"] += 1

    sa.event.listen(sa.Engine, "before_cursor_execute", sent)
    with monkeypatch.context() as patched:
        patched.setattr(rows, "_read_arm", counting)
        yield found
    sa.event.remove(sa.Engine, "before_cursor_execute", sent)


def test_a_run_parses_an_arm_as_often_as_it_changes(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    count = 24
    storage = made(tmp_path / "many", count, run=False)
    with counted(monkeypatch) as found:
        done = cli("study", "run", "toy", "--storage", storage, "--no-mlflow")
    assert done.code == 0
    # Planned, trained, settled, announced; and once more by what reads the study after its run.
    assert count <= found["rows"] <= 6 * count
    assert re.findall(r"arm-(\d\d): released", done.out) == [f"{n:02d}" for n in range(count)]


def test_what_is_read_is_linear_in_the_number_of_arms(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        running, "rehearse", lambda *_args, **_options: 1.0
    )  # of no arm anything is read
    storages = {count: made(tmp_path / str(count), count) for count in (7, 14, 28)}
    for name, command in COMMANDS.items():
        read = {}
        for count, storage in storages.items():
            with counted(monkeypatch) as found:
                assert cli(*command, "--storage", storage).code == 0
            read[count] = found
        for what in ("rows", "statements"):
            first, second, third = (read[count][what] for count in sorted(read))
            assert third - second <= 2.2 * (second - first) + 8, (name, what, first, second, third)
    with closing(Study("toy", storages[28])) as study:
        parts = shares(study)
        assert len(parts) <= MOST_TRACES
        assert sum(added for _, added, _ in parts) == pytest.approx(study.spent().epsilon)
        assert parts[0][0] == "arm-00 to arm-01"
        reached, costs, gradients = plots.plot_comparison(study).data
        assert len(reached.y) == len(reached.error_x.array) == 28
        assert [len(costs.x), len(gradients.x)] == [28, 28]
        for curve in plots.plot_trajectories(study).data:
            assert [x for x in curve.x if x == 0] == [0] * 28
