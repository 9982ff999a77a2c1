"""What a score is, once it is planned: what the ledger charges, and what mechanism and people read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from privtune.accounting import Event, Gaussian, Laplace
from privtune.training.mechanism.metrics import is_mean, label, lower_is_better


@dataclass(frozen=True)
class ScorePlan:
    """How a trial is scored: sums over a split, divided by its declared size, and a metric of them.

    They are noised if the split is private.

    Args:
        records: Declared number of records. Scores are sums over the records there are, divided by
            it, so their sensitivity is bound/records however many there are.
        noise_multiplier: Noise scale over that sensitivity; ``None`` if the split is declared
            public.
        mechanism: ``gaussian`` or ``laplace``.
        metric: Name of the metric.
        bound: The longest vector that one record adds, in the mechanism's norm.
        options: What else the metric takes, JSON-ready.
        moved: How far a neighbour's sums can be, where that is not ``bound``: under replace-one, two
            vectors may differ by more than one of them is long.

    Example:
        >>> score = ScorePlan(records=1000, noise_multiplier=4.0)
        >>> score.event, score.standard_deviation, score.scaled(2.0).standard_deviation
        (Gaussian(noise_multiplier=4.0), 0.004, 0.008)
    """

    records: int
    noise_multiplier: float | None
    mechanism: str = "gaussian"
    metric: str = "accuracy"
    bound: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    moved: float | None = None

    @property
    def event(self) -> Event | None:
        """What one score costs the split's records; ``None`` where it is free."""
        if self.noise_multiplier is None:
            return None
        kind = Gaussian if self.mechanism == "gaussian" else Laplace
        return kind(self.noise_multiplier)

    @property
    def standard_deviation(self) -> float:
        """Scale of the noise on each mean: standard deviation, or Laplace's scale."""
        if self.noise_multiplier is None:
            return 0.0
        sensitivity = self.bound if self.moved is None else self.moved
        return self.noise_multiplier * sensitivity / self.records

    def scaled(self, factor: float) -> ScorePlan:
        """Return the plan with its noise times ``factor``.

        Args:
            factor: Above 0.

        Returns:
            The same score with other noise.
        """
        if self.noise_multiplier is None:
            return self
        return replace(self, noise_multiplier=self.noise_multiplier * factor)

    def held(self, score: float | None) -> float | None:
        """Return a score as it is shown: noise may carry it beyond what its metric can be.

        Choices are made among the scores themselves, as those beyond an end would tie there.

        Args:
            score: The score: higher is better.

        Returns:
            It, or the end that it lies beyond.

        Example:
            >>> ScorePlan(100, 2.0).held(1.219), ScorePlan(100, 2.0, metric="loss").held(0.1)
            (1.0, 0.0)
        """
        if score is None or not math.isfinite(score):
            return score
        if self.metric in ("cost", "value"):
            return min(max(score, -self.bound), self.bound)
        if not is_mean(self.metric):
            return score
        low, high = (-self.bound, 0.0) if lower_is_better(self.metric) else (0.0, self.bound)
        return min(max(score, low), high)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-ready data.

        Returns:
            What the fields say.

        Example:
            >>> sorted(ScorePlan(100, 2.0).to_dict())
            ['bound', 'mechanism', 'metric', 'moved', 'noise_multiplier', 'options', 'records']
        """
        options = json.loads(json.dumps(dict(self.options)))  # tuples are lists there
        return {**asdict(self), "options": options}


def validation_metric(
    plan: ScorePlan | None, score: float | None, *, of: str = "validation"
) -> dict[str, float]:
    """Return a score under the name of its metric, as people read it.

    Args:
        plan: How the trial was scored; ``None`` if it was not.
        score: The score: higher is better, so that of a loss is its negative.
        of: ``validation``, or ``tuning`` for a score of another model than the released one:
            :attr:`Plan.scored`.

    Returns:
        ``validation_accuracy``, ``validation_loss``, ``tuning_auc`` and so on; nothing without a
        finite score.

    Example:
        >>> validation_metric(ScorePlan(100, 2.0, metric="loss"), -0.25)
        {'validation_loss': 0.25}
    """
    if plan is None or score is None or not math.isfinite(score):
        return {}
    value = 0.0 - score if lower_is_better(plan.metric) else score
    return {f"{of}_{label(plan.metric)}": value}
