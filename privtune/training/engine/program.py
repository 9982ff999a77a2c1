"""Whether two models run the same program: what a pass does, captured below autograd and told by value.

One made-up record goes forward and back through model and loss. Every call that reaches a kernel is told:
its name, its numbers by value, its tensors by who made them, constants by their contents. Trainable and
frozen parameters, buffers and the record are inputs. Models of equal programs differ in these alone, so
one captured pass computes all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from privtune.training.engine.compute import sums_in_float32
from privtune.training.engine.graph.traced import traced
from privtune.training.mechanism.data import synthetic
from privtune.training.mechanism.fresh import fresh
from privtune.training.mechanism.kernel import LossOf
from privtune.training.mechanism.streams import GLOBAL_GENERATOR

__all__ = ["program_of"]

_PLAIN = (int, float, complex, str, bool, type(None))
_VALUES = (*_PLAIN, torch.dtype, torch.device, torch.layout, torch.memory_format)
_LEAVE = frozenset({torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__})
_HOOKS = tuple(name for name in vars(nn.Module()) if "backward" in name and "hook" in name)


class _UntoldError(Exception):
    """Something that a pass reads cannot be told by value."""


def program_of(model: nn.Module, loss_of: LossOf, x: torch.Tensor, y: torch.Tensor) -> str | None:
    """Return a digest of what model and loss do with a record, forward and back.

    Args:
        model: The model, in the mode in which it is trained. It is run as a copy, and stays as it is.
        loss_of: The loss of one record.
        x: Inputs of some records, for shape and type alone; may be none.
        y: Targets of some records, likewise.

    Returns:
        The same for models that differ in their numbers alone; None for one that can be compared with no
        other: a pass that reads a value or raises, a hook that autograd runs.

    Example:
        >>> from torch import nn
        >>> def loss(model, x, y):
        ...     return (model(x) - y).square().sum(1)
        >>> x, y = torch.zeros(0, 3), torch.zeros(0, 2)
        >>> one, other, wide = (program_of(nn.Linear(3, n), loss, x, y) for n in (2, 2, 1))
        >>> one == other, one == wide
        (True, False)
    """
    try:
        return _digest(model, loss_of, x, y)
    except Exception:  # whatever a user's code raises: the kernel's own check says what is wrong
        return None


def _digest(model: nn.Module, loss_of: LossOf, x: torch.Tensor, y: torch.Tensor) -> str:
    if any(getattr(part, name, None) for part in model.modules() for name in _HOOKS):
        raise _UntoldError("a hook on the way back")
    copied, _ = fresh(model)
    trained = [p for p in copied.parameters() if p.requires_grad]
    device = trained[0].device
    inputs, targets = synthetic(x, y, (1, 1), device)
    calls = _Calls()
    for part in _parts_of(copied):
        calls.tell(part)
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
    return calls.digest()


def _held(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _parts_of(model: nn.Module) -> Iterator[Any]:
    """Yield of every part its class, mode and plain attributes: a later pass may read them first."""
    for name, part in model.named_modules(remove_duplicate=False):
        kind = type(part)
        plain = [(n, v) for n, v in sorted(vars(part).items()) if isinstance(v, _PLAIN)]
        yield (name, kind.__module__, kind.__qualname__, *plain)


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


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells every call below autograd."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left = False
        self._told = hashlib.sha256()
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []  # else another tensor could take the identity of one
        self._spelled: Mapping[type, Callable[[Any], str]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in here, and the compiler need not be imported to be told so."""
        return False

    def digest(self) -> str:
        """Return the digest of what was told.

        Raises:
            _UntoldError: If a value has left torch: the next pass may do another thing.
        """
        if self.left:
            raise _UntoldError("a value that is read")
        return self._told.hexdigest()

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Name an input."""
        known = self._numbers.get(id(tensor))
        self.tell(name, known, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        if known is None:
            self._keep(tensor)

    def tell(self, *values: Any) -> None:
        """Add values to what is told."""
        self._told.update("".join(map(self._spell, values)).encode())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one call, and tell it."""
        self.tell(str(func), args, kwargs or {})
        made = func(*args, **(kwargs or {}))
        for part in made if isinstance(made, tuple | list) else (made,):
            if isinstance(part, torch.Tensor):
                self._told.update(f"{tuple(part.shape)}{part.dtype}{part.device}".encode())
                self._keep(part)
            elif part is not None:
                self.left = True
        return made

    def _keep(self, tensor: torch.Tensor) -> None:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._kept)
            self._kept.append(tensor)

    def _spell(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            number = self._numbers.get(id(value))
            return f"%{number};" if number is not None else self._contents(value)
        if isinstance(value, _VALUES):
            return f"{value!r};"
        if isinstance(value, Mapping):
            return f"{{{''.join(f'{name}={self._spell(part)}' for name, part in value.items())}}}"
        if isinstance(value, tuple | list):
            return f"({''.join(map(self._spell, value))})"
        raise _UntoldError(type(value).__name__)

    def _contents(self, tensor: torch.Tensor) -> str:
        """Tell a constant: a tensor that no call has made."""
        if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, nn.Parameter):
            raise _UntoldError("a tensor of another kind")
        with torch.utils._python_dispatch._disable_current_modes():
            held = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            found = hashlib.sha256(held.data).hexdigest()
        self._keep(tensor)
        return f"{tuple(tensor.shape)}{tensor.dtype}{tensor.device}{found};"
