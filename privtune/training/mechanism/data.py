"""The private records of a training, fetched by index."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset, default_collate

from privtune.errors import InvalidInputError
from privtune.training.mechanism.packing import RecordTree
from privtune.training.mechanism.records import NO_FACTS, RecordFacts, blames_records

__all__ = [
    "Data",
    "DatasetData",
    "Fetched",
    "TensorData",
    "fingerprint",
    "synthetic",
    "targets_are_classes",
]

Fetched = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Inputs, targets, and which of the records cannot be used; None for none of them."""


_ALIKE = 8  # records of one shape and type, before any others had so many, say what all are of
_READ_AT_MOST = 256  # records for that, where they differ

_Read = tuple[RecordTree | None, torch.Tensor, torch.Tensor]
"""What records are made of, their inputs and their targets."""


class Data(Protocol):
    """Records that can be fetched by index."""

    @property
    def sealed_size(self) -> bool:
        """Whether how many records these are is private, as that of a Poisson subset is.

        The schedule then counts the records that are expected: a check of ``len`` would tell.
        """
        ...

    def __len__(self) -> int:
        """Return the number of records."""
        ...

    @property
    def like(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs ``[0, ...]`` and targets ``[0, ...]``: shape and type of a record, both public."""
        ...

    def fetch(self, index: torch.Tensor) -> Fetched:
        """Return the records at ``index``, with zeros in place of those that cannot be used."""
        ...

    def held_to(self, facts: RecordFacts) -> Data:
        """Return the same data, of which records that break these facts cannot be used."""
        ...

    def to(self, device: torch.device) -> Data:
        """Return the same data, fetched onto ``device``."""
        ...


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

    Raises:
        InvalidInputError: If the two do not have the same number of records, or none.

    Example:
        >>> import torch
        >>> from privtune.tasks import TensorData
        >>> data = TensorData(torch.zeros(100, 4), torch.zeros(100, dtype=torch.long), sealed_size=False)
        >>> len(data), len(data.part(torch.arange(10), sealed_size=False).to(torch.device("cpu")))
        (100, 10)
        >>> lost = torch.arange(100) == 3
        >>> x, y, unusable = data.marked(lost).fetch(torch.tensor([3, 4]))
        >>> unusable.tolist(), [part.shape[0] for part in data.take(torch.tensor([3]))]
        ([True, False], [1, 1])
        >>> from privtune.training.mechanism.records import NO_FACTS
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
        if self.unusable is None or not bool(self.unusable.any()):
            return self.x, self.y
        return _replaced(self.x, self.unusable), _replaced(self.y, self.unusable)

    def take(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of some records: ``index_select`` is 5 times faster than ``x[i]``.

        Args:
            index: Their positions, whole numbers ``[n]``.
        """
        x, y = self._usable
        return x.index_select(0, index), y.index_select(0, index)

    @property
    def like(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Data``."""
        return self.x[:0], self.y[:0]

    def fetch(self, index: torch.Tensor) -> Fetched:
        """Return inputs, targets and which cannot be used (None for none) of some records.

        Args:
            index: Their positions, whole numbers ``[n]``.
        """
        return (*self.take(index), None if self.unusable is None else self.unusable[index])

    def held_to(self, facts: RecordFacts) -> TensorData:
        """Return the data with those records unusable, too, that are not what the facts say.

        Args:
            facts: Public facts about every record.

        Returns:
            The data, of the same size.
        """
        return self.marked(facts.unusable(self.x, self.y))

    def marked(self, unusable: torch.Tensor | None) -> TensorData:
        """Return the data with these records unusable, too.

        Args:
            unusable: True for those, shape ``[N]``; None for none.
        """
        if unusable is None:
            return self
        both = unusable if self.unusable is None else self.unusable | unusable
        return replace(self, unusable=both)

    def part(self, index: torch.Tensor, *, sealed_size: bool) -> TensorData:
        """Return some records as data; of none, one record that cannot be used.

        Args:
            index: Their positions, whole numbers ``[n]``.
            sealed_size: Whether their number is private.
        """
        if len(index) == 0:
            nothing = torch.ones(1, dtype=torch.bool, device=self.x.device)
            return replace(self._at(index.new_zeros(1)), sealed_size=sealed_size, unusable=nothing)
        return replace(self._at(index), sealed_size=sealed_size)

    def to(self, device: torch.device) -> TensorData:
        """Return the data on a device.

        Args:
            device: The device.
        """
        lost = None if self.unusable is None else self.unusable.to(device)
        return replace(self, x=self.x.to(device), y=self.y.to(device), unusable=lost)

    def _at(self, index: torch.Tensor) -> TensorData:
        lost = None if self.unusable is None else self.unusable[index]
        groups = None if self.groups is None else self.groups[index.cpu()]
        return replace(self, x=self.x[index], y=self.y[index], unusable=lost, groups=groups)


class DatasetData:
    """Data that does not fit into memory, fetched record by record when it is sampled.

    Args:
        dataset: A map-style dataset of pairs ``(input, target)`` of tensors, arrays or numbers, or
            of dicts or tuples of these as in ``RecordTree``, all of one shape and type: another cannot be
            used.
        device: Where to put what was fetched.
        like: What records are made of, inputs and targets of any number of made-up ones, which say
            the shape and type of all; those of the first eight that are alike, unless given.
        facts: Public facts that every record is held to.
    """

    sealed_size = False

    def __init__(
        self,
        dataset: Dataset[Any],
        device: torch.device | None = None,
        *,
        like: _Read | None = None,
        facts: RecordFacts = NO_FACTS,
    ) -> None:
        if not hasattr(dataset, "__len__") or len(dataset) == 0:
            raise InvalidInputError(
                "dataset", type(dataset).__name__, "must have a length, of at least 1"
            )
        self._dataset = dataset
        self._size = len(dataset)
        self._device = device or torch.device("cpu")
        self._like = like
        self._facts = facts

    def __len__(self) -> int:
        return self._size

    @property
    def like(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Data``."""
        _, x, y = self._first()
        return x[:0].to(self._device), y[:0].to(self._device)

    @property
    def tree(self) -> RecordTree | None:
        """What records are made of: see ``TensorData``."""
        return self._first()[0]

    def _first(self) -> _Read:
        if self._like is None:
            found = (read for i in range(self._size) if (read := self._read(i)) is not None)
            self._like = _usual(itertools.islice(found, _READ_AT_MOST))
        if self._like is None:
            raise InvalidInputError(
                "dataset",
                "records",
                "must be readable as pairs of tensors, or as dicts or tuples of tensors",
                "Pad records to one public length, and leave texts and lists of numbers out: "
                'a dataset of Hugging Face\'s gives tensors after set_format("torch").',
            )
        return self._like

    def fetch(self, index: torch.Tensor) -> Fetched:
        """Fetch the records at ``index``, each of them once: see ``Data``."""
        like = self.like
        if len(index) == 0:
            return (*like, None)
        unique, places = torch.unique(index.cpu(), return_inverse=True)
        read = [self._read(int(i)) for i in unique]
        pairs = [r[1:] if r and r[0] == self.tree else None for r in read]
        unread = torch.tensor([p is None or any(map(_differs, p, like)) for p in pairs])
        zeros = tuple(torch.zeros((1, *part.shape[1:]), dtype=part.dtype) for part in like)
        whole = [
            zeros if bad or p is None else p for p, bad in zip(pairs, unread.tolist(), strict=True)
        ]
        x, y = (torch.cat([pair[part] for pair in whole]) for part in (0, 1))
        broken = self._facts.unusable(x, y)
        lost = unread if broken is None else unread | broken
        x, y, lost = (part[places].to(self._device) for part in (x, y, lost))
        if not bool(lost.any()):
            return x, y, None
        return _replaced(x, lost), _replaced(y, lost), lost

    def held_to(self, facts: RecordFacts) -> DatasetData:
        """Hold every record that is fetched to the facts: see ``Data``."""
        return DatasetData(self._dataset, self._device, like=self._like, facts=facts)

    def to(self, device: torch.device) -> DatasetData:
        """Return the data, fetched onto ``device``."""
        return DatasetData(self._dataset, device, like=self._like, facts=self._facts)

    def _read(self, number: int) -> _Read | None:
        """Return a record as tensors ``[1, ...]``, or None if it is none of such."""
        try:
            record = self._dataset[number]
            if not isinstance(record, Mapping | tuple | list):
                return None  # a tensor alone would be taken apart, its last row for a target
            known = dict(record) if isinstance(record, Mapping) else tuple(record)
            names = self._like[0].names if self._like and self._like[0] else ()
            if isinstance(known, dict) and known.keys() == set(names):
                known = {name: known[name] for name in names}
            whole = tree_map(_collated, known, is_leaf=lambda part: isinstance(part, list))
            return RecordTree.split(whole)
        except InvalidInputError:
            return None
        except Exception as error:
            if not blames_records(error):
                raise
            return None


def _collated(part: Any) -> torch.Tensor:
    found = default_collate([part])
    if not isinstance(found, torch.Tensor):
        raise TypeError("a record holds tensors, arrays and numbers")
    return found


def _usual(found: Iterable[_Read]) -> _Read | None:
    """Return one of the first kind of which some were found, or of the most frequent one.

    Not the first record as it stands: one of another shape or type would make all others unusable.
    """
    kinds: list[list[_Read]] = []
    for read in found:
        own = next((kind for kind in kinds if _alike(kind[0], read)), None)
        if own is None:
            kinds.append(own := [])
        own.append(read)
        if len(own) == _ALIKE:
            return own[0]
    return max(kinds, key=len)[0] if kinds else None


def _alike(one: _Read, other: _Read) -> bool:
    return one[0] == other[0] and not any(map(_differs, one[1:], other[1:]))


def _differs(one: torch.Tensor, like: torch.Tensor) -> bool:
    return one.shape[1:] != like.shape[1:] or one.dtype != like.dtype


def _replaced(values: torch.Tensor, lost: torch.Tensor) -> torch.Tensor:
    """Put zeros in place of the records that cannot be used."""
    return values.masked_fill(lost.view(-1, *(1 for _ in values.shape[1:])), 0)


def targets_are_classes(data: Data) -> bool:
    """Say whether targets are known to be whole numbers of at least 0; looks at whole tensors alone."""
    if not isinstance(data, TensorData) or data.sealed_size:
        return False
    y = data._usable[1]  # a bad record does not choose how the others are computed
    return not y.dtype.is_floating_point and bool((y >= 0).all())


_SPREAD = 64  # steps from the first record of a data set on disk to its last, for its fingerprint


def fingerprint(data: Data) -> str:
    """Return a digest that tells whether a training goes on with the records it began with. Sealed.

    Of every record in memory; of a data set that is read record by record, of 65 spread over it.
    """
    if isinstance(data, TensorData):
        parts = [data.x, data.y, *([] if data.unusable is None else [data.unusable])]
    else:
        spread = sorted({number * (len(data) - 1) // _SPREAD for number in range(_SPREAD + 1)})
        parts = list(data.fetch(torch.tensor(spread, device=data.like[0].device))[:2])
    found = hashlib.sha256()
    for part in parts:
        found.update(f"{part.dtype} {tuple(part.shape)}".encode())
        found.update(part.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def synthetic(
    x: torch.Tensor, y: torch.Tensor, shape: tuple[int, int], device: torch.device, *, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make records of the shape and type of the rows of ``x`` and ``y`` that hold no data.

    Those of another seed than 0 differ from those of 0 in all that one may count or measure of them.
    """
    generator = torch.Generator().manual_seed(seed)

    def size(like: torch.Tensor) -> torch.Size:
        return torch.Size((*shape, *like.shape[1:]))

    def counted(like: torch.Tensor) -> torch.Tensor:
        bits = torch.arange(size(like).numel()) % 2
        if seed:
            bits = torch.randint(2, bits.shape, generator=generator)
        return bits.view(size(like)).to(device, like.dtype)

    floating = x.dtype.is_floating_point
    inputs = (
        (torch.randn(size(x), generator=generator) * (0.5 if seed else 1.0)).to(device, x.dtype)
        if floating
        else counted(x)
    )
    floating = y.dtype.is_floating_point
    targets = (
        torch.rand(size(y), generator=generator).to(device, y.dtype) if floating else counted(y)
    )
    return inputs, targets
