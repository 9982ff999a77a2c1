"""Conversion of raw rows to a model's inputs, and of its outputs to predictions.

This module travels with an exported model, together with what it imports of this package, so these need
numpy, pyarrow and the standard library alone; torch, pandas, pillow and transformers where they are used.
"""

from __future__ import annotations

import base64
import importlib
import io
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.facts import TaskDataError
from privtune.files import regular_file
from privtune.tables.cells import CLIPPED, Fault, Mask, column_of, is_missing, texts, unusable
from privtune.tables.column_spec import read_columns, read_notation
from privtune.tables.columns import Category, Column, Date, Ordinal

if TYPE_CHECKING:
    import pandas
    import torch

Inputs = tuple[Any, Mask]
"""Inputs ``[N, ...]`` of raw rows, and a mask ``[N]`` of the rows that can be used."""

CellsByColumn = dict[str, list[Any]]
Answers = dict[str, tuple[list[Any], type]]
"""Answers with their type, by column's name: one a row, None for a row without an answer."""

TEXTS = 32  # that an encoder reads at once, always as many: all sums have one shape
NETWORK = "network.pt2"  # as torch.export has it
_MODEL = "model.json"
_FIELDS = ("labels", "counted", "target_range", "temperature")  # of a model that is saved
_BATCH = 1024  # rows that a network sees at once
_BLACK = (  # a PNG of one point, in base64
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mNgAAAAAgAB5Sfe/AAAAABJRU5ErkJggg=="
)
_PIXELS = "bytes from 0 to 255 or floats in [0, 1]"
_ROUNDING = 1e-6  # that a number may lie beyond its range by
_LARGEST = 1 << 28  # bytes of a picture; a larger one cannot be used


@dataclass(frozen=True, kw_only=True)
class Rows(ABC):
    """Kind of raw rows, and their conversion to a network's inputs.

    Its fields are the description that is exported with a model, by their names.

    Attributes:
        kind: What rows of this class are called in a description.
        libraries: What reading them needs beside what every model needs, by the names of distributions.
    """

    kind: ClassVar[str]
    libraries: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The columns of a raw row; none where rows are arrays."""

    @property
    @abstractmethod
    def takes(self) -> str:
        """What a raw row is, in words."""

    @abstractmethod
    def read(self, raw: Any) -> Inputs:
        """Return the inputs of raw rows, zeros for unusable ones, and a mask of the usable rows.

        Args:
            raw: A DataFrame, a list of dicts, or arrays, as `takes` says.

        Raises:
            InvalidInputError: If they are of another shape or type: no single row is then at fault.
            PrivTuneError: If a column is missing, or a library.
        """

    @abstractmethod
    def example(self) -> Any:
        """Return one raw row that is made up of public facts alone.

        It travels with the model, so no record may stand in it.
        """

    def to_dict(self) -> dict[str, Any]:
        """Return the description of the rows as JSON-ready data."""
        document: dict[str, Any] = {"kind": self.kind}
        for attribute in fields(self):
            document[attribute.name] = getattr(self, attribute.name)
        return document

    def save(self, folder: Path) -> Rows:
        """Save files that the rows need into a folder, and return the rows that refer to these."""
        return self


@dataclass(frozen=True, kw_only=True)
class TableRows(Rows):
    """Rows of a table, of the columns that its spec declares.

    Attributes:
        bounds: As ``task.bounds`` of a spec.
        columns: As ``task.columns`` of a spec.
        projection: Directions ``[directions, width]`` that a stage released; None where there are none.
        notation: How the table writes numbers and nothing, by the names of a spec's fields.
    """

    kind = "table"
    bounds: Any
    columns: Any
    projection: Any = None
    notation: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def features(self) -> tuple[Column, ...]:
        """The declared feature columns."""
        notation = read_notation("task", self.notation)
        return read_columns(self.bounds, self.columns, notation)

    @property
    def names(self) -> tuple[str, ...]:
        """The declared columns, in the order of their features."""
        return tuple(column.name for column in self.features)

    @property
    def takes(self) -> str:
        """Description of the columns, in words."""
        return f"the columns {', '.join(self.names)}, in the units of their bounds"

    def of(self, batch: Mapping[str, Any]) -> tuple[Any, list[Fault]]:
        """Return the features of some records, ``[N, width]``, and their faults.

        Args:
            batch: By the name of a column its cells, as Arrow has them.
        """
        faults: list[Fault] = []
        first = self.names[0]
        count = len(batch[first])
        width = sum(column.width for column in self.features)
        x = np.empty((count, width), np.float32)
        start = 0
        for column in self.features:
            cells = batch[column.name]
            values, column_faults = column.read(cells)
            end = start + column.width
            x[:, start:end] = values
            faults.extend(column_faults)
            start = end
        return x, faults

    def projected(self, x: Any) -> Any:
        """Return features projected on the released directions, or unchanged if there are none."""
        if self.projection is None:
            return x
        directions = np.asarray(self.projection, np.float32)
        return x @ directions.T

    def read(self, raw: Any) -> Inputs:
        """Return features ``[N, width]`` as in training, projected if a stage released directions."""
        columns = _cells_by_column(raw, self.names)
        batch = {name: column_of(cells) for name, cells in columns.items()}
        features, faults = self.of(batch)
        x, usable = _zero_unusable(features, faults)
        return self.projected(x), usable

    def example(self) -> Any:
        """Return a row of the first values that are declared, and of the middles of bounds."""
        row = {column.name: _example_of(column) for column in self.features}
        return [row]


def _example_of(column: Column) -> Any:
    """Return a cell that is as declared: the first value, or the middle of the bounds."""
    if isinstance(column, Category):
        return column.values[0]
    if isinstance(column, Ordinal):
        return column.levels[0]
    if isinstance(column, Date):
        return column.written(column.low)
    low = getattr(column, "low", 0.0)  # a column whose bounds a stage releases has none
    high = getattr(column, "high", 0.0)
    return 0.5 * (low + high)


@dataclass(frozen=True, kw_only=True)
class TextRows(Rows):
    """Rows of texts, turned into features by a frozen public encoder.

    Attributes:
        text: The column of texts.
        tokenizer: A folder that Hugging Face's ``from_pretrained`` reads.
        encoder: Another.
        length: How many tokens of a text are read at most.
    """

    kind = "text"
    libraries = ("transformers",)
    text: str
    tokenizer: str
    encoder: str
    length: int

    @property
    def names(self) -> tuple[str, ...]:
        """The column of texts."""
        return (self.text,)

    @property
    def takes(self) -> str:
        """Description of the texts and their column, in words."""
        return f"texts, in the column {self.text}"

    @cached_property
    def loaded(self) -> tuple[Any, Any]:
        """The tokenizer and the encoder, from local files alone."""
        hf = _library("transformers", "transformers")
        try:
            tokenizer = hf.AutoTokenizer.from_pretrained(self.tokenizer, local_files_only=True)
            encoder = hf.AutoModel.from_pretrained(
                self.encoder,
                local_files_only=True,
                use_safetensors=True,
            )
        except (OSError, ValueError, KeyError) as error:
            raise TaskDataError(
                f"task.tokenizer and task.encoder must be folders that Hugging Face's from_pretrained "
                f"reads ({type(error).__name__})."
            ) from None
        return tokenizer, encoder.eval()

    def words(self, cells: Any) -> tuple[list[str], Fault]:
        """Return the texts in cells, empty for missing ones, and the fault of the missing ones."""
        missing = is_missing(cells)
        words = texts(cells).to_pylist()
        for place in np.flatnonzero(missing):
            words[place] = ""
        return words, Fault(self.text, "without a text", missing)

    def features(self, words: list[str]) -> tuple[Any, Fault]:
        """Return the mean of the encoder's states over each text's tokens, scaled to length 1.

        Args:
            words: At most `TEXTS` texts.

        Returns:
            Features ``[len(words), width]``, and which of them are not finite.
        """
        import torch

        tokenizer, encoder = self.loaded
        # All to one number and one length: what a text becomes must not hang on its neighbours.
        padding = [""] * (TEXTS - len(words))
        tokens = tokenizer(
            words + padding,
            padding="max_length",
            truncation=True,
            max_length=self.length,
            return_tensors="pt",
        )
        with torch.no_grad():
            states = encoder(**tokens).last_hidden_state
        mask = tokens["attention_mask"].to(states.dtype)
        weights = mask.unsqueeze(-1)
        states_or_zero = states * weights
        token_sums = states_or_zero.sum(dim=1)
        token_counts = weights.sum(dim=1)
        means = token_sums / token_counts.clamp(min=1.0)
        scaled = torch.nn.functional.normalize(means, dim=1)
        scaled_of_words = scaled[: len(words)]
        x = scaled_of_words.float().numpy()
        is_finite = np.isfinite(x).all(axis=1)
        return x, Fault("", "whose features are no numbers", ~is_finite)

    def read(self, raw: Any) -> Inputs:
        """Return features ``[N, width]`` of texts in a column or in a plain list."""
        if isinstance(raw, Sequence):
            is_texts = all(isinstance(text, str | None) for text in raw)
            if is_texts:
                raw = {self.text: raw}
        columns = _cells_by_column(raw, self.names)
        cells = column_of(columns[self.text])
        words, missing = self.words(cells)
        features = []
        broken = []
        count = max(len(words), 1)  # one part of no rows gives the width
        for start in range(0, count, TEXTS):
            part = words[start : start + TEXTS]
            x, fault = self.features(part)
            features.append(x)
            broken.append(fault.records)
        not_finite = Fault("", "", np.concatenate(broken))
        return _zero_unusable(np.concatenate(features), [missing, not_finite])

    def example(self) -> Any:
        """Return a row with a made-up text."""
        return [{self.text: "An example."}]

    def save(self, folder: Path) -> Rows:
        """Save copies of tokenizer and encoder into a folder, so that a served model reads no other files."""
        tokenizer, encoder = self.loaded
        tokenizer_folder = folder / "tokenizer"
        encoder_folder = folder / "encoder"
        tokenizer.save_pretrained(tokenizer_folder)
        encoder.save_pretrained(encoder_folder)
        return replace(
            self,
            tokenizer=tokenizer_folder.name,
            encoder=encoder_folder.name,
        )


@dataclass(frozen=True, kw_only=True)
class PictureRows(Rows):
    """Rows of pictures, given as files or as arrays.

    Attributes:
        shape: Channels, height and width of what the network takes.
    """

    kind = "pictures"
    libraries = ("pillow",)
    shape: tuple[int, int, int]

    @property
    def names(self) -> tuple[str, ...]:
        """Name of the column of pictures, for rows with columns."""
        return ("picture",)

    @property
    def takes(self) -> str:
        """Description of the pictures and of the arrays' shape, in words."""
        channels, height, width = self.shape
        return f"pictures: files, or arrays [n, {height}, {width}, {channels}], {_PIXELS}"

    def fits(self, x: Any) -> bool:
        """Return whether an array is of pictures: of the declared shape, with bytes or floats."""
        channels, *size = self.shape
        channels_first = [channels, *size]
        channels_last = [*size, channels]
        layouts = [channels_first, channels_last]
        if channels == 1:
            layouts.append(size)
        is_number = x.dtype == np.uint8 or x.dtype.kind == "f"
        shape = list(x.shape[1:])
        return is_number and shape in layouts

    def scaled(self, x: Any) -> Any:
        """Return a fitting array of pictures as floats, channels first, with bytes divided by 255."""
        is_of_bytes = x.dtype == np.uint8
        white = 255.0 if is_of_bytes else 1.0
        pixels = x.astype(np.float32) / white
        if pixels.shape[1:] == tuple(self.shape):
            return pixels
        channels, height, width = self.shape
        channels_last = pixels.reshape(len(pixels), height, width, channels)
        return channels_last.transpose(0, 3, 1, 2)

    def opened(self, file: Path | bytes) -> Any:
        """Return the picture in a file, resized to the declared shape and in [0, 1], or NaN if unreadable."""
        channels, height, width = self.shape
        mode = "L" if channels == 1 else "RGB"
        pil = _library("PIL.Image", "pillow")
        try:
            if isinstance(file, bytes):
                source: Any = io.BytesIO(file)
            else:
                source = regular_file(file, most=_LARGEST)
            with pil.open(source) as picture:
                resized = picture.convert(mode).resize((width, height))
        except Exception:  # whatever a decoder makes of a record, it is that record's alone
            return self._unreadable
        values = np.asarray(resized, dtype=np.float32)
        channels_last = values.reshape(height, width, channels)
        channels_first = channels_last.transpose(2, 0, 1)
        return channels_first / 255.0

    @property
    def _unreadable(self) -> Any:
        """Placeholder of an unreadable picture, NaN in every pixel."""
        return np.full(self.shape, np.nan, dtype=np.float32)

    def of(self, x: Any) -> tuple[Any, tuple[Fault, Fault]]:
        """Return pictures clipped to [0, 1], and the faults of unreadable and of clipped ones.

        Args:
            x: Pictures ``[N, channels, height, width]``, NaN where one cannot be read.
        """
        pixels = _flat(x)
        is_finite = np.isfinite(pixels).all(axis=1)
        is_beyond = (pixels < 0.0) | (pixels > 1.0)
        unreadable = Fault(
            "pictures",
            "that cannot be read, or hold what is no number",
            ~is_finite,
        )
        clipped = Fault(
            "pixels",
            CLIPPED,
            is_beyond.any(axis=1) & is_finite,
            used=True,
            declared="they must lie in [0, 1]",
        )
        pictures = np.clip(x, 0.0, 1.0)
        return pictures, (unreadable, clipped)

    def read(self, raw: Any) -> Inputs:
        """Return pictures ``[N, channels, height, width]`` in [0, 1], from one array or from single files.

        A number beyond [0, 1] is refused: whoever forgets to divide by 255 would get white pictures.
        """
        has_columns = hasattr(raw, "columns") or isinstance(raw, Mapping) or _are_dicts(raw)
        if has_columns:
            columns = _cells_by_column(raw, self.names)
            raw = columns["picture"]
        x = self._read_pictures(raw)
        if _is_beyond(x, (0.0, 1.0)):
            raise InvalidInputError(
                "pictures",
                "numbers beyond [0, 1]",
                f"must be {_PIXELS}",
                "Divide floats by 255.",
            )
        pictures, faults = self.of(x)
        return _zero_unusable(pictures, faults)

    def _read_pictures(self, raw: Any) -> Any:
        """Return pictures ``[N, channels, height, width]`` from one array, or from single files or arrays."""
        if hasattr(raw, "__array__"):
            pixels = np.asarray(raw)
            if pixels.dtype != object:
                return self._read_array(pixels)
        pictures = list(map(self._read_picture, raw))
        if not pictures:
            return np.empty((0, *self.shape), np.float32)
        return np.stack(pictures)

    def _read_array(self, pixels: Any) -> Any:
        """Return pictures of one array, or refuse its shape or its type."""
        if not self.fits(pixels):
            channels, height, width = self.shape
            raise InvalidInputError(
                "pictures",
                f"{pixels.dtype} {pixels.shape}",
                f"must be [n, {height}, {width}, {channels}], {_PIXELS}",
            )
        return self.scaled(pixels)

    def _read_picture(self, raw: Any) -> Any:
        """Return a picture from its file's bytes, from these in base64, from its path or from its pixels."""
        try:
            if isinstance(raw, str):
                raw = base64.b64decode(raw)
            if isinstance(raw, bytes | Path):
                return self.opened(raw)
            pixels = np.asarray(raw)
            if pixels.dtype.kind in "iu":  # lists of Python's hold bytes as wider numbers
                is_byte = (pixels >= 0) & (pixels < 256)
                if is_byte.all():
                    pixels = pixels.astype(np.uint8)
            batch = pixels[None]
            if self.fits(batch):
                pictures = self.scaled(batch)
                return pictures[0]
        except (ValueError, IndexError):
            pass
        return self._unreadable

    def example(self) -> Any:
        """Return a row with a black picture of one pixel, as a file's bytes in base64."""
        return [{"picture": _BLACK}]


@dataclass(frozen=True, kw_only=True)
class ArrayRows(Rows):
    """Rows of arrays of declared shapes, one or several by name, or of columns of numbers.

    Attributes:
        parts: Shape of a record in each array; of one alone the name is no matter.
        dtypes: Type of each.
        shape: Of what the network takes: of several arrays, all numbers of a record.
        number: Type of these.
        columns: Whose numbers the one array is made of, in this order.
        limits: Of whole numbers, from 0: how many there are of each.
        within: The range of every number, where the task has one.
        scaling: How raw numbers come into that range, in words.
    """

    kind = "arrays"
    parts: Mapping[str, Sequence[int]]
    dtypes: Sequence[str]
    shape: Sequence[int]
    number: str
    columns: Sequence[str] = ()
    limits: Sequence[int] | None = None
    within: Sequence[float] | None = None
    scaling: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The columns of numbers; none where rows are arrays."""
        return tuple(self.columns)

    @property
    def takes(self) -> str:
        """Description of the arrays: types, shapes (``n`` rows) and the range of their numbers."""
        if self.columns:
            return f"the columns {', '.join(self.columns)}, all of numbers"
        arrays = []
        for name, dtype in zip(self.parts, self.dtypes, strict=True):
            words = f"{dtype} {_shape_in_words(self.parts[name])}"
            if len(self.parts) > 1:
                words = f"{name}: {words}"
            arrays.append(words)
        listing = ", ".join(arrays)
        return f"arrays {listing}{self._range}"

    @property
    def _range(self) -> str:
        """Description of the numbers' range and scaling, empty if the task declares no range."""
        if self.within is None:
            return ""
        low, high = self.within
        words = f", every number in [{low:g}, {high:g}]"
        if self.scaling:
            words += f" ({self.scaling})"
        return words

    def read(self, raw: Any) -> Inputs:
        """Return the numbers of all arrays as the network's inputs ``[N, ...]``, and a mask of usable rows.

        Of several arrays a row becomes one, in the order of ``parts``. A number beyond the task's range is
        refused: whoever forgets to scale would get answers to other inputs.
        """
        flat = self._flat_numbers(raw)
        usable = np.isfinite(flat).all(axis=1)
        if self.limits is not None:
            # A token of no table stops its own row alone.
            limits = np.array(self.limits)
            in_table = (flat >= 0) & (flat < limits)
            usable &= in_table.all(axis=1)
        if self.within is not None and _is_beyond(flat, self.within):
            raise self._beyond_range(*self.within)
        by_row = usable[:, None]
        usable_or_zero = np.where(by_row, flat, 0)
        numbers = usable_or_zero.astype(self.number)
        x = numbers.reshape(len(numbers), *self.shape)
        return x, usable

    def _flat_numbers(self, raw: Any) -> Any:
        """Return all numbers of each row ``[N, numbers]``, or refuse arrays that do not fit together."""
        if self.columns and not hasattr(raw, "__array_interface__"):
            raw = self._array_of_columns(raw)
        if len(self.parts) == 1:
            (only,) = self.parts
            array = raw.get(only) if isinstance(raw, Mapping) else raw
            raw = {only: array}
        elif isinstance(raw, tuple):
            raw = dict(zip(self.parts, raw, strict=False))
        sizes = []
        arrays = []
        for name, shape in self.parts.items():
            array = self._part(raw, name, tuple(shape))
            sizes.append(len(array))
            arrays.append(_flat(array))
        distinct = set(sizes)
        if len(distinct) > 1:
            raise InvalidInputError("rows", sizes, "must be as many in every array")
        return np.concatenate(arrays, axis=1)

    def _array_of_columns(self, raw: Any) -> Any:
        """Return columns of numbers as one array ``[N, columns]``, with NaN for cells that hold none."""
        cells = _cells_by_column(raw, self.names)
        numbers = []
        for name in self.columns:
            column = map(_number_of, cells[name])
            numbers.append(list(column))
        count = len(self.columns)
        by_column = np.array(numbers, dtype=np.float64)
        return by_column.reshape(count, -1).T

    def _beyond_range(self, low: float, high: float) -> InvalidInputError:
        """Return the error for numbers outside of the task's range."""
        scaling = self.scaling or "scale them as the task does"
        first = scaling[0].upper()
        rest = scaling[1:]
        return InvalidInputError(
            "inputs",
            "numbers beyond the task's range",
            f"must lie in [{low:g}, {high:g}]",
            f"{first}{rest}.",
        )

    def _part(
        self,
        raw: Any,
        name: str,
        shape: tuple[int, ...],
    ) -> Any:
        """Return the array of one part, or refuse a value that is not numeric or of another shape."""
        part = raw.get(name) if isinstance(raw, Mapping) else None
        try:
            array = np.asarray(part)
        except (TypeError, ValueError):
            array = np.asarray(None)
        is_number = array.dtype.kind in "biuf"
        if is_number and array.ndim > 0 and array.shape[1:] == shape:
            return array
        field = "inputs"
        if len(self.parts) > 1:
            field = f"inputs[{name!r}]"
        kind = None
        if part is not None:
            kind = f"{array.dtype} {array.shape}"
        allowed = f"must be numbers of shape {_shape_in_words(shape)}"
        raise InvalidInputError(field, kind, allowed)

    def example(self) -> Any:
        """Return a row of numbers in the middle of their range, or of zeros without a range."""
        if self.columns:
            return [dict.fromkeys(self.columns, 0.0)]
        middle = 0.0
        if self.within is not None:
            low, high = self.within
            middle = 0.5 * (low + high)
        arrays = {}
        for name, dtype in zip(self.parts, self.dtypes, strict=True):
            shape = self.parts[name]
            arrays[name] = np.full((1, *shape), middle, dtype)
        if len(arrays) == 1:
            (only,) = arrays.values()
            return only
        return arrays


_KINDS = (TableRows, TextRows, PictureRows, ArrayRows)


def _shape_in_words(shape: Sequence[int]) -> str:
    """Return the shape of an array of records in words, such as ``[n, 28, 28]``.

    Args:
        shape: Of one record.
    """
    sizes = ", ".join(map(str, ("n", *shape)))
    return f"[{sizes}]"


def _flat(values: Any) -> Any:
    """Return an array with all axes but the first flattened into one, also for no rows."""
    size = math.prod(values.shape[1:])
    return values.reshape(len(values), size)


def _is_beyond(values: Any, ends: Sequence[float]) -> bool:
    """Return whether some number, NaN apart, lies outside a range by more than rounding.

    Args:
        values: Numbers of any shape.
        ends: The low and the high end of the range.
    """
    low, high = ends
    width = high - low
    scale = max(width, abs(low), abs(high))
    margin = _ROUNDING * scale
    below = values < low - margin
    above = values > high + margin
    beyond = below | above
    return bool(beyond.any())


def _library(module: str, distribution: str) -> Any:
    """Import a library that some models alone need, or say what to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise PrivTuneError(
            f"Predictions need {distribution}: pip install {distribution}."
        ) from None


def _cells_by_column(raw: Any, names: Sequence[str]) -> CellsByColumn:
    """Return the cells of named columns from a DataFrame, a list of dicts or a dict of columns.

    Raises:
        InvalidInputError: If the rows are none of these.
        PrivTuneError: If a column is not there: its cells may be empty, but not it.
    """
    if _are_dicts(raw):
        columns = _columns_of_dicts(raw, names)
    elif hasattr(raw, "columns"):
        columns = _columns_of_frame(raw, names)
    elif isinstance(raw, Mapping):
        columns = {}
        for name in names:
            if name in raw:
                columns[name] = list(raw[name])
    else:
        all_names = ", ".join(names)
        raise InvalidInputError(
            "rows",
            type(raw).__name__,
            f"must be a DataFrame, or a list of dicts, with the columns {all_names}",
        )
    missing = [name for name in names if name not in columns]
    if missing:
        all_names = ", ".join(names)
        missing_names = ", ".join(missing)
        raise PrivTuneError(
            f"The rows have no column {missing_names}: the model takes the columns "
            f"{all_names}, whose cells may be empty."
        )
    return columns


def _columns_of_dicts(rows: Sequence[Mapping[Any, Any]], names: Sequence[str]) -> CellsByColumn:
    """Return the cells of the columns that any row has, or of all columns if there are no rows."""
    labels: set[str] = set()
    for row in rows:
        labels.update(map(str, row))
    columns: CellsByColumn = {}
    for name in names:
        if name in labels or not labels:
            columns[name] = [row.get(name) for row in rows]
    return columns


def _columns_of_frame(frame: Any, names: Sequence[str]) -> CellsByColumn:
    """Return the cells of the columns that a DataFrame has, with None for pandas' missing values."""
    labels = list(map(str, frame.columns))
    doubles = [name for name in names if labels.count(name) > 1]
    if doubles:
        raise InvalidInputError("rows", doubles, "are columns that are there twice")
    columns = {}
    for name in names:
        if name in labels:
            place = labels.index(name)
            series = frame.iloc[:, place]
            is_filled = ~series.isna()
            columns[name] = _blank(series.tolist(), is_filled)
    return columns


def _blank(cells: Sequence[Any], usable: Iterable[Any]) -> list[Any]:
    """Return cells, None for those that are not usable."""
    return [cell if use else None for cell, use in zip(cells, usable, strict=True)]


def _are_dicts(raw: Any) -> bool:
    """Return whether rows are a list of dicts, which may be empty."""
    if not isinstance(raw, list | tuple):
        return False
    return all(isinstance(row, Mapping) for row in raw)


def _number_of(cell: Any) -> float:
    """Return a cell as a number, NaN if it is text or nothing."""
    if isinstance(cell, int | float | np.number | np.bool_):
        return float(cell)
    return np.nan


def _zero_unusable(x: Any, faults: Sequence[Fault]) -> Inputs:
    """Return inputs with zeros for unusable rows, and a mask of the usable rows.

    Args:
        x: Inputs ``[N, ...]``.
        faults: What is not as declared of them.
    """
    mask = unusable(faults, len(x))
    further_axes = [1] * (x.ndim - 1)
    by_row = mask.reshape(-1, *further_axes)
    zero = np.float32(0)
    usable_or_zero = np.where(by_row, zero, x)
    return usable_or_zero, ~mask


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A trained network that takes raw rows and answers with its task's labels or numbers.

    Attributes:
        rows: What a raw row is.
        network: Takes inputs ``[N, ...]`` and returns outputs ``[N, ...]``.
        labels: Of the classes, where they are declared.
        counted: Targets are whole numbers: classes from 0 where no labels are known.
        target_range: What numbers are clipped to; None where no range is declared.
        temperature: What logits are divided by for probabilities; 1 unless known.
    """

    rows: Rows
    network: Callable[[torch.Tensor], torch.Tensor]
    labels: Sequence[Any] | None = None
    counted: bool = False
    target_range: Sequence[float] | None = None
    temperature: float | None = None

    def predict(self, given: Any) -> pandas.DataFrame:
        """Return a prediction for each raw row, and None for each row that differs from the declaration.

        Args:
            given: A DataFrame, a list of dicts, or arrays, as the task's records are.

        Returns:
            For classes ``prediction`` and ``probability_LABEL``; for numbers ``prediction``; else
            ``output``, what the network returns.

        Raises:
            InvalidInputError: If a column is missing, or arrays are of another shape.
        """
        pandas = _library("pandas", "pandas")
        index = None
        if hasattr(given, "columns"):
            index = getattr(given, "index", None)
        x, usable = self.rows.read(given)
        answers = self.answers(x, usable)
        series = {}
        for name, (cells, kind) in answers.items():
            series[name] = pandas.Series(cells, dtype=kind, index=index)
        return pandas.DataFrame(series)  # type: ignore[no-any-return]

    def answers(self, x: Any, usable: Mask) -> Answers:
        """Return columns of answers by name with the type of each, and None for rows without an answer.

        Outputs ``[N, classes]`` become classes, ``[N, 1]`` numbers in the target's range; what is neither is
        returned as it is.

        Args:
            x: Inputs ``[N, ...]``.
            usable: Which of them are those of rows that can be used ``[N]``.
        """
        import torch

        outputs = torch.cat(list(self._outputs(x)))
        flat = _flat(outputs)
        # Outputs that are not finite say nothing of their row.
        finite = flat.isfinite().all(dim=1)
        answered = usable & finite.numpy()
        answers: Answers = {}
        for name, (cells, kind) in self._columns_of(outputs).items():
            answers[name] = (_blank(cells, answered), kind)
        return answers

    def _columns_of(self, outputs: torch.Tensor) -> Answers:
        """Return the columns of answers, as if every row had an answer.

        Args:
            outputs: Of the network, ``[N, ...]``.
        """
        labels: Sequence[Any] = self.labels or ()
        if self.counted and not labels:
            labels = range(outputs.shape[-1])
        has_one_per_label = outputs.ndim == 2 and outputs.shape[1] == len(labels)
        if has_one_per_label and len(labels) > 1:
            return self._class_columns(outputs, labels)
        is_of_classes = self.counted or self.labels is not None
        size = math.prod(outputs.shape[1:])
        if is_of_classes or size != 1:
            return {"output": (outputs.tolist(), object)}
        numbers = outputs.reshape(-1).double()
        if self.target_range is not None:
            numbers = numbers.clamp(*self.target_range)
        return {"prediction": (numbers.tolist(), float)}

    def _class_columns(
        self,
        logits: torch.Tensor,
        labels: Sequence[Any],
    ) -> Answers:
        """Return columns with the predicted label and with each label's probability, from logits."""
        # The predicted class is that of the logits as they are: a quotient could make ties of them.
        places = logits.argmax(dim=1).tolist()
        predictions = [labels[place] for place in places]
        columns: Answers = {"prediction": (predictions, object)}
        scaled = logits.double() / (self.temperature or 1.0)
        shares = scaled.softmax(dim=1)
        for place, label in enumerate(labels):
            column = shares[:, place]
            columns[f"probability_{label}"] = (column.tolist(), float)
        return columns

    def _outputs(self, x: Any) -> Iterator[torch.Tensor]:
        """Yield the network's outputs for batches of rows, and one empty batch if there are none."""
        import torch

        contiguous = np.ascontiguousarray(x)
        inputs = torch.from_numpy(contiguous)
        count = max(len(x), 1)
        for start in range(0, count, _BATCH):
            part = inputs[start : start + _BATCH]
            # Of no row or one, an exported program would be another.
            lacking = max(0, 2 - len(part))
            shape = part.shape[1:]
            fillers = part.new_zeros((lacking, *shape))
            filled = torch.cat([part, fillers])
            with torch.no_grad():
                outputs = self.network(filled)
            yield outputs[: len(part)].float()

    def save(self, folder: Path) -> None:
        """Write all but the network into a folder, for :meth:`load`."""
        document = {name: getattr(self, name) for name in _FIELDS}
        rows = self.rows.save(folder)
        document["rows"] = rows.to_dict()
        # Dates of a YAML file become words here, which are read as dates again.
        text = json.dumps(document, default=str)
        (folder / _MODEL).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> ServedModel:
        """Read a model that was exported into a folder."""
        import torch

        text = (folder / _MODEL).read_text(encoding="utf-8")
        document = json.loads(text)
        description = document.pop("rows")
        for name in ("tokenizer", "encoder"):
            if name in description:
                place = folder / description[name]
                description[name] = str(place)
        kind = description.pop("kind")
        kinds = {rows_class.kind: rows_class for rows_class in _KINDS}
        rows_class = kinds[kind]
        rows = rows_class(**description)
        program = torch.export.load(folder / NETWORK)
        return cls(rows=rows, network=program.module(), **document)
