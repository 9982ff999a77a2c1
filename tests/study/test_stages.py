"""The life of a stage: on the bill, charged before the arms, released once, and shared by all."""

from __future__ import annotations

import json
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from privtune.accounting import Composed, epsilon
from privtune.ledger import BudgetExceededError, verify
from privtune.study import Study, StudySpec, plan_study
from privtune.study import run as running
from privtune.training.engine.compute import hardware
from privtune.views.record import arm_record, budget_view
from privtune.views.report import render_study
from tests.cli.conftest import Cli, cli  # noqa: F401  (a fixture)
from tests.study.conftest import PARAMETERS
from tests.study.test_workers import worker
from tests.tasks.test_stages import people, table

STAGES = [
    {"type": "quantiles", "epsilon_share": 0.1},
    {"type": "histogram", "noise_multiplier": 20.0},
    {"type": "dp-pca", "components": 3},
]


def staged(path: Path, **changes: Any) -> StudySpec:
    arm = {"strategy": "fixed", "parameters": PARAMETERS}
    spec = {
        "name": "staged",
        "task": table(path),
        "budget": {"name": "clinic", "epsilon": 4.0, "delta": 1e-5},
        "space": {"learning_rate": {"type": "float", "low": 0.1, "high": 1.0}},
        "stages": STAGES,
        "arms": [
            {"name": "one", **arm},
            {"name": "many", "strategy": "papernot-steinke", "mean_runs": 2}
            | {"parameters": {"max_grad_norm": 1.0}},
        ],
        "epochs": 1,
        "expected_batch_size": 400,
    }
    return StudySpec.parse({**spec, **changes})


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StudySpec:
    monkeypatch.chdir(tmp_path)
    people().to_csv("people.csv", index=False)
    return staged(Path("people.csv"))


def test_stages_are_part_of_the_bill(spec: StudySpec) -> None:
    planned = plan_study(spec)
    events = [plan.event for plan in (*planned.stages, *planned.plans)]
    together = epsilon(Composed(events), 1e-5).epsilon
    assert planned.total.epsilon == together <= 4.0
    assert together > 3.9  # and the arms get all that is left
    assert planned.stage_guarantees[0].epsilon == pytest.approx(0.4, abs=1e-3)
    alone = plan_study(spec.model_copy(update={"stages": STAGES[1:], "task": _bounded(spec)}))
    assert alone.guarantees[0].epsilon > planned.guarantees[0].epsilon


def _bounded(spec: StudySpec) -> dict[str, Any]:
    assert isinstance(spec.task, dict)
    columns = {**spec.task["columns"], "age": [0, 100], "income": [0, 1e5]}
    return {**spec.task, "columns": columns}


def test_stages_are_charged_released_and_shown(spec: StudySpec, cli: Cli) -> None:  # noqa: F811
    url = "sqlite:///privtune.db"
    spec = spec.model_copy(update={"seed": 5})  # bounds are noised: a cell may be far off
    study = Study.create(spec, url)
    assert [s.state for s in study.stages] == ["planned"] * 3
    assert study.stages[0].release is None
    assert study.spent().epsilon == 0.0
    study.run()
    assert [s.state for s in study.stages] == ["settled"] * 3
    charges = study.certificate()["charges"]
    assert [c["arm"] for c in charges] == ["quantiles", "histogram", "dp-pca", "one", "many"]
    assert [c["event"] for c in charges[:3]] == [s.plan.event.to_dict() for s in study.stages]
    released = study.export()["stages"]
    assert released[0]["release"]["bounds"]["age"] == pytest.approx([20.0, 80.0], abs=8.1)
    weights = study.release("one").weights
    assert len(weights) == 3 * 2 + 2  # of the three directions, not of the six features
    assert plan_study(spec).plans[0].details["stages"].keys() == {
        "quantiles",
        "histogram",
        "dp-pca",
    }
    assert study.arms == ("one", "many")
    assert len(study.releases()) == 2
    found = cli("study", "show", "staged").out
    assert "stage dp-pca" in found
    assert study.stages[0].words in " ".join(found.split())
    assert "Stage quantiles, shared by all arms" in cli("study", "compare", "staged").out
    said = study.stages[2].words
    for page in (
        cli("study", "compare", "staged", "--md").out,
        cli("study", "export", "staged", "--sp800-226").out,
        unescape(render_study(study)),
    ):
        assert said in page
    assert "stage dp-pca: " in render_study(study)  # the statement says that it left
    record = arm_record(study, study.plans[0], study.release("one"), budget_view(study))
    assert json.loads(record.params["stage.histogram"])["noise_multiplier"] == 20.0
    assert record.tags["privtune.stage.dp-pca"].endswith(f"{said}.")
    release = study.release("one")
    assert record.tags["privtune.device"] == release.machine["device"] == hardware("cpu")
    assert f"torch {release.machine['torch']}" in record.tags["privtune.versions"]
    assert "ε = 0.4" in record.tags["privtune.stage.quantiles"]
    verify(study._life.ledger.log.storage, "clinic")  # raises if it is not sound
    study.delete()


@pytest.mark.parametrize("crash", ["after the sums", "before the arms"])
def test_a_release_is_drawn_once_whatever_stops_the_study(
    spec: StudySpec, monkeypatch: pytest.MonkeyPatch, crash: str
) -> None:
    study = Study.create(spec, "sqlite:///privtune.db")
    drawn: list[tuple[str, Any]] = []
    real = running.release_stage

    def release(plan: Any, *rest: Any) -> dict[str, Any]:
        drawn.append((plan.arm, real(plan, *rest)))
        if crash == "after the sums" and len(drawn) == 1:
            raise KeyboardInterrupt
        return drawn[-1][1]

    monkeypatch.setattr(running, "release_stage", release)
    if crash == "before the arms":
        stop = pytest.MonkeyPatch()
        stop.setattr(
            running.TaskTrainer, "prepare", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
    with pytest.raises(KeyboardInterrupt):
        study.run()
    if crash == "before the arms":
        stop.undo()
        assert [name for name, _ in drawn] == ["quantiles", "histogram", "dp-pca"]
        kept = [s.release for s in study.stages]
        assert [s.state for s in study.stages] == ["settled"] * 3
        people(900).to_csv("people.csv", index=False)  # would be another release, if drawn again
    study.run()
    names = [name for name, _ in drawn]
    if crash == "before the arms":
        assert len(names) == 3
        assert [s.release for s in study.stages] == kept
    else:
        assert names == ["quantiles", "quantiles", "histogram", "dp-pca"]
        assert drawn[0] == drawn[1]  # the same noise: what came of it is one release
    assert len(study.certificate()["charges"]) == 5
    secrets = {name: row.secret for name, row in study._life.arms().items()}
    assert set(secrets.values()) == {None}


def test_workers_see_the_task_as_it_was_released(spec: StudySpec, tmp_path: Path) -> None:
    spec = staged(tmp_path / "people.csv", seed=5)
    urls = [f"sqlite:///{tmp_path / name}.db" for name in "ab"]
    here, there = (Study.create(spec, url) for url in urls)
    here.run()
    with worker(urls[1]):
        there.run(executor="external")
    one, two = (s.release("many") for s in (here, there))
    assert one.params == two.params
    assert (one.weights - two.weights).abs().max() < 1e-6


def test_stages_and_arms_are_charged_together_or_not_at_all(spec: StudySpec) -> None:
    url = "sqlite:///privtune.db"
    study, other = Study.create(spec, url), Study.create(spec.model_copy(update={"name": "b"}), url)
    study.run()
    with pytest.raises(BudgetExceededError):
        other.run()
    assert [s.state for s in other.stages] == ["planned"] * 3
