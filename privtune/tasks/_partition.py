"""Splits by a keyed hash of each record: adding or removing one record moves no other.

A permutation of N records moves nearly all of them when N changes by one, so that neighbours would
differ in far more than a record. Here the split of a record is a function of the record alone. How
many records a split then holds is random and as private as the records: plans, rates, averages and
noise rest on the declared numbers, which are the expectations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from privtune.errors import InvalidInputError
from privtune.tasks._facts import SPLITS
from privtune.tasks._task import TaskData
from privtune.tasks._usable import contents

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from privtune.training.mechanism.data import TensorData

KEY = "privtune"
"""The public key of the hash, unless a task says another."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the three splits, declared public: what each is expected to hold.

    Args:
        train: Expected training records, at least 1.
        validation: Expected validation records, at least 1.
        test: Expected test records, at least 1.

    Raises:
        InvalidInputError: If a size is below 1.

    Example:
        >>> Sizes(train=1000, validation=100, test=100).declared()
        {'train_records': 1000, 'validation_records': 100, 'test_records': 100}
    """

    train: int
    validation: int
    test: int

    def __post_init__(self) -> None:
        for name in SPLITS:
            if getattr(self, name) < 1:
                raise InvalidInputError(name, getattr(self, name), "must be declared as at least 1")

    def declared(self) -> dict[str, Any]:
        """Return the fields of a task that say so."""
        return {f"{name}_records": size for name, size in vars(self).items()}


def places(
    x: Any, y: Any, shares: Sequence[int], *, ids: Sequence[str] | None = None, key: str = KEY
) -> npt.NDArray[np.int64]:
    """Return the number of the split that each record falls into.

    Args:
        x: Inputs, shape ``[N, ...]``.
        y: Targets, shape ``[N, ...]``.
        shares: How the splits' expected sizes compare, at least one of them above 0.
        ids: What each record is known by, instead of its content.
        key: Any public text. Another key is another partition.

    Returns:
        Numbers from 0, shape ``[N]``.

    **Guarantee**: the place of a record is a function of its id, or of its content where there are
    no ids, of the shares and of the key: of nothing else. Records of equal id, or equal content,
    share a split. Over the key, a record falls into split i with probability ``shares[i] / total``.
    """
    import numpy as np

    total = sum(shares)
    secret = hashlib.blake2b(key.encode(), digest_size=32).digest()
    records: Iterable[bytes] = (
        contents(x, y) if ids is None else (i.encode(errors="surrogatepass") for i in ids)
    )
    drawn = np.fromiter(
        (
            # The top of 64 uniform bits, scaled to 0 ... total - 1 in whole numbers.
            int.from_bytes(hashlib.blake2b(r, digest_size=8, key=secret).digest(), "big") * total
            >> 64
            for r in records
        ),
        dtype=np.int64,
        count=len(y),
    )
    return np.searchsorted(np.cumsum(shares), drawn, side="right")


def split(
    x: Any,
    y: Any,
    sizes: Sizes,
    *,
    ids: Sequence[str] | None = None,
    key: str = KEY,
    numbers: bool = False,
    groups: bool = False,
) -> TaskData:
    """Split records into training, validation and test records by a keyed hash.

    Args:
        x: Inputs, shape ``[N, ...]``, scaled by public constants.
        y: Class numbers, or the targets of a regression, shape ``[N]``.
        sizes: What each split is expected to hold; every record falls into one of them in
            proportion. N itself is not checked: it is private.
        ids: What each record is known by; records of one id share a split. None to go by content;
            records of equal content then share one.
        key: The public key of the hash.
        numbers: Whether targets are those of a regression, not classes.
        groups: Whether records of one id are those of one unit, as :func:`by_unit` takes them.

    Returns:
        The splits, whose true sizes are sealed.

    Example:
        >>> import numpy as np
        >>> x, y = np.arange(1200.0)[:, None], np.zeros(1200)
        >>> data = split(x, y, Sizes(train=1000, validation=100, test=100))
        >>> len(data.train), len(data.validation), len(data.test)
        (990, 122, 88)
        >>> fewer = split(x[1:], y[1:], Sizes(train=1000, validation=100, test=100))
        >>> bool(np.isin(fewer.train.x, data.train.x).all())  # one record less moved no other
        True
    """
    import numpy as np
    import torch

    from privtune.training.mechanism.data import TensorData

    drawn = places(x, y, (sizes.train, sizes.validation, sizes.test), ids=ids, key=key)
    data = TensorData(
        torch.as_tensor(np.asarray(x), dtype=torch.float32),
        torch.as_tensor(np.asarray(y), dtype=torch.float32 if numbers else torch.int64),
        sealed_size=True,
        groups=torch.from_numpy(np.unique(ids, return_inverse=True)[1])
        if groups and ids is not None
        else None,
    )
    train, validation, test = (part_drawn(data, drawn, number) for number in range(3))
    return TaskData(train=train, validation=validation, test=test)


def part_drawn(data: TensorData, drawn: npt.NDArray[np.int64], number: int) -> TensorData:
    """Return the records of one split, whose true size is sealed."""
    import torch

    return data.part(torch.from_numpy((drawn == number).nonzero()[0]), sealed_size=True)


def split_read(
    batches: Iterable[tuple[Any, Any, Sequence[str] | None]],
    *,
    most: int,
    shape: tuple[int, ...],
    sizes: Sizes,
    key: str = KEY,
    numbers: bool = False,
    made: Callable[[Any], Any] = lambda x: x,
) -> TaskData:
    """Split records as :func:`split` does, some at a time: each is held once.

    Args:
        batches: Inputs, targets, and ids or None, of some records each.
        most: How many records there are at most.
        shape: Of a record's inputs as they are kept.
        sizes: What each split is expected to hold.
        key: The public key of the hash.
        numbers: Whether targets are those of a regression.
        made: What is kept of inputs; their place goes by what they were.
    """
    import numpy as np
    import torch

    from privtune.training.mechanism.data import TensorData

    kind = np.float32 if numbers else np.int64
    most = max(most, 1)
    rooms = [(np.empty((most, *shape), dtype=np.float32), np.empty(most, kind)) for _ in range(3)]
    used = [0, 0, 0]
    shares = (sizes.train, sizes.validation, sizes.test)
    for x, y, ids in batches:
        drawn = places(x, y, shares, ids=ids, key=key)
        kept = made(x)
        for number, (inputs, targets) in enumerate(rooms):
            own = drawn == number
            start, end = used[number], used[number] + int(own.sum())
            inputs[start:end], targets[start:end] = kept[own], y[own]
            used[number] = end
    found = []
    for (inputs, targets), count in zip(rooms, used, strict=True):
        if count == 0:  # one that cannot be used stands for none
            inputs[:1], targets[:1] = 0, 0
        lost = None if count else torch.ones(1, dtype=torch.bool)
        n = max(count, 1)
        part = torch.from_numpy(inputs[:n]), torch.from_numpy(targets[:n])
        found.append(TensorData(*part, sealed_size=True, unusable=lost))
    train, validation, test = found
    return TaskData(train=train, validation=validation, test=test)
