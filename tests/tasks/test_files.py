"""Tables as people bring them: each is read as a person would, or the curator is told what to write."""

from __future__ import annotations

import datetime
import gzip
import io
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from privtune.errors import InvalidInputError
from privtune.tables.cells import Notation, moment_of, placer
from privtune.tasks import TaskDataError, get_task
from privtune.tasks.tabular import read_table

COUNT = 400
NAMES = ["who", "age", "income", "town", "seen", "ok", "y"]
COLUMNS: dict[str, Any] = {
    "age": [18, 100],
    "income": [0, 100000],
    "town": {"categories": ["Zürich", "Bern", "Genf"]},
    "seen": {"date": ["2014-01-01", "2025-01-01"]},
    "ok": {"categories": [False, True]},
}
Row = dict[str, Any]


def people() -> list[Row]:
    rng = np.random.default_rng(1)
    return [
        {
            "who": f"p{i}",
            "age": int(rng.integers(20, 90)),
            "income": round(float(rng.uniform(100, 99000)), 2),
            "town": ["Zürich", "Bern", "Genf"][i % 3],
            "seen": datetime.date(2015, 1, 1) + datetime.timedelta(days=int(rng.integers(0, 3000))),
            "ok": bool(i % 2),
            "y": ["no", "yes"][int(rng.integers(0, 2))],
        }
        for i in range(COUNT)
    ]


def spec(path: Path, column: tuple[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    columns = COLUMNS if column is None else {**COLUMNS, column[0]: column[1]}
    sizes = {"train": 320, "validation": 40, "test": 40}
    known = {"type": "tabular", "path": str(path), "target": "y", "classes": ["no", "yes"]}
    return {**known, "columns": columns, "id": "who", **sizes, **changes}


def read(task: dict[str, Any]) -> dict[str, list[float]]:
    """Return every record's numbers by its id."""
    get_task(task).check()
    found = {}
    for part in read_table(task).parts(with_inputs=True)[1]:
        assert part.ids is not None
        rows = zip(part.ids, part.x.tolist(), part.y, strict=True)
        found |= {who: [*x, float(y)] for who, x, y in rows}
    return found


def text(
    sign: str = ",", end: str = "\n", *, header: list[str] = NAMES, **how: Callable[[Any], Any]
) -> str:
    """Return people as CSV, some columns written in another way."""

    def cell(value: Any) -> str:
        return f'"{value}"' if sign in str(value) else str(value)

    rows = [[how.get(n, str)(row[n]) for n in NAMES] for row in people()]
    return end.join(sign.join(map(cell, row)) for row in [header, *rows]) + end


def marked(mark: str, point: str, digits: int = 2) -> Callable[[float], str]:
    signs = {",": mark, ".": point}
    return lambda value: "".join(signs.get(one, one) for one in f"{value:,.{digits}f}")


def dated(form: str) -> Callable[[datetime.date], str]:
    return lambda day: day.strftime(form)


def since(unit: int) -> Callable[[datetime.date], int]:
    first = datetime.date(1970, 1, 1)
    return lambda day: (day - first).days * 86_400 * unit


def swap(pair: str) -> Callable[[Any], str]:
    no, yes = pair.split()
    return lambda value: yes if value in (True, "yes") else no


def lines(**how: Callable[[Any], Any]) -> str:
    rows = [{n: how.get(n, lambda v: v)(v) for n, v in row.items()} for row in people()]
    return "".join(json.dumps(row, default=str) + "\n" for row in rows)


def stored(**how: Callable[[Any], Any]) -> bytes:
    columns = {n: [how.get(n, lambda v: v)(row[n]) for row in people()] for n in NAMES}
    made = io.BytesIO()
    parquet.write_table(pa.table(columns), made)
    return made.getvalue()


PAIRS = [
    "false true",
    "False True",
    "FALSE TRUE",
    "f t",
    "no yes",
    "N Y",
    "0 1",
    "0.0 1.0",
    "off on",
]
Case = tuple[str, str, str | bytes, dict[str, Any]]

AS_THEY_ARE: list[Case] = [
    ("plain", "csv", text(), {}),
    ("semicolons", "csv", text(";"), {}),
    ("tabs", "tsv", text("\t"), {}),
    ("tabs, declared", "csv", text("\t"), {"delimiter": "tab"}),
    ("bars", "txt", text("|"), {}),
    ("colons, declared", "csv", text(":", seen=dated("%Y-%m-%d")), {"delimiter": ":"}),
    ("byte order mark", "csv", "\ufeff" + text(";"), {}),
    ("Excel's first line", "csv", "sep=;\n" + text(";"), {}),
    ("Windows", "csv", text(end="\r\n"), {}),
    ("blanks in the header", "csv", text(header=[f" {name} " for name in NAMES]), {}),
    ("a name twice, not read", "csv", text().replace("y\n", "y,z,z\n", 1), {}),
    ("labels in another case", "csv", text(y=str.title), {}),
    ("labels with blanks", "csv", text(y=lambda y: f" {y.upper()} "), {}),
    ("labels with marks", "csv", text(y=lambda y: f"{y}\u200b"), {}),
    ("1.0 for 1", "csv", text(y=swap("0.0 1.0")), {"classes": [0, 1]}),
    ("1.0 for yes", "csv", text(y=swap("0.0 1.0")), {}),
    ("unquoted YAML", "csv", text(), {"classes": [False, True]}),
    *((f"booleans {pair}", "csv", text(ok=swap(pair)), {}) for pair in PAIRS),
    ("decomposed letters", "csv", text().replace("ü", "u\u0308"), {}),
    ("Latin-1", "csv", text().encode("latin-1"), {"encoding": "latin-1"}),
    ("Windows' letters", "csv", text().encode("cp1252"), {"encoding": "cp1252"}),
    ("Latin-1 in JSON", "jsonl", lines().encode("latin-1"), {"encoding": "latin-1"}),
    ("dates of digits", "csv", text(seen=dated("%Y%m%d")), {}),
    ("dates with a time", "csv", text(seen=dated("%Y-%m-%d 00:00:00+00:00")), {}),
    ("JSON lines", "jsonl", lines(), {}),
    ("booleans of JSON", "jsonl", lines(y=lambda y: y == "yes"), {}),
    ("numbers of JSON, a column of text", "jsonl", lines(income=str), {}),
    ("Parquet", "parquet", stored(), {}),
    ("booleans of Parquet", "parquet", stored(y=lambda y: y == "yes"), {"classes": [0, 1]}),
    ("decimals of Parquet", "parquet", stored(income=lambda v: Decimal(str(v))), {"decimal": ","}),
    ("a question mark", "csv", text(), {"na_values": ["?", -999]}),
]  # fmt: skip
"""Files that need no more than is declared here to be read as people mean them."""

INCOME, SEEN = COLUMNS["income"], COLUMNS["seen"]


def amount(**said: Any) -> dict[str, Any]:
    return {"columns": {**COLUMNS, "income": {"bounds": INCOME, **said}}}


def day(**said: Any) -> dict[str, Any]:
    return {"columns": {**COLUMNS, "seen": {**SEEN, **said}}}


MENDED: list[tuple[str, str, str | bytes, str, dict[str, Any]]] = [
    ("1,234.50", "csv", text(income=marked(",", ".")), 'thousands: ","', amount(thousands=",")),
    ("1.234,50", "csv", text(";", income=marked(".", ",")), 'thousands: "."', {"thousands": "."}),
    ("1 234,50", "csv", text(";", income=marked(" ", ",")), 'decimal: ",", thousands: " "',
     {"decimal": ",", "thousands": " "}),
    ("narrow blanks", "csv", text(";", income=marked("\u202f", ",")), 'thousands: " "',
     amount(decimal=",", thousands=" ")),
    ("1'234.50", "csv", text(income=marked("'", ".")), 'thousands: "\'"', amount(thousands="'")),
    ("1234,50", "csv", text(";", income=marked("", ",")), 'write decimal: ","', {"decimal": ","}),
    ("1,234 or one and a bit", "csv", text(income=marked(",", ".", 0)),
     'decimal: "," or thousands: ","', amount(thousands=",")),
    ("1.234 or one and a bit", "csv", text(income=marked(".", ",", 0)),
     'thousands: "." or decimal: "."', amount(thousands=".")),
    ("in JSON", "jsonl", lines(income=marked(".", ",")), 'thousands: "."', {"thousands": "."}),
    ("31.12.2020", "csv", text(seen=dated("%d.%m.%Y")), 'write format: "%d.%m.%Y"', day(format="%d.%m.%Y")),
    ("12/31/2020", "csv", text(seen=dated("%m/%d/%Y")), 'write format: "%m/%d/%Y"', day(format="%m/%d/%Y")),
    ("31/12/2020", "csv", text(seen=dated("%d/%m/%Y")), 'write format: "%d/%m/%Y"', day(format="%d/%m/%Y")),
    ("31 Dec 2020", "csv", text(seen=dated("%d %b %Y")), 'format: "%d %b %Y"', day(format="%d %b %Y")),
    *((f"since 1970 in {unit}", kind, write(seen=since(many)), f'write unit: "{unit}"', day(unit=unit))
      for unit, many in (("s", 1), ("ms", 1000)) for kind, write in (("csv", text), ("jsonl", lines))),
    ("months of one digit", "csv", text(seen=lambda d: f"{d.year}-{d.month}-{d.day}"), 'format: "%Y-%m-%d"',
     day(format="%Y-%m-%d")),
    ("half days", "csv", text(seen=dated("%m/%d/%Y %I:%M %p")), 'format: "%m/%d/%Y %I:%M %p"',
     day(format="%m/%d/%Y %I:%M %p")),
    ("Latin-1", "csv", text().encode("latin-1"), "write encoding: cp1252", {"encoding": "cp1252"}),
]  # fmt: skip
"""Files, what the curator is told to write, and that line: the file is read with it."""

LOST: list[tuple[str, str, str | bytes, dict[str, Any], str]] = [
    ("without a header", "csv", text().partition("\n")[2], {}, "first line must name the columns"),
    ("another delimiter", "csv", text(":", seen=dated("%Y-%m-%d")), {}, "write delimiter: if none of"),
    ("Age", "csv", text(header=["who", "Age", *NAMES[2:]]), {}, "lacks the .* age. It has Age"),
    ("a name twice", "csv", text(header=[*NAMES[:-1], "y", "age"]), {}, "two columns called age"),
    ("UTF-16", "csv", text().encode("utf-16"), {}, "in UTF-16: save it as CSV in UTF-8"),
    ("Latin-1 in the header", "csv", text(header=[*NAMES[:-1], "größe"]).encode("latin-1"),
     {"target": "größe"}, "header is not UTF-8: write encoding: cp1252"),
    ("gzip", "csv.gz", gzip.compress(text().encode()), {}, "compressed: unpack it"),
    ("Excel", "xlsx", b"PK\x03\x04", {}, "a workbook: save its sheet as CSV"),
    ("one JSON", "json", "[" + lines().replace("\n", ",") + "]", {}, "one object a line"),
    ("numbers as text", "parquet", stored(age=str), {}, 'Write decimal: "."'),
]  # fmt: skip
"""Files that are refused by their names, headers and types, which are public."""


def _cases(table: list[Any]) -> dict[str, Any]:
    return {"argvalues": [case[1:] for case in table], "ids": [case[0] for case in table]}


def save(folder: Path, kind: str, data: str | bytes, **changes: Any) -> dict[str, Any]:
    path = folder / f"people.{kind}"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return spec(path, **changes)


@pytest.fixture(scope="module")
def meant(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    return read(save(tmp_path_factory.mktemp("meant"), "csv", text()))


@pytest.mark.parametrize(("kind", "data", "said"), **_cases(AS_THEY_ARE))
def test_a_file_is_read_as_a_person_would(
    tmp_path: Path,
    meant: dict[str, list[float]],
    kind: str,
    data: str | bytes,
    said: dict[str, Any],
) -> None:
    task = save(tmp_path, kind, data, **said)
    found = read(task)
    assert found.keys() == meant.keys()
    np.testing.assert_allclose([found[who] for who in meant], list(meant.values()), atol=1e-6)
    assert get_task(task).check_records().reason == ""


@pytest.mark.parametrize(("kind", "data", "line", "said"), **_cases(MENDED))
def test_the_curator_is_told_the_line_that_mends_a_file(
    tmp_path: Path,
    meant: dict[str, list[float]],
    kind: str,
    data: str | bytes,
    line: str,
    said: dict[str, Any],
) -> None:
    reason = get_task(save(tmp_path, kind, data)).check_records().reason
    assert line in reason
    assert "\n" not in reason
    task = save(tmp_path, kind, data, **said)
    found = read(task)
    # Half a unit of an income is 1e-5 of its range.
    np.testing.assert_allclose([found[who] for who in meant], list(meant.values()), atol=2e-5)
    assert get_task(task).check_records().reason == ""


@pytest.mark.parametrize(("kind", "data", "said", "message"), **_cases(LOST))
def test_a_file_that_is_no_such_table_is_refused_by_its_header(
    tmp_path: Path, kind: str, data: str | bytes, said: dict[str, Any], message: str
) -> None:
    task = save(tmp_path, kind, data, **said)
    with pytest.raises(TaskDataError, match=message) as caught:
        get_task(task).check()
    assert "p0" not in str(caught.value)  # of a file without a header the first line is a record


def test_days_and_months_that_may_be_either_are_left_to_the_curator(tmp_path: Path) -> None:
    data = text(seen=lambda d: d.replace(day=1 + d.day % 12).strftime("%d/%m/%Y"))
    reason = get_task(save(tmp_path, "csv", data)).check_records().reason
    assert 'write format: "%d/%m/%Y" or format: "%m/%d/%Y"' in reason


@pytest.mark.parametrize(("word", "share"), [("?", 3), ("-999", 3), ("-", 10)])
def test_a_word_for_nothing_is_declared(tmp_path: Path, word: str, share: int) -> None:
    age = iter(range(COUNT))
    data = text(age=lambda v: word if next(age) % share == 0 else v)
    task = save(tmp_path, "csv", data)
    assert f"write na_values: ['{word}']" in get_task(task).check_records().reason
    check = get_task({**task, "na_values": [word]}).check_records()
    assert check.reason == ""
    said = {(one.column, one.why) for one in check.findings}
    assert said == {("age", "missing")}


def test_lines_that_are_no_records_are_told(tmp_path: Path) -> None:
    """A line break inside of quotes, in a fifth of the records; or in all a cell more than names."""
    header, *rows = text().splitlines()
    notes = [f'{row},"a\nb"' if n % 5 == 0 else f"{row},c" for n, row in enumerate(rows)]
    for lines in ([f"{header},note", *notes], [header, *(f"1,{row}" for row in rows)]):
        check = get_task(save(tmp_path, "csv", "\n".join(lines))).check_records()
        assert (
            "write the file anew, with one record a line and a cell for each name" in check.reason
        )


def test_decimals_are_not_taken_for_thousands(tmp_path: Path) -> None:
    """Some have no three digits behind the point, or would be beyond the bounds."""
    plain = get_task(
        save(tmp_path, "csv", text(income=lambda v: f"{v / 1000:.3f}"))
    ).check_records()
    assert "perhaps thousands" in plain.reason
    for income, said in (
        (lambda v: round(v / 1000, 3), {}),
        (lambda v: f"{v / 500:.3f}", {}),
        (lambda v: f"{v / 1000:.3f}", {"decimal": "."}),
    ):
        task = save(tmp_path, "csv", text(income=income), **said)
        assert get_task(task).check_records().reason == ""


@pytest.mark.parametrize(
    ("said", "cell", "value"),
    [
        ({"thousands": ","}, "1,5", None),
        ({"thousands": ","}, "12,34,567.5", 1234567.5),
        ({"thousands": ","}, "-1,234", -1234.0),
        ({"thousands": ".", "decimal": ","}, "1.5", None),
        ({"thousands": "."}, "1.234.567,25", 1234567.25),
        ({"decimal": ","}, "1.5", None),
        ({"decimal": ","}, "1,5e3", 1500.0),
        ({"decimal": ","}, ",5", 0.5),
        ({"decimal": ","}, ",", None),
        ({"decimal": ","}, "inf", float("inf")),
        ({"thousands": " "}, "1\u00a0234", 1234.0),
    ],
)
def test_a_number_is_read_in_its_declared_notation(
    said: dict[str, str], cell: str, value: float | None
) -> None:
    (found,), (broken,) = Notation(**said).numbers(pa.array([cell]))
    assert broken == (value is None)
    assert value is None or found == value


def test_a_number_of_json_is_the_same_beside_text(tmp_path: Path) -> None:
    """In one batch: a record with text must not make a point of the others a mark of thousands."""
    said = {"thousands": ".", "columns": {"income": [0, 100000]}}
    rows = [{"who": "a", "income": 1.234, "y": "no"}, {"who": "b", "income": 12.5, "y": "yes"}]
    before = read(save(tmp_path, "jsonl", "".join(json.dumps(row) + "\n" for row in rows), **said))
    rows.append({"who": "c", "income": "1.234,5", "y": "no"})
    after = read(save(tmp_path, "jsonl", "".join(json.dumps(row) + "\n" for row in rows), **said))
    assert {who: after[who] for who in before} == before
    assert after["c"][0] == pytest.approx(1234.5 / 50000 - 1)


def test_the_delimiter_hangs_on_the_header_line_alone(tmp_path: Path) -> None:
    header, first, *rest = text().splitlines()
    odd = "x;y;z;1;2;3;4;5;6;7;8;9\t\t\t\t\t\t\t\t\t\t"
    before = read(save(tmp_path, "csv", "\n".join([header, first, *rest])))
    after = read(save(tmp_path, "csv", "\n".join([header, odd, first, *rest])))
    assert {who: after[who] for who in before} == before


@pytest.mark.parametrize(
    ("values", "cells", "places"),
    [
        (["no", "yes"], ["Yes", " NO ", "t", "0", "2", "perhaps"], [1, 0, 1, 0, -1, -1]),
        (["f", "m"], ["F", "false", "M"], [0, -1, 1]),
        (["a", "A"], ["a", "A ", "b"], [0, 1, -1]),
        (["New York"], ["new  york", "newyork", "york"], [0, 0, -1]),
        ([1, 2, 3], ["1.0", "02", "3e0", "true", "1 "], [0, 1, 2, 0, 0]),
        (["caf\u00e9"], ["CAFE\u0301"], [0]),
    ],
)
def test_labels_are_compared_in_one_way(
    values: list[Any], cells: list[str], places: list[int]
) -> None:
    assert list(map(placer(values), cells)) == places


@pytest.mark.parametrize(
    "cell", ["1612110412030", "1609459200", "2020", "2020-13-01", "1.1.2020", "x"]
)
def test_what_is_not_written_as_a_date_is_none(cell: str) -> None:
    assert moment_of(cell) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"delimiter": ";;"}, r"task.delimiter.*must be one sign"),
        ({"delimiter": "a"}, r"task.delimiter.*must be one sign"),
        ({"encoding": "utf-16"}, "must be utf-8 or have one byte a letter"),
        ({"encoding": "gbk"}, "Convert other files to UTF-8"),
        ({"encoding": "no such"}, "must be utf-8"),
        ({"encoding": "unicode_escape"}, "must be utf-8"),
        ({"encoding": "iso2022_jp"}, "must be utf-8"),
        ({"encoding": "punycode"}, "must be utf-8"),
        ({"decimal": ";"}, r"task.decimal.*must be"),
        ({"thousands": "_"}, r"task.thousands.*must be"),
        ({"thousands": ",", "decimal": ","}, "must differ from decimal"),
        ({"na_values": "?"}, "must be a list"),
        (
            {"column": ("age", {"bounds": [0, 9], "format": "%Y"})},
            "bounds takes missing, dec",
        ),
        ({"column": ("seen", {**SEEN, "format": "%d.%m"})}, "must say the year"),
        ({"column": ("seen", {**SEEN, "format": "%d.%m.%Y", "unit": "s"})}, "goes without a unit"),
        ({"column": ("seen", {**SEEN, "unit": "days"})}, "must be of s, ms, us, ns"),
    ],
)
def test_what_is_not_well_declared_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        get_task(spec(Path("people.csv"), **changes))


def test_a_query_writes_its_numbers_itself() -> None:
    task = spec(Path("p.csv"), decimal=",")
    del task["path"]
    task |= {"url": "sqlite:///p.db", "query": "SELECT * FROM p"}
    with pytest.raises(InvalidInputError, match="goes with a file"):
        get_task(task)
