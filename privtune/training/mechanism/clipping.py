"""Bounding each record's contribution, and saying by how much: the noise reads it from here.

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
    """How much each record may add to a sum of gradients.

    **Guarantee**: with ``n`` the norms of a record's gradient by group, the scaled gradient
    ``coefficients(n) * gradient`` has an L2 norm of at most ``sensitivity``.
    """

    by_layer: bool = False
    """Whether norms are taken layer by layer; otherwise over all parameters at once."""

    @abstractmethod
    def sensitivity(self, candidates: int) -> torch.Tensor:
        """Return the sensitivity of each candidate's sum, shape ``[K]``, float64: where its bounds lie."""

    @abstractmethod
    def limits(self, norms: torch.Tensor) -> torch.Tensor:
        """Return what ``rule`` takes beside norms ``[G, K, B]``, G the number of layers or 1."""

    @staticmethod
    @abstractmethod
    def rule(norms: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
        """Map finite norms to new coefficients: tensor operations alone, so it can be compiled."""

    def factors(self, norms: torch.Tensor) -> torch.Tensor:
        """Map finite norms, shape ``[G, K, B]``, to new coefficients of the same shape."""
        return self.rule(norms, self.limits(norms))

    def coefficients(self, norms: torch.Tensor) -> torch.Tensor:
        """Map norms to coefficients as ``factors`` does, and norms that are not finite to zero."""
        return self.factors(norms).masked_fill_(~norms.isfinite(), 0.0)

    def unclipped(self, norms: torch.Tensor) -> torch.Tensor:
        """Return 1 where a record is not scaled down, shape ``[K, B]``, given ``[G, K, B]``."""
        return (norms <= self.limits(norms)).all(dim=0)


@dataclass(frozen=True, eq=False)
class Flat(Clipping):
    """Scale a gradient down to ``max_grad_norm``, a float or ``[K]``, if longer (Abadi et al. 2016).

    Infinity clips nothing and may only go with a noise multiplier of zero.
    """

    max_grad_norm: float | torch.Tensor

    def sensitivity(self, candidates: int) -> torch.Tensor:
        """Return ``max_grad_norm`` of each candidate."""
        return _column("max_grad_norm", self.max_grad_norm, candidates)

    def limits(self, norms: torch.Tensor) -> torch.Tensor:
        """Return the bounds, shape ``[K, 1]``."""
        return _as_rows(self.sensitivity(norms.shape[1]), norms)

    @staticmethod
    def rule(norms: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
        """Return ``min(1, max_grad_norm / norm)``."""
        return (limits / norms).clamp_(max=1.0)


@dataclass(frozen=True, eq=False)
class Automatic(Clipping):
    """Normalise every gradient: ``g / (norm + stabilizer)`` (Bu et al. 2023, arXiv 2206.07136)."""

    stabilizer: float = 0.01

    def __post_init__(self) -> None:
        if not (math.isfinite(self.stabilizer) and self.stabilizer > 0.0):
            raise InvalidInputError(
                "stabilizer", self.stabilizer, "must be a finite number above 0"
            )

    def sensitivity(self, candidates: int) -> torch.Tensor:
        """Return 1: a normalised gradient is shorter than that."""
        return _column("max_grad_norm", 1.0, candidates)

    def limits(self, norms: torch.Tensor) -> torch.Tensor:
        """Return the stabilizer."""
        return norms.new_full((1, 1), self.stabilizer)

    @staticmethod
    def rule(norms: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
        """Return ``1 / (norm + stabilizer)``."""
        return (norms + limits).reciprocal_()

    def unclipped(self, norms: torch.Tensor) -> torch.Tensor:
        """Return 1 where the norm is at most 1."""
        return (norms <= 1.0).all(dim=0)


@dataclass(frozen=True, eq=False)
class AutomaticByLayer(Automatic):
    """Normalise the gradient of each of L layers: ``g / (sqrt(L) (norm + stabilizer))`` (Bu et al., §4).

    **Guarantee**: L layers shorter than ``1 / sqrt(L)`` are together shorter than 1.
    """

    by_layer = True

    def limits(self, norms: torch.Tensor) -> torch.Tensor:
        """Return the stabilizer, shape ``[1, 1, 1]``."""
        return super().limits(norms).unsqueeze(0)

    @staticmethod
    def rule(norms: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
        """Return ``1 / (sqrt(L) (norm + stabilizer))``, layer by layer."""
        return Automatic.rule(norms, limits).mul_(norms.shape[0] ** -0.5)


@dataclass(frozen=True, eq=False)
class EqualByLayer(Flat):
    """Clip the gradient of each of L layers to ``max_grad_norm / sqrt(L)``.

    **Guarantee**: the squares of L such norms add up to ``max_grad_norm`` squared at most.
    """

    by_layer = True

    def limits(self, norms: torch.Tensor) -> torch.Tensor:
        """Return the bound of every layer, shape ``[1, K, 1]``."""
        return (super().limits(norms) / math.sqrt(norms.shape[0])).unsqueeze(0)


@dataclass(frozen=True, eq=False)
class CoordinateTransform(Clipping):
    """Clip ``(g - center) / scale`` instead of ``g`` (AdaCliP, arXiv 1908.07643).

    The noisy mean of the transformed gradients is mapped back by the oracle: it answers
    ``scale * mean + center``. Both are ``[K, P]`` and functions of past releases only; ``scale`` is above 0.
    """

    center: torch.Tensor
    scale: torch.Tensor
    max_norm: float = 1.0

    def sensitivity(self, candidates: int) -> torch.Tensor:
        """Return ``max_norm``, in transformed coordinates."""
        return _column("max_norm", self.max_norm, candidates)

    def limits(self, norms: torch.Tensor) -> torch.Tensor:
        """Return ``max_norm`` for every candidate, shape ``[K, 1]``."""
        return _as_rows(self.sensitivity(norms.shape[1]), norms)

    @staticmethod
    def rule(norms: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
        """Return ``min(1, max_norm / norm)`` for norms in transformed coordinates."""
        return Flat.rule(norms, limits)


class _Columns(threading.local):
    """Columns of a thread, and where they are needed: stacks are trained side by side."""

    def __init__(self) -> None:
        self.known: dict[tuple[float, int], tuple[object, int, torch.Tensor]] = {}
        self.there: dict[tuple[int, torch.device, torch.dtype], tuple[torch.Tensor, ...]] = {}


_columns = _Columns()
_KEPT = 16


def _column(name: str, value: float | torch.Tensor, candidates: int) -> torch.Tensor:
    """Turn a bound into float64 of shape ``[K]`` and check that it is above 0."""
    import torch

    tensor = isinstance(value, torch.Tensor)
    version = value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0
    # The key of a tensor is its id, which is above 0; that of a plain number is the number negated,
    # which is below 0, since bounds are above it. So no number is taken for a tensor.
    key = (float(id(value)) if tensor else -float(value), candidates)
    columns = _columns.known
    known = columns.get(key)
    if known is not None and (not tensor or (known[0] is value and known[1] == version)):
        return known[2]
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
    """Turn float64 ``[K]`` into the type and device of ``like`` and shape ``[K, 1]``."""
    import torch

    there, key = _columns.there, (id(column), like.device, like.dtype)
    if key not in there or there[key][0] is not column:
        _make_room(there)
        with torch.inference_mode(mode=False):  # kept for those who are not in that mode, too
            there[key] = (column, sent(column.to(like.dtype), like.device).unsqueeze(1))
    return there[key][1]


def _make_room(known: dict[Any, Any]) -> None:
    while len(known) >= _KEPT:
        known.pop(next(iter(known)))


def looks_freely(device: torch.device) -> bool:
    """Say whether looking at a number that lies on a device makes nobody wait."""
    return device.type == "cpu"


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return values on a device; who sends them from the host does not wait until they are there."""
    if looks_freely(device) or not looks_freely(values.device):
        return values.to(device)
    return values.contiguous().pin_memory().to(device, non_blocking=True)
