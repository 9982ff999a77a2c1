"""Tasks that a spec describes: what all of them share; pictures and texts of the user's own."""

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
from privtune.files import read_bounded, regular_file
from privtune.imports import find_extra, find_function, users_code
from privtune.tasks._cells import Fault, column_of, labelled, texts, unusable
from privtune.tasks._columns import Column
from privtune.tasks._declared import values_of
from privtune.tasks._facts import SPLITS, TaskAbsentError, TaskDataError
from privtune.tasks._fine_tuning import weights_at
from privtune.tasks._partition import KEY, Sizes, places, split_read
from privtune.tasks._reader import BATCH, UTF8, Form, Source, heard, open_table
from privtune.tasks._rows import TEXTS, PictureRows, Rows, TextRows
from privtune.tasks._task import ModelOf, Task, TaskData, classification_loss, softmax_constants
from privtune.tasks._usable import RecordCheck, Tally

if TYPE_CHECKING:
    from torch import nn

_ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
_PICTURES = 1024  # that are read at once
_PIL = partial(find_extra, "PIL.Image", extra="images", what="A folder of pictures")
_HF = partial(find_extra, "transformers", extra="hf", what="A task of texts")


@dataclass(frozen=True)
class Part:
    """Some records as they are read: inputs (None while they are not known), targets, what is wrong, ids."""

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
        """Return records of which the unusable are alike, so that they share a split by content."""
        lost = unusable(faults, len(y))
        if x is not None:
            x[lost] = 0.0
        return cls(x, np.where(lost, nothing, y), faults, ids)


@dataclass(frozen=True, kw_only=True)
class Described(ABC):
    """Records that a spec describes, read some at a time."""

    path: str
    sizes: Sizes
    key: str
    classes: tuple[Any, ...] | None
    shape: tuple[int, ...]  # of a record as models see it
    rows: Rows
    id: str | None = None  # the column that the split of a record goes by; its content unless given
    grouped: bool = False  # records of one id are those of one unit
    unit: str = "record"
    columns: Mapping[str, Column] = field(default_factory=dict)  # as they are declared
    known: bool = True  # whether nothing of the features is yet to be released

    @abstractmethod
    def check(self) -> None:
        """Check what can be checked before anything is charged, without looking at a record."""

    @abstractmethod
    def header(self) -> None:
        """Check what holds the records while planning, as :meth:`check` where that takes no time."""

    @abstractmethod
    def parts(self, *, whole: bool) -> tuple[int, Iterator[Part]]:
        """Return how many records there are at most, and these; ``whole`` if inputs are needed."""

    def made(self, x: Any) -> Any:
        """Return what models see of inputs."""
        return x

    def load(self) -> TaskData:
        """Read the records. One that is not as declared has no target, and so contributes nothing."""
        most, found = self.parts(whole=True)
        return split_read(
            ((part.x, part.y, part.ids) for part in found),
            most=most,
            shape=self.shape,
            sizes=self.sizes,
            key=self.key,
            numbers=self.classes is None,
            groups=self.grouped,
            made=self.made,
        )

    def examine(self) -> RecordCheck:
        """Read the records, and return how many cannot be used, and why. For the curator alone."""
        sizes = vars(self.sizes)
        # Where bounds are yet to be released and there is no id, nobody knows the split of a record.
        placed = self.id is not None or self.known
        tally = Tally(
            sizes if placed else {"all splits": sum(sizes.values())},
            what=self.unit,
            by="" if self.grouped or not placed else "content" if self.id is None else "id",
            classes=self.classes or (),
            columns=self.columns,
        )
        for part in self.parts(whole=False)[1]:
            drawn = np.zeros(len(part.y), dtype=np.int64)
            if placed:
                drawn = places(part.x, part.y, list(sizes.values()), ids=part.ids, key=self.key)
            owners, x = part.ids if self.grouped else None, part.x if self.known else None
            tally.add(drawn, part.faults, units=owners, x=x, y=part.y, ids=part.ids)
        return tally.check()

    def task(self, spec: Mapping[str, Any], **fields: Any) -> Task:
        """Return the task of these records."""
        known: dict[str, Any] = {
            "name": str(spec.get("name", Path(self.path).stem)),
            "input_shape": self.shape,
            "classes": None if self.classes is None else len(self.classes),
            "class_names": self.classes,
            "load": self.load,
            "loss": classification_loss,
            "raw": self.rows,
            "public_test": read_flag(spec, "public_test"),
            "benchmark": read_flag(spec, "benchmark"),
            "rarest_share": spec.get("rarest_share"),
            "partition": "content",
            "check": self.check,
            "examine": self.examine,
            "header": self.header,
        }
        return Task(**self.sizes.declared(), **{**known, **fields})


def check_fields(
    what: str, spec: Mapping[str, Any], known: Sequence[str], *, needed: Sequence[str]
) -> None:
    """Refuse fields that are unknown, and a spec that lacks one."""
    known = ("type", "name", *known, *SPLITS, "public_test", "benchmark", "key", "rarest_share")
    if unknown := sorted(map(str, set(spec) - set(known))):
        raise InvalidInputError("task", unknown, f"{what} takes {', '.join(known)}")
    for name in (*needed, *SPLITS):
        if name not in spec:
            raise InvalidInputError(f"task.{name}", None, f"is required for {what}")


def shared_fields(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return declared sizes, the key and the classes of a spec."""
    for name in SPLITS:
        value = spec[name]
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 10**12:
            allowed = "must be a whole number of at least 1, and of records that exist"
            raise InvalidInputError(f"task.{name}", value, allowed)
    return {
        "sizes": Sizes(*(spec[name] for name in SPLITS)),
        "key": str(spec.get("key", KEY)),
        "classes": read_classes(spec["classes"]) if "classes" in spec else None,
    }


def read_form(spec: Mapping[str, Any]) -> Form:
    """Return how a text file is written, of a spec's ``delimiter`` and ``encoding``."""
    found = {name: spec[name] for name in ("delimiter", "encoding") if name in spec}
    if found.get("delimiter") in ("tab", "\\t"):
        found["delimiter"] = "\t"
    return Form(**found)


def read_classes(given: Any) -> tuple[Any, ...]:
    """Return the declared classes."""
    return values_of("task.classes", given, least=2)


def read_flag(spec: Mapping[str, Any], field: str) -> bool:
    """Return a field that is true or false; false unless given."""
    value = spec.get(field, False)
    if not isinstance(value, bool):
        raise InvalidInputError(f"task.{field}", value, "must be true or false")
    return value


def own_model(
    path: str, features: Any, outputs: int, *, built_in: Sequence[str], of: str
) -> Callable[[], nn.Module]:
    """Return what makes a model of the user's own, of ``package.module:factory``."""
    factory = find_function(
        "task.model",
        path,
        allowed=f"must be {', '.join(built_in)}, or package.module:factory",
        must=f"must name a function of {of}",
    )

    def make() -> nn.Module:
        from torch import nn

        with users_code(
            "task.model", path, f"its function failed, called with {features}, {outputs}"
        ):
            model = factory(features, outputs)
        if not isinstance(model, nn.Module):
            raise InvalidInputError(
                "task.model", path, f"must return a torch.nn.Module, not {type(model).__name__}"
            )
        return model

    return make


@dataclass(frozen=True, kw_only=True)
class _Pictures(Described):
    """Pictures: a folder of classes, or arrays in an ``.npz`` file."""

    rows: PictureRows

    @property
    def _place(self) -> Path:
        return Path(self.path)

    def header(self) -> None:
        """Check that there is a file, or a folder of each class."""
        if not self._place.exists():
            raise TaskAbsentError(f"{self.path} is not there.")
        if not self._place.is_file():  # arrays are read before the charge alone
            self.check()

    def check(self) -> None:
        """Check the folders of the classes, or the shapes of the arrays."""
        if not self._place.is_dir():
            self._arrays()
            return
        _PIL()
        if missing := [str(c) for c in self.classes or () if not (self._place / str(c)).is_dir()]:
            raise TaskDataError(
                f"{self.path} must hold one folder a class, and lacks {', '.join(missing)}."
            )

    def _arrays(self) -> tuple[Any, Any]:
        """Return the arrays x and y of the file."""
        try:
            with np.load(regular_file(self._place), allow_pickle=False) as file:
                x, y = file["x"], file["y"]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise TaskDataError(
                f"{self.path} must be a folder of classes, or an .npz file of the arrays x and y "
                f"({getattr(error, 'strerror', None) or type(error).__name__})."
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

    def parts(self, *, whole: bool) -> tuple[int, Iterator[Part]]:
        """Return pictures and labels."""
        most, found = self._from_folder() if self._place.is_dir() else self._from_file()
        return most, map(self._part, heard(found, most, size=lambda batch: len(batch[1])))

    def _part(self, batch: tuple[Any, Sequence[Any]]) -> Part:
        (x, faults), labels = self.rows.of(batch[0]), column_of(batch[1])
        y, wrong = labelled("labels", labels, self.classes or (), without="without a label")
        return Part.of(x, y, (*faults, *wrong))

    def _from_file(self) -> tuple[int, Iterator[tuple[Any, Sequence[Any]]]]:
        x, y = self._arrays()
        parts = (slice(start, start + _PICTURES) for start in range(0, len(x), _PICTURES))
        return len(x), ((self.rows.scaled(x[part]), y[part].tolist()) for part in parts)

    def _from_folder(self) -> tuple[int, Iterator[tuple[Any, Sequence[Any]]]]:
        files = [
            (path, name)
            for name in self.classes or ()
            for path in sorted((self._place / str(name)).rglob("*"))
            if path.suffix.lower() in _ENDINGS
        ]

        def read() -> Iterator[tuple[Any, Sequence[Any]]]:
            for start in range(0, len(files), _PICTURES):
                part = files[start : start + _PICTURES]
                yield (
                    np.stack([self.rows.opened(path) for path, _ in part]),
                    [name for _, name in part],
                )

        return len(files), read()


def images(spec: Mapping[str, Any]) -> Task:
    """Return the task of pictures that a spec describes, as docs/spec.md says; nothing is read."""
    needed = ("path", "classes", "shape")
    check_fields("pictures", spec, (*needed, "model"), needed=needed)
    shape = spec["shape"]
    if (
        not isinstance(shape, Sequence)
        or len(shape) != 3
        or not all(isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= 4096 for n in shape)
        or shape[0] not in (1, 3)
    ):
        raise InvalidInputError(
            "task.shape", shape, "must be [channels, height, width], of 1 or 3 channels"
        )
    pictures = _Pictures(
        path=str(spec["path"]),
        shape=tuple(shape),
        rows=PictureRows(shape=tuple(shape)),
        **shared_fields(spec),
    )
    name, classes = str(spec.get("model", "small-cnn")), len(pictures.classes or ())
    networks = {"small-cnn": "small_cnn", "resnet-gn": "resnet_gn"}
    if name == "small-cnn" and min(shape[1:]) < 4:
        raise InvalidInputError("task.shape", list(shape), "must be at least 4 high and wide")
    if name in networks:
        model: Callable[[], nn.Module] = ModelOf(networks[name], (pictures.shape, classes))
    else:
        of = "the shape of a picture and the number of classes"
        model = own_model(name, pictures.shape, classes, built_in=tuple(networks), of=of)
    return pictures.task(
        spec,
        description=f"{name} on the pictures of {Path(pictures.path).name}",
        model=model,
        bounds={"pixels": (0.0, 1.0)},
    )


@dataclass(frozen=True, kw_only=True)
class _Texts(Described):
    """Texts: what a frozen public encoder makes of each, computed once."""

    rows: TextRows
    label: str
    form: Form = UTF8

    def _open(self) -> Source:
        return open_table(Path(self.path), (*self.rows.names, self.label), self.form)

    def check(self) -> None:
        """Check libraries, the header and the encoder."""
        _HF()
        self.header()
        _ = self.rows.loaded

    def header(self) -> None:
        """Check the header of the file."""
        self._open().check((*self.rows.names, self.label), self.path)

    def parts(self, *, whole: bool) -> tuple[int, Iterator[Part]]:
        """Return texts by content and label: features are rounded as the machine has it."""
        file, text = self._open(), self.rows.text
        most, size = file.most(), TEXTS if whole else BATCH
        pieces = (
            (batch[text].slice(start, size), batch[self.label].slice(start, size))
            for batch in file.read((text, self.label))
            for start in range(0, len(batch[text]), size)
        )

        def read() -> Iterator[Part]:
            for cells, labels in heard(pieces, most, size=lambda piece: len(piece[0])):
                words, missing = self.rows.words(cells)
                classes, without = self.classes or (), "without a label"
                y, wrong = labelled(self.label, labels, classes, without=without)
                faults = [missing, *wrong]
                ids = [f"{w}\0{n}" for w, n in zip(words, texts(labels).to_pylist(), strict=True)]
                x = None
                if whole:
                    x, broken = self.rows.features(words)
                    faults.append(broken)
                yield Part.of(x, y, faults, ids)

        return most, read()


def text(spec: Mapping[str, Any]) -> Task:
    """Return the task of texts that a spec describes, as docs/spec.md says; nothing is read."""
    needed = ("path", "classes", "encoder")
    known = (*needed, "text", "label", "tokenizer", "length", "model", "delimiter", "encoding")
    check_fields("text", spec, known, needed=needed)
    weights = weights_at(spec["encoder"], field="task.encoder")
    length = spec.get("length", 128)
    if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= 8192:
        raise InvalidInputError("task.length", length, "must be a whole number from 1 to 8192")
    found = _Texts(
        path=str(spec["path"]),
        label=str(spec.get("label", "label")),
        form=read_form(spec),
        rows=TextRows(
            text=str(spec.get("text", "text")),
            tokenizer=str(Path(str(spec.get("tokenizer", spec["encoder"]))).expanduser()),
            encoder=str(weights.path),
            length=length,
        ),
        shape=(_width(weights.path),),
        **shared_fields(spec),
    )
    name, classes = str(spec.get("model", "linear")), len(found.classes or ())
    if name == "linear":
        model: Callable[[], nn.Module] = ModelOf("linear", (found.shape[0], classes))
    else:
        of = "the numbers of features and classes"
        model = own_model(name, found.shape[0], classes, built_in=("linear",), of=of)
    return found.task(
        spec,
        description=f"{name} on what {weights.path.name} makes of {Path(found.path).name}",
        model=model,
        pretrained=f"{weights.path.name}, SHA-256 {weights.digest}",
        constants=softmax_constants(1.0, classes) if name == "linear" else {},
    )


def _width(folder: Path) -> int:
    """Return how many features an encoder makes of a text."""
    try:
        for part in folder.rglob("*"):  # all that from_pretrained may open
            if not part.is_dir():
                regular_file(part)
        config = json.loads(read_bounded(folder / "config.json"))
        found: Sequence[Any] = [config.get(n) for n in ("hidden_size", "dim", "d_model")]
    except (OSError, ValueError, AttributeError):
        found = ()
    for width in found:
        if isinstance(width, int) and width > 0:
            return width
    raise InvalidInputError(
        "task.encoder", str(folder), "must hold a config.json with the encoder's hidden_size"
    )
