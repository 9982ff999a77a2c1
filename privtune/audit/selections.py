"""Audits of whole rounds of a sealed selection: their scores, their trainings, and the claim on them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from scipy import fft, stats

from privtune.accounting import Adjacency, Event, RunLaw, lower_bound, scale_noise
from privtune.accounting.instances import outcomes_of
from privtune.accounting.lower import Outcomes, Scores, worst_order
from privtune.accounting.registry import UnknownEventError, looks
from privtune.audit.bounds import Claim, Curve, Floats, Indices
from privtune.audit.canaries import (
    canaries,
    hyperparameters,
    log_of_rest,
    secrets_of,
    train_canaries,
)
from privtune.errors import InvalidInputError
from privtune.execution.trial_training import part_of
from privtune.ledger.rounds import OpenRound
from privtune.spaces import SearchSpace
from privtune.strategies import (
    NamedTraining,
    Outcome,
    Plan,
    SealedRound,
    Strategy,
    TrainingPlan,
    TrialResult,
    advance,
)
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.streams import Streams

if TYPE_CHECKING:
    from privtune.strategies import Request, Round

_AIMS = (1e-3, 1e-2, 0.05, 0.2)  # δ at which scores pay most: what happens often is known best
_TIE = 1e-9  # margins that differ by rounding alone
_LEAST = 1e-300  # mass of an outcome whose logarithm is taken
_PLACES = 12  # of either end of the outcomes that a threshold lets pass
_MORE_NOISE = 1.25  # of the claim that a score is to contradict
_QUANTILES = np.linspace(0.002, 0.998, 200)  # of the true positive rate, at which scores are judged


@dataclass(frozen=True, eq=False)
class WorstScore:
    """A score by a training's likelihood ratio, and the likelihood ratio of what is then released.

    Args:
        ratios: Log-likelihood ratios of a training's outcomes, rising.
        ranks: The score of each outcome.
        released: The log-likelihood ratio of a release whose winner had this outcome.
        law: Maps masses of a training's outcomes to those of a release: of each outcome, and at the end
            of a round that releases nothing.
        nothing: The log-likelihood ratio of a round that releases nothing.
    """

    ratios: Floats
    ranks: Floats
    released: Floats
    law: Callable[[Floats], Floats]
    nothing: float = 0.0

    def score(self, ratio: Floats) -> Floats:
        """Return the score of each training from its log-likelihood ratio."""
        return self.ranks[self._places(ratio)]

    def evidence(self, ratio: Floats) -> Floats:
        """Return the log-likelihood ratio of releases whose winner has `ratio`; NaN means no winner."""
        places = self._places(np.nan_to_num(ratio))
        has_no_winner = np.isnan(ratio)
        return np.where(has_no_winner, self.nothing, self.released[places])

    @property
    def edges(self) -> Floats:
        """The log-likelihood ratios halfway between neighbouring outcomes."""
        sums = self.ratios[1:] + self.ratios[:-1]
        return np.asarray(0.5 * sums)

    def _places(self, ratio: Floats) -> Indices:
        return np.searchsorted(self.edges, ratio)


class _ScoredOutcomes(NamedTuple):
    """A score, and the probabilities of the resulting releases with and without the canary."""

    score: WorstScore
    release: Outcomes


def worst_score(base: Event, runs: RunLaw, *, claim: Claim, rounds: int) -> WorstScore:
    """Return the score of a best of K for which an audit of this many rounds finds most.

    Args:
        base: The event of one training.
        runs: The law of their number.
        claim: That of the selection, which the score is to contradict at some more noise.
        rounds: On each side.
    """
    outcomes = outcomes_of(base, claim.delta)
    aims = (claim.delta, *_AIMS)
    pairs = []
    # Of a base that is its own mirror image both are equally good at the claimed noise. The flipped one,
    # which goes first, finds more where the noise is half of it.
    for is_flipped in (True, False):
        for aim in aims:
            pair = _score_at(outcomes, runs, aim, is_flipped=is_flipped)
            pairs.append(pair)
    return _best(pairs, claim, rounds)


def _score_at(outcomes: Outcomes, runs: RunLaw, aim: float, *, is_flipped: bool) -> _ScoredOutcomes:
    """Return the score that makes a selection reveal most at δ = `aim`, and its releases."""
    direction = outcomes.flipped() if is_flipped else outcomes
    sign = -1.0 if is_flipped else 1.0
    instance, order = worst_order(
        direction,
        runs,
        aim,
        scores=Scores.RANKED,
        cut=False,
    )
    p, q = instance.tuned(order)
    known_p = np.maximum(p, _LEAST)
    known_q = np.maximum(q, _LEAST)
    release = Outcomes(known_p, known_q)
    if is_flipped:
        release = release.flipped()
    ratios = sign * instance.losses[order]
    ranks = np.arange(len(order), dtype=np.float64)
    released = np.log(release.p / release.q)
    return _ScoredOutcomes(_sorted(ratios, ranks, released, runs), release)


def worst_threshold(base: Event, stop: float, *, claim: Claim, rounds: int) -> WorstScore:
    """Return the pass rule, a score of 1 or 0, for which an audit of this many rounds finds most.

    Args:
        base: The event of one training.
        stop: Probability that the search ends after a run that did not reach it.
        claim: That of the selection.
        rounds: On each side.
    """
    outcomes = outcomes_of(base, claim.delta)
    order = np.argsort(outcomes.losses)
    p = outcomes.p[order]
    q = outcomes.q[order]
    # What fails lies between a quantile without the canary and one with it.
    levels = np.linspace(0.0, 1.0, _PLACES)
    tails = np.geomspace(1e-3, 0.5, _PLACES)
    starts = np.searchsorted(np.cumsum(q), levels)
    ends = np.searchsorted(np.cumsum(p), 1.0 - tails)
    pairs = []
    for start in np.unique(starts):
        for end in np.unique(ends):
            passes = np.ones(p.size)
            passes[min(start, end) : end] = 0.0
            law = _ThresholdLaw(passes, stop)
            release = Outcomes(law(p), law(q))
            known_p = np.maximum(release.p, _LEAST)
            known_q = np.maximum(release.q, _LEAST)
            released = np.log(known_p / known_q)
            score = WorstScore(
                ratios=outcomes.losses[order],
                ranks=passes,
                released=released[:-1],
                law=law,
                nothing=float(released[-1]),
            )
            pairs.append(_ScoredOutcomes(score, release))
    return _best(pairs, claim, rounds)


@dataclass(frozen=True, eq=False)
class _ThresholdLaw:
    """The distribution of what the first passing run releases.

    Args:
        passes: 1 for each outcome of a training that passes, else 0.
        stop: Probability that a round ends after a run that did not pass.
    """

    passes: Floats
    stop: float

    def __call__(self, masses: Floats) -> Floats:
        """Return the probability that each outcome is released, and last that nothing is."""
        passing = self.passes * masses
        failing = (1.0 - self.passes) * masses
        nothing = self.stop * failing.sum()
        ending = self.stop + (1.0 - self.stop) * passing.sum()
        each = np.append(passing, nothing)
        return np.asarray(each / ending)


def _sorted(ratios: Floats, ranks: Floats, released: Floats, runs: RunLaw) -> WorstScore:
    """Return the score of a best of K with these ranks, its outcomes sorted by likelihood ratio."""
    order = np.argsort(ratios, kind="stable")
    places = np.argsort(ranks[order])  # of the outcomes, from worst to best score

    def law(masses: Floats) -> Floats:
        by_score = masses[places]
        levels = np.append(0.0, np.cumsum(by_score))
        below = np.minimum(levels, 1.0)
        # The best is at most an outcome if all runs are: φ of the mass up to it.
        release = np.empty(len(masses) + 1)
        release[places] = np.diff(runs.pgf(below))
        release[-1] = runs.zero_probability
        return release

    return WorstScore(
        ratios=ratios[order],
        ranks=ranks[order],
        released=released[order],
        law=law,
    )


def _best(pairs: Sequence[_ScoredOutcomes], claim: Claim, rounds: int) -> WorstScore:
    """Return the score with the largest expected margin over the claim in this many rounds; a tie's first."""
    best = pairs[0].score
    largest = -np.inf
    for pair in pairs:
        for ends in (pair.release, pair.release.flipped()):
            margin = _expected_margin(ends, claim, rounds)
            if margin > largest + _TIE:
                best = pair.score
                largest = margin
    return best


def _expected_margin(release: Outcomes, claim: Claim, rounds: int) -> float:
    """Return the expected margin of this many rounds over a claim with 1.25 times the noise."""
    log_p = np.log(release.p + _LEAST)
    log_q = np.log(release.q + _LEAST)
    order = np.argsort(log_q - log_p)
    tpr = np.cumsum(release.p[order])
    fpr = np.cumsum(release.q[order])
    places = np.searchsorted(tpr, _QUANTILES)
    places = places.clip(0, len(tpr) - 1)
    places = np.unique(places)
    tpr = tpr[places]
    fpr = fpr[places]
    # Ends of the intervals of a binomial share, by its normal approximation.
    width = stats.norm.ppf(0.975) / np.sqrt(rounds)
    upper = fpr + width * _share_deviation(fpr)
    lower = tpr - width * _share_deviation(tpr)
    margins = claim.margin(upper + 1.0 / rounds, lower, _MORE_NOISE)
    return float(margins.max())


def _share_deviation(rate: Floats) -> Floats:
    """Return the standard deviation of a Bernoulli draw with each of these probabilities."""
    other = np.maximum(1.0 - rate, 0.0)  # a sum of masses may be above 1 by rounding
    return np.sqrt(rate * other)


_SLOPES = 200  # at which the trade-off curve is held against the rates
_STEEP = 12.0  # ε of the steepest
_CELLS = 4000  # of one release
_REACH = 11.0  # standard deviations of it
_FINE = 200.0  # lattice points in a standard deviation of all releases together


class _Step(NamedTuple):
    """A group of equal Gaussian releases of a training: rate, precision, and number of samples.

    Args:
        rate: Probability that a sample holds a record.
        precision: Sum of the releases' inverse squared noise multipliers.
        samples: How many there are.
    """

    rate: float
    precision: float
    samples: int


class InstanceClaim(Claim):
    """The claim that a selection is one explicit mechanism, with known scores and law of runs.

    Args:
        event: The selection's.
        delta: At which δ its ε is asked for.
        base: The event of one of its trainings.
        score: By which trainings win.
    """

    # Claims are searched in the order of their noise, so less noise must tell more. That holds for the
    # best of a round, not for the first above a threshold: with little noise nobody may reach it.

    def __init__(
        self,
        event: Event,
        delta: float,
        *,
        base: Event,
        score: WorstScore,
    ) -> None:
        super().__init__(event, delta, Adjacency.ADD_REMOVE)
        self._steps = _steps(base) or []
        self._edges = score.edges
        self._law = score.law
        self._profiles: dict[float, Curve] = {}

    @staticmethod
    def fits(base: Event) -> bool:
        """Return whether all releases of a training are Gaussian, as this claim requires."""
        return _steps(base) is not None

    def best_test(self, runs: int, risk: float) -> tuple[float, float]:
        """Return the threshold and slope of the best test on a release's likelihood ratio."""
        masses_p, masses_q = self._bins(1.0)
        p = np.maximum(self._law(masses_p), _LEAST)
        q = np.maximum(self._law(masses_q), _LEAST)
        ratios = np.log(p / q)
        order = np.argsort(-ratios)
        tpr = np.cumsum(p[order])
        fpr = np.cumsum(q[order])
        rates = np.linspace(0.005, 0.995, _SLOPES)
        places = np.searchsorted(tpr, rates)
        places = places.clip(0, len(p) - 2)
        places = np.unique(places)
        falling = ratios[order]
        neighbours = falling[places] + falling[places + 1]
        thresholds = 0.5 * neighbours
        # Sums of masses may be above 1 by rounding.
        place_fpr = fpr[places].clip(0.0, 1.0)
        place_tpr = tpr[places].clip(0.0, 1.0)
        return self._best_of(thresholds, place_fpr, place_tpr, runs=runs, risk=risk)

    def _epsilon(self, factor: float) -> float:
        event = scale_noise(self.event, factor)
        return lower_bound(event, self.delta, adjacency=self.adjacency)

    def _profile(self, factor: float) -> Curve:
        if factor not in self._profiles:
            masses_p, masses_q = self._bins(factor)
            p = self._law(masses_p)
            q = self._law(masses_q)
            # Lines above the whole curve: of slopes below 1, too, as what is released has no mirror.
            epsilons = np.linspace(-_STEEP, _STEEP, _SLOPES)
            deltas = []
            for epsilon in epsilons.tolist():
                scale = math.exp(epsilon)
                excess = np.maximum(p - scale * q, 0.0)
                deltas.append(excess.sum())
            self._profiles[factor] = epsilons, np.array(deltas)
        return self._profiles[factor]

    def _bins(self, factor: float) -> list[Floats]:
        """Return the probabilities of a training's outcomes with the canary and without it.

        The log-likelihood ratio of a training is a sum over its samples: its law is a convolution of
        theirs, here on a lattice and by Fourier transforms.

        Args:
            factor: Of the noise that the training really has; ratios are the plan's.
        """
        variance = sum(step.precision * step.samples for step in self._steps)
        width = factor * np.sqrt(variance) / _FINE
        laws = [_lattice_law(step, factor, width) for step in self._steps]
        counts = [step.samples for step in self._steps]
        lowest = 0
        size = 1
        for law, count in zip(laws, counts, strict=True):
            _, points = law.masses.shape
            lowest += law.first * count
            size += (points - 1) * count
        room = fft.next_fast_len(size, real=True)
        frequencies = room // 2 + 1
        transform = np.ones((2, frequencies), dtype=complex)
        for law, count in zip(laws, counts, strict=True):
            one_sample = fft.rfft(law.masses, room, axis=1)
            transform *= one_sample**count
        masses = fft.irfft(transform, room, axis=1)[:, :size]
        masses = np.maximum(masses, 0.0)
        shares = masses / masses.sum(axis=1, keepdims=True)
        cumulative = np.cumsum(shares, axis=1)
        below = np.pad(cumulative, ((0, 0), (1, 0)))
        # A lattice point's cell reaches half a width to each side.
        points = lowest + np.arange(size + 1) - 0.5
        ends = points * width
        return [self._masses_between_edges(ends, side) for side in below]

    def _masses_between_edges(self, ends: Floats, below: Floats) -> Floats:
        """Return the probability of each outcome from the mass below given cell ends."""
        inner = np.interp(self._edges, ends, below)
        levels = np.concatenate([[0.0], inner, [1.0]])
        return np.diff(levels)


def _steps(base: Event) -> list[_Step] | None:
    """Return the releases of a training in groups of equal ones; None if some are not Gaussian."""
    try:
        counts = looks(base)
    except UnknownEventError:
        return None
    steps = []
    for (rate, atoms), count in counts.items():
        if any(kind != "gaussian" for kind, _ in atoms):
            return None
        precision = math.fsum(noise**-2.0 for _, noise in atoms)
        steps.append(_Step(rate, precision, count))
    return steps


class _LatticeLaw(NamedTuple):
    """The distribution of one sample's log-likelihood ratio on a lattice.

    Args:
        first: The lowest lattice point, in widths.
        masses: With the canary, and without it: of shape (2, points).
    """

    first: int
    masses: Floats


def _lattice_law(step: _Step, factor: float, width: float) -> _LatticeLaw:
    """Return the law of a step's log-likelihood ratio if the noise is `factor` times the plan's."""
    # A value's mass goes to the two lattice points beside it, so that means stay what they are.
    rate = step.rate
    mean = step.precision / 2
    deviation = factor * math.sqrt(step.precision)
    reach = _REACH * deviation
    edges = np.linspace(-mean - reach, mean + reach, _CELLS)
    ends = np.concatenate([[-np.inf], edges, [np.inf]])
    cdf_absent = stats.norm.cdf(ends, -mean, deviation)
    cdf_present = stats.norm.cdf(ends, mean, deviation)
    absent = np.diff(cdf_absent)
    present = np.diff(cdf_present)
    inner = 0.5 * (edges[1:] + edges[:-1])
    # What is beyond all cells stands at the outermost edges.
    middles = np.concatenate([edges[:1], inner, edges[-1:]])
    log_sampled = math.log(rate) + middles
    ratios = np.logaddexp(log_of_rest(rate), log_sampled)
    places = ratios / width
    low = np.floor(places).astype(np.int64)
    over = places - low
    first = int(low[0])
    last = int(low[-1])
    columns = low - first
    masses = np.zeros((2, last - first + 2))
    mixed = (1.0 - rate) * absent + rate * present
    for side, mass in zip(masses, (mixed, absent), strict=True):
        upper = mass * over
        lower = mass * (1.0 - over)
        np.add.at(side, columns, lower)
        np.add.at(side, columns + 1, upper)
    return _LatticeLaw(first, masses)


_FINAL = -1  # the row of a round's final training


@dataclass(frozen=True, eq=False)
class TrainedRound:
    """A finished round, which answers the requests of a sealed selection's strategy.

    Args:
        space: The search space: nothing is drawn from it.
        streams: The round's.
        results: Its trials.
        final: The log-likelihood ratio of the final training; a release's weight is such a ratio.
    """

    space: SearchSpace
    streams: Streams
    results: tuple[TrialResult, ...]
    final: float

    def run(self, plan: Plan, strategy: Strategy) -> Outcome:
        """Return the outcome that a strategy releases of the round."""
        run = strategy.run(plan, cast("Round", self))
        request = advance(run)
        while not isinstance(request, Outcome):
            request = advance(run, self._answer(request))
        return request

    def _answer(self, request: Request) -> Sequence[TrialResult]:
        """Return the finished trials, or the finished final training, that a request asks for."""
        if isinstance(request, SealedRound):
            return self.results
        if not isinstance(request, NamedTraining):
            raise InvalidInputError("request", request, "is none of a sealed selection")
        weights = torch.tensor([self.final], dtype=torch.float64)
        return [TrialResult(index=0, params=request.params, weights=weights, score=None)]


class RoundTraining(NamedTuple):
    """One training of a round: its row, its secret, and whether it meets the canary.

    Args:
        round: The round's number.
        row: Its row there, or ``_FINAL``.
        secret: What its streams derive from.
        is_present: Whether its records hold the canary.
    """

    round: int
    row: int
    secret: bytes
    is_present: bool


def rounds_of(
    plan: Plan,
    strategy: Strategy,
    score: WorstScore,
    *,
    rounds: int,
    seed: int,
    inside: bool,
    adjacency: Adjacency,
    progress: Callable[[int], None] = lambda _: None,
) -> Floats:
    """Run rounds with or without a canary, and return the log-likelihood ratio of each release.

    Args:
        plan: Of a sealed selection.
        strategy: What made the plan.
        score: By which its trainings win.
        rounds: How many.
        seed: Everything drawn derives from it.
        inside: Whether the canary is among the records.
        adjacency: What is there in its place without it: nothing, or another record.
        progress: Called with the number of rounds that were worked through since the last call.

    Returns:
        A log-likelihood ratio for each round.

    Raises:
        InvalidInputError: If the plan is of no sealed selection.
    """
    # Numbers of runs, seeds, the subset, ties and the choice are the package's own; scores are the audit's.
    if plan.search is None or plan.runs is None:
        raise InvalidInputError("plan", plan.strategy, "is no sealed selection")
    secrets = secrets_of(seed, f"rounds/{inside}", rounds)
    jobs: list[RoundTraining] = []
    for number, secret in enumerate(secrets):
        jobs += _jobs_of(plan, number, secret, inside=inside)
    searching = [job for job in jobs if job.row != _FINAL]
    finishing = [job for job in jobs if job.row == _FINAL]
    training = plan.search.trainings[0]
    count_jobs = rounds_progress(progress, rounds, len(jobs))
    finals = ratios_of(plan.training, plan, finishing, adjacency, count_jobs)
    ratios = ratios_of(training, plan, searching, adjacency, count_jobs)
    ratios_by_round: list[list[float]] = [[] for _ in secrets]
    for (number, _), ratio in sorted(ratios.items()):
        ratios_by_round[number].append(ratio)
    params = hyperparameters(training.method, plan.params)
    evidence = []
    for number, secret in enumerate(secrets):
        round_ratios = np.array(ratios_by_round[number])
        trained = TrainedRound(
            space=SearchSpace({}),
            streams=Streams(secret),
            results=_trials(plan, score, params, round_ratios),
            final=finals.get((number, _FINAL), 0.0),
        )
        evidence.append(_evidence(plan, strategy, trained, score))
    return np.array(evidence)


def _jobs_of(plan: Plan, number: int, secret: bytes, *, inside: bool) -> Iterator[RoundTraining]:
    """Yield the trainings of one round, with the seeds that the ledger would give them."""
    assert plan.search is not None  # noqa: S101 (for the type checker)
    assert plan.runs is not None  # noqa: S101
    streams = Streams(secret)
    count = plan.runs.sample(streams.numpy("runs", 0))
    opened = OpenRound("audit-1", count, secret)
    part = plan.search.trainings[0].part
    is_present = inside and holds_records(part, plan, streams)
    for row in range(opened.tasks):
        yield RoundTraining(number, row, opened.seed(row), is_present)
    if plan.final or plan.rate is not None:
        is_present = inside and holds_records(plan.training.part, plan, streams)
        yield RoundTraining(number, _FINAL, streams.key("final"), is_present)


def rounds_progress(
    progress: Callable[[int], None],
    rounds: int,
    jobs: int,
) -> Callable[[int], None]:
    """Return a function that takes numbers of finished trainings and reports progress in rounds."""
    trainings = 0

    def count_jobs(count: int) -> None:
        nonlocal trainings
        before = rounds * trainings // max(1, jobs)
        trainings += count
        now = rounds * trainings // max(1, jobs)
        progress(now - before)

    return count_jobs


def _trials(
    plan: Plan,
    score: WorstScore,
    params: Mapping[str, Any],
    ratios: Floats,
) -> tuple[TrialResult, ...]:
    """Return the trials of a round, scored by the log-likelihood ratios of its trainings."""
    scores = score.score(ratios) if len(ratios) else ratios
    if plan.threshold is not None:
        # A score of 1 passes, one of 0 does not.
        passing = plan.threshold + 1.0
        failing = plan.threshold - 1.0
        scores = np.where(scores > 0.5, passing, failing)
    trials = []
    for row, (ratio, points) in enumerate(zip(ratios, scores, strict=True)):
        weights = torch.tensor([ratio], dtype=torch.float64)
        trial = TrialResult(
            index=row,
            params=params,
            weights=weights,
            score=float(points),
        )
        trials.append(trial)
    return tuple(trials)


def _evidence(
    plan: Plan,
    strategy: Strategy,
    trained: TrainedRound,
    score: WorstScore,
) -> float:
    """Return the log-likelihood ratio of everything that one round releases."""
    outcome = trained.run(plan, strategy)
    if outcome.result is None:
        return score.nothing
    released = float(outcome.result.weights[0])
    if plan.rate is None:
        others = sum(float(trial.weights[0]) for trial in outcome.trials)
        return _evidence_of_winner(score, released) + others
    # Of subsampled tuning the final model is shown, and the winner's score.
    winner = math.nan
    for trial in trained.results:
        if trial.score == outcome.result.score:
            winner = float(trial.weights[0])
            break
    # The canary is in the subset, which the tuning saw, with the subset's rate.
    in_subset = _evidence_of_winner(score, winner)
    if plan.training.part == "all":
        in_subset += released
    log_in = math.log(plan.rate) + in_subset
    log_out = math.log1p(-plan.rate) + released
    return float(np.logaddexp(log_in, log_out))


def _evidence_of_winner(score: WorstScore, ratio: float) -> float:
    [evidence] = score.evidence(np.array([ratio]))
    return float(evidence)


def holds_records(part: str, plan: Plan, streams: Streams) -> bool:
    """Return whether a training on this part of the records would include the canary."""
    records = TensorData(torch.ones(1, 1), torch.zeros(1), sealed_size=True)
    subset = part_of(records, part, plan.rate, streams)
    # A part without any record holds one that is marked as unusable.
    return subset.unusable is None


def ratios_of(
    training: TrainingPlan,
    plan: Plan,
    jobs: Sequence[RoundTraining],
    adjacency: Adjacency,
    progress: Callable[[int], None],
) -> dict[tuple[int, int], float]:
    """Return the log-likelihood ratio of each training by (round, row), after training them.

    Returns:
        Log-likelihood ratios by round and row.
    """
    is_replaced = adjacency is Adjacency.REPLACE_ONE
    absent_sign = -1.0 if is_replaced else 0.0
    ratios: dict[tuple[int, int], float] = {}
    for is_present, sign in ((False, absent_sign), (True, 1.0)):
        batch = [job for job in jobs if job.is_present is is_present]
        if not batch:
            continue
        evidence = train_canaries(
            training.method,
            training.schedule,
            hyperparameters(training.method, plan.params),
            [job.secret for job in batch],
            data=canaries([sign]),
            replaced=is_replaced,
            noise=dataclasses.replace(training.noise),
            progress=progress,
        )
        for job, ratio in zip(batch, evidence.ratio.tolist(), strict=True):
            ratios[job.round, job.row] = ratio
    return ratios
