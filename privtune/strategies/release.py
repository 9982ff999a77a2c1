"""Results of trials, which stay sealed, and releases of arms, which are paid for."""

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
    from privtune.tables.raw_rows import ServedModel
    from privtune.training.mechanism.estimates import ScoreEstimate


class Weights:
    """Descriptor of a field of weights, or of a function that reads them at first access."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, instance: object | None, owner: type) -> torch.Tensor:
        if instance is None:  # the field has no default
            raise AttributeError(self._name)
        value = instance.__dict__[self._name]
        if callable(value):
            value = value()
            instance.__dict__[self._name] = value
        return cast("torch.Tensor", value)

    def __set__(self, instance: object, value: torch.Tensor | Callable[[], torch.Tensor]) -> None:
        instance.__dict__[self._name] = value


class Ending(StrEnum):
    """The ending of a trial that has a result: trained, diverged or pruned.

    Example:
        >>> Ending("pruned").name
        'PRUNED'
    """

    TRAINED = "trained"
    DIVERGED = "diverged"  # its weights are not finite: a result, for dropping it would be a choice by data
    PRUNED = "pruned"  # stopped by a pruner, on scores that are paid for

    @classmethod
    def of(cls, weights: torch.Tensor) -> Ending:
        """Return ``TRAINED`` for finite ``weights``, else ``DIVERGED``.

        Example:
            >>> import torch
            >>> Ending.of(torch.tensor([0.5, torch.nan])).value
            'diverged'
        """
        is_finite = bool(weights.isfinite().all())
        return cls.TRAINED if is_finite else cls.DIVERGED


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """The result of one trial, sealed inside the trust boundary unless it is released.

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
    """The result that a strategy returns for release.

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
    """Expected cost of an arm, since its actual cost would reveal how many runs and records there are.

    Args:
        gradient_evaluations: Expected per-sample gradients.
        cpu_seconds: Expected CPU time, timed on made-up records, however loaded the machine was; on
            a GPU the time that the steps take there. None if it is not known.

    Example:
        >>> round(study.release("selection").cost.gradient_evaluations, 3)
        360.0
    """

    gradient_evaluations: float
    cpu_seconds: float | None


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
        """Scores of its model by name: the one that it was chosen by, then its test metrics."""
        return {**self.choice, **self.estimates}

    @property
    def utility(self) -> dict[str, float]:
        """Values of the :attr:`estimates` whose interval is narrower than the metric's range, by name."""
        return informative(self.estimates)

    @property
    def values(self) -> dict[str, float]:
        """Values of all scores of its model by name, however wide their intervals, to keep means unbiased."""
        return {name: score.value for name, score in self.scores.items()}


@dataclass(frozen=True, kw_only=True)
class Release:
    """The output of one arm.

    Args:
        arm, strategy: Their names.
        params: Hyperparameters of the released model.
        weights: Its parameters, flat, shape ``[P]``; shape ``[0]`` where the release is "nothing".
        is_nothing: Whether no model was released: no run was drawn, or every one was pruned.
        score: Its noised (or public) validation score, or the tuning winner's (``plan.scored``), within what
            the metric can be and higher for better ones; None unscored.
        choice: That score by its name (``validation_accuracy``), with its interval; empty unscored.
        curves: By name, one value a step: functions of paid-for releases only. Empty if sealed.
        guarantee: What the arm cost alone, and by which bound. Of the best of several arms quote what all
            charges cost together, ``study.spent()``.
        estimates: Metrics of the released model by name (``test_accuracy``), each with its interval: on a
            public test split, or noised and charged.
        temperature: What the logits of the model are divided by before a softmax, so that its
            probabilities are as sure as it is right: fitted on the test split, exactly on a public one,
            else as part of the noised and charged score. :meth:`predict` does it; :attr:`model` returns
            logits as they were trained. None without one.
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
    is_nothing: bool
    score: float | None
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)
    guarantee: Guarantee
    choice: Mapping[str, ScoreEstimate] = field(default_factory=dict)
    estimates: Mapping[str, ScoreEstimate] = field(default_factory=dict)
    temperature: float | None = None
    cost: Cost
    sealed: bool
    trials: Sequence[TrialResult] = ()
    note: str = ""
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)
    checked: str = ""
    repetitions: tuple[Repetition, ...] = ()
    make: Callable[[], torch.nn.Module] | None = field(default=None, compare=False, repr=False)
    serve: Callable[[torch.nn.Module], ServedModel] | None = field(
        default=None,
        compare=False,
        repr=False,
    )
    shown: Callable[[], Sequence[FrozenTrial]] = field(default=tuple, repr=False, compare=False)

    def __repr__(self) -> str:
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        size = sum(sizes)
        score = ""
        if self.score is not None:
            score = f", score {self.score:.4g}"
        return (
            f"<Release of {self.arm!r} by {self.strategy}: {size:,} weights, {dict(self.params)}{score}, "
            f"{self.guarantee} for this arm alone>"
        )

    @property
    def scores(self) -> dict[str, ScoreEstimate]:
        """Scores of the released model by name: the one that it was chosen by, then its test metrics."""
        return {**self.choice, **self.estimates}

    @property
    def value(self) -> float | None:
        """The score that its arm maximised, under the name that Optuna's trials use."""
        return self.score

    @property
    def number(self) -> int | None:
        """The number of the released trial, from 0 as in Optuna, or None where trials are sealed.

        The number of a selection's winner would tell how many trials there were, which stays secret.
        """
        if self.sealed or self.is_nothing:
            return None
        if not self.trials:  # the arm trains once
            return 0
        for trial in self.trials:
            if trial.score == self.score:
                return trial.index
        return None

    @property
    def utility(self) -> dict[str, float]:
        """Values of the :attr:`estimates` whose interval is narrower than the metric's range, by name."""
        return informative(self.estimates)

    @property
    def values(self) -> dict[str, float]:
        """Values of the scores whose interval is narrower than the metric's range, chosen score first."""
        return informative(self.scores)

    @property
    def model(self) -> torch.nn.Module:
        """The released model with its weights, in evaluation mode, built anew at each access.

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
    def served(self) -> ServedModel:
        """The released model as one that takes raw rows, built anew at each access.

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

    def predict(self, given: object) -> pandas.DataFrame:
        """Return the released model's predictions for raw rows, as its task describes them.

        Post-processing of the release: it costs nothing, whatever rows are asked about.

        Args:
            given: A DataFrame or a list of dicts with the columns of a table, or the column of texts;
                for pictures also arrays ``[n, height, width, channels]``; for data of your own and for
                built-in tasks arrays ``[n, ...]`` like the inputs, by name where there are several, on
                the scale that the plan tells (``inputs``). Other columns are ignored.

        Returns:
            One row for each, with the index of a DataFrame: ``prediction``, the class as it is declared
            or a number in the target's units and range, and ``probability_CLASS`` of each class. Of
            other networks ``output``, what they return. A row that training could not have used has
            no prediction.

        Raises:
            PrivTuneError: As of :attr:`model`, if a column is missing, and if numbers of an array lie
                beyond the range that the task declares.

        Example:
            >>> release = study.release("defaults")
            >>> release.predict([[0.0, 0.0, 0.0, 0.0]]).columns.tolist()
            ['prediction', 'probability_0', 'probability_1', 'probability_2']
        """
        return self.served.predict(given)

    def __getstate__(self) -> dict[str, Any]:
        """Return a state for other processes, with weights in the place of the function that reads them."""
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
        """Return every trial as an Optuna study in memory, for an arm that pays for all of them.

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
        study = optuna.Study(self.arm, storage)
        study.add_trials(self.shown())
        return study


def informative(scores: Mapping[str, ScoreEstimate]) -> dict[str, float]:
    """Return the values of scores whose interval is narrower than the metric's range, by name."""
    values: dict[str, float] = {}
    for name, score in scores.items():
        if score.is_informative:
            values[name] = score.value
    return values


def split(weights: torch.Tensor, shapes: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
    """Return the parameters by name, cut from a flat vector of weights."""
    if weights.numel() == 0 or not shapes:
        return {}
    sizes = [math.prod(shape) for shape in shapes.values()]
    parts: Sequence[torch.Tensor] = weights.split(sizes)  # type: ignore[no-untyped-call]
    parameters = {}
    for name, part in zip(shapes, parts, strict=True):
        shape = tuple(shapes[name])
        parameters[name] = part.reshape(shape)
    return parameters
