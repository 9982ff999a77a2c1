"""Reading of tables in files, as batches of Arrow columns.

How a record is read hangs on that record alone: no type, width or quote of one decides how another is
read. What a file may look like (its encoding, delimiter, quotes) is decided by what is declared and by its
header line; what a cell may look like stands in ``cells.py``.
"""

from __future__ import annotations

import codecs
import csv
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from pyarrow import compute, dataset, ipc, types
from pyarrow import csv as arrow

from privtune.errors import InvalidInputError
from privtune.facts import TaskAbsentError, TaskDataError
from privtune.files import regular_file
from privtune.names import did_you_mean
from privtune.tables.cells import UNREADABLE, column_of, is_plain, label_of
from privtune.tables.listening import ON_READ

Columns = Mapping[str, "pa.Array"]
"""A batch of records: by column's name, an array of numbers, of booleans or of text."""

_T = TypeVar("_T")

BATCH = 2**15  # records that are read at once
_BLOCK = 2**22  # bytes of a CSV file that are read at once
_DELIMITERS = (",", ";", "\t", "|")
# What some encodings take for more than its letters, and all bytes.
_LETTERS = (b"\\n\\\n\\u000a+AGE-~{aa~}\x1b$Baa", bytes(range(256)))
_NO_TABLES = {
    ".gz": "compressed: unpack it",
    ".bz2": "compressed: unpack it",
    ".xz": "compressed: unpack it",
    ".zst": "compressed: unpack it",
    ".zip": "compressed: unpack it",
    ".xlsx": "a workbook: save its sheet as CSV",
    ".xls": "a workbook: save its sheet as CSV",
    ".ods": "a workbook: save its sheet as CSV",
    ".json": "JSON: save one object a line in a file that ends in .jsonl",
}
# What a file is by its first bytes, whatever it is called.
_SIGNATURES = {
    b"PAR1\x15": "Parquet by its first bytes: let its name end in .parquet",
    b"ARROW1\0\0": "Arrow by its first bytes: let its name end in .arrow",
    b"\x1f\x8b": "compressed: unpack it",
    b"PK\x03\x04": "a workbook or an archive: save its sheet as CSV",
    b"\xff\xfe": "in UTF-16: save it as CSV in UTF-8",
    b"\xfe\xff": "in UTF-16: save it as CSV in UTF-8",
}


@dataclass(frozen=True)
class Form:
    """Declared format of a text file.

    Attributes:
        delimiter: What parts the columns of a CSV file; unless given what its header line uses.
        encoding: The letters.
    """

    delimiter: str = ""
    encoding: str = "utf-8"

    def __post_init__(self) -> None:
        if self.delimiter and not _is_sign(self.delimiter):
            raise InvalidInputError(
                "task.delimiter",
                self.delimiter,
                'must be one sign, such as ";" or "\\t"',
            )
        # Of several bytes a letter, a wrong one could swallow the end of its line, and so the next record.
        if not self._is_utf8 and not self._has_one_byte_a_letter():
            raise InvalidInputError(
                "task.encoding",
                self.encoding,
                "must be utf-8 or have one byte a letter, such as latin-1 or cp1252",
                "Convert other files to UTF-8.",
            )

    def _has_one_byte_a_letter(self) -> bool:
        """Return whether the encoding reads each byte by itself, and the first 128 bytes as ASCII."""
        try:
            letters = [bytes([byte]).decode(self.encoding, "replace") for byte in range(256)]
            ascii_letters = "".join(letters[:128])
            if ascii_letters.encode() != bytes(range(128)):
                return False
            for part in _LETTERS:
                by_byte = "".join(letters[byte] for byte in part)
                if part.decode(self.encoding, "replace") != by_byte:
                    return False
        except (LookupError, TypeError, ValueError):  # no encoding of Python's
            return False
        return True

    def decoded(self, block: bytes) -> bytes:
        """Return text recoded in UTF-8, with a replacement mark for letters that cannot be read.

        Args:
            block: Whole lines: a letter of several bytes may not be cut.
        """
        if block.isascii():
            return block
        # Not utf-8-sig, which drops a mark of UTF-8 wherever a block of the file begins.
        encoding = "utf-8" if self._is_utf8 else self.encoding
        return block.decode(encoding, "replace").encode()

    @property
    def _is_utf8(self) -> bool:
        name = str(self.encoding).lower().replace("_", "-")
        return name in ("utf-8", "utf8", "utf-8-sig")


def _is_sign(text: str) -> bool:
    """Return whether a text is one sign that can separate cells: no letter, digit, quote or line end."""
    if len(text) != 1 or text in '"\r\n':
        return False
    return text.isascii() and not text.isalnum()


UTF8 = Form()


@dataclass(frozen=True)
class Source:
    """A table that has been opened, but for its records.

    Attributes:
        columns: Their names; None where no header says them.
        types: By column, as a header declares them.
        most: Returns how many records there are at most.
        read: Returns the records of some columns, some at a time.
    """

    columns: Sequence[str] | None
    types: Mapping[str, pa.DataType]
    most: Callable[[], int]
    read: Callable[[Sequence[str]], Iterator[Columns]]

    def is_text(self, name: str) -> bool:
        """Return whether a column's declared type is other than a number or a boolean."""
        kind = self.types.get(name)
        if kind is None:
            return False
        return not is_plain(kind) and not types.is_decimal(kind)

    def check(self, names: Sequence[str], place: str) -> None:
        """Refuse a table whose header lacks a declared column, or names it twice.

        Args:
            names: The columns that are declared.
            place: What the table is called in errors.
        """
        if self.columns is None:
            return
        columns = list(self.columns)
        missing = [name for name in names if name not in columns]
        if missing:
            listing = ", ".join(missing)
            guess = self._meant(missing, names)
            raise TaskDataError(f"{place} lacks the declared columns {listing}.{guess}")
        doubles = [name for name in names if columns.count(name) > 1]
        if doubles:
            listing = ", ".join(doubles)
            raise TaskDataError(f"{place} has two columns called {listing}.")

    def _meant(self, missing: Sequence[str], names: Sequence[str]) -> str:
        """Return advice on columns that the header lacks, such as names that differ in case alone."""
        columns = self.columns or ()
        labels = set(map(label_of, missing))
        alike = [name for name in columns if label_of(name) in labels]
        if alike:
            return f" It has {', '.join(alike)}: write names as the file does."
        if any("\ufffd" in name for name in columns):
            return " Its header is not UTF-8: write encoding: cp1252, or what it was saved in."
        # Where many declared columns are there, the first line is a header and no record.
        declared = len(set(names))
        if 2 * len(missing) <= declared:
            others = [name for name in columns if name not in names]
            question = did_you_mean(list(missing), others)
            return f" {question}" if question else ""
        if len(missing) < declared:
            return ""
        return " Its first line must name the columns; write delimiter: if none of , ; | and tab parts them."

    def batches(self, names: Sequence[str]) -> Iterator[Columns]:
        """Yield batches of some columns, reporting the share of the table that has been read.

        Args:
            names: One at least: by the first the records are counted.
        """

        def count_records(batch: Columns) -> int:
            return len(batch[names[0]])

        most = self.most()
        return heard(self.read(names), most, size=count_records)


def heard(
    batches: Iterable[_T],
    most: int,
    *,
    size: Callable[[_T], int],
) -> Iterator[_T]:
    """Yield the given batches, reporting to ``ON_READ`` the share of records that has been read.

    Args:
        batches: Records, some at a time.
        most: How many records there are at most.
        size: Returns how many a batch holds.
    """
    listener = ON_READ.get()
    count = 0
    for batch in batches:
        count += size(batch)
        if listener is not None:
            share = count / max(most, 1)
            listener(min(share, 1.0))
        yield batch
    if listener is not None and count < most:
        listener(1.0)  # a header and empty lines are no records


def open_table(
    path: Path,
    names: Sequence[str] = (),
    form: Form = Form(),
) -> Source:
    """Open a table in the format that `FORMATS` has for its ending, or else as CSV.

    Args:
        path: The file.
        names: Columns that are declared, by which the header of a CSV file is understood.
        form: How a text file is written.

    Raises:
        TaskAbsentError: If it is not there.
        TaskDataError: If it cannot be read, or is of another kind.
    """
    check_file(path)
    suffix = path.suffix.lower()
    if suffix in _NO_TABLES:
        raise TaskDataError(f"{path} is {_NO_TABLES[suffix]}.")
    kind = FORMATS.get(suffix, FORMATS[".csv"])
    try:
        if kind.is_text:
            _check_text(path)
        return kind.open(path, names, form)
    except (OSError, ValueError, csv.Error) as error:
        remedy = ""
        if not kind.is_text:
            remedy = f" It is no {kind.name} file: let the name of a CSV file end in .csv."
        raise TaskDataError(f"{path} cannot be read ({type(error).__name__}).{remedy}") from None


def check_file(path: Path) -> None:
    """Check that a path names a regular file, before it is opened."""
    try:
        regular_file(path)
    except FileNotFoundError:
        raise TaskAbsentError(f"{path} is not there.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise TaskDataError(f"{path} cannot be read ({reason}).") from None


def _check_text(path: Path) -> None:
    """Refuse a file whose first bytes are those of a format other than text."""
    with path.open("rb") as file:
        first = file.read(8)
    for signature, kind in _SIGNATURES.items():
        if first.startswith(signature):
            raise TaskDataError(f"{path} is {kind}.")


@dataclass(frozen=True)
class _CsvFile:
    """A CSV file whose header has been read.

    Attributes:
        path: The file.
        form: How it is written.
        header: The names of the columns.
        sign: What parts them.
        start: Where its records start, in bytes.
    """

    path: Path
    form: Form
    header: list[str]
    sign: str
    start: int

    @classmethod
    def open(
        cls,
        path: Path,
        names: Sequence[str],
        form: Form,
    ) -> _CsvFile:
        """Open a CSV file and read its header, from which a missing delimiter is found.

        Args:
            path: The file.
            names: Columns that are declared.
            form: How it is written; without a delimiter, that of which the header has most of the names.
        """
        with path.open("rb") as file:
            first = file.readline()  # of a file whose lines end in CR alone: all of it
            mark = re.fullmatch(rb"(?:\xef\xbb\xbf)?sep=(.)\s*", first, re.DOTALL)
            start = 0
            if mark:  # a line of Excel's, which says what parts the columns
                start = len(first)
                first = file.readline()
        line_without_end = first.rstrip()
        end = first.find(b"\r", 0, len(line_without_end)) + 1
        first = first[:end] or first
        if b"\0" in first:
            raise TaskDataError(f"{path} is no CSV in UTF-8: save it as such, or as Parquet.")
        text = form.decoded(first.removeprefix(codecs.BOM_UTF8))
        line = text.removeprefix(codecs.BOM_UTF8)
        signs: Sequence[str] = form.delimiter or _DELIMITERS
        if mark and not form.delimiter:
            signs = mark[1].decode("latin-1")
        headers = {sign: _read_header(line, sign) for sign in signs}

        def count_columns(sign: str) -> tuple[int, int]:
            header = headers[sign]
            declared = set(names) & set(header)
            return len(declared), len(header)

        # By what is declared and the header line: what parts most of the declared columns.
        sign = max(headers, key=count_columns)
        return cls(
            path,
            form,
            headers[sign],
            sign,
            start + len(first),
        )

    def blocks(self) -> Iterator[bytes]:
        """Yield the records as UTF-8, some lines at a time."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            while block := file.read(_BLOCK):
                rest_of_line = file.readline()
                yield self.form.decoded(block + rest_of_line)

    def lines(self) -> Iterator[list[str | None]]:
        """Yield the cells of each line in order."""
        places = range(len(self.header))
        with self.path.open("rb") as file:
            file.seek(self.start)
            for line in filter(bytes.strip, file):
                text = self.form.decoded(line)
                text_without_end = text.rstrip(b"\r\n")
                yield self.read_line(text_without_end, places)

    def most(self) -> int:
        """Return an upper bound on the number of records, in which a CRLF counts twice.

        It reads the file once more, for the progress that is shown alone.
        """
        count = 0
        for block in self.blocks():
            count += block.count(b"\n")
            count += block.count(b"\r")
            count += 1
        return count

    def read(self, names: Sequence[str]) -> Iterator[Columns]:
        """Yield the named columns of all records, one block of the file after another.

        Arrow reads what it can; a line with too few or too many cells, or with a quote that stays open, is
        read by itself, so that it changes no other record.
        """
        places = [self.header.index(name) for name in names]
        keys = list(map(str, places))
        unclosed: list[bytes] = []
        ragged: list[bytes] = []

        def set_apart(row: arrow.InvalidRow) -> str:
            ragged.append(row.text.encode())
            return "skip"

        parse = arrow.ParseOptions(delimiter=self.sign, invalid_row_handler=set_apart)
        convert = arrow.ConvertOptions(
            include_columns=keys,
            column_types=dict.fromkeys(keys, pa.string()),
        )
        for block in self.blocks():
            if b'"' in block:  # a quote that stays open would swallow the lines after it
                block, lines = self._part_unclosed(block)  # noqa: PLW2901
                unclosed += lines
            if not block.strip():
                continue
            table = self._parse_block(block, parse, convert)
            if len(table):
                columns = {}
                for name, key in zip(names, keys, strict=True):
                    columns[name] = _unchunked(table[key])
                yield columns
        # Odd lines come last, by kind: in order of blocks, another person's lines would move them.
        odd = filter(bytes.strip, (*unclosed, *ragged))
        records = (self.read_line(line, places) for line in odd)
        yield from batched(names, records)

    def _parse_block(
        self,
        block: bytes,
        parse: arrow.ParseOptions,
        convert: arrow.ConvertOptions,
    ) -> pa.Table:
        """Return a block's columns as Arrow parses them: text, by the number of the column.

        Args:
            block: The lines, in UTF-8.
            parse: What parts the cells, and where a line goes that has too few or too many.
            convert: Which columns are taken, all as text.
        """
        places = range(len(self.header))
        read = arrow.ReadOptions(
            column_names=list(map(str, places)),
            block_size=len(block) + 2,
            use_threads=False,
        )
        # Arrow drops a mark of UTF-8 that a block starts with, which would be another record's doing.
        text = pa.BufferReader(b"\n" + block)
        table = arrow.read_csv(text, read, parse, convert)
        return table.combine_chunks()

    def _part_unclosed(self, block: bytes) -> tuple[bytes, list[bytes]]:
        """Return a block without the lines in which a quote stays open, and these lines."""
        is_closed = _closed(self.sign)
        closed = []
        unclosed = []
        for line in block.splitlines():
            if b'"' not in line or is_closed(line):
                closed.append(line)
            else:
                unclosed.append(line)
        return b"\n".join(closed), unclosed

    def read_line(self, line: bytes, places: Sequence[int]) -> list[Any]:
        """Return some cells of a line that Arrow could not parse, with None for absent ones.

        Args:
            line: In UTF-8.
            places: Which cells, by their number.
        """
        cells = _split(line, self.sign)
        width = len(self.header)
        is_closed = _closed(self.sign)
        # After a quote that stays open, cells may be those of other names.
        least = 1 if is_closed(line) else width
        if not least <= len(cells) <= width:
            return [UNREADABLE] * len(places)
        lacking: list[str | None] = [None] * (width - len(cells))
        cells_of_header = [*cells, *lacking]
        return [cells_of_header[place] for place in places]


def _open_csv(
    path: Path,
    names: Sequence[str],
    form: Form,
) -> Source:
    """Return the source of a CSV file, read with one record a line whatever its quotes."""
    file = _CsvFile.open(path, names, form)
    return Source(file.header, {}, file.most, file.read)


@cache
def _closed(sign: str) -> Callable[[bytes], object]:
    """Return a function that matches a line if every quote in it is closed."""
    part = re.escape(sign.encode())
    cell = rb'(?:[^"' + part + rb']*|"(?:[^"]|"")*")'
    line = re.compile(cell + rb"(?:" + part + cell + rb")*")
    return line.fullmatch


def csv_rows(
    path: Path,
    names: Sequence[str],
    form: Form,
) -> tuple[list[str], Iterator[list[str | None]]]:
    """Return the header of a CSV file, and an iterator over the cells of its lines in order.

    Unlike a `Source`, it keeps odd lines where they are: a prediction stands beside its row.
    """
    check_file(path)
    _check_text(path)
    file = _CsvFile.open(path, names, form)
    return file.header, file.lines()


def _read_header(line: bytes, sign: str) -> list[str]:
    """Return the names of columns, without blanks around them."""
    return [cell.strip() for cell in _split(line, sign)]


def _split(line: bytes, sign: str) -> list[str]:
    """Return the cells of one line, or an empty list if it cannot be parsed.

    Args:
        line: In UTF-8, with or without its end.
        sign: What parts the cells.
    """
    text = line.decode("utf-8", "replace")
    text_without_end = text.rstrip("\r\n")
    try:
        rows = csv.reader([text_without_end], delimiter=sign)
        return next(rows, [])
    except csv.Error:
        return []


def _open_json_lines(path: Path, _names: Sequence[str], form: Form) -> Source:
    """Return the source of a file with one JSON object a line, whose absent keys are missing values."""

    def lines() -> Iterator[str]:
        with path.open(encoding=form.encoding, errors="replace") as file:
            for line in file:
                yield line.removeprefix("\ufeff")

    def count_lines() -> int:
        count = 0
        for _ in lines():
            count += 1
        return count

    def read(names: Sequence[str]) -> Iterator[Columns]:
        objects = (_read_object(line, names) for line in lines() if line.strip())
        return batched(names, objects)

    # Not by Arrow: one object with another type in a key would decide about all of them.
    path.open().close()  # refuses what cannot be opened
    return Source(None, {}, count_lines, read)


def _read_object(line: str, names: Sequence[str]) -> list[Any]:
    """Return the cells of some columns in a JSON line, unreadable ones if it holds no object."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        return [UNREADABLE] * len(names)
    return [record.get(name) for name in names]


def _open_arrow(kind: str, path: Path, _names: Sequence[str], _form: Form) -> Source:
    """Return the source of a file that pyarrow reads, with the types that its header declares.

    Args:
        kind: The format's name in ``pyarrow.dataset``.
        path: The file.
    """
    table = dataset.dataset(path, format=kind)

    def read(names: Sequence[str]) -> Iterator[Columns]:
        batches = _row_groups(table, names) if kind == "parquet" else _ipc_batches(path, names)
        for batch in batches:
            for start in range(0, len(batch), BATCH):
                part = batch.slice(start, BATCH)
                yield {name: _in_plain_type(part.column(name)) for name in names}

    schema = table.schema
    kinds = {field.name: field.type for field in schema}
    return Source(schema.names, kinds, table.count_rows, read)


def _row_groups(table: dataset.Dataset, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield batches of a Parquet file, of which few row groups at a time are in memory.

    A scan of the whole file reads ahead of whoever takes the batches, by more than ``batch_readahead`` says.
    """
    columns = list(names)
    for fragment in table.get_fragments():
        for groups in _groups_together(fragment.row_groups):
            part = fragment.subset(row_group_ids=groups)
            if len(groups) == 1:  # of any size
                yield from part.to_batches(columns=columns, batch_size=BATCH)
            else:
                yield from part.to_table(columns=columns).combine_chunks().to_batches()


def _groups_together(row_groups: Sequence[dataset.RowGroupInfo]) -> Iterator[list[int]]:
    """Yield the ids of row groups in order, so many together that they hold a batch of rows."""
    ids: list[int] = []
    rows = 0
    for group in row_groups:
        ids.append(group.id)
        rows += group.num_rows
        if rows >= BATCH:
            yield ids
            ids = []
            rows = 0
    if ids:
        yield ids


def _ipc_batches(path: Path, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a file of Arrow's, as they were written, one at a time."""
    with pa.OSFile(str(path)) as file:
        schema = ipc.open_file(file).schema
        indices = [schema.get_field_index(name) for name in names]
        options = ipc.IpcReadOptions(included_fields=indices)
        reader = ipc.open_file(file, options=options)
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def _in_plain_type(column: pa.Array) -> pa.Array:
    """Return a column of an Arrow file as numbers, booleans or text.

    What is neither becomes text cell by cell if it must: one odd cell decides about no other.
    """
    if is_plain(column.type):
        return column
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        text = column.cast("string")  # of decimals, too: two ids above 2^53 are one float
        text.validate(full=True)
    except pa.ArrowException:  # text that is not UTF-8, or cells that are lists
        return _forgive_bytes(column)
    has_fraction = types.is_decimal(column.type) and column.type.scale > 0
    if has_fraction:  # as a cell of Python's becomes text
        digits = compute.replace_substring(text, ".", "")
        exponent = f"e-{column.type.scale}"
        text = compute.binary_join_element_wise(digits, exponent, "")
    return text


def _forgive_bytes(column: pa.Array) -> pa.Array:
    """Return a column converted cell by cell, with a replacement mark for letters that cannot be read."""
    if types.is_string(column.type) or types.is_large_string(column.type):
        column = column.cast("binary")
    cells = []
    for cell in column.to_pylist():
        if isinstance(cell, bytes):
            cells.append(cell.decode("utf-8", "replace"))
        else:
            cells.append(cell)
    return column_of(cells)


def _unchunked(column: pa.ChunkedArray) -> pa.Array:
    """Return a chunked column as one array."""
    return pa.concat_arrays(column.chunks)


def batched(names: Sequence[str], records: Iterator[Sequence[Any]]) -> Iterator[Columns]:
    """Yield records of Python's as columns, `BATCH` records at a time.

    Args:
        names: Of the cells of a record, in order.
        records: The cells of each.
    """
    while part := list(itertools.islice(records, BATCH)):
        columns = {}
        for place, name in enumerate(names):
            cells = [record[place] for record in part]
            columns[name] = column_of(cells)
        yield columns


@dataclass(frozen=True)
class TableFormat:
    """A kind of table file.

    Attributes:
        name: What people call it.
        open: Opens a file by its path, the names of the declared columns, and how it is written.
        is_text: Whether it is refused where its first bytes are those of something else than text.
    """

    name: str
    open: Callable[[Path, Sequence[str], Form], Source]
    is_text: bool


_CSV = TableFormat("CSV", _open_csv, is_text=True)
_JSON_LINES = TableFormat("JSON lines", _open_json_lines, is_text=True)
_ARROW = TableFormat("Arrow", partial(_open_arrow, "ipc"), is_text=False)

FORMATS: Mapping[str, TableFormat] = {
    ".csv": _CSV,
    ".tsv": _CSV,
    ".jsonl": _JSON_LINES,
    ".ndjson": _JSON_LINES,
    ".parquet": TableFormat("Parquet", partial(_open_arrow, "parquet"), is_text=False),
    ".arrow": _ARROW,
    ".feather": _ARROW,
}
"""Formats of table files by ending, in lower case."""
