"""Names of metrics on splits: two parts, one text, and nothing else is read as one."""

from __future__ import annotations

import re

import pytest

from privtune.errors import InvalidInputError
from privtune.training.mechanism.metric_name import SCORED_SPLITS, MetricName
from privtune.training.mechanism.metrics import METRICS
from tests.tiers import ROOT


@pytest.mark.parametrize("split", SCORED_SPLITS)
@pytest.mark.parametrize("metric", [*METRICS, "test_of_mine", "validation_tuning"])
def test_a_name_is_read_as_it_was_written(split: str, metric: str) -> None:
    name = MetricName(split, metric)
    assert str(name) == f"{split}_{metric}"
    assert MetricName.parse(str(name)) == name


@pytest.mark.parametrize(
    "text", ["", "accuracy", "test", "test_", "_accuracy", "train_accuracy", "Test_auc"]
)
def test_a_text_that_names_no_metric_on_a_split_is_refused(text: str) -> None:
    with pytest.raises(
        InvalidInputError, match="must be a split and a metric, as test_accuracy is"
    ):
        MetricName.parse(text)


def test_a_name_of_two_parts_of_which_one_is_wrong_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="train_auc"):
        MetricName("train", "auc")


def test_the_text_of_a_name_is_taken_apart_in_one_place() -> None:
    """A second reader of such texts would say something else of ``test_balanced_accuracy`` one day."""
    pattern = re.compile(
        r"partition\(\"_\"\)|(removeprefix|startswith)\(\"(test|validation|tuning)_"
    )
    readers = []
    for path in sorted((ROOT / "privtune").rglob("*.py")):
        if pattern.search(path.read_text(encoding="utf-8")):
            readers.append(path.name)
    assert not readers
