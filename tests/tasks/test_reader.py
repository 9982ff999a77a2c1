"""Cells keep what tells records apart, whatever stands beside them in the file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from privtune.tables import reader
from privtune.tables.cells import column_of, texts
from privtune.tables.columns import Number

pytestmark = pytest.mark.quick


def rows(source: reader.Source, *names: str) -> list[tuple[object, ...]]:
    columns = [
        [c for batch in source.read(names) for c in texts(batch[n]).to_pylist()] for n in names
    ]
    return list(zip(*columns, strict=True))


def write_text(separator: str) -> Callable[[pa.Table, Path], None]:
    def write(table: pa.Table, path: Path) -> None:
        lines = [separator.join(table.schema.names)]
        lines += [separator.join(map(str, row.values())) for row in table.to_pylist()]
        path.write_text("\n".join(lines))

    return write


def write_lines(table: pa.Table, path: Path) -> None:
    path.write_text("\n".join(json.dumps(row) for row in table.to_pylist()))


WRITERS: dict[str, Callable[[pa.Table, Path], object]] = {
    ".csv": write_text(","),
    ".tsv": write_text("\t"),
    ".jsonl": write_lines,
    ".ndjson": write_lines,
    ".parquet": parquet.write_table,
    ".arrow": feather.write_feather,
    ".feather": feather.write_feather,
}


@pytest.mark.parametrize("suffix", reader.FORMATS)
def test_every_kind_of_table_file_is_read(tmp_path: Path, suffix: str) -> None:
    assert suffix in WRITERS, "add to WRITERS how a test writes such a file"
    path = tmp_path / f"people{suffix}"
    WRITERS[suffix](pa.table({"age": [34, 51], "who": ["x", "y"]}), path)
    assert rows(reader.open_table(path), "age", "who") == [("34", "x"), ("51", "y")]


def test_two_ids_that_are_one_float_stay_two_people(tmp_path: Path) -> None:
    ids = [Decimal(2**53), Decimal(2**53 + 1)]
    table = pa.table({"who": pa.array(ids, pa.decimal128(38, 0))})
    parquet.write_table(table, tmp_path / "a.parquet")
    found = rows(reader.open_table(tmp_path / "a.parquet"), "who")
    assert found == [(str(2**53),), (str(2**53 + 1),)]


def test_an_ending_may_be_written_in_capitals(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"who": ["x"]}), tmp_path / "A.PARQUET")
    assert rows(reader.open_table(tmp_path / "A.PARQUET"), "who") == [("x",)]


def test_a_boolean_id_is_the_same_text_beside_any_others(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"who": true}\n')
    (tmp_path / "b.jsonl").write_text('{"who": true}\n{"who": "x"}\n')
    alone, beside = (rows(reader.open_table(tmp_path / f"{n}.jsonl"), "who") for n in "ab")
    assert alone == beside[:1] == [("True",)]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_end_as_files_end_them(tmp_path: Path, end: str) -> None:
    (tmp_path / "a.csv").write_bytes(end.join(["a,b", "1,2", "3,4"]).encode())
    assert rows(reader.open_table(tmp_path / "a.csv"), "a", "b") == [("1", "2"), ("3", "4")]


@pytest.mark.parametrize("block", [20, 1 << 20])
def test_odd_lines_keep_their_order_whatever_the_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(reader, "_BLOCK", block)
    lines = ["a,b", "1", "2,3", "4,5", "6,7", '8,"9', "10,11", "12", '13,"14']
    (tmp_path / "a.csv").write_text("\n".join(lines))
    found = [row[0] for row in rows(reader.open_table(tmp_path / "a.csv"), "a", "b")]
    assert found == ["2", "4", "6", "10", "8", "13", "1", "12"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_mark_of_utf_8_stays_wherever_a_block_begins(tmp_path: Path, encoding: str) -> None:
    form = reader.Form(encoding=encoding)
    for name, before in (("a", ""), ("b", "1,2\n")):
        (tmp_path / f"{name}.csv").write_text(f"a,b\n{before}\ufeff3,4\n", encoding="utf-8")
    alone, beside = (
        rows(reader.open_table(tmp_path / f"{name}.csv", form=form), "a", "b") for name in "ab"
    )
    assert alone == beside[1:] == [("\ufeff3", "4")]


def test_a_category_that_is_no_utf_8_ends_no_reading(tmp_path: Path) -> None:
    buffers = [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    cells = pa.concat_arrays([pa.array(["x"]), pa.Array.from_buffers(pa.string(), 1, buffers)])
    parquet.write_table(pa.table({"a": cells.dictionary_encode()}), tmp_path / "a.parquet")
    found = rows(reader.open_table(tmp_path / "a.parquet"), "a")
    assert found == [("x",), ("\ufffd\ufffd",)]


def test_a_zero_has_one_sign_beside_any_others() -> None:
    number = Number(name="a", low=-1.0, high=1.0, missing=0.0)
    for cells in ([-0.0], [-0.0, "x"], ["-0.0"]):
        assert not np.signbit(number.read(column_of(cells))[0][0])


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_no_table_is_in_memory_as_a_whole(tmp_path: Path, ending: str) -> None:
    rows, names = 400_000, [f"c{number}" for number in range(10)]
    numbers = np.random.default_rng(0).standard_normal((len(names), rows))
    path = tmp_path / f"large{ending}"
    table = pa.table(dict(zip(names, numbers, strict=True)))
    if ending == ".parquet":
        parquet.write_table(table, path, row_group_size=20_000)
    else:
        feather.write_feather(table, path, compression="lz4", chunksize=20_000)
    size = table.nbytes
    del table
    before = pa.total_allocated_bytes()
    most = 0
    for _ in reader.open_table(path, names, reader.Form()).batches(names):
        time.sleep(0.02)  # whoever hashes records is slower than whoever reads ahead
        most = max(most, pa.total_allocated_bytes() - before)
    assert 0 < most < 0.4 * size
