"""Whole rounds of a sealed selection: scores that a canary changes most, the rounds, the claim on them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from scipy import fft, stats

from privtune.accounting import Adjacency, Event, RunLaw, lower_bound, scale_noise
from privtune.accounting.instances import outcomes_of
from privtune.accounting.lower import Outcomes, Scores, worst_order
from privtune.accounting.registry import UnknownEventError, looks
from privtune.audit.bounds import Claim, Floats
from privtune.audit.canaries import canaries, hyperparameters, secrets_of, train_canaries
from privtune.errors import InvalidInputError
from privtune.execution.training import part_of
from privtune.ledger.rounds import OpenRound
from privtune.spaces import SearchSpace
from privtune.strategies import Plan, Strategy, TrainingPlan, TrialResult
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.streams import Streams

if TYPE_CHECKING:
    from privtune.strategies import Round

_AIMS = (1e-3, 1e-2, 0.05, 0.2)  # δ at which scores pay most: what happens often is known best


@dataclass(frozen=True, eq=False)
class WorstScore:
    """A score of a training's likelihood ratio, and the ratio of what is then released."""

    ratios: Floats
    ranks: Floats
    released: Floats
    law: Callable[[Floats], Floats]
    nothing: float = 0.0

    def score(self, ratio: Floats) -> Floats:
        """Return the scores of trainings."""
        return self.ranks[self._place(ratio)]

    def evidence(self, ratio: Floats) -> Floats:
        """Return what it tells that these trainings won."""
        found = self.released[self._place(np.nan_to_num(ratio))]
        return np.where(np.isnan(ratio), self.nothing, found)

    @property
    def edges(self) -> Floats:
        """Where one outcome ends and the next begins."""
        return np.asarray(0.5 * (self.ratios[1:] + self.ratios[:-1]))

    def _place(self, ratio: Floats) -> npt.NDArray[np.int64]:
        return np.searchsorted(self.edges, ratio)


def worst_score(base: Event, runs: RunLaw, *, claim: Claim, rounds: int) -> WorstScore:
    """Return the score that an audit of so many rounds finds out most by."""
    outcomes = outcomes_of(base, claim.delta)

    def tried() -> Iterator[tuple[WorstScore, Outcomes]]:
        for flip in (False, True):
            for aim in (claim.delta, *_AIMS):
                one = outcomes.flipped() if flip else outcomes
                instance, order = worst_order(one, runs, aim, scores=Scores.RANKED, cut=False)
                p, q = (np.maximum(part, 1e-300) for part in instance.tuned(order))
                tuned = Outcomes(p, q).flipped() if flip else Outcomes(p, q)
                ratios = (-1.0 if flip else 1.0) * instance.losses[order]
                ranks = np.arange(len(order), dtype=np.float64)
                yield _sorted(ratios, ranks, np.log(tuned.p / tuned.q), runs), tuned

    return _best(tried(), claim, rounds)


def worst_threshold(base: Event, stop: float, *, claim: Claim, rounds: int) -> WorstScore:
    """Return the likewise best rule of which runs reach a known score: their score is 1, else 0."""
    outcomes = outcomes_of(base, claim.delta)
    order = np.argsort(outcomes.losses)
    p, q, losses = outcomes.p[order], outcomes.q[order], outcomes.losses[order]

    def tried() -> Iterator[tuple[WorstScore, Outcomes]]:
        cuts = np.searchsorted(np.cumsum(q), np.linspace(0.0, 1.0, 12))
        tops = np.searchsorted(np.cumsum(p), 1.0 - np.geomspace(1e-3, 0.5, 12))
        for low in np.unique(cuts):
            for high in np.unique(tops):
                keep = np.ones(p.size)
                keep[min(low, high) : high] = 0.0

                def law(m: Floats, keep: Floats = keep) -> Floats:
                    passed, failed = keep * m, ((1.0 - keep) * m).sum()
                    whole = stop + (1.0 - stop) * passed.sum()
                    return np.asarray(np.append(passed, stop * failed) / whole)

                tuned = Outcomes(law(p), law(q))
                told = np.log(np.maximum(tuned.p, 1e-300) / np.maximum(tuned.q, 1e-300))
                yield WorstScore(losses, keep, told[:-1], law, float(told[-1])), tuned

    return _best(tried(), claim, rounds)


def _sorted(ratios: Floats, ranks: Floats, released: Floats, runs: RunLaw) -> WorstScore:
    order = np.argsort(ratios, kind="stable")
    places = np.argsort(ranks[order])  # of the outcomes, from worst to best score

    def law(masses: Floats) -> Floats:
        below = np.minimum(np.append(0.0, np.cumsum(masses[places])), 1.0)
        found = np.empty(len(masses) + 1)
        found[places] = np.diff(runs.pgf(below))
        found[-1] = runs.zero_probability
        return found

    return WorstScore(ratios[order], ranks[order], released[order], law)


def _best(tried: Iterator[tuple[WorstScore, Outcomes]], claim: Claim, rounds: int) -> WorstScore:
    """Return the instance with the largest margin that so many rounds are expected to show."""
    best, most = None, -np.inf
    for score, tuned in tried:
        for flip in (False, True):
            ends = tuned.flipped() if flip else tuned
            order = np.argsort(-(np.log(ends.p + 1e-300) - np.log(ends.q + 1e-300)))
            tpr, fpr = np.cumsum(ends.p[order]), np.cumsum(ends.q[order])
            some = np.unique(
                np.searchsorted(tpr, np.linspace(0.002, 0.998, 200)).clip(0, len(tpr) - 1)
            )
            wide = stats.norm.ppf(0.975) / np.sqrt(rounds)
            upper, lower = (
                rate[some] + sign * wide * np.sqrt(rate[some] * np.maximum(1.0 - rate[some], 0.0))
                for rate, sign in ((fpr, 1.0), (tpr, -1.0))
            )
            found = float(claim.margin(upper + 1.0 / rounds, lower, 1.25).max())
            if found > most:
                best, most = score, found
    assert best is not None  # noqa: S101 (there are always some)
    return best


_SLOPES = 200  # at which the trade-off curve is held against the rates
_STEEP = 12.0  # ε of the steepest
_CELLS = 4000  # of one release
_REACH = 11.0  # standard deviations of it
_FINE = 200.0  # lattice points in a standard deviation of all releases together


class InstanceClaim(Claim):
    """That a selection is the explicit instance: these scores, this law of runs, this noise or more."""

    # Claims are searched in the order of their noise, so less noise must tell more. That holds for the
    # best of a round, not for the first above a threshold: with little noise nobody may reach it.

    def __init__(self, event: Event, delta: float, *, base: Event, score: WorstScore) -> None:
        super().__init__(event, delta, Adjacency.ADD_REMOVE)
        self._steps = _steps(base) or []
        self._edges, self._law = score.edges, score.law
        self._known: dict[float, tuple[Floats, Floats]] = {}

    @staticmethod
    def fits(base: Event) -> bool:
        """Say whether the law of a training's likelihood ratio is computed here."""
        return _steps(base) is not None

    def best_test(self, runs: int, risk: float) -> tuple[float, float]:
        """See ``Claim``: of what is released, by its likelihood ratio."""
        p, q = (np.maximum(self._law(masses), 1e-300) for masses in self._bins(1.0))
        told = np.log(p / q)
        order = np.argsort(-told)
        tpr, fpr = np.cumsum(p[order]), np.cumsum(q[order])
        rates = np.linspace(0.005, 0.995, _SLOPES)
        some = np.unique(np.searchsorted(tpr, rates).clip(0, len(p) - 2))
        cuts = 0.5 * (told[order][some] + told[order][some + 1])
        return self._best_of(
            cuts, fpr[some].clip(0.0, 1.0), tpr[some].clip(0.0, 1.0), runs=runs, risk=risk
        )

    def _epsilon(self, factor: float) -> float:
        return lower_bound(scale_noise(self.event, factor), self.delta, adjacency=self.adjacency)

    def _profile(self, factor: float) -> tuple[Floats, Floats]:
        if factor not in self._known:
            p, q = (self._law(masses) for masses in self._bins(factor))
            # Lines above the whole curve: of slopes below 1, too, as what is released has no mirror.
            epsilons = np.linspace(-_STEEP, _STEEP, _SLOPES)
            deltas = [np.maximum(p - math.exp(e) * q, 0.0).sum() for e in epsilons]
            self._known[factor] = epsilons, np.array(deltas)
        return self._known[factor]

    def _bins(self, factor: float) -> list[Floats]:
        """Return the masses of the bins with the canary and without it."""
        [deviation] = np.sqrt([sum(t * count for _, t, count in self._steps)])
        width = factor * deviation / _FINE
        both = [_laws(rate, t, factor, width) for rate, t, _ in self._steps]
        counts = [count for *_, count in self._steps]
        lowest = sum(first * count for (first, _), count in zip(both, counts, strict=True))
        size = 1 + sum(
            (masses.shape[1] - 1) * n for (_, masses), n in zip(both, counts, strict=True)
        )
        room = fft.next_fast_len(size, real=True)
        total = np.ones((2, room // 2 + 1), dtype=complex)
        for (_, masses), count in zip(both, counts, strict=True):
            total *= fft.rfft(masses, room, axis=1) ** count
        masses = np.maximum(fft.irfft(total, room, axis=1)[:, :size], 0.0)
        ends = (lowest + np.arange(size + 1) - 0.5) * width
        below = np.pad(
            np.cumsum(masses / masses.sum(axis=1, keepdims=True), axis=1), ((0, 0), (1, 0))
        )
        return [
            np.diff(np.concatenate([[0.0], np.interp(self._edges, ends, side), [1.0]]))
            for side in below
        ]


def _steps(base: Event) -> list[tuple[float, float, int]] | None:
    """Return rate, precision and number of the releases of a training; None where some are no Gaussian."""
    try:
        found = looks(base)
    except UnknownEventError:
        return None
    if any(kind != "gaussian" for _, atoms in found for kind, _ in atoms):
        return None
    return [
        (rate, math.fsum(noise**-2.0 for _, noise in atoms), count)
        for (rate, atoms), count in found.items()
    ]


def _laws(rate: float, precision: float, factor: float, width: float) -> tuple[int, Floats]:
    """Return the law of one step's log-likelihood ratio, as the plan has it, at other noise."""
    # A value's mass goes to the two lattice points beside it, so that means stay what they are.
    deviation = factor * math.sqrt(precision)
    edges = np.linspace(
        -precision / 2 - _REACH * deviation, precision / 2 + _REACH * deviation, _CELLS
    )
    ends = np.concatenate([[-np.inf], edges, [np.inf]])
    out, there = (
        np.diff(stats.norm.cdf(ends, sign * precision / 2, deviation)) for sign in (-1.0, 1.0)
    )
    middles = np.concatenate([edges[:1], 0.5 * (edges[1:] + edges[:-1]), edges[-1:]])
    missed = math.log1p(-rate) if rate < 1.0 else -math.inf
    places = np.logaddexp(missed, math.log(rate) + middles) / width
    low = np.floor(places).astype(np.int64)
    over = places - low
    first = int(low[0])
    masses = np.zeros((2, int(low[-1]) - first + 2))
    for side, mass in enumerate(((1.0 - rate) * out + rate * there, out)):
        np.add.at(masses[side], low - first, mass * (1.0 - over))
        np.add.at(masses[side], low - first + 1, mass * over)
    return first, masses


_FINAL = -1


@dataclass(frozen=True, eq=False)
class Made:
    """A round with its trainings done: what the strategy of a sealed selection asks of a ``Round``."""

    space: SearchSpace
    streams: Streams
    results: tuple[TrialResult, ...]
    final: float

    def select(self, plan: Plan) -> Sequence[TrialResult]:
        """The trials of the round."""
        return self.results

    def train(
        self,
        plan: Plan,
        training: TrainingPlan,
        params: Mapping[str, Any],
        *,
        name: str,
        scored: bool = False,
    ) -> TrialResult:
        """Return the final training, done already."""
        weights = torch.tensor([self.final], dtype=torch.float64)
        return TrialResult(index=0, params=params, weights=weights, score=None)


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
    """Run rounds with or without a canary; return what each release says of it."""
    # Numbers of runs, seeds, the subset, ties and the choice are the package's own; scores are the audit's.
    search, runs = plan.search, plan.runs
    if search is None or runs is None:
        raise InvalidInputError("plan", plan.strategy, "is no sealed selection")
    secrets = secrets_of(seed, f"rounds/{inside}", rounds)
    jobs: dict[tuple[int, int], tuple[bytes, bool]] = {}
    for number, secret in enumerate(secrets):
        streams = Streams(secret)
        opened = OpenRound("audit-1", runs.sample(streams.numpy("runs", 0)), secret)
        tuned = _present(search.trainings[0].part, plan, streams, inside)
        for row in range(opened.tasks):
            jobs[number, row] = (opened.seed(row), tuned)
        if plan.final or plan.rate is not None:
            last = _present(plan.training.part, plan, streams, inside)
            jobs[number, _FINAL] = (streams.key("final"), last)
    done = 0

    def told(count: int) -> None:
        nonlocal done
        before, done = done, done + count
        progress(rounds * done // max(1, len(jobs)) - rounds * before // max(1, len(jobs)))

    finals = _ratios(plan.training, plan, jobs, adjacency, told, final=True)
    ratios = _ratios(search.trainings[0], plan, jobs, adjacency, told, final=False)
    of_round: list[list[float]] = [[] for _ in secrets]
    for (number, _), ratio in sorted(ratios.items()):
        of_round[number].append(ratio)
    space = SearchSpace({})
    found = []
    for number, secret in enumerate(secrets):
        values = np.array(of_round[number])
        scores = score.score(values) if len(values) else values
        if plan.threshold is not None:
            scores = np.where(scores > 0.5, plan.threshold + 1.0, plan.threshold - 1.0)
        results = tuple(
            TrialResult(
                index=row,
                params=hyperparameters(search.trainings[0].method, plan.params),
                weights=torch.tensor([value], dtype=torch.float64),
                score=float(points),
            )
            for row, (value, points) in enumerate(zip(values, scores, strict=True))
        )
        final = finals.get((number, _FINAL), 0.0)
        made = Made(space, Streams(secret), results, final)
        found.append(_told(plan, strategy, made, score))
    return np.array(found)


def _told(plan: Plan, strategy: Strategy, made: Made, score: WorstScore) -> float:
    """Return the log-likelihood ratio of all that one round releases."""
    outcome = strategy.run(plan, cast("Round", made))
    if outcome.result is None:
        return score.nothing
    if plan.rate is None:
        won = float(outcome.result.weights[0])
        others = [float(trial.weights[0]) for trial in outcome.trials]
        return float(score.evidence(np.array([won]))[0]) + sum(others)
    # Of subsampled tuning the final model is shown, and the winner's score.
    won = next(
        (float(r.weights[0]) for r in made.results if r.score == outcome.result.score), math.nan
    )
    tuned, final = float(score.evidence(np.array([won]))[0]), float(outcome.result.weights[0])
    both = tuned + (final if plan.training.part == "all" else 0.0)
    return float(np.logaddexp(math.log(plan.rate) + both, math.log1p(-plan.rate) + final))


def _present(part: str, plan: Plan, streams: Streams, inside: bool) -> bool:
    """Say whether a training on this part of the records meets the canary."""
    records = TensorData(torch.ones(1, 1), torch.zeros(1), sealed_size=True)
    # A part without any record holds one that is marked as unusable.
    return inside and part_of(records, part, plan.rate, streams).unusable is None


def _ratios(
    training: TrainingPlan,
    plan: Plan,
    jobs: Mapping[tuple[int, int], tuple[bytes, bool]],
    adjacency: Adjacency,
    progress: Callable[[int], None],
    *,
    final: bool,
) -> dict[tuple[int, int], float]:
    """Train all jobs of a kind in two passes, with the canary and without it."""
    replaced = adjacency is Adjacency.REPLACE_ONE
    found: dict[tuple[int, int], float] = {}
    for present in (False, True):
        own = [
            (name, seed)
            for name, (seed, there) in jobs.items()
            if there is present and (name[1] == _FINAL) is final
        ]
        if not own:
            continue
        sign = 1.0 if present else (-1.0 if replaced else 0.0)
        seen = train_canaries(
            training.method,
            training.schedule,
            hyperparameters(training.method, plan.params),
            [seed for _, seed in own],
            data=canaries([sign]),
            replaced=replaced,
            noise=dataclasses.replace(training.noise),
            progress=progress,
        )
        found.update(zip((name for name, _ in own), seen.ratio.tolist(), strict=True))
    return found
