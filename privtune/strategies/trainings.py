"""What is trained: one training, and the trainings of a search."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from privtune.accounting import (
    Event,
)
from privtune.errors import InvalidInputError
from privtune.numbers import is_number
from privtune.tasks._fine_tuning import PART
from privtune.training.mechanism.schedule import NoiseOptions, Schedule
from privtune.training.methods import METHODS
from privtune.training.methods._base import Method, scale_noise_of
from privtune.training.methods._rate_schedule import SEARCHED
from privtune.training.methods.declared import Declared

if TYPE_CHECKING:
    from privtune.training.mechanism.streams import Streams


@dataclass(frozen=True)
class TrainingPlan:
    """One training: its clockwork and its method, noise included.

    The event is derived from the two, so the noise that runs is the noise that is charged.

    Args:
        schedule: Records, rate and steps.
        method: The method, with its noise.
        part: Which records it sees: ``all``, the ``subset`` drawn for tuning, or the ``rest``.
        noise: Where its noise comes from, and how it is treated.
        rate_factor: What a candidate's learning rate is multiplied by in this training: m/n on a
            subset of m records, for a candidate whose rate is meant for n.

    Example:
        >>> training = study.plans[0].training
        >>> TrainingPlan.from_dict(training.to_dict()) == training
        True
        >>> training.scaled(2.0).method.noise_multiplier / training.method.noise_multiplier
        2.0
    """

    schedule: Schedule
    method: Method[Any]
    part: str = "all"
    noise: NoiseOptions = field(default_factory=NoiseOptions)
    rate_factor: float = 1.0

    def as_trained(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return a candidate's hyperparameters as this training uses them.

        Args:
            params: The candidate, as it is released.

        Example:
            >>> training = dataclasses.replace(study.plans[0].training, rate_factor=0.1)
            >>> training.as_trained({"learning_rate": 5.0, "max_grad_norm": 1.0})
            {'learning_rate': 0.5, 'max_grad_norm': 1.0}
        """
        rate = params.get("learning_rate")
        if self.rate_factor == 1.0 or not is_number(rate):
            return dict(params)
        return {**params, "learning_rate": rate * self.rate_factor}

    def scaled(self, factor: float) -> TrainingPlan:
        """Return the plan with every noise multiplier times ``factor``.

        Args:
            factor: Above 0.
        """
        method: Method[Any] = scale_noise_of(self.method, factor)
        return dataclasses.replace(self, method=method)

    @property
    def event(self) -> Event:
        """What one such training costs."""
        return self.method.event(self.schedule)

    @property
    def expected_gradient_evaluations(self) -> float:
        """Expected per-sample gradients of one such training."""
        return self.method.gradient_evaluations(self.schedule)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-ready data."""
        method: Any = self.method
        own = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}
        return {
            "schedule": dataclasses.asdict(self.schedule),
            "method": {"name": method.name, **own},
            "part": self.part,
            "noise": self.noise.to_dict(),
            "rate_factor": self.rate_factor,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrainingPlan:
        """Read what :meth:`to_dict` wrote.

        Args:
            data: What :meth:`to_dict` wrote.

        Returns:
            The plan.
        """
        fields = dict(data["method"])
        name = fields.pop("name")
        kind = Declared if name == Declared.name else METHODS[name]
        noise, factor = NoiseOptions(**data["noise"]), data["rate_factor"]
        return cls(Schedule(**data["schedule"]), kind(**fields), data["part"], noise, factor)


@dataclass(frozen=True)
class SearchPlan:
    """The trials of an arm: what they may run, and how many there are.

    Args:
        trainings: One; or, where candidates differ in their guarantee, one a point of the grid.
        points: The grid's points, in the same order: values of the hyperparameters that change the
            guarantee. One empty point where there is a single training.
        trials: How many trials there are; ``None`` where the number is drawn from the plan's law.

    Example:
        >>> from privtune import NoiseOptions
        >>> search = study.plans[1].search
        >>> search.trials, SearchPlan.from_dict(search.to_dict()) == search  # None: drawn in secret
        (None, True)
        >>> secure = search.with_noise(NoiseOptions.of("secure"))
        >>> secure.training_of({"learning_rate": 0.3}).noise.source
        'chacha20'
        >>> search.placed({"learning_rate": 0.3}, None, 0)  # there is no list of methods to draw from
        {'learning_rate': 0.3}
        >>> [training.scaled(2.0) for training in search.trainings] == list(search.scaled(2.0).trainings)
        True
    """

    trainings: tuple[TrainingPlan, ...]
    points: tuple[Mapping[str, Any], ...] = ({},)
    trials: int | None = None

    def training_of(self, params: Mapping[str, Any]) -> TrainingPlan:
        """Return what a candidate runs.

        Args:
            params: A candidate.

        Raises:
            InvalidInputError: If the candidate is no point of the grid.
        """
        for training, point in zip(self.trainings, self.points, strict=True):
            if all(params.get(name) == value for name, value in point.items()):
                return training
        raise InvalidInputError("candidate", dict(params), "must be a point of the plan's grid")

    def placed(self, drawn: dict[str, Any], streams: Streams, number: int) -> dict[str, Any]:
        """Return a candidate with its entry of a list of methods, if there is such a list.

        Args:
            drawn: What was drawn from the space.
            streams: The round's random streams.
            number: The candidate's number: the entry is a function of it and the streams alone.

        Returns:
            The candidate: of what was drawn, what the entry's method takes.
        """
        if CANDIDATE not in self.points[0]:
            return drawn
        which = int(streams.numpy("method", number).integers(len(self.points)))
        takes = (*self.trainings[which].method.parameters, *SEARCHED, PART)
        return {**{n: v for n, v in drawn.items() if n in takes}, **self.points[which]}

    def with_noise(self, noise: NoiseOptions) -> SearchPlan:
        """Return the plan with the noise of every training from this source.

        Args:
            noise: Where noise comes from, and how it is treated.
        """
        return dataclasses.replace(
            self, trainings=tuple(dataclasses.replace(t, noise=noise) for t in self.trainings)
        )

    def with_rate_factor(self, factor: float) -> SearchPlan:
        """Return the plan with every learning rate multiplied by ``factor`` in the trials.

        Args:
            factor: Above 0.

        Example:
            >>> study.plans[1].search.with_rate_factor(0.1).trainings[0].rate_factor
            0.1
        """
        trainings = tuple(dataclasses.replace(t, rate_factor=factor) for t in self.trainings)
        return dataclasses.replace(self, trainings=trainings)

    def scaled(self, factor: float) -> SearchPlan:
        """Return the plan with every noise multiplier times ``factor``.

        Args:
            factor: Above 0.
        """
        return dataclasses.replace(self, trainings=tuple(t.scaled(factor) for t in self.trainings))

    @property
    def mean_gradient_evaluations(self) -> float:
        """Expected per-sample gradients of one trial; points are drawn uniformly."""
        each = [training.expected_gradient_evaluations for training in self.trainings]
        return sum(each) / len(each)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-ready data."""
        return {
            "trainings": [training.to_dict() for training in self.trainings],
            "points": [dict(point) for point in self.points],
            "trials": self.trials,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SearchPlan:
        """Read what :meth:`to_dict` wrote.

        Args:
            data: What :meth:`to_dict` wrote.

        Returns:
            The plan.
        """
        trainings = tuple(TrainingPlan.from_dict(d) for d in data["trainings"])
        return cls(trainings, tuple(data["points"]), data["trials"])


CANDIDATE = "candidate"
"""The hyperparameter that names a candidate's entry of a list of methods."""
