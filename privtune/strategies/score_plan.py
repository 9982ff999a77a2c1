"""Plans of scores: bounded metrics on a split, noised if the split is private."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from privtune.accounting import Adjacency, Event, Gaussian, Laplace, calibrate
from privtune.errors import InvalidInputError
from privtune.names import refuse_fields, refuse_name
from privtune.strategies.options import check_types
from privtune.training.mechanism import metrics
from privtune.training.mechanism.estimates import (
    CHOICE,
    LEVEL,
    Floats,
    ScoreEstimate,
    SumNoise,
)
from privtune.training.mechanism.temperature import Confidence

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
        calibration: Share of the release, as of 1/σ², that a temperature of the model's probabilities is
            fitted with, from 0 (there is none) to below 1.
        classes: How many classes these probabilities are of; None without a temperature.

    Example:
        >>> score = ScorePlan(records=1000, noise_multiplier=4.0)
        >>> score.event, score.scaled(2.0).noise_multiplier
        (Gaussian(noise_multiplier=4.0), 8.0)
        >>> [metric.name for metric in score.make_metrics()], score.noises[0].scale
        (['accuracy'], 4.0)
        >>> worth = score.expected(classes=2, rarest=0.5)
        >>> round(worth.low, 2), round(worth.high, 2), worth.caption
        (0.77, 0.83, 'the noise and the sampling of the records')
    """

    records: int
    noise_multiplier: float | None
    mechanism: str = "gaussian"
    metric: str = "accuracy"
    options: Mapping[str, Any] = field(default_factory=dict)
    beside: Sequence[Mapping[str, Any]] = ()
    adjacency: Adjacency = Adjacency.ADD_REMOVE
    candidates: float = 1.0
    calibration: float = 0.0
    classes: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "adjacency", Adjacency(self.adjacency))
        object.__setattr__(self, "beside", tuple(self.beside))

    @property
    def event(self) -> Event | None:
        """The privacy event of one score for the split's records, or None if it is free."""
        if self.noise_multiplier is None:
            return None
        if self.mechanism == "gaussian":
            return Gaussian(self.noise_multiplier)
        return Laplace(self.noise_multiplier)

    @property
    def names(self) -> list[str]:
        """The names of the metrics that the score consists of."""
        others = [str(each["metric"]) for each in self.beside]
        return [self.metric, *others]

    def make_metrics(self) -> list[metrics.Metric]:
        """Return the metrics that the score consists of, the one to compare by first."""
        return list(self._metrics)

    @cached_property
    def _metrics(self) -> list[metrics.Metric]:
        terms: dict[str, Any] = {"mechanism": self.mechanism, "adjacency": self.adjacency}
        first = {"metric": self.metric, **self.options}
        all_options = (first, *self.beside)
        return [metrics.make_metric(**options, **terms) for options in all_options]

    @cached_property
    def noises(self) -> list[SumNoise]:
        """The noise on each sum of each metric.

        **Guarantee**: each of m metrics has √m times the noise that it had alone (m times for Laplace), and
        1/σ² = Σ 1/(√m σ)² (1/b = Σ 1/(m b)): together they are one release of the noise multiplier. A
        temperature beside them takes its share s of 1/σ² and leaves them 1 - s, as m/(1 - s) metrics would.
        """
        if self.noise_multiplier is None:
            return [SumNoise(self.mechanism, 0.0) for _ in self._metrics]
        count = len(self._metrics) / (1.0 - self.calibration)
        factor = count
        if self.mechanism != "laplace":
            factor = math.sqrt(count)
        multiplier = factor * self.noise_multiplier
        return [
            SumNoise(self.mechanism, multiplier * metric.sensitivity) for metric in self._metrics
        ]

    @property
    def calibrator(self) -> Confidence | None:
        """The metric by which a temperature is fitted, or None without a temperature."""
        if self.calibration == 0.0 or self.classes is None:
            return None
        return Confidence(classes=self.classes, mechanism=self.mechanism, adjacency=self.adjacency)

    @property
    def calibration_noise(self) -> SumNoise:
        """The noise on each sum that a temperature is fitted by: see :attr:`noises`."""
        metric = self.calibrator
        if metric is None or self.noise_multiplier is None:
            return SumNoise(self.mechanism, 0.0)
        share = self.calibration
        if self.mechanism != "laplace":
            share = math.sqrt(share)
        multiplier = self.noise_multiplier / share
        return SumNoise(self.mechanism, multiplier * metric.sensitivity)

    @property
    def calibration_error(self) -> float:
        """Standard deviation of the noise on the model's mean confidence minus its accuracy."""
        metric = self.calibrator
        if metric is None:
            return 0.0
        return metric.gap * self.calibration_noise.deviation / self.records

    @property
    def level(self) -> float:
        """Confidence level of each interval, such that the chosen candidate's interval holds at 95%.

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
            >>> {name: score.text for name, score in score.estimates([np.array([870.0, 130.0])]).items()}
            {'accuracy': '87.0% [84.6, 89.1]'}
        """
        scores = {}
        rows = zip(self.names, self.make_metrics(), self.noises, sums, strict=True)
        for name, metric, noise, noised_sums in rows:
            score = metric.estimate(noised_sums, noise, level=self.level)
            if self.candidates > 1.0:
                score = replace(score, covers=(*score.covers, CHOICE))
            scores[metrics.label(name)] = score
        return scores

    def expected(self, *, classes: int | None, rarest: float) -> ScoreEstimate:
        """Return the first metric's estimate for a model of middling quality, from public facts alone.

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


def _takes_range(metric: str) -> bool:
    """Return whether a metric needs the range of the targets, which the task may declare."""
    return "target_range" in metrics.options_of(metrics.find_metric(metric))


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
        if self.metric is None:
            return
        # A metric of numbers needs their range, which the task may declare: it is made later.
        if not _takes_range(self.metric):
            self.make()

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
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
        """Return the settings in a spec's fields, after checking the fields' names and types.

        ``also`` is no field of a spec: there a list of metrics stands for it.
        """
        names = [field.name for field in fields(cls) if field.name != "also"]
        unknown = set(data) - set(names)
        if unknown:
            refuse_fields(where, unknown, names, "it")
        check_types(cls, data, where=where)
        return cls(**data, **more)

    @classmethod
    def of(cls, score: Score | None) -> Scoring:
        """Return the scoring that a task's ``score`` asks for; the usual one where it is None."""
        if score is None:
            return cls()
        return cls(metric=score.name, bound=score.bound, mechanism=score.mechanism)

    def _each(self) -> Sequence[Scoring]:
        """Return one scoring for each metric."""
        return (self,)

    def make(self, target_range: tuple[float, float] | None = None) -> metrics.Metric:
        """Return the first metric, made for the task's ``target_range``, or for classes if that is None."""
        first = self._each()[0]
        return first._make_one(target_range)

    def _make_one(self, target_range: tuple[float, float] | None) -> metrics.Metric:
        """Return this scoring's single metric, with the task's ``target_range`` if it states none itself."""
        name = self.metric or ("accuracy" if target_range is None else "mae")
        bounds = self.target_range
        if bounds is None and _takes_range(name):
            bounds = target_range
        return metrics.make_metric(
            name,
            bound=self.bound,
            k=self.k,
            bins=self.bins,
            target_range=bounds,
        )

    def check(
        self,
        *,
        classes: int | None,
        target_range: tuple[float, float] | None,
        rows: int | None = None,
    ) -> None:
        """Refuse a metric that does not suit the task's ``classes`` or ``target_range``.

        A metric of one's own is tried on a made-up record, of so many ``rows`` where records are units. What
        a task does not have is None.
        """
        for scoring in self._each():
            metric = scoring._make_one(target_range)
            if isinstance(metric, metrics.OwnScore):
                metric.try_on(classes=classes, numbers=target_range is not None, rows=rows)
            _check_targets(metric, classes, target_range)

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
        calibration = calibrate(unit, epsilon=epsilon, delta=delta, adjacency=adjacency)
        return replace(exact, noise_multiplier=calibration.scale, adjacency=adjacency)

    def exact(self, *, records: int, target_range: tuple[float, float] | None = None) -> ScorePlan:
        """Return an exact score on a public split of ``records``; ``target_range`` as for :meth:`make`."""
        terms = [scoring._terms(target_range) for scoring in self._each()]
        name, options = terms[0]
        beside = []
        for other, other_options in terms[1:]:
            beside.append({"metric": other, **other_options})
        return ScorePlan(records, None, self.mechanism, name, options, tuple(beside))

    def _terms(self, target_range: tuple[float, float] | None) -> tuple[str, dict[str, Any]]:
        """Return the name and the options of this scoring's single metric.

        A metric of the user's own is known by the path that the spec has: a worker imports it anew.
        """
        metric = self._make_one(target_range)
        name = self.metric or metric.name
        options = {}
        for option in metrics.options_of(metric):
            value = getattr(metric, option)
            if value is not None:
                options[option] = value
        return name, options


def _check_targets(
    metric: metrics.Metric,
    classes: int | None,
    target_range: tuple[float, float] | None,
) -> None:
    """Refuse a metric whose kind of targets (numbers, classes, two classes) is not the task's."""
    of_numbers = target_range is not None
    if classes is None and target_range is None:
        # Records of one's own may declare neither: what it scores by says what its targets are.
        of_numbers = metric.takes == "numbers"
    if not _suits(metric, of_numbers=of_numbers):
        names = [
            each.name for each in metrics.METRICS.values() if _suits(each, of_numbers=of_numbers)
        ]
        targets = "numbers in a declared range" if of_numbers else "classes"
        raise InvalidInputError(
            "scoring.metric",
            metric.name,
            f"must be of {targets}: {', '.join(names)}",
        )
    if metric.takes == "two" and classes not in (None, 2):
        raise InvalidInputError(
            "scoring.metric",
            metric.name,
            f"is of two classes, and the task has {classes}",
        )


def _suits(metric: metrics.Metric | type[metrics.Metric], *, of_numbers: bool) -> bool:
    """Return whether a metric takes numbers as targets if ``of_numbers``, else classes."""
    return metric.takes == "any" or (metric.takes == "numbers") == of_numbers


CALIBRATIONS = ("auto", "temperature", "none")
"""Ways to calibrate the probabilities of a released model."""

_CALIBRATION_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2)
_ENOUGH = 0.02  # of confidence: studies/probabilities measures what noise of it costs
_USEFUL = 0.05  # beyond it a temperature may be worse than none


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
        calibration: ``temperature`` divides the logits of the released model by a number that is fitted
            on the test split, so that its probabilities are as sure as it is right; its predictions stay.
            It is part of the score's release, whose noise grows by 1/√(1 - s): s is the least of 1, 2, 5,
            10 and 20% with which the noise says how sure the model is within 2 points. ``none`` leaves the
            logits as they are. Unless given, ``auto``: a temperature for a metric of classes, on a public
            split or where 20% say it within 5 points.

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
    calibration: str = "auto"

    def __post_init__(self) -> None:
        if self.calibration not in CALIBRATIONS:
            refuse_name("report.calibration", self.calibration, CALIBRATIONS)
        if self.also:
            self._check_each()
        else:
            super().__post_init__()
        if self.epsilon_share is not None and not 0.0 < self.epsilon_share <= 1.0:
            raise InvalidInputError(
                "report.epsilon_share",
                self.epsilon_share,
                "must be above 0 and at most 1",
            )

    def _check_each(self) -> None:
        """Refuse several metrics of which two are equal, or one does not take its options.

        Two of one name would overwrite each other where scores are kept by name, and be paid for twice.
        """
        names = [self.metric, *self.also]
        has_twice = len(set(names)) < len(names)
        if self.metric is None or has_twice:
            raise InvalidInputError("report.metric", names, "must be different metrics")
        for scoring in self._each():
            scoring.__post_init__()

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

    def with_temperature(self, score: ScorePlan, *, classes: int | None) -> ScorePlan:
        """Return a score's plan that also fits a temperature, where ``calibration`` asks for one.

        Args:
            score: The plan of the score alone.
            classes: How many classes the task has; None for numbers.

        Raises:
            InvalidInputError: If a temperature is asked for, and there are no probabilities or the wrong
                noise.

        Example:
            >>> from privtune.accounting import Adjacency
            >>> terms = {"public": False, "epsilon": 1.0, "delta": 1e-5, "adjacency": Adjacency.ADD_REMOVE}
            >>> plans = [Reporting().plan(records=records, **terms) for records in (50, 500, 5000)]
            >>> [Reporting().with_temperature(plan, classes=2).calibration for plan in plans]
            [0.0, 0.2, 0.01]
        """
        if self.calibration == "none":
            return score
        has_probabilities = any(
            metric.takes in metrics.OF_CLASSES for metric in score.make_metrics()
        )
        is_gaussian = score.noise_multiplier is None or score.mechanism == "gaussian"
        if classes is None or classes < 2 or not has_probabilities or not is_gaussian:
            if self.calibration == "auto":
                return score
            if classes is None:
                allowed = "needs a task that declares how many classes it has"
                remedy = (
                    "Declare them (classes=2 beside build, in Python), or leave calibration out."
                )
            elif not has_probabilities:
                allowed = "needs a metric of classes, such as accuracy"
                remedy = "Name one as report.metric, or leave calibration out."
            else:
                allowed = "needs Gaussian noise, whose sums it shares"
                remedy = "Leave out report.mechanism, or calibration."
            raise InvalidInputError("report.calibration", self.calibration, allowed, remedy)
        for share in _CALIBRATION_SHARES:
            calibrated = replace(score, calibration=share, classes=classes)
            if calibrated.calibration_error <= _ENOUGH:
                return calibrated
        # Not even the largest share says it well: the user's word decides, or what noise leaves.
        is_useful = calibrated.calibration_error <= _USEFUL
        return calibrated if is_useful or self.calibration != "auto" else score

    def _each(self) -> Sequence[Scoring]:
        """Return one scoring for each metric, with the options that it takes.

        Raises:
            InvalidInputError: If an option is none of any metric: it would change nothing.
        """
        if not self.also:
            return [self]
        options = {}
        for name in ("bound", "k", "bins", "target_range"):
            value = getattr(self, name)
            if value is not None:
                options[name] = value
        unused = set(options)
        scorings = []
        for metric in (self.metric, *self.also):
            names = _option_names(str(metric))
            terms: dict[str, Any] = {}
            for name, value in options.items():
                if name in names:
                    terms[name] = value
            unused -= set(terms)
            scorings.append(Scoring(metric=metric, mechanism=self.mechanism, **terms))
        if unused:
            raise InvalidInputError("report", sorted(unused), "are options of none of its metrics")
        return scorings

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """Return the reporting that the checked ``report`` of a spec declares."""
        try:
            metric = data.get("metric")
            if not isinstance(metric, list | tuple):
                return cls._read(data, "report")
            are_names = all(isinstance(name, str) for name in metric)
            if not metric or not are_names:
                raise InvalidInputError("report.metric", metric, "must be names of metrics")
            fields_of_first = {**data, "metric": metric[0]}
            return cls._read(fields_of_first, "report", also=tuple(metric[1:]))
        except InvalidInputError as error:
            name = error.name.replace("scoring", "report", 1)
            raise InvalidInputError(name, error.value, error.allowed, error.remedy) from None


def _option_names(metric: str) -> set[str]:
    """Return the names of a metric's options, which always include ``target_range``."""
    if metric not in metrics.METRICS and ":" not in metric:
        return {"target_range"}
    kind = metrics.find_metric(metric)
    return {"target_range", *(field.name for field in fields(kind))}
