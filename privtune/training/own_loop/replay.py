"""Whether the losses of a batch are functions of their own records: by replaying their computation.

Every operation between the batch that a loop was handed and the losses that it hands back is
written down, those that autograd does not see included. It is then run again on a batch in which
some records were replaced by others: whatever the kept records' losses do not keep, they have from
the replaced ones.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten, tree_unflatten

from privtune.training.own_loop.weights import LoopError, overlaps, storage_of

__all__ = ["HELD", "Following", "Held", "Recording", "overlaps", "storage_of"]

_aten = torch.ops.aten
_SHAPES_ALONE = frozenset(
    (
        _aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like,
        _aten.randn_like, _aten.randint_like, _aten.new_empty, _aten.new_zeros, _aten.new_ones,
        _aten.new_full, _aten.sym_size,
    )
)  # fmt: skip
"""Operations that look at nothing of a tensor but its shape and type."""


@dataclass(frozen=True, eq=False)
class _Call:
    """One operation: what it was called with, what it gave, and the state that it drew from."""

    func: Any
    flat: list[Any]
    spec: Any
    out: list[Any]
    drawn_from: torch.Generator | None
    state: torch.Tensor | None
    written: tuple[torch.Tensor, ...]


class Held:
    """The memory that holds something of batches that were read, as long as somebody keeps it."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}
        self._lock = threading.Lock()

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in self._kept

    def __deepcopy__(self, _: object) -> Held:
        return self  # of the process, whoever copies a loop

    def add(self, tensor: torch.Tensor) -> None:
        """Note a tensor's memory, by a weak reference: until it is dropped, its number is not reused."""
        weak = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        with self._lock:
            self._kept[storage_of(tensor)] = weak

    def alive(self) -> set[int]:
        """Return the storages that are kept by anybody; forget the others."""
        with self._lock:
            self._kept = {key: weak for key, weak in self._kept.items() if not weak.expired()}
            return set(self._kept)


HELD = Held()
"""Of all loops of this process: a trial may not look at what another has kept of its batches, either."""


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that is entered and left by calls, since a loop's batches are no ``with`` statement."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._open = False

    def start(self) -> None:
        """Begin to record."""
        self.__enter__()  # type: ignore[no-untyped-call]
        self._open = True

    def stop(self) -> None:
        """Record no more.

        Raises:
            LoopError: If the loop has opened a dispatch mode of its own in between.
        """
        if not self._open:
            return
        if _get_current_dispatch_mode() is not self:
            raise LoopError(
                "A torch dispatch mode was entered between a batch and its step, so the step cannot "
                "be checked. Close it before the step, or compute the losses by private.step(batch, "
                "loss_of)."
            )
        self._open = False
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class Following(_Watching):  # type: ignore[no-untyped-call]
    """Follows what is computed from batches, and keeps nothing of it but where it lies.

    Args:
        held: Memory that holds something of a batch; what is found is added.
    """

    def __init__(self, held: Held) -> None:
        super().__init__()
        self._held = held

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one call, and note what it made of a batch."""
        out = func(*args, **(kwargs or {}))
        given = [v for v in tree_flatten((args, kwargs or {}))[0] if isinstance(v, torch.Tensor)]
        if func.overloadpacket in _SHAPES_ALONE or all(t not in self._held for t in given):
            return out
        written = _written(func, args, kwargs or {}) if func._schema.is_mutable else ()
        for tensor in (*tree_flatten(out)[0], *written):
            if isinstance(tensor, torch.Tensor):
                self._held.add(tensor)
        return out


class Recording(_Watching):  # type: ignore[no-untyped-call]
    """Writes down the operations of the thread that entered it.

    Args:
        x: Inputs of the batch.
        y: Targets of the batch; a copy of both, as they were, is ``given``.
    """

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        super().__init__()
        self.x, self.y = x, y
        self.given = (x.detach().clone(), y.detach().clone())
        self.calls: list[_Call] = []
        self._made: set[int] = set()
        self._before: dict[int, torch.UntypedStorage] = {}
        self._kept: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note one call and run it."""
        flat, spec = tree_flatten((args, kwargs or {}))
        source = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            given_one = [v for v in flat if isinstance(v, torch.Generator)]
            source = given_one[0] if given_one else torch.default_generator
        state = None if source is None else source.get_state()
        written: tuple[torch.Tensor, ...] = ()
        if func._schema.is_mutable:
            written = tuple(_written(func, args, kwargs or {}))
            for tensor in written:
                self._keep_contents(tensor)
        out = func(*args, **(kwargs or {}))
        results = tree_flatten(out)[0]
        given = {t.untyped_storage().data_ptr() for t in flat if isinstance(t, torch.Tensor)}
        for result in results:
            if isinstance(result, torch.Tensor):
                address = result.untyped_storage().data_ptr()
                if address not in given:
                    self._made.add(address)
        self.calls.append(_Call(func, flat, spec, results, source, state, written))
        return out

    def _keep_contents(self, tensor: torch.Tensor) -> None:
        """Keep what a tensor from outside of the recording held before it is written over."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._made and address not in self._before:
            self._before[address] = storage.clone()  # type: ignore[no-untyped-call]
            self._kept.append(tensor)

    def touched(self, storages: Iterable[int]) -> set[int]:
        """Return the storages whose contents were computed from those of others, those included."""
        known = set(storages)
        for call in self.calls:
            if call.func.overloadpacket in _SHAPES_ALONE:
                continue
            if any(storage_of(v) in known for v in call.flat if isinstance(v, torch.Tensor)):
                known.update(storage_of(v) for v in call.out if isinstance(v, torch.Tensor))
                known.update(storage_of(v) for v in call.written)
        return known

    def from_batch(self) -> set[int]:
        """Return the storages of the batch and of what was computed from it."""
        return self.touched((storage_of(self.x), storage_of(self.y)))

    def lying_in(self, storages: Collection[int]) -> Iterator[torch.Tensor]:
        """Yield the tensors that lie in some storages."""
        for call in self.calls:
            for value in (*call.flat, *call.out):
                if isinstance(value, torch.Tensor) and storage_of(value) in storages:
                    yield value

    def made(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor was made by what was recorded, or is the batch's."""
        return tensor is self.x or tensor is self.y or _address(tensor) in self._made

    def sources(self) -> Iterator[torch.Tensor]:
        """Yield the tensors from outside of the recording that were read."""
        made = {id(self.x), id(self.y)}
        for call in self.calls:
            for value in call.flat:
                if isinstance(value, torch.Tensor) and id(value) not in made:
                    yield value
            made.update(id(value) for value in call.out)

    def readers_of_numbers(self) -> Iterator[torch.Tensor]:
        """Yield what was computed with a number of Python's that was read from the batch.

        Numbers that are whole are passed over: they are lengths, classes and the like.
        """
        held = self.from_batch()
        numbers: set[float] = set()
        for call in self.calls:
            values = {v for v in call.flat if isinstance(v, float)}
            values |= {v.item() for v in call.flat if _is_number(v) and not self.made(v)}
            if values & numbers:
                yield from (v for v in call.out if isinstance(v, torch.Tensor))
            if call.func.overloadpacket is torch.ops.aten._local_scalar_dense:
                (value,) = call.out
                if storage_of(call.flat[0]) in held and not float(value).is_integer():
                    numbers.add(value)

    def numbers_read(self) -> set[float]:
        """Return the numbers that were read from the batch into Python, whole ones apart."""
        held = self.from_batch()
        reads = torch.ops.aten._local_scalar_dense
        return {
            float(call.out[0])
            for call in self.calls
            if call.func.overloadpacket is reads
            and storage_of(call.flat[0]) in held
            and not float(call.out[0]).is_integer()
        }

    def factors_of(self, losses: torch.Tensor) -> set[int]:
        """Return which operations behind the losses multiply or divide by how many they are."""
        size, found, needed = len(losses), set(), {id(losses)}
        for place, call in reversed(list(enumerate(self.calls))):
            if needed.isdisjoint(id(value) for value in call.out):
                continue
            needed.update(id(value) for value in call.flat if isinstance(value, torch.Tensor))
            if getattr(call.func, "overloadpacket", None) in (_aten.mul, _aten.div):
                numbers = (v for v in call.flat if isinstance(v, int | float))
                if any(v and (v == size or abs(v * size - 1.0) < 1e-6) for v in numbers):
                    found.add(place)
        return found

    def program(self, losses: torch.Tensor, weights: int) -> tuple[Hashable, ...]:
        """Return what the losses were computed by: operations, and what they read beside the batch.

        Args:
            losses: Made by it.
            weights: The storage of the weights, which are not looked at.
        """
        needed, found = {storage_of(losses)}, list[Hashable]()
        known = {storage_of(self.x): -1, storage_of(self.y): -1, weights: -1}
        for place, call in enumerate(self.calls):
            for tensor in (*_tensors(call.out), *call.written):
                known.setdefault(storage_of(tensor), place)
        for place, call in reversed(list(enumerate(self.calls))):
            written = (*_tensors(call.out), *call.written)
            if needed.isdisjoint(map(storage_of, written)):
                continue
            looked_at = call.func.overloadpacket not in _SHAPES_ALONE
            if looked_at:
                needed.update(map(storage_of, _tensors(call.flat)))
            told = (
                _told(value, looked_at and known.get(storage_of(value), place) >= place)
                if isinstance(value, torch.Tensor)
                else repr(value)
                if isinstance(value, int | float | complex)
                else type(value).__name__
                for value in call.flat
            )
            found.append((str(call.func), *told))
        return tuple(found)

    def replay(self, x: torch.Tensor, y: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
        """Return the losses of another batch of the same shape, computed in the same way."""
        known: dict[int, Any] = {id(self.x): x, id(self.y): y}
        storages: dict[int, torch.UntypedStorage] = {
            address: storage.clone()  # type: ignore[no-untyped-call]
            for address, storage in self._before.items()
        }

        def new(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) not in known:
                storage = storages.get(value.untyped_storage().data_ptr())
                known[id(value)] = (
                    value.detach()
                    if storage is None
                    else value.new_empty(0).set_(
                        storage, value.storage_offset(), value.shape, value.stride()
                    )
                )
            return known[id(value)]

        now = {c.drawn_from: c.drawn_from.get_state() for c in self.calls if c.drawn_from}
        try:
            with torch.no_grad():
                for call in self.calls:
                    if call.drawn_from is not None and call.state is not None:
                        call.drawn_from.set_state(call.state)
                    args, kwargs = tree_unflatten([new(value) for value in call.flat], call.spec)
                    results = tree_flatten(call.func(*args, **kwargs))[0]
                    for before, after in zip(call.out, results, strict=True):
                        if isinstance(before, torch.Tensor):
                            known[id(before)] = after
        finally:
            for generator, state in now.items():
                generator.set_state(state)
        found: torch.Tensor = known[id(losses)]
        return found


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    return (value for value in values if isinstance(value, torch.Tensor))


def _told(tensor: torch.Tensor, whole: bool) -> Hashable:
    """Return what tells a tensor's contents apart, where they are to be looked at."""
    if not whole or tensor.is_complex():
        return None
    numbers = tensor.detach().double().nan_to_num().flatten()
    places = torch.arange(len(numbers), dtype=numbers.dtype, device=numbers.device)
    return (float(numbers.sum()), float(torch.dot(numbers, places.cos())))


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0 and value.is_floating_point()


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that a call writes over."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (v for v in tree_flatten(value)[0] if isinstance(v, torch.Tensor))
