"""Plans: frozen values that say what will touch the data, and therefore what it costs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import privtune.accounting as acc
from privtune.accounting.reach import mass_beyond_reach
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.ledger import RECORD
from privtune.numbers import is_number
from privtune.strategies.scoring import ScorePlan
from privtune.tasks._fine_tuning import PART
from privtune.training.mechanism.metrics import noised
from privtune.training.mechanism.schedule import NoiseOptions, Schedule
from privtune.training.mechanism.streams import Streams
from privtune.training.methods import METHODS
from privtune.training.methods._base import Method
from privtune.training.methods._rate_schedule import SEARCHED
from privtune.training.methods.declared import Declared

if TYPE_CHECKING:
    from privtune.spaces import SearchSpace
    from privtune.tasks.stages import TaskStage


SEALED_STEPS = ("samples and their sizes", "un-noised gradients and losses")
SEALED_TRIALS = (
    "every other candidate: hyperparameters, score, model",
    "the number of runs",
    "times and progress of the round",
)


@dataclass(frozen=True)
class TrainingPlan:
    """One training: its clockwork and its method, noise included.

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

    def as_trained(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the hyperparameters that this training uses for a candidate of these ``params``."""
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
        """Return the training that ``data`` of :meth:`to_dict` describes."""
        fields = dict(data["method"])
        name = fields.pop("name")
        kind: Any = Declared if name == Declared.name else METHODS[name]
        noise, factor = NoiseOptions(**data["noise"]), data["rate_factor"]
        return cls(Schedule(**data["schedule"]), kind(**fields), data["part"], noise, factor)


@dataclass(frozen=True)
class SearchPlan:
    """The trials of an arm: what they may run, and how many there are.

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

    def training_of(self, params: Mapping[str, Any]) -> TrainingPlan:
        """Return the training that a candidate of these ``params`` runs.

        Raises:
            InvalidInputError: If the candidate is no point of the grid.
        """
        for training, point in zip(self.trainings, self.points, strict=True):
            if all(params.get(name) == value for name, value in point.items()):
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
        """Return the search that ``data`` of :meth:`to_dict` describes."""
        trainings = tuple(TrainingPlan.from_dict(d) for d in data["trainings"])
        return cls(trainings, tuple(data["points"]), data["trials"])


CANDIDATE = "candidate"
"""The hyperparameter that names a candidate's entry of a list of methods."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one arm will do to the data, before it does anything.

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
        """What the ledger charges: the event of each run, or of one where the records are public."""
        alone = self.repeats == 1 or not self.repeats_charged or not self.is_private
        return self.event if alone else acc.Repeated(self.repeats, self.event)

    def drawn_runs(self, streams: Streams) -> tuple[int, ...]:
        """Return the secret numbers of candidates, one a repetition; asked again, the same.

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
        return tuple(self.runs.sample(streams.numpy("runs", r)) for r in range(self.repeats))

    @property
    def public_facts(self) -> Mapping[str, str]:
        """What the plan rests on that is declared public, as people read it, in order."""
        facts: Mapping[str, str] = self.details.get("public", {})
        return facts

    def candidate(self, space: SearchSpace, streams: Streams, number: int) -> dict[str, Any]:
        """Return candidate ``number``, from 0, of a ``space``: a function of it and ``streams`` alone."""
        drawn = {**self.params, **space.draw(streams, number)}
        if self.search is None or CANDIDATE not in self.search.points[0]:
            return drawn
        # Of a list of methods, the entry is a function of the streams and the number, too.
        which = int(streams.numpy("method", number).integers(len(self.search.points)))
        takes = (*self.search.trainings[which].method.parameters, *SEARCHED, PART)
        return {**{n: v for n, v in drawn.items() if n in takes}, **self.search.points[which]}

    def training_of(self, params: Mapping[str, Any]) -> TrainingPlan:
        """Return the training of a released model, of these ``params``; empty where there is no model."""
        if self.final or self.search is None or not params:
            return self.training
        return self.search.training_of(params)

    @property
    def first_training(self) -> TrainingPlan:
        """What its first trial runs: of a search the first training, else the plan's own."""
        return self.training if self.search is None else self.search.trainings[0]

    @property
    def fixed(self) -> dict[str, Any]:
        """Hyperparameters that its first trial does not draw."""
        return {**self.params, **({} if self.search is None else self.search.points[0])}

    def example(self, space: SearchSpace) -> dict[str, Any]:
        """Return a candidate of the first training, drawn of a ``space`` by numbers that are public."""
        return {**self.candidate(space, Streams(bytes(32)), 0), **self.fixed}

    @property
    def unit(self) -> str:
        """What its event counts as one: what is sampled, clipped and scored."""
        return str(self.details.get("unit", RECORD))

    @property
    def noise_note(self) -> str:
        """What weakens the noise of its trainings, in words."""
        return self.training.noise.note

    @property
    def is_private(self) -> bool:
        """Whether the arm has any guarantee. One that has none is no part of a budget."""
        return not isinstance(self.event, acc.NonPrivate)

    @property
    def is_sealed(self) -> bool:
        """Whether anything about the trials, their number or their time must stay secret."""
        return self.runs is not None

    @property
    def scored(self) -> str:
        """Which model is scored: ``validation`` says the released one, ``tuning`` the search's winner."""
        return "tuning" if self.final and self.search is not None else "validation"

    @property
    def threshold(self) -> float | None:
        """The known score at which a sealed round ends early; ``None`` if all its runs run."""
        # The rounds of repetitions are rows of one table, and no score of one ends another.
        return self.details.get("threshold") if self.repeats == 1 else None

    def with_noise(self, noise: NoiseOptions) -> Plan:
        """Return the plan with every training's noise from the source ``noise``."""
        search = self.search and self.search.each(lambda t: replace(t, noise=noise))
        return replace(self, training=replace(self.training, noise=noise), search=search)

    @property
    def beyond_reach(self) -> float:
        """Bound on the mass of outputs of a run that noise cannot reach: see ``accounting.reach``."""
        return mass_beyond_reach(self.event)

    @property
    def expected_runs(self) -> float:
        """Expected number of trainings of one run; with a :attr:`threshold`, the most it can be."""
        last = 1.0 if self.final else 0.0
        if self.runs is not None:
            return self.runs.expected_runs + last
        return last + (0.0 if self.search is None else float(self.search.trials or 0))

    @property
    def expected_gradient_evaluations(self) -> float:
        """Expected per-sample gradients of one run of the arm."""
        last = self.training.expected_gradient_evaluations if self.final else 0.0
        if self.search is None:
            return last
        trials = self.expected_runs - (1.0 if self.final else 0.0)
        return last + trials * self.search.mean_gradient_evaluations

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-ready data."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return {name: _plain(value) for name, value in values.items()}

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
        read = {name: readers[name](data[name]) for name in readers if data[name] is not None}
        return cls(**{**data, **read})

    def digest(self) -> str:
        """Return the SHA-256 of the plan's canonical JSON, kept with its charge."""
        # Nine digits: calibrations on two machines may differ in the last ones.
        rounded = json.loads(json.dumps(self.to_dict()), parse_float=lambda x: f"{float(x):.9g}")
        text = json.dumps(rounded, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


_NEGLIGIBLE = 1e-3  # of δ


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | Mapping):
        return dict(value) if isinstance(value, Mapping) else list(value)
    return value.to_dict() if hasattr(value, "to_dict") else value


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """What a stage will do to the data: it stands beside the plans of arms, and lives as they do."""

    arm: str
    stage: TaskStage
    event: acc.Event
    scale: float
    noise: NoiseOptions = field(default_factory=NoiseOptions)
    public_facts: Mapping[str, str] = field(default_factory=dict)

    unit = RECORD
    is_private = True
    is_sealed = True
    runs = None

    @property
    def charged(self) -> acc.Event:
        """What the ledger charges."""
        return self.event

    @property
    def noise_note(self) -> str:
        """What weakens its noise, in words."""
        return self.noise.note

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-ready data."""
        return {
            "stage": self.stage.to_dict(),
            "arm": self.arm,
            "event": self.event.to_dict(),
            "scale": self.scale,
            "noise": self.noise.to_dict(),
            "public": dict(self.public_facts),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StagePlan:
        """Read what :meth:`to_dict` wrote."""
        from privtune.tasks.stages import make_stage

        return cls(
            arm=data["arm"],
            stage=make_stage(data["stage"]),
            event=acc.event_from_dict(data["event"]),
            scale=data["scale"],
            noise=NoiseOptions.of(data["noise"]),
            public_facts=data["public"],
        )

    def digest(self) -> str:
        """Return the SHA-256 of the plan's canonical JSON, kept with its charge."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def plan_stage(
    stage: TaskStage,
    task: Mapping[str, Any],
    *,
    epsilon: float,
    delta: float,
    adjacency: acc.Adjacency,
    noise: NoiseOptions,
    public_facts: Mapping[str, str],
) -> StagePlan:
    """Plan a stage at its share of a study's ε, or at its own noise."""
    multiplier = stage.noise_multiplier
    if multiplier is None:
        share = epsilon * (stage.epsilon_share or 0.0)
        unit = acc.Gaussian(1.0)
        multiplier = acc.calibrate(unit, epsilon=share, delta=delta, adjacency=adjacency).scale
    event = acc.Gaussian(multiplier)
    if mass_beyond_reach(event) > _NEGLIGIBLE * delta:
        raise PrivTuneError(
            f"Stage {stage.name!r}: with so little noise its outputs lie beyond the reach of any "
            f"generator here, and δ is {delta:g}; ask for a smaller epsilon_share."
        )
    return StagePlan(
        arm=stage.name,
        stage=stage,
        event=event,
        scale=multiplier * stage.sensitivity(task, adjacency),
        noise=noise,
        public_facts=public_facts,
    )


def release_stage(plan: StagePlan, task: Mapping[str, Any], streams: Streams) -> dict[str, Any]:
    """Read the data, and return what a stage releases of it: asked again, the same."""
    sums = plan.stage.sums(task)
    values = noised(sums, scale=plan.scale, streams=streams, noise=plan.noise)
    return plan.stage.document(task, values, plan.scale)


def epsilon_spent(
    plan: Plan, *, delta: float, adjacency: acc.Adjacency, points: int = 12
) -> list[tuple[int, float]]:
    """Return ε after some steps of the released model's training, in all repetitions: pairs (step, ε)."""
    method, schedule = plan.training.method, plan.training.schedule

    def charged(steps: int) -> acc.Event:
        return replace(plan, event=method.event(replace(schedule, steps=steps))).charged

    return [
        (step, _epsilon(charged(step + 1), delta, adjacency))
        for step in schedule.checkpoints(points)
    ]


@lru_cache(maxsize=256)
def _epsilon(event: acc.Event, delta: float, adjacency: acc.Adjacency) -> float:
    """Return ε; arms that differ in anything but their noise ask the same."""
    return acc.epsilon(event, delta, adjacency=adjacency).epsilon
