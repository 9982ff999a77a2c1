"""No property of one record changes how another is read, or whether a table is read at all."""

from __future__ import annotations

import datetime
import json
import os
import socket
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from privtune.errors import InvalidInputError
from privtune.files import read_bounded, regular_file
from privtune.study import SpecError, StudySpec
from privtune.tasks import TaskDataError, get_task
from privtune.tasks.tabular import read_table
from tests.cli.conftest import Cli, cli  # noqa: F401  (a fixture)

COLUMNS = {
    "age": [0, 100],
    "sex": {"categories": ["f", "m"]},
    "level": {"ordinal": ["low", "high"]},
    "seen": {"date": ["2000-01-01", "2030-01-01"]},
}


def table(path: str, **changes: Any) -> dict[str, Any]:
    spec = {"type": "tabular", "path": path, "target": "y", "classes": [0, 1], "columns": COLUMNS}
    return {**spec, "id": "who", "train": 40, "validation": 5, "test": 5, **changes}


def people(count: int = 50) -> list[dict[str, Any]]:
    rng = np.random.default_rng(3)
    return [
        {
            "who": f"p{i}",
            "age": round(float(rng.uniform(0, 100)), 3),
            "sex": "fm"[i % 2],
            "level": ["low", "high"][i % 2],
            "seen": f"20{10 + i % 10}-05-0{1 + i % 9}",
            "y": i % 2,
        }
        for i in range(count)
    ]


def write(folder: Path, kind: str, rows: list[Any]) -> dict[str, Any]:
    """Write records; a str stands for a whole line."""
    path = folder / f"p.{kind}"
    names = list(people(1)[0])
    if kind == "jsonl":
        path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
        return table(str(path))
    if kind == "csv":
        lines = [
            r if isinstance(r, str) else ",".join(str(r.get(n, "")) for n in names) for r in rows
        ]
        path.write_text("\n".join([",".join(names), *lines]) + "\n")
        return table(str(path))
    path.unlink(missing_ok=True)
    with sqlite3.connect(path) as made:
        made.execute(f"CREATE TABLE p ({', '.join(names)})")
        for row in rows:
            made.execute("INSERT INTO p VALUES (?,?,?,?,?,?)", [row.get(n) for n in names])
    made.close()
    spec = table("", url=f"sqlite:///{path}", query="SELECT * FROM p")
    return {name: value for name, value in spec.items() if name != "path"}


def read(spec: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return every record as it is read, by its id."""
    task = get_task(spec)
    task.check()
    task.load()
    made = read_table(spec)
    found = {}
    for part in made.parts(with_inputs=True)[1]:
        assert part.ids is not None
        rows = zip(part.ids, part.x.tolist(), part.y, strict=True)
        found |= {i: (*row, float(t)) for i, row, t in rows}
    return found


ODD: list[tuple[str, Any]] = [
    ("jsonl", {"who": "odd", "extra": 3, "more": [1, 2]}),
    ("jsonl", {"who": "odd", "age": {"value": 3}, "y": 1}),
    ("jsonl", {"who": "odd", "age": [3], "sex": ["f"], "level": [], "seen": {}, "y": [1]}),
    ("jsonl", {"who": "odd", "age": "three", "y": "one"}),
    ("jsonl", {"who": "odd", "age": True, "sex": 3, "level": None, "seen": 5, "y": 1.0}),
    ("jsonl", {"who": "odd\ud800", "age": 3, "sex": "\udfff", "y": 1}),
    ("jsonl", '{"who": "odd", "age": NaN, "y": Infinity}'),
    ("jsonl", '{"who": "odd", "age": 1e999, "y": 1}'),
    ("jsonl", '{"who": "odd", "age": ' + "9" * 5000 + "}"),
    ("jsonl", "[" * 100_000),
    ("jsonl", "{broken"),
    ("jsonl", "[1, 2]"),
    ("jsonl", "{}"),
    ("jsonl", "3"),
    ("csv", "odd,3"),
    ("csv", "odd"),
    ("csv", "odd,3,f,low,2010-01-01,1,more,cells"),
    ("csv", 'odd,"3,f,low,2010-01-01,1'),
    ("csv", 'odd,3"4,"f,low,2010-01-01,1'),
    ("csv", 'odd,"3","f",low,"2010""-01-01",1'),
    ("csv", "odd,three,x,none,yesterday,perhaps"),
    ("csv", "odd," + "9" * 200_000 + ",f,low,2010-01-01,1"),
    ("csv", "odd,\x00,f,low,2010-01-01,1"),
    ("csv", "odd,nan,f,low,99999-01-01,1"),
    ("db", {"who": "odd", "age": "three", "sex": 3.5, "level": b"\xff", "seen": 7, "y": "x"}),
    ("db", {"who": None, "age": None, "y": None}),
    ("db", {"who": "odd", "age": 2**62, "seen": "9999-99-99", "y": 1}),
]


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize(("kind", "odd"), ODD, ids=[str(n) for n in range(len(ODD))])
def test_one_record_changes_no_other(tmp_path: Path, kind: str, odd: Any, place: str) -> None:
    rows: list[Any] = list(people())
    before = read(write(tmp_path, kind, rows))
    rows.insert({"first": 0, "last": 50}[place], odd)
    after = read(write(tmp_path, kind, rows))
    assert len(after) == len(before) + 1 == 51
    np.testing.assert_array_equal([after[who] for who in before], list(before.values()))


def test_text_that_is_not_utf8_is_one_cell_of_sqlite(tmp_path: Path) -> None:
    spec = write(tmp_path, "db", people())
    before = read(spec)
    with sqlite3.connect(tmp_path / "p.db") as made:
        made.execute("INSERT INTO p (who, sex) VALUES ('odd', CAST(x'ff' AS TEXT))")
    made.close()
    after = read(spec)
    assert {who: after[who] for who in before} == before


def test_a_date_that_python_has_not_is_one_cell_of_parquet(tmp_path: Path) -> None:
    rows = people()
    days = [datetime.date.fromisoformat(row["seen"]) for row in rows]
    base = {name: [row[name] for row in rows] for name in rows[0]}

    def save(extra: int | None) -> dict[str, Any]:
        columns = {
            **base,
            "seen": pa.array([datetime.datetime(d.year, d.month, d.day) for d in days]),
        }
        if extra is not None:
            odd = {"who": ["odd"], "age": [3.0], "sex": ["f"], "level": ["low"], "y": [1]}
            columns = {n: [*base[n], *odd[n]] for n in odd} | {
                "seen": pa.concat_arrays(
                    [columns["seen"], pa.array([extra], pa.int64()).cast(pa.timestamp("us"))]
                )
            }
        pq.write_table(pa.table(columns), tmp_path / "p.parquet")
        return table(str(tmp_path / "p.parquet"))

    before = read(save(None))
    after = read(save(10**18))  # in the year 33,658
    assert {who: after[who] for who in before} == before
    assert after["odd"][-1] == -1.0


def test_a_key_that_no_record_has_is_missing_of_each(tmp_path: Path) -> None:
    rows = [{name: value for name, value in row.items() if name != "age"} for row in people()]
    found = read(write(tmp_path, "jsonl", rows))
    assert {row[0] for row in found.values()} == {0.0}  # the middle of the bounds
    assert all(row[-1] >= 0 for row in found.values())


def test_a_csv_files_header_is_public_and_its_cells_are_not(tmp_path: Path) -> None:
    spec = write(tmp_path, "csv", [{**row, "age": "old"} for row in people()])
    get_task(spec).check()  # the records say nothing here
    with pytest.raises(TaskDataError, match="lacks the declared columns height"):
        get_task({**spec, "columns": {"height": [0, 3]}}).check()


def test_a_grouped_table_without_records_is_read(tmp_path: Path) -> None:
    spec = write(tmp_path, "csv", [])
    del spec["id"]
    data = get_task({**spec, "group": "who", "max_per_group": 2}).load()
    assert [int((part.y >= 0).sum()) for part in (data.train, data.validation, data.test)] == [
        0
    ] * 3


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(str(path))
    bound.close()


NO_FILES: list[tuple[str, Callable[[Path], Any]]] = [
    ("a pipe", _fifo),
    ("a device", lambda path: path.symlink_to("/dev/zero")),
    ("a folder", Path.mkdir),
    ("a socket", _socket),
]


@pytest.mark.parametrize(("what", "make"), NO_FILES, ids=[name for name, _ in NO_FILES])
def test_what_is_no_regular_file_is_refused_without_opening_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, make: Callable[[Path], Any]
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    said = f"it is {what}, not a regular file"
    for suffix in ("csv", "jsonl", "parquet", "arrow"):
        make(Path(f"p.{suffix}"))
        with pytest.raises(TaskDataError, match=said):
            get_task(table(f"p.{suffix}")).check()
    make(Path("p.db"))
    asked = {k: v for k, v in table("").items() if k != "path"}
    with pytest.raises(TaskDataError, match=said):
        get_task({**asked, "url": "sqlite:///p.db", "query": "SELECT * FROM p"}).check()
    make(Path("w.safetensors"))
    sizes = {"train": 40, "validation": 5, "test": 5}
    fine = {"type": "fine-tuning", "task": "digits-mlp", "pretrained": "w.safetensors"}
    with pytest.raises(InvalidInputError, match=r"file or a folder|holds no"):
        get_task(fine)
    Path("weights").mkdir()
    make(Path("weights/w.safetensors"))
    with pytest.raises(InvalidInputError, match="no regular file"):
        get_task({**fine, "pretrained": "weights"})
    if what == "a folder":
        return
    make(Path("p.npz"))
    spec = {"type": "images", "classes": [0, 1], "shape": [1, 4, 4], **sizes}
    for look in ("check", "check_header"):
        with pytest.raises(TaskDataError, match=said):
            getattr(get_task({**spec, "path": "p.npz"}), look)()
    for name in ("0", "1"):
        Path("pictures", name).mkdir(parents=True)
    make(Path("pictures/0/p.png"))
    data = get_task({**spec, "path": "pictures"}).load()
    for part in (data.train, data.validation, data.test):
        lost = part.y < 0 if part.unusable is None else part.unusable | (part.y < 0)
        assert bool(lost.all())


def test_what_is_read_whole_is_bounded(tmp_path: Path) -> None:
    big = tmp_path / "big.yaml"
    big.touch()
    os.truncate(big, 17 << 20)
    with pytest.raises(SpecError, match=r"17,825,792 bytes; 16,777,216 are the most"):
        StudySpec.from_file(big)
    assert regular_file(big) == big  # tables are read some records at a time
    small = tmp_path / "small.yaml"
    small.write_text(yaml.safe_dump({"name": "x"}))
    assert read_bounded(small) == small.read_bytes()
    with pytest.raises(OSError, match="5 are the most"):
        read_bounded(small, most=5)
    if Path("/proc/self/status").exists():  # says that it has no bytes
        with pytest.raises(OSError, match="more than 10 bytes"):
            read_bounded(Path("/proc/self/status"), most=10)
