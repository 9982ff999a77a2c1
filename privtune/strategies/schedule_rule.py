"""The rule by which ``epochs: auto`` and ``expected_batch_size: auto`` are chosen, from public numbers alone.

DP-SGD adds noise of σ times the clipping norm to each of T sums over B records in expectation. Rates that
bring d weights equally far leave noise in them in proportion to σ √d / (B √T), the noise-to-signal ratio. No
schedule has less of it than one release of all records, so whoever looked at noise alone would take one step.
But few steps get nowhere: what they leave of the way is reckoned as ``NEEDED_STEPS / T``, and noise as larger
by ``sqrt(1 + ADAPTING_STEPS / T)``, since rates are found in the first of them. The rule takes the schedule
of the smallest sum of the two squares; its root is called the *shortfall*. Where there is little noise, steps
count for more than batches do. Of schedules that are nearly as good as the best, it takes the one of fewest
steps: a step has costs of its own, and a rate that is given leads farther, into more noise, by more of them.

Where every rate is given, and constant, it is known how far steps lead. Each moves the weights by at most
η C, the rate times the clipping norm, and T of them leave noise of ``η C σ √T / B`` in a weight, reckoned d^¼
times, between one weight's and all of them. What is left of the way is ``sqrt(NEEDED_WAY / (η C T))``, and
the rule takes the smallest sum of these two squares: a large rate gets few steps, a small one many, and much
noise fewer.

The constants were read off the training tasks of ``studies/epochs`` and tried on others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from privtune.accounting import Adjacency, Gaussian, PoissonSampled, Repeated, calibrate
from privtune.errors import InvalidInputError

NEEDED_STEPS = 2.0
"""What T steps leave of the way is reckoned as this number over T, in units of the noise-to-signal ratio."""
NEEDED_STEPS_AT_GIVEN_RATES = 6.0
"""The same where an arm has a rate of its user's: guesses are seldom as large as few steps need."""
NEEDED_WAY = 1_400.0
"""What steps of a given length leave of the way is reckoned as the root of this over their length in all."""
ADAPTING_STEPS = 60.0
"""Steps in which the noise counts double, squared: methods that adapt need some, whatever the noise."""
NEGLIGIBLE = 3e-3
"""A shortfall far below which no task tells schedules apart: twice the work is not taken for it."""
GAIN = 0.03
"""Relative fall of the shortfall below which twice the work is not worth its time."""
WORKS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Fractions and multiples of a plan's work that its curve shows."""
TOLERANCE = 0.03
"""How far, relatively, a shortfall may be above the smallest one for fewer steps."""
_PASSES = 20
_MOST_STEPS = 100_000
"""Above it a step's own costs outweigh those of its gradients."""
_FINE = 8
"""Amounts of work that are tried between one and its double."""
_ACCURACY = 1e-3  # of the noise of schedules that are compared by the accountant


@dataclass(frozen=True, kw_only=True)
class TrainingFacts:
    """The public numbers that a schedule is chosen from.

    Args:
        records: Declared number of training records, or of units if a task groups its records.
        weights: Number of weights that are trained.
        epsilon: ε of all trainings together, above 0.
        delta: δ, in (0, 1).
        adjacency: The budget's neighbouring relation.
        trainings: How many equal trainings share ε, one for each arm with a guarantee.
        given_rate: Whether the user gives a learning rate to an arm; else methods find it.
        step_length: How far a step leads at most, where every rate is given and constant: the rate times the
            clipping norm.

    Example:
        >>> facts = TrainingFacts(records=60_000, weights=26_010, epsilon=3.0, delta=1e-5)
        >>> round(facts.most_signal), facts.usual_compute
        (43145, 1200000)
    """

    records: int
    weights: int
    epsilon: float
    delta: float
    adjacency: Adjacency = Adjacency.ADD_REMOVE
    trainings: int = 1
    given_rate: bool = False
    step_length: float | None = None

    @property
    def needed_steps(self) -> float:
        """What T steps leave of the way, times T."""
        return NEEDED_STEPS_AT_GIVEN_RATES if self.given_rate else NEEDED_STEPS

    @property
    def least_gain(self) -> float:
        """Relative fall of the shortfall for which twice the work is done.

        Where steps are given, the least shortfall falls with the fourth root of the noise: 3% less noise
        lowers it by a fourth of that.
        """
        return GAIN if self.step_length is None else GAIN / 4.0

    @cached_property
    def most_signal(self) -> float:
        """The signal of one noisy release of all records, which no schedule exceeds."""
        one_release = calibrate(
            Gaussian(1.0),
            epsilon=self.epsilon,
            delta=self.delta,
            adjacency=self.adjacency,
        )
        return self.records / (one_release.scale * math.sqrt(self.trainings))

    @property
    def usual_compute(self) -> int:
        """The gradient evaluations of one training where nobody says what may be spent."""
        return _PASSES * self.records

    def estimate_noise(self, batch: int, steps: int) -> float:
        """Return a noise multiplier that meets ε, by the central limit theorem: it bounds nothing.

        Bu, Dong, Long and Su 2019 (arXiv 1911.11607): T steps at rate q are about one Gaussian release of
        ``μ = q sqrt(T (exp(1 / σ²) - 1))``.

        Args:
            batch: Expected records in a sample.
            steps: Number of steps.
        """
        square = (self.most_signal / batch) ** 2 / steps
        return 1.0 / math.sqrt(math.log1p(square))

    def exact_noise(self, batch: int, steps: int) -> float:
        """Return the noise multiplier that meets ε by the accountant, rounded up by at most 0.1%.

        Args:
            batch: Expected records in a sample.
            steps: Number of steps.

        Raises:
            InvalidInputError: Under replace-one, for which no bound of sampled steps is known here.
        """
        step = PoissonSampled(batch / self.records, Gaussian(1.0))
        answer = calibrate(
            Repeated(self.trainings * steps, step),
            epsilon=self.epsilon,
            delta=self.delta,
            adjacency=self.adjacency,
            tolerance=_ACCURACY,
        )
        return answer.scale


@dataclass(frozen=True, kw_only=True)
class SchedulePoint:
    """A schedule of DP-SGD, with its noise and what it is worth.

    Args:
        records: Declared number of training records.
        weights: Number of weights that are trained.
        batch: Expected records in a sample.
        steps: Number of steps.
        noise_multiplier: σ: the noise's deviation over the clipping norm.
        exact: Whether σ is the accountant's; else it is an estimate.
        needed_steps: What T steps leave of the way, times T.
        step_length: How far a step leads at most, where that is given; else what steps leave is reckoned
            from their number alone.

    Example:
        >>> numbers = {"records": 1_000, "weights": 100, "batch": 100, "steps": 50}
        >>> point = SchedulePoint(**numbers, noise_multiplier=2.0, exact=True)
        >>> point.epochs, point.work, round(point.signal), round(point.noise_to_signal, 4)
        (5.0, 5000, 354, 0.0283)
    """

    records: int
    weights: int
    batch: int
    steps: int
    noise_multiplier: float
    exact: bool
    needed_steps: float = NEEDED_STEPS
    step_length: float | None = None

    @property
    def epochs(self) -> float:
        """Expected passes over the records."""
        return self.steps * self.batch / self.records

    @property
    def work(self) -> int:
        """Expected gradient evaluations of one training."""
        return self.steps * self.batch

    @property
    def signal(self) -> float:
        """``B √T / σ``: how far the sums of gradients stand out of the noise in the weights."""
        return self.batch * math.sqrt(self.steps) / self.noise_multiplier

    @property
    def noise_to_signal(self) -> float:
        """``σ √d / (B √T)``: the noise in all weights beside the way that clipped gradients bring them."""
        return math.sqrt(self.weights) / self.signal

    @property
    def shortfall(self) -> float:
        """Noise and what too few steps leave, together: the smaller, the better the schedule."""
        if self.step_length is not None:
            in_weight = (
                self.step_length * self.noise_multiplier * math.sqrt(self.steps) / self.batch
            )
            noise = in_weight * self.weights**0.25
            left = math.sqrt(NEEDED_WAY / (self.step_length * self.steps))
            return math.hypot(noise, left, NEGLIGIBLE)
        noise = self.noise_to_signal * math.sqrt(1.0 + ADAPTING_STEPS / self.steps)
        return math.hypot(noise, self.needed_steps / self.steps, NEGLIGIBLE)

    def to_dict(self) -> dict[str, float]:
        """Return the schedule and its worth as JSON-ready data."""
        return {
            "epochs": self.epochs,
            "expected_batch_size": self.batch,
            "steps": self.steps,
            "noise_multiplier": self.noise_multiplier,
            "gradient_evaluations": self.work,
            "noise_to_signal": self.noise_to_signal,
            "shortfall": self.shortfall,
        }


def batch_grid(records: int) -> tuple[int, ...]:
    """Return the batches that are tried: powers of two, halfway between them, and all records.

    Args:
        records: Declared number of training records.

    Example:
        >>> batch_grid(20)
        (1, 2, 3, 4, 6, 8, 12, 16, 20)
    """
    batches = {records}
    power = 1
    while power < records:
        batches.add(power)
        batches.add(min(power + max(1, power // 2), records))
        power *= 2
    return tuple(sorted(batches))


def _schedules(
    facts: TrainingFacts, work: float, batch: int | None = None
) -> Iterator[SchedulePoint]:
    """Yield the schedules of an amount of work, by batch, with estimated noise."""
    batches = batch_grid(facts.records) if batch is None else (batch,)
    for size in batches:
        steps = int(work / size)
        if 1 <= steps <= _MOST_STEPS:
            yield _estimated(facts, size, steps)


def _estimated(facts: TrainingFacts, batch: int, steps: int) -> SchedulePoint:
    """Return a schedule with estimated noise."""
    return SchedulePoint(
        records=facts.records,
        weights=facts.weights,
        batch=batch,
        steps=steps,
        noise_multiplier=facts.estimate_noise(batch, steps),
        exact=False,
        needed_steps=facts.needed_steps,
        step_length=facts.step_length,
    )


def _least_shortfall(points: Sequence[SchedulePoint]) -> float:
    """Return the smallest shortfall of some schedules."""
    return min(point.shortfall for point in points)


def _best(points: Sequence[SchedulePoint]) -> SchedulePoint:
    """Return the schedule of fewest steps whose shortfall is about the smallest."""
    limit = (1.0 + TOLERANCE) * _least_shortfall(points)
    good = [point for point in points if point.shortfall <= limit]
    return min(good, key=lambda point: point.steps)


def best_schedule(facts: TrainingFacts, work: float, batch: int | None = None) -> SchedulePoint:
    """Return the schedule of about the smallest shortfall for an amount of work, by estimated noise.

    Estimates are smooth in batch and steps: about right where noise is large, and up to a quarter too low
    where few small samples have little. To ask the accountant of each schedule would take longer than
    planning may.

    Args:
        facts: The public numbers.
        work: Gradient evaluations of one training, which it does not exceed.
        batch: Expected batch size, where it is given.

    Raises:
        InvalidInputError: If the work is less than one step of one record.

    Example:
        >>> facts = TrainingFacts(records=60_000, weights=26_010, epsilon=3.0, delta=1e-5)
        >>> point = best_schedule(facts, 1_200_000)
        >>> point.batch, point.steps, point.work <= 1_200_000
        (1536, 781, True)
    """
    estimates = list(_schedules(facts, work, batch))
    if not estimates:
        raise _too_little(facts, work, batch)
    return _best(estimates)


def with_exact_noise(facts: TrainingFacts, point: SchedulePoint) -> SchedulePoint:
    """Return a schedule with the noise that the accountant finds for it.

    Args:
        facts: The public numbers.
        point: The schedule.

    Example:
        >>> facts = TrainingFacts(records=1_000, weights=100, epsilon=1.0, delta=1e-5)
        >>> point = best_schedule(facts, 20_000)
        >>> with_exact_noise(facts, point).exact, point.exact
        (True, False)
    """
    noise_multiplier = facts.exact_noise(point.batch, point.steps)
    return replace(point, noise_multiplier=noise_multiplier, exact=True)


def _too_little(facts: TrainingFacts, work: float, batch: int | None) -> InvalidInputError:
    """Return the error for work that is less than one step, or more steps than are tried."""
    least = batch or 1
    return InvalidInputError(
        "compute",
        work,
        f"must be at least {least:,} gradient evaluations, one step, and at most {_MOST_STEPS:,} steps of "
        f"{batch or facts.records:,} records",
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleChoice:
    """The schedule that the rule chooses, and why it spends no more.

    Args:
        point: The schedule, with the accountant's noise.
        compute: The gradient evaluations of one training that might have been spent.
        gain: Relative fall of the shortfall that twice the chosen work would buy.

    Example:
        >>> facts = TrainingFacts(records=1_000, weights=100, epsilon=1.0, delta=1e-5)
        >>> choice = choose_schedule(facts, 10_000_000)
        >>> choice.point.work < choice.compute, choice.gain < 0.06
        (True, True)
    """

    point: SchedulePoint
    compute: float
    gain: float

    @property
    def reason(self) -> str:
        """What was chosen, and what limits it, in one sentence."""
        point = self.point
        chosen = (
            f"{point.epochs:.4g} epochs of {point.batch:,} records ({point.steps:,} steps, σ = "
            f"{point.noise_multiplier:.3g})"
        )
        more = f"twice the work would lower noise and missing steps by {100 * self.gain:.2g}%"
        if point.work > 0.7 * self.compute:
            return f"{chosen}: the best of {self.compute:,.0f} gradient evaluations; {more}"
        return (
            f"{chosen}: {more}, so less than the {self.compute:,.0f} gradient evaluations are spent"
        )


@lru_cache(maxsize=512)
def choose_schedule(
    facts: TrainingFacts, compute: float, batch: int | None = None
) -> ScheduleChoice:
    """Return the schedule of about the smallest shortfall that may be spent and is worth its work.

    Work ends where twice of it would lower the shortfall by less than 3%. Both amounts are judged by
    estimated noise, so that planning stays fast; the chosen schedule has the accountant's.

    Args:
        facts: The public numbers.
        compute: The gradient evaluations of one training that may be spent, at least 1.
        batch: Expected batch size, where it is given and the epochs alone are chosen.

    Raises:
        InvalidInputError: If ``compute`` is less than one step.

    Example:
        >>> facts = TrainingFacts(records=60_000, weights=26_010, epsilon=3.0, delta=1e-5)
        >>> choose_schedule(facts, 2e6).point.work <= 2_000_000
        True
    """
    work = min(compute, _enough_work(facts, compute, batch))
    once = best_schedule(facts, work, batch)
    point = with_exact_noise(facts, once)
    return ScheduleChoice(point=point, compute=compute, gain=gain_of_twice(facts, once, batch))


def gain_of_twice(facts: TrainingFacts, point: SchedulePoint, batch: int | None = None) -> float:
    """Return the relative fall of the shortfall that twice the work of a schedule buys, by estimated noise.

    Args:
        facts: The public numbers.
        point: The schedule.
        batch: Expected batch size, where it is given and the epochs alone are chosen.

    Example:
        >>> facts = TrainingFacts(records=1_000, weights=100, epsilon=1.0, delta=1e-5)
        >>> 0.0 < gain_of_twice(facts, best_schedule(facts, 2_000)) < 0.5
        True
    """
    once = _estimated(facts, point.batch, point.steps)
    twice = list(_schedules(facts, 2.0 * point.work, batch))
    if not twice:
        return 0.0  # more steps than are tried
    fall: float = 1.0 - _best(twice).shortfall / once.shortfall
    return max(0.0, fall)


def _enough_work(facts: TrainingFacts, compute: float, batch: int | None) -> float:
    """Return the least work whose double lowers the shortfall by less than ``least_gain``.

    The work is at most ``compute``. The amounts are the same whatever may be spent: more compute never leads
    to a larger shortfall.
    """
    work = float(batch or 1)
    stride = math.exp2(1.0 / _FINE)
    while work < compute:
        once = list(_schedules(facts, work, batch))
        twice = list(_schedules(facts, 2.0 * work, batch))
        if not once or not twice:
            return work / stride  # more steps than are tried
        if _least_shortfall(twice) > (1.0 - facts.least_gain) * _least_shortfall(once):
            return work
        work *= stride
    return compute


@dataclass(frozen=True, kw_only=True)
class ScheduleCurve:
    """Noise and work of many schedules, with that of a plan.

    Args:
        facts: The public numbers.
        chosen: The schedule of the plan, with the accountant's noise.
        by_work: The best schedules of fractions and multiples of the work, with the accountant's noise.

    Example:
        >>> facts = TrainingFacts(records=1_000, weights=100, epsilon=1.0, delta=1e-5)
        >>> curve = schedule_curve(facts, choose_schedule(facts, 20_000).point)
        >>> [round(point.work / curve.chosen.work, 1) for point in curve.by_work]
        [0.2, 0.5, 1.0, 2.0, 4.0]
    """

    facts: TrainingFacts
    chosen: SchedulePoint
    by_work: tuple[SchedulePoint, ...]

    @property
    def lines(self) -> dict[float, tuple[SchedulePoint, ...]]:
        """By factor of the work, its schedules batch by batch, with estimated noise.

        The estimates are scaled so that the one of the plan is the accountant's noise.
        """
        chosen = self.chosen
        scale = chosen.noise_multiplier / self.facts.estimate_noise(chosen.batch, chosen.steps)
        lines = {}
        for factor in WORKS:
            points = []
            for point in _schedules(self.facts, factor * chosen.work):
                noise_multiplier = scale * point.noise_multiplier
                points.append(replace(point, noise_multiplier=noise_multiplier))
            lines[factor] = tuple(points)
        return lines

    @property
    def by_batch(self) -> tuple[SchedulePoint, ...]:
        """Schedules of the plan's work, by batch: those of the grid with estimates, and the plan's."""
        others = [point for point in self.lines[1.0] if point.batch != self.chosen.batch]
        points = [*others, self.chosen]
        return tuple(sorted(points, key=lambda point: point.batch))

    @property
    def gain(self) -> float:
        """The relative fall of the shortfall that twice the work buys; 0 where it buys none."""
        return gain_of_twice(self.facts, self.chosen)


def schedule_curve(facts: TrainingFacts, chosen: SchedulePoint) -> ScheduleCurve:
    """Return what other batches at the same work, and other amounts of work, would give.

    Args:
        facts: The public numbers.
        chosen: The schedule to mark.

    Example:
        >>> facts = TrainingFacts(records=1_000, weights=100, epsilon=1.0, delta=1e-5)
        >>> curve = schedule_curve(facts, choose_schedule(facts, 20_000).point)
        >>> curve.chosen in curve.by_batch, 0.0 < curve.gain < 0.3
        (True, True)
    """
    by_work = []
    for factor in WORKS:
        best = best_schedule(facts, max(1.0, factor * chosen.work))
        by_work.append(with_exact_noise(facts, best))
    return ScheduleCurve(facts=facts, chosen=chosen, by_work=tuple(by_work))
