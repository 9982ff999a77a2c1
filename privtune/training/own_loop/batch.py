"""A planned sample in the hands of a loop, and what is watched while it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import _get_current_function_mode
from torch.utils._pytree import tree_leaves

from privtune.training.engine.graph.intercept import Intercept
from privtune.training.mechanism.oracle import Sample
from privtune.training.mechanism.packing import RecordTree
from privtune.training.mechanism.records import Lookups
from privtune.training.own_loop.replay import Recording
from privtune.training.own_loop.weights import LoopError

__all__ = ["Batch", "OpenSample"]


class Batch:
    """One planned sample: hand it to ``step`` as it is, or read its inputs and targets from it.

    Read it as ``x, y = batch``, or as its records are: ``model(*batch)`` of tuples, ``model(**batch)``
    and ``batch["labels"]`` of dicts. It is drawn when it is first read. One that the loop never reads is
    drawn by the step itself. It is neither sequence nor mapping, so that a trainer that moves batches
    about leaves it as it is.
    """

    def __init__(self, read: Callable[[Batch], Any], tree: RecordTree | None) -> None:
        self._read, self._tree = read, tree
        self._record: Any = None
        self._versions: list[int] = []

    @property
    def was_read(self) -> bool:
        """Whether the loop has read it."""
        return self._record is not None

    def _known(self) -> Any:
        if self._record is None:
            self._record = self._read(self)
            self._versions = [t._version for t in tree_leaves(self._record)]
        return self._record

    def __getitem__(self, key: int | str) -> Any:
        """Return the inputs (0) or the targets (1), or an entry of the records by place or name."""
        return self._known()[key]

    def __iter__(self) -> Iterator[Any]:
        """Give inputs, then targets; or a tuple's entries, or a dict's names."""
        return iter(self._known())

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a batch has no {name!r}: read it as x, y = batch, or as its records are, batch['labels'] "
            "or model(**batch). Its tensors are where the model is, and stay in it."
        )

    def __len__(self) -> int:
        return 2 if self._tree is None else self._tree.size

    def keys(self) -> Sequence[str]:
        """Return the names of a dict's entries, as ``model(**batch)`` asks for them."""
        return () if self._tree is None else self._tree.names

    def items(self) -> Iterator[tuple[str, Any]]:
        """Give a dict's entries by name."""
        return ((name, self[name]) for name in self.keys())

    def holds(self, batch: object) -> bool:
        """Say whether something is this batch, whole or as its tensors, as they were read."""
        if batch is self:
            return True
        if self._record is None or not isinstance(batch, tuple | list | dict):
            return False
        found, own = tree_leaves(batch), tree_leaves(self._record)
        return len(found) == len(own) and all(
            a is b and b._version == version
            for a, b, version in zip(found, own, self._versions, strict=True)
        )


@dataclass
class OpenSample:
    """The sample that the loop holds: how far it was read, and what was computed of it."""

    batch: Batch
    sample: Sample | None = None
    start: int = 0
    shown: int = 0
    last: bool = True
    mask: torch.Tensor | None = None
    draws: Intercept | None = None
    lookups: Lookups | None = None
    recording: Recording | None = None

    def watch(self) -> None:
        """Begin to watch the loop: it has records in its hands now."""
        if self.draws is not None:
            self.draws.__enter__()  # type: ignore[no-untyped-call]
        if self.lookups is not None:
            self.lookups.__enter__()  # type: ignore[no-untyped-call]
        if self.recording is not None:
            self.recording.start()

    def leave(self) -> None:
        """Watch it no more."""
        if self.recording is not None:
            self.recording.stop()
        entered = [mode for mode in (self.lookups, self.draws) if mode is not None]
        self.draws = self.lookups = None
        for mode in entered:
            top = _get_current_function_mode()  # type: ignore[no-untyped-call]
            if top is not mode:
                raise LoopError(
                    "A torch function mode was entered between a batch and its step and is still "
                    "open. Close it before the step."
                )
            mode.__exit__(None, None, None)
