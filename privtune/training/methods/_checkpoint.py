"""States to named tensors and back, so that a training can stop and go on bit for bit.

A state is a frozen dataclass of tensors, whole numbers and such dataclasses. Named tensors are what
safetensors stores; no pickle is involved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from privtune.errors import InvalidInputError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def state_tensors(state: Any) -> dict[str, torch.Tensor]:
    """Return every tensor of a state by its path (``"moments.first"``); numbers become tensors.

    Args:
        state: A method's state.

    Raises:
        InvalidInputError: If the state holds something else.
    """
    import torch

    found: dict[str, torch.Tensor] = {}
    for field in _kept(state):
        value = getattr(state, field.name)
        if is_dataclass(value):
            inner = state_tensors(value)
            found.update({f"{field.name}.{name}": tensor for name, tensor in inner.items()})
        elif isinstance(value, torch.Tensor):
            # A copy: safetensors refuses tensors that share memory, and so do expanded views.
            found[field.name] = value.detach().clone().contiguous()
        elif isinstance(value, int):
            found[field.name] = torch.tensor(value)
        else:
            raise InvalidInputError(field.name, value, "must be a tensor or a whole number")
    return found


def _kept(state: Any) -> list[Field[Any]]:
    """Return the fields that a checkpoint keeps: an optimizer of torch's is none, what it remembers is."""
    return [field for field in fields(state) if field.metadata.get("kept", True)]


def restore_state(template: T, tensors: Mapping[str, torch.Tensor]) -> T:
    """Return a state like ``template`` that holds ``tensors``.

    Args:
        template: A state of the same method and candidates, as ``init`` makes it; what is empty in it may
            have grown.
        tensors: What ``state_tensors`` returned.

    Raises:
        InvalidInputError: If a tensor is missing, left over, or of another shape or type.
    """
    expected = state_tensors(template)
    if expected.keys() != tensors.keys():
        raise InvalidInputError(
            "tensors", sorted(tensors), f"must be exactly {', '.join(sorted(expected))}"
        )
    for name, tensor in tensors.items():
        shape = tensor.shape if expected[name].numel() == 0 else expected[name].shape
        if tensor.shape != shape or tensor.dtype != expected[name].dtype:
            raise InvalidInputError(name, tuple(tensor.shape), "must fit the method's state")
    restored: T = _restored(template, tensors, "")
    return restored


def _restored(template: Any, tensors: Mapping[str, torch.Tensor], prefix: str) -> Any:
    values: dict[str, Any] = {}
    for field in _kept(template):
        old, path = getattr(template, field.name), prefix + field.name
        if is_dataclass(old):
            values[field.name] = _restored(old, tensors, f"{path}.")
        elif isinstance(old, int):
            values[field.name] = int(tensors[path])
        else:
            values[field.name] = tensors[path].to(old.device)
    return replace(template, **values)
