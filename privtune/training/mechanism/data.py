"""The private records of a training: data in memory, public ranges, packing, and unusable records.

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
from torch.utils._pytree import tree_flatten_with_path, tree_unflatten

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.training.mechanism.kernel import LossOf, fresh, traced
from privtune.training.mechanism.made_up import Domain
from privtune.training.mechanism.streams import GLOBAL_GENERATOR, seed_global_generator

_ANY_DOMAIN = Domain()
_ANY = torch.iinfo(torch.int64).max  # for a number that is no index into a table: it has no range


@dataclass(frozen=True, eq=False)
class RecordFacts:
    """The number of values that each whole number of a record can have, counted from 0."""

    inputs: torch.Tensor | None = None
    targets: torch.Tensor | None = None
    ignored: int | None = None

    def unusable(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
        """Return which records have a number outside of its range, shape ``[n]``, or None if none has."""
        of_inputs = _outside(x, self.inputs, None)
        of_targets = _outside(y, self.targets, self.ignored)
        broken = [mask for mask in (of_inputs, of_targets) if mask is not None]
        if not broken:
            return None
        unusable = torch.stack(broken).any(dim=0)
        if bool(unusable.any()):
            return unusable
        return None


NO_FACTS = RecordFacts()


def _outside(
    values: torch.Tensor,
    sizes: torch.Tensor | None,
    ignored: int | None,
) -> torch.Tensor | None:
    """Return which records have a number outside of its range, shape ``[n]``; None if there are no ranges.

    Args:
        values: Inputs or targets of n records, ``[n, ...]``.
        sizes: How many values each number of a record can have, from 0, ``[...]``.
        ignored: A number that is in range wherever it stands.
    """
    if sizes is None or values.is_floating_point():
        return None
    sizes = sizes.to(values.device)
    is_outside = (values < 0) | (values >= sizes)
    is_outside &= sizes != _ANY
    if ignored is not None:
        is_outside &= values != ignored
    return is_outside.reshape(len(values), -1).any(dim=1)


@dataclass(frozen=True, eq=False)
class TensorData:
    """Records in memory as two tensors, inputs and targets, with marks for unusable ones.

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
        """Inputs and targets with zeros in place of unusable records, copied once."""
        unusable = self.unusable
        if unusable is None or not bool(unusable.any()):
            return self.x, self.y
        x = self.x.masked_fill(_broadcast(unusable, self.x), 0)
        y = self.y.masked_fill(_broadcast(unusable, self.y), 0)
        return x, y

    def take(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of the records at ``index``, ``[n]``, with zeros for unusable ones."""
        x, y = self._usable
        inputs = x.index_select(0, index)
        targets = y.index_select(0, index)
        return inputs, targets

    @property
    def like(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs ``[0, ...]`` and targets ``[0, ...]``, which hold a record's public shape and type."""
        return self.x[:0], self.y[:0]

    def fetch(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return inputs, targets and which are unusable (or None) at ``index``, whole numbers ``[n]``."""
        inputs, targets = self.take(index)
        if self.unusable is None:
            return inputs, targets, None
        return inputs, targets, self.unusable[index]

    def held_to(self, facts: RecordFacts) -> TensorData:
        """Return the data with records also marked as unusable if they break the public ``facts``."""
        unusable = facts.unusable(self.x, self.y)
        return self.marked(unusable)

    def marked(self, unusable: torch.Tensor | None) -> TensorData:
        """Return the data with records also marked as unusable where ``unusable`` ``[N]`` is True."""
        if unusable is None:
            return self
        if self.unusable is not None:
            unusable = self.unusable | unusable
        return replace(self, unusable=unusable)

    def part(self, index: torch.Tensor, *, sealed_size: bool) -> TensorData:
        """Return the records at ``index`` ``[n]`` as data; ``sealed_size`` says whether n is private.

        Of no records it is one record that cannot be used.
        """
        is_empty = len(index) == 0
        if is_empty:
            index = index.new_zeros(1)
        unusable = None
        if is_empty:
            unusable = torch.ones(1, dtype=torch.bool, device=self.x.device)
        elif self.unusable is not None:
            unusable = self.unusable[index]
        groups = None
        if self.groups is not None:
            groups = self.groups[index.cpu()]
        return replace(
            self,
            x=self.x[index],
            y=self.y[index],
            sealed_size=sealed_size,
            unusable=unusable,
            groups=groups,
        )

    def to(self, device: torch.device) -> TensorData:
        """Return the data on a ``device``."""
        x = self.x.to(device)
        y = self.y.to(device)
        if self.unusable is None:
            return replace(self, x=x, y=y)
        return replace(self, x=x, y=y, unusable=self.unusable.to(device))


def targets_are_classes(data: TensorData) -> bool:
    """Say whether all targets are whole numbers of at least 0; False if their number is sealed."""
    if data.sealed_size:
        return False
    _, y = data._usable  # an unusable record does not choose how the others are computed
    if y.dtype.is_floating_point:
        return False
    return bool((y >= 0).all())


def fingerprint(data: TensorData) -> str:
    """Return a digest of all records, by which a resumed training knows its data; it stays sealed."""
    parts = [data.x, data.y]
    if data.unusable is not None:
        parts.append(data.unusable)
    digest = hashlib.sha256()
    for part in parts:
        heading = f"{part.dtype} {tuple(part.shape)}"
        digest.update(heading.encode())
        values = part.cpu().contiguous().flatten()
        digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def find_domain(
    run: Callable[[torch.Tensor, torch.Tensor], Any],
    data: TensorData,
    *,
    device: torch.device | None = None,
) -> Domain:
    """Find laws of made-up numbers that a model and its loss accept, by trying one after another.

    No record of ``data`` is looked at: its shapes, its types and the range that is declared of its targets
    say what to try. The first law is chosen under which ``run`` has finite values; else the first under which
    it raises nothing; else that of ``data``, under which it raises what there is to be said.

    Args:
        run: The loss, or the score, of one record, as a batch of one.
        data: The records, or none of their kind.
        device: Where the records shall lie; where those of ``data`` lie, if not given.
    """
    x, y = data.like
    if device is None:
        device = x.device
    domain_that_passes: Domain | None = None
    for domain in data.domain.alternatives(x, y):
        records = domain.tried(x, y, device)
        finite = _try_domain(run, records)
        if finite:
            return domain
        if finite is not None and domain_that_passes is None:
            domain_that_passes = domain
    if domain_that_passes is None:
        return data.domain
    return domain_that_passes


def find_domain_of(model: nn.Module, loss_of: LossOf, data: TensorData) -> Domain:
    """Find laws of made-up numbers that a model and the loss of its records accept.

    Args:
        model: As a trial trains it; it is left as it was.
        loss_of: The loss of records, one number each.
        data: Read for the shapes and types of records, and for the domain that was declared.
    """

    def run(x: torch.Tensor, y: torch.Tensor) -> Any:
        # A copy: what a pass writes to its model must not reach the next record.
        copied, copied_loss = fresh(model, loss_of)
        return copied_loss(copied, x, y)

    devices = (part.device for part in model.parameters())
    device = next(devices, data.x.device)
    return find_domain(run, data, device=device)


def _try_domain(
    run: Callable[[torch.Tensor, torch.Tensor], Any],
    records: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> bool | None:
    """Say whether all made-up records give finite values; None if one of them raises."""
    finite = True
    for x, y in records:
        devices = []
        if x.device.type == "cuda":
            devices.append(x.device)
        try:
            # With gradients: a loss may take some of its own.
            with GLOBAL_GENERATOR, torch.random.fork_rng(devices=devices), torch.enable_grad():
                seed_global_generator(0)
                with traced():
                    value = run(x, y)
        except Exception as error:
            if not blames_records(error):
                raise
            return None
        if torch.is_tensor(value) and not bool(value.isfinite().all()):
            finite = False
    return finite


def find_facts(
    run: Callable[[torch.Tensor, torch.Tensor], Any],
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    device: torch.device | None = None,
    domain: Domain = _ANY_DOMAIN,
) -> RecordFacts:
    """Return the ranges of a record's whole numbers, found from look-ups that model and loss make.

    Args:
        run: Evaluates model and loss on records ``[1, ...]``.
        x: Inputs like those of the records, which may be none.
        y: Targets like those of the records.
        device: Where the made-up record shall lie; None for where these do.
        domain: What its numbers are drawn from, where zeros do not pass.

    Returns:
        The ranges; none where no made-up record passes.
    """
    x_of_zeros = _zeros(x, device)
    y_of_zeros = _zeros(y, device)
    watch = _Lookups(x_of_zeros, y_of_zeros)
    if _passes(run, watch, torch.no_grad()):
        return watch.facts()
    # Zeros may lie outside of what a loss accepts, and a loss may take gradients of its own.
    inputs, targets = domain.draw(
        x_of_zeros,
        y_of_zeros,
        (1, 1),
        x_of_zeros.device,
    )
    watch = _Lookups(inputs[0], targets[0])
    if _passes(run, watch, torch.enable_grad()):
        return watch.facts()
    return NO_FACTS


def _passes(
    run: Callable[[torch.Tensor, torch.Tensor], Any],
    watch: _Lookups,
    mode: torch.no_grad | torch.enable_grad,
) -> bool:
    """Run a made-up record under a watch of look-ups; say whether it raises no error.

    Args:
        run: Evaluates model and loss on records ``[1, ...]``.
        watch: Holds the made-up record, and notes what its numbers are looked up in.
        mode: Whether gradients are recorded.
    """
    try:
        with GLOBAL_GENERATOR, mode, torch.random.fork_rng(devices=[]), watch:
            run(*watch.records)
    except Exception as error:
        if not blames_records(error):
            raise
        return False
    return True


def _zeros(like: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Return one record of zeros, int64 for whole numbers."""
    # int64, so that `.long()` is the same tensor and not a copy.
    if like.is_floating_point() or like.is_complex():
        dtype = like.dtype
    else:
        dtype = torch.int64
    shape = (1, *like.shape[1:])
    return torch.zeros(shape, dtype=dtype, device=device or like.device)


def _in_classes(outputs: Any, target: Any) -> tuple[Any, int]:
    """Return targets, and how many classes the outputs have."""
    # Classes are the second axis of outputs, the only one of a record's alone.
    axis = min(1, outputs.ndim - 1)
    return target, outputs.shape[axis]


def _in_one_hot(index: Any, classes: Any) -> tuple[Any, int]:
    """Return an index and its number of classes, or an unlimited range if the call names no number."""
    if classes and classes > 0:
        return index, classes
    return index, _ANY


def _in_rows(values: Any, index: Any) -> tuple[Any, int]:
    """Return an index and the number of rows that it selects from; a slice has no range."""
    if isinstance(index, torch.Tensor):
        return index, len(values)
    return index, _ANY


_TABLE = (
    ("input", "weight"),
    lambda index, table: (index, len(table)),
)
_ALONG = (
    ("input", "dim", "index"),
    lambda values, dim, index: (index, values.shape[dim]),
)
_LOOKED_UP: Mapping[Any, tuple[tuple[str, ...], Callable[..., tuple[Any, int]]]] = {
    functional.embedding: _TABLE,
    functional.embedding_bag: _TABLE,
    functional.cross_entropy: (("input", "target"), _in_classes),
    functional.nll_loss: (("input", "target"), _in_classes),
    functional.one_hot: (("tensor", "num_classes"), _in_one_hot),
    torch.Tensor.__getitem__: (("self", "index"), _in_rows),
    torch.gather: _ALONG,
    torch.Tensor.gather: _ALONG,
    torch.index_select: _ALONG,
    torch.Tensor.index_select: _ALONG,
}
"""What a function calls that in which something is looked up, and how many there are; by function."""


class _Lookups(TorchFunctionMode):
    """A torch mode that notes into how many rows each whole number of a made-up record indexes.

    A class or a word beyond its table raises on a CPU, and on a GPU ends all work of the process
    there, so records are held to these ranges before they pass. Made-up records are followed by their
    memory: what is looked up is a view of them.

    Attributes:
        records: Made-up inputs and targets.
        sizes: For each of their numbers the rows of the smallest table that it was looked up in.
        ignored: The class that a loss ignores, if it was called with one.
    """

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        super().__init__()
        self.records = (x, y)
        self.sizes = (
            torch.full((x.numel(),), _ANY),
            torch.full((y.numel(),), _ANY),
        )
        self.ignored: int | None = None

    def facts(self) -> RecordFacts:
        """Return the smallest range of each number of a record, over all look-ups and made-up records."""
        ranges: list[torch.Tensor | None] = []
        for sizes, record in zip(self.sizes, self.records, strict=True):
            if bool((sizes == _ANY).all()):
                ranges.append(None)
                continue
            smallest = sizes.view(record.shape).amin(dim=0)
            ranges.append(smallest.to(record.device))
        inputs, targets = ranges
        return RecordFacts(inputs, targets, self.ignored)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LOOKED_UP:
            names, looked_up = _LOOKED_UP[func]
            arguments = list(args[: len(names)])
            for name in names[len(args) :]:
                arguments.append(kwargs.get(name))
            index, rows = looked_up(*arguments)
            if self._note(index, rows) and looked_up is _in_classes:
                if len(args) > 4:
                    ignored = args[4]
                else:
                    ignored = kwargs.get("ignore_index", -100)
                self.ignored = int(ignored)
        return func(*args, **kwargs)

    def _note(self, index: Any, rows: int) -> bool:
        """Lower the ranges of the record's numbers that ``index`` is a view of; say whether it is a view."""
        if not isinstance(index, torch.Tensor) or index.dtype is not torch.int64:
            return False
        memory = index.untyped_storage().data_ptr()
        for record, sizes in zip(self.records, self.sizes, strict=True):
            is_view = memory == record.untyped_storage().data_ptr()
            if is_view and record.numel():
                # The same view, of the places themselves, says which numbers of the record it holds.
                numbers = torch.arange(record.numel())
                view = numbers.as_strided(
                    index.shape,
                    index.stride(),
                    index.storage_offset(),
                )
                places = view.flatten()
                sizes[places] = sizes[places].clamp(max=rows)
                return True
        return False


def blames_records(error: Exception) -> bool:
    """Return whether a record may be the cause of an error, unlike lack of memory or a ``PrivTuneError``."""
    if isinstance(error, (PrivTuneError, MemoryError, torch.OutOfMemoryError)):
        return False
    return "can't allocate memory" not in str(error)


def find_unusable(
    error: Exception,
    count: int,
    attempt: Callable[[torch.Tensor], object],
) -> torch.Tensor:
    """Return which records raise when evaluated alone, at least one, shape ``[count]``, found by halving.

    By halves: a few records at fault among many cost few passes.

    Args:
        error: What a pass over all raised; it is raised again if no record is at fault.
        count: How many records there are.
        attempt: Evaluates the records that are True in its argument, with made-up ones in place of the
            others.
    """
    unusable = torch.zeros(count, dtype=torch.bool)

    def raises(start: int, stop: int) -> bool:
        """Say whether a pass over the records from ``start`` to before ``stop`` raises."""
        rest = torch.zeros(count, dtype=torch.bool)
        rest[start:stop] = True
        try:
            attempt(rest)
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
            unusable[start] = True
            continue
        middle = (start + stop) // 2
        for part in ((start, middle), (middle, stop)):
            if raises(*part):
                waiting.append(part)
    if not bool(unusable.any()):
        raise error
    return unusable


def where(usable: torch.Tensor, values: torch.Tensor, made_up: torch.Tensor) -> torch.Tensor:
    """Return the values of usable records, and made-up values in place of the others.

    Args:
        usable: Which records are kept, ``[K, B]`` or ``[N]``.
        values: Of records, with more axes behind these.
        made_up: Broadcasts over ``values``.
    """
    further_axes = values.ndim - usable.ndim
    mask = usable.view(*usable.shape, *[1] * further_axes)
    return torch.where(mask, values, made_up)


def _broadcast(mask: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return a mask ``[N]`` with as many axes as ``part`` ``[N, ...]``, so that it broadcasts over it."""
    further_axes = part.ndim - 1
    return mask.view(-1, *[1] * further_axes)


TARGETS = ("labels", "label")
"""What the target among a record's parts is usually named."""

FILLER = {False: -1.0, True: math.nan}
"""Target of a row that is none, by whether targets are floating."""


@dataclass(frozen=True, eq=False)
class Leaves:
    """The leaves of nested dicts and tuples, such as all parts of a record, in one fixed order.

    This is the one walk through a record. Whoever reads, packs or names its parts has their order from
    here: in another order a mask would be trained on as tokens, and no shape would tell.

    Attributes:
        paths: The keys in dicts and places in tuples that lead to each leaf, from the outside.
        values: The leaves, in the order of ``paths``.
        structure: How they lie, without them: a ``TreeSpec`` of torch's.
        target: The first step to the target, see :func:`target_key`; None where there is none.
    """

    paths: list[tuple[Any, ...]]
    values: list[Any]
    structure: Any
    target: Any

    @classmethod
    def of(cls, branches: Any, *, lists_are_leaves: bool = False) -> Leaves:
        """Return the leaves of a dict or a tuple, nested or not.

        Args:
            branches: The outermost dict may be of any class, as a tokenizer's are.
            lists_are_leaves: Whether a list is a leaf, as one of all records is, and no tuple.
        """
        if isinstance(branches, Mapping):
            branches = dict(branches)
        is_leaf = _is_list if lists_are_leaves else None
        entries, structure = tree_flatten_with_path(branches, is_leaf=is_leaf)
        paths = []
        values = []
        for steps, value in entries:
            keys = tuple(_key(step) for step in steps)
            paths.append(keys)
            values.append(value)
        return cls(paths, values, structure, target_key(branches))

    @property
    def names(self) -> list[str]:
        """The dotted path of each leaf, such as ``inputs.mask``, with a number for a place in a tuple."""
        return [".".join(map(str, path)) for path in self.paths]

    @property
    def is_target(self) -> list[bool]:
        """Whether each leaf is the target or a part of it, in the order of the leaves."""
        return [path[0] == self.target for path in self.paths]

    def rebuild(self, values: Iterable[Any]) -> Any:
        """Return the dict or tuple again with other ``values``, in the order of the leaves."""
        return tree_unflatten(values, self.structure)


def _is_list(value: Any) -> bool:
    """Return whether a value is a list."""
    return isinstance(value, list)


def _key(step: Any) -> Any:
    """Return the dict key or the tuple position that one step of a path names."""
    place = getattr(step, "idx", "")
    return getattr(step, "key", place)


def target_key(branches: Any) -> Any:
    """Return the key or position of the target in a dict or tuple; None if it has fewer than two entries.

    One entry alone is inputs. Of a tuple the target stands last.
    """
    is_tree = isinstance(branches, Mapping | Sequence)
    if not is_tree or len(branches) < 2:
        return None
    if isinstance(branches, Mapping):
        return target_name(list(branches))
    return len(branches) - 1


def target_name(names: Sequence[str]) -> str:
    """Return which of some names is the target's: ``labels`` or ``label`` if there, else the last."""
    for name in TARGETS:
        if name in names:
            return name
    return names[-1]


def plain_tree(branches: Any) -> Any:
    """Return nested dicts and tuples of any class as plain dicts and tuples."""
    if isinstance(branches, Mapping):
        return {name: plain_tree(part) for name, part in branches.items()}
    if isinstance(branches, tuple):
        return tuple(plain_tree(part) for part in branches)
    return branches


@dataclass(frozen=True)
class Packing:
    """The shapes and types by which all tensors of a record are packed into one tensor.

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
        are_complex = any("complex" in d for d in self.dtypes)
        if len(kinds) != 1 or are_complex:
            raise InvalidInputError(
                "batch",
                ", ".join(self.dtypes) or "nothing",
                "must hold whole numbers alone, or floating numbers of one type alone",
                "Convert a mask to the type of the numbers beside it.",
            )

    @classmethod
    def of(cls, batch: Mapping[str, Any] | Sequence[Any]) -> Packing:
        """Return the packing of records with the shapes and types of a batch.

        Args:
            batch: Tensors by name, or in order, or dicts and tuples of such, each tensor with the
                same number of records first. Targets stay apart.

        Raises:
            InvalidInputError: If something else than tensors is in it, or their records are not as many.
        """
        leaves = _tensors_of(batch)
        shapes = tuple(tuple(tensor.shape[1:]) for tensor in leaves.values)
        dtypes = tuple(_dtype(tensor) for tensor in leaves.values)
        return cls(leaves.structure, shapes, dtypes)

    @property
    def parts(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor in one record, by name or position, with dots for nested ones."""
        numbers = range(len(self.shapes))
        leaves = Leaves.of(tree_unflatten(numbers, self.tree))
        return dict(zip(leaves.names, self.shapes, strict=True))

    def pack(self, batch: Mapping[str, Any] | Sequence[Any]) -> torch.Tensor:
        """Return the records of a batch in one tensor, shape ``[N, numbers of a record]``.

        Args:
            batch: As in :meth:`of`.

        Raises:
            InvalidInputError: If the tensors are others than those this was made of.
        """
        if (packing := Packing.of(batch)) != self:
            raise InvalidInputError(
                "batch",
                repr(packing),
                f"must be as many records of {self!r} in every tensor",
            )
        leaves = _tensors_of(batch)
        dtype = None if "float" in self.dtypes[0] else torch.int64
        rows = []
        for tensor in leaves.values:
            flat = tensor.reshape(len(tensor), -1)
            rows.append(flat.to(dtype or tensor.dtype))
        return torch.cat(rows, dim=1)

    def unpack(self, x: torch.Tensor) -> Any:
        """Return the tensors of packed records ``x``, by name or in order; integers become int64."""
        sizes = [math.prod(shape) for shape in self.shapes]
        parts = torch.split(x, sizes, dim=1)
        tensors = []
        for part, shape, dtype in zip(parts, self.shapes, self.dtypes, strict=True):
            tensor = part.view(x.shape[0], *shape)
            tensors.append(tensor.to(getattr(torch, dtype)))
        return tree_unflatten(tensors, self.tree)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return a model that unpacks its input and calls ``model(**tensors)`` or ``model(*tensors)``.

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
    """The structure of records of several tensors, to pack their inputs and to unpack them for a loss.

    The target of a dict is its ``labels``, else its ``label``, else what stands last in it; that of a
    tuple stands last. A dict or tuple of one entry has none.
    """

    inputs: Packing
    names: tuple[str, ...]
    target: str
    size: int

    @property
    def names_target(self) -> bool:
        """Whether the target is known by its usual name, or as the second of exactly two parts."""
        if self.names:
            return not set(self.names).isdisjoint(TARGETS)
        return self.size == 2

    @classmethod
    def split(
        cls,
        records: Any,
        target: str | None = None,
    ) -> tuple[RecordTree | None, torch.Tensor, torch.Tensor]:
        """Split records into their structure (None for two tensors), packed inputs, and targets.

        A training knows of one tensor of inputs and one of targets, whatever a record is made of. The
        target is the part of a usual name, or else the last.

        Args:
            records: Tensors with records along the first axis, in a dict or a tuple.
            target: Name of the target in a dict.
        """
        leaves = _tensors_of(records)
        if not leaves.values:
            raise InvalidInputError("dataset", "nothing", "must hold inputs and a target")
        names: tuple[str, ...] = ()
        if isinstance(records, Mapping):
            names = tuple(records)
        if len(records) == 1:
            packing = Packing.of(records)
            no_target = torch.zeros(len(leaves.values[0]))
            return cls(packing, names, "", 1), packing.pack(records), no_target
        if isinstance(records, Mapping):
            target = target or leaves.target
            inputs: Any = {name: part for name, part in records.items() if name != target}
            y = records[target]
        else:
            target = "the last part"
            *parts, y = records
            inputs = tuple(parts)
            if len(parts) == 1:
                inputs = parts[0]
        if not isinstance(y, torch.Tensor):
            raise InvalidInputError("dataset", target, "must be a tensor: it is the target")
        if isinstance(inputs, torch.Tensor):
            return None, inputs, y
        packing = Packing.of(inputs)
        return cls(packing, names, target, len(records)), packing.pack(inputs), y

    def loss_of(self, loss_of: Any) -> LossOf:
        """Return a loss of packed records that unpacks them for a loss of a dict or of separate tensors."""

        def packed(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            """Unpack one record, and return its loss."""
            parts = self.inputs.unpack(x)
            record: list[Any] = []
            if self.names:
                entries = {}
                for name in self.names:
                    entries[name] = y if name == self.target else parts[name]
                record.append(entries)
            else:
                # Of two parts one is the target: the other was packed alone.
                record += (parts,) if self.size == 2 else parts
                if self.target:
                    record.append(y)
            loss: torch.Tensor = loss_of(model, *record)
            return loss

        return packed


class _Unpacking(nn.Module):
    """A model that unpacks each packed input into the tensors that the inner model takes."""

    def __init__(self, model: nn.Module, packing: Packing) -> None:
        super().__init__()
        self.model = model
        self._packing = packing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the model's outputs, or only their ``logits`` if they have such a field."""
        tensors = self._packing.unpack(x)
        if isinstance(tensors, dict):
            outputs = self.model(**tensors)
        else:
            outputs = self.model(*tensors)
        logits: torch.Tensor = getattr(outputs, "logits", outputs)
        return logits


def _dtype(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's type; all integer types but bool become ``int64``."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name.startswith(("int", "uint")):
        return "int64"
    return name


def _tensors_of(batch: Any) -> Leaves:
    """Return the leaves of a batch, after checking that all are tensors with as many records.

    Raises:
        InvalidInputError: If one is no tensor with records along its first axis, or one has more records
            than another.
    """
    leaves = Leaves.of(batch)
    for part in leaves.values:
        if not _has_rows(part):
            raise InvalidInputError(
                "batch",
                type(part).__name__,
                "must be tensors, or dicts and tuples of tensors, with records along the first axis",
                "Pad records to one public length, and leave texts and lists of numbers out.",
            )
    sizes = {len(tensor) for tensor in leaves.values}
    if len(sizes) > 1:
        sizes_in_words = ", ".join(map(str, sorted(sizes)))
        raise InvalidInputError(
            "batch",
            sizes_in_words,
            "must hold as many records in every tensor",
        )
    return leaves


def _has_rows(part: Any) -> bool:
    """Return whether a part is a dense tensor with a first axis."""
    if not isinstance(part, torch.Tensor):
        return False
    is_dense = part.layout is torch.strided and not part.is_nested
    return is_dense and part.ndim > 0


class ModelOfUnits(nn.Module):
    """A model of rows with ``axes`` axes that also takes units ``[B, R, ...]``, row by row."""

    def __init__(self, inner: nn.Module, axes: int) -> None:
        super().__init__()
        self.inner = inner
        self.axes = axes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return outputs ``[B, R, ...]`` of units ``[B, R, ...]``, ``[B, ...]`` of rows."""
        if x.dim() == self.axes + 1:
            rows: torch.Tensor = self.inner(x)
            return rows
        outputs: torch.Tensor = self.inner(x.flatten(0, 1))
        lead = x.shape[:2]
        return outputs.reshape(*lead, *outputs.shape[1:])


def are_real_rows(targets: torch.Tensor) -> torch.Tensor:
    """Return which targets ``[B, R]`` belong to real rows: finite numbers, or whole ones of at least 0."""
    if targets.is_floating_point():
        return targets.isfinite()
    return targets >= 0


def rows_of(
    outputs: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return outputs and targets of all rows of all units, and a mask of the real rows."""
    is_row = are_real_rows(targets)
    targets_or_zero = torch.where(is_row, targets, 0)
    return outputs.flatten(0, 1), targets_or_zero.flatten(), is_row.flatten()


def sum_of_rows(loss_of: LossOf) -> LossOf:
    """Return a loss of units that sums ``loss_of`` over their real rows.

    Args:
        loss_of: The loss of rows ``[B R, ...]``, one number each.
    """

    def of_units(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the summed loss of each unit ``[B, R, ...]``, shape ``[B]``."""
        is_row = are_real_rows(y)
        targets = torch.where(is_row, y, 0).flatten()
        losses = loss_of(model, x.flatten(0, 1), targets)
        losses = losses.view(y.shape) * is_row
        return losses.sum(dim=1)

    return of_units


def mean_of_rows(score_of: LossOf) -> LossOf:
    """Return a score of units that averages ``score_of`` over their real rows."""
    total = sum_of_rows(score_of)

    def of_units(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the mean score of each unit, shape ``[B]``; 0 for a unit without rows."""
        sums = total(model, x, y)
        rows = are_real_rows(y).sum(dim=1)
        return sums / rows.clamp(min=1)

    return of_units
