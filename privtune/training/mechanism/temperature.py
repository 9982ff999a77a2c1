"""A temperature that calibrates a released model's probabilities, from noised sums over held-out records.

Noise in the weights makes logits that are too large, or a short training such that are too small: softmax
then says 0.9997 where 0.92 is true. Divided by a temperature above 0 they keep their order, and so the
predicted class. The temperature that is chosen here makes the mean probability of the predicted class as
large as the share of records whose class is predicted rightly (expectation consistency: Clarté, Loureiro,
Krzakala and Zdeborová 2023, arXiv 2303.02644). Both are means of numbers in [0, 1], so that their noise
needs no clipping of losses, which have no bound.

Importing this module does not import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from privtune.accounting import Adjacency
from privtune.training.mechanism.estimates import SumNoise
from privtune.training.mechanism.metrics import Floats, Loss, Metric

if TYPE_CHECKING:
    import torch

INVERSES = tuple(4.0**power for power in range(-6, 4))
"""What logits are multiplied by: inverse temperatures of a public grid, from 1/4,096 to 64."""

_BETWEEN = 512  # inverse temperatures that are looked at between the ends of the grid


@dataclass(frozen=True, kw_only=True)
class Confidence(Metric):
    """A metric that sums right predictions and the model's confidence at each temperature.

    A record adds a (r - c), and p_j - c for each inverse temperature j of the grid: r is 1 where its class
    is predicted rightly, else 0, and p_j the probability of the predicted class. With C classes p_j lies in
    [1/C, 1], whose middle is c and half of whose width is h, so a vector is at most √(a² c² + G h²) long.
    Where a record is replaced, r moves by 1 and each p_j by 2 h at most: √(a² + 4 G h²).

    **Error**: r - p_j, summed over records, has the noise √(1 + 1/a²) times that of a sum. With a² = h √G / c
    it is the least, σ (c + h √G): no count is needed, as c cancels.

    Args:
        classes: How many classes there are.

    Example:
        >>> metric = Confidence(classes=2)
        >>> round(metric.norm, 3), round(metric.gap, 3)  # with σ = 1 the noise on r - p_j is their product
        (1.104, 1.396)
    """

    name: ClassVar[str] = "confidence"
    classes: int

    @property
    def middle(self) -> float:
        """The middle of the range of the predicted class's probability, [1/C, 1]."""
        return (1.0 + 1.0 / self.classes) / 2.0

    @property
    def half_width(self) -> float:
        """Half the width of the range of the predicted class's probability, [1/C, 1]."""
        return (1.0 - 1.0 / self.classes) / 2.0

    @property
    def weight(self) -> float:
        """The factor on right predictions at which their gap to confidence has the least noise."""
        # a² = h √G / c: see **Error**.
        square = self.half_width * math.sqrt(len(INVERSES)) / self.middle
        return math.sqrt(square)

    @property
    def gap(self) -> float:
        """The noise on right predictions minus confidence, in units of the noise on a sum."""
        return math.sqrt(1.0 + 1.0 / self.weight**2)

    @property
    def norm(self) -> float:
        """The largest norm of a record's vector: a wrong prediction that is sure at every temperature."""
        right = self.weight * self.middle
        if self.mechanism == "laplace":
            return right + len(INVERSES) * self.half_width
        confident = math.sqrt(len(INVERSES)) * self.half_width
        return math.hypot(right, confident)

    @property
    def sensitivity(self) -> float:
        """The largest distance between the sums of neighbouring datasets: one record added, or replaced."""
        if self.adjacency is not Adjacency.REPLACE_ONE:
            return self.norm
        width = 2.0 * self.half_width
        if self.mechanism == "laplace":
            return self.weight + len(INVERSES) * width
        of_confidence = math.sqrt(len(INVERSES)) * width
        return math.hypot(self.weight, of_confidence)

    def parts(
        self,
        outputs: torch.Tensor,
        targets: torch.Tensor,
        loss: Loss,
    ) -> torch.Tensor:
        """Return the vector that each record adds, zeros if its outputs are not finite.

        Args:
            outputs: Logits, ``[N, C]``.
            targets: Classes, ``[N]``.
            loss: Not used.

        Returns:
            ``[N, 1 + G]`` in float64: whether the prediction is right, then how sure the model is of it at
            each of G inverse temperatures.
        """
        import torch

        logits = outputs.double()
        usable = logits.isfinite().all(dim=-1, keepdim=True)
        # A largest logit of 0: no power overflows.
        logits = torch.where(usable, logits, 0.0)
        logits = logits - logits.amax(dim=-1, keepdim=True)
        inverses = torch.tensor(INVERSES, dtype=torch.float64, device=logits.device)
        powers = torch.exp(logits.unsqueeze(-1) * inverses)
        # The predicted class has the power 1, so its probability is 1 over the sum: ``[N, G]``.
        confidence = 1.0 / powers.sum(dim=-2)
        confidence = confidence.clamp(1.0 / self.classes, 1.0)
        is_right = outputs.argmax(dim=-1) == targets
        right = is_right.double().unsqueeze(-1)
        of_right = self.weight * (right - self.middle)
        of_confidence = confidence - self.middle
        vector = torch.cat([of_right, of_confidence], dim=-1)
        return torch.where(usable, vector, 0.0)

    def temperature(
        self,
        sums: Floats,
        noise: SumNoise,
        *,
        records: int,
    ) -> float | None:
        """Return the temperature at which the model is slightly less sure than it is right, from noised sums.

        Too small a temperature costs more than one too large: the loss of a wrong answer has no bound. So
        the model is to be as sure as it is right by the sums, less one deviation of their noise and of the
        drawing of the records.

        Args:
            sums: The noised sums.
            noise: The noise on each.
            records: Declared number of records, a public fact.

        Returns:
            The temperature, within the ends of the grid; None where the model is as sure at all of them.
        """
        from scipy.interpolate import PchipInterpolator
        from scipy.optimize import isotonic_regression

        # Exact sums rise with the inverse temperature; noised ones are made to (least squares).
        confidence = isotonic_regression(sums[1:]).x
        if not confidence[0] < confidence[-1]:
            return None
        right = sums[0] / self.weight
        share = right / max(records, 1) + self.middle
        share = min(max(share, 0.0), 1.0)
        # A share of 1 is not sure to be 1: as if one record more were right, and one more wrong.
        share = (share * records + 1.0) / (records + 2.0)
        by_drawing = records * share * (1.0 - share)
        by_noise = (self.gap * noise.deviation) ** 2
        target = right - math.sqrt(by_noise + by_drawing)
        powers = np.log2(INVERSES)
        between = np.linspace(powers[0], powers[-1], _BETWEEN)
        curve = PchipInterpolator(powers, confidence)(between)
        place = int(np.searchsorted(curve, target))
        place = min(place, _BETWEEN - 1)
        return float(2.0 ** -between[place])
