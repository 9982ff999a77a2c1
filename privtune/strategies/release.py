"""Releases: what left the trust boundary, paid for. Trackers accept nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from privtune.errors import PrivTuneError
from privtune.strategies.weights import Weights

if TYPE_CHECKING:
    import optuna
    import torch
    from optuna.trial import FrozenTrial

    from privtune.accounting import Guarantee
    from privtune.strategies._base import TrialResult


@dataclass(frozen=True)
class Cost:
    """What an arm took.

    Args:
        gradient_evaluations: Per-sample gradients. Always the plan's expectation: the realised
            number is the sum of the sizes of Poisson samples, which is private.
        wall_seconds: The plan's estimate, from made-up records: what a training really took tells how
            many records there are, and a round how many runs. ``None`` if it is not known.
        expected: Whether the time is the plan's estimate: of every arm that is private.

    Example:
        >>> cost = study.release("selection").cost
        >>> cost.expected  # a measured time would tell the number of runs, and of records
        True
    """

    gradient_evaluations: float
    wall_seconds: float | None
    expected: bool


@dataclass(frozen=True, kw_only=True)
class Release:
    """The output of one arm.

    Args:
        arm: Name of the arm.
        strategy: Name of the strategy.
        params: Hyperparameters of the released model.
        weights: The released model's parameters, flat, shape ``[P]``; shape ``[0]`` where the
            release is "nothing".
        score: Its noised (or public) validation score, if the strategy scored, or that of the tuning's
            winner where it was trained after a tuning (``plan.scored``); held to what the
            metric can be.
        curves: By name, one value a step: functions of paid-for releases only. Empty if sealed.
        guarantee: What the arm cost, and by which bound.
        utility: Metrics of the released model on the test split, if that is declared public, or
            noised and charged, if the study's ``report`` asks for it.
        intervals: 95% intervals of these, for noise and for the drawing of the records.
        cost: What it took, or is expected to take.
        sealed: Whether the arm's trials are sealed.
        trials: Every trial, where all of them are paid for; else empty.
        note: One sentence about the release, if it needs one.
        shapes: Shapes of the parameters by name, in the order in which they lie in ``weights``.
        machine: What it was computed on: device, driver, versions of libraries.
        make: Makes the model with other weights; None where nobody here can.
        shown: Returns the trials as Optuna has them, where all of them are paid for.
        checked: What a declared training was checked against; empty where it was not.

    Example:
        >>> release = study.release("defaults")
        >>> release.params, release.sealed, round(release.guarantee.delta, 5)
        ({'learning_rate': 0.5, 'max_grad_norm': 1.0}, False, 1e-05)
        >>> {name: tuple(values.shape) for name, values in release.state_dict().items()}
        {'weight': (3, 4), 'bias': (3,)}
    """

    arm: str
    strategy: str
    params: Mapping[str, Any]
    weights: Weights = Weights()  # noqa: RUF009 (a descriptor: torch.Tensor)
    score: float | None
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)
    guarantee: Guarantee
    utility: Mapping[str, float] = field(default_factory=dict)
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    cost: Cost
    sealed: bool
    trials: Sequence[TrialResult] = ()
    note: str = ""
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)
    checked: str = ""
    make: Callable[[], torch.nn.Module] | None = field(default=None, compare=False, repr=False)
    shown: Callable[[], Sequence[FrozenTrial]] = field(default=tuple, repr=False, compare=False)

    @property
    def model(self) -> torch.nn.Module:
        """The released model with its weights, in evaluation mode; made anew whenever it is asked for.

        Raises:
            PrivTuneError: If the release is of no model, or what makes it is not in this process.

        Example:
            >>> study.release("defaults").model.training
            False
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

    def __getstate__(self) -> dict[str, Any]:
        """Travel between processes with weights that are read, not with what reads them."""
        return {
            **self.__dict__,
            "make": None,
            "_weights": self.weights,
            "trials": [replace(trial, weights=trial.weights) for trial in self.trials],
            "shown": partial(list, self.shown()),
        }

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the released parameters by name: ``model.load_state_dict(release.state_dict())``."""
        return split(self.weights, self.shapes)

    def to_optuna(self) -> optuna.Study:
        """Return every trial of an arm that pays for all as a study of Optuna's, in memory.

        Its tools work on it: ``optuna.visualization``, ``optuna.importance``, ``trials_dataframe``.

        Returns:
            Optuna's study, of direction ``maximize``: for each trial its hyperparameters, its score as it
            was released, and whether it was pruned.

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
        storage.create_new_study(directions, self.arm)  # without Optuna's own announcement
        made = optuna.Study(self.arm, storage)
        made.add_trials(self.shown())
        return made

    @property
    def is_nothing(self) -> bool:
        """Whether no model was released: no run was drawn, or every one was pruned."""
        return self.weights.numel() == 0


def split(weights: torch.Tensor, shapes: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
    """Cut a flat vector into the parameters that lie in it."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    if weights.numel() == 0 or not shapes:
        return {}
    parts: Sequence[torch.Tensor] = weights.split(sizes)  # type: ignore[no-untyped-call]
    return {n: part.reshape(tuple(s)) for (n, s), part in zip(shapes.items(), parts, strict=True)}
