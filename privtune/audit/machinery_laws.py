"""Check samples, noise, numbers of runs and rounds against the laws that the account assumes.

Samples, noise, numbers of runs, seeds, rows and choices are those of the package; every law is known
exactly. A check that a sound package fails has a p-value below :data:`LEVEL`: that happens to one
audit in a thousand.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats

from privtune.accounting import Gaussian, RunLaw
from privtune.audit.bounds import Floats
from privtune.audit.canaries import secrets_of
from privtune.audit.selections import TrainedRound
from privtune.execution.table import RowResult, make_rounds, work_through
from privtune.ledger import Budget, ChargeRequest, Ledger
from privtune.ledger.rounds import Lease, Rounds
from privtune.spaces import SearchSpace
from privtune.strategies import Plan, ScorePlan, Strategy, TrialResult
from privtune.training.mechanism import noise as noises
from privtune.training.mechanism import sampling
from privtune.training.mechanism.schedule import NoiseOptions, Schedule
from privtune.training.mechanism.streams import Streams

LEVEL = 1e-4
"""A check fails below this p-value; there are ten at most."""

_INCLUSIONS = 400_000  # of records in samples
_RECORDS = 10_000  # that are put into groups
_VALUES = 2**20  # of noise
_CANDIDATES = 16  # among which they are split
_DRAWS = 20_000  # of the number of runs
_ROUNDS = 40
_ENOUGH = 10.0  # draws expected of a bin, so that its count is about Gaussian

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LawCheck:
    """The result of one statistical check of a law against drawn numbers.

    Args:
        name: What was checked, in words.
        p_value: Probability, under the law, of what is at least as far off; 0 for what cannot happen.
        seen: What was seen, and what the law says.

    Example:
        >>> LawCheck("sizes of samples", 0.3, "variance 9.1, binomial 9.5").passed
        True
    """

    name: str
    p_value: float
    seen: str

    @property
    def passed(self) -> bool:
        """Whether the p-value is at least `LEVEL`."""
        return self.p_value >= LEVEL


def check_sampler(schedule: Schedule, *, seed: int) -> Iterator[LawCheck]:
    """Yield checks of the rate, the sizes and the independence of Poisson samples.

    Args:
        schedule: Its sample rate, and its number of records up to 10,000.
        seed: The samples derive from it.
    """
    records = min(schedule.records, 10_000)
    rate = schedule.sample_rate
    if schedule.bands > 1:
        yield from _check_groups(
            schedule,
            _RECORDS,
            seed=seed,
        )
        return
    if rate >= 1.0:
        return
    pairs = max(20, math.ceil(_INCLUSIONS / (2 * records * rate)))
    draws = 2 * pairs
    sizes, common = _draw_pairs(records, rate, pairs, seed=seed)
    total = sum(sizes)
    test = stats.binomtest(total, draws * records, rate)
    share = total / (draws * records)
    yield LawCheck(
        "sampling rate",
        float(test.pvalue),
        f"{share:.5g}, charged {rate:.5g}",
    )
    mean = records * rate
    variance = records * rate * (1.0 - rate)
    squares = sum((size - mean) ** 2 for size in sizes)
    chi = squares / variance
    yield LawCheck(
        "sizes of samples",
        _two_sided_chi(chi, draws),
        f"variance over binomial's {chi / draws:.4g}",
    )
    test = stats.binomtest(common, pairs * records, rate**2)
    expected = pairs * records * rate**2
    yield LawCheck(
        "records in two successive samples",
        float(test.pvalue),
        f"{common}, independent samples {expected:.0f}",
    )


def _draw_pairs(records: int, rate: float, pairs: int, *, seed: int) -> tuple[list[int], int]:
    """Draw pairs of successive samples; return all sizes and the number of records in common."""
    [secret] = secrets_of(seed, "sampler", 1)
    rng = Streams(secret).numpy("sampling")
    sampler = sampling.PoissonSampler(records=records, rate=rate, rngs=[rng])
    sizes: list[int] = []
    common = 0
    for _ in range(pairs):
        members = []
        for _ in range(2):
            index, size = sampler()  # a row a candidate, filled up behind its sample
            count = int(size[0])
            sizes.append(count)
            members.append(set(index[0, :count].tolist()))
        first, second = members
        common += len(first & second)
    return sizes, common


def _check_groups(
    schedule: Schedule,
    records: int,
    *,
    seed: int,
) -> Iterator[LawCheck]:
    """Yield checks of samples of one group after the other, as correlated noise needs them.

    The account asks for three things: groups are drawn uniformly, a record is sampled at the charged rate
    in the turns of its group, and no sooner again than as many steps later as noise is correlated over.

    Args:
        schedule: Its bands and its sample rate.
        records: How many are put into groups.
        seed: Groups and samples derive from it.
    """
    bands = schedule.bands
    rate = schedule.group_rate
    [secret] = secrets_of(seed, "sampler", 1)
    streams = Streams(secret)
    groups = sampling.assign_groups(
        streams,
        records=records,
        bands=bands,
    )
    sampler = sampling.CyclicSampler(
        records=records,
        rate=rate,
        rngs=[streams.numpy("sampling")],
        groups=[groups],
        bands=bands,
    )
    of_group = np.bincount(groups, minlength=bands)
    expected = records / bands
    differences = of_group - expected
    squares = differences**2 / expected
    chi = float(squares.sum())
    p_value = float(stats.chi2.sf(chi, bands - 1))
    yield LawCheck(
        "groups of records",
        p_value,
        f"{of_group.min()} to {of_group.max()} records, {expected:.4g} expected",
    )
    inclusions = records * rate
    enough = math.ceil(_INCLUSIONS / inclusions)
    cycles = max(4, enough)
    last = np.full(records, -bands)
    total = 0
    soonest = bands
    for step in range(cycles * bands):
        index, size = sampler()
        count = int(size[0])
        members = index[0, :count]
        apart = step - last[members]
        least = int(apart.min(initial=bands))
        soonest = min(soonest, least)
        last[members] = step
        total += count
    # Each record had as many turns as there were cycles.
    trials = cycles * records
    if rate < 1.0:
        test = stats.binomtest(total, trials, rate)
        share = total / trials
        yield LawCheck(
            "sampling rate",
            float(test.pvalue),
            f"{share:.5g} in a group, charged {rate:.5g}",
        )
    yield LawCheck(
        "records sampled again",
        float(soonest >= bands),
        f"{soonest} steps apart at least, charged {bands}",
    )


def _two_sided_chi(chi: float, freedom: int) -> float:
    """Return the two-sided p-value of a chi-square sum with this many degrees of freedom."""
    below = stats.chi2.cdf(chi, freedom)
    above = stats.chi2.sf(chi, freedom)
    return float(2.0 * min(below, above))


def check_noise(options: NoiseOptions, *, seed: int) -> Iterator[LawCheck]:
    """Yield checks of the noise: its law, its tails, and that candidates share no draws."""
    secrets = secrets_of(seed, "noise", _CANDIDATES)
    source = noises.NoiseSource(
        [Streams(secret) for secret in secrets],
        torch.device("cpu"),
        options=options,
    )
    draws = source.gaussian(_VALUES // _CANDIDATES)
    noise = draws.double().numpy()  # a row a candidate
    values = noise.ravel()
    test = stats.kstest(values, "norm")
    deviation = values.std()
    yield LawCheck(
        "law of the noise",
        float(test.pvalue),
        f"standard deviation {deviation:.5f}, planned 1",
    )
    beyond = int((np.abs(values) > 4.0).sum())
    share = 2.0 * float(stats.norm.sf(4.0))
    test = stats.binomtest(beyond, len(values), share)
    expected = len(values) * share
    yield LawCheck(
        "tails of the noise",
        float(test.pvalue),
        f"{beyond} beyond 4, Gaussian {expected:.0f}",
    )
    different = {row.tobytes() for row in noise[:, :64]}
    twice = _CANDIDATES - len(different)
    yield LawCheck(
        "noise of one candidate in another's",
        float(twice == 0),
        f"{twice} of {_CANDIDATES} the same",
    )


def check_releases(releases: Floats) -> Iterator[LawCheck]:
    """Yield a check that trainings without a canary release noise of the planned scale.

    Args:
        releases: Values over their planned standard deviation.
    """
    count = len(releases)
    if not count:
        return
    chi = float((releases**2).sum())
    deviation = math.sqrt(chi / count)
    yield LawCheck(
        "noise of releases",
        _two_sided_chi(chi, count),
        f"{deviation:.4f} of what was planned",
    )


def check_runs(law: RunLaw, *, seed: int) -> Iterator[LawCheck]:
    """Yield a check of the drawn numbers of runs against their law."""
    draws: Counter[int] = Counter()
    for secret in secrets_of(seed, "runs", _DRAWS):
        rng = Streams(secret).numpy("runs", 0)
        draws[law.sample(rng)] += 1
    top = law.quantile(1.0 - 20.0 / _DRAWS)
    numbers = np.arange(top + 1)
    chances = np.append(law.pmf(numbers), 0.0)
    chances[-1] = max(0.0, 1.0 - chances.sum())  # of more than that
    counts = [draws[number] for number in numbers.tolist()]
    counts.append(_DRAWS - sum(counts))
    expected, binned = _bin_counts(chances * _DRAWS, np.array(counts))
    squares = (binned - expected) ** 2 / expected
    chi = float(squares.sum())
    freedom = max(1, len(binned) - 1)
    total = sum(number * count for number, count in draws.items())
    mean = total / _DRAWS
    yield LawCheck(
        "law of the number of runs",
        float(stats.chi2.sf(chi, freedom)),
        f"mean {mean:.3g}, charged {law.expected_runs:.3g}",
    )


def _bin_counts(expected: Floats, counts: Counts) -> tuple[Floats, Floats]:
    """Merge neighbouring bins until each expects ten draws; return expected and actual counts."""
    masses: list[float] = []
    totals: list[float] = []
    mass = 0.0
    total = 0.0
    for more_mass, more in zip(expected.tolist(), counts.tolist(), strict=True):
        mass += more_mass
        total += more
        if mass >= _ENOUGH:
            masses.append(mass)
            totals.append(total)
            mass = 0.0
            total = 0.0
    if not masses:
        return np.array([max(mass, 1e-9)]), np.array([total])
    masses[-1] += mass
    totals[-1] += total
    return np.array(masses), np.array(totals)


@dataclass
class _RoundFaults:
    """The faults found in audited rounds, and the seeds of all their rows.

    Args:
        missing: Trials without a result.
        wrong_releases: Rounds that released another than the best, or more.
        seeds: One for each row.
    """

    missing: int = 0
    wrong_releases: int = 0
    seeds: list[bytes] = field(default_factory=list)


def check_rounds(plan: Plan, strategy: Strategy, *, seed: int) -> Iterator[LawCheck]:
    """Yield checks of rounds run in a temporary ledger: results, seeds, and the released trial."""
    if plan.runs is None:
        return
    faults = _RoundFaults()
    # A ledger of its own, and gone with it: no budget of anybody's hears of an audit.
    with tempfile.TemporaryDirectory() as folder, Ledger(f"sqlite:///{folder}/audit.db") as ledger:
        ledger.create_budget(Budget(1000.0, 1e-5, name="audit"))
        requests = [ChargeRequest(Gaussian(50.0)) for _ in range(_ROUNDS)]
        rounds = make_rounds(ledger)
        charges = ledger.reserve("audit", requests)
        secrets = secrets_of(seed, "rows", _ROUNDS)
        for charge, secret in zip(charges, secrets, strict=True):
            _check_round(
                rounds,
                charge.id,
                secret,
                plan,
                strategy,
                faults=faults,
            )
    missing = faults.missing
    yield LawCheck(
        "rows of a round",
        float(not missing),
        f"{missing} results of trials are missing",
    )
    total = len(faults.seeds)
    again = total - len(set(faults.seeds))
    yield LawCheck(
        "seeds of rows",
        float(not again),
        f"{again} of {total} were used before",
    )
    wrong = faults.wrong_releases
    yield LawCheck(
        "what is released",
        float(not wrong),
        f"{wrong} of {_ROUNDS} are not the best alone",
    )


def _check_round(
    rounds: Rounds,
    charge: str,
    secret: bytes,
    plan: Plan,
    strategy: Strategy,
    *,
    faults: _RoundFaults,
) -> None:
    """Run one round of a charge, and add its faults and its rows' seeds to `faults`."""
    assert plan.runs is not None  # noqa: S101 (for the type checker)
    streams = Streams(secret)
    count = max(4, plan.runs.sample(streams.numpy("runs", 0)))
    opened = rounds.open(charge, count=count, secret=secret)

    def run(leases: Sequence[Lease]) -> Iterator[RowResult]:
        for lease in leases:
            faults.seeds.append(lease.seed)
            yield RowResult(lease, _score(lease), {})

    work_through(rounds, charge, run, stack=16)
    results = rounds.results(charge)
    faults.missing += opened.tasks - len(results)
    trials = tuple(_trial(result.number, result.score, plan) for result in results)
    trained = TrainedRound(SearchSpace({}), streams, trials, 0.0)
    outcome = trained.run(plan, strategy)
    released = None if outcome.result is None else outcome.result.score
    if plan.threshold is None:
        scores = [trial.score or -math.inf for trial in trials]
        is_right = released == max(scores, default=-math.inf)
    else:
        is_right = released is None  # no trial reaches it
    if not is_right or outcome.trials:
        faults.wrong_releases += 1


def _score(lease: Lease) -> float:
    """Return a score from a row's seed, far below any threshold; −∞ for every third row.

    Such a trial has diverged: it is a result like any other, the worst.
    """
    if lease.number % 3 == 2:
        return -math.inf
    value = int.from_bytes(lease.seed[:6], "big") / 2**48  # in [0, 1)
    return -1e300 * (1.0 + value) / 4.0


def _trial(number: int, score: float, plan: Plan) -> TrialResult:
    params = {"learning_rate": 1.0, "max_grad_norm": 1.0, **plan.params}
    return TrialResult(
        index=number,
        params=params,
        weights=torch.zeros(1),
        score=score,
    )


def score_pair(plan: ScorePlan, *, runs: int, seed: int, inside: bool) -> Floats:
    """Return noised sums of a score, projected on one record's contribution, with or without it.

    Of the noised sums it is the part along what the record adds: nothing else tells it.

    Args:
        plan: The score's.
        runs: How many scores.
        seed: Their noise derives from it.
        inside: Whether the record is among the two, or the one beside it is alone.
    """
    release = _score_release(plan.metric, plan.options.get("bound", 1.0))
    exact = replace(plan, noise_multiplier=None)
    with_record = release(exact, 2, np.random.default_rng(0))
    without_record = release(exact, 1, np.random.default_rng(0))
    added = with_record - without_record
    count = 2 if inside else 1
    values = []
    for secret in secrets_of(seed, f"score/{inside}", runs):
        rng = Streams(secret).numpy("score", 0)
        values.append(release(plan, count, rng) @ added)
    return np.array(values)


def _score_release(
    metric: str, bound: float
) -> Callable[[ScorePlan, int, np.random.Generator], Floats]:
    """Return a function that releases the noised sums of a score on copies of one record.

    Args:
        metric: A record is right where it is the accuracy, and wrong where it is the loss.
        bound: On a record's loss.
    """
    from privtune.training.mechanism.data import TensorData
    from privtune.training.mechanism.scoring import cross_entropy, released_sums

    sign = 1.0 if metric == "accuracy" else -1.0
    model = torch.nn.Linear(1, 2, bias=False)
    weight = torch.tensor([[-sign], [sign]])
    with torch.no_grad():
        model.weight.copy_(weight)
    loud = max(50.0, 2.0 * bound)  # a loss above the bound

    def release(plan: ScorePlan, count: int, rng: np.random.Generator) -> Floats:
        features = torch.full((count, 1), loud)
        labels = torch.ones(count, dtype=torch.long)
        data = TensorData(features, labels, sealed_size=True)
        released = released_sums(plan, model, data, rng, cross_entropy)
        if released is None:
            raise RuntimeError("a model of an audit is not finite")
        return released[0]

    return release
