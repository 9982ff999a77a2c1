"""Tasks of the user's own pictures and texts, and the base class of records that a spec describes."""

from __future__ import annotations

import json
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from privtune.errors import InvalidInputError
from privtune.facts import SPLITS, TaskAbsentError, TaskDataError
from privtune.files import read_bounded, regular_file
from privtune.imports import check_extra, find_extra, find_function, users_code
from privtune.ledger.datasets import Dataset
from privtune.names import refuse_fields
from privtune.tables.cells import Fault, column_of, labelled, texts, unusable
from privtune.tables.column_spec import values_of
from privtune.tables.columns import Column
from privtune.tables.raw_rows import TEXTS, PictureRows, Rows, TextRows
from privtune.tables.reader import BATCH, UTF8, Form, Source, heard, open_table
from privtune.tables.unusable import RecordCheck, Tally
from privtune.tasks.partition import KEY, Sizes, places, split_read
from privtune.tasks.pretrained import weights_at
from privtune.tasks.task import ModelOf, Task, TaskData, classification_loss, softmax_constants

if TYPE_CHECKING:
    from torch import nn

TaskSpec = Mapping[str, Any]
"""The fields of a spec's ``task``, by name."""

Batch = tuple[Any, Sequence[Any]]
"""Pictures as bytes or floats, ``[n, channels, height, width]``, and their labels."""

_ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
_PICTURES = 1024  # that are read at once
_MOST_RECORDS = 10**12
_MOST_SIDE = 4096  # pixels
_MOST_TOKENS = 8192  # of a text
_PIL = partial(find_extra, "PIL.Image", extra="images", what="A folder of pictures")
_OF_TEXTS = "A task of texts"
_HF = partial(find_extra, "transformers", extra="hf", what=_OF_TEXTS)


@dataclass(frozen=True)
class Part:
    """A batch of records as read, with their faults.

    Attributes:
        x: Inputs ``[n, ...]``; None while they are not known.
        y: Class numbers or numbers, ``[n]``.
        faults: What is not as declared.
        ids: What each record's split goes by; None for its content.
    """

    x: Any
    y: Any
    faults: Sequence[Fault]
    ids: list[str] | None = None

    @classmethod
    def of(
        cls,
        x: Any,
        y: Any,
        faults: Sequence[Fault],
        ids: list[str] | None = None,
        *,
        nothing: float = -1.0,
    ) -> Part:
        """Return a batch whose unusable records have equal content, so that all fall into one split."""
        is_unusable = unusable(faults, len(y))
        if x is not None:
            x[is_unusable] = 0.0
        usable_or_nothing = np.where(is_unusable, nothing, y)
        return cls(x, usable_or_nothing, faults, ids)


@dataclass(frozen=True, kw_only=True)
class Described(ABC):
    """Records that a spec describes, read some at a time.

    Attributes:
        path: Where they are.
        sizes: Declared sizes of the splits.
        key: The public key by which records fall into splits.
        classes: All values of the target; None of a regression.
        shape: Of a record as models see it.
        rows: How raw rows become inputs.
        id: The column that the split of a record goes by; its content unless given.
        grouped: Whether records of one id are those of one unit.
        unit: What a record is, in a word.
        columns: As they are declared, by name.
        public_features: Whether nothing of the features is yet to be released.
    """

    path: str
    sizes: Sizes
    key: str
    classes: tuple[Any, ...] | None
    shape: tuple[int, ...]
    rows: Rows
    id: str | None = None
    grouped: bool = False
    unit: str = "record"
    columns: Mapping[str, Column] = field(default_factory=dict)
    public_features: bool = True

    @abstractmethod
    def check(self) -> None:
        """Check the source of the records before a charge, independently of any record's values."""

    @abstractmethod
    def header(self) -> None:
        """Check the source of the records while a study is planned, by the quick part of :meth:`check`."""

    @abstractmethod
    def parts(self, *, with_inputs: bool) -> tuple[int, Iterator[Part]]:
        """Return an upper bound on the number of records, and an iterator over batches of them.

        Args:
            with_inputs: Whether inputs are needed: an encoder is not run to count what can be used.
        """

    def model_inputs(self, x: Any) -> Any:
        """Return the models' inputs, computed from the inputs as read (which decide the splits)."""
        return x

    def load(self) -> TaskData:
        """Return the records by split, where unusable ones are marked and contribute nothing."""
        most, parts = self.parts(with_inputs=True)
        batches = ((part.x, part.y, part.ids) for part in parts)
        return split_read(
            batches,
            most=most,
            shape=self.shape,
            sizes=self.sizes,
            key=self.key,
            numbers=self.classes is None,
            groups=self.grouped,
            model_inputs=self.model_inputs,
        )

    def examine(self) -> RecordCheck:
        """Return counts of unusable records by split and reason, for the curator alone."""
        sizes = vars(self.sizes)
        shares = list(sizes.values())
        # Where bounds are yet to be released and there is no id, nobody knows the split of a record.
        has_splits = self.id is not None or self.public_features
        by = ""
        if has_splits and not self.grouped:
            by = "content" if self.id is None else "id"
        if not has_splits:
            sizes = {"all splits": sum(shares)}
        tally = Tally(
            sizes,
            what=self.unit,
            by=by,
            classes=self.classes or (),
            columns=self.columns,
        )
        _, parts = self.parts(with_inputs=False)
        for part in parts:
            if has_splits:
                numbers = places(part.x, part.y, shares, ids=part.ids, key=self.key)
            else:
                numbers = np.zeros(len(part.y), dtype=np.int64)
            tally.add(
                numbers,
                part.faults,
                units=part.ids if self.grouped else None,
                x=part.x if self.public_features else None,
                y=part.y,
                ids=part.ids,
            )
        return tally.check()

    def dataset(self) -> Dataset:
        """Return the identity of the dataset: its name, its path and its declared columns."""
        name = Path(self.path).name.partition(".")[0]
        return Dataset(name, self.path, tuple(self.columns))

    def task(self, spec: TaskSpec, **fields: Any) -> Task:
        """Return the :class:`Task` of these records, from the fields of a spec.

        Args:
            spec: The fields that all kinds share are read of it.
            fields: Of the task, in the place of what is said here.
        """
        classes = None
        if self.classes is not None:
            classes = len(self.classes)
        shared: dict[str, Any] = {
            "name": str(spec.get("name", Path(self.path).stem)),
            "input_shape": self.shape,
            "classes": classes,
            "class_names": self.classes,
            "load": self.load,
            "loss": classification_loss,
            "raw": self.rows,
            "dataset": self.dataset(),
            "public_test": read_flag(spec, "public_test"),
            "benchmark": read_flag(spec, "benchmark"),
            "rarest_share": spec.get("rarest_share"),
            "partition": "content",
            "check": self.check,
            "examine": self.examine,
            "header": self.header,
        }
        sizes = self.sizes.declared()
        return Task(**sizes, **{**shared, **fields})


def check_fields(
    what: str,
    spec: TaskSpec,
    fields: Sequence[str],
    *,
    required: Sequence[str],
) -> None:
    """Refuse a spec's task that has unknown fields or lacks a required one.

    Args:
        what: The kind of task, as an error says it.
        spec: The task.
        fields: Those of the kind, beside those that all kinds share.
        required: Of these, those that must be there.
    """
    shared = ("public_test", "benchmark", "key", "rarest_share")
    fields = ("type", "name", *fields, *SPLITS, *shared)
    unknown = set(spec) - set(fields)
    if unknown:
        refuse_fields("task", unknown, fields, what)
    for name in (*required, *SPLITS):
        if name not in spec:
            raise InvalidInputError(f"task.{name}", None, f"is required for {what}")


def shared_fields(spec: TaskSpec) -> dict[str, Any]:
    """Return declared sizes, the key and the classes of a spec."""
    for name in SPLITS:
        value = spec[name]
        if not _is_whole(value, _MOST_RECORDS):
            allowed = "must be a whole number of at least 1, and of records that exist"
            is_share = isinstance(value, float) and 0.0 < value < 1.0
            remedy = "Write how many records you expect in this split." if is_share else ""
            raise InvalidInputError(f"task.{name}", value, allowed, remedy)
    classes = None
    if "classes" in spec:
        classes = read_classes(spec["classes"])
    return {
        "sizes": Sizes(spec["train"], spec["validation"], spec["test"]),
        "key": str(spec.get("key", KEY)),
        "classes": classes,
    }


def _is_whole(value: Any, most: int) -> bool:
    """Return whether a value is a whole number from 1 to ``most``, and no boolean."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return is_whole and 1 <= value <= most


def read_form(spec: TaskSpec) -> Form:
    """Return the delimiter and encoding of a text file, as a spec declares them."""
    fields = {}
    for name in ("delimiter", "encoding"):
        if name in spec:
            fields[name] = spec[name]
    if fields.get("delimiter") in ("tab", "\\t"):
        fields["delimiter"] = "\t"
    return Form(**fields)


def read_classes(classes: Any) -> tuple[Any, ...]:
    """Return the declared classes after checking that they are at least two and all different."""
    return values_of("task.classes", classes, least=2)


def read_flag(spec: TaskSpec, field: str) -> bool:
    """Return a true-or-false field of a spec, false where it is left out."""
    value = spec.get(field, False)
    if not isinstance(value, bool):
        raise InvalidInputError(f"task.{field}", value, "must be true or false")
    return value


def own_model(
    path: str,
    features: Any,
    outputs: int,
    *,
    built_in: Sequence[str],
    of: str,
) -> Callable[[], nn.Module]:
    """Return the function that builds a user's model, from its path ``package.module:factory``.

    Args:
        path: Of the factory.
        features: What it is called with first: the number of features, or the shape of an input.
        outputs: What it is called with second.
        built_in: Names of models that are no paths, for an error.
        of: What it is a function of, for an error.

    Raises:
        InvalidInputError: If there is no such function, or, once it is called, it returns no module.
    """
    factory = find_function(
        "task.model",
        path,
        allowed=f"must be {', '.join(built_in)}, or package.module:factory",
        must=f"must name a function of {of}",
    )

    def make() -> nn.Module:
        from torch import nn

        failure = f"its function failed, called with {features}, {outputs}"
        with users_code("task.model", path, failure):
            model = factory(features, outputs)
        if not isinstance(model, nn.Module):
            raise InvalidInputError(
                "task.model",
                path,
                f"must return a torch.nn.Module, not {type(model).__name__}",
            )
        return model

    return make


@dataclass(frozen=True, kw_only=True)
class _Pictures(Described):
    """Pictures in one folder per class, or as arrays in an ``.npz`` file."""

    rows: PictureRows

    @property
    def _place(self) -> Path:
        return Path(self.path)

    def header(self) -> None:
        """Check that the path is a file, or a folder with one folder for each class."""
        if not self._place.exists():
            raise TaskAbsentError(f"{self.path} is not there.")
        if not self._place.is_file():  # arrays are read before the charge alone
            self.check()

    def check(self) -> None:
        """Check that each class has a folder, or that the file's arrays have the declared shape."""
        if not self._place.is_dir():
            self._arrays()
            return
        _PIL()
        names = [str(name) for name in self.classes or ()]
        missing = [name for name in names if not (self._place / name).is_dir()]
        if missing:
            raise TaskDataError(
                f"{self.path} must hold one folder a class, and lacks {', '.join(missing)}."
            )

    def _arrays(self) -> tuple[Any, Any]:
        """Return the arrays x and y of the ``.npz`` file, without running pickles."""
        try:
            with np.load(regular_file(self._place), allow_pickle=False) as file:
                x = file["x"]
                y = file["y"]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            # Not the error's text: it may quote what the file holds.
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise TaskDataError(
                f"{self.path} must be a folder of classes, or an .npz file of the arrays x and y "
                f"({reason})."
            ) from None
        if x.dtype != np.uint8 and x.dtype.kind != "f":  # a wider type does not say what white is
            raise TaskDataError(
                f"{self.path}: x holds {x.dtype}, whose scale is not known; save it as uint8 (0 to 255), or "
                "as floats in [0, 1]."
            )
        if not self.rows.fits(x):
            raise TaskDataError(
                f"{self.path}: pictures are of shape {x.shape[1:]}, and task.shape declares {self.shape}."
            )
        if y.ndim != 1 or len(x) != len(y):
            raise TaskDataError(f"{self.path}: y must hold one class for each of x.")
        return x, y

    def parts(self, *, with_inputs: bool) -> tuple[int, Iterator[Part]]:
        """Return an upper bound on the number of pictures, and batches of records, logging the progress."""
        if self._place.is_dir():
            most, batches = self._from_folder()
        else:
            most, batches = self._from_file()

        def count_records(batch: Batch) -> int:
            _, labels = batch
            return len(labels)

        batches = heard(batches, most, size=count_records)
        return most, map(self._part, batches)

    def _part(self, batch: Batch) -> Part:
        """Return a batch of pictures as records, with its faults."""
        pictures, labels = batch
        x, picture_faults = self.rows.of(pictures)
        y, label_faults = labelled(
            "labels",
            column_of(labels),
            self.classes or (),
            without="without a label",
        )
        return Part.of(x, y, (*picture_faults, *label_faults))

    def _from_file(self) -> tuple[int, Iterator[Batch]]:
        """Return the number of pictures in the file, and an iterator over scaled batches of them."""
        x, y = self._arrays()

        def read() -> Iterator[Batch]:
            for start in range(0, len(x), _PICTURES):
                end = start + _PICTURES
                pictures = self.rows.scaled(x[start:end])
                labels = y[start:end].tolist()
                yield pictures, labels

        return len(x), read()

    def _from_folder(self) -> tuple[int, Iterator[Batch]]:
        """Return the number of pictures in the classes' folders, and an iterator over batches of them."""
        paths = []
        labels = []
        for name in self.classes or ():
            pictures_of_class = _pictures_in(self._place / str(name))
            paths += pictures_of_class
            labels += [name] * len(pictures_of_class)

        def read() -> Iterator[Batch]:
            for start in range(0, len(paths), _PICTURES):
                end = start + _PICTURES
                pictures = [self.rows.opened(path) for path in paths[start:end]]
                yield np.stack(pictures), labels[start:end]

        return len(paths), read()


def _pictures_in(folder: Path) -> list[Path]:
    """Return the picture files in a folder and its subfolders, sorted by path."""
    files = sorted(folder.rglob("*"))
    return [file for file in files if file.suffix.lower() in _ENDINGS]


def images(spec: TaskSpec) -> Task:
    """Return the task of pictures that a spec describes (docs/spec.md), without reading them."""
    required = ("path", "classes", "shape")
    check_fields("pictures", spec, (*required, "model"), required=required)
    shape = _picture_shape(spec["shape"])
    pictures = _Pictures(
        path=str(spec["path"]),
        shape=shape,
        rows=PictureRows(shape=shape),
        **shared_fields(spec),
    )
    name = str(spec.get("model", "small-cnn"))
    classes = len(pictures.classes or ())
    networks = {"small-cnn": "small_cnn", "resnet-gn": "resnet_gn"}
    if name == "small-cnn" and min(shape[1:]) < 4:
        raise InvalidInputError("task.shape", list(shape), "must be at least 4 high and wide")
    model: Callable[[], nn.Module]
    if name in networks:
        model = ModelOf(networks[name], (shape, classes))
    else:
        model = own_model(
            name,
            shape,
            classes,
            built_in=tuple(networks),
            of="the shape of a picture and the number of classes",
        )
    return pictures.task(
        spec,
        description=f"{name} on the pictures of {Path(pictures.path).name}",
        model=model,
        bounds={"pixels": (0.0, 1.0)},
    )


def _picture_shape(shape: Any) -> tuple[int, int, int]:
    """Return the declared shape of a picture, or refuse all but [1 or 3 channels, height, width]."""
    is_triple = isinstance(shape, Sequence) and len(shape) == 3
    if is_triple and all(_is_whole(n, _MOST_SIDE) for n in shape):
        channels, height, width = shape
        if channels in (1, 3):
            return channels, height, width
    raise InvalidInputError(
        "task.shape",
        shape,
        "must be [channels, height, width], of 1 or 3 channels",
    )


@dataclass(frozen=True, kw_only=True)
class _Texts(Described):
    """Texts with labels, turned into features by a frozen public encoder."""

    rows: TextRows
    label: str
    form: Form = UTF8

    @property
    def _names(self) -> tuple[str, ...]:
        """Names of the columns that are read."""
        return (*self.rows.names, self.label)

    def _open(self) -> Source:
        """Open the file that holds the texts."""
        return open_table(Path(self.path), self._names, self.form)

    def check(self) -> None:
        """Check the library and the header of the file, and load the encoder."""
        _HF()
        self.header()
        _ = self.rows.loaded

    def header(self) -> None:
        """Check the header of the file, and that the library is installed."""
        self._open().check(self._names, self.path)
        check_extra("transformers", extra="hf", what=_OF_TEXTS)

    def parts(self, *, with_inputs: bool) -> tuple[int, Iterator[Part]]:
        """Return batches of texts split by text and label, since each machine rounds features in its way.

        So a split by features would differ from one machine to another.
        """
        file = self._open()
        most = file.most()
        size = TEXTS if with_inputs else BATCH

        def count_records(piece: tuple[Any, Any]) -> int:
            cells, _ = piece
            return len(cells)

        def read() -> Iterator[Part]:
            pieces = self._pieces(file, size)
            for cells, labels in heard(pieces, most, size=count_records):
                yield self._part(cells, labels, with_inputs=with_inputs)

        return most, read()

    def _pieces(self, file: Source, size: int) -> Iterator[tuple[Any, Any]]:
        """Yield the cells of ``size`` texts and of their labels at a time."""
        names = (self.rows.text, self.label)
        for batch in file.read(names):
            cells = batch[self.rows.text]
            labels = batch[self.label]
            for start in range(0, len(cells), size):
                some_cells = cells.slice(start, size)
                some_labels = labels.slice(start, size)
                yield some_cells, some_labels

    def _part(self, cells: Any, labels: Any, *, with_inputs: bool) -> Part:
        """Return a batch of texts as records, with its faults."""
        words, missing = self.rows.words(cells)
        y, label_faults = labelled(
            self.label,
            labels,
            self.classes or (),
            without="without a label",
        )
        faults = [missing, *label_faults]
        label_texts = texts(labels).to_pylist()
        ids = []
        for text_of_record, label in zip(words, label_texts, strict=True):
            ids.append(f"{text_of_record}\0{label}")
        x = None
        if with_inputs:
            x, without_features = self.rows.features(words)
            faults.append(without_features)
        return Part.of(x, y, faults, ids)


def text(spec: TaskSpec) -> Task:
    """Return the task of texts that a spec describes (docs/spec.md), without reading them."""
    required = ("path", "classes", "encoder")
    optional = ("text", "label", "tokenizer", "length", "model", "delimiter", "encoding")
    check_fields("text", spec, (*required, *optional), required=required)
    weights = weights_at(spec["encoder"], field="task.encoder")
    length = spec.get("length", 128)
    if not _is_whole(length, _MOST_TOKENS):
        raise InvalidInputError("task.length", length, "must be a whole number from 1 to 8192")
    tokenizer = Path(str(spec.get("tokenizer", spec["encoder"])))
    texts_of_spec = _Texts(
        path=str(spec["path"]),
        label=str(spec.get("label", "label")),
        form=read_form(spec),
        rows=TextRows(
            text=str(spec.get("text", "text")),
            tokenizer=str(tokenizer.expanduser()),
            encoder=str(weights.path),
            length=length,
        ),
        shape=(_width(weights.path),),
        **shared_fields(spec),
    )
    name = str(spec.get("model", "linear"))
    (features,) = texts_of_spec.shape
    classes = len(texts_of_spec.classes or ())
    model: Callable[[], nn.Module]
    constants: Mapping[str, float] = {}
    if name == "linear":
        model = ModelOf("linear", (features, classes))
        constants = softmax_constants(1.0, classes)
    else:
        model = own_model(
            name,
            features,
            classes,
            built_in=("linear",),
            of="the numbers of features and classes",
        )
    encoder_name = weights.path.name
    file_name = Path(texts_of_spec.path).name
    return texts_of_spec.task(
        spec,
        description=f"{name} on what {encoder_name} makes of {file_name}",
        model=model,
        pretrained=f"{encoder_name}, SHA-256 {weights.digest}",
        constants=constants,
    )


def _width(folder: Path) -> int:
    """Return how many features an encoder makes of a text."""
    try:
        for part in folder.rglob("*"):  # all that from_pretrained may open
            if not part.is_dir():
                regular_file(part)
        document = read_bounded(folder / "config.json")
        config = json.loads(document)
        widths = [config.get(name) for name in ("hidden_size", "dim", "d_model")]
    except (OSError, ValueError, AttributeError):
        widths = []
    for width in widths:
        if isinstance(width, int) and width > 0:
            return width
    raise InvalidInputError(
        "task.encoder",
        str(folder),
        "must hold a config.json with the encoder's hidden_size",
    )
