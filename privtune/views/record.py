"""What a tracker is told about an arm: names, parameters, metrics, notes, documents.

Everything here is a function of a plan, a release and the public part of the ledger. It never sees
a trial, so it cannot show one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from privtune.accounting import epsilon
from privtune.accounting.registry import formula
from privtune.ledger import Charge, Ledger, export_certificate
from privtune.ledger.wording import PromiseWording
from privtune.numbers import ceil_to, floor_to, show_epsilon
from privtune.plots._style import looks
from privtune.strategies import Ending
from privtune.strategies.plan import epsilon_spent
from privtune.strategies.spread import Spread, values_of
from privtune.tasks import PRECISION, PRETRAINED, TRAINED
from privtune.tasks._facts import declared_note
from privtune.training.mechanism.metrics import label
from privtune.views.page import render
from privtune.views.text import (
    budget_line,
    charged_repetitions,
    draws,
    metric_of,
    stage_line,
    together,
    weakened,
)

if TYPE_CHECKING:
    from pathlib import Path

    from privtune.accounting import Guarantee
    from privtune.strategies import Plan, Release, TrialResult
    from privtune.study import Study
    from privtune.training.mechanism.estimates import ScoreEstimate

CURVE_NAMES = {"learning_rate": "lr", "max_grad_norm": "clip", "val_accuracy": "acc/val"}
"""Short names of curves: MLflow cuts its columns at about thirteen characters."""

_SHORT = {"accuracy": "acc", "balanced_accuracy": "bal_acc"}

LEDGER_TABLE = "privacy/ledger.json"

Point = tuple[str, float, int]
Sample = tuple[float, dict[str, float]]

MACHINE = "machine.json"
"""The file beside an arm's release that keeps system metrics until they are logged."""

SWITCH = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"  # MLflow's own
SEALED_STATE = "off: they would show how long a sealed round took"
UNWATCHED_STATE = (
    "off: they tell how many records there are, or how large a sealed round before them was; "
    f"{SWITCH}=true logs them for arms that are not sealed, before the first sealed one"
)


@dataclass(frozen=True)
class BudgetView:
    """The public state of a study's budget at one moment; times of charges stay behind."""

    charges: tuple[Charge, ...]
    spent: Guarantee
    left: float
    certificate: Mapping[str, Any]


@dataclass(frozen=True)
class ArmRecord:
    """What a tracker's run of one arm holds, all of it.

    Args:
        arm: Name of the arm; the run's name.
        digest: Digest of its plan; the run's identity.
        tags: Short texts.
        params: Parameters, written once.
        points: Metrics as (name, value, step), finite values only.
        note: Markdown; the first line is the budget.
        number: The arm's place in its study.
        seconds: Measured time; 0 for a private arm, whose run must not have a length.
        samples: System metrics as (seconds since the start, values).
        documents: JSON artifacts by path.
        report: The arm's page.
        model: The released model's file.
        children: One record a trial, where every trial is paid for; else empty.
    """

    arm: str
    digest: str
    tags: Mapping[str, str]
    params: Mapping[str, str]
    points: tuple[Point, ...]
    note: str
    number: int = 0
    seconds: float = 0.0
    samples: tuple[Sample, ...] = ()
    documents: Mapping[str, Any] = field(default_factory=dict)
    report: str = ""
    model: Path | None = None
    children: tuple[ArmRecord, ...] = ()


def budget_view(study: Study) -> BudgetView:
    """Read the public state of a study's budget."""
    name = study.spec.budget.name
    with Ledger(study.storage) as ledger:
        return BudgetView(
            charges=tuple(ledger.charges(name)),
            spent=ledger.spent(name),
            left=ledger.remaining(name),
            certificate=export_certificate(ledger.log.storage, name),
        )


def arm_record(study: Study, plan: Plan, release: Release, view: BudgetView) -> ArmRecord:
    """Build what is logged of one arm."""
    budget = study.spec.budget
    one_run = epsilon(plan.training.event, budget.delta, adjacency=budget.adjacency).epsilon
    watched, samples = _machine(study, plan)
    params = _params(study, plan, release)
    note = _arm_note(study, plan, release, view, one_run)
    ledger = ledger_table(view.charges, study)
    numbers = {"ε of the procedure": release.guarantee.epsilon}
    numbers["ε of one training (not the promise)"] = one_run
    page = render(
        "arm.html",
        title=f"{plan.arm}: privacy report",
        arm=plan.arm,
        note=[line.replace("**", "") for line in note.splitlines() if line],
        numbers={name: show_epsilon(value, 4) for name, value in numbers.items()} | params,
        ledger=ledger,
        certificate=view.certificate,
    )
    arms = [each.arm for each in study.plans]
    colour = {"mlflow.runColor": looks(arms)[plan.arm].colour}
    return ArmRecord(
        arm=plan.arm,
        digest=plan.digest(),
        tags={**_tags(study, plan, release), **colour, "privtune.system_metrics": watched},
        params=params,
        points=_points(study, plan, release, {"eps/one_run": one_run, "eps/left": view.left}),
        note=note,
        number=arms.index(plan.arm),
        seconds=0.0 if release.cost.expected else release.cost.wall_seconds or 0.0,
        samples=samples,
        documents={
            LEDGER_TABLE: ledger,
            "privacy/event.json": plan.charged.to_dict(),
            "privacy/guarantee.json": release.guarantee.to_dict(),
            "certificate.json": view.certificate,
        },
        report=page,
        model=study.model_path(plan.arm),
        children=() if plan.is_sealed else tuple(_child(plan, t, colour) for t in release.trials),
    )


def _points(
    study: Study, plan: Plan, release: Release, known: Mapping[str, float]
) -> tuple[Point, ...]:
    """Return an arm's metrics; upper bounds are rounded up to what a column shows, what is left down."""
    budget, cost = study.spec.budget, release.cost
    values = {
        "eps/total": ceil_to(release.guarantee.epsilon, 4),
        "eps/one_run": ceil_to(known["eps/one_run"], 4),
        "eps/left": floor_to(known["eps/left"], 4),
        **_scores(release.estimates),
        **_scores(release.choice, curves=release.curves),
        "cost/gradients": round(cost.gradient_evaluations, 0),
        # Three digits: a tenth of a second would be 0.0 for a small study.
        "cost/seconds": None if cost.wall_seconds is None else float(f"{cost.wall_seconds:.3g}"),
    }
    points = [(name, value, 0) for name, value in values.items() if value is not None]
    points += _repetitions(release)
    if not plan.is_sealed:
        points += _curves(release.curves)
    if not plan.is_sealed and plan.is_private:
        terms: dict[str, Any] = {"delta": budget.delta, "adjacency": budget.adjacency}
        spent = epsilon_spent(plan, **terms)
        points += [("eps/spent", ceil_to(value, 4), step) for step, value in spent]
    # MLflow stores infinity as 1.8e308, which reads like a number: it is never logged.
    return tuple(point for point in points if math.isfinite(point[1]))


def _repetitions(release: Release) -> list[Point]:
    """Return means and standard errors of a repeated arm, and each metric with a step a repetition."""
    if not release.repetitions:
        return []
    points: list[Point] = [("repeats", len(release.repetitions), 0)]
    for name, row in values_of(release).items():
        short, spread = short_name(name), Spread.of(row)
        points += [(f"{short}_each", round(v, 4), i) for i, v in enumerate(row) if v is not None]
        if spread is not None:
            points.append((f"{short}_mean", round(spread.mean, 4), 0))
        if spread is not None and spread.error is not None:
            points.append((f"{short}_se", round(spread.error, 5), 0))
    return points


def _machine(study: Study, plan: Plan) -> tuple[str, tuple[Sample, ...]]:
    """Return what is said of an arm's system metrics, and the samples that were kept of it."""
    path = study.folder / plan.arm / MACHINE
    if plan.is_sealed or not path.exists():
        return SEALED_STATE if plan.is_sealed else UNWATCHED_STATE, ()
    kept = json.loads(path.read_text(encoding="utf-8"))
    return kept["state"], tuple((seconds, values) for seconds, values in kept["samples"])


def ledger_table(charges: Sequence[Charge], study: Study) -> dict[str, Any]:
    """Return the charges of a budget in the form of MLflow's table artifacts."""
    budget = study.spec.budget
    rows = []
    for charge in charges:
        alone = epsilon(charge.event, budget.delta, adjacency=budget.adjacency)
        rows.append(
            [
                charge.id,
                charge.study,
                charge.arm,
                str(charge.state),
                show_epsilon(alone.epsilon, 4),
                alone.method,
                formula(charge.event),
                charge.note,
            ]
        )
    columns = ["charge", "study", "arm", "state", "ε alone", "bound", "event", "note"]
    return {"columns": columns, "data": rows}


def study_note(study: Study, view: BudgetView) -> str:
    """Return the experiment's note: MLflow shows its first line and folds the rest."""
    return render(
        "study.md",
        budget=budget_line(study.spec.budget, view.spent, view.left),
        together=together(view.spent),
        caveat=PromiseWording(study.spec.budget.unit).caveat,
        weakened=weakened(study),
    )


def short_name(name: str) -> str:
    """Return the short name of a metric on a split.

    Example:
        >>> short_name("test_accuracy"), short_name("validation_loss"), short_name("test_auc")
        ('acc/test', 'loss/val', 'auc/test')
        >>> short_name("tuning_accuracy")  # of another model than the released one
        'acc/tuning'
    """
    metric = metric_of(name)
    split = name.removesuffix(f"_{metric}")
    return f"{_SHORT.get(metric, metric)}/{'val' if split == 'validation' else split}"


def _child(plan: Plan, trial: TrialResult, colour: Mapping[str, str]) -> ArmRecord:
    return ArmRecord(
        arm=f"{plan.arm}/{trial.index}",
        digest=f"{plan.digest()}/{trial.index}",
        tags={
            "privtune.kind": "trial",
            "privtune.strategy": plan.strategy,
            **colour,
            **({} if trial.ended is Ending.TRAINED else {"privtune.ended": str(trial.ended)}),
        },
        params={name: str(value) for name, value in trial.params.items()},
        points=(*_trial_points(plan, trial), *_curves(trial.curves)),
        note=f"Trial {trial.index} of {plan.arm}: every trial of this arm is paid for.",
    )


def _trial_points(plan: Plan, trial: TrialResult) -> list[Point]:
    """Return a trial's score with the ends of its interval."""
    if plan.score is None or trial.estimate is None:
        return []
    name = f"{plan.scored}_{label(plan.score.metric)}"
    return [
        (short, value, 0)
        for short, value in _scores({name: trial.estimate}, curves=trial.curves).items()
    ]


def _scores(
    scores: Mapping[str, ScoreEstimate], *, curves: Mapping[str, object] | None = None
) -> dict[str, float]:
    """Return scores by short name with the ends of their intervals; of no information the ends alone.

    A value whose curve is logged is left out: it would stand at the curve's first step.
    """
    drawn = {CURVE_NAMES.get(name, name) for name in curves or ()}
    values = {}
    for name, score in scores.items():
        short = short_name(name)
        if score.is_informative and short not in drawn:
            values[short] = round(score.value, 4)
        values[f"{short}_low"] = round(score.low, 4)
        values[f"{short}_high"] = round(score.high, 4)
    return values


def _curves(curves: Mapping[str, Sequence[float]]) -> list[Point]:
    return [
        (CURVE_NAMES.get(name, name), value, step)
        for name, curve in curves.items()
        for step, value in enumerate(curve)
        if math.isfinite(value)
    ]


def _tags(study: Study, plan: Plan, release: Release) -> dict[str, str]:
    budget, facts = study.spec.budget, plan.public_facts
    computed = dict(release.machine)  # not this machine, where a worker trained
    tags = {
        "privtune.kind": "arm",
        "privtune.study": study.name,
        "privtune.strategy": plan.strategy,
        "privtune.adjacency": str(budget.adjacency),
        "privtune.unit": plan.unit,
        "privtune.budget": budget.name,
        "privtune.dataset": study.spec.task_name,
        "privtune.delta": f"{budget.delta:g}",
        "privtune.bound": release.guarantee.method,
        "privtune.draws": draws(release),
        "privtune.repetitions": charged_repetitions(plan),
        "privtune.cost": "expected" if release.cost.expected else "measured",
        "privtune.device": computed.pop("device", ""),
        "privtune.versions": ", ".join(f"{name} {value}" for name, value in computed.items()),
        "privtune.visibility": "sealed trials, winner only" if plan.is_sealed else "everything",
        "privtune.not_private": ""
        if math.isfinite(release.guarantee.epsilon)
        else "no guarantee: ε is infinite",
        "privtune.weakened": weakened(study),
        "privtune.checked": release.checked,
        "privtune.pretrained": facts.get(PRETRAINED, ""),
        "privtune.trainable": facts.get(TRAINED, ""),
        "privtune.precision": facts.get(PRECISION, ""),
    }
    for stage in study.stages:
        # A tracker's tags are short: of many columns the report has all.
        line = shorten(stage_line(stage), 1000, placeholder=" ...")
        tags[f"privtune.stage.{stage.plan.arm}"] = line
    return {name: text for name, text in tags.items() if text}


def _params(study: Study, plan: Plan, release: Release) -> dict[str, str]:
    """Return what an arm was told, what follows, and what was released: arms that differ log differently."""
    told = {arm.name: arm.model_extra or {} for arm in study.spec.arms}.get(plan.arm, {})
    training = plan.training_of(release.params)
    method = training.to_dict()["method"]
    laws = {"law": plan.runs, "score": plan.score, "report": plan.report}
    params = {
        **{f"method.{name}": value for name, value in method.items() if name != "name"},
        **{f"option.{name}": value for name, value in told.items()},
        **{
            f"{what}.{name}": value
            for what, terms in laws.items()
            if terms is not None
            for name, value in terms.to_dict().items()
        },
        "trials": None if plan.search is None else plan.search.trials,
        "tuning_rate": plan.rate,
        **{f"stage.{stage.plan.arm}": stage.plan.stage.to_dict() for stage in study.stages},
        **{f"plan.{k}": v for k, v in plan.details.items() if isinstance(v, str | int | float)},
        **{name: str(value) for name, value in release.params.items()},
        "strategy": plan.strategy,
        "delta": f"{release.guarantee.delta:g}",
        "method": str(method["name"]),
        "noise_multiplier": str(method.get("noise_multiplier") or ""),
        "sample_rate": f"{training.schedule.sample_rate:.6g}",
        "steps": str(training.schedule.steps),
    }
    # A mapping in the order of its names, so that arms alike read alike.
    texts = {
        name: value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
        for name, value in params.items()
        if value is not None
    }
    return {name: text for name, text in texts.items() if text}


def _arm_note(study: Study, plan: Plan, release: Release, view: BudgetView, one_run: float) -> str:
    declared = "; ".join(filter(None, (declared_note(plan.public_facts), release.checked)))
    notes = [f"{declared[:1].upper()}{declared[1:]}." if declared else "", release.note]
    return render(
        "arm.md",
        budget=budget_line(study.spec.budget, view.spent, view.left),
        caveat=PromiseWording(study.spec.budget.unit).short_caveat,
        plan=plan,
        guarantee=release.guarantee,
        total=release.guarantee.epsilon,
        one_run=one_run,
        delta=f"{study.spec.budget.delta:g}",
        notes=[
            *filter(None, (*notes, charged_repetitions(plan))),
            *(stage_line(stage) for stage in study.stages),
        ],
        expected=release.cost.expected,
    )
