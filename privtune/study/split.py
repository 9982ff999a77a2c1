"""One validation split a round, disjoint from the training records."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Iterable
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from privtune.errors import PrivTuneError

if TYPE_CHECKING:
    import torch

    from privtune.study._results import Results
    from privtune.training.mechanism.data import Data, TensorData

__all__ = ["Split", "SplitError"]

_DIGEST = "validation.sha256"
_ROWS = 4096
_CHANCE = 0.1  # of distinct records, more than this share is not among others by chance
_SEED = 20_190_705  # of the multipliers of the hash: public, so that no two runs disagree


class SplitError(PrivTuneError):
    """Trials of a round were scored on what was not declared."""


class Split:
    """What the trials of a round were scored on; sealed.

    The charge of a selection covers trials that look at one split, apart from the training records.

    Args:
        results: Keep the digest of the split, for trials of other processes and times.
    """

    def __init__(self, results: Results) -> None:
        self._results = results
        self._lock = threading.Lock()
        self._known: dict[tuple[int, ...], tuple[weakref.ref[torch.Tensor], ...]] = {}

    def check(self, validation: TensorData, train: Data) -> None:
        """Refuse another split than that of the trials before, and one of training records.

        Of training records that are read one by one, 4,096 are looked at.

        Raises:
            SplitError: If it is another, shares memory with the training records, or more than a tenth
                of its records are among them (where those are all but distinct, so that it is no chance).
        """
        parts = (
            validation.x,
            validation.y,
            *(getattr(train, n) for n in "xy" if hasattr(train, n)),
        )
        key = tuple(n for t in parts for n in (t.data_ptr(), t._version, len(t)))
        with self._lock:
            refs = self._known.get(key, ())  # an address is used again once its tensor is gone
            if refs and all(ref() is t for ref, t in zip(refs, parts, strict=True)):
                return
            self._check_same(validation)
            if hasattr(train, "x"):
                for one, other in product(_inputs(validation), _inputs(train)):
                    _refuse_shared(one, other)
            _check_apart(validation.x, train)
            _check_units_apart(validation, train)
            self._known[key] = tuple(map(weakref.ref, parts))

    def _check_same(self, validation: TensorData) -> None:
        digest = hashlib.sha256()
        for tensor in (validation.x, validation.y):
            digest.update(_bytes(tensor).tobytes())
        found = digest.hexdigest().encode()
        self._results.put(_DIGEST, found)
        if self._results.get(_DIGEST) != found:
            raise SplitError(
                "Trials of one round were scored on different validation records, but one split was "
                "charged. Split once, outside of the objective."
            )


def _inputs(data: Any) -> Iterable[torch.Tensor]:
    """Return the inputs as they were given, where they were packed since."""
    return data.tree.given if getattr(data, "tree", None) else (data.x,)


def _refuse_shared(validation: torch.Tensor, train: torch.Tensor) -> None:
    if 0 in (validation.stride(0), train.stride(0)):
        return  # one row for all records, as of positions: nobody's
    same = validation.untyped_storage().data_ptr() == train.untyped_storage().data_ptr()
    if same and _span(validation)[0] < _span(train)[1] and _span(train)[0] < _span(validation)[1]:
        raise SplitError(_NOT_APART)


def _check_apart(validation: torch.Tensor, train: Data) -> None:
    known = _inputs_of(train)
    if validation.dtype != known.dtype or validation.shape[1:] != known.shape[1:]:
        return
    rows = _hashes(known)
    distinct = np.unique(rows)
    if len(distinct) < 0.99 * len(rows):
        return  # few values are possible: equal records are different persons'
    own = np.unique(_hashes(validation))  # a blank image counts once, however many there are
    found = len(np.intersect1d(own, distinct, assume_unique=True))
    share = found * (len(train) / max(1, len(known))) / len(own)
    if (share > 0.5 and 2 * len(known) > len(train)) or (share > _CHANCE and found > 3):
        raise SplitError(_NOT_APART)


def _inputs_of(train: Data) -> torch.Tensor:
    """Return the inputs of the training records, or of some that are spread over them."""
    if hasattr(train, "x"):
        inputs: torch.Tensor = train.x
        return inputs
    import torch

    index = torch.arange(min(len(train), _ROWS)) * len(train) // min(len(train), _ROWS)
    x, _, lost = train.fetch(index.to(train.like[0].device))
    return x if lost is None else x[~lost]


def _check_units_apart(validation: TensorData, train: Data) -> None:
    there = getattr(train, "groups", None)
    if validation.groups is None or there is None:
        return
    if bool(np.isin(validation.groups.numpy(), there.numpy()).any()):
        raise SplitError(
            f"Rows of one {validation.unit or 'group'} are in training and validation, which were charged "
            f"as disjoint. Split by {validation.unit or 'group'} before the records are made."
        )


_NOT_APART = (
    "The validation records are training records, and training and validation were charged as "
    "disjoint. Set the validation records apart before the training set is made."
)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


def _bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    rows = tensor.detach().cpu().contiguous().numpy().reshape(len(tensor), -1)
    return rows.view(np.uint8).reshape(len(tensor), -1)


def _hashes(tensor: torch.Tensor) -> npt.NDArray[np.uint64]:
    """Return a 64-bit number of every row: equal rows have equal ones."""
    rows = _bytes(tensor)
    width = -(-rows.shape[1] // 8) * 8
    factors = np.random.default_rng(_SEED).integers(1, 2**63, width // 8, dtype=np.uint64) * 2 + 1
    out = np.empty(len(rows), dtype=np.uint64)
    for start in range(0, len(rows), _ROWS):
        part = np.zeros((len(rows[start : start + _ROWS]), width), dtype=np.uint8)
        part[:, : rows.shape[1]] = rows[start : start + _ROWS]
        words = part.view(np.uint64)
        words ^= words >> np.uint64(29)
        out[start : start + len(part)] = (words * factors).sum(axis=1, dtype=np.uint64)
    return out
