"""Metrics by their names in a spec, and intervals of what was released."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from privtune.errors import InvalidInputError
from privtune.training.mechanism.metrics._base import Floats, Metric, OneSum
from privtune.training.mechanism.metrics._classes import (
    AUC,
    F1,
    Accuracy,
    BalancedAccuracy,
    MacroF1,
    TopK,
)
from privtune.training.mechanism.metrics._numbers import (
    MAE,
    MSE,
    R2,
    ClippedLoss,
    Cost,
    OwnScore,
    Value,
)

_DRAWS = 1000  # of an interval
_SEED = 20_140_611  # public: an interval is a function of what was released

METRICS: Mapping[str, type[Metric]] = {
    metric.name: metric
    for metric in (
        Accuracy,
        BalancedAccuracy,
        TopK,
        F1,
        MacroF1,
        AUC,
        ClippedLoss,
        MAE,
        MSE,
        R2,
        Cost,
        Value,
    )
}
"""Metrics by name; a function of one's own is named by its path."""


def make_metric(name: str, **options: Any) -> Metric:
    """Return a metric by its name in a spec.

    Args:
        name: One of :data:`METRICS`, or ``package.module:function``.
        **options: Its options: ``bound``, ``k``, ``bins``, ``target_range``; those that are None
            are left out.

    Returns:
        The metric; a function of one's own has been found.

    Raises:
        InvalidInputError: If there is no such metric, or an option is missing, not one of its own, or
            outside its domain.

    Example:
        >>> make_metric("mse", target_range=(0.0, 10.0)).norm("gaussian")
        100.0
        >>> make_metric("precision")
        Traceback (most recent call last):
            ...
        privtune.errors.InvalidInputError: scoring.metric = 'precision': must be one of ...
    """
    given = {key: value for key, value in options.items() if value is not None}
    if ":" in name:
        cls: type[Metric] = OwnScore
        given = {**given, "function": name}
    elif name in METRICS:
        cls = METRICS[name]
    else:
        allowed = f"must be one of {', '.join(METRICS)}, or package.module:function"
        raise InvalidInputError("scoring.metric", name, allowed)
    known = {field.name: field for field in dataclasses.fields(cls)}
    if unknown := sorted(set(given) - set(known)):
        own = ", ".join(sorted(set(known) - {"function"})) or "none"
        raise InvalidInputError(
            f"options of metric {name!r}", unknown, f"are not known; it takes {own}"
        )
    if "target_range" in known and "target_range" not in given:
        raise InvalidInputError(
            "scoring.target_range",
            None,
            f"is missing: {name} needs [low, high], the public range of the targets",
        )
    for option, least in (("k", 1), ("bins", 2)):
        value = given.get(option, least)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= 1000:
            raise InvalidInputError(
                f"scoring.{option}", value, f"must be a whole number from {least} to 1000"
            )
    if not 0.0 < given.get("bound", 1.0) < math.inf:
        raise InvalidInputError("scoring.bound", given["bound"], "must be finite and above 0")
    return cls(**given)


def label(name: str) -> str:
    """Return what people call a metric: a function of one's own by its last name.

    Example:
        >>> label("auc"), label("clinic.scores:cost")
        ('auc', 'cost')
    """
    return name.rpartition(":")[2].rpartition(".")[2]


def lower_is_better(name: str) -> bool:
    """Return whether less of a metric is better."""
    return name in METRICS and METRICS[name].lower_is_better


def is_mean(name: str) -> bool:
    """Return whether a metric is one mean of numbers in [0, bound], as a function of one's own is."""
    return name not in METRICS or issubclass(METRICS[name], OneSum)


def is_share(name: str) -> bool:
    """Return whether a metric is a share of records, shown in percent."""
    return name in METRICS and METRICS[name].share


def interval(
    metric: Metric, means: Floats, *, scale: float, mechanism: str, records: int
) -> tuple[float, float]:
    """Return a 95% interval of a metric, from what was released alone.

    It is for the noise and for the drawing of the records, together: parts are drawn again around the
    released ones with the noise's own law and with the largest variance that sums of so many
    independent bounded records can have (for a sum of zeros and ones that is the binomial's), and
    the middle 95% of the metrics that they give are returned. Correlations between parts are left
    out, so it is approximate for ratios. It lies within what the metric can be, and so does what it is
    drawn around: an accuracy that noise carried to 1.2 has an interval that ends at 1, not one above it.

    Args:
        metric: The metric.
        means: The noised sums over the number of records, shape ``[d]``.
        scale: Scale of the noise on each.
        mechanism: ``gaussian`` or ``laplace``.
        records: Declared number of records.

    Returns:
        Its ends.

    Example:
        >>> accuracy = make_metric("accuracy")
        >>> low, high = interval(accuracy, np.array([0.9]), scale=0.0, mechanism="gaussian", records=400)
        >>> round(low, 2), round(high, 2)
        (0.87, 0.93)
    """
    rng = np.random.default_rng(_SEED)
    size = (_DRAWS, len(means))
    noise = rng.standard_normal(size) if mechanism == "gaussian" else rng.laplace(size=size)
    means = metric.held(means)
    largest = metric.norm("gaussian") if len(means) == 1 else 1.0
    # Bhatia and Davis 2000: in [a, b] with mean m no variance is above (b - m)(m - a).
    least = -largest if isinstance(metric, Cost) else 0.0
    inside = np.clip(means, least, largest)
    spread = np.sqrt((inside - least) * (largest - inside) / records)
    if isinstance(metric, R2):
        spread[1] = math.sqrt(max(1.0 - min(float(means[1]) ** 2, 1.0), 0.0) / records)
    drawn = means + scale * noise + spread * rng.standard_normal(size)
    lows, highs = np.array([metric.ends(row) for row in drawn]).T
    return float(np.quantile(lows, 0.025)), float(np.quantile(highs, 0.975))
