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
from privtune.training.mechanism.streams import GLOBAL_GENERATOR, seed_global_generator

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
    """The error that a loss or score keeps something of its records, or draws without torch.

    Its message names code alone, and no value that a record has.

    It is raised before what was computed leaves the call: that may already hold what was kept.
    """


@dataclass(frozen=True)
class _Store:
    """A place where a value is kept, and the code of the functions that lead to it.

    Attributes:
        holder: The object that holds the value; kept alive, so that its id stays its own.
        key: Where in it, for globals and modules.
        codes: Of functions by way of which it is reached.
    """

    holder: object
    key: str = ""
    codes: frozenset[CodeType] = frozenset()

    @property
    def place(self) -> tuple[int, str]:
        """The key of the place: the holder's id, and the key within the holder."""
        return id(self.holder), self.key


_FILLED: dict[tuple[int, str], list[_Store]] = {}
"""Stores that records were kept in since Python began. They are held, so that no id comes twice."""


@dataclass
class MemoryCheck:
    """A comparison of a user's function before and after real records pass through it.

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
        """Note the function's values for a few records and the state that it reaches; refuse random draws.

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
        """Compare the function's values and state with those that :meth:`begin` noted.

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
        """Return the names of changed state, and mark their stores as filled until Python ends.

        A list that was filled is a danger to later runs as well, also where this one ends in an
        error.
        """
        before = self._state or {}
        state = state_of(*self.functions)
        names = {**before, **state}
        changes = [name for name in names if _differs(name, before, state)]
        if changes:
            stores = _walk(self.functions).stores
            for name in changes:
                for store in stores.get(name, ()):
                    _FILLED.setdefault(store.place, []).append(store)
        return changes

    def _refuse_filled(self) -> None:
        """Refuse a function that reaches a store in which an earlier run has kept records."""
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
    """Return the variable's part of a name, without keys of containers, which may be record values.

    A message leaves the trust boundary; it may hold names of variables, and no key that a record
    gave.
    """
    title, _, _ = name.partition("[")
    title, _, _ = title.partition(" (its ")
    title, _, _ = title.partition(" #")
    return title


_REMEDY = (
    "Let it compute from the model and one record alone, without counters, lists, running means, caches of "
    "records or files."
)


@contextmanager
def remembering_nothing(check: MemoryCheck) -> Iterator[None]:
    """Check that a function keeps no memory of the real records that pass inside the ``with`` block."""
    check.begin()
    yield
    check.finish()


def gradients_of(
    loss_of: LossOf,
    model: nn.Module,
    records: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> Iterator[Value]:
    """Yield a comparable value of each record's loss and gradients, computed record by record.

    Args:
        loss_of: The loss of records, one number each.
        model: It is left as it was.
        records: Inputs and targets, as batches of one.
    """
    for x, y in records:
        yield _value(functools.partial(_gradient, loss_of, model, x, y))


def _gradient(
    loss_of: LossOf,
    model: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
) -> list[torch.Tensor]:
    """Return the loss of a record and its gradient in each parameter that it reaches.

    A new copy of the model for each: what a pass writes to its model must not reach the next record.
    """
    module, loss = fresh(model, loss_of)
    params = [p for p in module.parameters() if p.requires_grad]
    with torch.enable_grad():
        value = loss(module, x, y)
        if not value.requires_grad:  # a branch on which no weight has a part
            return [value]
        gradients = torch.autograd.grad(value.sum(), params, allow_unused=True)
    tensors = [value.detach()]
    for gradient in gradients:
        if gradient is not None:
            tensors.append(gradient.to_dense())
    return tensors


def values_of(
    run: Callable[[torch.Tensor, torch.Tensor], Sequence[torch.Tensor]],
    records: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> Iterator[Value]:
    """Yield a comparable value of a function's tensors for each record, without gradients."""
    for x, y in records:
        yield _value(functools.partial(run, x, y))


def _value(run: Callable[[], Sequence[torch.Tensor]]) -> Value:
    """Run a function with fixed torch seeds; return a digest of its tensors, or their norms on a GPU.

    On a GPU sums differ from run to run, so norms are compared in place of bits. A record that raises
    is compared by the kind of its error.
    """
    if torch.cuda.is_available():
        devices = list(range(torch.cuda.device_count()))
    else:
        devices = []
    with GLOBAL_GENERATOR, torch.random.fork_rng(devices=devices):
        seed_global_generator(0)
        try:
            tensors = run()
        except Exception as error:  # a record that raises does so each time
            if not blames_records(error):
                raise
            return type(error).__name__
    if any(tensor.device.type != "cpu" for tensor in tensors):
        norms = []
        for tensor in tensors:
            numbers = tensor.detach().double()
            norms.append(torch.linalg.vector_norm(numbers))
        return torch.stack(norms).cpu()
    digest = hashlib.sha256()
    for tensor in tensors:
        shape = tuple(tensor.shape)
        digest.update(f"{tensor.dtype} {shape}".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU, whatever its layout."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    # Copied: a tensor of one number may have a stride of 0, which no other type can view.
    dense = torch.empty(tensor.numel(), dtype=tensor.dtype)
    dense.copy_(tensor.reshape(-1))
    return dense.view(torch.uint8).numpy().data


def _agree(before: Sequence[Value], after: Sequence[Value]) -> bool:
    """Say whether two lists of values are the same.

    Digests must be equal; numbers may differ by rounding, and NaN is like NaN.
    """
    pairs = zip(before, after, strict=True)
    return all(_agrees(one, other) for one, other in pairs)


def _agrees(one: Value, other: Value) -> bool:
    """Say whether two values of a record agree: equal digests, or norms equal up to rounding."""
    if isinstance(one, str) or isinstance(other, str):
        return isinstance(one, str) and isinstance(other, str) and one == other
    if one.shape != other.shape:
        return False
    return torch.allclose(
        one,
        other,
        rtol=_TOLERANCE,
        atol=1e-9,
        equal_nan=True,
    )


def _differs(name: str, before: State, after: State) -> bool:
    """Say whether a name's value differs between two states, or is missing in one."""
    absent = object()
    return before.get(name, absent) != after.get(name, absent)


def _draws() -> tuple[object, ...]:
    """Return the states of Python's and NumPy's random generators."""
    of_python = random.getstate()
    kind, words, *place = np.random.get_state(legacy=True)
    bits = np.asarray(words).tobytes()
    return of_python, kind, bits, *place


def state_of(*functions: object) -> State:
    """Return the state that functions can reach by name and change.

    Followed are closures, defaults, attributes, globals that a function names, classes and objects of the
    user's own, containers, caches, generators and random generators. Of a library's object that the user's
    code names itself, the public attributes are followed; inside of libraries nothing else is.
    """
    return _walk(functions).state


def _walk(functions: Sequence[object]) -> _StateWalk:
    """Return a finished walk over all objects that some functions can reach."""
    walk = _StateWalk()
    for function in functions:
        kind = type(function).__name__
        walk.add(getattr(function, "__name__", kind), function)
    walk.run()
    return walk


@dataclass(frozen=True)
class _Reached:
    """An object that a walk has reached, with its name and its store."""

    name: str
    value: Any
    store: _Store
    is_named: bool  # by the user's code itself, and not by way of another object


class _StateWalk:
    """A walk over all objects that functions can reach, breadth first, each object once.

    Breadth first, so that what a function names itself is compared even where a state is too large to
    be walked to its end.

    Attributes:
        state: Values by the names on the way to them.
        stores: Where each lies, by the same names.
    """

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

    def add(
        self,
        name: str,
        value: Any,
        store: _Store | None = None,
    ) -> None:
        """Note a plain value under its name, or queue an object to be visited.

        Args:
            name: Of the object, as a message may say it.
            value: The object.
            store: Where it lies, given where code names it itself; None for within what is visited.
        """
        is_named = store is not None or self._is_users
        store = store or _Store(self._holder, codes=self._store.codes)
        if isinstance(value, _PLAIN):
            kind = type(value).__name__
            self._note(name, (kind, _text(value)), store)
        if not isinstance(value, _PLAIN) or getattr(value, "__dict__", None):
            self._waiting.append(_Reached(name, value, store, is_named))

    def run(self) -> None:
        """Visit queued objects until none is left or the state is large enough."""
        while self._waiting and len(self._visited) < _MOST_PARTS:
            reached = self._waiting.popleft()
            value = reached.value
            if id(value) in self._visited:
                continue
            self._visited[id(value)] = value
            self._store = reached.store
            self._holder = value
            is_container = isinstance(value, dict | list | tuple | deque)
            self._is_users = reached.is_named and is_container
            try:
                self._visit(reached.name, value, reached.is_named)
            except Exception as error:  # of the user's own properties, lengths or texts
                self._note(f"{reached.name} (its error)", type(error).__name__)

    def _note(
        self,
        name: str,
        value: object,
        *stores: _Store,
    ) -> None:
        """Store a value in the state under its name, with a number added if the name is taken."""
        number = self._names.get(name, 0)
        self._names[name] = number + 1
        # Two counters of one name are two: else the second would hide the first.
        unique = f"{name} #{number}" if number else name
        self.state[unique] = value
        if not stores:
            stores = (_Store(self._holder, codes=self._store.codes),)
        self.stores[unique] = list(stores)

    def _visit(
        self,
        name: str,
        value: Any,
        is_named: bool,
    ) -> None:
        """Note one object in the state, or visit its parts, depending on its kind.

        The kinds follow each other from what is compared as a whole (arrays, generators) to what is
        walked through.

        Args:
            name: Under which it was reached.
            value: The object.
            is_named: Whether the user's code names it itself.
        """
        summary = _summary(value)
        if summary is not None:
            store = _Store(value, codes=self._store.codes)
            self._note(name, summary, self._store, store)
            self._visit_attributes(name, value)
        elif isinstance(value, _PLAIN):
            self._visit_attributes(name, value)
        elif isinstance(value, FunctionType):
            self._visit_function(name, value)
        elif isinstance(value, MethodType):
            self.add(name, value.__func__)
            place = self._store if is_named else None
            self.add(f"{name}.self", value.__self__, place)
        elif isinstance(value, functools.partial):
            self.add(name, value.func)
            self._visit_items(name, enumerate(value.args))
            self._visit_parts(name, value.keywords.items())
        elif isinstance(value, _CACHE):
            information = value.cache_info()
            # Hits are no memory: what is there stays as it is.
            sizes = (information.misses, information.currsize)
            self._note(f"the cache of {name}", sizes)
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
        """Queue the entries of a container, named by key or position."""
        for position, (key, value) in enumerate(list(items)):
            word = _key(key, position)
            self.add(f"{name}[{word}]", value)

    def _visit_parts(self, name: str, items: Iterable[tuple[str, Any]]) -> None:
        """Queue attributes or arguments, named ``name.key``."""
        for key, value in list(items):
            self.add(f"{name}.{key}", value)

    def _visit_attributes(self, name: str, value: Any) -> None:
        """Queue the attributes of an object whose other contents are compared as a whole."""
        is_users = _is_users_class(type(value))
        for key, part in list(getattr(value, "__dict__", {}).items()):
            if is_users or not key.startswith("_"):
                self.add(f"{name}.{key}", part)

    def _visit_function(self, name: str, function: FunctionType) -> None:
        """Queue a function's closure, defaults and attributes, and the globals that a user's code names.

        A function of PrivTune's is followed through its closure to the user's; its globals are ours
        and are not.
        """
        code = function.__code__
        users = _is_users(code.co_filename)
        is_followed = users or code.co_filename.startswith(_PRIVTUNE)
        if users:
            codes = self._store.codes | {code}
        else:
            codes = self._store.codes
        self._store = _Store(function, codes=codes)
        cells = function.__closure__ or ()
        for cell_name, cell in zip(code.co_freevars, cells, strict=True):
            self._visit_cell(cell_name, cell, is_followed)
        if not is_followed:
            return
        store = _Store(function, codes=codes)
        for default in function.__defaults__ or ():
            self.add(f"a default of {name}", default, store)
        defaults_by_name = function.__kwdefaults__ or {}
        attributes = {**defaults_by_name, **vars(function)}
        for key, value in attributes.items():
            self.add(f"{name}.{key}", value, store)
        if users:
            self._visit_globals(function.__globals__, _names(code))

    def _visit_cell(
        self,
        name: str,
        cell: CellType,
        is_followed: bool,
    ) -> None:
        """Queue the content of one closure cell; of a library's cell, only if it can be called."""
        try:
            content = cell.cell_contents
        except ValueError:  # not filled yet
            return
        # What a library's decorator holds is followed to the user's function only.
        if is_followed or callable(content):
            store = _Store(cell, codes=self._store.codes)
            self.add(name, content, store if is_followed else None)

    def _visit_globals(self, variables: Mapping[str, Any], names: set[str]) -> None:
        """Queue the globals that a function's code names, and the contents of user modules among them.

        Names are read off the compiled code, so a name that is built at run time is not seen; values
        are compared for that reason, too.
        """
        for name in sorted(names):
            # A function may import what it uses by itself.
            if name in variables:
                value = variables[name]
            else:
                value = sys.modules.get(name)
            if isinstance(value, ModuleType):
                self._visit_module(name, value, names)
            elif name in variables:
                store = _Store(variables, name, self._store.codes)
                self.add(name, value, store)

    def _visit_module(
        self,
        name: str,
        module: ModuleType,
        names: set[str],
    ) -> None:
        """Queue the variables of a user's module that the function's code names."""
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
                store = _Store(vars(module), key, self._store.codes)
                self.add(f"{name}.{key}", value, store)

    def _visit_generator(self, name: str, generator: GeneratorType[Any, Any, Any]) -> None:
        """Note the position of a generator, and queue its local variables."""
        frame = generator.gi_frame
        if frame is None:  # it is at its end
            self._note(f"{name} (its place)", None)
            return
        self._note(f"{name} (its place)", frame.f_lasti)
        self._visit_parts(name, frame.f_locals.items())

    def _visit_class(self, name: str, kind: type) -> None:
        """Queue the attributes of a class and of its user-defined base classes."""
        if type(kind) is not type and _is_users_class(type(kind)):
            self.add(f"the class of {name}", type(kind))
        for part in kind.__mro__:
            if not _is_users_class(part):
                continue
            for key, value in list(vars(part).items()):
                if key not in _NO_STATE:
                    store = _Store(part, codes=self._store.codes)
                    self.add(f"{part.__name__}.{key}", value, store)

    def _visit_object(
        self,
        name: str,
        value: Any,
        is_named: bool,
    ) -> None:
        """Queue the attributes of an object: all of a user's, only public ones of a library's.

        Of a module of torch's, parts, parameters and buffers are walked whoever wrote it: a running
        mean is a buffer.
        """
        kind = type(value)
        self.add(f"the class of {name}", kind)
        is_followed = _is_users_class(kind) or _is_ours(kind)
        if isinstance(value, nn.Module):
            for part in ("_modules", "_parameters", "_buffers"):
                children = vars(value).get(part, {})
                self._visit_parts(name, children.items())
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
            if isinstance(slots, str):
                slots = (slots,)
            for slot in slots:
                attribute = _mangled(slot, base)
                if hasattr(value, attribute):
                    self.add(f"{name}.{slot}", getattr(value, attribute))

    def _visit_public(self, name: str, value: Any) -> None:
        """Queue the public attributes of a library's object."""
        kinds = (*_PLAIN, dict, list, deque, set, torch.Tensor, np.ndarray)
        is_module = isinstance(value, nn.Module)
        for key, part in list(getattr(value, "__dict__", {}).items()):
            if key.startswith("_") or (key == "training" and is_module):
                continue
            if isinstance(part, kinds):
                self.add(f"{name}.{key}", part)


def _text(value: object) -> str:
    """Return the ``repr`` of a value, or its class name if ``repr`` raises."""
    try:
        return repr(value)
    except Exception:  # whatever the user's own text does
        return type(value).__name__


def _key(key: object, position: int) -> str:
    """Return the text of a container's key for names, or the position if the key is no plain value."""
    if isinstance(key, _PLAIN):
        return _text(key)
    if type(key) in (tuple, frozenset):
        if _is_plain(key):
            return f"{position}: {_text(key)}"
        return f"{position}"
    if isinstance(key, Enum):
        return f"{position}: {getattr(key, 'name', '')}"
    return f"{position}"


def _is_plain(parts: Any) -> bool:
    """Say whether all parts are plain: numbers, texts, bytes or None."""
    return all(isinstance(part, _PLAIN) for part in parts)


def _mangled(slot: str, kind: type) -> str:
    """Return the attribute name of a slot, with Python's mangling of private names."""
    is_private = slot.startswith("__") and not slot.endswith("__")
    if is_private:
        return f"_{kind.__name__.lstrip('_')}{slot}"
    return slot


_NO_STATE = frozenset({"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__"})


def _names(code: CodeType) -> set[str]:
    """Return the global and attribute names in a function's code, inner functions included.

    Those within may be the ones that write.
    """
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names


def _is_users(file: str | None) -> bool:
    """Say whether a source file is the user's own: not in Python, an installed package, or PrivTune.

    By where its file lies: neither in Python, in an installed package, nor in PrivTune.
    """
    if file is None:
        return True
    folders = Path(file).parts
    if "site-packages" in folders or "dist-packages" in folders:
        return False
    libraries = (*_LIBRARIES, _PRIVTUNE, "<frozen ", "<attrs")
    return not file.startswith(libraries)


def _is_users_module(module: ModuleType) -> bool:
    """Say whether a module is the user's own."""
    file = getattr(module, "__file__", None)
    if file is None:  # written in C, or else typed in
        return module.__name__ == "__main__" or getattr(module, "__spec__", None) is None
    return _is_users(file)


def _is_users_class(kind: type) -> bool:
    """Say whether a class is the user's own."""
    module = sys.modules.get(kind.__module__)
    return module is None or _is_users_module(module)


def _is_ours(kind: type) -> bool:
    """Say whether a class is PrivTune's."""
    return kind.__module__.partition(".")[0] == "privtune"


def _size(value: Any) -> int | None:
    """Return the length that a library's object reports, or None if it has none."""
    if isinstance(value, nn.Module) or not hasattr(type(value), "__len__"):
        return None
    try:
        return len(value)
    except Exception:  # whatever a library makes of it
        return None


def _summary(value: Any) -> object | None:
    """Return a comparable summary of an object compared as a whole; None for one with parts to visit.

    A tensor's version counts writes to it, so one that was written to and put back shows as well. Of
    large arrays some numbers are compared, spread over it.
    """
    if isinstance(value, torch.Tensor):
        version = None if value.is_inference() else value._version
        shape = tuple(value.shape)
        if value.layout is not torch.strided:
            return ("tensor", shape, version)
        return ("tensor", shape, str(value.dtype), version, _sampled(value))
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            first = value.ravel()[:_SMALL]
            return ("array", value.shape, repr(first.tolist()))
        few = _few(value.ravel())
        return ("array", value.shape, str(value.dtype), _digest(few.tobytes()))
    if isinstance(value, random.Random):
        return ("random numbers", hash(value.getstate()))
    if isinstance(value, np.random.Generator):
        return ("random numbers", repr(value.bit_generator.state))
    if isinstance(value, np.random.RandomState):
        return ("random numbers", repr(value.get_state(legacy=False)))
    if isinstance(value, torch.Generator):
        return ("random numbers", _digest(_bytes(value.get_state())))
    if isinstance(value, set | frozenset | bytearray):
        text = ""
        if len(value) <= _SMALL:
            text = _text(value)
        return (type(value).__name__, len(value), text)
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
    """Return a summary of a pandas table's or a buffer's contents; None for any other object.

    Of a table of pandas some rows are compared, of anything else the bytes that it shows.
    """
    if isinstance(value, type | _CACHE):
        return None
    if isinstance(value, np.poly1d):
        return _summary(value.coeffs)
    package, _, _ = type(value).__module__.partition(".")
    if package == "pandas" and hasattr(value, "iloc"):
        apart = max(1, len(value) // _SMALL)
        rows = value.iloc[::apart].to_numpy()
        return ("table", value.shape, _text(rows.tolist()))
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError):  # it has no bytes to show
        return None
    if view.ndim == 1:
        content = _few(view).tobytes()
    else:
        content = bytes(view)
    return ("bytes", view.nbytes, _digest(content))


def _place(file: io.IOBase) -> int | None:
    """Return the position of an open file; None for standard streams and closed files."""
    streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    if any(file is stream for stream in streams):
        return None
    try:
        return file.tell()
    except (OSError, ValueError):  # closed, or a terminal
        return None


def _few(values: Any) -> Any:
    """Return all numbers of a small array, or about ``_SMALL`` evenly spaced ones of a large array."""
    apart = max(1, len(values) // _SMALL)
    return values[::apart]


def _sampled(tensor: torch.Tensor) -> str:
    """Return a digest of evenly spaced numbers of a tensor."""
    with torch.no_grad():
        flat = tensor.detach().reshape(-1)
        few = _few(flat)
        return _digest(_bytes(few))


def _digest(content: bytes | memoryview) -> str:
    """Return the SHA-256 of some bytes."""
    return hashlib.sha256(content).hexdigest()
