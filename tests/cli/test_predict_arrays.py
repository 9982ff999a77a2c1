"""``privtune predict`` of tasks of arrays: a CSV file or a .npy file, on the scale that is told."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from privtune.errors import InvalidInputError
from privtune.study import Study, StudySpec
from privtune.tasks import get_task
from tests.cli.conftest import Cli
from tests.study.conftest import PARAMETERS, toy_spec

DIVIDE = "must lie in [0, 1]. Divide pixels by 16."


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    """A study of handwritten digits that has run."""
    monkeypatch.chdir(tmp_path)
    spec = {
        "name": "digits",
        "task": "digits-mlp",
        "budget": {"name": "digits", "epsilon": 8.0, "delta": 1e-4},
        "arms": [{"name": "guess", "strategy": "fixed", "parameters": PARAMETERS}],
        "epochs": 1,
        "expected_batch_size": 64,
    }
    study = Study.create(StudySpec.parse(spec), "sqlite:///privtune.db")
    study.run(force=True)
    study.close()
    return study


def test_the_scale_is_told_and_held(cli: Cli, digits: Study) -> None:
    release = digits.release("guess")
    x = get_task("digits-mlp").load().test.x.numpy()
    assert release.predict(x)["prediction"].notna().all()
    with pytest.raises(InvalidInputError, match="Divide pixels by 16"):
        release.predict(16.0 * x)
    facts = digits.plans[0].public_facts
    assert facts["inputs"] == "a model takes numbers in [0, 1]: divide pixels by 16"
    assert release.served.rows.takes == (
        "arrays float32 [n, 64], every number in [0, 1] (divide pixels by 16)"
    )
    assert np.all(release.served.rows.example() == 0.5)


def test_arrays_are_asked_from_files(cli: Cli, digits: Study) -> None:
    x = get_task("digits-mlp").load().test.x.numpy()[:5]
    wanted = digits.release("guess").predict(x)["prediction"].tolist()
    words, counted = (",".join(f"{a}{n}" for n in range(64)) for a in ("pixel ", ""))
    np.savetxt("plain.csv", x, delimiter=",")
    np.savetxt("words.csv", x, delimiter=",", header=words, comments="")
    np.savetxt("counted.csv", x, delimiter=",", header=counted, comments="")
    np.save("rows.npy", x)
    for name in ("plain.csv", "words.csv", "counted.csv", "rows.npy"):
        done = cli("predict", "digits", "guess", name)
        header, *lines = done.out.splitlines()
        wide = 64 * (name != "rows.npy")
        title = "pixel 0" if name == "words.csv" else "0" if wide else "prediction"
        assert (done.code, header.split(",")[0], header.split(",")[wide]) == (
            0,
            title,
            "prediction",
        )
        assert [int(line.split(",")[wide]) for line in lines] == wanted
    np.save("none.npy", x[:0])
    assert cli("predict", "digits", "guess", "none.npy").out.count("\n") == 1


def test_other_arrays_get_a_sentence(cli: Cli, digits: Study) -> None:
    x = get_task("digits-mlp").load().test.x.numpy()[:5]
    np.save("raw.npy", 16 * x)
    np.savetxt("raw.csv", 16 * x, delimiter=",")
    np.savetxt("index.csv", np.c_[np.arange(5), x], delimiter=",")
    np.save("square.npy", x.reshape(5, 8, 8))
    np.save("words.npy", np.array(["a"]))
    np.save("code.npy", np.array([{}], dtype=object), allow_pickle=True)
    x[2, 3] = np.nan
    np.save("nan.npy", x)
    np.savetxt("nan.csv", x, delimiter=",", header=",".join("a" * 64), comments="")
    Path("no.npy").write_bytes(b"no array")
    for name, said in {
        "raw.npy": DIVIDE,
        "raw.csv": DIVIDE,
        "index.csv": "index.csv: row 1 holds 65 cells, and the model takes arrays float32 [n, 64]",
        "square.npy": "must be numbers of shape [n, 64]",
        "words.npy": "holds no array of numbers; the model takes arrays float32 [n, 64]",
        "code.npy": "cannot be read as an array of numbers",
        "no.npy": "cannot be read as an array of numbers",
        "nan.npy": "nan.npy: row 3 holds what is no finite number",
        "nan.csv": "nan.csv: row 4 holds what is no finite number",
        "absent.npy": "absent.npy is not there.",
        "absent.csv": "absent.csv is not there.",
    }.items():
        done = cli("predict", "digits", "guess", name, "--to", "out.csv")
        assert (done.code, done.out) == (1, ""), name
        assert said in done.err
        assert done.err.count("\n") == 1
    assert not Path("out.csv").exists()


def test_arrays_of_a_task_without_a_range_are_asked(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arms = [{"name": "arm", "strategy": "fixed", "parameters": PARAMETERS}]
    with closing(Study.create(toy_spec(arms=arms), "sqlite:///privtune.db")) as study:
        study.run(force=True)
    np.save("rows.npy", np.full((3, 6), 100.0))
    assert cli("predict", "toy", "arm", "rows.npy").out.count("\n") == 4


@pytest.mark.parametrize("name", ["iris-logistic", "breast-cancer-logistic", "synthetic-logistic"])
def test_records_of_a_built_in_task_lie_in_its_range(name: str) -> None:
    task = get_task(name)
    data = task.load()
    served = task.served(task.model().eval())
    for part in (data.train, data.validation, data.test):
        assert served.predict(part.x.numpy())["prediction"].notna().all()
    with pytest.raises(InvalidInputError, match=r"must lie in \[-1, 1\]"):
        served.predict(5.0 + data.test.x.numpy())
