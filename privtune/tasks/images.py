"""Pictures of one's own: a folder of classes, or arrays in an ``.npz`` file."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privtune.errors import InvalidInputError
from privtune.files import regular_file
from privtune.imports import find_extra
from privtune.tasks._cells import coded
from privtune.tasks._data import classification_loss
from privtune.tasks._files import counted
from privtune.tasks._partition import KEY, Sizes, places, split_read
from privtune.tasks._spec_fields import (
    SPLIT_FIELDS,
    check_fields,
    own_model,
    read_classes,
    read_flag,
    read_sizes,
)
from privtune.tasks._task import Task, TaskAbsentError, TaskData, TaskDataError
from privtune.tasks._usable import CLIPPED, Fault, RecordCheck, Tally, label_faults

if TYPE_CHECKING:
    from torch import nn

_FIELDS = ("type", "name", "path", "classes", "shape", "model", *SPLIT_FIELDS)
_ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
_BATCH = 1024  # pictures that are read at once
_Batch = tuple[Any, Sequence[Any]]  # pictures and their labels
_LARGEST = 1 << 28  # bytes of one; a larger one cannot be used
_MODELS = ("small-cnn", "resnet-gn")
_PIL = partial(find_extra, "PIL.Image", extra="images", what="A folder of pictures")


@dataclass(frozen=True)
class _Pictures:
    path: Path
    classes: tuple[Any, ...]
    shape: tuple[int, int, int]
    sizes: Sizes
    key: str

    def header(self) -> None:
        """Check that there is a file, or a folder of each class, while planning."""
        if not self.path.exists():
            raise TaskAbsentError(f"{self.path} is not there.")
        if self.path.is_dir():
            self.check()
        elif not self.path.is_file():
            self._arrays()

    def check(self) -> None:
        """Check what can be checked before anything is charged, without looking at a record."""
        if self.path.is_dir():
            _PIL()
            if missing := [str(c) for c in self.classes if not (self.path / str(c)).is_dir()]:
                raise TaskDataError(
                    f"{self.path} must hold one folder a class, and lacks {', '.join(missing)}."
                )
            return
        self._arrays()

    def _arrays(self) -> tuple[Any, Any]:
        """Return the arrays x and y of the file."""
        import numpy as np

        try:
            with np.load(regular_file(self.path), allow_pickle=False) as file:
                x, y = file["x"], file["y"]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise TaskDataError(
                f"{self.path} must be a folder of classes, or an .npz file of the arrays x and y "
                f"({getattr(error, 'strerror', None) or type(error).__name__})."
            ) from None
        channels, height, width = self.shape
        fits = (height, width) if channels == 1 else None
        if x.shape[1:] not in (self.shape, (height, width, channels), fits):
            raise TaskDataError(
                f"{self.path}: pictures are of shape {x.shape[1:]}, and task.shape declares {self.shape}."
            )
        if x.dtype != np.uint8 and x.dtype.kind != "f":  # a wider type does not say what white is
            raise TaskDataError(
                f"{self.path}: x holds {x.dtype}, whose scale is not known; save it as uint8 (0 to 255), or "
                "as floats in [0, 1]."
            )
        if y.ndim != 1 or len(x) != len(y):
            raise TaskDataError(f"{self.path}: y must hold one class for each of x.")
        return x, y

    def load(self) -> TaskData:
        """Read the pictures. One that cannot be read, or of no declared class, contributes nothing."""
        batches, most = self._batches()
        return split_read(
            map(self._usable, batches),
            most=most,
            shape=self.shape,
            sizes=self.sizes,
            key=self.key,
        )

    def examine(self) -> RecordCheck:
        """Read the pictures, and return how many cannot be used, and why. For the curator alone."""
        import numpy as np

        sizes = vars(self.sizes)
        tally = Tally(sizes, by="content", classes=self.classes)
        for batch in self._batches()[0]:
            pixels = batch[0].reshape(len(batch[0]), -1)
            broken = ~np.isfinite(pixels).all(axis=1)
            outside = ((pixels < 0.0) | (pixels > 1.0)).any(axis=1) & ~broken
            x, y, _ = self._usable(batch)
            faults = (
                Fault("pictures", "that cannot be read, or hold what is no number", broken),
                Fault("pixels", CLIPPED, outside, used=True, declared="they must lie in [0, 1]"),
                *label_faults("labels", batch[1], self.classes, without="without a label"),
            )
            drawn = places(x, y, tuple(sizes.values()), key=self.key)
            tally.add(drawn, faults, x=x, y=y)
        return tally.check()

    def _batches(self) -> tuple[Iterator[_Batch], int]:
        """Return pictures, NaN where one cannot be read, and their labels; and how many there are."""
        batches, most = self._from_folder() if self.path.is_dir() else self._from_file()
        return counted(batches, most, size=lambda batch: len(batch[1])), most

    def _usable(self, batch: _Batch) -> tuple[Any, Any, None]:
        import numpy as np

        x, y = batch[0], coded(batch[1], self.classes)
        lost = ~np.isfinite(x.reshape(len(x), -1)).all(axis=1) | (y < 0)
        kept = np.where(lost[:, None, None, None], 0.0, np.clip(x, 0.0, 1.0))
        return kept, np.where(lost, -1.0, y), None

    def _from_file(self) -> tuple[Iterator[_Batch], int]:
        import numpy as np

        x, y = self._arrays()
        scale = 255.0 if x.dtype == np.uint8 else 1.0

        def read() -> Iterator[_Batch]:
            for start in range(0, len(x), _BATCH):
                part = x[start : start + _BATCH].astype(np.float32) / scale
                if part.shape[1:] != self.shape:  # channels last, or none
                    part = part.reshape(len(part), self.shape[1], self.shape[2], self.shape[0])
                    part = part.transpose(0, 3, 1, 2)
                yield part, y[start : start + _BATCH].tolist()

        return read(), len(x)

    def _from_folder(self) -> tuple[Iterator[_Batch], int]:
        import numpy as np

        files = [
            (path, name)
            for name in self.classes
            for path in sorted((self.path / str(name)).rglob("*"))
            if path.suffix.lower() in _ENDINGS
        ]

        def read() -> Iterator[_Batch]:
            nothing = np.full(self.shape, np.nan, dtype=np.float32)
            for start in range(0, len(files), _BATCH):
                part = files[start : start + _BATCH]
                found = [self._picture(path) for path, _ in part]
                names = [name for _, name in part]
                yield np.stack([nothing if x is None else x for x in found]), names

        return read(), len(files)

    def _picture(self, path: Path) -> Any:
        """Return a picture of the declared shape, in [0, 1]; None where it cannot be read."""
        import numpy as np

        channels, height, width = self.shape
        try:
            with _PIL().open(regular_file(path, most=_LARGEST)) as file:
                picture = file.convert("L" if channels == 1 else "RGB").resize((width, height))
        except Exception:  # whatever a decoder makes of a record, it is that record's alone
            return None
        values = np.asarray(picture, dtype=np.float32).reshape(height, width, channels)
        return values.transpose(2, 0, 1) / 255.0


def images(spec: Mapping[str, Any]) -> Task:
    """Return a task of pictures: a classification by a small network or one of your own.

    Args:
        spec: ``path`` (a folder that holds one folder of pictures a class, or an ``.npz`` file of the
            arrays ``x`` and ``y``), ``classes`` (their names, or the values of ``y``), ``shape``
            (``[channels, height, width]``; pictures of a folder are converted to it), ``model``
            (``small-cnn``, ``resnet-gn``, or ``package.module:factory``, called with the shape and
            the number of classes), and ``train``, ``validation``, ``test``, ``public_test``, ``key``,
            ``name`` as for a table.

    Returns:
        The task; nothing has been read. Pixels lie in [0, 1]: those of type uint8 are divided by
        255, floats are clipped, and an array of another type is refused, for its scale is not known.

    Raises:
        InvalidInputError: If a field is missing, unknown or outside its domain.
    """
    check_fields("pictures", spec, _FIELDS, needed=("path", "classes", "shape"))
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
    channels, height, width = shape
    pictures = _Pictures(
        Path(str(spec["path"])),
        read_classes(spec["classes"]),
        (channels, height, width),
        read_sizes(spec),
        str(spec.get("key", KEY)),
    )
    name = str(spec.get("model", "small-cnn"))
    return Task(
        name=str(spec.get("name", pictures.path.stem)),
        description=f"{name} on the pictures of {pictures.path.name}",
        **pictures.sizes.declared(),
        input_shape=pictures.shape,
        classes=len(pictures.classes),
        load=pictures.load,
        examine=pictures.examine,
        model=_model(name, pictures.shape, len(pictures.classes)),
        loss=classification_loss,
        public_test=read_flag(spec, "public_test"),
        partition="content",
        bounds={"pixels": (0.0, 1.0)},
        class_names=pictures.classes,
        check=pictures.check,
        header=pictures.header,
    )


def _model(name: str, shape: tuple[int, int, int], classes: int) -> Callable[[], nn.Module]:
    if name in _MODELS:
        if name == "small-cnn" and min(shape[1:]) < 4:
            raise InvalidInputError("task.shape", list(shape), "must be at least 4 high and wide")
        return partial(_built, name, shape, classes)
    of = "the shape of a picture and the number of classes"
    return own_model(name, shape, classes, built_in=_MODELS, of=of)


def _built(name: str, shape: tuple[int, int, int], classes: int) -> nn.Module:
    from privtune.tasks._models import resnet_gn, small_cnn

    return (small_cnn if name == "small-cnn" else resnet_gn)(shape, classes)
