"""Plans: frozen descriptions of what will touch the data, from which its cost follows."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import privtune.accounting as acc
from privtune.accounting.reach import mass_beyond_reach
from privtune.errors import InvalidInputError
from privtune.ledger import RECORD
from privtune.numbers import is_number
from privtune.stages.stage_plan import digest_of_document
from privtune.strategies.score_plan import ScorePlan
from privtune.tasks.pretrained import PART
from privtune.training.mechanism.metric_name import MetricName
from privtune.training.mechanism.metrics import label
from privtune.training.mechanism.schedule import NoiseOptions, Schedule
from privtune.training.mechanism.streams import Streams
from privtune.training.methods import METHODS
from privtune.training.methods.declared_mechanism import DeclaredMethod
from privtune.training.methods.method import Method
from privtune.training.methods.rate_schedule import SEARCHED

if TYPE_CHECKING:
    from privtune.spaces import SearchSpace


SEALED_STEPS = ("samples and their sizes", "un-noised gradients and losses")
SEALED_TRIALS = (
    "every other candidate: hyperparameters, score, model",
    "the number of runs",
    "how long the search took and how far it is",
)


@dataclass(frozen=True)
class TrainingPlan:
    """Plan of one training: its schedule and its method, noise included.

    The event is derived from the two, so the noise that runs is the noise that is charged.

    Args:
        schedule: Records, rate and steps.
        method: The method, with its noise.
        part: Which records it sees: ``all``, the ``subset`` drawn for tuning, or the ``rest``.
        noise: Where its noise comes from, and how it is treated.
        rate_factor: Factor on a candidate's learning rate in this training: m/n on a subset of m of n
            records.

    Example:
        >>> training = study.plans[0].training
        >>> TrainingPlan.from_dict(training.to_dict()) == training
        True
        >>> training.scaled(2.0).method.noise_multiplier / training.method.noise_multiplier
        2.0
        >>> dataclasses.replace(training, rate_factor=0.1).as_trained({"learning_rate": 5.0})
        {'learning_rate': 0.5}
    """

    schedule: Schedule
    method: Method
    part: str = "all"
    noise: NoiseOptions = field(default_factory=NoiseOptions)
    rate_factor: float = 1.0

    def as_trained(self, params: Mapping[str, object]) -> dict[str, Any]:
        """Return the hyperparameters of candidate ``params``, with the learning rate of this training."""
        rate = params.get("learning_rate")
        if self.rate_factor == 1.0 or not is_number(rate):
            return dict(params)
        return {**params, "learning_rate": rate * self.rate_factor}

    def scaled(self, factor: float) -> TrainingPlan:
        """Return the training with every noise multiplier times ``factor``, above 0."""
        method = self.method.scaled(factor)
        return replace(self, method=method)

    @property
    def event(self) -> acc.Event:
        """The privacy event of one such training."""
        return self.method.event(self.schedule)

    @property
    def expected_gradient_evaluations(self) -> float:
        """Expected per-sample gradients of one such training."""
        return self.method.gradient_evaluations(self.schedule)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-ready data."""
        method: Any = self.method
        values: dict[str, Any] = {}
        for each in dataclasses.fields(method):
            values[each.name] = getattr(method, each.name)
        return {
            "schedule": dataclasses.asdict(self.schedule),
            "method": {"name": method.name, **values},
            "part": self.part,
            "noise": self.noise.to_dict(),
            "rate_factor": self.rate_factor,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrainingPlan:
        """Return the training that ``data`` of :meth:`to_dict` describes."""
        fields = dict(data["method"])
        name = fields.pop("name")
        kind: Any = DeclaredMethod if name == DeclaredMethod.name else METHODS[name]
        return cls(
            schedule=Schedule(**data["schedule"]),
            method=kind(**fields),
            part=data["part"],
            noise=NoiseOptions(**data["noise"]),
            rate_factor=data["rate_factor"],
        )


@dataclass(frozen=True)
class SearchPlan:
    """Plan of an arm's trials: the trainings that they may run, and how many trials there are.

    Args:
        trainings: One; or one for each point of the grid, where candidates differ in their guarantee.
        points: The grid's points in the same order: values of what changes the guarantee.
        trials: How many trials there are; None where the plan's law draws the number.

    Example:
        >>> search = study.plans[1].search
        >>> search.trials, SearchPlan.from_dict(search.to_dict()) == search  # None: drawn in secret
        (None, True)
        >>> search.training_of({"learning_rate": 0.3}) == search.trainings[0]
        True
        >>> search.scaled(2.0) == search.each(lambda training: training.scaled(2.0))
        True
    """

    trainings: tuple[TrainingPlan, ...]
    points: tuple[Mapping[str, Any], ...] = ({},)
    trials: int | None = None

    def training_of(self, params: Mapping[str, object]) -> TrainingPlan:
        """Return the training that a candidate of these ``params`` runs.

        Raises:
            InvalidInputError: If the candidate is no point of the grid.
        """
        for training, point in zip(self.trainings, self.points, strict=True):
            is_point = all(params.get(name) == value for name, value in point.items())
            if is_point:
                return training
        raise InvalidInputError("candidate", dict(params), "must be a point of the plan's grid")

    def each(self, change: Callable[[TrainingPlan], TrainingPlan]) -> SearchPlan:
        """Return the search with each of its trainings replaced by ``change`` of it."""
        return replace(self, trainings=tuple(map(change, self.trainings)))

    def scaled(self, factor: float) -> SearchPlan:
        """Return the search with every noise multiplier times ``factor``, above 0."""
        return self.each(lambda training: training.scaled(factor))

    @property
    def mean_gradient_evaluations(self) -> float:
        """Expected number of per-sample gradients of one trial, with grid points drawn uniformly."""
        evaluations = [training.expected_gradient_evaluations for training in self.trainings]
        return sum(evaluations) / len(evaluations)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-ready data."""
        return {
            "trainings": [training.to_dict() for training in self.trainings],
            "points": [dict(point) for point in self.points],
            "trials": self.trials,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SearchPlan:
        """Return the search that ``data`` of :meth:`to_dict` describes."""
        trainings = tuple(TrainingPlan.from_dict(d) for d in data["trainings"])
        return cls(trainings, tuple(data["points"]), data["trials"])


CANDIDATE = "candidate"
"""The hyperparameter with the name of the entry that a candidate draws from a list of methods."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of one arm: all that it will do to the data, fixed before it starts.

    Args:
        arm, strategy: Their names.
        event: What one run of the arm costs; the ledger charges :attr:`charged`, exactly.
        training: What the released model's training runs.
        params: Hyperparameters given in advance; empty where they are drawn or adapted.
        runs: Law of the secret number of runs; None where the number is public.
        score: How trials are scored; None where nothing is chosen.
        released, sealed: What leaves the trust boundary and what does not, in words.
        search: The trials that hyperparameters are chosen from; None where nothing is chosen.
        final: Whether the released model is trained after the search, and not one of its trials.
        rate: Probability that a record is tuned on; None without a subset.
        report: How the released model is scored on the test split; None where it is not asked.
        repeats: How often the arm runs, each time on random numbers of its own.
        repeats_charged: Whether each run is charged: all but those on records that are public.
        details: What else there is to say about the plan, JSON-ready.

    Example:
        >>> from privtune import NoiseOptions
        >>> plan = study.plans[1]
        >>> plan.strategy, plan.event.type, plan.is_sealed, round(plan.expected_runs)
        ('papernot-steinke', 'private_selection', True, 4)
        >>> Plan.from_dict(plan.to_dict()).digest() == plan.digest()  # the digest is kept with the charge
        True
        >>> plan.with_noise(NoiseOptions.of("secure")).digest() == plan.digest()
        False
        >>> from privtune.training.mechanism.streams import Streams
        >>> drawn = plan.candidate(study.spec.planning_context().space, Streams(bytes(32)), 0)
        >>> sorted(drawn), plan.training_of(drawn) == plan.training
        (['learning_rate', 'max_grad_norm'], True)
        >>> sorted(plan.example(study.spec.planning_context().space))  # of public random numbers
        ['learning_rate', 'max_grad_norm']
    """

    arm: str
    strategy: str
    event: acc.Event
    training: TrainingPlan
    params: Mapping[str, float]
    runs: acc.RunLaw | None = None
    score: ScorePlan | None = None
    released: tuple[str, ...]
    sealed: tuple[str, ...]
    search: SearchPlan | None = None
    final: bool = True
    rate: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    report: ScorePlan | None = None
    repeats: int = 1
    repeats_charged: bool = True

    @property
    def charged(self) -> acc.Event:
        """The event that the ledger charges, repeated for each run unless the records are public."""
        if self.repeats == 1 or not self.repeats_charged or not self.is_private:
            return self.event
        return acc.Repeated(self.repeats, self.event)

    def drawn_runs(self, streams: Streams) -> tuple[int, ...]:
        """Return the secret number of candidates of each repetition, the same at every call.

        Repetitions that are charged draw independently, as their account composes them. Those on
        public records draw by strata of the law (:meth:`RunLaw.sample_strata`): each number has the
        same law, and the mean over the repetitions depends less on luck.

        Args:
            streams: The random streams of the arm.

        Returns:
            As many numbers as there are repetitions; none where the number of trials is public.

        Example:
            >>> from privtune.training.mechanism.streams import Streams
            >>> [len(plan.drawn_runs(Streams(bytes(32)))) for plan in study.plans]
            [0, 1]
        """
        if self.runs is None:
            return ()
        if self.repeats > 1 and not self.repeats_charged:
            return self.runs.sample_strata(self.repeats, streams.numpy("strata of runs"))
        numbers = []
        for repetition in range(self.repeats):
            generator = streams.numpy("runs", repetition)
            numbers.append(self.runs.sample(generator))
        return tuple(numbers)

    @property
    def public_facts(self) -> Mapping[str, str]:
        """Public facts that the plan rests on, in words by name and in order."""
        facts: Mapping[str, str] = self.details.get("public", {})
        return facts

    @property
    def dataset(self) -> Mapping[str, Any] | None:
        """Public identity of the dataset that the plan reads, or None if it is not declared."""
        dataset: Mapping[str, Any] | None = self.details.get("dataset")
        return dataset

    def candidate(self, space: SearchSpace, streams: Streams, number: int) -> dict[str, Any]:
        """Return candidate ``number``, from 0, drawn from a ``space`` by its number and ``streams`` alone."""
        params = {**self.params, **space.draw(streams, number)}
        search = self.search
        if search is None or CANDIDATE not in search.points[0]:
            return params
        # Of a list of methods, the entry is a function of the streams and the number, too.
        generator = streams.numpy("method", number)
        entry = int(generator.integers(len(search.points)))
        method = search.trainings[entry].method
        # What other entries search is left out: it would be released as if it had been trained with.
        names = (*method.parameters, *SEARCHED, PART)
        trained_params: dict[str, Any] = {}
        for name, value in params.items():
            if name in names:
                trained_params[name] = value
        return {**trained_params, **search.points[entry]}

    def training_of(self, params: Mapping[str, object]) -> TrainingPlan:
        """Return the training of a released model with these ``params``, the plan's own if they are empty."""
        if self.final or self.search is None or not params:
            return self.training
        return self.search.training_of(params)

    @property
    def trial_epsilon(self) -> float | None:
        """What one shown trial costs a record of the part that it is trained on; None of other searches."""
        value: float | None = self.details.get("trial_epsilon")
        return value

    @property
    def first_training(self) -> TrainingPlan:
        """Training of the arm's first trial, or of its only model if there is no search."""
        if self.search is None:
            return self.training
        return self.search.trainings[0]

    @property
    def fixed(self) -> dict[str, Any]:
        """Hyperparameters that its first trial does not draw."""
        if self.search is None:
            return dict(self.params)
        return {**self.params, **self.search.points[0]}

    def example(self, space: SearchSpace) -> dict[str, Any]:
        """Return a candidate of the first training, drawn from a ``space`` with public random numbers.

        A rehearsal trains it before the charge, so it may say nothing about the candidates to come.
        """
        public = Streams(bytes(32))
        return {**self.candidate(space, public, 0), **self.fixed}

    @property
    def unit(self) -> str:
        """Name of what is sampled, clipped and scored as one, such as ``record``."""
        return str(self.details.get("unit", RECORD))

    @property
    def noise_note(self) -> str:
        """Noise options that differ from the defaults, in words, or an empty text."""
        return self.training.noise.note

    @property
    def is_private(self) -> bool:
        """Whether the arm has a guarantee, and so is part of a budget."""
        return not isinstance(self.event, acc.NonPrivate)

    @property
    def is_sealed(self) -> bool:
        """Whether the trials, their number and their duration stay secret."""
        return self.runs is not None

    @property
    def scored(self) -> str:
        """Prefix of the score's name: ``tuning`` for the search's winner, else ``validation``."""
        is_trained_after_search = self.final and self.search is not None
        return "tuning" if is_trained_after_search else "validation"

    @property
    def score_name(self) -> MetricName | None:
        """Name of the score by which candidates are chosen, or None if there is none."""
        if self.score is None:
            return None
        return MetricName(self.scored, label(self.score.metric))

    @property
    def threshold(self) -> float | None:
        """Known score at which a sealed round ends early, or None if all its runs are made."""
        if self.repeats != 1:
            # The rounds of repetitions are rows of one table, and no score of one ends another.
            return None
        return self.details.get("threshold")

    def with_noise(self, noise: NoiseOptions) -> Plan:
        """Return the plan with every training's noise from the source ``noise``."""
        training = replace(self.training, noise=noise)
        search = self.search
        if search is not None:
            search = search.each(lambda trial: replace(trial, noise=noise))
        return replace(self, training=training, search=search)

    @property
    def beyond_reach(self) -> float:
        """Bound on the mass of outputs of a run that noise cannot reach: see ``accounting.reach``."""
        return mass_beyond_reach(self.event)

    @property
    def expected_runs(self) -> float:
        """Expected number of trainings of one run, an upper bound if there is a :attr:`threshold`."""
        trials = 0.0
        if self.runs is not None:
            trials = self.runs.expected_runs
        elif self.search is not None:
            trials = float(self.search.trials or 0)
        return trials + self._final_trainings

    @property
    def _final_trainings(self) -> float:
        """Number of trainings after the trials: 1, or 0 where a trial itself is released."""
        return 1.0 if self.final else 0.0

    @property
    def expected_gradient_evaluations(self) -> float:
        """Expected per-sample gradients of one run of the arm."""
        final = self.training.expected_gradient_evaluations if self.final else 0.0
        if self.search is None:
            return final
        trials = self.expected_runs - self._final_trainings
        return final + trials * self.search.mean_gradient_evaluations

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-ready data."""
        names = [field.name for field in dataclasses.fields(self)]
        return {name: _plain(getattr(self, name)) for name in names}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Return the plan that ``data`` of :meth:`to_dict` describes."""
        readers: Mapping[str, Callable[[Any], Any]] = {
            "event": acc.event_from_dict,
            "training": TrainingPlan.from_dict,
            "runs": acc.run_law_from_dict,
            "score": lambda score: ScorePlan(**score),
            "report": lambda score: ScorePlan(**score),
            "search": SearchPlan.from_dict,
            "released": tuple,
            "sealed": tuple,
        }
        fields = dict(data)
        for name, read in readers.items():
            if data[name] is not None:
                fields[name] = read(data[name])
        return cls(**fields)

    def digest(self) -> str:
        """Return the SHA-256 of the plan's canonical JSON, kept with its charge.

        Numbers count by nine digits: calibrations on two machines may differ in the last ones, and a plan
        that is computed anew must be the one that was charged.
        """
        text = json.dumps(self.to_dict())
        rounded = json.loads(text, parse_float=lambda digits: f"{float(digits):.9g}")
        return digest_of_document(rounded)


def _plain(value: object) -> Any:
    """Return a field of a plan as JSON-ready data."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple):
        return list(value)
    if hasattr(value, "to_dict"):
        return value.to_dict()
    return value


_FEW_POINTS = 5
"""Points of a curve of which each asks for the joint account of a search on a subset."""


def epsilon_spent(
    plan: Plan,
    *,
    delta: float,
    adjacency: acc.Adjacency,
    points: int = 12,
) -> list[tuple[int, float]]:
    """Return ε after some steps of the released model's training, in all repetitions: pairs (step, ε).

    Steps count from 0, so step 0 has cost one step. After a search on a subset, its trials and scores are in
    every ε: they were there before.
    """
    method = plan.training.method
    schedule = plan.training.schedule
    if plan.rate is not None:
        points = min(points, _FEW_POINTS)
    curve = []
    for step in schedule.checkpoints(points):
        shorter = replace(schedule, steps=step + 1)
        event = method.event(shorter)
        if plan.rate is not None:
            event = _cut_short(plan.event, event)
        charged = replace(plan, event=event).charged
        curve.append((step, _epsilon(charged, delta, adjacency)))
    return curve


def _cut_short(event: acc.Event, training: acc.Event) -> acc.Event:
    """Return the event of an arm whose training after a search on a subset is cut short to ``training``."""
    if isinstance(event, acc.SubsampledTuning):
        return replace(event, training=training)
    if isinstance(event, acc.Parallel | acc.Composed):
        return event.rebuild([_cut_short(part, training) for part in event.events])
    return event


@lru_cache(maxsize=256)
def _epsilon(event: acc.Event, delta: float, adjacency: acc.Adjacency) -> float:
    """Return ε of an event, cached since several arms ask for the same one."""
    return acc.epsilon(event, delta, adjacency=adjacency).epsilon
