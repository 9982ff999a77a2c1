"""Whether two models run the same program: what a pass does, captured below autograd and told by value.

One made-up record goes forward and back through model and loss. Every call that reaches a kernel is told:
its name, its numbers by value, its tensors by who made them, constants by their contents. Trainable and
frozen parameters, buffers and the record are inputs. Models of equal programs differ in these alone, so
one captured pass computes all of them. So does that of a wider net, where every tensor of a narrower one
that is filled up with zeros is a tensor of the wider one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from privtune.training.engine.compute import sums_in_float32
from privtune.training.engine.record import Following, shape_is_data
from privtune.training.engine.traced import traced
from privtune.training.mechanism.data import synthetic
from privtune.training.mechanism.fresh import fresh
from privtune.training.mechanism.kernel import LossOf
from privtune.training.mechanism.streams import GLOBAL_GENERATOR

_PLAIN = (int, float, complex, str, bool, type(None))
_VALUES = (*_PLAIN, torch.dtype, torch.device, torch.layout, torch.memory_format)
_LEAVE = frozenset({torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__})
_VIEWS = frozenset({"view", "_unsafe_view"})
_SUMS = frozenset({"add.Tensor", "sub.Tensor", "addmm"})
_KEEP_ZEROS = frozenset({
    "input", "t", "transpose.int", "detach", "clone", "mm", "mul.Tensor", "neg", "abs", "sum",
    "sum.dim_IntList", "relu", "relu_", "tanh", "gelu", "silu", "elu", "leaky_relu", "mish", "hardswish",
    "threshold_backward", "tanh_backward", "gelu_backward", "silu_backward", "elu_backward",
    "leaky_relu_backward", "mish_backward", "hardswish_backward", *_SUMS, *_VIEWS,
})  # fmt: skip
"""Calls that give tensors filled up with zeros for tensors filled up with zeros, the same beside these."""


class _UntoldError(Exception):
    """Something that a pass reads cannot be told by value."""


_Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Program:
    """What model and loss do with a record.

    Args:
        digest: The same for models that differ in their numbers alone.
        family: The same for models that differ in numbers and sizes.
        calls: Every call, with the shapes that went in and the one that came out.
    """

    digest: str
    family: str
    calls: tuple[tuple[str, _Shapes], ...]

    def holds(self, other: Program) -> bool:
        """Say whether this computes another program too, whose parameters are filled up with zeros.

        By induction over the calls: every tensor of the other program, filled up with zeros, is one of this,
        the gradients of parameters included. A call that is not known to keep that must have one size.

        Args:
            other: Of a narrower model.
        """
        return self.family == other.family and all(
            one == two or (name in _KEEP_ZEROS and _filled_up(name, one, two))
            for (name, one), (_, two) in zip(self.calls, other.calls, strict=True)
        )


def _filled_up(name: str, wide: _Shapes, narrow: _Shapes) -> bool:
    """Say whether a call on wider tensors fills up with zeros what it gives on narrower ones."""
    for one, two in zip(wide, narrow, strict=True):
        if len(one) != len(two) or any(a < b for a, b in zip(one, two, strict=True)):
            return False
    if name in _VIEWS:
        (before, after), (small, seen) = wide, narrow
        numbered = torch.arange(1, math.prod(small) + 1)
        filled = _fill_up(numbered.view(small), before).view(after)
        return torch.equal(filled, _fill_up(numbered.view(seen), after))
    if name not in _SUMS:
        return True
    # Nothing that is spread over a wider axis may be added there.
    out, old = wide[-1], narrow[-1]
    widened = [place for place in range(1, len(out) + 1) if out[-place] != old[-place]]
    terms = wide[:1] if name == "addmm" else wide[:-1]
    spread = any(
        place > len(term) or term[-place] != out[-place] for term in terms for place in widened
    )
    return not spread and (name == "addmm" or len(terms) == 2)  # the other one may be a number


def _fill_up(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    out = tensor.new_zeros(shape)
    out[tuple(slice(n) for n in tensor.shape)] = tensor
    return out


def program_of(
    model: nn.Module, loss_of: LossOf, x: torch.Tensor, y: torch.Tensor
) -> Program | None:
    """Return what model and loss do with a record, forward and back.

    Args:
        model: The model, in the mode in which it is trained. It is run as a copy, and stays as it is.
        loss_of: The loss of one record.
        x: Inputs of some records, for shape and type alone; may be none.
        y: Targets of some records, likewise.

    Returns:
        The program; None for one that can be compared with no other: a pass that reads a value or raises.

    Example:
        >>> from torch import nn
        >>> def loss(model, x, y):
        ...     return (model(x) - y).square().sum(1)
        >>> x, y = torch.zeros(0, 3), torch.zeros(0, 2)
        >>> one, other, wide = (program_of(nn.Linear(3, n), loss, x, y) for n in (2, 2, 1))
        >>> one == other, one == wide
        (True, False)
        >>> def net(width):
        ...     return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2))
        >>> narrow, wide = (program_of(net(width), loss, x, y) for width in (4, 7))
        >>> narrow.digest == wide.digest, wide.holds(narrow), narrow.holds(wide)
        (False, True, False)
    """
    try:
        return _captured(model, loss_of, x, y)
    except Exception:  # whatever a user's code raises: the kernel's own check says what is wrong
        return None


def _captured(model: nn.Module, loss_of: LossOf, x: torch.Tensor, y: torch.Tensor) -> Program:
    copied, _ = fresh(
        model, trained=True
    )  # a pass may write to its weights, which the kernel refuses
    trained = [p for p in copied.parameters() if p.requires_grad]
    device = trained[0].device
    inputs, targets = synthetic(x, y, (1, 1), device)
    calls = _Calls()
    for part, sizes in _parts_of(copied):
        calls.tell(part, sizes=sizes)
    for name, tensor in _held(copied):
        calls.put(name, tensor)
    calls.put("x", inputs[0])
    calls.put("y", targets[0])
    forked = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    with GLOBAL_GENERATOR, forked, sums_in_float32(), torch.enable_grad(), traced():
        with _Leaving(calls), calls:
            loss = loss_of(copied, inputs[0], targets[0])
            calls.tell("loss", tuple(loss.shape))
            grads: Sequence[torch.Tensor | None] = ()
            if loss.requires_grad:
                grads = torch.autograd.grad(loss.sum(), trained, allow_unused=True)
        calls.tell(grads)
    return calls.program()


def _held(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _parts_of(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield of every part its class, mode and plain attributes; then its whole numbers."""
    for name, part in model.named_modules(remove_duplicate=False):
        kind = type(part)
        plain = [(n, v) for n, v in sorted(vars(part).items()) if _told(n, v)]
        sizes = [(n, v) for n, v in plain if type(v) is int]
        yield (
            (name, kind.__module__, kind.__qualname__, *(p for p in plain if p not in sizes)),
            sizes,
        )


def _told(name: str, value: Any) -> bool:
    return isinstance(value, _PLAIN) and not name.startswith("_torchdynamo")  # of one model each


class _Leaving(TorchFunctionMode):
    """Notes values that leave torch by a call that reaches no kernel."""

    def __init__(self, calls: _Calls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self._calls.left |= func in _LEAVE
        return func(*args, **(kwargs or {}))


@lru_cache(maxsize=4096)
def _name(func: Any) -> str:
    name: str = func._schema.name.removeprefix("aten::")
    return name if func._overloadname == "default" else f"{name}.{func._overloadname}"


class _Calls(Following):
    """Tells every call below autograd."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left = False
        self._told: list[str] = []
        self._sizes: list[str] = []
        self._calls: list[tuple[str, _Shapes]] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []  # else another tensor could take the identity of one
        self._shapes: list[tuple[int, ...]] = []

    def program(self) -> Program:
        """Return what was told.

        Raises:
            _UntoldError: If a value has left torch: the next pass may do another thing.
        """
        if self.left:
            raise _UntoldError("a value that is read")
        family = hashlib.sha256("".join(self._told).encode())
        digest = family.copy()
        digest.update("".join(self._sizes).encode())
        return Program(digest.hexdigest(), family.hexdigest(), tuple(self._calls))

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Name an input."""
        known = self._numbers.get(id(tensor))
        self.tell(name, known, tensor.dtype, tensor.requires_grad, sizes=tuple(tensor.shape))
        self._calls.append(("input", (tuple(tensor.shape),)))
        if known is None:
            self._keep(tensor)

    def tell(self, *values: Any, sizes: Any = ()) -> None:
        """Add values to what is told; sizes are not what a family is known by."""
        self._told += map(self._spell, values)
        self._sizes.append(self._spell(sizes))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one call, and tell it."""
        named, name = kwargs or {}, _name(func)
        own = args[:1] if name in _VIEWS else args
        self._shapes = []
        self.tell(name, own, named, sizes=args[len(own) :])
        shapes = self._shapes
        made = func(*args, **named)
        self.left |= shape_is_data(func, args)
        for part in made if isinstance(made, tuple | list) else (made,):
            if isinstance(part, torch.Tensor):
                shapes.append(tuple(part.shape))
                self._told.append(f"{part.dtype}{part.device}")
                self._sizes.append(f"{shapes[-1]}")
                self._keep(part)
            elif part is not None:
                self.left = True
        self._calls.append((name, tuple(shapes)))
        return made

    def _keep(self, tensor: torch.Tensor) -> None:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._kept)
            self._kept.append(tensor)

    def _spell(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            self._shapes.append(tuple(value.shape))
            number = self._numbers.get(id(value))
            return f"%{number};" if number is not None else self._contents(value)
        if isinstance(value, tuple | list):
            return f"({''.join(map(self._spell, value))})"
        if isinstance(value, dict):
            return f"{{{''.join(f'{name}={self._spell(part)}' for name, part in value.items())}}}"
        if isinstance(value, _VALUES):
            return f"{value!r};"
        raise _UntoldError(type(value).__name__)

    def _contents(self, tensor: torch.Tensor) -> str:
        """Tell a constant: a tensor that no call has made."""
        if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, nn.Parameter):
            raise _UntoldError("a tensor of another kind")
        with _disable_current_modes():
            held = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            found = hashlib.sha256(held.data).hexdigest()
        self._keep(tensor)
        return f"{tuple(tensor.shape)}{tensor.dtype}{tensor.device}{found};"
