"""Between the host and what computes: a step that never waits for an answer keeps a GPU busy.

Looking at a number there means to wait until all that was asked for before it is done. So a step looks at
nothing: what it would decide by a number it computes for both cases, and what the host draws is sent ahead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def looks_freely(device: torch.device) -> bool:
    """Say whether looking at a number that lies on a device makes nobody wait."""
    return device.type == "cpu"


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return values on a device; who sends them from the host does not wait until they are there."""
    if looks_freely(device) or not looks_freely(values.device):
        return values.to(device)
    return values.contiguous().pin_memory().to(device, non_blocking=True)
