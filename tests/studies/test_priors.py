"""What the package ships for ``prior: public`` and ``public-rate`` is made of the recorded results."""

import math

import pytest

from studies.priors import run


@pytest.mark.quick
def test_the_package_ships_what_was_measured():
    rows = run.SHEET.read(run.SHEET.folder / "results.csv")
    assert run.PACKAGE.read_text("utf-8") == run.shipped(rows)
    readme = (run.SHEET.folder / "README.md").read_text("utf-8")
    assert f"the median {run.law_of(rows, 'dpsgd', 'constant')['median']:g} is" in readme


@pytest.mark.quick
def test_some_of_the_cells_may_run_alone(tmp_path, capsys):
    """A single cell has no spread, so no law, and the tables show what there is."""
    out = tmp_path / "results.csv"
    command = ["--smoke", "--out", str(out), "--only", "task=iris-logistic", "epsilon=1.0"]
    assert run.SHEET.main([*command, "method=dpsgd", "schedule=linear"]) == 0
    (cell,) = {tuple(row[name] for name in run.SHEET.key) for row in run.SHEET.read(out)}
    assert cell == ("iris-logistic", "1.0", "dpsgd", "linear")
    assert "| iris-logistic | 1 | 90 | 15 | 30 | – |" in capsys.readouterr().out


@pytest.mark.quick
def test_laws_of_some_of_the_cells_are_not_shipped(monkeypatch, tmp_path, capsys):
    rows = run.SHEET.read(run.SHEET.folder / "results.csv")
    monkeypatch.setattr(run.Sheet, "read", lambda *_: rows[: len(rows) // 2])
    monkeypatch.setattr(run, "PACKAGE", tmp_path / "priors.json")
    monkeypatch.setattr(run.sys, "argv", ["run", "--no-run", "--write"])
    assert run.main() == 1
    assert "cells are missing" in capsys.readouterr().err
    assert not run.PACKAGE.exists()


@pytest.mark.quick
def test_the_guess_loses_least():
    """Two cells, whose best rates are 1 and 4; the second is flat, so the guess suits the first."""
    first = {1.0: 0.9, 2.0: 0.5, 4.0: 0.1}
    second = {1.0: 0.79, 2.0: 0.79, 4.0: 0.8}
    rows = [
        {
            "task": task,
            "epsilon": "1.0",
            "method": "dp-adam",
            "schedule": "linear",
            "rate": str(rate),
            "accuracy": str(value),
            "size": "0.5",
        }
        for task, curve in (("digits-mlp", first), ("digits-cnn", second))
        for rate, value in curve.items()
    ]
    assert run.guess_of(rows, "dp-adam", "linear") <= 1.0
    share = run.guess_of(rows, "dp-adam", "linear", tasks=["digits-cnn"], share=True)
    assert share >= 4.0 / 0.5
    assert math.isnan(run.guess_of(rows, "dp-adam", "linear", tasks=["mnist-mlp"]))
