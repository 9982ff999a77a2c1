"""Records that do not fit what is declared of them: the curator is told, and no budget is spent for it."""

from __future__ import annotations

import json
import math
import os
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import sqlalchemy as sa
import torch
import yaml
from scipy import stats

from privtune.accounting import Adjacency, Gaussian
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.stages.spec_stages import make_stage
from privtune.stages.stage_plan import plan_stage, release_stage
from privtune.stages.usable import Usable
from privtune.study import Study
from privtune.study.failures import (
    StageRefusedError,
    UnreadableRecordsError,
    UnusableRecordsError,
)
from privtune.tasks import Task, TaskData, TaskDataError, get_task
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.schedule import NoiseOptions
from privtune.training.mechanism.streams import Streams
from tests.cli.conftest import Cli, cli  # noqa: F401  (a fixture)
from tests.study.conftest import PARAMETERS, toy_spec
from tests.toy import blobs

COUNT = 400
SECRET = "31.12.1987"  # a value of the files that may stand nowhere but in the curator's view
ARM = {"strategy": "fixed", "parameters": PARAMETERS}


def people() -> pd.DataFrame:
    rng = np.random.default_rng(11)
    days = pd.Timestamp("2015-01-01") + pd.to_timedelta(rng.integers(0, 3000, COUNT), unit="D")
    return pd.DataFrame(
        {
            "age": rng.uniform(20, 90, COUNT).round(1),
            "sex": rng.choice(["f", "m"], COUNT),
            "level": rng.choice(["low", "high"], COUNT),
            "seen": days.strftime("%Y-%m-%d"),
            "visits": rng.uniform(0, 20, COUNT).round(2),
            "y": rng.choice(["no", "yes"], COUNT),
        }
    )


def table(path: Path | str, **changes: Any) -> dict[str, Any]:
    spec = {
        "type": "tabular",
        "path": str(path),
        "target": "y",
        "classes": ["no", "yes"],
        "columns": {
            "age": [0, 120],
            "sex": {"categories": ["f", "m"]},
            "level": {"ordinal": ["low", "high"]},
            "seen": {"date": ["2010-01-01", "2025-01-01"]},
        },
        "train": 320,
        "validation": 40,
        "test": 40,
    }
    return {**spec, **changes}


def study_of(task: Any, storage: str, **changes: Any) -> Study:
    batch = {"epochs": 1, "expected_batch_size": 16, "arms": [{"name": "one", **ARM}]}
    return Study.create(toy_spec(task=task, **{**batch, **changes}), storage)


Change = Callable[[pd.DataFrame], Any]


def column(name: str, change: Callable[[pd.Series], Any]) -> Change:
    return lambda frame: frame.assign(**{name: change(frame[name])})


CODES = {"classes": [0, 1, 2]}
RANGE = {"classes": None, "target": "visits", "target_range": [0, 20]}
FILES: list[tuple[str, Change, dict[str, Any], str]] = [
    ("positive for yes", column("y", lambda y: y.replace("yes", "positive")), {},
     "such as 'positive'; declared: 'no', 'yes'.; write classes as the file has them"),
    (
        "labels 101 to 103",
        column("y", lambda y: 101 + np.arange(len(y)) % 3),
        CODES,
        "such as '101', '102', '103'; declared: '0', '1', '2'",
    ),
    (
        "labels from 1",
        column("y", lambda y: 1 + np.arange(len(y)) % 3),
        CODES,
        "such as '3'; declared: '0', '1', '2'.*and none has the declared '0'",
    ),
    ("no target", column("y", lambda y: np.nan), {}, "without a target"),
    ("no values", column("age", lambda a: np.nan), {}, "age: 400 missing"),
    ("words for numbers", column("age", lambda a: "old"), {}, "age: 400 not a number"),
    ("ages in days", column("age", lambda a: (a * 365.25).round()), {}, "clipped.*; write the bounds"),
    (
        "dates as in Germany",
        column("seen", lambda s: pd.to_datetime(s).dt.strftime("%d.%m.%Y")),
        {},
        'in ISO form.; write format: "%d.%m.%Y"',
    ),
    ("categories of another list", column("sex", lambda s: s + "x"), {}, "sex: 400 not declared"),
    ("a tenth of the records", lambda frame: frame[:40], {}, "40 records can be used, and 400 are declared"),
    ("a target in other units", column("visits", lambda v: v * 1000), RANGE, "visits: .* clipped"),
    ("a target of words", column("visits", lambda v: "often"), RANGE, "visits: 400 not a number"),
]  # fmt: skip
KINDS = ("csv", "jsonl", "parquet", "db")


def save(frame: pd.DataFrame, folder: Path, kind: str, **changes: Any) -> dict[str, Any]:
    path = folder / f"people.{kind}"
    if kind == "csv":
        frame.to_csv(path, index=False)
    elif kind == "jsonl":
        frame.to_json(path, orient="records", lines=True)
    elif kind == "parquet":
        frame.to_parquet(path)
    else:
        with sqlite3.connect(path) as made:
            frame.to_sql("people", made, index=False)
        made.close()
    spec = table(path, **changes)
    spec = {name: value for name, value in spec.items() if value is not None}
    if kind != "db":
        return spec
    del spec["path"]
    return {**spec, "url": f"sqlite:///{path}", "query": "SELECT * FROM people"}


def refused(study: Study, reason: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Check that a run stops before the charge, and that nobody but the curator learns why."""
    with pytest.raises(PrivTuneError) as caught:
        study.run()
    assert isinstance(caught.value, UnusableRecordsError)
    said = str(caught.value)
    assert "records do not fit what is declared." in said
    assert "\n" not in said
    again = Study(study.name, study.storage, curator=True)
    heard: list[Any] = []
    with pytest.raises(UnusableRecordsError, match=reason):
        again.run(on_check=heard.append)
    assert len(heard) == 1
    again.close()
    assert study.spent().epsilon == 0.0
    assert study._life.charges() == {}
    shown = capfd.readouterr()
    assert shown.out == shown.err == ""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("change", "declared", "reason"), [case[1:] for case in FILES], ids=[case[0] for case in FILES]
)
def test_a_wrong_file_spends_nothing(
    tmp_path: Path,
    storage: str,
    capfd: pytest.CaptureFixture[str],
    kind: str,
    change: Change,
    declared: dict[str, Any],
    reason: str,
) -> None:
    """A run of each of a CSV; the other readers find the same."""
    task = save(change(people()), tmp_path, kind, **declared)
    if kind == "parquet" and "not a number" in reason:  # its header says so
        with pytest.raises(TaskDataError, match="should be numbers"):
            get_task(task).check()
    elif kind == "csv":
        with closing(study_of(task, storage)) as study:
            refused(study, reason, capfd)
    else:
        assert re.search(reason, get_task(task).check_records().reason)


@pytest.mark.parametrize("kind", KINDS)
def test_a_right_file_runs(tmp_path: Path, storage: str, kind: str) -> None:
    frame = people()
    frame.loc[:30, "age"] = np.nan
    frame.loc[:60, "y"] = "perhaps"  # more than a split has: all of them share one
    task = save(frame, tmp_path, kind)
    check = get_task(task).check_records()
    assert check.reason == ""
    assert sum(split.unusable for split in check.splits) == 61
    assert check.usable == 339
    data = get_task(task).load()
    for split in check.splits:
        targets = getattr(data, split.split).y
        assert (split.rows, split.unusable) == (len(targets), int((targets < 0).sum()))
    with closing(study_of(task, storage)) as study:
        study.run()


# Tasks of one's own.


def _task(change: Callable[[torch.Tensor, torch.Tensor], tuple[Any, Any]], **fields: Any) -> Task:
    task = blobs()

    def load() -> TaskData:
        data = task.load()
        parts = (data.train, data.validation, data.test)
        return TaskData(*(TensorData(*change(p.x, p.y), sealed_size=True) for p in parts))

    return replace(task, load=load, partition="content", **fields)


def labels_from_1() -> Task:
    return _task(lambda x, y: (x, y + 1))


def half_infinite() -> Task:
    return _task(lambda x, y: (torch.where(torch.arange(len(x))[:, None] % 3 > 0, math.inf, x), y))


def another_shape() -> Task:
    return _task(lambda x, y: (x[:, :4], y))


def _numbers(change: Callable[[torch.Tensor], torch.Tensor]) -> Task:
    return _task(
        lambda x, y: (x, change(y.float())),
        classes=None,
        target_range=(0.0, 2.0),
        model=lambda: torch.nn.Linear(6, 1),
        loss=lambda out, y: (out[:, 0] - y) ** 2,  # (N, N) for targets of shape (N, 1)
    )


def column_of_numbers() -> Task:
    return _numbers(lambda y: y[:, None])


def infinite_loss() -> Task:
    return _task(lambda x, y: (x * 1e30, y), loss=lambda out, y: (out**2).sum(dim=1) + 0 * y)


def few() -> Task:
    return _task(lambda x, y: (x[: len(x) // 10], y[: len(y) // 10]))


def failing() -> Task:
    def load() -> TaskData:
        raise ValueError(f"cannot parse {SECRET!r}")

    return replace(blobs(), load=load)


HERE = "tests.study.test_usable"
OWN = [
    ("labels_from_1", "labels from 3 to 3, declared 0 to 2"),
    ("half_infinite", "inputs: .* not a number"),
    ("another_shape", r"inputs \(4,\) of .*inputs of \(6,\)"),
    ("column_of_numbers", r"targets must be of shape \(N,\)"),
    ("infinite_loss", "most losses are not finite"),
    ("few", "36 records can be used, and 360 are declared"),
]


@pytest.mark.parametrize(("factory", "reason"), OWN, ids=[name for name, _ in OWN])
def test_wrong_data_of_a_factory_spends_nothing(
    storage: str, capfd: pytest.CaptureFixture[str], factory: str, reason: str
) -> None:
    with closing(study_of(f"{HERE}:{factory}", storage)) as study:
        refused(study, reason, capfd)


def test_a_factory_that_fails_is_told_to_the_curator_alone(
    storage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with closing(study_of(f"{HERE}:failing", storage)) as study:
        with pytest.raises(UnreadableRecordsError) as caught:
            study.run()
        assert SECRET not in "".join(
            map(str, (caught.value, caught.value.__cause__, caught.value.__context__))
        )
        assert study.spent().epsilon == 0.0
        seen = Study(study.name, storage, curator=True)
        assert SECRET in seen.failures("one")[0]["traceback"]
        seen.close()
    shown = capfd.readouterr()
    assert SECRET not in shown.out + shown.err


def test_pictures_and_texts_of_other_labels_spend_nothing(
    tmp_path: Path, storage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "p.npz",
        x=rng.integers(0, 255, (120, 1, 4, 4), dtype=np.uint8),
        y=101 + np.arange(120) % 2,
    )
    spec = {
        "type": "images",
        "path": str(tmp_path / "p.npz"),
        "classes": [0, 1],
        "shape": [1, 4, 4],
    }
    spec |= {"train": 100, "validation": 10, "test": 10}
    with closing(study_of(spec, storage)) as study:
        refused(study, "such as '101', '102'; declared: '0', '1'", capfd)
    for name in ("0", "1"):
        (tmp_path / "folder" / name).mkdir(parents=True)
        for number in range(60):
            (tmp_path / "folder" / name / f"{number}.png").write_bytes(b"no picture")
    broken = {**spec, "path": str(tmp_path / "folder")}
    with closing(study_of(broken, storage, name="folder")) as study:
        refused(study, "120 of 120 records cannot be used", capfd)


def pictures(path: Path, x: Any, **changes: Any) -> dict[str, Any]:
    np.savez(path, x=x, y=np.arange(len(x)) % 2)
    spec = {"type": "images", "path": str(path), "classes": [0, 1], "shape": [1, 8, 8]}
    return {**spec, "train": 300, "validation": 50, "test": 50, **changes}


@pytest.mark.parametrize("kind", ["int64", "bool"])
def test_pictures_of_a_type_without_a_scale_are_refused(
    tmp_path: Path, storage: str, kind: str
) -> None:
    pixels = np.random.default_rng(0).integers(0, 100, (COUNT, 8, 8)).astype(kind)
    with closing(study_of(pictures(tmp_path / "p.npz", pixels), storage)) as study:
        with pytest.raises(TaskDataError, match=f"{kind}, whose scale.*uint8.*floats in"):
            study.run()
        assert study.spent().epsilon == 0.0


@pytest.mark.parametrize("kind", ["float32"])
def test_pixels_outside_of_their_range_spend_nothing(
    tmp_path: Path, storage: str, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    unit = np.random.default_rng(0).random((COUNT, 8, 8))
    for number, wrong in enumerate((unit * 255, unit * 16, 2 * unit - 1, (unit - 0.5) / 0.3)):
        spec = pictures(tmp_path / "p.npz", wrong.astype(kind))
        with closing(study_of(spec, storage, name=f"s{number}")) as study:
            refused(study, "pixels: 400 clipped to a bound.* lie in", capfd)
    few = np.where(np.arange(COUNT)[:, None, None] < 50, 1.0 + unit, unit).astype(kind)
    check = get_task(pictures(tmp_path / "p.npz", few)).check_records()
    assert sum(one.count() for one in check.findings if one.column == "pixels") == 50
    assert check.reason == ""


def test_a_study_that_is_charged_is_not_looked_at_again(
    tmp_path: Path, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = save(people(), tmp_path, "csv")
    with closing(study_of(task, storage)) as study:
        study._life.charge(list(study._life.plans().values()))
        save(people()[:20], tmp_path, "csv")
        study.run()  # the charge is spent: what is there is trained on
        assert study.spent().epsilon > 0


def test_the_command_line_tells_the_curator_alone(
    tmp_path: Path,
    storage: str,
    cli: Cli,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    frame = people().assign(y=101, seen=SECRET)
    spec = toy_spec(
        task=save(frame, tmp_path, "csv"),
        epochs=1,
        expected_batch_size=16,
        arms=[{"name": "one", **ARM}],
    )
    Path("spec.yaml").write_text(yaml.safe_dump(spec.model_dump(mode="json")))
    public = cli("study", "plan", "spec.yaml")
    assert public.code == 0
    assert "No data was touched." in public.out
    seen = cli("study", "plan", "spec.yaml", "--curator")
    assert "No data was touched." not in seen.out
    assert "such as '101'; declared: 'no', 'yes'" in " ".join(seen.out.split())
    assert f"no date (such as '{SECRET}'; dates are written like" in seen.out
    document = json.loads(cli("study", "plan", "spec.yaml", "--curator", "--json").out)
    assert document["records"]["stops"]
    assert "records" not in json.loads(cli("study", "plan", "spec.yaml", "--json").out)
    run = ("study", "run", "spec.yaml", "--storage", storage)
    refused_run = cli(*run)
    assert refused_run.code == 1
    assert "records do not fit what is declared" in refused_run.err
    assert "400" not in refused_run.err + refused_run.out
    curated = cli(*run, "--curator")
    assert curated.code == 1
    assert "cannot be used" not in curated.out
    assert "cannot be used" in curated.err
    assert not Path("mlruns").exists()
    shown = cli("study", "show", "toy", "--storage", storage)
    assert "planned" in shown.out
    ran = cli(*run, "--force", "--no-mlflow")
    assert ran.code == 0
    assert SECRET not in ran.out + ran.err
    page = tmp_path / "report.html"
    assert cli("study", "compare", "toy", "--html", str(page), "--storage", storage).code == 0
    exported = cli("study", "export", "toy", "--storage", storage).out
    for text in (page.read_text(), exported):
        assert SECRET not in text
        assert "with a label that is not declared" not in text


# The stage.


def vectors(path: Path, stage: Usable) -> float:
    return float(stage.sums(table(path))[0])


@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_one_record_moves_the_count_by_one_at_most(tmp_path: Path, adjacency: Adjacency) -> None:
    """Every record of many kinds, added, removed and replaced."""
    stage = Usable(noise_multiplier=1.0)
    frame = people()[:60]
    path = tmp_path / "people.csv"
    frame.to_csv(path, index=False)
    header, *lines = path.read_text().splitlines()
    kinds = [
        lines[0], "x", "old,f,low,2020-01-01,3,yes", "40,f,low,2020-01-01,3,Yes", ",,,,,",
        "40,f,low,nodate,3,no", "40,q,low,2020-01-01,3,no", "9999,f,low,1800-01-01,3,no",
        ",".join("a" * 9), "40,f,mid,2020-01-01,3,no",
    ]  # fmt: skip
    neighbours = (
        [[*lines[:5], kind, *lines[6:]] for kind in kinds]
        if adjacency is Adjacency.REPLACE_ONE
        else [[*lines, kind] for kind in kinds] + [lines[1:]]
    )
    before = vectors(path, stage)
    assert before == 60
    moves = set()
    for rows in neighbours:
        path.write_text("\n".join([header, *rows]) + "\n")
        moves.add(abs(vectors(path, stage) - before))
    assert moves == {0.0, 1.0}
    assert stage.sensitivity({}, adjacency) == 1.0


def _planned(stage: Usable, task: Any) -> Any:
    return plan_stage(
        stage,
        task,
        epsilon=4.0,
        delta=1e-5,
        adjacency=Adjacency.ADD_REMOVE,
        noise=NoiseOptions(),
        public_facts={},
        dataset=None,
    )


def test_the_event_and_the_noise(tmp_path: Path) -> None:
    """At 1e-4 of 150 releases: Kolmogorov-Smirnov, and a variance that finds 2/3 and 3/2 of the noise."""
    task = save(people(), tmp_path, "csv")
    plan = _planned(Usable(noise_multiplier=7.0), task)
    assert plan.event == Gaussian(7.0)
    assert plan.scale == 7.0
    drawn = [
        release_stage(plan, task, Streams(number.to_bytes(32, "big")))["usable"]
        for number in range(150)
    ]
    noise = (np.array(drawn) - COUNT) / 7.0
    assert stats.kstest(noise, "norm").pvalue > 1e-4
    for share, right in ((1.0, True), (2 / 3, False), (3 / 2, False)):
        tail = stats.chi2.cdf(((noise * share) ** 2).sum(), df=len(noise))
        assert bool(2 * min(tail, 1 - tail) > 1e-4) is right


@pytest.mark.parametrize("away", [-4.0, -1.0, 0.0, 1.0, 4.0])
def test_both_sides_of_its_decision(away: float) -> None:
    """It stops with probability Φ(-away) at so many deviations from the threshold; 2,000 draws, 1e-6."""
    stage, scale = Usable(noise_multiplier=5.0, at_least=0.5), 5.0
    rng = np.random.default_rng(5)
    count = 0.5 * 360 + away * scale
    stops = sum(
        bool(stage.refusal(stage.document(f"{HERE}:few", np.array([count + scale * z]), scale)))
        for z in rng.standard_normal(2000)
    )
    assert stats.binomtest(stops, 2000, stats.norm.cdf(-away)).pvalue > 1e-6


def test_a_study_of_too_few_stops_in_public(tmp_path: Path, storage: str) -> None:
    stages = [{"type": "usable", "epsilon_share": 0.2}]
    with closing(study_of(f"{HERE}:few", storage, stages=stages)) as study:
        assert len(study.stages) == 1
        for _ in range(2):  # the second draws nothing anew
            with pytest.raises(StageRefusedError) as caught:
                study.run()
            said = str(caught.value)
            (stage,) = study.stages
            assert f"about {max(stage.release['usable'], 0):,.0f} records can be used" in said
            assert "below 50% of the 360" in said
            assert [status.state for status in study.status()] == ["reserved"]
        spent = study.spent().epsilon
        study.run(force=True)
        assert study.spent().epsilon == spent
        assert [status.state for status in study.status()] == ["settled"]


def test_a_study_of_enough_goes_on_and_is_not_looked_at_before(
    tmp_path: Path, storage: str
) -> None:
    task = save(people(), tmp_path, "csv", id="age")
    del task["columns"]["age"]
    study = study_of(
        task,
        storage,
        stages=[{"type": "usable", "epsilon_share": 0.2, "at_least": 0.6}],
    )
    with closing(study):
        study.run()
        (stage,) = study.stages
        assert "usable records of 400 declared" in stage.words
        assert any("usable" in charge["arm"] for charge in study.certificate()["charges"])


@pytest.mark.parametrize(
    "fields", [{"at_least": 0}, {"at_least": 1.5}, {"at_least": "half"}, {"at_most": 0.5}]
)
def test_wrong_fields_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        make_stage({"type": "usable", **fields})


# What is counted, where splits, units and bounds are not those of plain rows.


def test_units_are_counted_as_the_task_has_them(tmp_path: Path) -> None:
    frame = people().assign(who=[f"p{i // 4}" for i in range(COUNT)])
    frame.loc[:59, "y"] = "perhaps"
    frame.loc[100, "who"] = None
    task = save(frame, tmp_path, "csv", group="who", max_per_group=4)
    task |= {"train": 80, "validation": 10, "test": 10}
    check = get_task(task).check_records()
    data = get_task(task).load()
    for split in check.splits:
        targets = getattr(data, split.split).y
        assert split.usable == int((targets >= 0).any(dim=1).sum())
    assert (check.what, check.usable, check.reason) == ("who", 85, "")
    few = get_task({**task, "train": 800, "validation": 100, "test": 100}).check_records()
    assert "85 whos can be used, and 1,000 are declared" in few.reason


def test_texts_are_counted_without_their_encoder(tmp_path: Path) -> None:
    from privtune.tables.raw_rows import TextRows
    from privtune.tasks.described import _Texts
    from privtune.tasks.partition import KEY, Sizes

    frame = pd.DataFrame({"text": [f"text {i}" for i in range(100)], "label": ["nein", "ja"] * 50})
    frame.loc[0, "text"] = None
    frame.to_json(tmp_path / "t.jsonl", orient="records", lines=True)
    made = _Texts(
        path=str(tmp_path / "t.jsonl"),
        rows=TextRows(text="text", tokenizer="", encoder="", length=8),
        label="label",
        classes=("no", "yes"),
        shape=(4,),
        sizes=Sizes(80, 10, 10),
        key=KEY,
    )
    check = made.examine()
    assert "100 of 100 records cannot be used" in check.reason
    assert "such as 'ja', 'nein'; declared: 'no', 'yes'" in check.reason
    right = replace(made, classes=("Nein", "JA ")).examine()
    assert (right.usable, right.reason) == (99, "")


def test_bounds_that_are_not_released_yet_leave_the_splits_open(tmp_path: Path) -> None:
    paid = {"age": {"bounds": "paid"}}
    task = save(people(), tmp_path, "csv", columns=paid)
    check = get_task(task).check_records()
    assert [split.split for split in check.splits] == ["all splits"]
    assert (check.usable, check.reason) == (COUNT, "")
    known = get_task({**task, "id": "seen"}).check_records()
    assert [split.split for split in known.splits] == ["train", "validation", "test"]
    wrong = save(people().assign(age="old"), tmp_path, "csv", columns=paid)
    assert "age: 400 not a number" in get_task(wrong).check_records().reason


@pytest.mark.parametrize("kind", KINDS)
def test_a_class_may_be_a_word_for_nothing(tmp_path: Path, storage: str, kind: str) -> None:
    """Such words are declared as class, category and level: all of them count, as in the training."""
    frame = people().replace({"no": "none", "f": "NA", "low": "null"})
    words = {"sex": {"categories": ["NA", "m"]}, "level": {"ordinal": ["null", "high"]}}
    columns = {"age": [0, 120], **words}
    task = save(frame, tmp_path, kind, classes=["none", "yes"], columns=columns)
    check = get_task(task).check_records()
    data = get_task(task).load()
    trained = sum(int((part.y >= 0).sum()) for part in vars(data).values())
    assert (check.usable, check.reason) == (trained, "") == (COUNT, "")
    assert check.findings == ()
    stages = [{"type": "usable", "epsilon_share": 0.2}]
    with closing(study_of(task, storage, stages=stages)) as study:
        study.run()


def test_nothing_is_no_example(tmp_path: Path) -> None:
    frame = people()
    frame["y"] = frame["y"].astype(object).where(np.arange(COUNT) % 2 == 0, None)
    check = get_task(save(frame, tmp_path, "csv")).check_records()
    assert [one.words() for one in check.findings] == [
        f"y: {COUNT // 2} without a target"  # equal content: they share a split
    ]


def _rare(word: str, count: int = 8) -> Change:
    """A rare class, written otherwise."""
    return lambda frame: frame.assign(y=np.where(np.arange(COUNT) < count, word, "no"))


LOST_CLASSES: list[tuple[Change, list[Any]]] = [
    (_rare("positive", 1), ["no", "yes"]),  # one class is left
    (lambda f: f.assign(y=1 + np.arange(COUNT) % 30), list(range(30))),
    (_rare("no"), ["no", "yes"]),
    (lambda f: f.assign(y="no", age=f["age"].where(f.index > 5, "old")), ["no", "yes"]),
]


@pytest.mark.parametrize(("change", "classes"), LOST_CLASSES)
def test_a_class_that_is_lost_spends_nothing(
    tmp_path: Path,
    storage: str,
    change: Change,
    classes: list[Any],
    capfd: pytest.CaptureFixture[str],
) -> None:
    task = save(change(people()), tmp_path, "csv", classes=classes)
    with closing(study_of(task, storage)) as study:
        refused(study, "none has the declared|and none has", capfd)


def test_a_rare_class_may_be_absent_beside_stray_labels(tmp_path: Path) -> None:
    frame = people()
    frame.loc[:1, "y"] = "perhaps"
    frame.loc[2, "y"] = "often"
    task = save(frame, tmp_path, "csv", classes=["no", "yes", "rare"])
    assert get_task(task).check_records().reason == ""


def test_one_rare_category_may_be_absent(tmp_path: Path) -> None:
    columns = {"age": [0, 120], "sex": {"categories": ["d"]}}
    assert get_task(save(people(), tmp_path, "csv", columns=columns)).check_records().reason == ""
    columns["sex"] = {"categories": ["male", "female"]}
    reason = get_task(save(people(), tmp_path, "csv", columns=columns)).check_records().reason
    assert "sex: 400 not declared" in reason


SAME: list[tuple[Change, dict[str, Any], str]] = [
    (column("visits", lambda v: 7), RANGE, "the targets of all usable records are the same"),
    (lambda f: f.assign(age=0.0), {"columns": {"age": [0, 120]}}, "the inputs of all usable"),
    (lambda f: f.assign(id=1), {"id": "id"}, "0 records of split .* declared; .*1 different ids"),
    (lambda f: f.assign(id=""), {"id": "id"}, "0 records of split .* another key"),
]


@pytest.mark.parametrize(("change", "declared", "reason"), SAME)
def test_records_that_are_all_the_same_spend_nothing(
    tmp_path: Path,
    storage: str,
    change: Change,
    declared: dict[str, Any],
    reason: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    task = save(change(people()), tmp_path, "csv", **declared)
    with closing(study_of(task, storage)) as study:
        refused(study, reason, capfd)


def test_few_kinds_of_rows_are_named_as_the_cause(tmp_path: Path) -> None:
    """Eight kinds of rows: a split that keeps half of its records is right, and the others say why."""
    columns = {"sex": {"categories": ["f", "m"]}, "level": {"ordinal": ["low", "high"]}}
    task = save(people(), tmp_path, "csv", columns=columns)
    stopped = 0
    for key in map(str, range(30)):
        check = get_task({**task, "key": key}).check_records()
        assert "400 usable rows have 8 different contents" in check.lines()[-1]
        if all(2 * split.usable >= split.declared for split in check.splits):
            assert check.reason == ""
        if check.reason:
            stopped += 1
            assert "8 different contents" in check.reason
            assert "another key" in check.reason
    assert stopped > 0
    assert get_task({**task, "id": "age"}).check_records().clumped == ""


@pytest.mark.postgres
@pytest.mark.parametrize("where", ["", " WHERE 100 / (k - 5) < 1000"])
def test_a_row_that_cannot_be_computed_is_told_to_the_curator_alone(
    storage: str, capfd: pytest.CaptureFixture[str], where: str
) -> None:
    url = os.environ.get("PRIVTUNE_TEST_POSTGRES_URL", "")
    if not url:
        pytest.skip("PRIVTUNE_TEST_POSTGRES_URL is not set")
    engine = sa.create_engine(url)
    drop = sa.text("DROP TABLE IF EXISTS usable_rows")
    try:
        with engine.begin() as connection:
            connection.execute(drop)
            connection.execute(sa.text("CREATE TABLE usable_rows (k int, y text)"))
            for k in range(10):
                connection.execute(sa.text(f"INSERT INTO usable_rows VALUES ({k}, 'no')"))
        task = table("", columns={"k": [0, 10]}, url=url)
        task["query"] = (
            f"SELECT {'k' if where else '100 / (k - 5) AS k'}, y FROM usable_rows{where}"
        )
        del task["path"]
        with closing(study_of(task, storage)) as study:
            with pytest.raises(UnreadableRecordsError) as caught:
                study.run()
            assert "zero" not in str(caught.value)
            assert study.spent().epsilon == 0.0
            seen = Study(study.name, storage, curator=True)
            assert "division by zero" in seen.failures("one")[0]["traceback"]
            seen.close()
        shown = capfd.readouterr()
        assert "zero" not in shown.out + shown.err
    finally:
        with engine.begin() as connection:
            connection.execute(drop)
        engine.dispose()
