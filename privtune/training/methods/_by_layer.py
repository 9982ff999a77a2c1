"""Clipping layer by layer, at the sensitivity of the whole: an option of the methods that can take it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from privtune.training.mechanism.clipping import (
    Automatic,
    AutomaticByLayer,
    Clipping,
    EqualByLayer,
    Flat,
)
from privtune.training.methods._base import check_choice
from privtune.training.methods._rate_schedule import Scheduled

if TYPE_CHECKING:
    import torch

_CLIPPINGS = ("flat", "by-layer")


@dataclass(frozen=True)
class LayerClipping(Scheduled):
    """A method that clips, or normalises, a record's gradient whole or layer by layer.

    Args:
        clipping: ``flat``: the whole gradient to its norm. ``by-layer``: each of L layers to the norm
            over sqrt(L), of the same sensitivity.
    """

    clipping: str = field(default="flat", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("clipping", self.clipping, _CLIPPINGS)

    def clip(self, max_grad_norm: float | torch.Tensor) -> Clipping:
        """Return what clips to a norm, whole or by layer.

        Args:
            max_grad_norm: Above 0; a float, or shape ``[K]``.

        Example:
            >>> from privtune.training.methods import DPAdam
            >>> DPAdam(1.1, clipping="by-layer").clip(0.5)
            EqualByLayer(max_grad_norm=0.5)
        """
        return (EqualByLayer if self.clipping == "by-layer" else Flat)(max_grad_norm)

    def normalise(self, stabilizer: float = 0.01) -> Clipping:
        """Return what normalises, whole or by layer.

        Args:
            stabilizer: Added to a norm, above 0.

        Example:
            >>> from privtune.training.methods import AutomaticClipping
            >>> AutomaticClipping(1.1).normalise()
            Automatic(stabilizer=0.01)
        """
        return (AutomaticByLayer if self.clipping == "by-layer" else Automatic)(stabilizer)
