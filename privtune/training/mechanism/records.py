"""What is public about a record, and what becomes of one that cannot be used.

A class outside the classes, a token outside the table: on CPU such a record makes a pass raise, on
CUDA it ends the process. Whether a training ended so would be a release that nobody paid for. So
whole numbers are held against public ranges before a kernel sees them, and what raises all the
same is found by evaluating records alone. Either way the record contributes exactly nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from privtune.errors import PrivTuneError
from privtune.training.mechanism.streams import GLOBAL_GENERATOR

_ANY = torch.iinfo(torch.int64).max  # for a number that is no index into a table: it has no range


@dataclass(frozen=True, eq=False)
class RecordFacts:
    """The public ranges of a record's whole numbers.

    Args:
        inputs: For every whole number of an input, how many there are: 0 to that, exclusive. Of an
            input's shape; None where nothing is known.
        targets: Likewise for targets.
        ignored: A target out of range that losses know and skip.
    """

    inputs: torch.Tensor | None = None
    targets: torch.Tensor | None = None
    ignored: int | None = None

    def unusable(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
        """Return which of some records break the facts, shape ``[n]``, or None for none of them."""
        broken = _outside(x, self.inputs, None)
        targets = _outside(y, self.targets, self.ignored)
        if broken is None or targets is None:
            broken = targets if broken is None else broken
        else:
            broken = broken | targets
        return broken if broken is not None and bool(broken.any()) else None


NO_FACTS = RecordFacts()


def _outside(
    values: torch.Tensor, sizes: torch.Tensor | None, ignored: int | None
) -> torch.Tensor | None:
    if sizes is None or values.is_floating_point():
        return None
    sizes = sizes.to(values.device)
    outside = ((values < 0) | (values >= sizes)) & (sizes != _ANY)
    if ignored is not None:
        outside &= values != ignored
    return outside.flatten(1).any(dim=1) if outside.ndim > 1 else outside


def find_facts(
    run: Callable[[torch.Tensor, torch.Tensor], Any],
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    device: torch.device | None = None,
) -> RecordFacts:
    """Find the ranges by watching what one made-up record's numbers are looked up in.

    A number that reaches an embedding, or a cross-entropy, as it stands must be one of its rows or
    classes. What is computed from a number first is not followed.

    Args:
        run: Runs model and loss on inputs and targets of one record.
        x: Inputs of a few records, for shape and type alone; may be empty.
        y: Targets of a few records, likewise.
        device: Where the model is.

    Returns:
        What was found; nothing where the model cannot run so.
    """
    watch = Lookups(_zeros(x, device), _zeros(y, device))
    try:
        with GLOBAL_GENERATOR, torch.no_grad(), torch.random.fork_rng(devices=[]), watch:
            run(*watch.records)
    except Exception as error:
        if not blames_records(error):
            raise
        return NO_FACTS
    return watch.facts()


def _zeros(like: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    # int64, so that `.long()` is the same tensor and not a copy.
    dtype = like.dtype if like.is_floating_point() or like.is_complex() else torch.int64
    return torch.zeros((1, *like.shape[1:]), dtype=dtype, device=device or like.device)


_INDEXED: Mapping[Any, str] = {
    functional.one_hot: "one_hot",
    torch.Tensor.__getitem__: "item",
    torch.gather: "along",
    torch.Tensor.gather: "along",
    torch.index_select: "along",
    torch.Tensor.index_select: "along",
}


class Lookups(TorchFunctionMode):
    """Notes what the whole numbers of made-up records are looked up in, as long as it is entered.

    Args:
        x: Inputs of the records, with a leading axis.
        y: Targets of the records, likewise.
    """

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        super().__init__()
        self.records = (x, y)
        self.sizes = tuple(torch.full((part.numel(),), _ANY) for part in self.records)
        self.ignored: int | None = None

    def facts(self) -> RecordFacts:
        """Return what was found: for every number of a record the smallest range of any record."""
        inputs, targets = (
            None
            if bool((sizes == _ANY).all())
            else sizes.view(record.shape).amin(dim=0).to(record.device)
            for sizes, record in zip(self.sizes, self.records, strict=True)
        )
        return RecordFacts(inputs, targets, self.ignored)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in {functional.embedding, functional.embedding_bag}:
            index, weight = (*args, *(kwargs.get(n) for n in ("input", "weight")[len(args) :]))[:2]
            self._note(index, len(weight))
        elif func in {functional.cross_entropy, functional.nll_loss}:
            outputs, target = (*args, *(kwargs.get(n) for n in ("input", "target")[len(args) :]))[
                :2
            ]
            if self._note(target, outputs.shape[min(1, outputs.ndim - 1)]):
                ignored = args[4] if len(args) > 4 else kwargs.get("ignore_index", -100)
                self.ignored = int(ignored)
        elif func in _INDEXED:
            self._indexed(_INDEXED[func], args, kwargs)
        return func(*args, **kwargs)

    def _indexed(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Bound numbers that a tensor is indexed with."""
        if name == "one_hot":
            classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
            if int(classes) > 0:
                self._note(args[0], int(classes))
        elif name == "item":
            if isinstance(args[1], torch.Tensor) and args[1].dtype == torch.int64:
                self._note(args[1], len(args[0]))
        elif len(args) >= 3:  # input, dim, index
            self._note(args[2], args[0].shape[args[1]])

    def _note(self, index: Any, rows: int) -> bool:
        """Bound the places of a record that ``index`` is a view of; say whether it is one."""
        if not isinstance(index, torch.Tensor) or index.is_floating_point():
            return False
        for record, sizes in zip(self.records, self.sizes, strict=True):
            storage = record.untyped_storage()
            if index.untyped_storage().data_ptr() == storage.data_ptr() and record.numel():
                places = torch.arange(record.numel()).as_strided(
                    index.shape, index.stride(), index.storage_offset()
                )
                sizes[places.flatten()] = sizes[places.flatten()].clamp(max=rows)
                return True
        return False


def blames_records(error: Exception) -> bool:
    """Say whether a record may be at fault: neither memory nor an error of PrivTune's own."""
    if isinstance(error, (PrivTuneError, MemoryError, torch.OutOfMemoryError)):
        return False
    return "can't allocate memory" not in str(error)


def find_raising(
    error: Exception, count: int, attempt: Callable[[torch.Tensor], object]
) -> torch.Tensor:
    """Find the records that raise when each is evaluated alone.

    Halves of a batch that do not raise are not looked into: their records do not raise either.

    Args:
        error: What a pass over all of them raised.
        count: How many there are.
        attempt: Evaluates the records that are True in its argument, shape ``[count]``, with
            made-up ones in place of the others.

    Returns:
        True for each that raises, shape ``[count]``; at least one.

    Raises:
        Exception: ``error``, if it is no record's fault: made-up records raise as well, or no
            record does alone.
    """
    found = torch.zeros(count, dtype=torch.bool)

    def raises(start: int, stop: int) -> bool:
        kept = torch.zeros(count, dtype=torch.bool)
        kept[start:stop] = True
        try:
            attempt(kept)
        except Exception as other:
            if not blames_records(other):
                raise
            return True
        return False

    if not blames_records(error) or raises(0, 0):
        raise error
    waiting = [(0, count)]
    while waiting:
        start, stop = waiting.pop()
        if stop - start == 1:
            found[start] = True
            continue
        middle = (start + stop) // 2
        waiting += [part for part in ((start, middle), (middle, stop)) if raises(*part)]
    if not bool(found.any()):
        raise error
    return found


def where(kept: torch.Tensor, values: torch.Tensor, made_up: torch.Tensor) -> torch.Tensor:
    """Return the values of records that are kept, and what is made up in place of the others."""
    return torch.where(
        kept.view(*kept.shape, *(1 for _ in values.shape[kept.ndim :])), values, made_up
    )
