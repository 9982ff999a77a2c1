"""One rule for names, everywhere, and deletes that touch nothing but what the store knows."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest

import privtune
from privtune.errors import InvalidInputError
from privtune.ledger import Budget, Ledger
from privtune.ledger.places import artifact_root
from privtune.names import check_name, check_text
from privtune.study import SpecError, Study, StudySpec
from tests.cli.conftest import Cli, cli
from tests.study.conftest import toy_spec
from tests.study.elsewhere import OWN, TERMS, simple

pytestmark = pytest.mark.quick

__all__ = ["cli"]

GOOD = ["a", "digits-mlp", "A.b_c-9", "0", "x" * 100, "mlflow2", "a..b"]
BAD = [
    "", ".", "..", ".hidden", "-x", "_x", "a/b", "../../victim", "/tmp/victim", "a\\b", "a b", "a\nb", "é",
    "x" * 101, "a\0", "\ud800", "mlflow", "MLflow", "sealed", "trials", "mlflow.db", "NUL", "com1",
]  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_good_names(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", [*BAD, None, 3])
def test_bad_names_are_one_sentence(name: object) -> None:
    with pytest.raises(InvalidInputError) as caught:
        check_name(name, "study")
    assert str(caught.value).startswith("study = ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["a\0b", "\ud800", 3, None])
def test_texts_that_cannot_be_stored(text: object) -> None:
    with pytest.raises(InvalidInputError):
        check_text(text, "note")


@pytest.fixture
def storage(tmp_path: Path) -> str:
    folder = tmp_path / "curator"
    folder.mkdir()
    return f"sqlite:///{folder}/privtune.db"


@pytest.mark.parametrize("name", ["", "../../victim", "a\0", "mlflow"])
def test_no_door_lets_a_bad_name_in(name: str, storage: str) -> None:
    spec = toy_spec().model_dump(mode="json")
    arms = [{**spec["arms"][0], "name": name}]
    budget = Budget(6.0, 1e-5, name="toy")
    for make in (
        lambda: StudySpec.parse({**spec, "name": name}),
        lambda: StudySpec.parse({**spec, "arms": arms}),
        lambda: StudySpec.parse({**spec, "budget": {**spec["budget"], "name": name}}),
        lambda: privtune.create_study(name, budget=budget, storage=storage),
        lambda: Study.create(toy_spec(name=name), storage),
        lambda: Study.create(toy_spec(arms=arms), storage),
    ):
        with pytest.raises((SpecError, InvalidInputError)) as caught:
            make()
        assert "\n" not in str(caught.value)
    assert not Path(storage.removeprefix("sqlite:///")).exists()
    with Ledger(storage) as ledger, pytest.raises(InvalidInputError):
        ledger.create_budget(Budget(1.0, 1e-5, name=name))


def test_an_arm_of_a_build_has_a_name_by_the_rule(storage: str) -> None:
    study = privtune.create_study("open", budget=Budget(6.0, 1e-5, name="b"), storage=storage)
    with pytest.raises(InvalidInputError, match=r"arm = '\.\./x'"):
        study.optimize(
            privtune.make_task(simple, **OWN),
            strategy=privtune.strategies.Fixed(),
            arm="../x",
            **TERMS,
        )
    assert study.arms == ()
    study.close()


def snapshot(folder: Path) -> list[str]:
    return sorted(
        str(p.relative_to(folder)) for p in folder.rglob("*") if "privtune.db" not in p.name
    )


def test_a_delete_takes_nothing_that_the_store_does_not_know(
    cli: Cli, storage: str, tmp_path: Path
) -> None:
    Study.create(toy_spec(), storage).close()
    optuna.create_study(storage=storage, study_name="mine").set_user_attr("by", "somebody else")
    root = artifact_root(storage)
    for place in (tmp_path / "victim", root / "toy" / "selection", root / "mlflow", root / "mine"):
        place.mkdir(parents=True)
        (place / "file").write_text("kept")
    before = snapshot(tmp_path)
    names = ["../../victim", str(tmp_path / "victim"), "", ".", "..", "mlflow", "nobody", "mine", "toy/",
             "toy/selection", "a\0b", "\ud800", f"../{root.name}/toy"]  # fmt: skip
    for name in names:
        done = cli("study", "delete", "--yes", "--storage", storage, "--", name)
        assert (done.code, done.out, done.err.count("\n")) == (1, "", 1), (name, done)
    assert snapshot(tmp_path) == before
    assert {s.study_name for s in optuna.get_all_study_summaries(storage)} == {"mine"}
    assert privtune.study.study_names(storage) == ["toy"]
    assert cli("study", "delete", "--yes", "--storage", storage, "toy").code == 0
    assert snapshot(tmp_path) == before
