"""Metrics as sums of bounded vectors, one a record, and functions of those sums.

A score is noised where one record can change it by a known amount: in sums over records. What is no
sum (an F1, an area under a curve, a share of variance) is computed from noised sums afterwards, which
costs nothing more, as it looks at nothing more. Each metric says what a record adds, and proves
how long that vector can be: the L2 norm for Gaussian noise, the L1 norm for Laplace noise. A
neighbour under add-remove has one record more or less, so sums move by one such vector; under
replace-one they move by one such vector less another, and each metric says how far that is, too.

Importing this module does not import torch.
"""

from privtune.training.mechanism.metrics._base import Floats, Loss, Metric
from privtune.training.mechanism.metrics._joint import Joint
from privtune.training.mechanism.metrics._make import (
    METRICS,
    interval,
    is_mean,
    is_share,
    label,
    lower_is_better,
    make_metric,
)
from privtune.training.mechanism.metrics._numbers import OwnScore

__all__ = [
    "METRICS",
    "Floats",
    "Joint",
    "Loss",
    "Metric",
    "OwnScore",
    "interval",
    "is_mean",
    "is_share",
    "label",
    "lower_is_better",
    "make_metric",
]
