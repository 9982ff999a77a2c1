"""Whether the losses of a batch are functions of their own records: by replaying their computation.

Every operation between the batch that a loop was handed and the losses that it hands back is
written down, those that autograd does not see included. It is then run again on a batch in which
some records were replaced by others: whatever the kept records' losses do not keep, they have from
the replaced ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten, tree_unflatten

from privtune.training.weights import LoopError

__all__ = ["Recording", "refuse_coupled"]

_TOLERANCE = 2e-6  # a row of a product has the same bits whatever stands in the others, or nearly


@dataclass(frozen=True, eq=False)
class _Call:
    """One operation: what it was called with, what it gave, and the state that it drew from."""

    func: Any
    flat: list[Any]
    spec: Any
    out: list[Any]
    drawn_from: torch.Generator | None
    state: torch.Tensor | None


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down the operations of the thread that entered it.

    Args:
        x: Inputs of the batch.
        y: Targets of the batch.
    """

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.x, self.y = x, y
        self.calls: list[_Call] = []
        self._made: set[int] = set()
        self._before: dict[int, torch.UntypedStorage] = {}
        self._kept: list[Any] = []
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
        if func._schema.is_mutable:
            for tensor in _written(func, args, kwargs or {}):
                self._keep_contents(tensor)
        out = func(*args, **(kwargs or {}))
        results = tree_flatten(out)[0]
        given = {t.untyped_storage().data_ptr() for t in flat if isinstance(t, torch.Tensor)}
        for result in results:
            if isinstance(result, torch.Tensor):
                address = result.untyped_storage().data_ptr()
                if address not in given:
                    self._made.add(address)
        self.calls.append(_Call(func, flat, spec, results, source, state))
        return out

    def _keep_contents(self, tensor: torch.Tensor) -> None:
        """Keep what a tensor from outside of the recording held before it is written over."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._made and address not in self._before:
            self._before[address] = storage.clone()  # type: ignore[no-untyped-call]
            self._kept.append(tensor)

    def reached(self, losses: torch.Tensor) -> bool:
        """Say whether the losses were computed from the batch at all."""
        touched = {id(self.x), id(self.y)}
        for call in self.calls:
            if any(id(value) in touched for value in call.flat):
                touched.update(id(value) for value in call.out)
                if call.func._schema.is_mutable:
                    touched.update(id(v) for v in call.flat if isinstance(v, torch.Tensor))
        return id(losses) in touched

    def sources(self) -> Iterator[torch.Tensor]:
        """Yield the tensors from outside of the recording that were read."""
        made = {id(self.x), id(self.y)}
        for call in self.calls:
            for value in call.flat:
                if isinstance(value, torch.Tensor) and id(value) not in made:
                    yield value
            made.update(id(value) for value in call.out)

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


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that a call writes over."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (v for v in tree_flatten(value)[0] if isinstance(v, torch.Tensor))


def refuse_coupled(
    recording: Recording,
    losses: torch.Tensor,
    *,
    earlier: Sequence[torch.Tensor],
    generator: torch.Generator,
) -> None:
    """Refuse losses that are not functions of their own record, or of no record of the batch.

    Args:
        recording: What happened between the batch and the losses; stopped.
        losses: Shape ``[B]``.
        earlier: Inputs and targets of earlier batches, as far as they still live.
        generator: Chooses the records that are replaced.

    Raises:
        LoopError: If they are coupled, do not come from the batch, or read an earlier one.

    **Guarantee**: the records are split at random in two, and each half is replaced in turn: what a
    record does to any of the other half is found, through whatever operations of torch it goes. What
    leaves torch (NumPy, Python's numbers) is taken for a constant.
    """
    if not recording.reached(losses):
        raise LoopError(
            "The losses were not computed from the batch that the loop was handed: likely from a "
            "batch of before, or outside of torch. Hand back the losses of this batch's records, or "
            "use private.step(batch, loss_of)."
        )
    old = {tensor.untyped_storage().data_ptr() for tensor in earlier}
    if any(t.untyped_storage().data_ptr() in old for t in recording.sources()):
        raise LoopError(
            "The losses read the records of an earlier batch, which this step does not charge. A "
            "step may look at the records of its own batch alone."
        )
    size = len(losses)
    if size < 2:
        return
    kept = losses.detach()
    order = torch.randperm(size, generator=generator)
    half = size // 2
    for replaced, left in ((order[:half], order[half:]), (order[half:], order[:half])):
        others = torch.ones(size, dtype=torch.bool)
        others[replaced] = False
        source = left[torch.arange(len(replaced)) % len(left)]
        x, y = recording.x.detach().clone(), recording.y.detach().clone()
        x[replaced], y[replaced] = x[source], y[source]
        found = recording.replay(x, y, losses)
        others = others.to(found.device)
        a, b = found[others].double(), kept[others].double()
        if not torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE * _size(b), equal_nan=True):
            raise LoopError(
                "The loss of a record changes with the other records of its batch, so one record "
                "moves a step by more than its plan charges. Likely: batch statistics (a mean over "
                "the batch, batch_norm, softmax over dim 0), mixup, a contrastive loss, or a buffer "
                "that averages what it sees. Compute the loss record by record: private.step(batch, "
                "loss_of), where records cannot touch each other."
            )


def _size(values: torch.Tensor) -> float:
    finite = values[values.isfinite()].abs()
    return float(finite.mean()) if len(finite) else 1.0
