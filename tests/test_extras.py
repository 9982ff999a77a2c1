"""What ``pip install privtune`` leaves out is asked for in a sentence, and before anything is charged."""

from __future__ import annotations

import gc
import json
import re
import sys
import tomllib
from contextlib import closing
from pathlib import Path

import pytest

import privtune
from privtune.errors import PrivTuneError
from privtune.imports import ByName, find_extra, postponed
from privtune.ledger import Ledger, export_certificate, verify_certificate
from privtune.tasks import TASKS
from tests.cli.conftest import Cli, cli

__all__ = ["cli"]

GIVEN = {"learning_rate": 0.5, "max_grad_norm": 1.0}
EXTRAS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]


def hide(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    for name in {library, *(n for n in sys.modules if n.startswith(f"{library}."))}:
        monkeypatch.setitem(sys.modules, name, None)


def planned(task: str, folder: Path) -> privtune.Study:
    storage = f"sqlite:///{folder}/ledger.db"
    return privtune.create_study(
        "bare",
        budget=privtune.Budget(4.0, 1e-5, name="people"),
        storage=storage,
        task=task,
        arms=[{"name": "one", "strategy": "fixed", "parameters": GIVEN}],
        epochs=1,
        expected_batch_size=64,
    )


LACKS = r"needs sklearn, which is not installed: pip install 'privtune\[demo\]'"


@pytest.mark.parametrize("task", ["digits-mlp", "iris-logistic", "breast-cancer-logistic"])
def test_a_task_whose_data_is_an_extra_is_refused_while_planning(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert task in TASKS
    hide(monkeypatch, "sklearn")
    with pytest.raises(PrivTuneError, match=f"Task {task} {LACKS}"):
        planned(task, tmp_path)
    with closing(Ledger(f"sqlite:///{tmp_path}/ledger.db")) as ledger:
        assert ledger.budgets() == ()


def test_a_task_whose_data_may_be_a_file_is_planned_and_refused_before_the_charge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PRIVTUNE_DATA", raising=False)
    hide(monkeypatch, "sklearn")
    study = planned("mnist-mlp", tmp_path)
    assert "privtune[demo]" in study.spec.load_task().check_header()
    with pytest.raises(PrivTuneError, match=LACKS):
        study.run()
    assert study.status()[0].state == "planned"


def test_commands_name_the_extra_that_a_task_lacks(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PRIVTUNE_DATA", raising=False)
    hide(monkeypatch, "sklearn")
    Path("spec.yaml").write_text(
        "name: digits\ntask: digits-mlp\nbudget: {name: digits, epsilon: 4, delta: 1.0e-5}\n"
        "arms: [{name: one, strategy: fixed, parameters: {learning_rate: 1, max_grad_norm: 1}}]\n"
        "epochs: 1\nexpected_batch_size: 64\n"
    )
    for command in ("plan", "create", "run"):
        done = cli("study", command, "spec.yaml")
        assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
        assert re.search(LACKS, done.err)
    assert re.search(f"Task iris-logistic {LACKS}", cli("tasks").out)
    lacks = {task["name"]: task["lacks"] for task in json.loads(cli("tasks", "--json").out)}
    assert lacks["synthetic-logistic"] is None
    assert re.search(LACKS, lacks["digits-cnn"])


@pytest.mark.parametrize("content", [None, b"no archive", b"", b"PK\x03\x04 cut"])
def test_a_file_that_is_not_mnist_is_refused_before_the_charge(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mnist.npz"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv("PRIVTUNE_DATA", str(file))
    study = planned("mnist-mlp", tmp_path)
    with pytest.raises(PrivTuneError, match=r"cannot be read as MNIST's"):
        study.run()
    assert study.status()[0].state == "planned"


def test_a_study_runs_without_dp_accounting_and_its_certificate_says_what_was_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, "dp_accounting")
    study = planned("iris-logistic", tmp_path)
    study.run()
    with closing(Ledger(f"sqlite:///{tmp_path}/ledger.db")) as ledger:
        bare = export_certificate(ledger.log.storage, "people", witnessed=True)
    [said] = bare["witnesses"].values()
    answers = {one["tool"]: one for one in said["witnesses"]}
    assert answers["autodp RDP"]["epsilon"] >= said["lower"] > 0.0
    for tool in ("dp-accounting PLD", "dp-accounting RDP"):
        assert answers[tool]["epsilon"] is None
        assert answers[tool]["why"].startswith("Not made: this independent check needs dp_account")
        assert "pip install 'privtune[check]'" in answers[tool]["why"]
    assert any("privtune[check]" in one for one in verify_certificate(bare).warnings)
    monkeypatch.undo()
    assert any("privtune[check]" in one for one in verify_certificate(bare).warnings)


def test_every_extra_that_is_asked_for_exists_and_is_no_dependency_of_all() -> None:
    always = " ".join(EXTRAS["dependencies"])
    for library in ("pandas", "scikit-learn", "mlflow>", "ray", "submitit", "psycopg", "dp-acc"):
        assert library not in always
    assert {"ui", "demo", "check", "postgres", "ray", "slurm", "dashboard"} <= set(
        EXTRAS["optional-dependencies"]
    )


def test_a_library_that_misses_something_of_its_own_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_installed.py").write_text("import no_such_part")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_part"):
        find_extra("half_installed", extra="demo", what="This")


def test_what_a_registry_holds_is_imported_without_a_look_for_garbage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "held_by_name.py").write_text("import gc\nsearched = gc.isenabled()")
    monkeypatch.syspath_prepend(str(tmp_path))
    known: ByName[bool] = ByName({"searched": "held_by_name:searched", "none": "no_such:name"})
    assert "none" in known
    assert list(known) == ["searched", "none"]
    assert "held_by_name" not in sys.modules
    assert known["searched"] is False
    with pytest.raises(ModuleNotFoundError):
        known["none"]
    with pytest.raises(KeyError):
        known["other"]
    assert gc.isenabled()


def test_a_postponed_library_is_imported_when_a_name_of_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with postponed("colorsys", "sys"):
        import colorsys as module
        from colorsys import rgb_to_hsv as function
        from sys import path
    assert path is sys.path, "what is there already is taken as it is"
    assert "colorsys" not in sys.modules
    assert function.__class__.__name__ == "_PostponedName"
    assert function(0.2, 0.4, 0.4) == module.rgb_to_hsv(0.2, 0.4, 0.4) == (0.5, 0.5, 0.4)
    assert sys.modules["colorsys"] is not module
    assert function.__code__ is sys.modules["colorsys"].rgb_to_hsv.__code__
