"""What the account takes for granted of the machinery, as laws that numbers drawn by it must follow.

Samples, noise, numbers of runs, seeds, rows and choices are those of the package; every law is known
exactly. A check that a sound package fails has a p-value below :data:`LEVEL`: that happens to one
audit in a thousand.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats

from privtune.accounting import Gaussian, RunLaw
from privtune.audit.canaries import secrets_of
from privtune.audit.selections import Made
from privtune.execution.table import Handed, make_rounds, work_through
from privtune.ledger import Budget, ChargeRequest, Ledger
from privtune.ledger.rounds import Lease
from privtune.spaces import SearchSpace
from privtune.strategies import Plan, ScorePlan, Strategy, TrialResult
from privtune.training.mechanism import noise as noises
from privtune.training.mechanism import sampling
from privtune.training.mechanism.schedule import NoiseOptions, Schedule
from privtune.training.mechanism.streams import Streams

if TYPE_CHECKING:
    from privtune.strategies import Round

LEVEL = 1e-4
"""A check fails below this p-value; there are ten at most."""

_INCLUSIONS = 400_000
_VALUES = 2**20
_DRAWS = 20_000
_ROUNDS = 40

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Check:
    """One law, held against what was drawn.

    Args:
        name: What was checked, in words.
        p_value: Probability, under the law, of what is at least as far off; 0 for what cannot happen.
        seen: What was seen, and what the law says.

    Example:
        >>> Check("sizes of samples", 0.3, "variance 9.1, binomial 9.5").passed
        True
    """

    name: str
    p_value: float
    seen: str

    @property
    def passed(self) -> bool:
        """Whether chance explains what was seen."""
        return self.p_value >= LEVEL


def check_sampler(schedule: Schedule, *, seed: int) -> Iterator[Check]:
    """Check rate, sizes and independence of Poisson samples."""
    records, rate = min(schedule.records, 10_000), schedule.sample_rate
    if rate >= 1.0:
        return
    pairs = max(20, math.ceil(_INCLUSIONS / (2 * records * rate)))
    [secret] = secrets_of(seed, "sampler", 1)
    sampler = sampling.PoissonSampler(
        records=records, rate=rate, rngs=[Streams(secret).numpy("sampling")]
    )
    sizes, common = [], 0
    for _ in range(pairs):
        two = [sampler() for _ in range(2)]
        inside = [set(index[0, : size[0]].tolist()) for index, size in two]
        sizes += [int(size[0]) for _, size in two]
        common += len(inside[0] & inside[1])
    total, draws = sum(sizes), len(sizes)
    p = stats.binomtest(total, draws * records, rate).pvalue
    seen = total / (draws * records)
    yield Check("sampling rate", float(p), f"{seen:.5g}, charged {rate:.5g}")
    mean, variance = records * rate, records * rate * (1.0 - rate)
    chi = sum((size - mean) ** 2 for size in sizes) / variance
    p = 2.0 * min(stats.chi2.cdf(chi, draws), stats.chi2.sf(chi, draws))
    yield Check("sizes of samples", float(p), f"variance over binomial's {chi / draws:.4g}")
    p = stats.binomtest(common, pairs * records, rate**2).pvalue
    yield Check(
        "records in two successive samples",
        float(p),
        f"{common}, independent samples {pairs * records * rate**2:.0f}",
    )


def check_noise(options: NoiseOptions, *, seed: int) -> Iterator[Check]:
    """Check the law of the noise, its tails, and that nothing is drawn twice."""
    made = noises.NoiseSource(
        [Streams(secret) for secret in secrets_of(seed, "noise", 16)],
        torch.device("cpu"),
        options=options,
    )
    values = made.gaussian(_VALUES // 16).double().numpy().ravel()
    p = stats.kstest(values, "norm").pvalue
    yield Check("law of the noise", float(p), f"standard deviation {values.std():.5f}, planned 1")
    beyond = int((np.abs(values) > 4.0).sum())
    share = 2.0 * float(stats.norm.sf(4.0))
    p = stats.binomtest(beyond, len(values), share).pvalue
    yield Check(
        "tails of the noise", float(p), f"{beyond} beyond 4, Gaussian {len(values) * share:.0f}"
    )
    rows = values.reshape(16, -1)[:, :64]
    twice = 16 - len({row.tobytes() for row in rows})
    yield Check("noise of one candidate in another's", float(twice == 0), f"{twice} of 16 the same")


def check_releases(releases: Floats) -> Iterator[Check]:
    """Check that what trainings without a canary released is noise of the planned scale."""
    if not len(releases):
        return
    chi = float((releases**2).sum())
    p = 2.0 * min(stats.chi2.cdf(chi, len(releases)), stats.chi2.sf(chi, len(releases)))
    seen = math.sqrt(chi / len(releases))
    yield Check("noise of releases", float(p), f"{seen:.4f} of what was planned")


def check_runs(law: RunLaw, *, seed: int) -> Iterator[Check]:
    """Check the law of the secret number of runs."""
    secrets = secrets_of(seed, "runs", _DRAWS)
    drawn = Counter(law.sample(Streams(s).numpy("runs", 0)) for s in secrets)
    top = law.quantile(1.0 - 20.0 / _DRAWS)
    chances = np.append(law.pmf(np.arange(top + 1)), 0.0)
    chances[-1] = max(0.0, 1.0 - chances.sum())
    counts = [drawn[k] for k in range(top + 1)]
    expected, seen = _binned(chances * _DRAWS, np.array([*counts, _DRAWS - sum(counts)]))
    chi = float(((seen - expected) ** 2 / expected).sum())
    p = float(stats.chi2.sf(chi, max(1, len(seen) - 1)))
    mean = sum(k * n for k, n in drawn.items()) / _DRAWS
    yield Check("law of the number of runs", p, f"mean {mean:.3g}, charged {law.expected_runs:.3g}")


def _binned(expected: Floats, seen: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Merge neighbouring numbers until ten are expected of each."""
    bins: list[tuple[float, float]] = []
    mass = count = 0.0
    for e, s in zip(expected.tolist(), seen.tolist(), strict=True):
        mass, count = mass + e, count + s
        if mass >= 10.0:
            bins.append((mass, count))
            mass = count = 0.0
    if bins and (mass or count):
        bins[-1] = (bins[-1][0] + mass, bins[-1][1] + count)
    a, b = zip(*(bins or [(max(mass, 1e-9), count)]), strict=True)
    return np.array(a), np.array(b)


def check_rounds(plan: Plan, strategy: Strategy, *, seed: int) -> Iterator[Check]:
    """Work through rounds in a ledger of their own: rows, seeds, results, and the choice."""
    # Every third row diverges: such a trial is a result like any other, the worst.
    if plan.runs is None:
        return
    lost = wrong = 0
    seeds: list[bytes] = []
    # A ledger of its own, and gone with it: no budget of anybody's hears of an audit.
    with tempfile.TemporaryDirectory() as folder, Ledger(f"sqlite:///{folder}/audit.db") as ledger:
        ledger.create_budget(Budget(1000.0, 1e-5, name="audit"))
        requests = [ChargeRequest(Gaussian(50.0)) for _ in range(_ROUNDS)]
        rounds = make_rounds(ledger)
        for charge, secret in zip(
            ledger.reserve("audit", requests), secrets_of(seed, "rows", _ROUNDS), strict=True
        ):
            count = max(4, plan.runs.sample(Streams(secret).numpy("runs", 0)))
            opened = rounds.open(charge.id, count=count, secret=secret)

            def run(leases: Sequence[Lease]) -> Iterator[Handed]:
                for lease in leases:
                    seeds.append(lease.seed)
                    yield Handed(lease, _score(lease), {})

            work_through(rounds, charge.id, run, stack=16)
            results = rounds.results(charge.id)
            lost += opened.tasks - len(results)
            row = plan.threshold
            trials = tuple(_trial(r.number, r.score, plan) for r in results)
            made = Made(SearchSpace({}), Streams(secret), trials, 0.0)
            outcome = strategy.run(plan, cast("Round", made))
            best = max((t.score or -math.inf for t in trials), default=-math.inf)
            shown = None if outcome.result is None else outcome.result.score
            chosen = shown is None if row is not None else shown == best
            wrong += not chosen or bool(outcome.trials)
    yield Check("rows of a round", float(not lost), f"{lost} results of trials are missing")
    again = len(seeds) - len(set(seeds))
    yield Check("seeds of rows", float(not again), f"{again} of {len(seeds)} were used before")
    yield Check(
        "what is released", float(not wrong), f"{wrong} of {_ROUNDS} are not the best alone"
    )


def _score(lease: Lease) -> float:
    """Return a score below every threshold that a plan may have; −∞ for every third row."""
    value = int.from_bytes(lease.seed[:6], "big") / 2**48
    return -math.inf if lease.number % 3 == 2 else -1e300 * (1.0 + value) / 4.0


def _trial(number: int, score: float, plan: Plan) -> TrialResult:
    params = {"learning_rate": 1.0, "max_grad_norm": 1.0, **plan.params}
    return TrialResult(index=number, params=params, weights=torch.zeros(1), score=score)


def score_pair(plan: ScorePlan, *, runs: int, seed: int, inside: bool) -> Floats:
    """Return what scores of one model release, with or without a validation record that counts as most.

    Of the noised sums it is the part along what the record adds: nothing else tells it.
    """
    from privtune.training.mechanism.data import TensorData
    from privtune.training.mechanism.scoring import cross_entropy, released_sums

    accuracy = plan.metric == "accuracy"
    model = torch.nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-1.0], [1.0]] if accuracy else [[1.0], [-1.0]]))
    loud = max(50.0, 2.0 * plan.options.get("bound", 1.0))  # a loss above the bound

    def sums(terms: ScorePlan, count: int, rng: np.random.Generator) -> Floats:
        data = TensorData(
            torch.full((count, 1), loud), torch.ones(count, dtype=torch.long), sealed_size=True
        )
        released = released_sums(terms, model, data, rng, cross_entropy)
        if released is None:
            raise RuntimeError("a model of an audit is not finite")
        return released[0]

    exact = replace(plan, noise_multiplier=None)
    added = sums(exact, 2, np.random.default_rng(0)) - sums(exact, 1, np.random.default_rng(0))
    secrets = secrets_of(seed, f"score/{inside}", runs)
    rngs = [Streams(secret).numpy("score", 0) for secret in secrets]
    return np.array([sums(plan, 2 if inside else 1, rng) @ added for rng in rngs])
