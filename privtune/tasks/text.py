"""Texts of one's own: a head on what a frozen public encoder makes of each, computed once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from privtune.errors import InvalidInputError
from privtune.files import read_bounded, regular_file
from privtune.imports import find_extra
from privtune.tasks._cells import coded, is_missing, missing_of
from privtune.tasks._constants import of_softmax
from privtune.tasks._data import classification_loss, linear
from privtune.tasks._files import Batch, check_columns, counted, header_of, open_table
from privtune.tasks._fine_tuning import weights_at
from privtune.tasks._partition import KEY, Sizes, places, split_read
from privtune.tasks._spec_fields import (
    SPLIT_FIELDS,
    check_fields,
    own_model,
    read_classes,
    read_flag,
    read_sizes,
)
from privtune.tasks._task import Task, TaskData, TaskDataError
from privtune.tasks._usable import RecordCheck, Tally, fault_of, label_faults

_FIELDS = (
    "type", "name", "path", "text", "label", "classes", "tokenizer", "encoder", "length", "model",
    *SPLIT_FIELDS,
)  # fmt: skip
_BATCH = 32  # texts that the encoder reads at once, always as many: all sums have one shape
_HF = partial(find_extra, "transformers", extra="hf", what="A task of texts")


@dataclass(frozen=True)
class _Texts:
    path: Path
    text: str
    label: str
    classes: tuple[Any, ...]
    tokenizer: str
    encoder: str
    length: int
    width: int
    sizes: Sizes
    key: str

    def check(self) -> None:
        """Check what can be checked before anything is charged: libraries, files and the header."""
        _HF()
        file = open_table(self.path)
        check_columns(file, (self.text, self.label), str(self.path))
        self._encoder()

    def header(self) -> None:
        """Check the header of the file, while planning."""
        header_of(self.path, (self.text, self.label))

    def _encoder(self) -> tuple[Any, Any]:
        """Return the tokenizer and the encoder, from local files alone."""
        hf = _HF()
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

    def load(self) -> TaskData:
        """Read the texts. One of no declared class, or none at all, contributes nothing.

        A text's place goes by what it says and its label, not by the features: these are rounded as
        the machine has it.
        """
        file = open_table(self.path)
        most, found = (
            file.most,
            file.batches((self.text, self.label), exact=(self.text, self.label)),
        )
        tokenizer, encoder = self._encoder()
        return split_read(
            (self._encoded(batch, tokenizer, encoder) for batch in counted(_parts(found), most)),
            most=most,
            shape=(self.width,),
            sizes=self.sizes,
            key=self.key,
        )

    def examine(self) -> RecordCheck:
        """Read texts and labels, and return how many cannot be used, and why. For the curator alone."""
        sizes = vars(self.sizes)
        tally = Tally(sizes, by="content", classes=self.classes)
        names = (self.text, self.label)
        for batch in open_table(self.path).batches(names, exact=names):
            texts, labels = batch[self.text], batch[self.label]
            ids = _ids(_words(texts), labels)
            drawn = places(None, labels, tuple(sizes.values()), ids=ids, key=self.key)
            faults = (
                fault_of(self.text, "without a text", missing_of(texts), texts),
                *label_faults(self.label, labels, self.classes, without="without a label"),
            )
            tally.add(drawn, faults, y=coded(labels, self.classes), ids=ids)
        return tally.check()

    def _encoded(self, batch: Batch, tokenizer: Any, encoder: Any) -> tuple[Any, Any, list[str]]:
        import numpy as np
        import torch

        texts = _words(batch[self.text])
        y = coded(batch[self.label], self.classes).astype(float)
        y[[not text for text in texts]] = -1.0
        padded = texts + [""] * (_BATCH - len(texts))
        # All to one length: what a text becomes must not hang on its neighbours' lengths.
        tokens = tokenizer(
            padded,
            padding="max_length",
            truncation=True,
            max_length=self.length,
            return_tensors="pt",
        )
        with torch.no_grad():
            states = encoder(**tokens).last_hidden_state
        there = tokens["attention_mask"].unsqueeze(-1).to(states.dtype)
        mean = (states * there).sum(dim=1) / there.sum(dim=1).clamp(min=1.0)
        features = torch.nn.functional.normalize(mean, dim=1)[: len(texts)].float().numpy()
        lost = (y < 0) | ~np.isfinite(features).all(axis=1)
        ids = _ids(texts, batch[self.label])
        return np.where(lost[:, None], 0.0, features), np.where(lost, -1.0, y), ids


def _words(cells: Sequence[Any]) -> list[str]:
    return ["" if is_missing(cell) else str(cell) for cell in cells]


def _ids(texts: Sequence[str], labels: Sequence[Any]) -> list[str]:
    """Return an id for each text, made of its content and its label: splits follow it."""
    return [f"{text}\0{label}" for text, label in zip(texts, labels, strict=True)]


def _parts(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Cut what was read into what the encoder reads at once."""
    for batch in batches:
        count = max(map(len, batch.values()))
        for start in range(0, count, _BATCH):
            yield {name: cells[start : start + _BATCH] for name, cells in batch.items()}


def text(spec: Mapping[str, Any]) -> Task:
    """Return a task of texts: a classification by a head on a frozen encoder's features.

    Args:
        spec: ``path`` (CSV, JSON lines, Parquet or Arrow), ``text`` and ``label`` (columns; so called
            unless given), ``classes``, ``tokenizer`` and ``encoder`` (folders as Hugging Face keeps
            them, weights as safetensors; the tokenizer is the encoder's unless given), ``length`` (the
            most tokens of a text; 128 unless given), ``model`` (``linear``, or
            ``package.module:factory``, called with the numbers of features and classes), and
            ``train``, ``validation``, ``test``, ``public_test``, ``key``, ``name`` as for a table.

    Returns:
        The task; the texts have not been read. Features are means over tokens, scaled to length 1.
        What the encoder was trained on is assumed public.

    Raises:
        InvalidInputError: If a field is missing, unknown or outside its domain.
    """
    check_fields("text", spec, _FIELDS, needed=("path", "classes", "encoder"))
    weights = weights_at(spec["encoder"], field="task.encoder")
    length = spec.get("length", 128)
    if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= 8192:
        raise InvalidInputError("task.length", length, "must be a whole number from 1 to 8192")
    texts = _Texts(
        Path(str(spec["path"])),
        str(spec.get("text", "text")),
        str(spec.get("label", "label")),
        read_classes(spec["classes"]),
        str(Path(str(spec.get("tokenizer", spec["encoder"]))).expanduser()),
        str(weights.path),
        length,
        _width(weights.path),
        read_sizes(spec),
        str(spec.get("key", KEY)),
    )
    name = str(spec.get("model", "linear"))
    return Task(
        name=str(spec.get("name", texts.path.stem)),
        description=f"{name} on what {weights.path.name} makes of {texts.path.name}",
        **texts.sizes.declared(),
        input_shape=(texts.width,),
        classes=len(texts.classes),
        load=texts.load,
        model=_head(name, texts.width, len(texts.classes)),
        loss=classification_loss,
        public_test=read_flag(spec, "public_test"),
        partition="content",
        class_names=texts.classes,
        pretrained=f"{weights.path.name}, SHA-256 {weights.digest}",
        check=texts.check,
        examine=texts.examine,
        header=texts.header,
        constants=of_softmax(1.0, len(texts.classes)) if name == "linear" else {},
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


def _head(name: str, width: int, classes: int) -> Any:
    if name == "linear":
        return partial(linear, width, classes)
    of = "the numbers of features and classes"
    return own_model(name, width, classes, built_in=("linear",), of=of)
