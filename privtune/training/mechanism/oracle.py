"""The only door between a training method and the data: it asks for noisy releases, no more.

A method never holds a record, a batch or an un-noised sum. It draws a sample (an opaque handle),
asks for releases about it, and gets noisy means; the oracle clips, adds noise of the scale that the
clipping's own sensitivity dictates, and writes the transcript. So a method cannot leak by mistake,
and what is charged can be checked against what happened.

Everything is stacked: K candidates train together, row ``k`` of every tensor belongs to candidate
``k``, and each has its own samples and its own noise. A single training is K = 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from privtune.training.mechanism.clipping import Clipping
    from privtune.training.mechanism.schedule import Schedule
    from privtune.training.mechanism.transcript import Transcript


class Sample(Protocol):
    """One drawn sample for each of the K candidates: a handle with nothing to look into."""

    @property
    def rate(self) -> float:
        """Rate at which it was drawn; 1.0 when it holds every record."""
        ...


class Oracle(Protocol):
    """Noisy answers about the private data of one stack of K candidates.

    **Guarantee**: every answer is a Gaussian or Laplace release of a sum with bounded sensitivity,
    divided by the public expected batch size. An empty sample still releases noise; a record whose
    gradient or loss is not finite contributes zero.
    """

    schedule: Schedule
    candidates: int
    pace: torch.Tensor | float
    """Public factor on the learning rate of the next step: one for all, or shape ``[K]``."""

    @property
    def usual_size(self) -> float:
        """Root mean square of the first weights that torch draws for layers of these shapes."""
        ...

    def sample(self) -> Sample:
        """Draw an independent Poisson sample for each candidate at the schedule's rate."""
        ...

    def everything(self) -> Sample:
        """Return the sample that holds every record, for full-batch methods."""
        ...

    def gradient(
        self,
        sample: Sample,
        params: torch.Tensor,
        *,
        clipping: Clipping,
        noise_multiplier: float | torch.Tensor,
    ) -> torch.Tensor:
        """Release the noisy mean of the clipped per-sample gradients.

        Args:
            sample: The sample to answer about.
            params: Shape ``[K, P]``: where each candidate's gradient is taken.
            clipping: Bounds each record's contribution, and says by how much.
            noise_multiplier: Noise standard deviation over the clipping's sensitivity; a float, or
                shape ``[K]``.

        Returns:
            Shape ``[K, P]``: ``(sum of clipped gradients + noise) / expected_batch_size``.
        """
        ...

    def losses(
        self,
        sample: Sample,
        params: Sequence[torch.Tensor],
        *,
        bound: torch.Tensor,
        noise_multiplier: float | torch.Tensor,
        mechanism: str = "gaussian",
    ) -> torch.Tensor:
        """Release the noisy mean loss at several parameter vectors: one release for each of them.

        Args:
            sample: The sample to answer about.
            params: J tensors of shape ``[K, P]``.
            bound: Shape ``[K]``: each record's loss is clipped to ``[0, bound]``.
            noise_multiplier: Noise scale of each release over ``bound``; a float, or shape ``[K]``.
            mechanism: ``"gaussian"`` or ``"laplace"``.

        Returns:
            Shape ``[J, K]``.
        """
        ...

    def gradient_and_fraction(
        self,
        sample: Sample,
        params: torch.Tensor,
        *,
        clipping: Clipping,
        noise_multiplier: float | torch.Tensor,
        count_noise_multiplier: float | torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Release the noisy mean gradient and the noisy fraction of records that were not clipped.

        The count is encoded as ±1/2 a record (Andrew et al. 2021, arXiv 1905.03871, Theorem 1), so
        its sensitivity is 1/2 and ``count_noise_multiplier`` is the standard deviation over 1/2.

        Returns:
            The gradient, shape ``[K, P]``, and the fraction, shape ``[K]`` (noisy, so it may leave
            [0, 1]).
        """
        ...

    def transcripts(self) -> Sequence[Transcript]:
        """Return the K transcripts, one a candidate."""
        ...
