"""Digests of the code of user functions: a changed digest says that the code was edited.

Read are the instructions, not the text: comments, blank lines, docstrings and line numbers change nothing.
Followed is what lies in the function's own module. Everything else is named, and never read.
"""

from __future__ import annotations

import bisect
import dataclasses
import dis
import enum
import functools
import hashlib
import hmac
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

_Part = tuple[str, Any]  # a name, and what it stands for

_PLAIN = (
    bool,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(Ellipsis),
)
_CONTAINERS = (tuple, frozenset, list, set, dict, range, slice)
_CHANGEABLE = (list, set, dict)
_MOST_PARTS = 100  # a container of more holds records rather than settings, and is named alone
_DEEPEST = 60
_SEARCHED = 6  # closures of ours, one in the other, that a user's function may lie in
_CHANGING_METHODS = frozenset(
    (
        "append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "clear",
        "remove", "discard", "sort",
    )
)  # fmt: skip
_VARIABLES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF"})
_ATTRIBUTES = frozenset({"STORE_ATTR", "DELETE_ATTR"})
_SUBSCRIPTS = frozenset({"STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"})
_IDLE = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "RESUME", "PRECALL", "NOT_TAKEN"})
_BOOKKEEPING = frozenset(
    {"__doc__", "__firstlineno__", "__static_attributes__", "__qualname__", "__module__"}
)
_OF_CLASSES = frozenset(
    {
        *_BOOKKEEPING,
        "__dict__", "__weakref__", "__annotations__", "__annotate__", "__annotate_func__",
        "__annotations_cache__", "__abstractmethods__", "_abc_impl", "__parameters__", "__slots__",
        "__dataclass_params__", "__dataclass_fields__", "__match_args__", "__hash__",
    }
)  # fmt: skip
_SIGNATURE_FLAGS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR
_FIRST_VALUES = frozenset({"__init__", "__post_init__", "__new__"})


def python_tag() -> str:
    """Return the version tag of this Python: digests made by two versions cannot be compared.

    Example:
        >>> python_tag().startswith(sys.implementation.name)
        True
    """
    return f"{sys.implementation.cache_tag}.{sys.flags.optimize}"


def code_digest(*values: object, key: bytes) -> str:
    """Return an HMAC of the code of callables and of what it uses, in hexadecimal; empty if there is none.

    Read are the instructions with their constants and names; default values; what is closed over; and of
    the same module the functions, classes and plain values that it names. What another module holds is named
    by module and qualified name, and so is what has no code of Python. Of an object whose values may change
    while it is used (a counter, a list that the code appends to, tensors, weights) the class counts alone.

    Args:
        *values: What is digested; texts count as they are, and None is nothing.
        key: Secret bytes: a value that is closed over may come from the records, and a digest without a key
            would let it be guessed.

    Returns:
        64 hexadecimal digits. The same in every process of one Python, whatever file or cell the code is in.

    Example:
        >>> names = {"__name__": "notebook"}
        >>> exec("one = lambda x: x + 1; same = lambda x: (x  + 1); other = lambda x: x + 2", names)
        >>> digest = code_digest(names["one"], key=b"k")
        >>> [digest == code_digest(names[name], key=b"k") for name in ("same", "other")]
        [True, False]
        >>> len(code_digest(print, key=b"k"))  # named
        64
    """
    descriptions: list[Any] = []
    for value in values:
        for root in _find_roots(value):
            description = root if isinstance(root, str) else _describe_root(root)
            descriptions.append(description)
    if not descriptions:
        return ""
    text = repr(descriptions)
    content = text.encode("utf-8", "backslashreplace")
    return hmac.new(key, content, hashlib.sha256).hexdigest()


def _find_roots(value: object, depth: int = 0) -> Iterator[object]:
    """Yield a value, or if it belongs to this package, the callables of others that it holds."""
    if value is None or depth > _SEARCHED:
        return
    if isinstance(value, str):
        yield value
        return
    if not _is_of_this_package(value):
        if callable(value):
            yield value
        return
    for content in _contents_of(value):
        is_record = dataclasses.is_dataclass(content) and _is_of_this_package(content)
        if is_record or callable(content):
            yield from _find_roots(content, depth + 1)


def _is_of_this_package(value: object) -> bool:
    """Return whether a value is defined in this package: a new version of it must not look like an edit."""
    module = _module_of(value)
    return _top(module) == "privtune"


def _contents_of(value: Any) -> Iterator[object]:
    """Yield the values that a callable holds: its closure, its bound object, arguments or fields."""
    if isinstance(value, FunctionType):
        for _, content in _closure_of(value):
            yield content
        yield getattr(value, "__wrapped__", None)
    elif isinstance(value, MethodType):
        yield value.__self__
    elif isinstance(value, functools.partial):
        yield value.func
        yield from value.args
        yield from value.keywords.values()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield getattr(value, field.name, None)
    else:
        yield getattr(value, "__wrapped__", None)


def _describe_root(root: object) -> Any:
    """Return the tree that describes a callable; only its name if it is installed or cannot be described."""
    module = _module_of(root)
    if is_installed(module):
        return _name_of(root, "")
    try:
        first = _Reader(module)
        first.describe(root)  # says what the code changes while it runs
        second = _Reader(
            module,
            changed=first.changes,
            changes_parts=first.changes_parts,
        )
        return second.describe(root)
    except Exception:  # whatever an object of the user's answers: it must stop no study
        return _name_of(root, module)


class _Reader:
    """A reader of one module's functions: it describes them as trees, whose ``repr`` is digested.

    Whatever a tree holds is part of every digest that is stored: another shape or another word in it, and all
    studies would say that their code was edited.

    Args:
        home: The module whose functions and classes are followed.
        changed: Names of variables and attributes that the code itself changes.
        changes_parts: Whether the code may change what a list or a mapping holds.
    """

    def __init__(
        self, home: str, *, changed: Sequence[str] | set[str] = (), changes_parts: bool = False
    ) -> None:
        self.changes: set[str] = set()
        self.changes_parts = False
        self._home = home
        self._changed = frozenset(changed)
        self._parts_may_change = changes_parts
        self._numbers: dict[int, int] = {}  # by id: the how-manieth object it is
        self._alive: list[object] = []  # so that no two of them have one id
        self._depth = 0

    def describe(self, value: Any) -> Any:
        """Return a tree of texts that describes a value, cut off below a largest depth."""
        if self._depth > _DEEPEST:
            return "deeper"
        self._depth += 1
        try:
            return self._describe(value)
        finally:
            self._depth -= 1

    def _describe(self, value: Any) -> Any:
        """Return the description of a value by its kind: what has no code is given by its value or name."""
        kind = type(value)
        if kind is int:
            return ("int", hex(value))
        if kind in _PLAIN:
            return (kind.__name__, repr(value))
        if isinstance(value, CodeType):
            return self._describe_code(value)
        if isinstance(value, enum.Enum):
            return ("member", self._name(kind), value.name)
        if kind in _CONTAINERS:
            return self._describe_container(value)
        if isinstance(value, ModuleType):
            return ("module", value.__name__)
        if isinstance(value, staticmethod | classmethod):
            function = self.describe(value.__func__)
            return (kind.__name__, function)
        if isinstance(value, property):
            accessors = (value.fget, value.fset, value.fdel)
            functions = self._describe_each(accessors)
            return ("property", functions)
        if isinstance(value, functools.partial):
            keywords = dict(sorted(value.keywords.items()))
            parts = self._describe_each((value.func, value.args, keywords))
            return ("partial", parts)
        if isinstance(value, MethodType):
            function = self.describe(value.__func__)
            owner = self.describe(value.__self__)
            return ("method", function, owner)
        return self._describe_once(value)

    def _describe_each(self, parts: Iterable[Any]) -> list[Any]:
        """Return the descriptions of some values, in the order given."""
        return [self.describe(part) for part in parts]

    def _describe_by_name(self, parts: Iterable[_Part]) -> list[_Part]:
        """Return (name, description) of each named part, in order; leave out names that the code changes."""
        descriptions: list[_Part] = []
        for name, part in parts:
            if name in self._changed:
                continue
            description = self.describe(part)
            descriptions.append((name, description))
        return descriptions

    def _describe_once(self, value: Any) -> Any:
        """Return the description of a function, class or object, or its number if it was described before.

        A function that calls itself would be described without an end.
        """
        key = id(value)
        if key in self._numbers:
            return ("again", self._numbers[key])
        self._numbers[key] = len(self._numbers)
        self._alive.append(value)
        if isinstance(value, FunctionType):
            return self._describe_function(value)
        if isinstance(value, type):
            return self._describe_class(value)
        kind = type(value)
        if hasattr(kind, "__wrapped__") or isinstance(value, functools._lru_cache_wrapper):
            wrapper = self._name(kind)
            return (wrapper, self.describe(value.__wrapped__))
        if isinstance(value, BuiltinFunctionType) or hasattr(value, "__qualname__"):
            return ("named", self._name(value))
        return self._describe_object(value)

    def _describe_container(self, value: Any) -> Any:
        """Return the description of a container: its parts, or its type alone if they may change or are many.

        Of many values nobody chose each: they are records, and a digest of them would differ with the data.
        """
        kind = type(value)
        name = kind.__name__
        if isinstance(value, range | slice):
            limits = (value.start, value.stop, value.step)
            return (name, self._describe_each(limits))
        may_change = kind in _CHANGEABLE and self._parts_may_change
        if may_change or len(value) > _MOST_PARTS:
            return (name, "...")
        if isinstance(value, dict):
            items: list[tuple[Any, Any]] = []
            for key, part in value.items():
                key_description = self.describe(key)
                items.append((key_description, self.describe(part)))
            return (name, sorted(items, key=repr))
        parts = self._describe_each(value)
        if isinstance(value, tuple | list):
            return (name, parts)
        # Each process has a set's elements in an order of its own.
        return (name, sorted(parts, key=repr))

    def _describe_function(self, function: FunctionType) -> Any:
        """Return the description of a function: its code, its defaults, and the values of names it uses."""
        if function.__module__ != self._home:
            return ("named", self._name(function))
        # The order of these lines counts: what is described first has the lower number in ``_describe_once``.
        names = sorted(_global_names(function.__code__))
        variables = function.__globals__
        used = self._describe_by_name(
            (name, variables[name]) for name in names if name in variables
        )
        closure = self._describe_by_name(_closure_of(function))
        code = self.describe(function.__code__)
        defaults = self.describe(function.__defaults__)
        keyword_defaults = self.describe(dict(function.__kwdefaults__ or {}))
        wrapped = self.describe(getattr(function, "__wrapped__", None))
        return ("function", code, defaults, keyword_defaults, closure, used, wrapped)

    def _describe_class(self, kind: type) -> Any:
        """Return the description of a class: its bases and its contents, without what Python itself adds."""
        if kind.__module__ != self._home:
            return ("named", self._name(kind))
        bases = self._describe_each(kind.__bases__)
        if issubclass(kind, enum.Enum):
            members: list[_Part] = []
            for name, member in kind.__members__.items():
                value = self.describe(member._value_)
                members.append((name, value))
            return ("enum", bases, members)
        contents = sorted(vars(kind).items())
        parts = self._describe_by_name(
            (name, part) for name, part in contents if name not in _OF_CLASSES
        )
        return ("class", bases, parts)

    def _describe_object(self, value: Any) -> Any:
        """Return the description of an object: its class, and its fields if they are settings."""
        kind = type(value)
        is_new = id(kind) not in self._numbers
        class_of_it = self._describe_class(kind) if is_new else self._name(kind)
        if not self._holds_settings(value):
            return ("object", class_of_it)
        contents = sorted(vars(value).items())
        fields = self._describe_by_name(contents)
        return ("object", class_of_it, fields)

    def _holds_settings(self, value: Any) -> bool:
        """Return whether an object's fields are settings: it is a namespace, a dataclass, or callable."""
        kind = type(value)
        if isinstance(value, SimpleNamespace):
            return True
        if kind.__module__ != self._home:
            return False
        call = vars(kind).get("__call__")
        return dataclasses.is_dataclass(kind) or isinstance(call, FunctionType)

    def _describe_code(self, code: CodeType) -> Any:
        """Return the description of compiled code: its instructions, with jump targets as their numbers."""
        self._note_changes(code)
        instructions = _instructions_of(code)
        offsets = [instruction.offset for instruction in instructions]
        descriptions: list[Any] = []
        for instruction in instructions:
            name = instruction.opname
            argument = instruction.argval
            if instruction.opcode in dis.hasconst:
                descriptions.append((name, self.describe(argument)))
            elif instruction.opcode in (*dis.hasjrel, *dis.hasjabs):
                # An idle instruction that is jumped to is left out: the next one stands for it.
                place = bisect.bisect_left(offsets, argument)
                descriptions.append((name, place))
            else:
                descriptions.append((name, repr(argument)))
        size = code.co_argcount + code.co_kwonlyargcount
        arguments = code.co_varnames[:size]
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
        flags = code.co_flags & _SIGNATURE_FLAGS
        return ("code", counts, flags, arguments, descriptions)

    def _note_changes(self, code: CodeType) -> None:
        """Note the variables and attributes that code changes while it runs: they are no settings."""
        if _CHANGING_METHODS.intersection(code.co_names):
            self.changes_parts = True
        for instruction in dis.get_instructions(code):
            operation = instruction.opname
            name = instruction.argval
            if operation in _SUBSCRIPTS:
                self.changes_parts = True
            elif operation in _VARIABLES:
                is_global = operation.endswith("GLOBAL")
                if is_global or name in code.co_freevars:
                    self.changes.add(name)
            elif operation in _ATTRIBUTES and code.co_name not in _FIRST_VALUES:
                self.changes.add(name)

    def _name(self, value: object) -> str:
        return _name_of(value, self._home)


def _instructions_of(code: CodeType) -> list[dis.Instruction]:
    """Return the instructions of code, without idle ones and those that set docstrings or line numbers."""
    instructions: list[dis.Instruction] = []
    for instruction in dis.get_instructions(code):
        operation = instruction.opname
        if operation in _IDLE:
            continue
        is_store = operation == "STORE_NAME"
        keeps_books = is_store and instruction.argval in _BOOKKEEPING
        if keeps_books and instructions:
            instructions.pop()  # what loads the value
            continue
        instructions.append(instruction)
    return instructions


def _global_names(code: CodeType) -> set[str]:
    """Return the global names that code, or a function nested in it, uses."""
    names: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _global_names(constant)
    return names


def _closure_of(function: FunctionType) -> list[_Part]:
    """Return the name and value of each closure variable of a function; leave out those not set yet."""
    names = function.__code__.co_freevars
    cells = function.__closure__ or ()
    contents: list[_Part] = []
    for name, cell in zip(names, cells, strict=True):
        try:
            contents.append((name, cell.cell_contents))
        except ValueError:  # not set yet
            continue
    return contents


def _module_of(value: object) -> str:
    """Return the name of the module in which a function, a class or an object's class is defined."""
    if isinstance(value, functools.partial):
        return _module_of(value.func)
    if isinstance(value, MethodType):
        return _module_of(value.__func__)
    module = getattr(value, "__module__", None)
    if isinstance(module, str):
        return module
    kind = type(value)
    return str(kind.__module__)


def _name_of(value: object, home: str) -> str:
    """Return ``module:name`` of a value, or of its class; the module is left out if it is ``home``."""
    name = getattr(value, "__qualname__", None)
    if not isinstance(name, str):
        value = type(value)
        name = value.__qualname__
    module = _module_of(value)
    prefix = "" if module == home else module
    return f"{prefix}:{name}"


def _top(module: str) -> str:
    """Return the outermost package of a module."""
    return module.partition(".")[0]


def is_installed(module: str) -> bool:
    """Return whether a module belongs to Python, to this package or to an installed library.

    Args:
        module: The module's full name.

    Example:
        >>> is_installed("json.decoder"), is_installed("__main__")
        (True, False)
    """
    top = _top(module)
    if top == "__main__":
        return False
    if top in sys.stdlib_module_names or top in ("privtune", "builtins"):
        return True
    loaded = sys.modules.get(module)
    file = str(getattr(loaded, "__file__", None) or "")
    return "site-packages" in file or "dist-packages" in file


def changed_parts(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names of parts with two different digests; a missing digest counts as no change.

    Args:
        before: Digests by the name of the part, with that of Python under ``python``.
        now: Likewise.

    Example:
        >>> before = {"python": "cpython-311.0", "the loss": "ab", "the score": ""}
        >>> changed_parts(before, {**before, "the loss": "cd", "the score": "ef"})
        ['the loss']
        >>> changed_parts(before, {"python": "cpython-312.0", "the loss": "cd"})
        []
    """
    # Another Python makes other instructions of the same code.
    if before.get("python") != now.get("python"):
        return []
    changes: list[str] = []
    for name, digest in before.items():
        digest_now = now.get(name)
        if digest and digest_now and digest_now != digest:
            changes.append(name)
    return changes
