"""Refuses losses that are no functions of their own record, as a replay shows."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from privtune.training.own_loop.replay import Recording, overlaps, storage_of
from privtune.training.own_loop.weights import LoopError

__all__ = ["refuse_coupled", "refuse_foreign"]

# Relative: a row of a matrix product may change its last bits with the other rows.
_TOLERANCE = 2e-6


def refuse_foreign(
    recording: Recording,
    losses: torch.Tensor,
    *,
    earlier: Collection[int],
    records: Sequence[torch.Tensor],
) -> None:
    """Refuse losses that read records beside their own.

    Args:
        recording: What happened between the batch and the losses; stopped.
        losses: Made by it.
        earlier: Storages of what was computed from batches that the loop has read.
        records: The training records.

    Raises:
        LoopError: If the losses were computed from either.
    """
    read = {storage_of(t) for t in recording.sources() if any(overlaps(t, r) for r in records)}
    if storage_of(losses) in recording.touched({*earlier, *read}):
        raise LoopError(
            "The losses read records that this step does not charge: of an earlier batch, of the "
            "training set, or of the batch by another way than the one record that loss_of is given "
            "(a memory bank, a queue, a hidden state, a mean that is kept). A step may look at the "
            "records of its own batch alone, each loss at its own."
        )


def refuse_coupled(
    recording: Recording,
    losses: torch.Tensor,
    *,
    earlier: Collection[int] = (),
    records: Sequence[torch.Tensor] = (),
    generator: torch.Generator,
) -> None:
    """Refuse losses that are not functions of their own record, or of no record of the batch.

    Args:
        recording: What happened between the batch and the losses; stopped.
        losses: Shape ``[B]``.
        earlier: Storages of what was computed from batches of before, as far as they still live.
        records: The training records.
        generator: Chooses the records that are replaced.

    Raises:
        LoopError: If they are coupled, do not come from the batch, or read an earlier one.

    **Guarantee**: the records are split at random in two, and each half is replaced in turn: what a
    record does to any of the other half is found, through whatever operations of torch it goes. What
    leaves torch (NumPy, Python's numbers) is taken for a constant.
    """
    if storage_of(losses) not in recording.from_batch():
        raise LoopError(
            "The losses were not computed from the batch that the loop was handed: likely from a "
            "batch of before, or outside of torch. Hand back the losses of this batch's records, or "
            "use private.step(batch, loss_of)."
        )
    refuse_foreign(recording, losses, earlier=earlier, records=records)
    if storage_of(losses) in recording.touched(map(storage_of, recording.readers_of_numbers())):
        raise LoopError(
            "The losses were computed with a number of Python's that was read from the batch "
            "(float(...), .item()), which couples its records. Compute the loss record by record: "
            "private.step(batch, loss_of)."
        )
    size = len(losses)
    if size < 2:
        return
    kept = losses.detach()
    order = torch.randperm(size, generator=generator)
    half = size // 2
    for replaced, left in ((order[:half], order[half:]), (order[half:], order[:half])):
        others = torch.ones(size, dtype=torch.bool)
        others[replaced] = False
        source = left[torch.arange(len(replaced)) % len(left)]
        x, y = (part.clone() for part in recording.given)
        x[replaced], y[replaced] = x[source], y[source]
        found = recording.replay(x, y, losses)
        others = others.to(found.device)
        a, b = found[others].double(), kept[others].double()
        if not torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE * _size(b), equal_nan=True):
            raise LoopError(
                "The loss of a record changes with the other records of its batch, so one record "
                "moves a step by more than its plan charges. Likely: batch statistics (a mean over "
                "the batch, batch_norm, softmax over dim 0), mixup, a contrastive loss, or a buffer "
                "that averages what it sees. Compute the loss record by record: private.step(batch, "
                "loss_of), where records cannot touch each other."
            )


def _size(values: torch.Tensor) -> float:
    finite = values[values.isfinite()].abs()
    return float(finite.mean()) if len(finite) else 1.0
