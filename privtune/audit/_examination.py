"""Run an audit of a plan: its trainings, selection and score against canaries, and its checks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from privtune.accounting import Adjacency, Event, NonPrivate, ThresholdSelection
from privtune.accounting import epsilon as account
from privtune.accounting import lower_bound as instance
from privtune.audit import machinery_laws
from privtune.audit.bounds import Claim, Floats, lower_bound, one_run_bound
from privtune.audit.canaries import (
    Canary,
    canaries,
    hyperparameters,
    run_declared,
    secrets_of,
    train_canaries,
)
from privtune.audit.searches import searches_of
from privtune.audit.selections import (
    InstanceClaim,
    WorstScore,
    rounds_of,
    worst_score,
    worst_threshold,
)
from privtune.errors import InvalidInputError
from privtune.strategies import Plan, Strategy, TrainingPlan
from privtune.tasks import Task
from privtune.training.methods.declared_mechanism import DeclaredMethod

_SCORES = 2000  # on each side, at most: the bound is close by then
_MANY = 2000  # canaries of the one run
_FEWEST = 100  # runs on each side: fewer cannot refute anything at 95% confidence
_FREE = 0.1  # of what may go wrong with a row, for each bound beside its closest, by profile

_SidesOfRuns = tuple[Floats, Floats]  # a statistic without the canary, and with it, one value a run

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many runs of it are done, and how many there are."""


@dataclass(frozen=True)
class AuditRow:
    """One audited event: the lower bounds that were found on its ε, and the reported ε.

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
        """Whether the largest lower bound found is at most the reported ε."""
        return self.epsilon <= self.reported


@dataclass(frozen=True)
class AuditReport:
    """The results of an audit of an arm, none of them private, as all records are made up.

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
    rows: tuple[AuditRow, ...]
    checks: tuple[machinery_laws.LawCheck, ...]
    untouched: tuple[str, ...] = field(default=())

    @property
    def passed(self) -> bool:
        """Whether all rows and all checks of the audit passed."""
        rows_pass = all(row.passed for row in self.rows)
        checks_pass = all(check.passed for check in self.checks)
        return rows_pass and checks_pass

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-ready data."""
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
                {
                    "law": check.name,
                    "p_value": check.p_value,
                    "seen": check.seen,
                    "passed": check.passed,
                }
                for check in self.checks
            ],
            "untouched": list(self.untouched),
        }


def estimate(plan: Plan, *, runs: int) -> int:
    """Return the expected number of trainings that an audit of a plan runs.

    Args:
        plan: The arm's plan.
        runs: Runs on each side.

    Example:
        >>> estimate(study.plans[0], runs=1000), estimate(study.plans[1], runs=1000)
        (2001, 10001)
    """
    trainings = 2.0 * runs + 1.0  # those of one canary, and the run of many
    if plan.runs is not None and plan.search is not None:
        trainings += 2.0 * runs * plan.expected_runs
    elif _is_on_part(plan):
        trainings += 2.0 * runs * (_trials_of(plan) + 1)
    return round(trainings)


def _is_on_part(plan: Plan) -> bool:
    """Return whether an arm shows its trials, all of one part of the records, and trains once more."""
    return plan.runs is None and plan.rate is not None and _trials_of(plan) > 0


def _trials_of(plan: Plan) -> int:
    """Return how many trials are shown."""
    if plan.search is None:
        return 0
    return plan.search.trials or 0


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
    """Audit an arm: bound its ε from below by experiments with canaries, on this installation.

    Canaries are trained in place of records, by the engine, the strategy and the rows of rounds that
    train models: no data is touched, and no budget is spent.

    Args:
        plan: The arm's plan.
        delta: The budget's δ.
        strategy: What made the plan; a sealed selection, and a search on a part of the records, are audited
            as a whole with it alone.
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
    terms = _AuditTerms(delta, adjacency, runs, confidence, seed, progress)
    training = plan.first_training
    is_declared = isinstance(training.method, DeclaredMethod)
    _check_arguments(plan, terms, canary, is_declared=is_declared)
    untouched: list[str] = []
    checks: list[machinery_laws.LawCheck] = []
    rows: list[AuditRow] = []
    if canary is not None:
        rows.append(_audit_declared(training, plan, terms, canary))
        untouched.append("the choice among trainings of a declared mechanism: by the account alone")
    else:
        row, release_checks = _audit_training(training, plan, terms, task)
        rows.append(row)
        checks += release_checks
        checks += machinery_laws.check_sampler(training.schedule, seed=seed)
        checks += machinery_laws.check_noise(training.noise, seed=seed)
    if plan.runs is not None and strategy is not None and not is_declared:
        checks += machinery_laws.check_runs(plan.runs, seed=seed)
        checks += machinery_laws.check_rounds(plan, strategy, seed=seed)
        rows.append(_audit_selection(plan, strategy, terms))
    elif _is_on_part(plan) and strategy is not None and not is_declared:
        rows.append(_audit_search(plan, strategy, terms))
    elif plan.search is not None and not is_declared:
        untouched.append(
            "how the arm's trainings add up: that is composition, by the account alone"
        )
    if plan.score is not None and plan.score.event is not None:
        if plan.score.metric in ("accuracy", "loss"):
            rows.append(_audit_score(plan, terms))
        else:
            untouched.append(f"scores by {plan.score.metric}")
    untouched.append("floating-point numbers below the precision of a release (docs/noise.md)")
    return AuditReport(
        arm=plan.arm,
        plan=plan.digest(),
        delta=delta,
        adjacency=adjacency,
        confidence=confidence,
        seed=seed,
        published=published,
        rows=tuple(rows),
        checks=tuple(checks),
        untouched=tuple(untouched),
    )


def _check_arguments(
    plan: Plan,
    terms: _AuditTerms,
    canary: Canary | None,
    *,
    is_declared: bool,
) -> None:
    """Refuse a plan without a guarantee, and arguments outside their ranges."""
    if isinstance(plan.event, NonPrivate):
        raise InvalidInputError("plan", plan.arm, "has no guarantee that could be audited")
    if terms.runs < _FEWEST:
        raise InvalidInputError("runs", terms.runs, f"must be at least {_FEWEST}")
    if not 0.0 < terms.confidence < 1.0:
        raise InvalidInputError("confidence", terms.confidence, "must be between 0 and 1")
    if not 0 <= terms.seed < 2**63:
        raise InvalidInputError("seed", terms.seed, "must be a whole number from 0 to 2^63 - 1")
    if is_declared is not (canary is not None):
        raise InvalidInputError(
            "canary",
            canary,
            "is for a declared mechanism, of which nothing else can train one",
            "Give a function (trial, inside) that trains as the objective does, on made-up records.",
        )


@dataclass(frozen=True)
class _AuditTerms:
    """The arguments of :func:`audit` that apply to all of its rows."""

    delta: float
    adjacency: Adjacency
    runs: int
    confidence: float
    seed: int
    progress: Progress

    @property
    def is_replaced(self) -> bool:
        """Whether another record takes the canary's place when it is absent."""
        return self.adjacency is Adjacency.REPLACE_ONE

    @property
    def absent_sign(self) -> float:
        """The sign of the gradient of what replaces an absent canary; 0 for no record."""
        return -1.0 if self.is_replaced else 0.0

    def claim(self, event: Event) -> Claim:
        """Return the claim to test: an event's privacy profile, at the audit's δ and adjacency."""
        return Claim(event, self.delta, self.adjacency)

    def bounds(
        self,
        name: str,
        sides: _SidesOfRuns,
        claim: Claim,
        part: float,
        *,
        is_ratio: bool = False,
    ) -> dict[str, float]:
        """Return two lower bounds on ε: one without assumptions, one by contradiction to a claimed profile.

        Args:
            name: What was looked at, in words.
            sides: A statistic of runs without the canary, and with it.
            claim: What is charged.
            part: Of what may go wrong with a row, for the bound by profile.
            is_ratio: Whether the statistic is the claim's own log-likelihood ratio, whose best test
                is known in advance.
        """
        free = self.bound(sides, _FREE, held_out=0.25)
        if is_ratio:
            # The claim's own test may miss what is far from it: part of the share is for a held-out one.
            by_claim = max(
                self.bound(sides, part - _FREE, held_out=0.0, claim=claim),
                self.bound(sides, _FREE, held_out=0.1, claim=claim),
            )
        else:
            by_claim = self.bound(sides, part, held_out=0.1, claim=claim)
        return {name: free, f"{name}, by its profile": by_claim}

    def bound(
        self,
        sides: _SidesOfRuns,
        part: float,
        *,
        held_out: float,
        claim: Claim | None = None,
    ) -> float:
        """Return a lower bound on ε that is wrong with at most `part` of a row's risk."""
        without, canary = sides
        answer = lower_bound(
            without,
            canary,
            delta=self.delta,
            confidence=self.share(part),
            held_out=held_out,
            claim=claim,
        )
        return answer.epsilon

    def share(self, part: float) -> float:
        """Return the confidence of a bound that may use only `part` of a row's risk."""
        return 1.0 - (1.0 - self.confidence) * part

    def sides(self, what: str, run: Callable[..., Floats]) -> _SidesOfRuns:
        """Return a statistic of runs without the canary, and with it, and report the progress.

        Args:
            what: What is run, in words.
            run: Returns one value a run; it takes the seed, whether the canary is inside, and the progress.
        """
        total = 2 * self.runs
        count_runs = self.counter(what, total)
        run_side = partial(
            run,
            seed=self.seed,
            progress=count_runs,
        )
        without = run_side(inside=False)
        canary = run_side(inside=True)
        return without, canary

    def counter(self, what: str, total: int) -> Callable[[int], None]:
        """Return a function that takes numbers of finished runs and reports the total progress."""
        runs = 0

        def count_runs(count: int) -> None:
            nonlocal runs
            runs += count
            self.progress(what, runs, total)

        return count_runs

    def row(
        self,
        name: str,
        event: Event,
        bounds: dict[str, float],
        runs: int,
        started: float,
    ) -> AuditRow:
        """Return the row of one mechanism, timed from ``started``, a ``perf_counter`` value."""
        guarantee = account(event, self.delta, adjacency=self.adjacency)
        return AuditRow(
            name=name,
            event=event,
            epsilon=max(bounds.values()),
            bounds=bounds,
            lower=instance(event, self.delta, adjacency=self.adjacency),
            reported=guarantee.epsilon,
            runs=runs,
            seconds=time.perf_counter() - started,
        )


def _audit_training(
    training: TrainingPlan,
    plan: Plan,
    terms: _AuditTerms,
    task: Task | None,
) -> tuple[AuditRow, list[machinery_laws.LawCheck]]:
    """Audit one training by all of its steps, by its model, and by many canaries in one run."""
    started = time.perf_counter()
    if getattr(training.method, "dimension", None) is not None:
        task = None  # its noise is for so many parameters: the canaries' are some of them
    count_runs = terms.counter("one training", 2 * terms.runs)
    evidence = []
    for sign in (terms.absent_sign, 1.0):
        one_side = train_canaries(
            training.method,
            training.schedule,
            hyperparameters(training.method, plan.params),
            secrets_of(terms.seed, f"training/{sign}", terms.runs),
            data=canaries([sign], task=task),
            task=task,
            replaced=terms.is_replaced,
            noise=training.noise,
            progress=count_runs,
        )
        evidence.append(one_side)
    without, canary = evidence
    claim = terms.claim(training.event)
    ratios = (without.ratio, canary.ratio)
    models = (without.model, canary.model)
    bounds = {
        **terms.bounds(
            "all steps shown",
            ratios,
            claim,
            1 - 5 * _FREE,
            is_ratio=True,
        ),
        **terms.bounds("the model alone", models, claim, _FREE),
        **_bounds_of_one_run(training, plan, terms, claim),
    }
    row = terms.row(
        "one training",
        training.event,
        bounds,
        2 * terms.runs,
        started,
    )
    if terms.is_replaced:
        return row, []  # its releases are noise around the other record
    return row, list(machinery_laws.check_releases(without.releases))


def _bounds_of_one_run(
    training: TrainingPlan,
    plan: Plan,
    terms: _AuditTerms,
    claim: Claim,
) -> dict[str, float]:
    """Return two lower bounds on ε, by name, from one training on many random canaries."""
    count = _MANY
    dimension = getattr(training.method, "dimension", None)
    if dimension is not None:
        count = min(_MANY, dimension)
    inside = np.random.default_rng(terms.seed).random(count) < 0.5
    signs = np.where(inside, 1.0, terms.absent_sign)
    evidence = train_canaries(
        training.method,
        training.schedule,
        hyperparameters(training.method, plan.params),
        secrets_of(terms.seed, "one run", 1),
        data=canaries(signs.tolist()),
        columns=count,
        replaced=terms.is_replaced,
        noise=training.noise,
    )
    bounds = {}
    for name, profile in (("one run", None), ("one run, by its profile", claim)):
        answer = one_run_bound(
            evidence.ratio[~inside],
            evidence.ratio[inside],
            delta=terms.delta,
            confidence=terms.share(_FREE),
            claim=profile,
        )
        bounds[name] = answer.epsilon
    return bounds


def _audit_declared(
    training: TrainingPlan,
    plan: Plan,
    terms: _AuditTerms,
    canary: Canary,
) -> AuditRow:
    """Audit one training of a declared mechanism by the numbers that it releases."""
    started = time.perf_counter()
    run = partial(run_declared, plan, training, canary, runs=terms.runs)
    sides = terms.sides("one declared training", run)
    claim = terms.claim(training.event)
    part = 1.0 - _FREE
    bounds = terms.bounds(
        "the release",
        sides,
        claim,
        part,
    )
    return terms.row(
        "one declared training",
        training.event,
        bounds,
        2 * terms.runs,
        started,
    )


def _audit_selection(plan: Plan, strategy: Strategy, terms: _AuditTerms) -> AuditRow:
    """Audit whole rounds of a sealed selection, with the score that a canary changes most."""
    started = time.perf_counter()
    assert plan.search is not None  # noqa: S101 (it is a selection)
    base = plan.search.trainings[0].event
    score = _score_of_selection(plan, base, terms)
    run = partial(
        rounds_of,
        plan,
        strategy,
        score,
        rounds=terms.runs,
        adjacency=terms.adjacency,
    )
    sides = terms.sides("whole rounds", run)
    has_instance = (
        terms.adjacency is Adjacency.ADD_REMOVE
        and InstanceClaim.fits(base)
        and plan.rate is None
        and not isinstance(plan.event, ThresholdSelection)
    )
    part = _FREE if has_instance else 1.0 - _FREE
    bounds = terms.bounds("all released", sides, terms.claim(plan.event), part)
    if has_instance:  # of all that may be tested, the one mechanism that was run
        claim = InstanceClaim(plan.event, terms.delta, base=base, score=score)
        epsilon = terms.bound(sides, 1.0 - 2.0 * _FREE, held_out=0.0, claim=claim)
        bounds["all released, by its instance"] = epsilon
    return terms.row(
        "the whole selection",
        plan.event,
        bounds,
        2 * terms.runs,
        started,
    )


def _audit_search(plan: Plan, strategy: Strategy, terms: _AuditTerms) -> AuditRow:
    """Audit whole searches: all of their shown trials on one part of the records, and the last training."""
    started = time.perf_counter()
    run = partial(searches_of, plan, strategy, searches=terms.runs)
    sides = terms.sides("whole searches", run)
    claim = terms.claim(plan.event)
    part = 1.0 - _FREE
    bounds = terms.bounds(
        "all shown",
        sides,
        claim,
        part,
    )
    return terms.row(
        "the whole search",
        plan.event,
        bounds,
        2 * terms.runs,
        started,
    )


def _score_of_selection(plan: Plan, base: Event, terms: _AuditTerms) -> WorstScore:
    """Return the score of trainings for which a selection's releases reveal most."""
    assert plan.runs is not None  # noqa: S101 (it is a selection)
    if isinstance(plan.event, ThresholdSelection):
        claim = terms.claim(plan.event)
        return worst_threshold(base, plan.event.stop, claim=claim, rounds=terms.runs)
    # Of subsampled tuning, the score that tells most of its selection.
    selection = getattr(plan.event, "tuning", plan.event)
    return worst_score(
        base,
        plan.runs,
        claim=terms.claim(selection),
        rounds=terms.runs,
    )


def _audit_score(plan: Plan, terms: _AuditTerms) -> AuditRow:
    """Audit one noised score by a validation record that changes the metric as much as possible."""
    started = time.perf_counter()
    assert plan.score is not None  # noqa: S101 (there is one)
    event = plan.score.event
    assert event is not None  # noqa: S101
    runs = min(_SCORES, terms.runs)
    without = machinery_laws.score_pair(
        plan.score,
        runs=runs,
        seed=terms.seed,
        inside=False,
    )
    canary = machinery_laws.score_pair(
        plan.score,
        runs=runs,
        seed=terms.seed,
        inside=True,
    )
    claim = terms.claim(event)
    bounds = terms.bounds("one score", (without, canary), claim, 1.0 - _FREE)
    return terms.row("one score", event, bounds, 2 * runs, started)
