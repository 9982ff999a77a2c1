"""A device far away, on a machine that has none: tensors on it are marked, and who looks is named.

Everything is computed on the CPU as ever. A tensor made for ``FAR``, or out of one that lies there,
lies there, too. What would make a GPU's caller wait is noted: to look at a number, to let a number
decide about a shape, to copy back, or to copy there other than by ``sent``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from privtune.training.mechanism import clipping as real

FAR = torch.device("cpu", 0)
"""Computes like the CPU, and is not the same device to a comparison."""

_LOOKS = {
    "item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__",
    "equal", "allclose", "is_nonzero",
}  # fmt: skip
_SHAPED = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"}
_COPIES = {"to", "tensor", "as_tensor", "new_tensor", "from_numpy", "copy_"}


class Watch(TorchFunctionMode):
    """Marks tensors on ``FAR``; while it is strict, it notes what waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self._there = WeakIdKeyDictionary()
        self._here = WeakIdKeyDictionary()  # made without a word of a device
        self.strict = False
        self.waits: list[str] = []

    def holds(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value in self._there

    def mark(self, value: torch.Tensor) -> torch.Tensor:
        self._there[value] = True
        return value

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = tree_leaves((args, kwargs))
        name = getattr(func, "__name__", str(func))
        inputs = [v for v in given if isinstance(v, torch.Tensor)]
        far = any(map(self.holds, inputs))
        told = any(isinstance(v, torch.device) and v == FAR for v in given)
        if self.strict and (far or told) and (why := self._why(name, args, inputs, told=told)):
            self.waits.append(why)
        out = func(*args, **kwargs)
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor) and (far or told) and name != "cpu":
                self.mark(value)
            elif isinstance(value, torch.Tensor) and not inputs and "device" not in kwargs:
                self._here[value] = True
        return out

    def _why(self, name, args, inputs, *, told) -> str:
        if name in _LOOKS and self.holds(args[0]):
            return name
        if name in _SHAPED:
            return name
        if name in {"__getitem__", "__setitem__"}:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            lists = any(isinstance(i, list) for i in index)
            tensors = [i for i in index if isinstance(i, torch.Tensor)]
            masks = any(i.dtype == torch.bool for i in tensors)
            if lists or masks or any(t in self._here for t in tensors):
                return f"{name} by numbers"
        near = any(not self.holds(t) for t in inputs)
        if name in _COPIES and (near or name == "new_tensor" or (told and not inputs)):
            return f"{name}: a copy that is waited for"
        if name == "to" and any(v in ("cpu", torch.device("cpu")) for v in args[1:]):
            return "to: back to the host"
        return ""


@contextmanager
def far_device(monkeypatch) -> Iterator[Watch]:
    """Let ``"far"`` be a device for trainings: yields what watches them."""
    watch = Watch()

    def sent(values, device):
        if watch.holds(values):
            return values
        with torch._C.DisableTorchFunction():
            there = values.clone(memory_format=torch.contiguous_format)
        return watch.mark(there) if device == FAR else there

    def looks_freely(device):
        return False

    stand_ins = {real.sent: sent, real.looks_freely: looks_freely}
    for name, module in list(sys.modules.items()):
        for own in ("sent", "looks_freely") if name.startswith("privtune.") else ():
            if getattr(module, own, None) in stand_ins:
                monkeypatch.setattr(module, own, stand_ins[getattr(module, own)])
    monkeypatch.setattr("privtune.training.engine.train.check_device", lambda device: FAR)
    with watch:
        yield watch
