"""Targets of single arms: weights, and the most runs that fit."""

from __future__ import annotations

import pytest

from privtune.accounting import Composed, epsilon
from privtune.errors import PrivTuneError
from privtune.study import plan_study
from tests.study.conftest import FIXED, toy_spec


def _auto(price: float, **options: object) -> dict:
    return {
        "name": "auto",
        "strategy": "papernot-steinke",
        "mean_runs": "auto",
        "training_epsilon": price,
        **options,
    }


def test_an_arm_of_twice_the_weight_gets_twice_the_target() -> None:
    arms = [FIXED, {"name": "hyfree", "strategy": "hyfreedp", "weight": 2}]
    planned = plan_study(toy_spec(arms=arms))
    one, two = (epsilon(plan.event, 1e-5).epsilon for plan in planned.plans)
    assert two / one == pytest.approx(2.0, rel=5e-3)
    together = epsilon(Composed(tuple(plan.event for plan in planned.plans)), 1e-5).epsilon
    assert 0.99 * 6.0 < together <= 6.0
    assert planned.total.epsilon == together


def test_the_most_runs_that_fit_beside_another_arm() -> None:
    planned = plan_study(toy_spec(arms=[FIXED, _auto(3.0)]))
    fixed, auto = planned.plans
    assert 2.99 < epsilon(auto.event.event, 1e-5).epsilon <= 3.0
    alone = [epsilon(plan.event, 1e-5).epsilon for plan in (fixed, auto)]
    assert alone[0] == pytest.approx(alone[1], rel=5e-3)
    assert auto.runs.expected_runs > 1.5
    assert 0.99 * 6.0 < planned.total.epsilon <= 6.0


def test_a_weight_makes_room_for_runs_that_did_not_fit() -> None:
    with pytest.raises(PrivTuneError, match=r"'auto'.*single run"):
        plan_study(toy_spec(arms=[FIXED, _auto(5.0)]))
    planned = plan_study(toy_spec(arms=[FIXED, _auto(5.0, weight=4)]))
    assert planned.total.epsilon <= 6.0
    assert planned.plans[1].runs.expected_runs >= 1.0


def test_runs_dearer_than_the_whole_budget_are_refused() -> None:
    with pytest.raises(PrivTuneError, match=r"'auto'.*single run"):
        plan_study(toy_spec(arms=[FIXED, _auto(8.0)]))
    with pytest.raises(PrivTuneError, match=r"'auto'.*single run"):
        plan_study(toy_spec(arms=[_auto(8.0)]))
