"""The study behind ``prior: public`` runs, and its README shows what is shipped."""

import json
import sys

import pytest

from studies.priors import run
from tests.tiers import ROOT

pytestmark = pytest.mark.slow


def test_smoke(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run", "--smoke"])
    monkeypatch.setattr(run, "PACKAGE", None)  # nothing is written
    run.main()
    *rows, last = capsys.readouterr().out.splitlines()
    assert [json.loads(row)["task"] for row in rows] == 2 * ["iris-logistic"] + 2 * [
        "breast-cancer-logistic"
    ]
    assert all(json.loads(row)["learning_rate"] in run.RATES for row in rows)
    assert last.startswith("median ")


def test_the_readme_shows_what_is_shipped():
    shipped = json.loads(run.PACKAGE.read_text("utf-8"))["learning_rate"]
    readme = (ROOT / "studies/priors/README.md").read_text("utf-8")
    for row in shipped["rows"]:
        assert f"| {row['task']} | {row['epsilon']:g} | {row['records']:,} |" in readme
    assert f"the median {shipped['law']['median']:g} is" in readme
