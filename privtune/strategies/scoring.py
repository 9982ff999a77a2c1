"""How trials are scored: a bounded metric on the validation split, noised if that is private."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from privtune.accounting import Event, Gaussian, Laplace, calibrate
from privtune.errors import InvalidInputError
from privtune.strategies._options import check_types

if TYPE_CHECKING:
    from privtune.accounting import Adjacency

__all__ = ["ScorePlan", "Scoring", "validation_metric"]


@dataclass(frozen=True)
class Scoring:
    """How a study scores its trials.

    Args:
        metric: ``accuracy``, or ``loss`` (the mean of losses clipped to ``[0, bound]``, negated).
        mechanism: ``gaussian`` or ``laplace``; unused where the validation split is public.
        bound: Largest value that one record adds: 1 for the accuracy, the clip of the loss.
        folds: Refused; here so that the refusal can give its reason.

    Raises:
        InvalidInputError: If a field is outside its domain.

    Example:
        >>> from privtune.accounting import Adjacency
        >>> terms = {"epsilon": 1.0, "delta": 1e-5, "adjacency": Adjacency.ADD_REMOVE}
        >>> scoring = Scoring.from_dict({"metric": "loss", "bound": 4.0})
        >>> score = scoring.plan(records=1000, public=False, **terms)
        >>> round(score.noise_multiplier, 2), round(score.standard_deviation, 4)
        (3.73, 0.0149)
        >>> scoring.plan(records=1000, public=True, **terms).noise_multiplier
    """

    metric: str = "accuracy"
    mechanism: str = "gaussian"
    bound: float = 1.0
    folds: int | None = None

    def __post_init__(self) -> None:
        if self.folds is not None:
            raise InvalidInputError(
                "scoring.folds",
                self.folds,
                "k-fold cross-validation looks at every record in every fold, so training and "
                "scoring are not on disjoint records and each trial costs the composition of all "
                "its folds",
                "Hold out a validation split, or run k trials with the strategy 'everything'.",
            )
        if self.metric not in ("accuracy", "loss"):
            raise InvalidInputError(
                "scoring.metric",
                self.metric,
                "must be accuracy or loss",
                "Another metric has no bound on what one record changes.",
            )
        if self.mechanism not in ("gaussian", "laplace"):
            raise InvalidInputError(
                "scoring.mechanism",
                self.mechanism,
                "must be gaussian or laplace",
                "A score without noise is allowed on a validation split that is declared public.",
            )
        if not 0 < self.bound < float("inf"):
            raise InvalidInputError("scoring.bound", self.bound, "must be finite and above 0")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Scoring:
        """Read the ``scoring`` of a spec.

        Args:
            data: Fields by name.

        Returns:
            The scoring, checked.

        Raises:
            InvalidInputError: If a field is unknown, or outside its domain.
        """
        known = ("metric", "mechanism", "bound", "folds")
        if unknown := sorted(set(data) - set(known)):
            raise InvalidInputError("scoring", unknown, f"knows {', '.join(known)}")
        check_types(cls, data, where="scoring")
        return cls(**data)

    def plan(
        self,
        *,
        records: int,
        public: bool,
        epsilon: float,
        delta: float,
        adjacency: Adjacency,
    ) -> ScorePlan:
        """Plan one score: at most (epsilon, delta), or exact on a split declared public.

        Args:
            records: Declared number of validation records, at least 1.
            public: Whether the split is declared public.
            epsilon: What one score may cost, above 0.
            delta: In (0, 1).
            adjacency: The relation of neighbouring datasets.

        Returns:
            The plan, noise included.
        """
        bound = 1.0 if self.metric == "accuracy" else self.bound
        if public:
            return ScorePlan(records, None, self.mechanism, self.metric, bound)
        unit: Event = Gaussian(1.0) if self.mechanism == "gaussian" else Laplace(1.0)
        noise = calibrate(unit, epsilon=epsilon, delta=delta, adjacency=adjacency).scale
        return ScorePlan(records, noise, self.mechanism, self.metric, bound)


@dataclass(frozen=True)
class ScorePlan:
    """How a trial is scored: a sum over the validation split, divided by its declared size.

    It is noised if the split is private.

    Args:
        records: Declared number of validation records. Scores are sums over the records there are,
            divided by it, so their sensitivity is bound/records however many there are.
        noise_multiplier: Noise scale over that sensitivity; ``None`` if the split is declared
            public.
        mechanism: ``gaussian`` or ``laplace``.
        metric: ``accuracy`` or ``loss``.
        bound: Largest value that one record adds.

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

    @property
    def event(self) -> Event | None:
        """What one score costs the validation records; ``None`` where it is free."""
        if self.noise_multiplier is None:
            return None
        kind = Gaussian if self.mechanism == "gaussian" else Laplace
        return kind(self.noise_multiplier)

    @property
    def standard_deviation(self) -> float:
        """Scale of the noise on the score: standard deviation, or Laplace's scale."""
        if self.noise_multiplier is None:
            return 0.0
        return self.noise_multiplier * self.bound / self.records

    def scaled(self, factor: float) -> ScorePlan:
        """Return the plan with its noise times ``factor``.

        Args:
            factor: Above 0.
        """
        if self.noise_multiplier is None:
            return self
        noise = self.noise_multiplier * factor
        return ScorePlan(self.records, noise, self.mechanism, self.metric, self.bound)


def validation_metric(plan: ScorePlan | None, score: float | None) -> dict[str, float]:
    """Return a score under the name of its metric, as people read it.

    Args:
        plan: How the trial was scored; ``None`` if it was not.
        score: The score: higher is better, so that of a loss is its negative.

    Returns:
        ``validation_accuracy`` or ``validation_loss``; nothing without a finite score.

    Example:
        >>> validation_metric(ScorePlan(100, 2.0, metric="loss"), -0.25)
        {'validation_loss': 0.25}
    """
    if plan is None or score is None or not math.isfinite(score):
        return {}
    return {f"validation_{plan.metric}": -score if plan.metric == "loss" else score}
