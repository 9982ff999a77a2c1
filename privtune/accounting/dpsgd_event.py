"""Make DP-SGD's event from records, batch size, noise multiplier and epochs, as papers state them."""

from __future__ import annotations

import math

from privtune.accounting.checks import check_integer, check_number
from privtune.accounting.events import MAX_COUNT, Gaussian, PoissonSampled, Repeated
from privtune.errors import InvalidInputError

_MOST = 10**12  # records


def dpsgd_event(
    *,
    records: int,
    expected_batch_size: int,
    noise_multiplier: float,
    epochs: float,
) -> Repeated:
    """Return the event of one DP-SGD training on Poisson samples.

    Each step draws every record with probability `expected_batch_size / records`, clips each
    record's gradient, and releases their noisy sum. Batches of a shuffled data set are another
    mechanism, which this event does not cover.

    Args:
        records: Number of training records, at least 1.
        expected_batch_size: Expected number of records in a step, from 1 to `records`.
        noise_multiplier: Standard deviation of the noise over the clipping norm, above 0.
        epochs: Passes over the records in expectation, above 0; the number of steps is rounded up.

    Returns:
        A sampled Gaussian release, repeated once for each step.

    Raises:
        InvalidInputError: A number is outside its range.

    Example:
        >>> from privtune.accounting import calibrate, epsilon
        >>> numbers = {"records": 60_000, "expected_batch_size": 256, "epochs": 15}
        >>> training = dpsgd_event(noise_multiplier=1.1, **numbers)
        >>> training.count, round(epsilon(training, 1e-5).epsilon, 3)
        (3516, 1.134)
        >>> unit = dpsgd_event(noise_multiplier=1.0, **numbers)
        >>> round(calibrate(unit, epsilon=3.0, delta=1e-5).scale, 3)  # the noise multiplier of ε = 3
        0.728
    """
    total = check_integer("records", records, at_least=1, at_most=_MOST)
    batch = check_integer("batch", expected_batch_size, at_least=1, at_most=_MOST)
    if batch > total:
        allowed = f"must be at most the number of records, {total}"
        raise InvalidInputError("batch", batch, allowed)
    passes = check_number("epochs", epochs, above=0.0)
    if passes * total / batch > MAX_COUNT:
        allowed = f"must make at most {MAX_COUNT} steps of {batch} records"
        raise InvalidInputError("epochs", epochs, allowed)
    # The tiny slack keeps 20 epochs at rate 64/1024 at 320 steps whatever the rounding.
    steps = max(1, math.ceil(passes * total / batch - 1e-9))
    release = Gaussian(noise_multiplier)
    return Repeated(steps, PoissonSampled(batch / total, release))
