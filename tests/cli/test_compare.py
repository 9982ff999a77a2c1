"""The comparison at any width and in any form, and the options of a strategy."""

from __future__ import annotations

import csv
import inspect
import io
import json
import re
import sys
from pathlib import Path

import matplotlib
import pytest
import yaml

import privtune
from privtune.api import SpecFields
from privtune.strategies.catalog import describe
from privtune.study import StudySpec
from tests.cli.conftest import Cli
from tests.study.conftest import toy_spec


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_word_is_broken_at_any_width(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    from privtune.cli import _common

    monkeypatch.setattr(_common, "console", lambda: Console(width=width))
    cells = ("papernot-steinke", "2.500", "0.9100 [0.8800, 0.9400]", "1,234,567")
    names = ("selection-of-many", "a-name-of-an-arm-that-is-quite-long")
    columns = ("arm", "strategy", "ε", "test auc", "gradients")
    _common.show_table(columns, [(name, *cells) for name in names], keep_lines=True)
    words = capsys.readouterr().out.split()
    for word in (*names, *cells[:2], "[0.8800,", "1,234,567"):
        assert word in words


def test_every_form_of_a_comparison(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, at = tmp_path / "toy.yaml", ("--storage", f"sqlite:///{tmp_path / 'p.db'}")
    fixed = {"strategy": "fixed", "parameters": {"learning_rate": 0.5, "max_grad_norm": 1.0}}
    arms = [{"name": name, **fixed} for name in ("one", "two")]
    spec.write_text(yaml.safe_dump(toy_spec(arms=arms, epochs=1).model_dump(mode="json")))
    assert cli("study", "create", str(spec), *at).code == 0
    plot = ("study", "compare", "toy", *at, "--plot", str(tmp_path / "chart.html"))
    early = cli(*plot)
    assert early.code == 1
    assert "no released arm" in early.err
    assert cli("study", "run", "toy", *at, "--no-mlflow").code == 0
    assert cli(*plot).code == 0
    page = (tmp_path / "chart.html").read_text("utf-8")
    (drawn,) = re.findall(r'id="arms-data">(.*?)</script>', page, re.DOTALL)
    reached = json.loads(drawn)["data"][0]
    assert sorted(reached["y"]) == ["one", "two"]
    assert all(above > 0 for above in reached["error_x"]["array"])
    assert cli(*plot, "--csv").code == 2
    for kind, begins in {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}.items():
        assert cli(*plot[:-1], str(tmp_path / f"chart.{kind}")).code == 0
        assert (tmp_path / f"chart.{kind}").read_bytes().startswith(begins)
    words = ("one", "two", "ε (δ", "test accuracy", "%")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        assert cli(*plot[:-1], str(tmp_path / "chart.svg")).code == 0
    assert all(word in (tmp_path / "chart.svg").read_text("utf-8") for word in words)
    refused = cli(*plot[:-1], str(tmp_path / "chart.jpg"))
    assert (refused.code, ".html, .png, .svg, .pdf" in refused.err) == (2, True)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        patch.setitem(sys.modules, "matplotlib.figure", None)
        missing = cli(*plot[:-1], str(tmp_path / "none.png"))
    assert (missing.code, "pip install 'privtune[ui]'" in missing.err) == (1, True)
    assert not (tmp_path / "none.png").exists()
    document = json.loads(cli("study", "compare", "toy", *at, "--json").out)
    rows = list(csv.DictReader(io.StringIO(cli("study", "compare", "toy", *at, "--csv").out)))
    assert [row["arm"] for row in rows] == [arm["arm"] for arm in document["arms"]]
    for row, arm in zip(rows, document["arms"], strict=True):
        assert float(row["epsilon"]) == arm["epsilon"]
        assert float(row["test_accuracy"]) == arm["estimates"]["test_accuracy"]["value"]
        assert float(row["test_accuracy_low"]) <= float(row["test_accuracy"])
    lines = cli("study", "compare", "toy", *at, "--md").out.splitlines()
    assert lines[0].startswith(document["headline"]["answer"])
    lines = lines[lines.index("") + 1 :]
    assert len({line.count("|") for line in lines[: 2 + len(rows)]}) == 1
    assert lines[2 + len(rows)] == ""
    assert cli("study", "compare", "toy", *at, "--md", "--csv").code == 2


def test_the_options_of_a_strategy(cli: Cli) -> None:
    assert "extrapolation" in cli("strategies", "subsampled-tuning").out
    rows = json.loads(cli("strategies", "subsampled-tuning", "--json").out)["options"]
    (option,) = [row for row in rows if row["name"] == "extrapolation"]
    assert option["what"]
    assert option["type"] != "a value"


def test_every_option_of_every_method_and_strategy_is_described() -> None:
    from privtune.strategies import STRATEGIES
    from privtune.training.methods import METHODS

    for name in (*STRATEGIES, *METHODS):
        for option in describe(name)["options"]:
            assert option["what"], f"{name}: {option['name']}"


def test_create_study_takes_every_field_of_a_spec_by_name() -> None:
    given = set(inspect.signature(privtune.create_study).parameters)
    of_the_call = {"storage", "load_if_exists", "tracking", "force", "fields"}
    of_the_spec = given - of_the_call | set(SpecFields.__annotations__)
    assert of_the_spec == set(StudySpec.model_fields)
