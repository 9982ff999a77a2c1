"""From raw rows to predictions: what training reads of a record, and whoever uses the model of it.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.files import regular_file
from privtune.tasks._cells import CLIPPED, Fault, Mask, column_of, is_missing, texts, unusable
from privtune.tasks._columns import Category, Column, Date, Ordinal
from privtune.tasks._declared import read_columns, read_notation
from privtune.tasks._facts import TaskDataError

if TYPE_CHECKING:
    import pandas
    import torch

TEXTS = 32  # that an encoder reads at once, always as many: all sums have one shape
NETWORK = "network.pt2"  # as torch.export has it
_MODEL = "model.json"
_AT_ONCE = 1024  # rows that a network sees at once
_BLACK = (  # a PNG of one point, in base64
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mNgAAAAAgAB5Sfe/AAAAABJRU5ErkJggg=="
)
_LARGEST = 1 << 28  # bytes of a picture; a larger one cannot be used


@dataclass(frozen=True, kw_only=True)
class Rows(ABC):
    """What a raw row is, and how it becomes what a network takes."""

    kind: ClassVar[str]
    libraries: ClassVar[tuple[str, ...]] = ()  # beside those that every model needs

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The columns of a raw row; none where rows are arrays."""

    @abstractmethod
    def read(self, given: Any) -> tuple[Any, Mask]:
        """Return the inputs of raw rows, and which rows can be used; those of the others are zeros."""

    @abstractmethod
    def example(self) -> Any:
        """Return one raw row that is made up of public facts alone."""

    def to_dict(self) -> dict[str, Any]:
        """Return the rows JSON-ready."""
        return {"kind": self.kind, **{f.name: getattr(self, f.name) for f in fields(self)}}

    def save(self, folder: Path) -> Rows:
        """Put what the rows need beside their description into a folder; return them with its place."""
        return self


@dataclass(frozen=True, kw_only=True)
class TableRows(Rows):
    """Rows of a table, of the columns that its spec declares."""

    kind = "table"
    bounds: Any
    columns: Any
    projection: Any = None
    notation: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def features(self) -> tuple[Column, ...]:
        """The declared feature columns."""
        return read_columns(self.bounds, self.columns, read_notation("task", self.notation))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.features)

    def of(self, batch: Mapping[str, Any]) -> tuple[Any, list[Fault]]:
        """Return the features of some records ``[N, width]``, and what is not as declared."""
        faults: list[Fault] = []
        x = np.empty((len(batch[self.names[0]]), sum(c.width for c in self.features)), np.float32)
        start = 0
        for column in self.features:
            x[:, start : start + column.width], wrong = column.read(batch[column.name])
            faults += wrong
            start += column.width
        return x, faults

    def projected(self, x: Any) -> Any:
        """Return features projected on the released directions, where there are some."""
        return x if self.projection is None else x @ np.asarray(self.projection, np.float32).T

    def read(self, given: Any) -> tuple[Any, Mask]:
        x, faults = self.of({n: column_of(c) for n, c in _cells(given, self.names).items()})
        x, usable = _usable(x, faults)
        return self.projected(x), usable

    def example(self) -> Any:
        return [{column.name: _example(column) for column in self.features}]


def _example(column: Column) -> Any:
    if isinstance(column, Category):
        return column.values[0]
    if isinstance(column, Ordinal):
        return column.levels[0]
    if isinstance(column, Date):
        return column.written(column.low)
    return 0.5 * (getattr(column, "low", 0.0) + getattr(column, "high", 0.0))


@dataclass(frozen=True, kw_only=True)
class TextRows(Rows):
    """Texts: what a frozen public encoder makes of each."""

    kind = "text"
    libraries = ("transformers",)
    text: str
    tokenizer: str
    encoder: str
    length: int

    @property
    def names(self) -> tuple[str, ...]:
        return (self.text,)

    @cached_property
    def loaded(self) -> tuple[Any, Any]:
        """The tokenizer and the encoder, from local files alone."""
        hf = _library("transformers", "transformers")
        try:
            tokenizer = hf.AutoTokenizer.from_pretrained(self.tokenizer, local_files_only=True)
            encoder = hf.AutoModel.from_pretrained(
                self.encoder, local_files_only=True, use_safetensors=True
            )
        except (OSError, ValueError, KeyError) as error:
            raise TaskDataError(
                f"task.tokenizer and task.encoder must be folders that Hugging Face's from_pretrained "
                f"reads ({type(error).__name__})."
            ) from None
        return tokenizer, encoder.eval()

    def words(self, cells: Any) -> tuple[list[str], Fault]:
        """Return texts, and which are missing."""
        missing = is_missing(cells)
        found = zip(texts(cells).to_pylist(), missing, strict=True)
        return ["" if lost else word for word, lost in found], Fault(
            self.text, "without a text", missing
        )

    def features(self, words: list[str]) -> tuple[Any, Fault]:
        """Return the mean over tokens of what the encoder makes of each text, scaled to length 1."""
        import torch

        tokenizer, encoder = self.loaded
        # All to one number and one length: what a text becomes must not hang on its neighbours.
        tokens = tokenizer(
            words + [""] * (TEXTS - len(words)),
            padding="max_length",
            truncation=True,
            max_length=self.length,
            return_tensors="pt",
        )
        with torch.no_grad():
            states = encoder(**tokens).last_hidden_state
        there = tokens["attention_mask"].unsqueeze(-1).to(states.dtype)
        mean = (states * there).sum(dim=1) / there.sum(dim=1).clamp(min=1.0)
        x = torch.nn.functional.normalize(mean, dim=1)[: len(words)].float().numpy()
        return x, Fault("", "whose features are no numbers", ~np.isfinite(x).all(axis=1))

    def read(self, given: Any) -> tuple[Any, Mask]:
        if isinstance(given, Sequence) and all(isinstance(one, str | None) for one in given):
            given = {self.text: given}
        words, missing = self.words(column_of(_cells(given, self.names)[self.text]))
        parts = [
            self.features(words[start : start + TEXTS])
            for start in range(0, max(len(words), 1), TEXTS)
        ]
        broken = Fault("", "", np.concatenate([fault.records for _, fault in parts]))
        return _usable(np.concatenate([x for x, _ in parts]), [missing, broken])

    def example(self) -> Any:
        return [{self.text: "An example."}]

    def save(self, folder: Path) -> Rows:
        tokenizer, encoder = self.loaded
        tokenizer.save_pretrained(folder / "tokenizer")
        encoder.save_pretrained(folder / "encoder")
        return replace(self, tokenizer="tokenizer", encoder="encoder")


@dataclass(frozen=True, kw_only=True)
class PictureRows(Rows):
    """Pictures: files of them, or arrays."""

    kind = "pictures"
    libraries = ("pillow",)
    shape: tuple[int, int, int]  # channels, height, width

    @property
    def names(self) -> tuple[str, ...]:
        return ("picture",)

    def fits(self, x: Any) -> bool:
        """Say whether arrays are pictures, channels first, last or left out, of bytes or in [0, 1]."""
        channels, *size = self.shape
        known = [[channels, *size], [*size, channels], size if channels == 1 else None]
        return list(x.shape[1:]) in known and (x.dtype == np.uint8 or x.dtype.kind == "f")

    def scaled(self, x: Any) -> Any:
        """Return arrays that fit with channels first; those of bytes in [0, 1]."""
        part = x.astype(np.float32) / (255.0 if x.dtype == np.uint8 else 1.0)
        channels, height, width = self.shape
        if part.shape[1:] != tuple(self.shape):
            part = part.reshape(len(part), height, width, channels).transpose(0, 3, 1, 2)
        return part

    def opened(self, file: Path | bytes) -> Any:
        """Return a picture of the declared shape, in [0, 1]; NaN where it cannot be read."""
        channels, height, width = self.shape
        pil = _library("PIL.Image", "pillow")
        try:
            found = (
                io.BytesIO(file) if isinstance(file, bytes) else regular_file(file, most=_LARGEST)
            )
            with pil.open(found) as picture:
                sized = picture.convert("L" if channels == 1 else "RGB").resize((width, height))
        except Exception:  # whatever a decoder makes of a record, it is that record's alone
            return np.full(self.shape, np.nan, dtype=np.float32)
        values = np.asarray(sized, dtype=np.float32).reshape(height, width, channels)
        return values.transpose(2, 0, 1) / 255.0

    def of(self, x: Any) -> tuple[Any, tuple[Fault, Fault]]:
        """Return pictures held to [0, 1], and which are broken or were not within."""
        pixels = _flat(x)
        broken = ~np.isfinite(pixels).all(axis=1)
        outside = ((pixels < 0.0) | (pixels > 1.0)).any(axis=1) & ~broken
        return np.clip(x, 0.0, 1.0), (
            Fault("pictures", "that cannot be read, or hold what is no number", broken),
            Fault("pixels", CLIPPED, outside, used=True, declared="they must lie in [0, 1]"),
        )

    def read(self, given: Any) -> tuple[Any, Mask]:
        if hasattr(given, "columns") or isinstance(given, Mapping) or _are_dicts(given):
            given = _cells(given, self.names)["picture"]
        if hasattr(given, "__array__") and np.asarray(given).dtype != object:
            given = np.asarray(given)
            if not self.fits(given):
                channels, height, width = self.shape
                raise InvalidInputError(
                    "pictures",
                    f"{given.dtype} {given.shape}",
                    f"must be [n, {height}, {width}, {channels}], bytes from 0 to 255 or floats in [0, 1]",
                )
            x = self.scaled(given)
        else:
            x = np.stack([np.empty(self.shape, np.float32), *map(self._one, given)])[1:]
        return _usable(*self.of(x))

    def _one(self, given: Any) -> Any:
        """Return a picture that is given as the bytes of its file, as these in base64, or as its pixels."""
        try:
            if isinstance(given, str):
                given = base64.b64decode(given)
            if isinstance(given, bytes | Path):
                return self.opened(given)
            pixels = np.asarray(given)
            if pixels.dtype.kind in "iu" and ((pixels >= 0) & (pixels < 256)).all():
                pixels = pixels.astype(np.uint8)
            if self.fits(pixels[None]):
                return self.scaled(pixels[None])[0]
        except (ValueError, IndexError):
            pass
        return np.full(self.shape, np.nan, dtype=np.float32)

    def example(self) -> Any:
        return [{"picture": _BLACK}]


@dataclass(frozen=True, kw_only=True)
class ArrayRows(Rows):
    """Arrays of declared shapes, one or several by name; or columns of numbers."""

    kind = "arrays"
    parts: Mapping[str, Sequence[int]]  # shape of each; of one alone the name is no matter
    dtypes: Sequence[str]
    shape: Sequence[int]  # of what the network takes: of several, all numbers of a record
    number: str  # type of these
    columns: Sequence[str] = ()  # whose numbers the one array is made of, in this order
    limits: Sequence[int] | None = None  # of whole numbers, from 0: how many there are of each

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.columns)

    def read(self, given: Any) -> tuple[Any, Mask]:
        if self.columns and not hasattr(given, "__array_interface__"):
            cells = _cells(given, self.names)
            numbers = [list(map(_number, cells[name])) for name in self.columns]
            given = np.array(numbers, dtype=np.float64).reshape(len(self.columns), -1).T
        if len(self.parts) == 1:
            only = next(iter(self.parts))
            given = {only: given.get(only) if isinstance(given, Mapping) else given}
        elif isinstance(given, tuple):
            given = dict(zip(self.parts, given, strict=False))
        found = [self._part(given, name, tuple(shape)) for name, shape in self.parts.items()]
        if len(sizes := [len(part) for part in found]) > 1 and len({*sizes}) > 1:
            raise InvalidInputError("rows", sizes, "must be as many in every array")
        flat = np.concatenate([_flat(part) for part in found], axis=1)
        usable = np.isfinite(flat).all(axis=1)
        if self.limits is not None:
            usable &= ((flat >= 0) & (flat < np.array(self.limits))).all(axis=1)
        x = np.where(usable[:, None], flat, 0).astype(self.number)
        return x.reshape(len(x), *self.shape), usable

    def _part(self, given: Any, name: str, shape: tuple[int, ...]) -> Any:
        part = given.get(name) if isinstance(given, Mapping) else None
        try:
            found = np.asarray(part)
        except (TypeError, ValueError):
            found = np.asarray(None)
        if found.dtype.kind not in "biuf" or found.ndim == 0 or found.shape[1:] != shape:
            raise InvalidInputError(
                "inputs" if len(self.parts) == 1 else f"inputs[{name!r}]",
                None if part is None else f"{found.dtype} {found.shape}",
                f"must be numbers of shape [{', '.join(map(str, ('n', *shape)))}]",
            )
        return found

    def example(self) -> Any:
        if self.columns:
            return [dict.fromkeys(self.columns, 0.0)]
        parts = zip(self.parts.items(), self.dtypes, strict=True)
        found = {name: np.zeros((1, *shape), dtype) for (name, shape), dtype in parts}
        return found if len(found) > 1 else next(iter(found.values()))


_KINDS = (TableRows, TextRows, PictureRows, ArrayRows)


def _flat(values: Any) -> Any:
    """Return arrays of as many rows, one axis each: of no rows, too, whose size is not known by itself."""
    return values.reshape(len(values), math.prod(values.shape[1:]))


def _library(module: str, distribution: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise PrivTuneError(
            f"Predictions need {distribution}: pip install {distribution}."
        ) from None


def _cells(given: Any, names: Sequence[str]) -> dict[str, list[Any]]:
    """Return the cells of some columns of a DataFrame, of dicts one a row, or of a dict of columns."""
    found: dict[str, list[Any]]
    if _are_dicts(given):
        known = {str(name) for row in given for name in row} or set(names)
        found = {name: [row.get(name) for row in given] for name in names if name in known}
    elif hasattr(given, "columns"):
        labels = [str(label) for label in given.columns]
        if twice := [name for name in names if labels.count(name) > 1]:
            raise InvalidInputError("rows", twice, "are columns that are there twice")
        columns = {n: given.iloc[:, labels.index(n)] for n in names if n in labels}
        found = {
            name: [None if no else cell for cell, no in zip(c.tolist(), c.isna(), strict=True)]
            for name, c in columns.items()
        }
    elif isinstance(given, Mapping):
        found = {name: list(given[name]) for name in names if name in given}
    else:
        raise InvalidInputError(
            "rows",
            type(given).__name__,
            f"must be a DataFrame, or a list of dicts, with the columns {', '.join(names)}",
        )
    if missing := [name for name in names if name not in found]:
        raise PrivTuneError(
            f"The rows have no column {', '.join(missing)}: the model takes the columns "
            f"{', '.join(names)}, whose cells may be empty."
        )
    return found


def _are_dicts(given: Any) -> bool:
    return isinstance(given, list | tuple) and all(isinstance(row, Mapping) for row in given)


def _number(cell: Any) -> float:
    return float(cell) if isinstance(cell, int | float | np.number | np.bool_) else np.nan


def _usable(x: Any, faults: Sequence[Fault]) -> tuple[Any, Mask]:
    """Return inputs with zeros for the rows that cannot be used, and which can."""
    lost = unusable(faults, len(x))
    return np.where(lost.reshape(-1, *(1 for _ in x.shape[1:])), np.float32(0), x), ~lost


@dataclass(frozen=True, kw_only=True)
class Served:
    """A network that takes raw rows and answers in the terms of its task."""

    rows: Rows
    network: Callable[[torch.Tensor], torch.Tensor]
    labels: Sequence[Any] | None = None  # of the classes, where they are declared
    counted: bool = False  # targets are whole numbers: classes from 0 where no labels are known
    target_range: Sequence[float] | None = None

    def predict(self, given: Any) -> pandas.DataFrame:
        """Return a prediction for each raw row; nothing for one that cannot be used as declared.

        Args:
            given: A DataFrame, a list of dicts, or arrays, as the task's records are.

        Returns:
            For classes ``prediction`` and ``probability_LABEL``; for numbers ``prediction``; else
            ``output``, what the network returns.

        Raises:
            InvalidInputError: If a column is missing, or arrays are of another shape.
        """
        frames = _library("pandas", "pandas")
        index = getattr(given, "index", None) if hasattr(given, "columns") else None
        return frames.DataFrame(  # type: ignore[no-any-return]
            {
                name: frames.Series(cells, dtype=kind, index=index)
                for name, (cells, kind) in self.answers(*self.rows.read(given)).items()
            }
        )

    def answers(self, x: Any, usable: Mask) -> dict[str, tuple[list[Any], type]]:
        """Return columns of answers by name, and what they hold; None for nothing."""
        import torch

        found = torch.cat(list(self._outputs(x)))
        known = usable & _flat(found).isfinite().all(dim=1).numpy()
        columns: dict[str, tuple[list[Any], type]]
        labels = self.labels or (range(found.shape[-1]) if self.counted else ())
        if found.ndim == 2 and found.shape[1] == len(labels) > 1:
            shares = found.double().softmax(dim=1)
            chosen = [labels[place] for place in found.argmax(dim=1).tolist()]
            columns = {"prediction": (chosen, object)}
            for place, label in enumerate(labels):
                columns[f"probability_{label}"] = (shares[:, place].tolist(), float)
        elif _flat(found).shape[1] == 1 and not self.counted and self.labels is None:
            numbers = found.reshape(-1).double()
            if self.target_range is not None:
                numbers = numbers.clamp(*self.target_range)
            columns = {"prediction": (numbers.tolist(), float)}
        else:
            columns = {"output": (found.tolist(), object)}
        return {
            name: ([cell if k else None for cell, k in zip(cells, known, strict=True)], kind)
            for name, (cells, kind) in columns.items()
        }

    def _outputs(self, x: Any) -> Iterator[torch.Tensor]:
        import torch

        inputs = torch.from_numpy(np.ascontiguousarray(x))
        for start in range(0, max(len(x), 1), _AT_ONCE):
            part = inputs[start : start + _AT_ONCE]
            # Of no row or one, an exported program would be another.
            filled = torch.cat([part, part.new_zeros((max(0, 2 - len(part)), *part.shape[1:]))])
            with torch.no_grad():
                yield self.network(filled)[: len(part)].float()

    def save(self, folder: Path) -> None:
        """Write all but the network into a folder, for :meth:`load`."""
        document = {name: getattr(self, name) for name in ("labels", "counted", "target_range")}
        document["rows"] = self.rows.save(folder).to_dict()
        # Dates of a YAML file become words here, which are read as dates again.
        (folder / _MODEL).write_text(json.dumps(document, default=str), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Served:
        """Read a model that was exported into a folder."""
        import torch

        document = json.loads((folder / _MODEL).read_text(encoding="utf-8"))
        given = document.pop("rows")
        for place in ("tokenizer", "encoder"):
            if place in given:
                given[place] = str(folder / given[place])
        network = torch.export.load(folder / NETWORK).module()
        (kind,) = (one for one in _KINDS if one.kind == given["kind"])
        del given["kind"]
        return cls(rows=kind(**given), network=network, **document)
