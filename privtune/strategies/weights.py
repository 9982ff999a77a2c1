"""Weights that are read when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import torch


class Weights:
    """A field that holds weights, or a function that reads them when they are first asked for.

    Whoever shows what was released needs no tensor, and so need not import torch.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, instance: object | None, owner: type) -> torch.Tensor:
        if instance is None:  # the field has no default
            raise AttributeError(self._name)
        held = instance.__dict__[self._name]
        if callable(held):
            held = instance.__dict__[self._name] = held()
        return cast("torch.Tensor", held)

    def __set__(self, instance: object, value: torch.Tensor | Callable[[], torch.Tensor]) -> None:
        instance.__dict__[self._name] = value
