"""One audit: what is asked of a plan, in which order, and what it found."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from privtune.accounting import Adjacency, Event, NonPrivate, ThresholdSelection
from privtune.accounting import epsilon as account
from privtune.accounting import lower_bound as instance
from privtune.audit import laws
from privtune.audit.bounds import Claim, Floats, lower_bound, one_run_bound
from privtune.audit.canaries import (
    Canary,
    canaries,
    hyperparameters,
    run_declared,
    secrets_of,
    train_canaries,
)
from privtune.audit.selections import InstanceClaim, rounds_of, worst_score, worst_threshold
from privtune.errors import InvalidInputError
from privtune.strategies import Plan, Strategy, TrainingPlan
from privtune.tasks import Task
from privtune.training.methods.declared import Declared

_SCORES = 2000
_MANY = 2000  # canaries of the one run
_FEWEST = 100
_FREE = 0.1  # of what may go wrong with a row, for each bound beside its closest, by profile

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many runs of it are done, and how many there are."""


@dataclass(frozen=True)
class Audited:
    """One audited event: the bounds that were found, and what is reported of it.

    Args:
        name: What was run, in words.
        event: What it is charged as.
        epsilon: The largest of the bounds: with the audit's confidence not above what is true.
        bounds: The single bounds by name, of which each has its share of what may go wrong.
        lower: What the worst mechanism with this event costs.
        reported: What the account says of it.
        runs: Runs on both sides.
        seconds: How long it took.
    """

    name: str
    event: Event
    epsilon: float
    bounds: dict[str, float]
    lower: float
    reported: float
    runs: int
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether the lower bounds found are at most the reported ε."""
        return self.epsilon <= self.reported


@dataclass(frozen=True)
class AuditReport:
    """What an audit of an arm found. Made-up records only: nothing of it is private.

    Args:
        arm: The arm.
        plan: Digest of its plan.
        delta: The δ of every ε here.
        adjacency: The relation of neighbours.
        confidence: Of each row's bound.
        seed: Everything drawn derives from it.
        published: The ε that the arm's budget promises; None outside of a study.
        rows: By mechanism, its bounds.
        checks: The laws that were checked.
        untouched: What the audit says nothing about, in words.
    """

    arm: str
    plan: str
    delta: float
    adjacency: Adjacency
    confidence: float
    seed: int
    published: float | None
    rows: tuple[Audited, ...]
    checks: tuple[laws.Check, ...]
    untouched: tuple[str, ...] = field(default=())

    @property
    def passed(self) -> bool:
        """Whether nothing speaks against what is reported."""
        return all(row.passed for row in self.rows) and all(c.passed for c in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return the report, ready for JSON."""
        return {
            "arm": self.arm,
            "plan": self.plan,
            "delta": self.delta,
            "adjacency": str(self.adjacency),
            "confidence": self.confidence,
            "seed": self.seed,
            "passed": self.passed,
            "published": self.published,
            "rows": [
                {
                    "mechanism": row.name,
                    "event": row.event.to_dict(),
                    "audited": row.epsilon,
                    "bounds": row.bounds,
                    "lower": row.lower,
                    "reported": row.reported,
                    "runs": row.runs,
                    "seconds": round(row.seconds, 1),
                    "passed": row.passed,
                }
                for row in self.rows
            ],
            "checks": [
                {"law": c.name, "p_value": c.p_value, "seen": c.seen, "passed": c.passed}
                for c in self.checks
            ],
            "untouched": list(self.untouched),
        }


def estimate(plan: Plan, *, runs: int) -> int:
    """Return how many trainings an audit runs in expectation: what it costs.

    Args:
        plan: The arm's plan.
        runs: Runs on each side.

    Example:
        >>> estimate(study.plans[0], runs=1000), estimate(study.plans[1], runs=1000)
        (2001, 10001)
    """
    sealed = plan.runs is not None and plan.search is not None
    rounds = 2.0 * runs * plan.expected_runs if sealed else 0.0
    return round(2 * runs + 1 + rounds)


def audit(
    plan: Plan,
    *,
    delta: float,
    strategy: Strategy | None = None,
    adjacency: Adjacency = Adjacency.ADD_REMOVE,
    published: float | None = None,
    task: Task | None = None,
    canary: Canary | None = None,
    runs: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
    progress: Progress = lambda *_: None,
) -> AuditReport:
    """Bound from below, by experiment, what an arm's ε is as it runs here.

    Canaries are trained in place of records, by the engine, the strategy and the rows of rounds that
    train models: no data is touched, and no budget is spent.

    Args:
        plan: The arm's plan.
        delta: The budget's δ.
        strategy: What made the plan; a sealed selection is audited as a whole with it alone.
        adjacency: The budget's relation of neighbours.
        published: What the budget promises.
        task: Trains the task's own model beside the canary, on records of its shapes; without it,
            the canary's parameter alone, which is much faster.
        canary: For a declared mechanism: trains as the objective does, on made-up records, with a canary
            or without it, and returns a number of its release that tells the two apart.
        runs: Runs on each side, at least 100; the more, the closer the bounds.
        confidence: Of each row's bound, in (0, 1).
        seed: Everything drawn derives from it: an audit can be repeated.
        progress: Told of what is done.

    Returns:
        What was found.

    Raises:
        InvalidInputError: If an argument is outside its domain, or the arm has no guarantee.

    **Guarantee**: if the package does what its account says, a row's ``epsilon`` is above
    ``reported`` with a probability of ``1 - confidence`` at most, over the seed.

    Example:
        >>> report = audit(study.plans[0], delta=1e-5, runs=100)
        >>> report.passed, [row.name for row in report.rows]
        (True, ['one training'])

    References:
        Steinke, Nasr, Jagielski, arXiv:2305.08846; Nasr et al., arXiv:2302.07956; Mahloujifar,
        Melis, Chaudhuri, arXiv:2410.22235.
    """
    terms = _Terms(delta, adjacency, runs, confidence, seed, progress)
    first = plan.first_training
    declared = isinstance(first.method, Declared)
    _check(plan, terms, canary, declared=declared)
    untouched: list[str] = []
    checks: list[laws.Check] = []
    if canary is not None:
        rows = [_declared(first, plan, terms, canary)]
        untouched.append("the choice among trainings of a declared mechanism: by the account alone")
    else:
        row, releases = _training(first, plan, terms, task)
        rows = [row]
        checks += [
            *releases,
            *laws.check_sampler(first.schedule, seed=seed),
            *laws.check_noise(first.noise, seed=seed),
        ]
    if plan.runs is not None and strategy is not None and not declared:
        checks += laws.check_runs(plan.runs, seed=seed)
        checks += laws.check_rounds(plan, strategy, seed=seed)
        rows.append(_selection(plan, strategy, terms))
    elif plan.search is not None and not declared:
        untouched.append(
            "how the arm's trainings add up: that is composition, by the account alone"
        )
    if plan.score is not None and plan.score.event is not None:
        if plan.score.metric in ("accuracy", "loss"):
            rows.append(_score(plan, terms))
        else:
            untouched.append(f"scores by {plan.score.metric}")
    return AuditReport(
        plan.arm,
        plan.digest(),
        delta,
        adjacency,
        confidence,
        seed,
        published,
        tuple(rows),
        tuple(checks),
        (*untouched, "floating-point numbers below the precision of a release (docs/noise.md)"),
    )


def _check(plan: Plan, terms: _Terms, canary: Canary | None, *, declared: bool) -> None:
    """Refuse what cannot be audited."""
    if isinstance(plan.event, NonPrivate):
        raise InvalidInputError("plan", plan.arm, "has no guarantee that could be audited")
    if terms.runs < _FEWEST:
        raise InvalidInputError("runs", terms.runs, f"must be at least {_FEWEST}")
    if not 0.0 < terms.confidence < 1.0:
        raise InvalidInputError("confidence", terms.confidence, "must be between 0 and 1")
    if not 0 <= terms.seed < 2**63:
        raise InvalidInputError("seed", terms.seed, "must be a whole number from 0 to 2^63 - 1")
    if declared is not (canary is not None):
        raise InvalidInputError(
            "canary",
            canary,
            "is for a declared mechanism, of which nothing else can train one",
            "Give a function (trial, inside) that trains as the objective does, on made-up records.",
        )


@dataclass(frozen=True)
class _Terms:
    delta: float
    adjacency: Adjacency
    runs: int
    confidence: float
    seed: int
    progress: Progress

    def claim(self, event: Event) -> Claim:
        return Claim(event, self.delta, self.adjacency)

    def bounds(
        self, name: str, sides: Sequence[Floats], claim: Claim, tight: float, held_out: float = 0.1
    ) -> dict[str, float]:
        """Return a free bound, and one by profile, with its share of what may go wrong with a row."""
        # The claim's own test may miss what is far from it: part of the share is for a held-out one.
        tests = [(tight, held_out)] if held_out else [(tight - _FREE, 0.0), (_FREE, 0.1)]
        free, *by_claim = (
            lower_bound(*sides, delta=self.delta, confidence=sure, held_out=kept, claim=of).epsilon
            for part, kept, of in [(_FREE, 0.25, None), *((*test, claim) for test in tests)]
            for sure in [self.share(part)]
        )
        return {name: free, f"{name}, by its profile": max(by_claim)}

    def share(self, part: float) -> float:
        """Return the confidence of one of a row's bounds: the largest counts, so they share."""
        return 1.0 - (1.0 - self.confidence) * part

    def told(self, what: str, total: int) -> Callable[[int], None]:
        done = 0

        def tell(count: int) -> None:
            nonlocal done
            done += count
            self.progress(what, done, total)

        return tell

    def row(
        self, name: str, event: Event, bounds: dict[str, float], runs: int, started: float
    ) -> Audited:
        return Audited(
            name,
            event,
            max(bounds.values()),
            bounds,
            instance(event, self.delta, adjacency=self.adjacency),
            account(event, self.delta, adjacency=self.adjacency).epsilon,
            runs,
            time.perf_counter() - started,
        )


def _training(
    training: TrainingPlan, plan: Plan, terms: _Terms, task: Task | None
) -> tuple[Audited, list[laws.Check]]:
    """Audit one training: every step shown, the model alone, and many canaries in one run."""
    started = time.perf_counter()
    method, replaced = training.method, terms.adjacency is Adjacency.REPLACE_ONE
    candidate = hyperparameters(method, plan.params)
    tell = terms.told("one training", 2 * terms.runs)
    common: dict[str, Any] = {"noise": training.noise, "replaced": replaced}
    dimension = getattr(method, "dimension", None)
    if dimension is not None:
        task = None  # its noise is for so many parameters: the canaries' are some of them
    many = _MANY if dimension is None else min(_MANY, dimension)
    out, canary = (
        train_canaries(
            method,
            training.schedule,
            candidate,
            secrets_of(terms.seed, f"training/{sign}", terms.runs),
            data=canaries([sign], task=task),
            task=task,
            progress=tell,
            **common,
        )
        for sign in (-1.0 if replaced else 0.0, 1.0)
    )
    claim = terms.claim(training.event)
    inside = np.random.default_rng(terms.seed).random(many) < 0.5
    signs = np.where(inside, 1.0, -1.0 if replaced else 0.0)
    [secret] = secrets_of(terms.seed, "one run", 1)
    one = train_canaries(
        method,
        training.schedule,
        candidate,
        [secret],
        data=canaries(signs.tolist()),
        columns=many,
        **common,
    )
    split = one.ratio[~inside], one.ratio[inside]
    sure = terms.share(_FREE)
    guessed = [
        one_run_bound(*split, delta=terms.delta, confidence=sure, claim=of).epsilon
        for of in (None, claim)
    ]
    bounds = {
        **terms.bounds("all steps shown", (out.ratio, canary.ratio), claim, 1 - 5 * _FREE, 0.0),
        **terms.bounds("the model alone", (out.model, canary.model), claim, _FREE),
        "one run": guessed[0],
        "one run, by its profile": guessed[1],
    }
    row = terms.row("one training", training.event, bounds, 2 * terms.runs, started)
    return row, [] if replaced else [*laws.check_releases(out.releases)]


def _declared(first: TrainingPlan, plan: Plan, terms: _Terms, canary: Canary) -> Audited:
    """Audit one training of a declared mechanism by what it releases."""
    started = time.perf_counter()
    tell = terms.told("one declared training", 2 * terms.runs)
    asked: dict[str, Any] = {"runs": terms.runs, "seed": terms.seed, "progress": tell}
    sides = [run_declared(plan, first, canary, inside=side, **asked) for side in (False, True)]
    bounds = terms.bounds("the release", sides, terms.claim(first.event), 1.0 - _FREE)
    return terms.row("one declared training", first.event, bounds, 2 * terms.runs, started)


def _selection(plan: Plan, strategy: Strategy, terms: _Terms) -> Audited:
    """Audit a whole round of a sealed selection, scored by what is worst for it."""
    started = time.perf_counter()
    assert plan.search is not None  # noqa: S101 (it is a selection)
    assert plan.runs is not None  # noqa: S101
    claim, base = terms.claim(plan.event), plan.search.trainings[0].event
    stop = plan.event.stop if isinstance(plan.event, ThresholdSelection) else None
    if stop is not None:
        score = worst_threshold(base, stop, claim=claim, rounds=terms.runs)
    else:  # of subsampled tuning, the score that tells most of its selection
        chosen = getattr(plan.event, "tuning", plan.event)
        score = worst_score(base, plan.runs, claim=terms.claim(chosen), rounds=terms.runs)
    asked: dict[str, Any] = {"rounds": terms.runs, "seed": terms.seed, "adjacency": terms.adjacency}
    tell = terms.told("whole rounds", 2 * terms.runs)
    sides = [
        rounds_of(plan, strategy, score, inside=inside, progress=tell, **asked)
        for inside in (False, True)
    ]
    one = terms.adjacency is Adjacency.ADD_REMOVE and InstanceClaim.fits(base)
    one = one and plan.rate is None and stop is None
    bounds = terms.bounds("all released", sides, claim, _FREE if one else 1.0 - _FREE)
    if one:  # of all that may be tested, the one mechanism that was run
        known = InstanceClaim(plan.event, terms.delta, base=base, score=score)
        sure = terms.share(1.0 - 2.0 * _FREE)
        found = lower_bound(*sides, delta=terms.delta, confidence=sure, held_out=0.0, claim=known)
        bounds["all released, by its instance"] = found.epsilon
    return terms.row("the whole selection", plan.event, bounds, 2 * terms.runs, started)


def _score(plan: Plan, terms: _Terms) -> Audited:
    """Audit one noised score, by a validation record that changes the metric as much as one can."""
    started = time.perf_counter()
    assert plan.score is not None  # noqa: S101 (there is one)
    assert plan.score.event is not None  # noqa: S101
    runs = min(_SCORES, terms.runs)
    sides = [
        laws.score_pair(plan.score, runs=runs, seed=terms.seed, inside=side)
        for side in (False, True)
    ]
    bounds = terms.bounds("one score", sides, terms.claim(plan.score.event), 1.0 - _FREE)
    return terms.row("one score", plan.score.event, bounds, 2 * runs, started)
