"""Every name that a user can write stands in a closed list, and a near one is answered with the right one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

import privtune
from privtune.accounting import event_from_dict, run_law_from_dict
from privtune.accounting.events import _TYPES, DP_ACCOUNTING
from privtune.accounting.runs import _LAWS
from privtune.errors import PrivTuneError
from privtune.execution.executor import Executor
from privtune.ledger import Budget, Ledger
from privtune.names import did_you_mean
from privtune.spaces import _LAWS as DISTRIBUTIONS
from privtune.spaces import SearchSpace
from privtune.stages.spec_stages import STAGES, make_stage
from privtune.strategies import STRATEGIES, Everything, Scoring, make_strategy
from privtune.strategies.everything import SAMPLERS
from privtune.strategies.score_plan import Reporting
from privtune.study import Study, StudySpec
from privtune.study.spec import ArmSpec, BudgetSpec
from privtune.tasks import TASKS, get_task
from privtune.tasks.built_in import _DESCRIBED
from privtune.training.engine.compute import check_device
from privtune.training.mechanism.metrics import METRICS
from privtune.training.mechanism.schedule import NoiseOptions
from privtune.training.methods import METHODS
from privtune.training.methods.rate_schedule import _TAKES, RateSchedule
from tests.study.conftest import toy_spec

pytestmark = pytest.mark.quick

SPEC = toy_spec().model_dump(mode="json", exclude_none=True)


def spec_with(**given: Any) -> StudySpec:
    return StudySpec.parse({**SPEC, **given})


def fixed(**parameters: float) -> Any:
    return spec_with(arms=[{"name": "a", "strategy": "fixed", "parameters": parameters}])


def planned(spec: StudySpec) -> Any:
    return privtune.study.plan_study(spec)


def drawn(name: str) -> SearchSpace:
    return SearchSpace.from_dict({"learning_rate": {"type": name, "low": 0.1, "high": 1}})


def with_option(method: str, option: str) -> Any:
    return planned(spec_with(arms=[{"name": "a", "strategy": method, option: 1}]))


# What each list is, the names in it, and where a user writes one.
LISTS: Mapping[str, tuple[Iterable[str], Callable[[str], Any]]] = {
    "metrics": (METRICS, lambda name: Scoring(metric=name)),
    "reported metrics": (METRICS, lambda name: Reporting.from_dict({"metric": [name]})),
    "strategies": (
        [*STRATEGIES, *METHODS],
        lambda name: make_strategy(name, arm="a", options={}),
    ),
    "methods": (
        METHODS,
        lambda name: planned(
            spec_with(arms=[{"name": "a", "strategy": "fixed", "method": name, "parameters": {}}])
        ),
    ),
    "parameters": (
        ["learning_rate", "max_grad_norm"],
        lambda name: planned(fixed(**{"learning_rate": 0.5, "max_grad_norm": 1.0, name: 1.0})),
    ),
    "options of a strategy": (
        ["mean_runs", "min_runs", "law"],
        lambda name: make_strategy("papernot-steinke", arm="a", options={name: 1}),
    ),
    "options of a method": (["interval", "spread"], lambda name: with_option("hyfreedp", name)),
    "distributions": (DISTRIBUTIONS, drawn),
    "arguments of a distribution": (
        ["low", "high", "step"],
        lambda name: SearchSpace.from_dict({"x": {"type": "float", "low": 1, "high": 2, name: 1}}),
    ),
    "samplers": (
        SAMPLERS,
        lambda name: Everything(arm="a", trials=2, sampler=name).plan(None, epsilon=1.0),  # type: ignore[arg-type]
    ),
    "tasks": (TASKS, get_task),
    "kinds of tasks": ([*_DESCRIBED, "stand-in"], lambda name: get_task({"type": name})),
    "stages": (STAGES, lambda name: make_stage({"type": name})),
    "fields of a spec": (StudySpec.model_fields, lambda name: spec_with(**{name: 1})),
    "fields of a budget": (
        BudgetSpec.model_fields,
        lambda name: spec_with(budget={**SPEC["budget"], name: 1}),
    ),
    "adjacencies": (
        ["add-remove", "replace-one"],
        lambda name: spec_with(budget={**SPEC["budget"], "adjacency": name}),
    ),
    "fields of scoring": (["metric", "bound"], lambda name: spec_with(scoring={name: 1})),
    "noise": (["secure", "plain"], NoiseOptions.of),
    "fields of noise": (["source", "floating_point"], lambda name: NoiseOptions.of({name: "fast"})),
    "executors": (["inline", "processes"], lambda name: Executor.of(name, jobs=1)),
    "schedules": (_TAKES, RateSchedule.of),
    "devices": (["auto", "cuda"], check_device),
    "events": (_TYPES, lambda name: event_from_dict({"type": name})),
    "events of dp-accounting": (DP_ACCOUNTING, lambda name: event_from_dict({"type": name})),
    "fields of an event": (
        ["noise_multiplier"],
        lambda name: event_from_dict({"type": "gaussian", name: 1}),
    ),
    "laws": (_LAWS, lambda name: run_law_from_dict({"law": name, "mean": 3})),
}


def misspelt(name: str) -> str:
    """Leave out a letter in the middle: that no list has, and every reader understands."""
    place = max(1, (len(name.removesuffix("DpEvent")) + 1) // 2)
    return name[:place] + name[place + 1 :]


@pytest.mark.parametrize(
    ("field", "meant", "event"),
    [
        ("sample_rate", "rate", {"type": "poisson_sampled"}),  # Opacus
        ("sampling_probability", "rate", {"type": "poisson_sampled"}),  # dp-accounting
        ("q", "rate", {"type": "poisson_sampled"}),
        ("num_steps", "count", {"type": "repeated"}),  # Opacus
        ("steps", "count", {"type": "repeated"}),
        ("standard_deviation", "noise_multiplier", {"type": "gaussian"}),
        ("scale", "noise_multiplier", {"type": "laplace"}),
    ],
)
def test_a_field_of_an_event_has_the_names_of_other_accountants(
    field: str, meant: str, event: dict[str, Any]
) -> None:
    gaussian = {"type": "gaussian", "noise_multiplier": 1.0}
    inner = {} if meant == "noise_multiplier" else {"event": gaussian}
    with pytest.raises(PrivTuneError, match=rf"Did you mean {meant}\?"):
        event_from_dict({**event, **inner, field: 0.5})


@pytest.mark.parametrize("what", LISTS)
def test_a_near_name_is_answered_with_the_right_one(what: str) -> None:
    names, write = LISTS[what]
    tried = 0
    for name in names:
        wrong = misspelt(name)
        if len(name) < 4 or wrong in names:
            continue
        with pytest.raises(PrivTuneError) as caught:
            write(wrong)
        text = str(caught.value)
        assert f"Did you mean {name}?" in text, (wrong, text)
        assert "\n" not in text
        tried += 1
    assert tried


@pytest.mark.parametrize(
    ("what", "wrong", "right"),
    [
        ("metrics", "roc_auc", "auc"),
        ("metrics", "f1_score", "f1"),
        ("metrics", "Accuracy", "accuracy"),
        ("metrics", "log_loss", "loss"),
        ("strategies", "fix", "fixed"),
        ("strategies", "papernot_steinke", "papernot-steinke"),
        ("strategies", "HyFreeDP", "hyfreedp"),
        ("strategies", "random_search", "papernot-steinke"),
        ("parameters", "lr", "learning_rate"),
        ("parameters", "clip", "max_grad_norm"),
        ("parameters", "max_norm", "max_grad_norm"),
        ("distributions", "loguniform", "{type: float, log: true}"),
        ("distributions", "uniform", "float"),
        ("distributions", "lognormal", "log_normal"),
        ("options of a strategy", "n_trials", "mean_runs"),
        ("kinds of tasks", "csv", "tabular"),
        ("fields of a spec", "batch_size", "expected_batch_size"),
        ("fields of a spec", "search_space", "space"),
        ("fields of a budget", "eps", "epsilon"),
        ("adjacencies", "add_remove", "add-remove"),
        ("events", "subsampled", "poisson_sampled"),
        ("events", "Gaussian", "gaussian"),
        ("fields of an event", "sigma", "noise_multiplier"),
        ("laws", "negative_binomial", "truncated_negative_binomial"),
    ],
)
def test_a_name_of_other_tools_is_answered_with_ours(what: str, wrong: str, right: str) -> None:
    with pytest.raises(PrivTuneError) as caught:
        LISTS[what][1](wrong)
    assert f"Did you mean {right}?" in str(caught.value)


def test_a_missing_parameter_is_the_one_that_was_misnamed() -> None:
    with pytest.raises(PrivTuneError, match=r"also needs .*Did you mean learning_rate\?"):
        planned(fixed(lr=0.5, max_grad_norm=1.0))


def test_names_that_are_far_from_all_are_answered_with_the_list_alone() -> None:
    assert not did_you_mean("zzz", METRICS)
    assert not did_you_mean(3, METRICS)
    assert not did_you_mean("", METRICS)
    assert did_you_mean(["lr", "zzz", "clip"], ["learning_rate", "max_grad_norm"]) == (
        "Did you mean learning_rate for lr, max_grad_norm for clip?"
    )


def test_studies_arms_and_budgets_are_answered_with_those_that_there_are(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/p.db"
    study = Study.create(toy_spec(), storage)
    with pytest.raises(PrivTuneError, match=r"Did you mean toy\?"):
        privtune.load_study("toi", storage=storage)
    with pytest.raises(PrivTuneError, match=r"Did you mean defaults\?"):
        study.release("default")
    with Ledger(storage) as ledger:
        ledger.create_budget(Budget(1.0, 1e-5, name="hospital"))
        with pytest.raises(PrivTuneError, match=r"Did you mean hospital\?"):
            ledger.budget("hosptal")


def test_one_helper_answers_for_all_lists() -> None:
    """A list that is written out by hand has no answer for a near name."""
    package = Path(privtune.__file__).parent
    by_hand = re.compile(r"must be one of \{|get_close_matches|(knows|takes) \{', '\.join")
    for path in sorted(package.rglob("*.py")):
        if path.name != "names.py":
            assert not by_hand.search(path.read_text("utf-8")), path


def test_fields_of_an_arm_are_those_of_its_strategy() -> None:
    assert set(ArmSpec.model_fields) == {"name", "strategy", "weight"}
