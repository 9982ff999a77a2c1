"""Checks that a user's function keeps nothing of the records that pass through it.

The sensitivity of a sum is that of one record only where a record's loss, gradient or score depends on that
record alone. A function that remembers breaks this: a counter, a running mean, a cache. It may begin to use
what it kept long after a rehearsal has looked. So two things are compared around every pass over real
records:

* what the function can reach and could write to: closures, globals, attributes, caches, generators;
* what it gives for the same few records, bit for bit on a CPU, before the real records and after them.

The first shows memory before it is used. The second shows it wherever it is kept, files included.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import os
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import (
    CellType,
    CodeType,
    FunctionType,
    GeneratorType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from privtune.errors import PrivTuneError
from privtune.training.mechanism.data import blames_records
from privtune.training.mechanism.kernel import LossOf, fresh
from privtune.training.mechanism.streams import GLOBAL_GENERATOR

State: TypeAlias = dict[str, object]
"""What a function can reach and write to: values, sizes and digests by name."""

Value: TypeAlias = "str | torch.Tensor"
"""What a function gives for a record: a digest of its bits, or a few numbers where bits may vary."""

_MOST_PARTS = 20_000  # of a state: what lies deeper is compared by values alone
_SMALL = 4_096  # numbers of an array that are all compared; of a larger one, this many
_ATTEMPTS = 3  # another thread may draw meanwhile: only what moves each time is the function's
_TOLERANCE = 1e-4  # of sums on a GPU, whose order changes from run to run

# With a separator: privtune_lab beside privtune is the user's own.
_LIBRARIES = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_PRIVTUNE = str(Path(__file__).parents[2]) + os.sep
_MADE_UP = 2  # records that every evaluation begins with: those that follow may be real
_CACHE: Any = type(functools.lru_cache(len))
_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic)


class RecordMemoryError(PrivTuneError):
    """A loss or score depends on more than its record: it keeps something, or draws without torch.

    Its message names code alone, and no value that a record has.
    """


@dataclass(frozen=True)
class _Store:
    """Where a value is kept, and the code on the way from a user's function to it."""

    holder: object
    key: str = ""
    codes: frozenset[CodeType] = frozenset()

    @property
    def place(self) -> tuple[int, str]:
        return id(self.holder), self.key


_FILLED: dict[tuple[int, str], list[_Store]] = {}
"""Stores that records were kept in since Python began. They are held, so that no id comes twice."""


@dataclass
class MemoryCheck:
    """Compares a user's function before and after real records pass through it.

    Args:
        what: The function's name in messages, such as ``The loss``.
        functions: The function, and whatever else a pass runs: the model.
        evaluate: Gives, one by one, what the function gives for a few records that are always the same.
            The first two are made up.

    **Guarantee**: if :meth:`finish` returns, then what the function gives for these records had the same
    bits before and after all others (on a GPU: the same numbers up to rounding), and no state that the
    function reaches by name has changed.
    """

    what: str
    functions: Sequence[object]
    evaluate: Callable[[], Iterable[Value]]
    _values: list[Value] = field(default_factory=list)
    _state: State | None = None

    def begin(self) -> None:
        """Note what the function gives and reaches.

        Raises:
            RecordMemoryError: If it draws from Python's or NumPy's random numbers, or reaches what it has
                kept of an earlier run's records.
        """
        self._refuse_filled()
        for _ in range(_ATTEMPTS):
            before = _draws()
            self._values = []
            for value in self.evaluate():
                self._values.append(value)
                # Between: a mask that is computed once for all records is there by now, and is no
                # memory. What a real record leaves behind counts as memory already.
                if self._state is None and len(self._values) == _MADE_UP:
                    self._state = state_of(*self.functions)
            if _draws() == before:
                break
        else:
            raise RecordMemoryError(
                f"{self.what} draws from Python's random or from NumPy, whose numbers are no part of a "
                "training's own streams. Draw with torch."
            )
        if self._state is None:
            self._state = state_of(*self.functions)

    def finish(self) -> None:
        """Compare with what was noted.

        Raises:
            RecordMemoryError: If anything differs.
        """
        # A second time as well: a cache that begins late has not seen these records before the first.
        for _ in range(2):
            if not _agree(self._values, list(self.evaluate())):
                self._remember_changes()
                raise RecordMemoryError(
                    f"{self.what} of the same record is another one after other records than before them: "
                    f"it uses what it kept between calls. {_REMEDY}"
                )
        for name in self._remember_changes():
            raise RecordMemoryError(
                f"{self.what} changes {_title(name)!r}, which outlives the call, so what it gives for one "
                f"record may depend on other records. {_REMEDY}"
            )

    def _remember_changes(self) -> list[str]:
        """Return the names of what has changed; remember its stores until Python ends."""
        before = self._state or {}
        state = state_of(*self.functions)
        changes = [name for name in {**before, **state} if _differs(name, before, state)]
        if changes:
            stores = _walk(self.functions).stores
            for name in changes:
                for store in stores.get(name, ()):
                    _FILLED.setdefault(store.place, []).append(store)
        return changes

    def _refuse_filled(self) -> None:
        """Refuse what reaches, by the same code, a store that has records of an earlier run."""
        if not _FILLED:
            return
        for name, stores in _walk(self.functions).stores.items():
            for store in stores:
                for earlier in _FILLED.get(store.place, ()):
                    # A function that was written anew may reach what the earlier one had filled.
                    if not earlier.codes or store.codes & earlier.codes:
                        raise RecordMemoryError(
                            f"{self.what} reaches {_title(name)!r}, which has kept records of an "
                            "earlier run: restart Python, or make it anew."
                        )


def _title(name: str) -> str:
    """Return the part of a name that code says: a key of a table may be a record's value."""
    return name.partition("[")[0].partition(" (its ")[0].partition(" #")[0]


_REMEDY = (
    "Let it compute from the model and one record alone, without counters, lists, running means, caches of "
    "records or files."
)


@contextmanager
def remembering_nothing(check: MemoryCheck) -> Iterator[None]:
    """Compare a function before and after the block, through which real records pass."""
    check.begin()
    yield
    check.finish()


def gradients_of(
    loss_of: LossOf, model: nn.Module, records: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> Iterator[Value]:
    """Give loss and gradient of each record by itself, on the path of records taken one by one."""
    for x, y in records:
        yield _value(functools.partial(_gradient, loss_of, model, x, y))


def _gradient(
    loss_of: LossOf, model: nn.Module, x: torch.Tensor, y: torch.Tensor
) -> list[torch.Tensor]:
    module, loss = fresh(model, loss_of)
    params = [p for p in module.parameters() if p.requires_grad]
    with torch.enable_grad():
        value = loss(module, x, y)
        if not value.requires_grad:  # a branch on which no weight has a part
            return [value]
        gradients = torch.autograd.grad(value.sum(), params, allow_unused=True)
    return [value.detach(), *(g.to_dense() for g in gradients if g is not None)]


def values_of(
    run: Callable[[torch.Tensor, torch.Tensor], Sequence[torch.Tensor]],
    records: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> Iterator[Value]:
    """Give what a function gives for each record, without gradients."""
    for x, y in records:
        yield _value(functools.partial(run, x, y))


def _value(run: Callable[[], Sequence[torch.Tensor]]) -> Value:
    """Run a function with the same random numbers of torch's each time; return its value."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with GLOBAL_GENERATOR, torch.random.fork_rng(devices=devices):
        torch.random.manual_seed(0)
        try:
            tensors = run()
        except Exception as error:  # a record that raises does so each time
            if not blames_records(error):
                raise
            return type(error).__name__
    if any(tensor.device.type != "cpu" for tensor in tensors):
        norms = [torch.linalg.vector_norm(tensor.detach().double()) for tensor in tensors]
        return torch.stack(norms).cpu()
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> memoryview:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    # Copied: a tensor of one number may have a stride of 0, which no other type can view.
    whole = torch.empty(tensor.numel(), dtype=tensor.dtype)
    whole.copy_(tensor.reshape(-1))
    return whole.view(torch.uint8).numpy().data


def _agree(before: Sequence[Value], after: Sequence[Value]) -> bool:
    """Say whether two lists of values are the same."""
    for one, other in zip(before, after, strict=True):
        if isinstance(one, str) or isinstance(other, str):
            if not isinstance(one, str) or not isinstance(other, str) or one != other:
                return False
        elif one.shape != other.shape or not torch.allclose(
            one, other, rtol=_TOLERANCE, atol=1e-9, equal_nan=True
        ):
            return False
    return True


def _differs(name: str, before: State, after: State) -> bool:
    absent = object()
    return before.get(name, absent) != after.get(name, absent)


def _draws() -> tuple[object, ...]:
    """Return where the random numbers of Python and of NumPy are."""
    kind, words, *place = np.random.get_state(legacy=True)
    return random.getstate(), kind, np.asarray(words).tobytes(), *place


def state_of(*functions: object) -> State:
    """Return what functions can reach by name and could write to.

    Followed are closures, defaults, attributes, globals that a function names, classes and objects of the
    user's own, containers, caches, generators and random generators. Of a library's object that the user's
    code names itself, the public attributes are followed; inside of libraries nothing else is.
    """
    return _walk(functions).state


def _walk(functions: Sequence[object]) -> _StateWalk:
    walk = _StateWalk()
    for function in functions:
        walk.add(getattr(function, "__name__", type(function).__name__), function)
    walk.run()
    return walk


@dataclass(frozen=True)
class _Reached:
    """An object that a walk has reached, and how."""

    name: str
    value: Any
    store: _Store
    is_named: bool  # by the user's code itself, and not by way of another object


class _StateWalk:
    """Visits what a function can reach, each object once."""

    def __init__(self) -> None:
        self.state: State = {}
        self.stores: dict[str, list[_Store]] = {}
        self._visited: dict[int, object] = {}  # holds them, so that no id comes twice
        self._waiting: deque[_Reached] = deque()
        self._store = _Store(None)  # of the object that is visited
        self._holder: object = None
        self._is_users = False  # what it holds is the user's, as if code named it
        self._names: dict[str, int] = {}
        self._modules: set[tuple[int, int]] = set()

    def add(self, name: str, value: Any, store: _Store | None = None) -> None:
        """Note an object that is reached under a name; ``store`` is given where code names it itself."""
        is_named = store is not None or self._is_users
        store = store or _Store(self._holder, codes=self._store.codes)
        if isinstance(value, _PLAIN):
            self._note(name, (type(value).__name__, _text(value)), store)
        if not isinstance(value, _PLAIN) or getattr(value, "__dict__", None):
            self._waiting.append(_Reached(name, value, store, is_named))

    def run(self) -> None:
        """Visit what waits, until nothing is left or the state is large enough."""
        while self._waiting and len(self._visited) < _MOST_PARTS:
            reached = self._waiting.popleft()
            value = reached.value
            if id(value) in self._visited:
                continue
            self._visited[id(value)] = value
            self._store = reached.store
            self._holder = value
            self._is_users = reached.is_named and isinstance(value, dict | list | tuple | deque)
            try:
                self._visit(reached.name, value, reached.is_named)
            except Exception as error:  # of the user's own properties, lengths or texts
                self._note(f"{reached.name} (its error)", type(error).__name__)

    def _note(self, name: str, value: object, *stores: _Store) -> None:
        """Put a value into the state, under a name that nothing else has."""
        number = self._names.get(name, 0)
        self._names[name] = number + 1
        # Two counters of one name are two: else the second would hide the first.
        unique = f"{name} #{number}" if number else name
        self.state[unique] = value
        self.stores[unique] = [*stores] or [_Store(self._holder, codes=self._store.codes)]

    def _visit(self, name: str, value: Any, is_named: bool) -> None:
        summary = _summary(value)
        if summary is not None:
            whole = _Store(value, codes=self._store.codes)
            self._note(name, summary, self._store, whole)
            self._visit_attributes(name, value)
        elif isinstance(value, _PLAIN):
            self._visit_attributes(name, value)
        elif isinstance(value, FunctionType):
            self._visit_function(name, value)
        elif isinstance(value, MethodType):
            self.add(name, value.__func__)
            self.add(f"{name}.self", value.__self__, self._store if is_named else None)
        elif isinstance(value, functools.partial):
            self.add(name, value.func)
            self._visit_items(name, enumerate(value.args))
            self._visit_parts(name, value.keywords.items())
        elif isinstance(value, _CACHE):
            information = value.cache_info()  # hits are no memory: what is there stays as it is
            self._note(f"the cache of {name}", (information.misses, information.currsize))
            self.add(name, value.__wrapped__)
        elif isinstance(value, staticmethod | classmethod):
            self.add(name, value.__func__)
        elif isinstance(value, property):
            self.add(name, value.fget)
        elif isinstance(value, dict | MappingProxyType):
            self._note(f"{name} (its size)", len(value))
            self._visit_items(name, value.items())
            self._visit_attributes(name, value)
        elif isinstance(value, list | tuple | deque):
            self._note(f"{name} (its size)", len(value))
            self._visit_items(name, enumerate(value))
            self._visit_attributes(name, value)
        elif isinstance(value, GeneratorType):
            self._visit_generator(name, value)
        elif isinstance(value, type):
            self._visit_class(name, value)
        elif not isinstance(value, ModuleType):
            self._visit_object(name, value, is_named)

    def _visit_items(self, name: str, items: Iterable[tuple[Any, Any]]) -> None:
        for position, (key, value) in enumerate(list(items)):
            self.add(f"{name}[{_key(key, position)}]", value)

    def _visit_parts(self, name: str, items: Iterable[tuple[str, Any]]) -> None:
        for key, value in list(items):
            self.add(f"{name}.{key}", value)

    def _visit_attributes(self, name: str, value: Any) -> None:
        """Visit what was written onto an object that is compared whole: a tensor, a list of a class."""
        is_users = _is_users_class(type(value))
        for key, part in list(getattr(value, "__dict__", {}).items()):
            if is_users or not key.startswith("_"):
                self.add(f"{name}.{key}", part)

    def _visit_function(self, name: str, function: FunctionType) -> None:
        code = function.__code__
        users = _is_users(code.co_filename)
        is_followed = users or code.co_filename.startswith(_PRIVTUNE)
        codes = self._store.codes | {code} if users else self._store.codes
        self._store = _Store(function, codes=codes)
        for cell_name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._visit_cell(cell_name, cell, is_followed)
        if not is_followed:
            return
        named = _Store(function, codes=codes)
        for default in function.__defaults__ or ():
            self.add(f"a default of {name}", default, named)
        for key, value in {**(function.__kwdefaults__ or {}), **vars(function)}.items():
            self.add(f"{name}.{key}", value, named)
        if users:
            self._visit_globals(function.__globals__, _names(code))

    def _visit_cell(self, name: str, cell: CellType, is_followed: bool) -> None:
        try:
            content = cell.cell_contents
        except ValueError:  # not filled yet
            return
        # What a library's decorator holds is followed to the user's function only.
        if is_followed or callable(content):
            store = _Store(cell, codes=self._store.codes)
            self.add(name, content, store if is_followed else None)

    def _visit_globals(self, known: Mapping[str, Any], names: set[str]) -> None:
        for name in sorted(names):
            # A function may import what it uses by itself.
            value = known[name] if name in known else sys.modules.get(name)
            if isinstance(value, ModuleType):
                self._visit_module(name, value, names)
            elif name in known:
                self.add(name, value, _Store(known, name, self._store.codes))

    def _visit_module(self, name: str, module: ModuleType, names: set[str]) -> None:
        """Visit, of a module of the user's, the names that the function reads off something."""
        place = (id(module), id(self._holder))
        if not _is_users_module(module) or place in self._modules:
            return
        self._modules.add(place)
        for key, value in list(vars(module).items()):
            if key not in names or key == name:
                continue
            if isinstance(value, ModuleType):
                self._visit_module(f"{name}.{key}", value, names)
            else:
                self.add(f"{name}.{key}", value, _Store(vars(module), key, self._store.codes))

    def _visit_generator(self, name: str, generator: GeneratorType[Any, Any, Any]) -> None:
        frame = generator.gi_frame
        self._note(f"{name} (its place)", None if frame is None else frame.f_lasti)
        if frame is not None:
            self._visit_parts(name, frame.f_locals.items())

    def _visit_class(self, name: str, kind: type) -> None:
        if type(kind) is not type and _is_users_class(type(kind)):
            self.add(f"the class of {name}", type(kind))
        for part in kind.__mro__:
            if not _is_users_class(part):
                continue
            for key, value in list(vars(part).items()):
                if key not in _NO_STATE:
                    self.add(f"{part.__name__}.{key}", value, _Store(part, codes=self._store.codes))

    def _visit_object(self, name: str, value: Any, is_named: bool) -> None:
        kind = type(value)
        self.add(f"the class of {name}", kind)
        is_followed = _is_users_class(kind) or _is_ours(kind)
        if isinstance(value, nn.Module):
            for part in ("_modules", "_parameters", "_buffers"):
                self._visit_parts(name, vars(value).get(part, {}).items())
        if not is_followed:
            size = _size(value)
            if size is not None:
                self._note(f"{name} (its size)", size)
            if is_named:
                self._visit_public(name, value)
            return
        self._is_users = _is_users_class(kind)
        self._visit_parts(name, getattr(value, "__dict__", {}).items())
        for base in kind.__mro__:
            slots = getattr(base, "__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                attribute = _mangled(slot, base)
                if hasattr(value, attribute):
                    self.add(f"{name}.{slot}", getattr(value, attribute))

    def _visit_public(self, name: str, value: Any) -> None:
        """Visit what a library's object shows: its other attributes may be notes of the library's own."""
        for key, part in list(getattr(value, "__dict__", {}).items()):
            if key.startswith("_") or (key == "training" and isinstance(value, nn.Module)):
                continue
            if isinstance(part, (*_PLAIN, dict, list, deque, set, torch.Tensor, np.ndarray)):
                self.add(f"{name}.{key}", part)


def _text(value: object) -> str:
    """Return the text of a value; of one whose text raises, its class alone."""
    try:
        return repr(value)
    except Exception:  # whatever the user's own text does
        return type(value).__name__


def _key(key: object, position: int) -> str:
    """Return what a key of a table is called."""
    if isinstance(key, _PLAIN):
        return _text(key)
    if type(key) in (tuple, frozenset):
        return f"{position}: {_text(key)}" if _is_plain(key) else f"{position}"
    return f"{position}: {getattr(key, 'name', '')}" if isinstance(key, Enum) else f"{position}"


def _is_plain(parts: Any) -> bool:
    return all(isinstance(part, _PLAIN) for part in parts)


def _mangled(slot: str, kind: type) -> str:
    """Return the attribute that a slot of a class has."""
    is_private = slot.startswith("__") and not slot.endswith("__")
    return f"_{kind.__name__.lstrip('_')}{slot}" if is_private else slot


_NO_STATE = frozenset({"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__"})


def _names(code: CodeType) -> set[str]:
    """Return the names that a function and the functions within it look up."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names


def _is_users(file: str | None) -> bool:
    """Say whether a file of source is the user's own; what has none was typed in."""
    if file is None:
        return True
    in_packages = any(folder in Path(file).parts for folder in ("site-packages", "dist-packages"))
    return not in_packages and not file.startswith((*_LIBRARIES, _PRIVTUNE, "<frozen ", "<attrs"))


def _is_users_module(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if file is None:  # written in C, or else typed in
        return module.__name__ == "__main__" or getattr(module, "__spec__", None) is None
    return _is_users(file)


def _is_users_class(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    return module is None or _is_users_module(module)


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "privtune"


def _size(value: Any) -> int | None:
    """Return how many parts an object of a library's says that it has."""
    if isinstance(value, nn.Module) or not hasattr(type(value), "__len__"):
        return None
    try:
        return len(value)
    except Exception:  # whatever a library makes of it
        return None


def _summary(value: Any) -> object | None:
    """Return what stands for an object that is compared whole; None for one that has parts to visit."""
    if isinstance(value, torch.Tensor):
        version = None if value.is_inference() else value._version
        if value.layout is not torch.strided:
            return ("tensor", tuple(value.shape), version)
        return ("tensor", tuple(value.shape), str(value.dtype), version, _sampled(value))
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return ("array", value.shape, repr(value.ravel()[:_SMALL].tolist()))
        return ("array", value.shape, str(value.dtype), _digest(_few(value.ravel()).tobytes()))
    if isinstance(value, random.Random):
        return ("random numbers", hash(value.getstate()))
    if isinstance(value, np.random.Generator):
        return ("random numbers", repr(value.bit_generator.state))
    if isinstance(value, np.random.RandomState):
        return ("random numbers", repr(value.get_state(legacy=False)))
    if isinstance(value, torch.Generator):
        return ("random numbers", _digest(_bytes(value.get_state())))
    if isinstance(value, set | frozenset | bytearray):
        return (type(value).__name__, len(value), _text(value) if len(value) <= _SMALL else "")
    if isinstance(value, itertools.count):
        return ("count", repr(value))
    if isinstance(value, ContextVar):
        return ("context", repr(value.get(None)))
    if isinstance(value, io.BytesIO | io.StringIO) and not value.closed:
        return ("file", value.tell(), hash(value.getvalue()))
    if isinstance(value, io.IOBase):
        return ("file", _place(value))
    if hasattr(type(value), "__length_hint__") and hasattr(type(value), "__next__"):
        return ("iterator", value.__length_hint__())
    return _content(value)


def _content(value: Any) -> object | None:
    """Return what stands for the numbers of an array or a table of another library's; None without any."""
    if isinstance(value, type | _CACHE):
        return None
    if isinstance(value, np.poly1d):
        return _summary(value.coeffs)
    if type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "iloc"):
        few = value.iloc[:: max(1, len(value) // _SMALL)]
        return ("table", value.shape, _text(few.to_numpy().tolist()))
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError):  # it has no bytes to show
        return None
    return ("bytes", view.nbytes, _digest(bytes(view) if view.ndim != 1 else _few(view).tobytes()))


def _place(file: io.IOBase) -> int | None:
    if any(file is stream for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)):
        return None  # what is printed is no memory
    try:
        return file.tell()
    except (OSError, ValueError):  # closed, or a terminal
        return None


def _few(values: Any) -> Any:
    """Return all numbers of a small array, and as many of a large one, spread over it."""
    return values[:: max(1, len(values) // _SMALL)]


def _sampled(tensor: torch.Tensor) -> str:
    with torch.no_grad():
        return _digest(_bytes(_few(tensor.detach().reshape(-1))))


def _digest(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()
