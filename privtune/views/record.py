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
from privtune.numbers import ceil_to, floor_to, show_epsilon
from privtune.strategies import validation_metric
from privtune.strategies.plan import epsilon_spent
from privtune.tasks import PRECISION, PRETRAINED, TRAINED, declared_note
from privtune.views.text import (
    budget_line,
    metric_of,
    stage_line,
    together,
    weakened,
)

if TYPE_CHECKING:
    from privtune.accounting import Guarantee
    from privtune.strategies import Plan, Release, TrialResult
    from privtune.study import Study

CURVE_NAMES = {"learning_rate": "lr", "max_grad_norm": "clip", "val_accuracy": "acc/val"}
"""Short names of curves: MLflow cuts its columns at about thirteen characters."""

_SHORT = {"accuracy": "acc", "balanced_accuracy": "bal_acc"}

LEDGER_TABLE = "privacy/ledger.json"

Point = tuple[str, float, int]


@dataclass(frozen=True)
class BudgetView:
    """The public state of a study's budget at one moment.

    Args:
        charges: Every charge of the budget, other studies' included; times stay behind.
        spent: Their composition.
        left: The ε left.
        certificate: The ledger's own certificate.
    """

    charges: tuple[Charge, ...]
    spent: Guarantee
    left: float
    certificate: Mapping[str, Any]


@dataclass(frozen=True)
class ArmRecord:
    """What a tracker's run of one arm holds.

    Args:
        arm: Name of the arm; the run's name.
        digest: Digest of its plan; the run's identity.
        sealed: Whether its trials are sealed.
        seconds: Measured time; 0 for a private arm, whose run must not have a length.
        tags: Short texts.
        params: Parameters, written once.
        points: Metrics as (name, value, step), finite values only.
        note: Markdown; the first line is the budget.
        documents: JSON artifacts by path.
        children: One record a trial, where every trial is paid for; else empty.
    """

    arm: str
    digest: str
    sealed: bool
    seconds: float
    tags: Mapping[str, str]
    params: Mapping[str, str]
    points: tuple[Point, ...]
    note: str
    documents: Mapping[str, Any] = field(default_factory=dict)
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
    """Build what is logged of one arm.

    Args:
        study: The study.
        plan: The arm's plan.
        release: Its release.
        view: The budget's state.
    """
    budget = study.spec.budget
    one_run = epsilon(plan.training.event, budget.delta, adjacency=budget.adjacency).epsilon
    # Rounded to what a column shows: upper bounds up, what is left down.
    values = {
        "eps/total": ceil_to(release.guarantee.epsilon, 4),
        "eps/one_run": ceil_to(one_run, 4),
        "eps/left": floor_to(view.left, 4),
        **{short_name(name): _rounded(value, 4) for name, value in release.utility.items()},
        **_ends(plan, release),
        **_score(plan, release, of=plan.scored),
        "cost/gradient_evaluations": _rounded(release.cost.gradient_evaluations, 0),
        "cost/wall_seconds": _rounded(release.cost.wall_seconds, 1),
    }
    # MLflow stores infinity as 1.8e308, which reads like a number: it is never logged.
    points: list[Point] = [
        (name, value, 0)
        for name, value in values.items()
        if value is not None and math.isfinite(value)
    ]
    if not plan.is_sealed:
        points += _curves(release.curves)
    if not plan.is_sealed and plan.is_private:
        points += [
            ("eps/spent", ceil_to(value, 4), step)
            for step, value in epsilon_spent(
                plan.training, delta=budget.delta, adjacency=budget.adjacency
            )
            if math.isfinite(value)
        ]
    return ArmRecord(
        arm=plan.arm,
        digest=plan.digest(),
        sealed=plan.is_sealed,
        seconds=0.0 if release.cost.expected else release.cost.wall_seconds or 0.0,
        tags=_tags(study, plan, release),
        params=_params(study, plan, release),
        points=tuple(points),
        note=_arm_note(study, plan, release, view, one_run),
        documents={
            LEDGER_TABLE: ledger_table(view.charges, study),
            "privacy/event.json": plan.event.to_dict(),
            "privacy/guarantee.json": release.guarantee.to_dict(),
            "certificate.json": view.certificate,
        },
        children=() if plan.is_sealed else tuple(_child(plan, t) for t in release.trials),
    )


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
    lines = [
        budget_line(study.spec.budget, view.spent, view.left) + ".",
        "",
        f"All charges together, {together(view.spent)}.",
        "",
        "Only releases are shown here. Trials of sealed arms, their number and their times stay in "
        "the curator's database. Anybody with access can edit this page; the record is the ledger, "
        "and `certificate.json` of every run can be checked alone.",
    ]
    if said := weakened(study):
        lines += ["", f"**{said}**"]
    return "\n".join(lines)


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


def _ends(plan: Plan, release: Release) -> dict[str, float | None]:
    """Return the ends of intervals that were paid for; those on a public split are a plot's."""
    if plan.report is None:
        return {}
    return {
        f"{short_name(name)}_{end}": _rounded(value, 4)
        for name, ends in release.intervals.items()
        for end, value in zip(("low", "high"), ends, strict=True)
    }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, digits)


def _child(plan: Plan, trial: TrialResult) -> ArmRecord:
    return ArmRecord(
        arm=f"{plan.arm}/{trial.index}",
        digest=f"{plan.digest()}/{trial.index}",
        sealed=False,
        seconds=0.0,
        tags={
            "privtune.kind": "trial",
            "privtune.strategy": plan.strategy,
            **({"privtune.failed": trial.failed} if trial.failed else {}),
        },
        params={name: str(value) for name, value in trial.params.items()},
        points=(*((n, v, 0) for n, v in _score(plan, trial).items()), *_curves(trial.curves)),
        note=f"Trial {trial.index} of {plan.arm}: every trial of this arm is paid for.",
    )


def _score(
    plan: Plan, result: Release | TrialResult, *, of: str = "validation"
) -> dict[str, float]:
    """Return the score, unless there is a curve of it: it would stand at the curve's first step."""
    return {
        short_name(name): round(value, 4)
        for name, value in validation_metric(plan.score, result.score, of=of).items()
        if not (name == "validation_accuracy" and "val_accuracy" in result.curves)
    }


def _curves(curves: Mapping[str, Sequence[float]]) -> list[Point]:
    return [
        (CURVE_NAMES.get(name, name), value, step)
        for name, curve in curves.items()
        for step, value in enumerate(curve)
        if math.isfinite(value)
    ]


def _tags(study: Study, plan: Plan, release: Release) -> dict[str, str]:
    budget = study.spec.budget
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
        "privtune.cost": "expected" if release.cost.expected else "measured",
        **_machine(release),
        **_stages(study),
        "privtune.visibility": "sealed trials, winner only" if plan.is_sealed else "everything",
    }
    if not math.isfinite(release.guarantee.epsilon):
        tags["privtune.not_private"] = "no guarantee: ε is infinite"
    if said := weakened(study):
        tags["privtune.weakened"] = said
    if release.checked:
        tags["privtune.checked"] = release.checked
    facts = plan.public_facts
    tuned = {
        "privtune.pretrained": PRETRAINED,
        "privtune.trainable": TRAINED,
        "privtune.precision": PRECISION,
    }
    return {**tags, **{tag: facts[fact] for tag, fact in tuned.items() if fact in facts}}


def _stages(study: Study) -> dict[str, str]:
    """Return what was released before the arms, a tag each: what it was, and what it cost."""
    lines = {f"privtune.stage.{stage.plan.arm}": stage_line(stage) for stage in study.stages}
    # A tracker's tags are short: of many columns the report has all.
    return {tag: shorten(line, _LONGEST, placeholder=" ...") for tag, line in lines.items()}


def _machine(release: Release) -> dict[str, str]:
    """Return what computed the release: its device, and the versions there, which may not be those here."""
    found = dict(release.machine)
    device = found.pop("device", "")
    versions = ", ".join(f"{name} {value}" for name, value in found.items())
    tags = {"privtune.device": device, "privtune.versions": versions}
    return {name: text for name, text in tags.items() if text}


_LONGEST = 1000  # of a tag


def _options(study: Study, plan: Plan) -> dict[str, str]:
    """Return what an arm was told, and what follows: no two arms that differ log the same."""
    told = {arm.name: arm.model_extra or {} for arm in study.spec.arms}.get(plan.arm, {})
    laws = {"law": plan.runs, "score": plan.score, "report": plan.report}
    found = {
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
    }
    return {name: _text(value) for name, value in found.items() if value is not None}


def _text(value: Any) -> str:
    """Return an option as text: a mapping in the order of its names."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _params(study: Study, plan: Plan, release: Release) -> dict[str, str]:
    training = plan.training_of(release.params)
    method = training.to_dict()["method"]
    params = {
        **{f"method.{name}": _text(value) for name, value in method.items() if name != "name"},
        **_options(study, plan),
        **{name: str(value) for name, value in release.params.items()},
        "strategy": plan.strategy,
        "delta": f"{release.guarantee.delta:g}",
        "method": str(method["name"]),
        "noise_multiplier": str(method.get("noise_multiplier") or ""),
        "sample_rate": f"{training.schedule.sample_rate:.6g}",
        "steps": str(training.schedule.steps),
    }
    return {name: value for name, value in params.items() if value}


def _arm_note(study: Study, plan: Plan, release: Release, view: BudgetView, one_run: float) -> str:
    budget = study.spec.budget
    total = release.guarantee.epsilon
    lines = [
        budget_line(budget, view.spent, view.left) + ".",
        "",
        f"**{plan.arm}** ({plan.strategy}) took ε = {show_epsilon(total, 4)} at δ = "
        f"{budget.delta:g}, {budget.adjacency}, by {release.guarantee.method}.",
    ]
    if total > one_run:
        lines.append(
            f"A script that reports the ε of its last training would say {show_epsilon(one_run, 4)}; "
            "choosing among trainings is what the rest pays for."
        )
    declared = "; ".join(filter(None, (declared_note(plan.public_facts), release.checked)))
    for line in filter(None, (declared and f"{declared[:1].upper()}{declared[1:]}.", release.note)):
        lines += ["", line]
    for stage in study.stages:
        lines += ["", stage_line(stage)]
    lines += [
        "",
        "Released: " + "; ".join(plan.released) + ".",
        "",
        "Sealed: " + "; ".join(plan.sealed) + ".",
    ]
    if release.cost.expected:
        lines += [
            "",
            "Costs are the plan's expectations: what an arm really took would tell how many records "
            "there are, and of a sealed round its secret number of runs.",
        ]
    return "\n".join(lines)
