"""What trials produce, and what leaves the trust boundary, paid for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from privtune.errors import PrivTuneError
from privtune.imports import quiet_optuna

if TYPE_CHECKING:
    import optuna
    import pandas
    import torch
    from optuna.trial import FrozenTrial

    from privtune.accounting import Guarantee
    from privtune.tasks._rows import Served
    from privtune.training.mechanism.estimates import ScoreEstimate


class Weights:
    """A field that holds weights, or a function that reads them when they are first asked for."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, instance: object | None, owner: type) -> torch.Tensor:
        if instance is None:  # the field has no default
            raise AttributeError(self._name)
        held = instance.__dict__[self._name]
        if callable(held):
            held = instance.__dict__[self._name] = held()
        return cast("torch.Tensor", held)

    def __set__(self, instance: object, value: torch.Tensor | Callable[[], torch.Tensor]) -> None:
        instance.__dict__[self._name] = value


class Ending(StrEnum):
    """How a trial ended. A failed one has no result: an error of the program stops its arm.

    Example:
        >>> Ending("pruned").name
        'PRUNED'
    """

    TRAINED = "trained"
    DIVERGED = "diverged"  # its weights are not finite: a result, for dropping it would be a choice by data
    PRUNED = "pruned"  # stopped by a pruner, on scores that are paid for

    @classmethod
    def of(cls, weights: torch.Tensor) -> Ending:
        """Return whether a training that gave these ``weights`` trained or diverged.

        Example:
            >>> import torch
            >>> Ending.of(torch.tensor([0.5, torch.nan])).value
            'diverged'
        """
        return cls.TRAINED if bool(weights.isfinite().all()) else cls.DIVERGED


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """What one trial produced. Sealed: it stays inside the trust boundary unless it is released.

    Args:
        index: Position in its round, or among the trials of a release; 0 for a training with a name.
        params: Hyperparameters of the candidate.
        weights: Trained parameters, flat, shape ``[P]``; shape ``[0]`` where there is no model.
        score: Noised (or public) score that candidates are compared by, higher is better; ``-inf`` for
            weights that are not finite; None unscored.
        estimate: What that score says of the metric, with its interval; None without a finite one.
        curves: By name, one value a step.
        transcript_digest: Digest of what the training released.
        ended: How it ended.
        unusable: How often an unusable record was met; for the curator alone, never released.
        shapes: Shapes of the parameters by name, as they lie in ``weights``; empty where not known.
        checked: What was compared of a declared training; empty where nothing was.

    Example:
        >>> import torch
        >>> result = TrialResult(index=0, params={"learning_rate": 0.5}, weights=torch.zeros(3), score=0.91)
        >>> result.ended, result.estimate
        (<Ending.TRAINED: 'trained'>, None)
    """

    index: int
    params: Mapping[str, Any]
    weights: Weights = Weights()
    score: float | None
    estimate: ScoreEstimate | None = None
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)
    transcript_digest: str = ""
    ended: Ending = Ending.TRAINED
    unusable: int = 0
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    checked: str = ""

    def with_score(self, score: float | None) -> TrialResult:
        """Return the result with another ``score``, its weights unread: ``replace`` would read them.

        Example:
            >>> import torch
            >>> result = TrialResult(index=0, params={}, weights=torch.zeros(3), score=1.07)
            >>> result.with_score(1.0).score
            1.0
        """
        other = copy(self)
        object.__setattr__(other, "score", score)
        return other


@dataclass(frozen=True)
class Outcome:
    """What a strategy hands over for release.

    Args:
        result: The released trial; None where the law drew no run at all.
        trials: Every trial, where all of them are paid for.
        note: One sentence about the release, if it needs one.

    Example:
        >>> Outcome(None, note="The law drew no run at all.").trials
        ()
    """

    result: TrialResult | None
    trials: tuple[TrialResult, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Cost:
    """What an arm took, by its plan: what it really took tells how many runs and records there are.

    Args:
        gradient_evaluations: Expected per-sample gradients.
        wall_seconds: Estimated from made-up records; None if it is not known.
        expected: Whether the time is the plan's estimate, as of every private arm.

    Example:
        >>> study.release("selection").cost.expected
        True
    """

    gradient_evaluations: float
    wall_seconds: float | None
    expected: bool


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """What one of an arm's repeated runs released, beside its model.

    Args:
        params: Hyperparameters of its model.
        score: Its noised (or public) validation score, as of a :class:`Release`.
        choice: That score with its interval, as of a release.
        estimates: Metrics of its model on the test split, as of a release.
        nothing: Whether it released no model.
        diverged: Whether its model's weights are not finite.

    Example:
        >>> Repetition(params={"learning_rate": 0.5}, score=None).nothing
        False
    """

    params: Mapping[str, Any]
    score: float | None
    choice: Mapping[str, ScoreEstimate] = field(default_factory=dict)
    estimates: Mapping[str, ScoreEstimate] = field(default_factory=dict)
    nothing: bool = False
    diverged: bool = False

    @property
    def scores(self) -> dict[str, ScoreEstimate]:
        """Every score of its model by name: what it was chosen by, then its test metrics."""
        return {**self.choice, **self.estimates}

    @property
    def utility(self) -> dict[str, float]:
        """The values of :attr:`estimates` by name; none of one that holds no information."""
        return informative(self.estimates)

    @property
    def values(self) -> dict[str, float]:
        """The value of every score of its model by name: a mean of those alone that seem sure is biased."""
        return {name: score.value for name, score in self.scores.items()}


@dataclass(frozen=True, kw_only=True)
class Release:
    """The output of one arm.

    Args:
        arm, strategy: Their names.
        params: Hyperparameters of the released model.
        weights: Its parameters, flat, shape ``[P]``; shape ``[0]`` where the release is "nothing".
        score: Its noised (or public) validation score, or the tuning winner's (``plan.scored``), within what
            the metric can be and higher for better ones; None unscored.
        choice: That score by its name (``validation_accuracy``), with its interval; empty unscored.
        curves: By name, one value a step: functions of paid-for releases only. Empty if sealed.
        guarantee: What the arm cost, and by which bound.
        estimates: Metrics of the released model by name (``test_accuracy``), each with its interval: on a
            public test split, or noised and charged.
        cost: What it took, or is expected to take.
        sealed: Whether the arm's trials are sealed.
        trials: Every trial, where all of them are paid for; else empty.
        note: One sentence about the release, if it needs one.
        shapes: Shapes of the parameters by name, in the order in which they lie in ``weights``.
        machine: What it was computed on: device, driver, versions of libraries.
        make: Makes the model with other weights; None where nobody here can.
        serve: Makes of a model one that takes raw rows; None where nobody here can.
        shown: Returns the trials as Optuna has them, where all of them are paid for.
        checked: What was compared of a declared training; empty where nothing was.
        repetitions: What each run of a repeated arm released, the release's own first; empty of one draw.

    Example:
        >>> release = study.release("defaults")
        >>> release.params, release.sealed, round(release.guarantee.delta, 5)
        ({'learning_rate': 0.5, 'max_grad_norm': 1.0}, False, 1e-05)
        >>> release
        <Release of 'defaults' by fixed: 15 weights, {'learning_rate': 0.5, 'max_grad_norm': 1.0}, (ε = ...>
        >>> {name: tuple(values.shape) for name, values in release.state_dict().items()}
        {'weight': (3, 4), 'bias': (3,)}
        >>> release.model.training
        False
    """

    arm: str
    strategy: str
    params: Mapping[str, Any]
    weights: Weights = Weights()
    score: float | None
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)
    guarantee: Guarantee
    choice: Mapping[str, ScoreEstimate] = field(default_factory=dict)
    estimates: Mapping[str, ScoreEstimate] = field(default_factory=dict)
    cost: Cost
    sealed: bool
    trials: Sequence[TrialResult] = ()
    note: str = ""
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)
    checked: str = ""
    repetitions: tuple[Repetition, ...] = ()
    make: Callable[[], torch.nn.Module] | None = field(default=None, compare=False, repr=False)
    serve: Callable[[torch.nn.Module], Served] | None = field(
        default=None, compare=False, repr=False
    )
    shown: Callable[[], Sequence[FrozenTrial]] = field(default=tuple, repr=False, compare=False)

    def __repr__(self) -> str:
        size = sum(math.prod(shape) for shape in self.shapes.values())
        score = "" if self.score is None else f", score {self.score:.4g}"
        return (
            f"<Release of {self.arm!r} by {self.strategy}: {size:,} weights, {dict(self.params)}{score}, "
            f"{self.guarantee}>"
        )

    @property
    def scores(self) -> dict[str, ScoreEstimate]:
        """Every score of the released model by name: what it was chosen by, then its test metrics."""
        return {**self.choice, **self.estimates}

    @property
    def utility(self) -> dict[str, float]:
        """The values of :attr:`estimates` by name; none of one that holds no information."""
        return informative(self.estimates)

    @property
    def values(self) -> dict[str, float]:
        """What it was chosen by and its test metrics by name; none that holds no information."""
        return informative(self.scores)

    @property
    def model(self) -> torch.nn.Module:
        """The released model with its weights, in evaluation mode; made anew each time.

        Raises:
            PrivTuneError: If the release is of no model, or what makes it is not in this process.
        """
        if self.is_nothing:
            raise PrivTuneError(f"Arm {self.arm!r} released no model. {self.note}".rstrip())
        if self.make is None:
            raise PrivTuneError(
                f"This release of arm {self.arm!r} cannot make its model: ask for "
                f"study.release({self.arm!r}).model."
            )
        model = self.make()
        model.load_state_dict(self.state_dict(), strict=False)
        return model.eval()

    @property
    def served(self) -> Served:
        """The released model as one that takes raw rows, made anew each time.

        Raises:
            PrivTuneError: As of :attr:`model`.
        """
        model = self.model
        if self.serve is None:
            raise PrivTuneError(
                f"This release of arm {self.arm!r} takes no raw rows: ask its estimator, or "
                f"study.release({self.arm!r})."
            )
        return self.serve(model)

    def predict(self, given: Any) -> pandas.DataFrame:
        """Return what the released model says of raw rows, as its task describes them.

        Post-processing of the release: it costs nothing, whatever rows are asked about.

        Args:
            given: A DataFrame or a list of dicts with the columns of a table, or the column of texts;
                for pictures also arrays ``[n, height, width, channels]``; for data of your own arrays
                ``[n, ...]`` like the inputs, by name where there are several. Other columns are
                ignored.

        Returns:
            One row for each, with the index of a DataFrame: ``prediction``, the class as it is declared
            or a number in the target's units and range, and ``probability_CLASS`` of each class. Of
            other networks ``output``, what they return. A row that training could not have used has
            no prediction.

        Raises:
            PrivTuneError: As of :attr:`model`, and if a column is missing.

        Example:
            >>> release = study.release("defaults")
            >>> release.predict([[0.0, 0.0, 0.0, 0.0]]).columns.tolist()
            ['prediction', 'probability_0', 'probability_1', 'probability_2']
        """
        return self.served.predict(given)

    def __getstate__(self) -> dict[str, Any]:
        """Travel between processes with weights that are read, not with what reads them."""
        # A process that gets it has neither the function that reads weights nor the store they are in.
        return {
            **self.__dict__,
            "make": None,
            "serve": None,
            "_weights": self.weights,
            "trials": [replace(trial, weights=trial.weights) for trial in self.trials],
            "shown": partial(list, self.shown()),
        }

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the released parameters by name: ``model.load_state_dict(release.state_dict())``."""
        return split(self.weights, self.shapes)

    def to_optuna(self) -> optuna.Study:
        """Return every trial of an arm that pays for all as a study of Optuna's, in memory.

        Its score is maximised. Optuna's visualization, importances and ``trials_dataframe`` work on it.

        Raises:
            PrivTuneError: If the arm's trials are sealed, or it has none.

        Example:
            >>> study.release("selection").to_optuna()
            Traceback (most recent call last):
                ...
            privtune.errors.PrivTuneError: The trials of arm 'selection' are sealed: only what ...
        """
        import optuna

        if not self.trials:
            why = "are sealed" if self.sealed else "are none: it trains once"
            raise PrivTuneError(
                f"The trials of arm {self.arm!r} {why}: only what it released is paid for. "
                "privtune.strategies.Everything pays for every trial."
            )
        storage = optuna.storages.InMemoryStorage()
        directions = [optuna.study.StudyDirection.MAXIMIZE]
        with quiet_optuna():
            storage.create_new_study(directions, self.arm)
        made = optuna.Study(self.arm, storage)
        made.add_trials(self.shown())
        return made

    @property
    def is_nothing(self) -> bool:
        """Whether no model was released: no run was drawn, or every one was pruned."""
        return self.weights.numel() == 0


def informative(scores: Mapping[str, ScoreEstimate]) -> dict[str, float]:
    """Return the values of the scores whose intervals leave out anything that their metrics can be."""
    return {name: score.value for name, score in scores.items() if score.is_informative}


def split(weights: torch.Tensor, shapes: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
    """Cut a flat vector into the parameters that lie in it."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    if weights.numel() == 0 or not shapes:
        return {}
    parts: Sequence[torch.Tensor] = weights.split(sizes)  # type: ignore[no-untyped-call]
    return {n: part.reshape(tuple(s)) for (n, s), part in zip(shapes.items(), parts, strict=True)}
