"""Whether two loops run the same program: what a model and a loss are, told by value.

A stack computes the passes of all its loops by the program of the first. So everything that a pass
may read is looked at here, and what cannot be told by value (an object of a class of the user's, a
weight that is captured) makes a loop unlike any other: it is then trained by itself.
"""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import sys
from collections.abc import Callable, Hashable, Iterable
from functools import lru_cache
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    ModuleType,
)
from typing import Any

import torch
from torch import nn

__all__ = ["UnsureError", "program_of"]

_PLAIN = (int, float, complex, str, bytes, bool, type(None), type(...))
_VALUES = (torch.dtype, torch.device, torch.Size, enum.Enum)
_SMALL = (
    1024  # numbers of a tensor that is told by its contents; a larger one is told by its memory
)
_PARTS = 64  # of lists and tables
_LIBRARIES = frozenset({"torch", "torchvision", "numpy", "privtune"})
_HOOKS = tuple(name for name in vars(nn.Module()) if "hook" in name)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_NO_CODE = frozenset(
    {
        "__module__",
        "__doc__",
        "__dict__",
        "__weakref__",
        "__qualname__",
        "__annotations__",
        "__init__",
    }
    | {"__parameters__", "__orig_bases__", "__firstlineno__", "__static_attributes__"}
    | {"_abc_impl", "__abstractmethods__"}
)  # of a class: nothing that a pass runs


class UnsureError(Exception):
    """Something that a pass may read cannot be told by value."""


def program_of(model: nn.Module, *functions: object) -> Hashable:
    """Return what tells programs apart: models of equal programs differ in the numbers they hold alone.

    Args:
        model: The model. What it holds (weights, frozen parameters, buffers) is told by shape and type.
        functions: What is called with it.

    Raises:
        UnsureError: If something of it cannot be told by value.
    """
    looking = _Looking(model)
    return (looking.module(model, whole=True), *(looking.value(each) for each in functions))


class _Looking:
    """One look at a program; what refers to itself is told once.

    Args:
        model: The model that is trained: a function that holds it is unsure, since weights are
            reached through its argument.
    """

    def __init__(self, model: nn.Module) -> None:
        self._open: set[int] = {id(part) for part in model.modules()}

    def value(self, value: Any) -> Hashable:
        """Return what tells a value apart."""
        if isinstance(value, _PLAIN):
            return (type(value).__name__, repr(value))
        if isinstance(value, _VALUES):
            return (type(value).__name__, str(value))
        looks: tuple[tuple[Any, Callable[[Any], Hashable]], ...] = (
            (ModuleType, self._library),
            (type, self._class),
            (BuiltinFunctionType, self._builtin),
            (FunctionType, self._function),
            (functools.partial, self._partial),
            (torch.Tensor, self._tensor),
            (nn.Module, self._criterion),
            ((tuple, list, frozenset, set, dict), self._parts),
        )
        for kind, look in looks:
            if isinstance(value, kind):
                return look(value)
        if isinstance(value, staticmethod | classmethod):
            return (type(value).__name__, self.value(value.__func__))
        if isinstance(value, property):
            return ("property", self.value(value.fget))
        raise UnsureError(type(value).__name__)

    def module(self, module: nn.Module, *, whole: bool) -> Hashable:
        """Return what tells a module apart: its parts, their classes, modes and attributes.

        Args:
            module: The module.
            whole: Whether it is what is trained: then what it holds is told by shape.
        """
        first: dict[int, str] = {}
        held: list[Hashable] = []
        for name, tensor in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ):
            if type(tensor) not in (nn.Parameter, torch.Tensor) or tensor._backward_hooks:
                raise UnsureError(name)
            shape = (tuple(tensor.shape), str(tensor.dtype), str(tensor.device))
            content = () if whole else (self._tensor(tensor),)
            alias = first.setdefault(id(tensor), name)
            held.append((name, alias, *shape, tensor.requires_grad, *content))
        parts: list[Hashable] = []
        for name, part in module.named_modules(remove_duplicate=False):
            own = vars(part)
            if any(own.get(hooks) for hooks in _HOOKS):
                raise UnsureError(f"hooks of {name}")
            others = sorted(own.keys() - _OF_EVERY_MODULE)
            parts.append(
                (
                    name,
                    first.setdefault(id(part), name),
                    self._class(type(part)),
                    part.training,
                    tuple((each, self.value(own[each])) for each in others),
                )
            )
        return (tuple(held), tuple(parts))

    def _criterion(self, module: nn.Module) -> Hashable:
        if id(module) in self._open:
            raise UnsureError("the model that is trained")
        return self.module(module, whole=False)

    def _library(self, module: ModuleType) -> Hashable:
        if not _installed(module.__name__):
            raise UnsureError(module.__name__)
        return ("module", module.__name__)

    def _class(self, kind: type) -> Hashable:
        if _installed(kind.__module__):
            return ("class", kind.__module__, kind.__qualname__, id(kind))
        return self._once(kind, self._own_class)

    def _own_class(self, kind: Any) -> Hashable:
        bases = tuple(self._class(base) for base in kind.__mro__[1:] if base is not object)
        found = [
            (name, self.value(part))
            for name, part in sorted(vars(kind).items())
            if name not in _NO_CODE and not isinstance(part, MemberDescriptorType)
        ]
        return (kind.__qualname__, bases, tuple(found))

    def _builtin(self, function: Any) -> Hashable:
        owner = function.__self__
        if owner is not None and not isinstance(owner, ModuleType | type):
            raise UnsureError(function.__name__)
        return ("built-in", id(function), function.__name__)

    def _function(self, function: Any) -> Hashable:
        if _installed(function.__module__ or ""):
            return ("function", function.__module__, function.__qualname__, id(function))
        return self._once(function, self._own_function)

    def _own_function(self, function: Any) -> Hashable:
        cells = (_content(cell) for cell in function.__closure__ or ())
        table = function.__globals__
        names = [
            (name, self.value(table[name]) if name in table else hasattr(builtins, name))
            for name in _globals_of(function.__code__)
        ]
        return (
            function.__code__,
            tuple(self.value(cell) for cell in cells),
            tuple(names),
            self.value(function.__defaults__),
            self.value(function.__kwdefaults__),
            self.value({n: v for n, v in vars(function).items() if n != "__wrapped__"}),
        )

    def _partial(self, call: functools.partial[Any]) -> Hashable:
        return ("partial", *(self.value(part) for part in (call.func, call.args, call.keywords)))

    def _tensor(self, tensor: torch.Tensor) -> Hashable:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.requires_grad:
            raise UnsureError("a tensor with a gradient")
        shape = (tuple(tensor.shape), str(tensor.dtype), str(tensor.device))
        if tensor.numel() <= _SMALL:
            return (*shape, repr(tensor.tolist()))
        return (*shape, id(tensor), 0 if tensor.is_inference() else tensor._version)

    def _parts(self, value: Any) -> Hashable:
        if len(value) > _PARTS or type(value) not in (tuple, list, frozenset, set, dict):
            raise UnsureError(type(value).__name__)
        return self._once(value, self._own_parts) if value else (type(value).__name__,)

    def _own_parts(self, value: Any) -> Hashable:
        parts: Iterable[Any] = value.items() if isinstance(value, dict) else value
        found = [self.value(part) for part in parts]
        name = type(value).__name__
        return (name, frozenset(found) if isinstance(value, set | frozenset) else tuple(found))

    def _once(self, value: Any, look: Callable[[Any], Hashable]) -> Hashable:
        """Look at a value, unless that is what is being looked at."""
        if id(value) in self._open:
            return "what holds this"
        self._open.add(id(value))
        try:
            return look(value)
        finally:
            self._open.discard(id(value))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        raise UnsureError("an empty cell") from None


@lru_cache(maxsize=1024)
def _globals_of(code: CodeType) -> tuple[str, ...]:
    """Return the names of globals that code reads, that of functions within it included."""
    found = {
        str(each.argval)
        for each in dis.get_instructions(code)
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    for part in code.co_consts:
        if isinstance(part, CodeType):
            found.update(_globals_of(part))
    return tuple(sorted(found))


def _installed(name: str) -> bool:
    """Say whether a module is of a library that no objective changes while a round runs."""
    root = name.partition(".")[0]
    return root in _LIBRARIES or (root in sys.stdlib_module_names and root != "__main__")
