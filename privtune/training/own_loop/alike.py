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
from types import BuiltinFunctionType, CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import nn

from privtune.training.own_loop.weights import storage_of

__all__ = ["UnsureError", "program_of"]

_PLAIN = (int, float, complex, str, bytes, bool, type(None), type(...))
_VALUES = (torch.dtype, torch.device, torch.Size, enum.Enum)
_SMALL = 1024  # numbers of a tensor that is told by its contents; a larger one, by its memory
_PARTS = 64  # of lists and tables
_LIBRARIES = frozenset({"torch", "torchvision", "numpy", "privtune"})
_HOOKS = tuple(name for name in vars(nn.Module()) if "hook" in name)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_NO_CODE = frozenset((
    "__module__", "__doc__", "__dict__", "__weakref__", "__qualname__", "__annotations__", "__init__",
    "__parameters__", "__orig_bases__", "__firstlineno__", "__static_attributes__", "_abc_impl",
    "__abstractmethods__",
))  # fmt: skip
"""Of a class: nothing that a pass runs."""


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
        self._trained = {storage_of(p) for p in model.parameters() if p.requires_grad}
        self._looks: tuple[tuple[Any, Callable[[Any], Hashable]], ...] = (
            (_PLAIN, repr),
            (_VALUES, str),
            (ModuleType, lambda module: _of_library(module.__name__)),
            (type, self._class),
            (BuiltinFunctionType, self._builtin),
            (FunctionType, self._function),
            (functools.partial, lambda call: self._each((call.func, call.args, call.keywords))),
            (torch.Tensor, self._tensor),
            (nn.Module, lambda module: self.module(module, whole=False)),
            ((tuple, list, frozenset, set, dict), self._parts),
            ((staticmethod, classmethod), lambda method: self.value(method.__func__)),
            (property, lambda each: self.value(each.fget)),
        )

    def value(self, value: Any) -> Hashable:
        """Return what tells a value apart."""
        for kind, look in self._looks:
            if isinstance(value, kind):
                return (type(value).__name__, look(value))
        raise UnsureError(type(value).__name__)

    def module(self, module: nn.Module, *, whole: bool) -> Hashable:
        """Return what tells a module apart: its parts, their classes, modes and attributes.

        Args:
            module: The module.
            whole: Whether it is what is trained: then what it holds is told by shape.
        """
        if not whole and id(module) in self._open:
            raise UnsureError("the model that is trained")
        first: dict[int, str] = {}
        found: list[Hashable] = []
        for name, tensor in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ):
            if type(tensor) not in (nn.Parameter, torch.Tensor) or tensor._backward_hooks:
                raise UnsureError(name)
            content = _shape(tensor) if whole else self._tensor(tensor)
            found.append((name, first.setdefault(id(tensor), name), tensor.requires_grad, content))
        for name, part in module.named_modules(remove_duplicate=False):
            own = vars(part)
            if any(own.get(hooks) for hooks in _HOOKS):
                raise UnsureError(f"hooks of {name}")
            alias, kind = first.setdefault(id(part), name), self._class(type(part))
            others = self._each((n, own[n]) for n in sorted(own.keys() - _OF_EVERY_MODULE))
            found.append((name, alias, kind, part.training, others))
        return tuple(found)

    def _class(self, kind: Any) -> Hashable:
        if _installed(kind.__module__):
            return (kind.__module__, kind.__qualname__, id(kind))
        code = (
            (name, part)
            for name, part in sorted(vars(kind).items())
            if name not in _NO_CODE and not isinstance(part, MemberDescriptorType)
        )
        bases = (base for base in kind.__mro__[1:] if base is not object)
        return self._once(kind, lambda: (kind.__qualname__, self._each(bases), self._each(code)))

    def _builtin(self, function: Any) -> Hashable:
        owner = function.__self__
        if owner is not None and not isinstance(owner, ModuleType | type):
            raise UnsureError(function.__name__)
        return (id(function), function.__name__)

    def _function(self, function: Any) -> Hashable:
        if _installed(function.__module__ or ""):
            return (function.__module__, function.__qualname__, id(function))
        table, names = function.__globals__, _globals_of(function.__code__)
        refers = (
            [_content(cell) for cell in function.__closure__ or ()],
            [(n, table[n] if n in table else hasattr(builtins, n)) for n in names],
            function.__defaults__,
            function.__kwdefaults__,
            [(n, value) for n, value in vars(function).items() if n != "__wrapped__"],
        )
        return self._once(
            function, lambda: (function.__code__, *(self._each(each or ()) for each in refers))
        )

    def _tensor(self, tensor: torch.Tensor) -> Hashable:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.requires_grad:
            raise UnsureError("a tensor with a gradient")
        if tensor.layout is torch.strided and storage_of(tensor) in self._trained:
            raise UnsureError("weights that are trained")
        if tensor.numel() <= _SMALL:
            return (*_shape(tensor), repr(tensor.tolist()))
        return (*_shape(tensor), id(tensor), 0 if tensor.is_inference() else tensor._version)

    def _parts(self, value: Any) -> Hashable:
        if len(value) > _PARTS or type(value) not in (tuple, list, frozenset, set, dict):
            raise UnsureError(type(value).__name__)
        if isinstance(value, set | frozenset):
            return frozenset(map(self.value, value))
        parts = value.items() if isinstance(value, dict) else value
        return self._once(value, lambda: self._each(parts)) if value else ()

    def _each(self, values: Iterable[Any]) -> tuple[Hashable, ...]:
        return tuple(map(self.value, values))

    def _once(self, value: Any, look: Callable[[], Hashable]) -> Hashable:
        """Look at a value, unless that is what is being looked at."""
        if id(value) in self._open:
            return "what holds this"
        self._open.add(id(value))
        try:
            return look()
        finally:
            self._open.discard(id(value))


def _shape(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    return (tuple(tensor.shape), str(tensor.dtype), str(tensor.device))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        raise UnsureError("an empty cell") from None


@lru_cache(maxsize=1024)
def _globals_of(code: CodeType) -> tuple[str, ...]:
    """Return the names of globals that code reads, that of functions within it included.

    Raises:
        UnsureError: If it imports what is no library's.
    """
    found: set[str] = set()
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            found.add(str(each.argval))
        elif each.opname == "IMPORT_NAME":
            _of_library(str(each.argval))
    for part in code.co_consts:
        if isinstance(part, CodeType):
            found.update(_globals_of(part))
    return tuple(sorted(found))


def _of_library(name: str) -> str:
    if not _installed(name):
        raise UnsureError(name)
    return name


def _installed(name: str) -> bool:
    """Say whether a module is of a library that no objective changes while a round runs."""
    root = name.partition(".")[0]
    return root in _LIBRARIES or (root in sys.stdlib_module_names and root != "__main__")
