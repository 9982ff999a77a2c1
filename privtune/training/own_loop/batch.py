"""A planned sample in the hands of a loop, and what is watched while it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.overrides import _get_current_function_mode

from privtune.training.engine.graph.intercept import Intercept
from privtune.training.mechanism.oracle import Sample
from privtune.training.mechanism.records import Lookups
from privtune.training.own_loop.replay import Recording
from privtune.training.own_loop.weights import LoopError

__all__ = ["Batch", "OpenSample"]


class Batch:
    """One planned sample: hand it to ``step`` as it is, or read its inputs and targets from it.

    It is drawn when it is first read. One that the loop never reads is drawn by the step itself. It
    is no sequence, so that a trainer that moves batches about leaves it as it is.
    """

    def __init__(self, read: Callable[[Batch], tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._read = read
        self._tensors: tuple[torch.Tensor, torch.Tensor] | None = None
        self._versions: tuple[int, ...] = ()

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return the inputs (0) or the targets (1)."""
        if self._tensors is None:
            self._tensors = self._read(self)
            self._versions = tuple(t._version for t in self._tensors)
        return self._tensors[index]

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Give inputs, then targets."""
        return iter((self[0], self[1]))

    def __len__(self) -> int:
        return 2

    def holds(self, batch: object) -> bool:
        """Say whether something is this batch, whole or as its two tensors, as they were read."""
        if batch is self:
            return True
        pair = isinstance(batch, tuple | list) and len(batch) == 2 and self._tensors is not None
        return pair and all(
            a is b and b._version == version
            for a, b, version in zip(batch, self._tensors or (), self._versions, strict=True)  # type: ignore[call-overload]
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
