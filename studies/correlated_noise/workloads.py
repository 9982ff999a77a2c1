"""What coefficients for momentum and falling rates would leave of the noise, beside those for sums.

python -m studies.correlated_noise.workloads        # a minute or two
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from scipy import linalg, optimize

from privtune.training.mechanism.banded import coefficients, inverse, prefix_error
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import FixedDPSGD
from privtune.training.methods.rate_schedule import RateSchedule
from studies.sheet import markdown

Floats = npt.NDArray[np.float64]

MNIST = Schedule.from_epochs(records=55_000, expected_batch_size=512, epochs=10)
EPSILONS = (2.0, 4.0, 8.0)
BANDS = (1, 2, 4, 8, 16, 32, 64)
WORKLOADS = (("constant", 0.0), ("constant", 0.9), ("linear", 0.0), ("linear", 0.9))
_LARGEST = 1e9


class Workload:
    """The error that noise leaves in the weights after each step of SGD, for coefficients that one gives.

    The weights after step t are off by row t of ``A n``, n the noise of the steps and A the map from
    gradients to weights: momentum, then the rate of each step, then sums (Denisov et al. 2022, arXiv
    2202.08312, Section 4).

    Args:
        schedule: Steps of the training.
        rate: Type of the learning rate's schedule.
        momentum: In [0, 1).
    """

    def __init__(self, schedule: Schedule, *, rate: str, momentum: float) -> None:
        self.steps = schedule.steps
        powers: Floats = momentum ** np.arange(self.steps, dtype=np.float64)
        factors = np.array(RateSchedule.of(rate).factors(schedule))
        updates = factors[:, None] * _toeplitz(powers)
        weights = np.cumsum(updates, axis=0)
        self._gram: Floats = weights.T @ weights

    def error(self, column: Floats) -> float:
        """Return ``|A C^-1|_F / sqrt(T)``, C the matrix of the column over its norm."""
        value, _ = self._log_error(column)
        return math.exp(value)

    def best(self, start: Floats) -> Floats:
        """Return the column with the least error that a search from another one finds."""
        result = optimize.minimize(self._log_error, start, jac=True, method="L-BFGS-B")
        return np.asarray(result.x)

    def _log_error(self, numbers: Floats) -> tuple[float, Floats]:
        """Return the log of the error, and its gradient: ``d|A C^-1|^2 = -2 <C^-T A^T A C^-1, dC C^-1>``."""
        norm = float(np.linalg.norm(numbers))
        column = numbers / norm
        with np.errstate(over="ignore", invalid="ignore"):
            series = inverse(column, self.steps)
            if (
                not np.abs(series).max() < _LARGEST
            ):  # the search stepped where C^-1 grows without end
                return math.log(_LARGEST), np.zeros_like(numbers)
        solved = _toeplitz(series)
        square = solved.T @ (self._gram @ solved)
        total = float(np.trace(square))
        moved = square @ solved.T
        slopes = np.array([np.trace(moved, -lag) for lag in range(len(column))])
        gradient = -slopes / total
        gradient -= column * float(column @ gradient)
        return 0.5 * math.log(total / self.steps), gradient / norm


def _toeplitz(column: Floats) -> Floats:
    """Return the lower triangular Toeplitz matrix with this first column."""
    matrix: Floats = linalg.toeplitz(column, np.zeros(len(column)))
    return matrix


def rows() -> Iterator[tuple[str, ...]]:
    """Yield for each workload and ε the errors over that of independent noise, each with its bands.

    They are those of the bands and coefficients that planning takes, of the best bands with such
    coefficients, and of the best bands with coefficients for the workload.
    """
    multipliers = {}
    for epsilon in EPSILONS:
        for bands in BANDS:
            schedule = replace(MNIST, bands=bands)
            method = FixedDPSGD.for_budget(schedule, epsilon=epsilon, delta=1e-5)
            multipliers[epsilon, bands] = method.noise_multiplier
    of_sums = {bands: np.array(coefficients(bands, MNIST.steps)) for bands in BANDS}
    error_of_sums = {bands: prefix_error(bands, MNIST.steps) for bands in BANDS}
    for rate, momentum in WORKLOADS:
        workload = Workload(MNIST, rate=rate, momentum=momentum)
        errors = {}
        least = {}
        for bands, column in of_sums.items():
            errors[bands] = workload.error(column)
            least[bands] = workload.error(workload.best(column))
        for epsilon in EPSILONS:
            cells = []
            for choice, error in ((error_of_sums, errors), (errors, errors), (least, least)):
                noise = {bands: multipliers[epsilon, bands] * choice[bands] for bands in BANDS}
                bands = min(noise, key=noise.__getitem__)
                share = multipliers[epsilon, bands] * error[bands]
                share /= multipliers[epsilon, 1] * errors[1]
                cells.append(f"{share:.3f} ({bands})")
            yield rate, f"{momentum:g}", f"{epsilon:g}", *cells


if __name__ == "__main__":
    head = ("rate", "momentum", "ε", "as planned", "best bands", "own coefficients")
    print(markdown(head, rows()))
