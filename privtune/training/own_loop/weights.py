"""The weights of a loop's model, of which nothing but a release may change a bit.

The trainable parameters are laid into one flat vector, so that a release, the check and the engine
all work on the same memory. What a loop could do to them by another way (a step of its own, weights
that are loaded back, a table that renormalises itself) is found before the next release.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.training.mechanism.kernel import Layout, share_flat

__all__ = ["LoopError", "WatchedWeights", "overlaps", "storage_of"]

_COPIED = 2**18  # up to this many weights are compared with a copy; more, by their squared length
_SHARE = 1 / 8  # share of the releases, drawn at random, after which the length is compared


class LoopError(PrivTuneError):
    """A loop did something that its plan did not charge. What was charged stays; nothing is released."""


def storage_of(tensor: torch.Tensor) -> int:
    """Return what tells the memory behind a tensor apart, as long as it lives."""
    return int(tensor.untyped_storage()._cdata)


def overlaps(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two tensors lie in the same memory, or in parts of it that overlap."""
    if storage_of(one) != storage_of(other):
        return False
    (a, b), (c, d) = (
        (t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in (one, other)
    )
    return a < d and c < b


class WatchedWeights:
    """The weights, buffers and parts of a model, watched.

    Args:
        model: The model. Its trainable parameters become views of one vector.
        layout: Where each of them lies.

    **Guarantee**: a write through a tensor's own methods, a parameter or buffer that was replaced,
    added, frozen or moved is found at the next :meth:`check`, by version counters and identities;
    a write around them (``.data``, NumPy) is found by contents: exactly up to 262,144 weights; of
    more, their squared length is compared after one release in eight, drawn at random, and after the
    last.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._layout = layout
        named = dict(model.named_parameters())
        _refuse_unfit(model, [p for n, p in named.items() if n in layout.shapes])
        self.params = [named[name] for name in layout.shapes]
        self.flat = share_flat(model)
        self._still = {
            name: tensor
            for name, tensor in (*named.items(), *model.named_buffers())
            if name not in layout.shapes
        }
        self._tensors: Mapping[str, torch.Tensor] = {
            **dict(zip(layout.shapes, self.params, strict=True)),
            **self._still,
        }
        self._places = [
            (table, name, held)
            for module in model.modules()
            for table in (module._parameters, module._buffers, module._modules)
            for name, held in table.items()
        ]
        self._ids = [id(held) for _, _, held in self._places]  # not reused: they are kept
        self._tables: list[dict[str, Any]] = [
            table
            for module in model.modules()
            for table in (module._parameters, module._buffers, module._modules)
        ]
        self._sizes = [len(table) for table in self._tables]
        self._code = [(m, type(m), vars(m), vars(m).get("forward")) for m in model.modules()]
        self._trained = [p.requires_grad for p in named.values()]
        self._all = list(named.values())
        self._addresses = [p.data_ptr() for p in self.params]
        self._watched = list(self._tensors.values())
        self._sums = [_sum(tensor) for tensor in self._still.values()]
        self._copy = torch.empty_like(self.flat) if layout.size <= _COPIED else None
        self.accept(last=True)

    def accept(self, *, last: bool = False) -> None:
        """Take the weights as they are: a release has made them.

        Args:
            last: Whether it is the last release, after which contents are always compared.
        """
        self._versions = [t._version for t in self._watched]
        if self._copy is not None:
            self._copy.copy_(self.flat)
        else:
            looked_at = last or random.random() < _SHARE  # noqa: S311 (a sample, no secret)
            self._length = _length(self.flat) if looked_at else None

    def check(self, *, whole: bool = False) -> None:
        """Refuse weights that anything but a release has changed.

        Args:
            whole: Whether to compare the contents of what is not trained, too.

        Raises:
            LoopError: Naming the parameter or buffer and the likely cause.
        """
        self.check_parts()
        if [p.data_ptr() for p in self.params] != self._addresses:
            raise LoopError(_changed("a parameter", "was moved or converted"))
        found = [t._version for t in self._watched]
        if found != self._versions:
            both = zip(self._tensors, found, self._versions, strict=True)
            name = next(name for name, now, before in both if now != before)
            raise LoopError(_changed(name, "was changed by something else than a release"))
        if not self._same_contents():
            raise LoopError(_changed("a parameter", "was changed by something else than a release"))
        if whole and [_sum(tensor) for tensor in self._still.values()] != self._sums:
            raise LoopError(_changed("a frozen parameter or a buffer", "was changed"))

    def check_parts(self) -> None:
        """Refuse a model that is put together otherwise than it was.

        Raises:
            LoopError: Naming the part.
        """
        found = [id(table.get(name)) for table, name, _ in self._places]
        if found != self._ids:
            both = zip(self._places, found, self._ids, strict=True)
            raise LoopError(
                _changed(next(p[1] for p, now, own in both if now != own), "was replaced")
            )
        if [len(table) for table in self._tables] != self._sizes:
            raise LoopError(_changed("a part of the model", "was added or removed"))
        if [p.requires_grad for p in self._all] != self._trained:
            raise LoopError(_changed("requires_grad of a parameter", "was changed"))
        for part, kind, own, forward in self._code:
            if type(part) is not kind or own.get("forward") is not forward:
                raise LoopError(_changed(f"forward of a {kind.__name__}", "was replaced"))

    def _same_contents(self) -> bool:
        if self._copy is None:
            return self._length is None or _length(self.flat) == self._length
        if torch.equal(self.flat, self._copy):
            return True
        return bool(torch.equal(self.flat.isnan(), self._copy.isnan())) and bool(
            torch.equal(self.flat.nan_to_num(), self._copy.nan_to_num())
        )


def _refuse_unfit(model: nn.Module, trained: Sequence[torch.Tensor]) -> None:
    """Refuse a model whose weights would not be the ones that it runs with."""
    if any(isinstance(part, torch.jit.ScriptModule) for part in model.modules()):
        raise InvalidInputError(
            "model",
            type(model).__name__,
            "must be Python's own, not scripted or traced by torch.jit",
            "Pass the module that was scripted; script what is released.",
        )
    own = {id(p) for p in trained}
    held = [*model.named_parameters(), *model.named_buffers()]
    held += [(n, v) for m in model.modules() for n, v in vars(m).items() if torch.is_tensor(v)]
    for name, tensor in held:
        if id(tensor) not in own and any(overlaps(tensor, p) for p in trained):
            raise InvalidInputError(
                "model",
                name,
                "must not be a view of a parameter that is trained: it would stay as it is now",
                "Take it from the parameter in forward.",
            )


def _length(flat: torch.Tensor) -> float:
    """Return the squared length; infinity in place of NaN, which would not equal itself."""
    length = float(torch.dot(flat, flat))
    return math.inf if math.isnan(length) else length


def _sum(tensor: torch.Tensor) -> float:
    total = float(tensor.detach().double().abs().sum()) if tensor.numel() else 0.0
    return math.inf if math.isnan(total) else total


def _changed(what: str, how: str) -> str:
    return (
        f"{what} {how} between two releases: likely a backward pass and optimizer.step() of the "
        "loop's own, weights written or loaded back, or a module that changes itself. Weights change "
        "through private.step alone; leave everything else about the model as it was given to "
        "make_private."
    )
