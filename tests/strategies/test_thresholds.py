"""A threshold lies within what its metric can be: else the arm would be charged for nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from privtune.errors import InvalidInputError
from privtune.strategies import LiuTalwar, Plan, Scoring
from privtune.tasks import Score
from tests.strategies.world import context
from tests.toy import blobs


def plan_of(threshold: Any, scoring: Scoring, **facts: Any) -> Plan:
    task = replace(blobs(), **facts)
    return LiuTalwar(mean_runs=3, threshold=threshold).plan(
        context(task=task, scoring=scoring), epsilon=4.0
    )


NUMBERS = {"classes": None, "target_range": (0.0, 10.0)}
TWO = {"classes": 2}
SHARES = ("accuracy", "balanced_accuracy", "macro_f1", "top_k", "auc", "f1")
CASES: list[tuple[Scoring, dict[str, Any], float, float]] = [
    *((Scoring(metric=name), TWO, 0.0, 1.0) for name in SHARES),
    (Scoring(), {}, 0.0, 1.0),
    (Scoring(metric="loss", bound=4.0), {}, -4.0, 0.0),
    (Scoring(metric="perplexity", bound=4.0), {}, -math.exp(4.0), -1.0),
    (Scoring(), NUMBERS, -10.0, 0.0),
    (Scoring(metric="mae", bound=3.0), NUMBERS, -3.0, 0.0),
    (Scoring(metric="mse"), NUMBERS, -100.0, 0.0),
    (Scoring(metric="r2"), NUMBERS, -1.0, 1.0),
    (Scoring.of(Score(lambda model, x, y: y, bound=2.0)), {}, -2.0, 2.0),
    (Scoring.of(Score(lambda model, x, y: y, bound=2.0, maximize=True)), {}, -2.0, 2.0),
]


@pytest.mark.parametrize(("scoring", "facts", "least", "most"), CASES)
def test_a_threshold_beyond_what_scores_can_be_is_refused(
    scoring: Scoring, facts: dict[str, Any], least: float, most: float
) -> None:
    wide = most - least
    for threshold in (most + 1e-9 * wide, most + 0.5, most + 90.0):
        with pytest.raises(InvalidInputError, match=r"so no candidate reaches it.*go from"):
            plan_of(threshold, scoring, **facts)
    for threshold in (least, least - 0.5, least - 90.0):
        with pytest.raises(InvalidInputError, match=r"so any candidate reaches it.*go from"):
            plan_of(threshold, scoring, **facts)
    for threshold in (most, least + 0.01 * wide, 0.5 * (least + most)):
        assert plan_of(threshold, scoring, **facts).threshold == threshold


@pytest.mark.parametrize("name", SHARES)
def test_percents_are_answered_with_the_share(name: str) -> None:
    with pytest.raises(InvalidInputError, match=r"90 is no share: write 0\.9\.$"):
        plan_of(90, Scoring(metric=name), **TWO)


def test_a_loss_is_answered_with_its_minus() -> None:
    with pytest.raises(InvalidInputError, match=r"its negative. Write -0\.5\.$"):
        plan_of(0.5, Scoring(metric="loss", bound=4.0))


@pytest.mark.parametrize("threshold", [math.nan, math.inf, -math.inf, True, "0.9"])
def test_a_threshold_is_a_number(threshold: Any) -> None:
    with pytest.raises(InvalidInputError, match="threshold"):
        plan_of(threshold, Scoring())
