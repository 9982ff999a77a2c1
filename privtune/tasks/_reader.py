"""Tables in files as columns of Arrow's, some records at a time.

How a record is read hangs on that record alone: no type, width or quote of one decides how another is
read. What a file may look like (its encoding, delimiter, quotes) is decided in ``_csv``, by what is
declared and the header line; what a cell may look like in ``_cells``.
"""

from __future__ import annotations

import codecs
import csv
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from pyarrow import compute, dataset, types
from pyarrow import csv as arrow

from privtune.errors import InvalidInputError
from privtune.files import regular_file
from privtune.tasks._cells import UNREADABLE, column_of, is_plain, label_of
from privtune.tasks._facts import TaskAbsentError, TaskDataError

ON_READ: ContextVar[Callable[[float], None] | None] = ContextVar("ON_READ", default=None)
"""Hears how much of a table has been read, as a share; None where nobody wants to know."""

Columns = Mapping[str, "pa.Array"]
"""Some records: by column an array of numbers, of booleans or of text."""

_T = TypeVar("_T")

BATCH = 2**15  # records that are read at once
_BLOCK = 2**22  # bytes of a CSV file that are read at once
_DELIMITERS = (",", ";", "\t", "|")
# What some encodings take for more than its letters, and all bytes.
_LETTERS = (b"\\n\\\n\\u000a+AGE-~{aa~}\x1b$Baa", bytes(range(256)))
_NO_TABLES = {
    **dict.fromkeys((".gz", ".bz2", ".xz", ".zst", ".zip"), "compressed: unpack it"),
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "a workbook: save its sheet as CSV"),
    ".json": "JSON: save one object a line in a file that ends in .jsonl",
}


@dataclass(frozen=True)
class Form:
    """How a text file is written, as it is declared."""

    delimiter: str = ""  # of a CSV file; unless given what its header line uses
    encoding: str = "utf-8"

    def __post_init__(self) -> None:
        said = self.delimiter
        if said and (len(said) != 1 or not said.isascii() or said.isalnum() or said in '"\r\n'):
            raise InvalidInputError(
                "task.delimiter", said, 'must be one sign, such as ";" or "\\t"'
            )
        try:
            each = [bytes([one]).decode(self.encoding, "replace") for one in range(256)]
            alone = "".join(each[:128]).encode() == bytes(range(128)) and all(
                part.decode(self.encoding, "replace") == "".join(each[one] for one in part)
                for part in _LETTERS
            )
        except (LookupError, TypeError, ValueError):
            alone = False
        # Of several bytes a letter, a wrong one could swallow the end of its line, and so the next record.
        if not self._is_utf8 and not alone:
            raise InvalidInputError(
                "task.encoding",
                self.encoding,
                "must be utf-8 or have one byte a letter, such as latin-1 or cp1252",
                "Convert other files to UTF-8.",
            )

    def decoded(self, block: bytes) -> bytes:
        """Return text as UTF-8."""
        # Not utf-8-sig, which drops a mark of UTF-8 wherever a block of the file begins.
        encoding = "utf-8" if self._is_utf8 else self.encoding
        return block if block.isascii() else block.decode(encoding, "replace").encode()

    @property
    def _is_utf8(self) -> bool:
        return str(self.encoding).lower().replace("_", "-") in ("utf-8", "utf8", "utf-8-sig")


UTF8 = Form()


@dataclass(frozen=True)
class Source:
    """A table that has been opened, but for its records."""

    columns: Sequence[str] | None
    types: Mapping[str, pa.DataType]  # as a header declares them
    most: Callable[[], int]
    read: Callable[[Sequence[str]], Iterator[Columns]]

    def is_text(self, name: str) -> bool:
        """Say whether a column is declared to hold something else than numbers."""
        kind = self.types.get(name)
        return kind is not None and not (is_plain(kind) or types.is_decimal(kind))

    def check(self, names: Sequence[str], place: str) -> None:
        """Refuse a table that lacks a column, or has two of a name, by its header alone."""
        if self.columns is None:
            return
        if missing := [name for name in names if name not in self.columns]:
            raise TaskDataError(
                f"{place} lacks the declared columns {', '.join(missing)}.{self._meant(missing, names)}"
            )
        if twice := [name for name in names if list(self.columns).count(name) > 1]:
            raise TaskDataError(f"{place} has two columns called {', '.join(twice)}.")

    def _meant(self, missing: Sequence[str], names: Sequence[str]) -> str:
        """Say what could be meant, by the header alone, which may be a record of a file without one."""
        known = {label_of(name) for name in missing}
        if alike := [name for name in self.columns or () if label_of(name) in known]:
            return f" It has {', '.join(alike)}: write names as the file does."
        if any("\ufffd" in name for name in self.columns or ()):
            return " Its header is not UTF-8: write encoding: cp1252, or what it was saved in."
        said = "Its first line must name the columns; write delimiter: if none of , ; | and tab parts them."
        return "" if len(missing) < len(set(names)) else f" {said}"

    def batches(self, names: Sequence[str]) -> Iterator[Columns]:
        """Read columns, and tell who listens how much of the table has been read."""
        most = self.most()
        return heard(self.read(names), most, size=lambda batch: len(batch[names[0]]))


def heard(batches: Iterable[_T], most: int, *, size: Callable[[_T], int]) -> Iterator[_T]:
    """Pass batches on, and tell who listens how much of all they are."""
    listener, done = ON_READ.get(), 0
    for batch in batches:
        done += size(batch)
        if listener is not None:
            listener(min(done / max(most, 1), 1.0))
        yield batch
    if listener is not None and done < most:
        listener(1.0)  # a header and empty lines are no records


def open_table(path: Path, names: Sequence[str] = (), form: Form = Form()) -> Source:
    """Open a table by its ending: ``.parquet``, ``.arrow``, ``.feather``, ``.jsonl``, else CSV."""
    check_file(path)
    if (suffix := path.suffix.lower()) in _NO_TABLES:
        raise TaskDataError(f"{path} is {_NO_TABLES[suffix]}.")
    try:
        if suffix in (".parquet", ".arrow", ".feather"):
            return _arrow(path)
        lines = suffix in (".jsonl", ".ndjson")
        return _json_lines(path, form) if lines else _csv(path, names, form)
    except (OSError, ValueError, csv.Error) as error:
        raise TaskDataError(f"{path} cannot be read ({type(error).__name__}).") from None


def check_file(path: Path) -> None:
    """Check that a path names a regular file, before it is opened."""
    try:
        regular_file(path)
    except FileNotFoundError:
        raise TaskAbsentError(f"{path} is not there.") from None
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or type(error).__name__
        raise TaskDataError(f"{path} cannot be read ({said}).") from None


def _header(path: Path, names: Sequence[str], form: Form) -> tuple[list[str], str, int]:
    """Return the columns of a CSV file, what parts them, and where its records start."""
    with path.open("rb") as file:
        first = file.readline()  # of a file whose lines end in CR alone: all of it
        said = re.fullmatch(rb"(?:\xef\xbb\xbf)?sep=(.)\s*", first, re.DOTALL)
        before = len(first) if said else 0
        first = file.readline() if said else first
    first = first[: first.find(b"\r", 0, len(first.rstrip())) + 1] or first
    if b"\0" in first:
        raise TaskDataError(f"{path} is no CSV in UTF-8: save it as such, or as Parquet.")
    line = form.decoded(first.removeprefix(codecs.BOM_UTF8)).removeprefix(codecs.BOM_UTF8)
    given = form.delimiter or (said[1].decode("latin-1") if said else "")
    found = {sign: [c.strip() for c in _cells(line, sign)] for sign in given or _DELIMITERS}
    # By what is declared and the header line: what parts most of the declared columns.
    sign = max(found, key=lambda one: (len({*names} & {*found[one]}), len(found[one])))
    return found[sign], sign, before + len(first)


def _csv(path: Path, names: Sequence[str], form: Form) -> Source:
    """Open a CSV file of one record a line, so that no record can swallow the next ones."""
    header, sign, start = _header(path, names, form)
    closed = _closed(sign)

    def blocks() -> Iterator[bytes]:
        with path.open("rb") as file:
            file.seek(start)
            while block := file.read(_BLOCK):
                yield form.decoded(block + file.readline())

    def read(names: Sequence[str]) -> Iterator[Columns]:
        places = [header.index(name) for name in names]
        unclosed: list[bytes] = []
        ragged: list[bytes] = []

        def set_apart(row: arrow.InvalidRow) -> str:
            ragged.append(row.text.encode())
            return "skip"

        parse = arrow.ParseOptions(delimiter=sign, invalid_row_handler=set_apart)
        convert = arrow.ConvertOptions(
            include_columns=list(map(str, places)),
            column_types={str(place): pa.string() for place in places},
        )
        for block in blocks():
            if b'"' in block:  # a quote that stays open would swallow the lines after it
                lines = [(line, b'"' not in line or closed(line)) for line in block.splitlines()]
                unclosed += [line for line, whole in lines if not whole]
                block = b"\n".join(line for line, whole in lines if whole)  # noqa: PLW2901
            if not block.strip():
                continue
            options = arrow.ReadOptions(
                column_names=list(map(str, range(len(header)))),
                block_size=len(block) + 2,
                use_threads=False,
            )
            # Arrow drops a mark of UTF-8 that a block starts with, which would be another record's doing.
            text = pa.BufferReader(b"\n" + block)
            found = arrow.read_csv(text, options, parse, convert).combine_chunks()
            if len(found):
                yield {n: _whole(found[str(p)]) for n, p in zip(names, places, strict=True)}
        # Odd lines come last, by kind: in order of blocks, another person's lines would move them.
        odd = (line for line in (*unclosed, *ragged) if line.strip())
        yield from batched(names, (_line(line, sign, places, len(header)) for line in odd))

    return Source(
        header, {}, lambda: sum(b.count(b"\n") + b.count(b"\r") + 1 for b in blocks()), read
    )


@cache
def _closed(sign: str) -> Callable[[bytes], object]:
    """Return what finds whether every quote of a line is closed."""
    part = re.escape(sign.encode())
    cell = rb'(?:[^"' + part + rb']*|"(?:[^"]|"")*")'
    return re.compile(cell + rb"(?:" + part + cell + rb")*").fullmatch


def _line(line: bytes, sign: str, places: Sequence[int], width: int) -> list[Any]:
    """Return the cells of a line that Arrow does not take."""
    cells = _cells(line, sign)
    # After a quote that stays open, cells may be those of other names.
    least = 1 if _closed(sign)(line) else width
    if not least <= len(cells) <= width:
        return [UNREADABLE] * len(places)
    return [cells[place] if place < len(cells) else None for place in places]


def csv_rows(
    path: Path, names: Sequence[str], form: Form
) -> tuple[list[str], Iterator[list[str | None]]]:
    """Return the header of a CSV file, and the cells of each line in order; one is a record, as ever."""
    check_file(path)
    header, sign, start = _header(path, names, form)

    def read() -> Iterator[list[str | None]]:
        with path.open("rb") as file:
            file.seek(start)
            for line in filter(bytes.strip, file):
                text = form.decoded(line).rstrip(b"\r\n")
                yield _line(text, sign, range(len(header)), len(header))

    return header, read()


def _cells(line: bytes, sign: str) -> list[str]:
    try:
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        return next(csv.reader([text], delimiter=sign), [])
    except csv.Error:
        return []


def _json_lines(path: Path, form: Form) -> Source:
    """Open a file of one JSON object a line. A key that an object lacks is missing of that record."""

    def lines() -> Iterator[str]:
        with path.open(encoding=form.encoding, errors="replace") as file:
            yield from (line.removeprefix("\ufeff") for line in file)

    def read(names: Sequence[str]) -> Iterator[Columns]:
        return batched(names, (_object(line, names) for line in lines() if line.strip()))

    # Not by Arrow: one object with another type in a key would decide about all of them.
    path.open().close()  # refuses what cannot be opened
    return Source(None, {}, lambda: sum(1 for _ in lines()), read)


def _object(line: str, names: Sequence[str]) -> list[Any]:
    """Return what a line says of some columns; of a line that holds no object nothing can be read."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    return (
        [found.get(name) for name in names]
        if isinstance(found, dict)
        else [UNREADABLE] * len(names)
    )


def _arrow(path: Path) -> Source:
    """Open a Parquet or Arrow file, whose header declares the types."""
    found = dataset.dataset(path, format="parquet" if path.suffix == ".parquet" else "ipc")

    def read(names: Sequence[str]) -> Iterator[Columns]:
        # Few batches are read ahead: what is read is held beside what models see of it.
        options = {"batch_size": BATCH, "batch_readahead": 2, "fragment_readahead": 1}
        for batch in found.to_batches(columns=list(names), **options):
            if len(batch):
                yield {name: _typed(batch.column(name)) for name in names}

    kinds = {field.name: field.type for field in found.schema}
    return Source(found.schema.names, kinds, found.count_rows, read)


def _typed(column: pa.Array) -> pa.Array:
    """Return a column of a file as numbers, booleans or text."""
    if is_plain(column.type):
        return column
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        text = column.cast("string")  # of decimals, too: two ids above 2^53 are one float
        text.validate(full=True)
        if types.is_decimal(column.type) and column.type.scale > 0:  # as _text has it
            digits = compute.replace_substring(text, ".", "")
            text = compute.binary_join_element_wise(digits, f"e-{column.type.scale}", "")
    except pa.ArrowException:  # text that is not UTF-8, or cells that are lists
        binary = types.is_string(column.type) or types.is_large_string(column.type)
        cells = column.cast("binary").to_pylist() if binary else column.to_pylist()
        return column_of(
            [c.decode("utf-8", "replace") if isinstance(c, bytes) else c for c in cells]
        )
    return text


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks)


def batched(names: Sequence[str], records: Iterator[Sequence[Any]]) -> Iterator[Columns]:
    """Yield records of Python's as columns."""
    while part := list(itertools.islice(records, BATCH)):
        yield {name: column_of([cells[n] for cells in part]) for n, name in enumerate(names)}
