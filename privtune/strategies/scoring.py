"""How models are scored: a bounded metric on a split, noised if that is private."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from privtune.accounting import Adjacency, Event, Gaussian, Laplace, calibrate
from privtune.errors import InvalidInputError
from privtune.strategies.options import check_types
from privtune.training.mechanism import metrics
from privtune.training.mechanism.estimates import (
    CHOICE,
    LEVEL,
    Floats,
    ScoreEstimate,
    SumNoise,
)

if TYPE_CHECKING:
    from privtune.tasks import Score


@dataclass(frozen=True)
class ScorePlan:
    """How a trial is scored: metrics of sums over a split, noised if the split is private.

    Args:
        records: Declared number of records. No value depends on it: the count is noised with the sums.
        noise_multiplier: Noise scale over the sensitivity; None if the split is declared public.
        mechanism: ``gaussian`` or ``laplace``.
        metric: Name of the metric, of several the first.
        options: What else it takes, JSON-ready.
        beside: More metrics of the same release, each a name (``metric``) and its options.
        adjacency: Which neighbours the noise hides.
        candidates: How many candidates the scored one is expected to be chosen from.

    Example:
        >>> score = ScorePlan(records=1000, noise_multiplier=4.0)
        >>> score.event, score.scaled(2.0).noise_multiplier
        (Gaussian(noise_multiplier=4.0), 8.0)
        >>> [metric.name for metric in score.make_metrics()], score.noises[0].scale
        (['accuracy'], 4.0)
        >>> worth = score.expected(classes=2, rarest=0.5)
        >>> round(worth.low, 2), round(worth.high, 2), worth.caption
        (0.77, 0.83, 'the noise and the drawing of the records')
    """

    records: int
    noise_multiplier: float | None
    mechanism: str = "gaussian"
    metric: str = "accuracy"
    options: Mapping[str, Any] = field(default_factory=dict)
    beside: Sequence[Mapping[str, Any]] = ()
    adjacency: Adjacency = Adjacency.ADD_REMOVE
    candidates: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "adjacency", Adjacency(self.adjacency))
        object.__setattr__(self, "beside", tuple(self.beside))

    @property
    def event(self) -> Event | None:
        """What one score costs the split's records; ``None`` where it is free."""
        if self.noise_multiplier is None:
            return None
        kind = Gaussian if self.mechanism == "gaussian" else Laplace
        return kind(self.noise_multiplier)

    @property
    def names(self) -> list[str]:
        """The names of its metrics."""
        return [self.metric, *(str(each["metric"]) for each in self.beside)]

    def make_metrics(self) -> list[metrics.Metric]:
        """Return its metrics, the first one first."""
        return list(self._metrics)

    @cached_property
    def _metrics(self) -> list[metrics.Metric]:
        terms: dict[str, Any] = {"mechanism": self.mechanism, "adjacency": self.adjacency}
        first = {"metric": self.metric, **self.options}
        return [metrics.make_metric(**each, **terms) for each in (first, *self.beside)]

    @cached_property
    def noises(self) -> list[SumNoise]:
        """The noise on each sum of each metric.

        **Guarantee**: each of m metrics has √m times the noise that it had alone (m times for Laplace), and
        1/σ² = Σ 1/(√m σ)² (1/b = Σ 1/(m b)): together they are one release of the noise multiplier.
        """
        made = self.make_metrics()
        count = float(len(made))
        more = count if self.mechanism == "laplace" else math.sqrt(count)
        multiplier = 0.0 if self.noise_multiplier is None else more * self.noise_multiplier
        return [SumNoise(self.mechanism, multiplier * metric.sensitivity) for metric in made]

    @property
    def level(self) -> float:
        """How often each interval holds, so that the chosen one's holds 95 times of 100.

        Of K candidates at most K (1 - level) intervals miss in the mean, whichever is chosen, and K is
        independent of them: the mean number of candidates is enough (Wald 1944, the union bound).
        """
        return 1.0 - (1.0 - LEVEL) / max(self.candidates, 1.0)

    def estimates(self, sums: Sequence[Floats]) -> dict[str, ScoreEstimate]:
        """Return each metric with its interval, by name.

        Post-processing: it looks at what was released and at the plan alone.

        Args:
            sums: The noised sums of each metric, the first one's first.

        Example:
            >>> import numpy as np
            >>> score = ScorePlan(records=1000, noise_multiplier=4.0)
            >>> {name: found.text for name, found in score.estimates([np.array([870.0, 130.0])]).items()}
            {'accuracy': '87.0% [84.6, 89.1]'}
        """
        scores = {}
        for name, metric, noise, released in zip(
            self.names, self.make_metrics(), self.noises, sums, strict=True
        ):
            score = metric.estimate(released, noise, level=self.level)
            if self.candidates > 1.0:
                score = replace(score, covers=(*score.covers, CHOICE))
            scores[metrics.label(name)] = score
        return scores

    def expected(self, *, classes: int | None, rarest: float) -> ScoreEstimate:
        """Return what the first metric would say of a model of middling quality, by public facts alone.

        Args:
            classes: How many classes; None for numbers.
            rarest: The share of the rarest class, in (0, 1].
        """
        metric = self.make_metrics()[0]
        noise = self.noises[0]
        sums = metric.expected(self.records, classes or 1, rarest, noise)
        return metric.estimate(sums, noise, level=self.level)

    def scaled(self, factor: float) -> ScorePlan:
        """Return the score plan with its noise times ``factor``, above 0."""
        if self.noise_multiplier is None:
            return self
        return replace(self, noise_multiplier=self.noise_multiplier * factor)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-ready data.

        Example:
            >>> ScorePlan(records=1000, noise_multiplier=4.0).to_dict()["metric"]
            'accuracy'
        """
        data: dict[str, Any] = json.loads(json.dumps(asdict(self)))  # tuples are lists there
        return data


_OF_NUMBERS = tuple(metric.name for metric in metrics.METRICS.values() if metric.takes == "numbers")


@dataclass(frozen=True)
class Scoring:
    """How a study scores its trials.

    Args:
        metric: ``accuracy``, ``balanced_accuracy``, ``top_k``, ``f1``, ``macro_f1``, ``auc``,
            ``loss`` (that which was trained on, clipped), ``perplexity`` (e to that), ``mae``, ``mse``,
            ``r2``, or ``package.module:function`` of outputs and targets. Unless given, ``accuracy``,
            or ``mae`` for a regression.
        mechanism: ``gaussian``, or ``laplace`` where the validation split is private.
        bound: The most that one record adds: the clip of a loss or of a function of one's own (1
            unless given), or of an error (the width of the range, or its square, unless given).
        k: How many classes count for ``top_k``; 5 unless given.
        bins: Bins of each class's histogram for ``auc``; by the noise unless given.
        target_range: ``[low, high]`` of the targets; the task's own unless given.

    Raises:
        InvalidInputError: If a field is outside its domain.

    Example:
        >>> from privtune.accounting import Adjacency
        >>> from privtune.tasks import Score
        >>> terms = {"epsilon": 1.0, "delta": 1e-5, "adjacency": Adjacency.ADD_REMOVE}
        >>> scoring = Scoring.from_dict({"metric": "loss", "bound": 4.0})
        >>> scoring.check(classes=2, target_range=None)
        >>> scoring.check_noise(public=False)
        >>> score = scoring.plan(records=1000, public=False, **terms)
        >>> round(score.noise_multiplier, 2), [round(noise.scale, 2) for noise in score.noises]
        (3.73, [2.8])
        >>> scoring.exact(records=1000).noise_multiplier  # none
        >>> Scoring.of(Score("loss", bound=4.0)).make() == scoring.make()
        True
    """

    metric: str | None = None
    mechanism: str = "gaussian"
    bound: float | None = None
    k: int | None = None
    bins: int | None = None
    target_range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.mechanism not in ("gaussian", "laplace"):
            raise InvalidInputError(
                "scoring.mechanism",
                self.mechanism,
                "must be gaussian or laplace",
                "A score without noise is allowed on a validation split that is declared public.",
            )
        if self.bound is not None and not 0 < self.bound < float("inf"):
            raise InvalidInputError("scoring.bound", self.bound, "must be finite and above 0")
        if self.target_range is not None:
            object.__setattr__(self, "target_range", tuple(map(float, self.target_range)))
        if self.metric is not None and (":" in self.metric or self.metric not in _OF_NUMBERS):
            self.make()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the ``scoring`` of a spec, checked, from its fields ``data``.

        Raises:
            InvalidInputError: If a field is unknown, or outside its domain.
        """
        if "folds" in data:
            raise InvalidInputError(
                "scoring.folds",
                data["folds"],
                "k-fold cross-validation looks at every record in every fold, so training and "
                "scoring are not on disjoint records and each trial costs the composition of all "
                "its folds",
                "Hold out a validation split, or run k trials with the strategy 'everything'.",
            )
        if isinstance(data.get("metric"), list | tuple):
            raise InvalidInputError(
                "scoring.metric",
                data["metric"],
                "must be one metric: one decides, and each beside it would add to its noise",
                "To see more of what was chosen, say report: {metric: [...]}.",
            )
        return cls._read(data, "scoring")

    @classmethod
    def _read(cls, data: Mapping[str, Any], where: str, **more: Any) -> Self:
        known = [field.name for field in fields(cls) if field.name != "also"]
        if unknown := sorted(set(data) - set(known)):
            raise InvalidInputError(where, unknown, f"knows {', '.join(known)}")
        check_types(cls, data, where=where)
        return cls(**data, **more)

    @classmethod
    def of(cls, score: Score | None) -> Scoring:
        """Return the scoring that a task's ``score`` asks for; the usual one where it is None."""
        if score is None:
            return cls()
        return cls(metric=score.name, bound=score.bound, mechanism=score.mechanism)

    def _each(self) -> Sequence[Scoring]:
        """Return how each metric is scored alone."""
        return (self,)

    def make(self, target_range: tuple[float, float] | None = None) -> metrics.Metric:
        """Return the metric, of several the first, for the task's ``target_range``, None for classes."""
        return next(each._made(target_range) for each in self._each())

    def _made(self, target_range: tuple[float, float] | None) -> metrics.Metric:
        name = self.metric or ("accuracy" if target_range is None else "mae")
        numbers = name in _OF_NUMBERS
        known = target_range if self.target_range is None and numbers else self.target_range
        return metrics.make_metric(
            name, bound=self.bound, k=self.k, bins=self.bins, target_range=known
        )

    def check(
        self,
        *,
        classes: int | None,
        target_range: tuple[float, float] | None,
        rows: int | None = None,
    ) -> None:
        """Refuse a metric that suits neither a task of ``classes`` nor one of a ``target_range``.

        A metric of one's own is tried on a made-up record, of so many ``rows`` where records are units. What
        a task does not have is None.
        """
        for each in self._each():
            _check(each._made(target_range), classes, target_range, rows)

    def check_noise(self, *, public: bool) -> None:
        """Refuse a noise mechanism on a split that is ``public``, whose score has no noise.

        Raises:
            InvalidInputError: If the mechanism is not the usual one, and nothing is noised by it.
        """
        if public and self.mechanism != "gaussian":
            raise InvalidInputError(
                "scoring.mechanism",
                self.mechanism,
                "goes without a split that is declared public: its score has no noise",
                "Leave it out.",
            )

    def plan(
        self,
        *,
        records: int,
        public: bool,
        epsilon: float,
        delta: float,
        adjacency: Adjacency,
        target_range: tuple[float, float] | None = None,
    ) -> ScorePlan:
        """Return a score on ``records``: exact if the split is ``public``, else noised.

        Its noise is for (``epsilon``, ``delta``) under ``adjacency``; ``target_range`` as for :meth:`make`.
        """
        exact = self.exact(records=records, target_range=target_range)
        if public:
            return exact
        unit: Event = Gaussian(1.0) if self.mechanism == "gaussian" else Laplace(1.0)
        noise = calibrate(unit, epsilon=epsilon, delta=delta, adjacency=adjacency).scale
        return replace(exact, noise_multiplier=noise, adjacency=adjacency)

    def exact(self, *, records: int, target_range: tuple[float, float] | None = None) -> ScorePlan:
        """Return an exact score on a public split of ``records``; ``target_range`` as for :meth:`make`."""
        (name, options), *more = (each._terms(target_range) for each in self._each())
        beside = tuple({"metric": also, **its} for also, its in more)
        return ScorePlan(records, None, self.mechanism, name, options, beside)

    def _terms(self, target_range: tuple[float, float] | None) -> tuple[str, dict[str, Any]]:
        """Return the name and the options of one metric."""
        metric = self._made(target_range)
        name = metric.name if metric.name in metrics.METRICS else str(self.metric)
        options = {
            option: getattr(metric, option)
            for option in metrics.options_of(metric)
            if getattr(metric, option) is not None
        }
        return name, options


def _check(
    metric: metrics.Metric,
    classes: int | None,
    target_range: tuple[float, float] | None,
    rows: int | None,
) -> None:
    """Refuse a metric of classes for numbers, or of numbers for classes."""
    if isinstance(metric, metrics.OwnScore):
        metric.try_on(classes=classes, numbers=target_range is not None, rows=rows)
    # Records of one's own may declare neither: what it scores by says what its targets are.
    numbers = (
        metric.takes == "numbers"
        if classes is None and target_range is None
        else target_range is not None
    )
    found = [
        other.name
        for other in metrics.METRICS.values()
        if other.takes == "any" or (other.takes == "numbers") == numbers
    ]
    if metric.name in metrics.METRICS and metric.name not in found:
        what = "numbers in a declared range" if numbers else "classes"
        raise InvalidInputError(
            "scoring.metric", metric.name, f"must be of {what}: {', '.join(found)}"
        )
    if metric.takes == "two" and classes not in (None, 2):
        raise InvalidInputError(
            "scoring.metric", metric.name, f"is of two classes, and the task has {classes}"
        )


@dataclass(frozen=True)
class Reporting(Scoring):
    """One final score of every arm's released model, on the test split.

    On a public split it is exact and free. On a private one it is noised, and charged in parallel with
    everything else, so that up to some share of the arm's ε it costs the trainings nothing.

    Args:
        metric: As for trials: ``accuracy``, ``auc``, ``mae``, .... Unless given, ``accuracy``, or
            ``mae`` for a regression.
        mechanism: ``gaussian``, or ``laplace`` where the test split is private.
        also: More metrics of the same release: m of them have sqrt(m) times the noise of one. In a
            spec, ``metric: [auc, accuracy]``.
        bound: The most that one record adds, for ``loss``, ``mae``, ``mse`` and one's own.
        k: How many classes count for ``top_k``; 5 unless given.
        bins: Bins of each class's histogram for ``auc``; by the noise unless given.
        target_range: ``[low, high]`` of the targets; the task's own unless given.
        epsilon_share: What the score may cost, as a share of the arm's ε, above 0 and at most 1. Unless
            given, the largest of a grid with which the study stays within its ε while its trainings
            are planned at 99.9% of it (98% under replace-one); the plan says which.

    Raises:
        InvalidInputError: If a field is outside its domain.

    Example:
        >>> Reporting.from_dict({"metric": "auc", "epsilon_share": 0.1}).epsilon_share
        0.1
        >>> Reporting.from_dict({"metric": "auc", "epsilon_share": 2})
        Traceback (most recent call last):
            ...
        privtune.errors.InvalidInputError: report.epsilon_share = 2: must be above 0 and at most 1.
    """

    epsilon_share: float | None = None
    also: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.also:
            super().__post_init__()
        elif len({self.metric, *self.also}) <= len(self.also) or self.metric is None:
            raise InvalidInputError(
                "report.metric", [self.metric, *self.also], "must be different metrics"
            )
        else:
            for each in self._each():
                each.__post_init__()
        if self.epsilon_share is not None and not 0.0 < self.epsilon_share <= 1.0:
            raise InvalidInputError(
                "report.epsilon_share", self.epsilon_share, "must be above 0 and at most 1"
            )

    def check_noise(self, *, public: bool) -> None:
        """Refuse options of noise where the split is public."""
        if public and self.epsilon_share is not None:
            raise InvalidInputError(
                "report.epsilon_share",
                self.epsilon_share,
                "does not go with a public test split, whose score is exact and free",
                "Leave it out.",
            )
        super().check_noise(public=public)

    def _each(self) -> Sequence[Scoring]:
        """Return how each metric is scored alone, with the options that are its own."""
        if not self.also:
            return [self]
        options = ("bound", "k", "bins", "target_range")
        given = {name for name in options if getattr(self, name) is not None}
        known: set[str] = set()
        found = []
        for name in (self.metric, *self.also):
            kind = metrics.OwnScore if ":" in str(name) else metrics.METRICS.get(str(name))
            own = set() if kind is None else {f.name for f in fields(kind)} & given
            own |= {"target_range"} & given
            known |= own
            chosen = {option: getattr(self, option) for option in own}
            found.append(Scoring(metric=name, mechanism=self.mechanism, **chosen))
        if unused := sorted(given - known):
            raise InvalidInputError("report", unused, "are options of none of its metrics")
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the checked ``report`` of a spec."""
        try:
            metric, more = data.get("metric"), {}
            if isinstance(metric, list | tuple):
                if not metric or not all(isinstance(name, str) for name in metric):
                    raise InvalidInputError("report.metric", metric, "must be names of metrics")
                data, more = {**data, "metric": metric[0]}, {"also": tuple(metric[1:])}
            return cls._read(data, "report", **more)
        except InvalidInputError as error:
            name = error.name.replace("scoring", "report", 1)
            raise InvalidInputError(name, error.value, error.allowed, error.remedy) from None
