"""Clipping rules: coefficients that bound each record's gradient, and the sensitivity of the clipped sum.

A clipping maps the norms of per-sample gradients to coefficients. Its sensitivity is the largest
L2 norm that one record can add to the clipped sum. A norm that is not finite has coefficient zero.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from privtune.errors import InvalidInputError

if TYPE_CHECKING:
    import torch


_SMALLEST = 1e-15  # of bounds: float32 sees no norm below 1e-19


class Clipping(ABC):
    """A rule that bounds how much each record may add to a sum of gradients.

    **Guarantee**: with ``n`` the norms of a record's gradient by group, the scaled gradient
    ``coefficients(n) * gradient`` has an L2 norm of at most ``sensitivity``.
    """

    by_layer: bool = False
    """Whether norms are taken layer by layer; otherwise over all parameters at once."""

    @abstractmethod
    def sensitivity(self, candidates: int) -> torch.Tensor:
        """Return the sensitivity of each candidate's clipped sum, shape ``[K]``, in float64."""

    @abstractmethod
    def limits(self, norms: torch.Tensor) -> torch.Tensor:
        """Return the bounds that ``rule`` takes beside norms ``[G, K, B]``, G the number of layers or 1."""

    @staticmethod
    @abstractmethod
    def rule(norms: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
        """Map finite norms to coefficients in a new tensor, by tensor operations that can be compiled."""

    def factors(self, norms: torch.Tensor) -> torch.Tensor:
        """Map finite norms, shape ``[G, K, B]``, to coefficients in a new tensor of the same shape."""
        return self.rule(norms, self.limits(norms))

    def coefficients(self, norms: torch.Tensor) -> torch.Tensor:
        """Map norms to coefficients as ``factors`` does; a norm that is not finite gets 0."""
        return self.factors(norms).masked_fill_(~norms.isfinite(), 0.0)

    def unclipped(self, norms: torch.Tensor) -> torch.Tensor:
        """Return which records keep their full gradient, bool ``[K, B]``, given norms ``[G, K, B]``."""
        return (norms <= self.limits(norms)).all(dim=0)


@dataclass(frozen=True, eq=False)
class Flat(Clipping):
    """Clipping that scales long gradients down to ``max_grad_norm``, a float or ``[K]`` (Abadi et al. 2016).

    Infinity clips nothing and may only go with a noise multiplier of zero.
    """

    max_grad_norm: float | torch.Tensor

    def sensitivity(self, candidates: int) -> torch.Tensor:
        """Return ``max_grad_norm`` of each candidate, shape ``[K]``."""
        return _column("max_grad_norm", self.max_grad_norm, candidates)

    def limits(self, norms: torch.Tensor) -> torch.Tensor:
        """Return ``max_grad_norm`` of each candidate, shape ``[K, 1]``."""
        bounds = self.sensitivity(norms.shape[1])
        return _as_rows(bounds, norms)

    @staticmethod
    def rule(norms: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
        """Return the coefficients ``min(1, max_grad_norm / norm)``."""
        return (limits / norms).clamp_(max=1.0)


@dataclass(frozen=True, eq=False)
class Automatic(Clipping):
    """Clipping that normalises gradients: ``g / (norm + stabilizer)`` (Bu et al., arXiv 2206.07136)."""

    stabilizer: float = 0.01

    def __post_init__(self) -> None:
        if not (math.isfinite(self.stabilizer) and self.stabilizer > 0.0):
            raise InvalidInputError(
                "stabilizer",
                self.stabilizer,
                "must be a finite number above 0",
            )

    def sensitivity(self, candidates: int) -> torch.Tensor:
        """Return 1: a normalised gradient is shorter than that."""
        return _column("max_grad_norm", 1.0, candidates)

    def limits(self, norms: torch.Tensor) -> torch.Tensor:
        """Return the constant that is added to every norm, shape ``[1, 1]``."""
        return norms.new_full((1, 1), self.stabilizer)

    @staticmethod
    def rule(norms: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
        """Return the coefficients ``1 / (norm + stabilizer)``."""
        return (norms + limits).reciprocal_()

    def unclipped(self, norms: torch.Tensor) -> torch.Tensor:
        """Return which records have a norm of at most 1, as if they were clipped to it, shape ``[K, B]``."""
        return (norms <= 1.0).all(dim=0)


@dataclass(frozen=True, eq=False)
class AutomaticByLayer(Automatic):
    """Clipping that normalises each of L layers: ``g / (sqrt(L) (norm + stabilizer))`` (Bu et al., §4).

    **Guarantee**: L layers shorter than ``1 / sqrt(L)`` are together shorter than 1.
    """

    by_layer = True

    def limits(self, norms: torch.Tensor) -> torch.Tensor:
        """Return the constant that is added to every norm, shape ``[1, 1, 1]``."""
        return super().limits(norms).unsqueeze(0)

    @staticmethod
    def rule(norms: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
        """Return the coefficients ``1 / (sqrt(L) (norm + stabilizer))``, layer by layer."""
        layers = norms.shape[0]
        factors = Automatic.rule(norms, limits)
        return factors.mul_(layers**-0.5)


@dataclass(frozen=True, eq=False)
class EqualByLayer(Flat):
    """Clipping of the gradient of each of L layers to ``max_grad_norm / sqrt(L)``.

    **Guarantee**: the squares of L such norms add up to ``max_grad_norm`` squared at most.
    """

    by_layer = True

    def limits(self, norms: torch.Tensor) -> torch.Tensor:
        """Return the bound of every layer, shape ``[1, K, 1]``."""
        bounds = super().limits(norms) / math.sqrt(norms.shape[0])
        return bounds.unsqueeze(0)


@dataclass(frozen=True, eq=False)
class CoordinateTransform(Clipping):
    """Clipping of ``(g - center) / scale`` in place of ``g`` (AdaCliP, arXiv 1908.07643).

    The noisy mean of the transformed gradients is mapped back by the oracle: it answers
    ``scale * mean + center``. Both are ``[K, P]`` and functions of past releases only; ``scale`` is above 0.
    """

    center: torch.Tensor
    scale: torch.Tensor
    max_norm: float = 1.0

    def sensitivity(self, candidates: int) -> torch.Tensor:
        """Return ``max_norm`` for each candidate, the sensitivity in transformed coordinates."""
        return _column("max_norm", self.max_norm, candidates)

    def limits(self, norms: torch.Tensor) -> torch.Tensor:
        """Return ``max_norm`` for every candidate, shape ``[K, 1]``."""
        bounds = self.sensitivity(norms.shape[1])
        return _as_rows(bounds, norms)

    @staticmethod
    def rule(norms: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
        """Return the coefficients ``min(1, max_norm / norm)`` for norms in transformed coordinates."""
        return Flat.rule(norms, limits)


class _Columns(threading.local):
    """Caches of a thread: bounds in float64, and the same bounds in other types or on other devices.

    Attributes:
        bounds: Bounds as float64 ``[K]``, behind what each was made of and the version of that.
        rows: The same in another type or on another device ``[K, 1]``, behind the column.
    """

    def __init__(self) -> None:
        self.bounds: dict[tuple[float, int], tuple[object, int, torch.Tensor]] = {}
        self.rows: dict[tuple[int, torch.device, torch.dtype], tuple[torch.Tensor, ...]] = {}


_columns = _Columns()
_MOST_COLUMNS = 16


def _column(name: str, value: float | torch.Tensor, candidates: int) -> torch.Tensor:
    """Return a bound as a cached float64 column ``[K]``, and check that it is above 0.

    Every step of a training asks for it, so the last ones are remembered: a tensor's for as long as nobody
    writes to it.

    Args:
        name: Of the bound, for the error.
        value: One for all candidates, or shape ``[K]``.
        candidates: How many there are, K.

    Raises:
        InvalidInputError: If it has another shape, or a number of it is too small for float32.
    """
    import torch

    is_tensor = isinstance(value, torch.Tensor)
    version = 0
    if isinstance(value, torch.Tensor) and not value.is_inference():
        version = value._version
    # The key of a tensor is its id, which is above 0; that of a plain number is the number negated,
    # which is below 0, since bounds are above it. So no number is taken for a tensor.
    number = float(id(value)) if is_tensor else -float(value)
    key = (number, candidates)
    columns = _columns.bounds
    cell = columns.get(key)
    if cell is not None and (not is_tensor or (cell[0] is value and cell[1] == version)):
        return cell[2]
    column = torch.as_tensor(value, dtype=torch.float64).detach()
    if column.ndim > 1 or column.numel() not in (1, candidates):
        raise InvalidInputError(name, tuple(column.shape), f"must be one number or {candidates}")
    if not looks_freely(column.device):
        column = column.masked_fill(~(column >= _SMALLEST), math.nan)
    # Plain numbers are checked several times faster than tensors; what is no number is refused, too.
    elif not all(number >= _SMALLEST for number in column.reshape(-1).tolist()):
        raise InvalidInputError(name, value, f"must be at least {_SMALLEST:g}")
    column = column.expand(candidates)
    if not (isinstance(value, torch.Tensor) and value.is_inference()):
        _make_room(columns)
        columns[key] = (value, version, column)
    return column


def _as_rows(column: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a column ``[K]`` as ``[K, 1]`` in the type and on the device of ``like``, cached."""
    import torch

    cache = _columns.rows
    key = (id(column), like.device, like.dtype)
    if key not in cache or cache[key][0] is not column:
        _make_room(cache)
        with torch.inference_mode(mode=False):  # kept for those who are not in that mode, too
            bounds = sent(column.to(like.dtype), like.device)
            rows = bounds.unsqueeze(1)
        cache[key] = (column, rows)
    return cache[key][1]


def _make_room(cache: dict[Any, Any]) -> None:
    """Drop the oldest entries of a full cache, so that one more fits."""
    while len(cache) >= _MOST_COLUMNS:
        oldest = next(iter(cache))
        cache.pop(oldest)


def looks_freely(device: torch.device) -> bool:
    """Return whether reading a number from a device is quick: True on the CPU, False on a GPU."""
    return device.type == "cpu"


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return values on a device; a copy from the CPU to a GPU does not block."""
    if looks_freely(device) or not looks_freely(values.device):
        return values.to(device)
    return values.contiguous().pin_memory().to(device, non_blocking=True)
