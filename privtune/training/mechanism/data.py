"""The private records of a training, and what becomes of one that cannot be used.

A class outside the classes, a token outside the table: on CPU such a record makes a pass raise, on
CUDA it ends the process. Whether a training ended so would be a release that nobody paid for. So
whole numbers are held against public ranges before a kernel sees them, and what raises all the
same is found by evaluating records alone. Either way the record contributes exactly nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_unflatten

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.training.mechanism.kernel import LossOf, fresh, traced
from privtune.training.mechanism.made_up import Domain
from privtune.training.mechanism.streams import GLOBAL_GENERATOR

_ANY_DOMAIN = Domain()
_ANY = torch.iinfo(torch.int64).max  # for a number that is no index into a table: it has no range


@dataclass(frozen=True, eq=False)
class RecordFacts:
    """The public ranges of a record's whole numbers, from 0: how many there are of each."""

    inputs: torch.Tensor | None = None
    targets: torch.Tensor | None = None
    ignored: int | None = None

    def unusable(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
        """Return which of some records break the facts, shape ``[n]``, or None for none of them."""
        found = (_outside(x, self.inputs, None), _outside(y, self.targets, self.ignored))
        broken = [unusable for unusable in found if unusable is not None]
        unusable = torch.stack(broken).any(dim=0) if broken else None
        return unusable if unusable is not None and bool(unusable.any()) else None


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
    return outside.reshape(len(values), -1).any(dim=1)


@dataclass(frozen=True, eq=False)
class TensorData:
    """Data in memory.

    Args:
        x: Inputs, shape ``[N, ...]``.
        y: Targets, shape ``[N, ...]``.
        sealed_size: Whether N is private, as that of a Poisson subset is: it is then not compared
            with the schedule's records, and nothing divides by it.
        unusable: True for records that contribute nothing, shape ``[N]``; None for none. Zeros are
            fetched in their place; ``x`` and ``y`` stay as they were given, since whether two data
            share records is told by these.
        groups: The number of the unit (a person, a hospital) that each record belongs to, or is,
            whole numbers ``[N]``; None where records belong to nothing.
        unit: What one record is all rows of, as ``unit_records`` makes them; empty where it is a row.
        tree: What inputs and targets were before they were packed; None where they are as given.
        domain: The numbers that made-up records in the place of these are drawn from.

    Raises:
        InvalidInputError: If the two do not have the same number of records, or none.

    Example:
        >>> import torch
        >>> from privtune.tasks import TensorData
        >>> data = TensorData(torch.zeros(100, 4), torch.zeros(100, dtype=torch.long), sealed_size=False)
        >>> len(data), len(data.part(torch.arange(10), sealed_size=False).to(torch.device("cpu")))
        (100, 10)
        >>> unusable = torch.arange(100) == 3
        >>> x, y, unusable = data.marked(unusable).fetch(torch.tensor([3, 4]))
        >>> unusable.tolist(), [part.shape[0] for part in data.take(torch.tensor([3]))]
        ([True, False], [1, 1])
        >>> from privtune.training.mechanism.data import NO_FACTS
        >>> data.held_to(NO_FACTS).unusable is None
        True
    """

    x: torch.Tensor
    y: torch.Tensor
    sealed_size: bool = False
    unusable: torch.Tensor | None = None
    groups: torch.Tensor | None = None
    unit: str = ""
    tree: RecordTree | None = None
    domain: Domain = _ANY_DOMAIN

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or len(self.x) == 0:
            raise InvalidInputError(
                "data",
                (len(self.x), len(self.y)),
                "inputs and targets must have the same number of records, at least 1",
            )

    def __len__(self) -> int:
        return len(self.x)

    @cached_property
    def _usable(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets with zeros for what cannot be used: copied once, not in every step."""
        unusable = self.unusable
        if unusable is None or not bool(unusable.any()):
            return self.x, self.y
        nothing = [unusable.view(-1, *(1 for _ in part.shape[1:])) for part in (self.x, self.y)]
        return self.x.masked_fill(nothing[0], 0), self.y.masked_fill(nothing[1], 0)

    def take(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets at ``index``, whole numbers ``[n]``: 5 times faster than ``x[i]``."""
        x, y = self._usable
        return x.index_select(0, index), y.index_select(0, index)

    @property
    def like(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs ``[0, ...]`` and targets ``[0, ...]``: shape and type of a record, both public."""
        return self.x[:0], self.y[:0]

    def fetch(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return inputs, targets and which are unusable (or None) at ``index``, whole numbers ``[n]``."""
        return (*self.take(index), None if self.unusable is None else self.unusable[index])

    def held_to(self, facts: RecordFacts) -> TensorData:
        """Return the data with records unusable, too, that break these public ``facts``."""
        return self.marked(facts.unusable(self.x, self.y))

    def marked(self, unusable: torch.Tensor | None) -> TensorData:
        """Return the data with records unusable, too, where ``unusable`` ``[N]`` is True; None for none."""
        if unusable is None or self.unusable is None:
            return self if unusable is None else replace(self, unusable=unusable)
        return replace(self, unusable=self.unusable | unusable)

    def part(self, index: torch.Tensor, *, sealed_size: bool) -> TensorData:
        """Return the records at ``index`` ``[n]`` as data; ``sealed_size``: whether their number is private.

        Of no records it is one record that cannot be used.
        """
        nothing = len(index) == 0
        index = index.new_zeros(1) if nothing else index
        unusable = None if self.unusable is None else self.unusable[index]
        if nothing:
            unusable = torch.ones(1, dtype=torch.bool, device=self.x.device)
        groups = None if self.groups is None else self.groups[index.cpu()]
        x, y = self.x[index], self.y[index]
        return replace(self, x=x, y=y, sealed_size=sealed_size, unusable=unusable, groups=groups)

    def to(self, device: torch.device) -> TensorData:
        """Return the data on a ``device``."""
        unusable = None if self.unusable is None else self.unusable.to(device)
        return replace(self, x=self.x.to(device), y=self.y.to(device), unusable=unusable)


def targets_are_classes(data: TensorData) -> bool:
    """Say whether targets are known to be whole numbers of at least 0; not where their number is sealed."""
    if data.sealed_size:
        return False
    y = data._usable[1]  # an unusable record does not choose how the others are computed
    return not y.dtype.is_floating_point and bool((y >= 0).all())


def fingerprint(data: TensorData) -> str:
    """Return a digest that tells whether a training goes on with the records it began with. Sealed."""
    parts = [data.x, data.y, *([] if data.unusable is None else [data.unusable])]
    found = hashlib.sha256()
    for part in parts:
        found.update(f"{part.dtype} {tuple(part.shape)}".encode())
        found.update(part.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def find_domain(
    run: Callable[[torch.Tensor, torch.Tensor], Any],
    data: TensorData,
    *,
    device: torch.device | None = None,
) -> Domain:
    """Find the numbers that a model and its loss accept, by trying laws of made-up records.

    No record of ``data`` is looked at: its shapes, its types and the range that is declared of its targets
    say what to try. The first law is chosen under which ``run`` has finite values; else the first under which
    it raises nothing; else that of ``data``, under which it raises what there is to be said.

    Args:
        run: The loss, or the score, of one record, as a batch of one.
        data: The records, or none of their kind.
        device: Where the records shall lie; where those of ``data`` lie, if not given.
    """
    x, y = data.like
    place = x.device if device is None else device
    second: Domain | None = None
    for domain in data.domain.alternatives(x, y):
        finite = _try_domain(run, domain.tried(x, y, place))
        if finite:
            return domain
        if finite is not None and second is None:
            second = domain
    return data.domain if second is None else second


def find_domain_of(model: nn.Module, loss_of: LossOf, data: TensorData) -> Domain:
    """Find the numbers that a model and the loss of its records accept: see :func:`find_domain`."""

    def run(x: torch.Tensor, y: torch.Tensor) -> Any:
        # A copy: what a pass writes to its model must not reach the next record.
        copied, copied_loss = fresh(model, loss_of)
        return copied_loss(copied, x, y)

    device = next((part.device for part in model.parameters()), data.x.device)
    return find_domain(run, data, device=device)


def _try_domain(
    run: Callable[[torch.Tensor, torch.Tensor], Any],
    records: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> bool | None:
    """Say whether all made-up records have finite values; None where one of them raises."""
    finite = True
    for x, y in records:
        devices = [x.device] if x.device.type == "cuda" else []
        try:
            # With gradients: a loss may take some of its own.
            with GLOBAL_GENERATOR, torch.random.fork_rng(devices=devices), torch.enable_grad():
                torch.manual_seed(0)
                with traced():
                    value = run(x, y)
        except Exception as error:
            if not blames_records(error):
                raise
            return None
        finite = finite and not (torch.is_tensor(value) and not bool(value.isfinite().all()))
    return finite


def find_facts(
    run: Callable[[torch.Tensor, torch.Tensor], Any],
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    device: torch.device | None = None,
    domain: Domain = _ANY_DOMAIN,
) -> RecordFacts:
    """Find the ranges of one made-up record's numbers by watching what model and loss look them up in."""
    zeros = (_zeros(x, device), _zeros(y, device))
    watch = _Lookups(*zeros)
    if _passes(run, watch, torch.no_grad()):
        return watch.facts()
    # Zeros may lie outside of what a loss accepts, and a loss may take gradients of its own.
    inputs, targets = domain.draw(*zeros, (1, 1), zeros[0].device)
    watch = _Lookups(inputs[0], targets[0])
    return watch.facts() if _passes(run, watch, torch.enable_grad()) else NO_FACTS


def _passes(
    run: Callable[[torch.Tensor, torch.Tensor], Any],
    watch: _Lookups,
    mode: torch.no_grad | torch.enable_grad,
) -> bool:
    """Run made-up records under a watch; say whether they pass."""
    try:
        with GLOBAL_GENERATOR, mode, torch.random.fork_rng(devices=[]), watch:
            run(*watch.records)
    except Exception as error:
        if not blames_records(error):
            raise
        return False
    return True


def _zeros(like: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    # int64, so that `.long()` is the same tensor and not a copy.
    dtype = like.dtype if like.is_floating_point() or like.is_complex() else torch.int64
    return torch.zeros((1, *like.shape[1:]), dtype=dtype, device=device or like.device)


def _in_classes(outputs: Any, target: Any) -> tuple[Any, int]:
    return target, outputs.shape[min(1, outputs.ndim - 1)]


_TABLE = (("input", "weight"), lambda index, table: (index, len(table)))
_ALONG = (("input", "dim", "index"), lambda values, dim, index: (index, values.shape[dim]))
_LOOKED_UP: Mapping[Any, tuple[tuple[str, ...], Callable[..., tuple[Any, int]]]] = {
    functional.embedding: _TABLE,
    functional.embedding_bag: _TABLE,
    functional.cross_entropy: (("input", "target"), _in_classes),
    functional.nll_loss: (("input", "target"), _in_classes),
    functional.one_hot: (
        ("tensor", "num_classes"),
        lambda index, n: (index, n if n and n > 0 else _ANY),
    ),
    torch.Tensor.__getitem__: (
        ("self", "index"),
        lambda values, index: (index, len(values) if isinstance(index, torch.Tensor) else _ANY),
    ),
    torch.gather: _ALONG,
    torch.Tensor.gather: _ALONG,
    torch.index_select: _ALONG,
    torch.Tensor.index_select: _ALONG,
}
"""What a function calls that in which something is looked up, and how many there are; by function."""


class _Lookups(TorchFunctionMode):
    """Notes what the whole numbers of made-up records are looked up in, as long as it is entered."""

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

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LOOKED_UP:
            names, looked_up = _LOOKED_UP[func]
            given = (*args[: len(names)], *(kwargs.get(name) for name in names[len(args) :]))
            if self._note(*looked_up(*given)) and looked_up is _in_classes:
                ignored = args[4] if len(args) > 4 else kwargs.get("ignore_index", -100)
                self.ignored = int(ignored)
        return func(*args, **kwargs)

    def _note(self, index: Any, rows: int) -> bool:
        """Bound the places of a record that ``index`` is a view of; say whether it is one."""
        if not isinstance(index, torch.Tensor) or index.dtype is not torch.int64:
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


def find_unusable(
    error: Exception, count: int, attempt: Callable[[torch.Tensor], object]
) -> torch.Tensor:
    """Find the records, at least one, that raise when each is evaluated alone, shape ``[count]``.

    ``attempt`` evaluates the records that are True in its argument, with made-up ones in place of the others.
    What a pass over all raised is raised again if no record is at fault.
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


TARGETS = ("labels", "label")
FILLER = {False: -1.0, True: math.nan}
"""Target of a row that is none, by whether targets are floating."""


@dataclass(frozen=True)
class Packing:
    """How the tensors of a record lie in one tensor, which is what samples, kernels and tasks take.

    Whole numbers stay whole numbers, and all but booleans are int64 from there on, whatever integers
    they were: no copy hides which table a token is looked up in, so tokens are held to it as ever.

    Args:
        tree: How the tensors make a dict or a tuple, nested or not: a ``TreeSpec`` of torch's.
        shapes: Shape of each in one record.
        dtypes: Type of each, as torch names it: ``bool``, ``int64``, or a floating one.

    Raises:
        InvalidInputError: If whole numbers and floating ones, or floating ones of two types, meet.

    Example:
        >>> import torch
        >>> batch = {"input_ids": torch.tensor([[5, 7], [3, 0]]), "attention_mask": torch.ones(2, 2).bool()}
        >>> packing = Packing.of(batch)
        >>> x = packing.pack(batch)
        >>> x.tolist(), packing.unpack(x)["attention_mask"].dtype
        ([[5, 7, 1, 1], [3, 0, 1, 1]], torch.bool)
    """

    tree: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    def __post_init__(self) -> None:
        kinds = {d if "float" in d else "whole" for d in self.dtypes}
        if len(kinds) != 1 or any("complex" in d for d in self.dtypes):
            raise InvalidInputError(
                "batch",
                ", ".join(self.dtypes) or "nothing",
                "must hold whole numbers alone, or floating numbers of one type alone",
                "Convert a mask to the type of the numbers beside it.",
            )

    @classmethod
    def of(cls, batch: Mapping[str, Any] | Sequence[Any]) -> Packing:
        """Return how to pack records like these.

        Args:
            batch: Tensors by name, or in order, or dicts and tuples of such, each tensor with the
                same number of records first. Targets stay apart.

        Raises:
            InvalidInputError: If something else than tensors is in it, or their records are not as many.
        """
        tensors, tree = _flat(batch)
        return cls(tree, tuple(tuple(t.shape[1:]) for t in tensors), tuple(map(_dtype, tensors)))

    @property
    def parts(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor by its name, or its place; of a nested one with dots."""
        found, _ = tree_flatten_with_path(tree_unflatten(range(len(self.shapes)), self.tree))
        keys = [[getattr(key, "key", getattr(key, "idx", "")) for key in path] for path, _ in found]
        return {
            ".".join(map(str, path)): shape for path, shape in zip(keys, self.shapes, strict=True)
        }

    def pack(self, batch: Mapping[str, Any] | Sequence[Any]) -> torch.Tensor:
        """Return the records in one tensor, shape ``[N, numbers of a record]``.

        Args:
            batch: As in :meth:`of`.

        Raises:
            InvalidInputError: If the tensors are others than those this was made of.
        """
        if (found := Packing.of(batch)) != self:
            raise InvalidInputError(
                "batch", repr(found), f"must be as many records of {self!r} in every tensor"
            )
        whole = None if "float" in self.dtypes[0] else torch.int64
        tensors, _ = _flat(batch)
        return torch.cat([t.reshape(len(t), -1).to(whole or t.dtype) for t in tensors], dim=1)

    def unpack(self, x: torch.Tensor) -> Any:
        """Return the tensors of packed records ``x``, by name or in order; whole numbers are int64."""
        parts = torch.split(x, [math.prod(shape) for shape in self.shapes], dim=1)
        tensors = [
            part.view(x.shape[0], *shape).to(getattr(torch, dtype))
            for part, shape, dtype in zip(parts, self.shapes, self.dtypes, strict=True)
        ]
        return tree_unflatten(tensors, self.tree)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return a model of packed records: it calls ``model(**tensors)``, or ``model(*tensors)``.

        Args:
            model: The model. Of what it returns, ``logits`` are taken where there are any.

        Example:
            >>> import torch
            >>> bilinear = torch.nn.Bilinear(2, 3, 1)
            >>> packing = Packing.of((torch.ones(5, 2), torch.ones(5, 3)))
            >>> packing.wrap(bilinear)(torch.ones(5, 5)).shape
            torch.Size([5, 1])
        """
        return _Unpacking(model, self)


@dataclass(frozen=True)
class RecordTree:
    """A record of several tensors: one of inputs and a target within, a dict or tuple for a loop.

    The target of a dict is its ``labels``, else its ``label``, else what stands last in it; that of a
    tuple stands last. A dict or tuple of one entry has none.
    """

    inputs: Packing
    names: tuple[str, ...]
    target: str
    size: int

    @classmethod
    def split(
        cls, records: Any, target: str | None = None
    ) -> tuple[RecordTree | None, torch.Tensor, torch.Tensor]:
        """Return what records are made of (None for a pair of tensors), their packed inputs, and targets."""
        tensors, _ = _flat(records)
        names: tuple[str, ...] = ()
        if not tensors:
            raise InvalidInputError("dataset", "nothing", "must hold inputs and a target")
        if len(records) == 1:
            names = tuple(records) if isinstance(records, Mapping) else ()
            packing = Packing.of(records)
            return cls(packing, names, "", 1), packing.pack(records), torch.zeros(len(tensors[0]))
        if isinstance(records, Mapping):
            names = tuple(records)
            target = target or next((name for name in TARGETS if name in records), names[-1])
            rest: Any = {name: part for name, part in records.items() if name != target}
            y = records[target]
        else:
            target, (*rest, y) = "the last part", records
            rest = rest[0] if len(rest) == 1 else tuple(rest)
        if not isinstance(y, torch.Tensor):
            raise InvalidInputError("dataset", target, "must be a tensor: it is the target")
        if isinstance(rest, torch.Tensor):
            return None, rest, y
        packing = Packing.of(rest)
        return cls(packing, names, target, len(records)), packing.pack(rest), y

    def loss_of(self, loss_of: Any) -> LossOf:
        """Return a loss of packed records that calls one of a dict, or of a tuple's entries."""

        def packed(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            parts = self.inputs.unpack(x)
            if self.names:
                record: list[Any] = [{n: y if n == self.target else parts[n] for n in self.names}]
            else:
                record = [*((parts,) if self.size == 2 else parts), *([y] if self.target else [])]
            found: torch.Tensor = loss_of(model, *record)
            return found

        return packed


class _Unpacking(nn.Module):
    """A model of several tensors, on records that are packed into one."""

    def __init__(self, model: nn.Module, packing: Packing) -> None:
        super().__init__()
        self.model, self._packing = model, packing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the model's outputs: of several, the logits."""
        tensors = self._packing.unpack(x)
        named = isinstance(tensors, dict)
        outputs = self.model(**tensors) if named else self.model(*tensors)
        found: torch.Tensor = getattr(outputs, "logits", outputs)
        return found


def _dtype(tensor: torch.Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    return "int64" if name.startswith(("int", "uint")) else name


def _flat(batch: Any) -> tuple[list[torch.Tensor], Any]:
    """Return the tensors of a tree, and the tree without them."""
    found, tree = tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)
    for part in found:
        usable = isinstance(part, torch.Tensor) and part.layout is torch.strided and part.ndim
        if not usable or part.is_nested:
            raise InvalidInputError(
                "batch",
                type(part).__name__,
                "must be tensors, or dicts and tuples of tensors, with records along the first axis",
                "Pad records to one public length, and leave texts and lists of numbers out.",
            )
    if len(sizes := {len(tensor) for tensor in found}) > 1:
        found_sizes = ", ".join(map(str, sorted(sizes)))
        raise InvalidInputError("batch", found_sizes, "must hold as many records in every tensor")
    return found, tree


class OfUnits(nn.Module):
    """A model of rows that have so many axes, applied to each row of a unit; rows alone pass as they are."""

    def __init__(self, inner: nn.Module, axes: int) -> None:
        super().__init__()
        self.inner, self.axes = inner, axes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return outputs ``[B, R, ...]`` of units ``[B, R, ...]``, ``[B, ...]`` of rows."""
        if x.dim() == self.axes + 1:
            rows: torch.Tensor = self.inner(x)
            return rows
        outputs: torch.Tensor = self.inner(x.flatten(0, 1))
        return outputs.reshape(*x.shape[:2], *outputs.shape[1:])


def there_are(targets: torch.Tensor) -> torch.Tensor:
    """Say which targets ``[B, R]`` are those of rows, and not fillers."""
    return targets.isfinite() if targets.is_floating_point() else targets >= 0


def rows_of(
    outputs: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the outputs and targets of all rows, and which of them are no fillers."""
    there = there_are(targets)
    return outputs.flatten(0, 1), torch.where(there, targets, 0).flatten(), there.flatten()


def sum_of_rows(loss_of: LossOf) -> LossOf:
    """Return the loss of units: the sum of what ``loss_of`` says of each of their rows."""

    def of_units(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        there = there_are(y)
        rows = loss_of(model, x.flatten(0, 1), torch.where(there, y, 0).flatten())
        return (rows.view(y.shape) * there).sum(dim=1)

    return of_units


def mean_of_rows(score_of: LossOf) -> LossOf:
    """Return the score of units: the mean of what ``score_of`` says of each of their rows."""
    total = sum_of_rows(score_of)

    def of_units(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return total(model, x, y) / there_are(y).sum(dim=1).clamp(min=1)

    return of_units
