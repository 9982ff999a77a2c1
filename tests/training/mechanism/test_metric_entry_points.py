"""Metrics of installed packages: everything that asks a metric asks theirs as well."""

from __future__ import annotations

import json
import re
import textwrap
import tomllib
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from privtune.accounting import Adjacency
from privtune.errors import InvalidInputError
from privtune.plugins import EntryPointError
from privtune.strategies import Reporting, ScorePlan, Scoring
from privtune.study import Study
from privtune.study.worth import expected_scores
from privtune.training.mechanism.constant import constant_answer
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.metric_name import MetricName
from privtune.training.mechanism.metrics import METRICS, registered_metrics
from privtune.training.mechanism.scoring import cross_entropy, measure_each
from privtune.training.mechanism.streams import Streams
from privtune.views.comparison import comparison_document
from tests.cli.conftest import Cli, cli
from tests.strategies.test_entry_points import Install, install
from tests.study.conftest import toy_spec
from tests.tiers import ROOT

__all__ = ["cli", "install"]

README = ROOT / "privtune" / "training" / "mechanism" / "README.md"
TERMS: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5, "adjacency": Adjacency.ADD_REMOVE}

ANSWERS = """
    @classmethod
    def constant_answer(cls, targets):
        from privtune.training.mechanism.estimates import ConstantAnswer
        return ConstantAnswer(0.25)
"""


def install_brier(install: Install, more: str = "") -> None:
    """Install the package of the README's example, with more methods of its class."""
    code, points = re.findall(r"```(?:python|toml)\n(.*?)```", README.read_text(), re.DOTALL)
    project = tomllib.loads(textwrap.dedent(points))["project"]
    entries = project["entry-points"]["privtune.metrics"]
    install("my-package", entries, group="privtune.metrics", my_package=code + more)


def test_the_readme_adds_a_metric(install: Install) -> None:
    """It is planned, measured, foretold and ordered like those built in, by the facts that it states."""
    install_brier(install)
    (entry,) = registered_metrics()
    assert (entry.name, entry.source, entry.problem) == ("brier", "my-package 1.0", "")
    assert "brier" in METRICS
    assert "brier" not in list(METRICS)
    scoring = Scoring(metric="brier")
    scoring.check(classes=3, target_range=None)
    with pytest.raises(InvalidInputError, match="must be of numbers in a declared range"):
        scoring.check(classes=None, target_range=(0.0, 1.0))
    with pytest.raises(InvalidInputError, match="metric brier takes no options"):
        Scoring(metric="brier", bound=2.0)
    plan = scoring.plan(records=500, public=False, **TERMS)
    assert plan.names == ["brier"]
    assert ScorePlan(**plan.to_dict()) == plan
    assert MetricName("test", "brier").lower_is_better
    assert Reporting.from_dict({"metric": ["brier", "accuracy"]}).exact(records=9).names == [
        "brier",
        "accuracy",
    ]
    x = torch.randn(400, 3)
    y = torch.randint(3, (400,))
    exact = scoring.exact(records=400)
    rng = Streams(bytes(32)).numpy("score", 0)
    score = measure_each(exact, torch.nn.Identity(), TensorData(x, y), rng=rng, loss=cross_entropy)
    truth = torch.nn.functional.one_hot(y, 3)
    expected = 0.5 * (x.softmax(dim=1) - truth).square().sum(dim=1).mean()
    assert score["brier"].value == pytest.approx(float(expected), rel=1e-4)
    assert score["brier"].low < score["brier"].value < score["brier"].high


def test_a_metric_from_elsewhere_says_what_a_constant_answer_reaches(install: Install) -> None:
    targets = np.array([0.0, 1.0])
    assert constant_answer("brier", targets, of_classes=True) is None
    install_brier(install, more=ANSWERS)
    answer = constant_answer("brier", targets, of_classes=True)
    assert answer is not None
    assert answer.value == 0.25


def test_a_study_chooses_by_a_metric_from_elsewhere(install: Install, tmp_path: Path) -> None:
    install_brier(install, more=ANSWERS)
    arms = [
        {"name": "search", "strategy": "papernot-steinke", "mean_runs": 2},
        {
            "name": "fixed",
            "strategy": "fixed",
            "parameters": {"learning_rate": 0.5, "max_grad_norm": 1.0},
        },
    ]
    spec = toy_spec(arms=arms, scoring={"metric": "brier"}, report={"metric": "brier"})
    storage = f"sqlite:///{tmp_path / 'p.db'}"
    with closing(Study.create(spec, storage)) as study:
        study.run()
        task = study.spec.load_task()
        (score, *_) = expected_scores(study.plans, task)
        assert (score.metric, score.rarest) == ("brier", None)  # every record counts alike
        document = comparison_document(study)
        assert document["order"]["metric"] == "test_brier"
        values = {arm["arm"]: arm["estimates"]["test_brier"]["value"] for arm in document["arms"]}
    assert all(0.0 <= value <= 1.0 for value in values.values())


METRIC = """
from privtune.training.mechanism.metrics import MeanMetric, Metric
class Mine(MeanMetric):
    name = "mine"
    summary = "mine"
"""


@pytest.mark.parametrize(
    ("name", "module", "message"),
    [
        ("mine", METRIC.replace("(MeanMetric)", "(Metric)"), "method parts and expected and ends"),
        ("mine", METRIC.replace('    summary = "mine"\n', ""), "must have a summary"),
        ("auc", METRIC.replace('"mine"', '"auc"', 1), "the name is built in"),
        ("mine", "from pathlib import Path as Mine", "must be a frozen dataclass"),
    ],
)
def test_a_metric_that_cannot_be_used_is_one_sentence(
    install: Install, name: str, module: str, message: str, cli: Cli
) -> None:
    install("bad", {name: "bad_metric:Mine"}, group="privtune.metrics", bad_metric=module)
    (entry,) = registered_metrics()
    assert entry.cls is None
    assert entry.problem.startswith(f"Metric '{name}' of bad 1.0 ")
    assert message in entry.problem
    listed = " ".join(cli("metrics").out.split())
    assert entry.problem in listed
    if name == "mine":
        with pytest.raises(EntryPointError, match=message):
            Scoring(metric="mine")


def test_metrics_are_listed_with_the_package_that_they_come_from(
    install: Install, cli: Cli
) -> None:
    install_brier(install)
    rows = {row["name"]: row for row in json.loads(cli("metrics", "--json").out)}
    assert rows.keys() == {*METRICS, "package.module:function", "brier"}
    assert rows["brier"]["from"] == "my-package 1.0"
    assert (rows["auc"]["from"], rows["auc"]["takes"]) == ("privtune", "two")
    assert rows["mae"]["options"] == ["target_range", "bound"]
    assert "brier (from my-package 1.0): half the squared distance" in cli("metrics").out
