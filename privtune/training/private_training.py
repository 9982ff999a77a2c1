"""A user's own training loop under a plan: Poisson batches in, one loss a record back.

The loop gets its batches from here and hands back the vector of losses; clipping, noise, the count
of steps and the transcript stay here. What would silently break the guarantee is refused: losses
that were averaged, regularisers in the loss, weights used outside of their module, steps beyond
the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import Dataset

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.training.clipping import Clipping
from privtune.training.data import Data, DatasetData
from privtune.training.kernel import Layout
from privtune.training.noise import NoiseSource, add_noise, noise_scale
from privtune.training.opacus_adapter import (
    has_exact_hook,
    hook,
    per_sample_gradients,
    quiet_hooks,
)
from privtune.training.sampling import PoissonSampler
from privtune.training.schedule import Schedule
from privtune.training.streams import Streams
from privtune.training.transcript import Transcript

__all__ = ["PlanExhaustedError", "PrivateTraining"]


class PlanExhaustedError(PrivTuneError):
    """A loop asked for more than its plan charged. No data was touched for it."""


@dataclass(frozen=True)
class _Batch:
    """What the loop holds: records of sample ``number``, the last of them or not."""

    number: int
    size: int
    last: bool


class PrivateTraining:
    """Private batches and steps for a loop of one's own.

    Per-sample gradients are held, ``4 * B * P`` bytes for batches of B records: where that is too
    much, ``max_physical_batch_size`` bounds B; the sums of a sample's batches are added up and get
    noise once. For large models ``train`` is lighter.

    Args:
        model: The model, in training mode; it is wrapped with hooks as ``model``.
        optimizer: Over exactly the trainable parameters of the model. Regularisers belong here, as
            weight decay.
        data: ``TensorData``, or a map-style dataset.
        schedule: Records, rate, and how many steps are planned.
        clipping: Bounds each record's gradient, and says by how much; fixed for the whole run.
        noise_multiplier: Noise standard deviation over the clipping's sensitivity, from the plan.
        secret: 32 bytes to derive sampling and noise from; None for OS entropy.
        max_physical_batch_size: Most records that are computed at once, at least 1; None for whole
            samples. It changes nothing but memory and time.

    Raises:
        InvalidInputError: If an argument is outside its domain, or the model couples records.

    **Guarantee**: each planned step releases one Poisson-sampled Gaussian, provided that every
    entry of the loss vector is a function of its own record; an empty sample releases noise alone.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: Data | Dataset[Any],
        *,
        schedule: Schedule,
        clipping: Clipping,
        noise_multiplier: float,
        secret: bytes | None = None,
        max_physical_batch_size: int | None = None,
    ) -> None:
        if max_physical_batch_size is not None and max_physical_batch_size < 1:
            raise InvalidInputError(
                "max_physical_batch_size", max_physical_batch_size, "must be at least 1, or None"
            )
        local = DatasetData(data) if isinstance(data, Dataset) else data
        if len(local) != schedule.records and not local.sealed_size:
            raise InvalidInputError(
                "data", f"{len(local)} records", f"must hold the schedule's {schedule.records}"
            )
        self.layout = Layout(model)
        self._params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if held != {id(p) for p in self._params.values()}:
            raise InvalidInputError(
                "optimizer",
                f"{len(held)} parameters",
                f"must hold exactly the {len(self._params)} trainable parameters of the model",
            )
        # Not ghost mode: its second backward pass runs over the whole batch, where a record that is
        # not finite cannot be taken out (0 * inf is NaN), and dropping its batch is no bound.
        self.model = hook(model.train(), "hooks", sequences=True)
        self.schedule = schedule
        self.transcript = Transcript()
        self._optimizer = optimizer
        self._data: Data = local
        self._clipping = clipping
        self._noise_multiplier = float(noise_multiplier)
        device = next(iter(self._params.values())).device
        streams = Streams(secret)
        self._noise = NoiseSource([streams], device, self.layout.dtype)
        self._sampler = PoissonSampler(
            records=len(local), rate=schedule.sample_rate, rngs=[streams.numpy("sampling")]
        )
        self._scale = noise_scale(self._noise_multiplier, clipping.sensitivity(1)).to(device)
        self._drawn = 0
        self._physical = max_physical_batch_size
        self._open: _Batch | None = None
        self._total = torch.zeros(self.layout.size, dtype=self.layout.dtype, device=device)
        self._checked = False

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the inputs and targets of each planned sample; ``step`` must follow each.

        A sample of more than ``max_physical_batch_size`` records comes in several batches. An empty
        sample does not reach the loop: its step is taken here, on noise alone.

        Raises:
            PlanExhaustedError: If every planned sample was already drawn.
        """
        if self._drawn >= self.schedule.steps:
            raise PlanExhaustedError(
                f"The plan charged {self.schedule.steps} steps and all of them are taken. More "
                "steps need a plan of their own."
            )
        while self._drawn < self.schedule.steps:
            self._drawn += 1
            index, sizes = self._sampler()
            number, size = self.transcript.open_sample(self.schedule.sample_rate), int(sizes[0])
            self._total.zero_()
            if size == 0:
                self._release(number)
                continue
            drawn = torch.from_numpy(index[0, :size].copy())
            for piece in torch.split(drawn, self._physical or size):
                self._open = _Batch(number, len(piece), last=bool(piece[-1] == drawn[-1]))
                yield self._data.take(piece)

    def step(self, losses: torch.Tensor) -> bool:
        """Take one optimizer step along the noisy clipped mean gradient of the sample.

        Where the sample comes in several batches, the step is taken with the last of them.

        Args:
            losses: One loss a record of the last batch, shape ``[B]``, as ``reduction="none"``
                gives it.

        Returns:
            Whether the optimizer stepped. Count steps of a learning rate with
            ``optimizer.register_step_post_hook`` and not in the loop, which does not see empty
            samples: a rate that hangs on how many were empty was not paid for.

        Raises:
            PlanExhaustedError: If no batch is open: every batch has one step.
            InvalidInputError: If the losses are not one a record, or reach a parameter by another
                way than through its own module.
        """
        if self._open is None:
            raise PlanExhaustedError(
                "There is no open batch: every batch that batches() yields has exactly one step."
            )
        batch, size = self._open, self._open.size
        if losses.shape != (size,) or not losses.requires_grad:
            raise InvalidInputError(
                "losses",
                f"shape {tuple(losses.shape)}",
                f"must be one loss a record, shape ({size},), with gradients",
                'Use reduction="none": a mean couples the records and hides their gradients.',
            )
        self._refuse_other_ways(losses)
        self._open = None
        self._total += self._clipped_sum(losses)
        self._clear()
        if batch.last:
            self._release(batch.number)
        return batch.last

    def _release(self, number: int) -> None:
        """Add the noise to the sum, note the release, and step."""
        self.transcript.record(number, "gaussian", self._noise_multiplier)
        noise = self._noise.gaussian(self.layout.size)
        noisy = add_noise(
            self._total.view(1, -1).to(noise), noise, self._scale, self._noise.options
        )
        mean = noisy[0] / self.schedule.expected_batch_size
        for name, value in self.layout.unflatten(mean).items():
            self._params[name].grad = value.clone()
        self._optimizer.step()
        self._clear()

    def _clear(self) -> None:
        for parameter in self._params.values():
            parameter.grad = None
            cast(Any, parameter).grad_sample = None

    def _clipped_sum(self, losses: torch.Tensor) -> torch.Tensor:
        with quiet_hooks():
            torch.autograd.backward(losses.sum())
        gradients = per_sample_gradients(self.model, self._params, len(losses))
        self._refuse_incomplete(gradients)
        groups = [(0, self.layout.size)]
        if self._clipping.by_layer:
            layers = self.layout.layers.values()
            groups = [(self.layout.spans[n[0]][0], self.layout.spans[n[-1]][1]) for n in layers]
        norms = torch.stack([gradients[:, s:e].norm(dim=1) for s, e in groups])
        finite = norms.isfinite().all(dim=0)
        gradients = gradients.masked_fill(~finite.unsqueeze(1), 0.0)
        coefficients = self._clipping.coefficients(norms.unsqueeze(1))[:, 0] * finite
        return torch.cat(
            [c @ gradients[:, s:e] for c, (s, e) in zip(coefficients, groups, strict=True)]
        )

    def _refuse_other_ways(self, losses: torch.Tensor) -> None:
        """Refuse losses that reach a parameter other than once a call of its own module."""
        reached = _edges(losses)
        for owner_name, owner in self.model.named_modules():
            own = [p for p in owner.parameters(recurse=False) if p.requires_grad]
            calls = len(getattr(owner, "activations", ()))
            for parameter in own:
                edges = reached[id(parameter)]
                exact = has_exact_hook(owner)
                if (edges != calls) if exact else (edges > 0 and calls == 0):
                    raise InvalidInputError(
                        "losses",
                        f"{owner_name or type(owner).__name__}: {edges} uses in {calls} calls",
                        "must reach every parameter through calls of its own module alone",
                        "Keep regularisers out of the loss (use the optimizer's weight decay), do "
                        "not use a module's weights by hand, and stay in training mode.",
                    )

    def _refuse_incomplete(self, gradients: torch.Tensor) -> None:
        """Check once that per-sample gradients add up to what autograd says."""
        if self._checked or not bool(gradients.isfinite().all()):
            return
        self._checked = True
        plain = self.layout.flatten(
            {n: p.new_zeros(p.shape) if p.grad is None else p.grad for n, p in self._params.items()}
        )
        size = float(gradients.norm(dim=1).sum()) + 1e-12
        if float((gradients.sum(dim=0) - plain).norm()) > 1e-3 * size:
            raise InvalidInputError(
                "model", "per-sample gradients", "must add up to the gradient of the summed losses"
            )


def _edges(losses: torch.Tensor) -> Counter[int]:
    """Count how often the graph behind ``losses`` uses each leaf, by the leaf's ``id``."""
    reached: Counter[int] = Counter()
    seen: set[Any] = set()
    waiting: list[Any] = [losses.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            variable = getattr(following, "variable", None)
            if variable is not None:
                reached[id(variable)] += 1
            else:
                waiting.append(following)
    return reached
