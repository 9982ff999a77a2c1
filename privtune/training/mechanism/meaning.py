"""What tells two functions apart: their code, and what it refers to.

A pass that was captured takes for constant whatever its function read when it ran: numbers of the
function's own, of an object or a class that holds settings, of a module of the user's, of a network
beside the model. Whoever keeps such a pass compares meanings before each step.
"""

from __future__ import annotations

import dis
import functools
import sys
import zlib
from collections import deque
from collections.abc import Collection, Hashable, Iterator
from contextlib import suppress
from functools import lru_cache
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import _C, nn

__all__ = ["DEPTH", "PLAIN", "attributes_in", "is_constant", "meaning_of"]

DEPTH = 5
PLAIN = (int, float, complex, str, bytes, bool, type(None))
_LOOKED_INTO = 64  # parts of lists and tables of at most this many are looked into
_SMALL = 2**16  # bytes of an array that is compared as it is; a larger one, by its checksum
_CALLED = frozenset(
    {
        "__call__",
        "forward",
        "__getitem__",
        "__iter__",
        "__len__",
        "__float__",
        "__mul__",
        "__rmul__",
    }
)
_READS = ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME")
_NONE: frozenset[str] = frozenset()


def meaning_of(
    value: Any, depth: int = DEPTH, *, names: frozenset[str] = _NONE, trained: Collection[int] = ()
) -> Hashable:
    """Return what tells a value apart, a few levels down: the same for as long as it means the same.

    Args:
        value: Anything.
        depth: How many levels; at 0, a function or an object is told by its identity.
        names: What code that refers to it may read of it: of an object, no other attributes count.
        trained: The storages of tensors that change by themselves, and are no constants.
    """
    return _Telling(trained).tell(value, depth, names)


class _Telling:
    """One look at a value; what refers to itself is told once."""

    def __init__(self, trained: Collection[int]) -> None:
        self._trained = trained
        self._open: set[int] = set()

    def tell(self, value: Any, depth: int, names: frozenset[str]) -> Hashable:
        if isinstance(value, PLAIN):
            return (type(value).__name__, value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray | np.generic):
            if value.dtype.hasobject:
                return id(value)
            held = value.tobytes()
            return (id(value), held if len(held) <= _SMALL else zlib.crc32(held))
        if id(value) in self._open:
            return id(value)
        holds = isinstance(value, dict | tuple | frozenset | list | set | deque)
        if not holds and (depth == 0 or is_constant(value)):
            return id(value)
        self._open.add(id(value))
        try:
            if isinstance(value, dict):
                return (id(value), _apart(value), self._parts(value.values(), depth, names))
            if holds:
                return (id(value), self._parts(value, depth, names))
            return self._deeper(value, depth - 1, names)
        finally:
            self._open.discard(id(value))

    def _parts(self, parts: Collection[Any], depth: int, names: frozenset[str]) -> Hashable:
        if len(parts) > _LOOKED_INTO:
            return _apart(parts)
        return tuple(self.tell(part, depth, names) for part in parts)

    def _tensor(self, tensor: torch.Tensor) -> Hashable:
        if _C._functorch.is_functorch_wrapped_tensor(tensor):
            return "what a pass left behind"
        if tensor.layout is not torch.strided:
            return (id(tensor), tensor._version)
        if tensor.untyped_storage()._cdata in self._trained:
            return "a weight"
        version = 0 if tensor.is_inference() else tensor._version
        return (id(tensor), tensor.data_ptr(), version)

    def _deeper(self, value: Any, depth: int, names: frozenset[str]) -> Hashable:
        if isinstance(value, functools.partial):
            return tuple(
                self.tell(p, depth, names) for p in (value.func, value.args, value.keywords)
            )
        if isinstance(value, MethodType):
            own = value.__self__
            held = self._network(own) if isinstance(own, nn.Module) else ()
            return (id(own), *held, self._run_on(own, value.__func__, depth, names))
        if isinstance(value, FunctionType):
            read_of, table = attributes_in(value.__code__), value.__globals__
            cells = (cell.cell_contents for cell in value.__closure__ or () if _filled(cell))
            read = (table.get(n, sys.modules.get(n)) for n in _globals_in(value.__code__))
            given = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            told = (self.tell(part, depth, read_of) for part in (*cells, *read, *given))
            return (value.__code__, *told)
        attributes = self._attributes(value, depth, names | _CALLED)
        if isinstance(value, nn.Module):
            return (id(value), *self._network(value), attributes)
        return (id(value), attributes)

    def _run_on(self, value: Any, function: Any, depth: int, names: frozenset[str]) -> Hashable:
        """Tell a function, and what it may read of the object that it runs on."""
        if depth < 1 or id(function) in self._open:
            return id(function)
        code = getattr(function, "__code__", None)
        told = self.tell(function, depth, names)
        self._open.add(id(function))
        try:
            return (told, self._attributes(value, depth - 1, attributes_in(code) | _CALLED))
        finally:
            self._open.discard(id(function))

    def _network(self, module: nn.Module) -> Iterator[Hashable]:
        """Tell what a network beside the model holds: weights, buffers, modes and numbers."""
        for tensor in (*module.parameters(), *module.buffers()):
            yield self._tensor(tensor)
        for part in module.modules():
            yield tuple(value for value in vars(part).values() if isinstance(value, PLAIN))

    def _attributes(self, value: Any, depth: int, names: frozenset[str]) -> Hashable:
        """Tell those attributes of an object, a class or a module that code may read, by name."""
        found: list[Hashable] = []
        kind = value if isinstance(value, type) else type(value)
        # What a library's function reads of an object, as a scheduler's rate, is the loop's.
        ours = not isinstance(value, nn.Module | type | ModuleType)
        ours = ours and not kind.__module__.startswith("privtune.")
        for name in sorted(names):
            part = _static(value, kind, name)
            if isinstance(part, property):
                found.append((name, self._run_on(value, part.fget, depth, names)))
                continue
            if isinstance(part, staticmethod | classmethod):
                part = part.__func__
            if isinstance(part, FunctionType) and (ours or not is_constant(part)):
                found.append((name, self._run_on(value, part, depth, names)))
            elif part is not None:
                found.append((name, self.tell(part, depth, names)))
        return tuple(found)


def _apart(parts: Collection[Any]) -> Hashable:
    """Tell numbers and words by what they are, and all else by its identity."""
    return tuple(part if isinstance(part, PLAIN) else id(part) for part in parts)


def _static(value: Any, kind: type, name: str) -> Any:
    """Return an attribute without running code of a class's own, save what makes attributes up."""
    table = getattr(value, "__dict__", {})
    if name in table:
        return table[name]
    for each in kind.__mro__:
        if name in vars(each):
            part = vars(each)[name]
            return getattr(value, name, None) if isinstance(part, MemberDescriptorType) else part
    if hasattr(kind, "__getattr__") and not isinstance(value, nn.Module):
        with suppress(Exception):  # of a name that no code asks for, it may say so by any
            return getattr(value, name)
    return None


@lru_cache(maxsize=4096)
def attributes_in(code: CodeType | None) -> frozenset[str]:
    """Return the names of attributes that code may read, that of functions within it included.

    Words are among them: ``getattr(settings, "beta")`` reads one.
    """
    if code is None:
        return _NONE
    inner = (attributes_in(part) for part in code.co_consts if isinstance(part, CodeType))
    words = (part for part in code.co_consts if isinstance(part, str) and part.isidentifier())
    return frozenset(code.co_names).union(words, *inner)


@lru_cache(maxsize=4096)
def _globals_in(code: CodeType) -> tuple[str, ...]:
    """Return the names of globals and modules that code reads, that of functions within it included."""
    inner = (_globals_in(part) for part in code.co_consts if isinstance(part, CodeType))
    read = (str(i.argval) for i in dis.get_instructions(code) if i.opname in _READS)
    return tuple(sorted(set(read).union(*inner)))


def is_constant(value: Any) -> bool:
    """Say whether a module, a class or a function is of a library: no loop changes it."""
    if isinstance(value, BuiltinFunctionType):
        return True
    if isinstance(value, ModuleType):
        return _of_library(value.__name__)
    if isinstance(value, type | FunctionType):
        return _of_library(value.__module__ or "")
    return False


def _of_library(name: str) -> bool:
    return _is_library(name.partition(".")[0])


@lru_cache(maxsize=1024)
def _is_library(root: str) -> bool:
    if root in ("torch", "numpy", "privtune"):
        return True
    if root in sys.stdlib_module_names:
        return root != "__main__"
    return "-packages" in str(getattr(sys.modules.get(root), "__file__", ""))


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
