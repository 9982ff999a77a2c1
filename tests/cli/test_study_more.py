"""Plans with examples, exports, deletions, oracles: the study commands beyond a plain life."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from privtune.study import Study
from tests.cli.conftest import Cli
from tests.study.conftest import toy_spec


@pytest.fixture
def at(tmp_path: Path) -> tuple[str, str]:
    return ("--storage", f"sqlite:///{tmp_path / 'p.db'}")


def write(tmp_path: Path, **changes: object) -> str:
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(toy_spec(**changes).model_dump(mode="json")))
    return str(path)


AUTO = {"name": "auto", "strategy": "papernot-steinke", "law": "auto", "power": 0.4}
TUNED = {"name": "tuned", "strategy": "subsampled-tuning", "rate": 0.1, "mean_runs": 10}
OPEN = {"name": "open", "strategy": "everything", "trials": 2, "sampler": "random"}
ORACLE = {"name": "oracle", "strategy": "non-private-grid", "points": 2}


def test_a_plan_draws_ten_examples_and_shows_trades(cli: Cli, tmp_path: Path) -> None:
    spec = write(tmp_path, arms=[AUTO, TUNED, ORACLE])
    done = cli("study", "plan", spec)
    assert done.code == 0, done.err
    assert "Ten examples of what the space draws (the arms draw others)" in done.out
    assert "chosen:" in done.out
    assert "everything released (composition)" in done.out
    assert "times fewer" in done.out
    assert "needs --non-private" in done.out
    document = json.loads(cli("study", "plan", spec, "--json").out)
    assert len(document["examples"]) == 10
    assert all(0.05 <= e["learning_rate"] <= 5.0 for e in document["examples"])
    assert document["arms"][2]["guarantee"]["epsilon"] in (None, "inf")


def test_a_spec_is_created_and_run_at_once(cli: Cli, tmp_path: Path, at: tuple[str, str]) -> None:
    spec = write(tmp_path, arms=[OPEN])
    done = cli("study", "run", spec, *at, "--no-mlflow")
    assert done.code == 0, done.err
    assert "open" in done.out
    spent = json.loads(cli("budget", "show", "toy", *at, "--json").out)
    # The same file again is the same study, which is finished; nothing is charged twice.
    again = cli("study", "run", spec, *at, "--no-mlflow")
    assert again.code == 0
    assert "is finished" in again.out
    assert json.loads(cli("budget", "show", "toy", *at, "--json").out) == spent


def test_a_spec_that_was_changed_is_not_the_study_that_is_there(
    cli: Cli, tmp_path: Path, at: tuple[str, str]
) -> None:
    assert cli("study", "create", write(tmp_path, arms=[OPEN]), *at).code == 0
    spec = write(tmp_path, arms=[{**OPEN, "trials": 3}], epochs=3)
    refused = cli("study", "run", spec, *at, "--no-mlflow")
    assert refused.code == 1
    assert "created with other arms, epochs than toy.yaml has now" in refused.err
    assert "privtune study delete" in refused.err
    assert "privtune study run toy." in refused.err
    assert refused.err.count("\n") == 1
    done = cli("study", "run", write(tmp_path, arms=[OPEN]), *at, "--no-mlflow")
    assert done.code == 0, done.err


def test_the_demo_goes_on_with_no_other_study(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "demo-output"
    folder.mkdir()
    other = toy_spec(name="digits-demo", arms=[OPEN])
    Study.create(other, f"sqlite:///{folder / 'privtune.db'}").close()
    refused = cli("demo", "--folder", str(folder))
    assert refused.code == 1
    assert "holds a study that was created with other arms, budget, " in refused.err
    assert refused.err.count("\n") == 1


def test_what_is_run_may_be_named_like_a_file(
    cli: Cli, tmp_path: Path, at: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("study", "create", write(tmp_path, name="odd.yaml", arms=[OPEN]), *at).code == 0
    assert cli("study", "run", "odd.yaml", *at, "--no-mlflow").code == 0
    missing = cli("study", "run", "none.yaml", *at)
    assert missing.code == 1
    assert "none.yaml" in missing.err
    broken = tmp_path / "broken.yml"
    broken.write_text("name: [")
    assert cli("study", "run", str(broken), *at).err.count("\n") == 1


def test_an_oracle_needs_its_flag(cli: Cli, tmp_path: Path, at: tuple[str, str]) -> None:
    spec = write(tmp_path, arms=[OPEN, ORACLE])
    assert cli("study", "create", spec, *at).code == 0
    refused = cli("study", "run", "toy", *at, "--no-mlflow")
    assert refused.code == 1
    assert "Run it with --non-private" in refused.err
    assert refused.err.count("\n") == 1
    done = cli("study", "run", "toy", *at, "--no-mlflow", "--non-private")
    assert done.code == 0, done.err
    assert "NOT PRIVATE" in done.out
    assert "would have cost" in done.out
    assert "Log it to MLflow:" in done.out
    assert "study sync toy" in done.out
    document = json.loads(cli("study", "compare", "toy", *at, "--json").out)
    assert len(document["arms"][0]["trials"]) == 2
    assert document["arms"][1]["epsilon"] is None

    exported = json.loads(cli("study", "export", "toy", *at).out)
    assert exported["format"] == "privtune-study"
    assert exported["certificate"]["guarantee"]["epsilon"] <= 6.0

    deleted = cli("study", "delete", "toy", *at, "--yes")
    assert deleted.code == 0
    assert "stays charged" in deleted.out
    assert cli("study", "show", "toy", *at).code == 1
    charges = json.loads(cli("budget", "charges", "toy", *at, "--json").out)
    assert charges


def test_a_stack_is_a_number_or_auto(cli: Cli, tmp_path: Path, at: tuple[str, str]) -> None:
    chosen = {"name": "chosen", "strategy": "papernot-steinke", "mean_runs": 2}
    assert cli("study", "create", write(tmp_path, arms=[chosen]), *at).code == 0
    refused = cli("study", "run", "toy", *at, "--no-mlflow", "--stack", "many")
    assert refused.code == 1
    assert "must be a whole number of at least 1, or auto" in refused.err
    assert refused.err.count("\n") == 1
    assert cli("study", "run", "toy", *at, "--no-mlflow", "--stack", "2").code == 0
