"""Wrong specs: one sentence each that names the field, without the names of any library."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from privtune.errors import PrivTuneError
from privtune.ledger import Ledger
from privtune.study import SpecError, Study, StudySpec, plan_study
from privtune.tasks import TaskDataError
from tests.cli.conftest import Cli, cli  # noqa: F401  (a fixture)
from tests.study.conftest import toy_spec

SPEC = toy_spec().model_dump(mode="json")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A right table, and files that are no table, no pictures, or of other columns."""
    folder = tmp_path_factory.mktemp("files")
    rows = "".join(f"{i % 90},{'no' if i % 3 else 'yes'},{i // 3},f\n" for i in range(120))
    texts = {
        "people.csv": f"age,y,who,sex\n{rows}",
        "empty.csv": "",
        "twice.csv": "age,age,y\n1,2,no\n",
        "words.csv": "age,y\nold,no\nyoung,yes\n",
        "list.jsonl": "[1,2]\n",
        "broken.arrow": "xx",
        "broken.parquet": "PAR1xx",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "folder").mkdir()
    (folder / "binary.csv").write_bytes(bytes(range(256)) * 10)
    np.savez(folder / "wrong.npz", x=np.zeros((5, 3, 3)), y=np.zeros(5))
    np.savez(folder / "pickled.npz", x=np.array([{}], dtype=object), y=np.zeros(1))
    np.savez(folder / "x_only.npz", x=np.zeros((5, 4, 4)))
    with closing(sqlite3.connect(folder / "x.db")) as database:
        database.execute("create table people (age real, y text)")
        database.execute("insert into people values (3, 'no')")
        database.commit()
    return folder


def looked_at(data: Any) -> None:
    """Do all that a study does before its charge, but for the rehearsal."""
    spec = StudySpec.parse(data)
    plan_study(spec)
    task = spec.load_task()
    assert task.check is not None
    task.check()


COUNTED = yaml.safe_load((Path(__file__).parent / "wrong_specs.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("wrong", COUNTED, ids=map(str, range(len(COUNTED))))
def test_a_wrong_spec_or_file_is_one_sentence(
    wrong: dict[str, Any], files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is not as it must be is told before anything is charged, and never as a traceback."""
    monkeypatch.chdir(files)
    changes = {name: value for name, value in wrong.items() if name != "says"}
    with pytest.raises(PrivTuneError) as caught:
        looked_at({**SPEC, **changes})
    said = str(caught.value)
    assert wrong["says"] in said
    assert "hunter2" not in said, "a password"
    assert "\n" not in said
    assert not re.search(r"(?<!\.)\.\.(\s|$)", said)
    assert said.endswith((".", "?"))
    # Names of parts of choices, of keys, of Pydantic's types and of its own sentences.
    assert not re.search(r"constrained|union|\[key\]|\.str\b|literal\[|Mapping|Input should", said)


def test_no_wrong_spec_stands_twice() -> None:
    changes = {json.dumps({k: v for k, v in w.items() if k != "says"}) for w in COUNTED}
    assert len(changes) == len(COUNTED) >= 290


def test_what_is_no_mapping_of_names_is_no_spec() -> None:
    with pytest.raises(PrivTuneError, match="must be a mapping of names to values, not 'x'"):
        StudySpec.parse("x")
    with pytest.raises(PrivTuneError, match="3: must be text, not 3"):
        StudySpec.parse({**SPEC, 3: 3})


def test_a_share_above_the_budget_is_refused_before_anything_is_stored(
    cli: Cli,  # noqa: F811
    tmp_path: Path,
) -> None:
    storage = f"sqlite:///{tmp_path / 'p.db'}"
    file = tmp_path / "spec.yaml"
    file.write_text(yaml.safe_dump({**SPEC, "epsilon": 6.5}))
    for command in ("plan", "create"):
        at = ("--storage", storage) if command == "create" else ()
        refused = cli("study", command, str(file), *at)
        assert (refused.code, refused.out) == (1, "")
        assert "epsilon: must be at most the budget's, 6" in refused.err
        assert refused.err.count("\n") == 1
    with Ledger(storage) as ledger:
        assert ledger.budgets() == ()
    assert toy_spec(epsilon=6.0).target_epsilon == 6.0
    with pytest.raises(SpecError, match="at most the budget's"):
        Study.create(toy_spec(epsilon=6.5), storage)


def test_planning_looks_at_the_header_and_at_no_record(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    table = {"type": "tabular", "path": "words.csv", "target": "y", "classes": ["no", "yes"]}
    table |= {"bounds": {"age": [0, 9]}, "train": 100, "validation": 10, "test": 10}

    def spec(**changes: Any) -> StudySpec:
        return StudySpec.parse({**SPEC, "task": {**table, **changes}, "expected_batch_size": 10})

    plan_study(spec())  # whose column age holds words: its records are looked at before the charge
    with pytest.raises(TaskDataError, match=r"^words\.csv lacks the declared columns size\."):
        plan_study(spec(bounds={"size": [0, 9]}))
    assert spec(path="gone.csv").load_task().check_header() == (
        "gone.csv is not there. It is looked for again when the study runs, before the charge."
    )
    assert spec(path="list.jsonl", bounds={"b": [0, 9]}).load_task().check_header() == ""
