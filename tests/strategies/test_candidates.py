"""Selection over methods: the list's candidates cost the same, are drawn uniformly, and say who won."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import chisquare

from privtune.accounting import Adjacency, WorstOf, epsilon
from privtune.errors import PrivTuneError
from privtune.strategies import LiuTalwar, PapernotSteinke, Plan
from privtune.study import Study
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.streams import Streams
from privtune.views.record import arm_record, budget_view
from tests.strategies.world import RATE, context
from tests.study.conftest import toy_spec

CLIP = {"max_grad_norm": 1.0}
LIST: list[dict[str, Any]] = [
    {"method": "hyfreedp"},
    {"method": "dpsgd", "parameters": CLIP},
    {"method": "dp-adam", "parameters": {"learning_rate": 0.01, **CLIP}},
    {"method": "dp-adam", "name": "slow", "parameters": {"learning_rate": 0.001, **CLIP}},
]


@pytest.mark.quick
@pytest.mark.parametrize("cls", [PapernotSteinke, LiuTalwar])
def test_every_entry_is_paid_for(cls: type[Any]) -> None:
    plan = cls(mean_runs=4, candidates=LIST).plan(context(RATE), epsilon=2.0)
    assert 1.9 < epsilon(plan.event, 1e-5).epsilon <= 2.0
    charged = plan.event.event
    charged = getattr(charged, "events", (charged,))[0]  # beside the score's
    assert isinstance(charged, WorstOf)
    assert list(charged.events) == [t.method.event(t.schedule) for t in plan.search.trainings]
    alone = [epsilon(t.event, 1e-5).epsilon for t in plan.search.trainings]
    assert max(alone) < 1.02 * min(alone)
    again = Plan.from_dict(plan.to_dict())
    assert again.digest() == plan.digest()
    assert (
        again.search.training_of({"candidate": "slow", **LIST[3]["parameters"]})
        == (plan.search.trainings[3])
    )


@pytest.mark.quick
def test_entries_are_drawn_uniformly_and_take_what_they_need() -> None:
    plan = PapernotSteinke(mean_runs=4, candidates=LIST).plan(context(RATE), epsilon=2.0)
    space, streams = context(RATE).space, Streams(bytes(32))
    drawn = [plan.candidate(space, streams, number) for number in range(2000)]
    seen = Counter(candidate["candidate"] for candidate in drawn)
    assert set(seen) == {"hyfreedp", "dpsgd", "dp-adam", "slow"}
    assert (
        chisquare(list(seen.values())).pvalue > 1e-3
    )  # one fixed secret: it does not fail by chance
    for candidate in drawn:
        assert plan.search.training_of(candidate).method.name in (candidate["candidate"], "dp-adam")
        takes = {
            "hyfreedp": {"candidate"},
            "dpsgd": {"candidate", "learning_rate", "max_grad_norm"},
        }.get(candidate["candidate"], {"candidate", "learning_rate", "max_grad_norm"})
        assert set(candidate) == takes
        if candidate["candidate"] == "slow":
            assert candidate["learning_rate"] == 0.001
    rates = {c["learning_rate"] for c in drawn if c["candidate"] == "dpsgd"}
    assert len(rates) == seen["dpsgd"]


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"candidates": [{"name": "x"}]}, RATE, "candidate 1 of arm 'a'.*must be a mapping with a method"),
    ({"candidates": [{"method": "adam"}]}, RATE, "method = 'adam': must be one of"),
    ({"candidates": [{"method": "dpsgd", "rate": 1}]}, RATE, "it takes method, name, options, parameters"),
    ({"candidates": [LIST[0], LIST[0]]}, {}, "stand there twice: give each a name"),
    ({"candidates": [{"method": "dpsgd"}]}, RATE, "'a: dpsgd'.*also needs max_grad_norm"),
    ({"candidates": [{"method": "hyfreedp"}]}, RATE, "take no learning_rate, which the space searches"),
    ({"candidates": [{"method": "hyfreedp", "parameters": {"trainable": "head"}}]}, {}, "by the space"),
    (
        {"candidates": LIST},
        {**RATE, "epochs": {"type": "categorical", "choices": [1, 2]}},
        "the space searches epochs, which changes it",
    ),
    (
        {"candidates": LIST[2:]},
        {"trainable": {"type": "categorical", "choices": ["head", "tail"]}},
        "tail",
    ),
]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize(("options", "space", "message"), REFUSED)
def test_a_list_that_cannot_be_drawn_from_is_named(
    options: dict[str, Any], space: dict[str, Any], message: str
) -> None:
    with pytest.raises(PrivTuneError, match=message) as caught:
        PapernotSteinke(arm="a", mean_runs=4, **options).plan(context(space), epsilon=2.0)
    assert "\n" not in str(caught.value)


def test_a_search_refuses_noise_that_is_scaled_for_another_adjacency() -> None:
    """As one training does: PUR's noise for removal is half of what replacement needs."""
    bounds = {"lipschitz": 1.0, "smoothness": 0.25, "dimension": 20, "horizon": 5}
    warm = {"warmup": {"type": "float", "low": 0.0, "high": 0.5}}
    whole = Schedule(records=240, sample_rate=1.0, steps=5)
    for stated, asked in (("add-remove", "replace-one"), ("replace-one", "add-remove")):
        searched = PapernotSteinke(
            arm="a", mean_runs=2, method="pur-constant", options={**bounds, "adjacency": stated}
        )
        listed = PapernotSteinke(
            arm="a",
            mean_runs=2,
            candidates=[{"method": "pur-constant", "options": {**bounds, "adjacency": stated}}],
        )
        for strategy in (searched, listed):
            facts = context(warm, adjacency=Adjacency(asked), schedule=whole)
            with pytest.raises(
                PrivTuneError, match=f"adjacency.*= '{stated}': must be the budget's"
            ):
                strategy.plan(facts, epsilon=2.0)


@pytest.fixture
def storage(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'privtune.db'}"


def test_the_winner_is_named_in_its_release_and_in_the_tracker(storage: str) -> None:
    spec = toy_spec(
        space={"learning_rate": {"type": "float", "low": 0.1, "high": 1.0}},
        arms=[{"name": "any", "strategy": "papernot-steinke", "mean_runs": 3, "candidates": LIST}],
        seed=5,
    )
    study = Study.create(spec, storage=storage)
    (release,) = study.run()
    winner = release.params["candidate"]
    assert winner in {"hyfreedp", "dpsgd", "dp-adam", "slow"}
    record = arm_record(study, study.plans[0], release, budget_view(study))
    assert record.params["candidate"] == winner
    assert record.params["method"] == ("dp-adam" if winner == "slow" else winner)
    assert release.guarantee.epsilon <= 6.0


def test_the_tracker_says_what_the_winner_of_a_grid_was_trained_with(storage: str) -> None:
    """The noise, the rate and the steps of its own point, not of the grid's first."""
    spec = toy_spec(
        space={
            "learning_rate": {"type": "float", "low": 0.1, "high": 1.0},
            "epochs": {"type": "categorical", "choices": [1, 3]},
        },
        arms=[
            {
                "name": "grid",
                "strategy": "papernot-steinke",
                "mean_runs": 3,
                "guarantee": "common",
                "parameters": CLIP,
            }
        ],
        seed=1,
    )
    study = Study.create(spec, storage=storage)
    (release,) = study.run()
    params = arm_record(study, study.plans[0], release, budget_view(study)).params
    assert int(params["steps"]) == release.params["epochs"] * 10
    noises = {
        str(t.schedule.steps): str(t.method.noise_multiplier)
        for t in study.plans[0].search.trainings
    }
    assert params["noise_multiplier"] == noises[params["steps"]]


def test_the_part_that_is_trained_is_drawn_for_every_candidate() -> None:
    space = {"trainable": {"type": "categorical", "choices": ["head", "biases"]}}
    plan = PapernotSteinke(mean_runs=4, candidates=LIST[2:]).plan(context(space), epsilon=2.0)
    drawn = [plan.candidate(context(space).space, Streams(bytes(32)), n) for n in range(64)]
    assert {(c["candidate"], c["trainable"]) for c in drawn} == {
        (name, part) for name in ("dp-adam", "slow") for part in ("head", "biases")
    }
