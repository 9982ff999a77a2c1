"""The record of an arm for a tracker: names, parameters, metrics, notes, documents.

Everything here is a function of a plan, a release and the public part of the ledger. It never sees
a trial, so it cannot show one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from privtune.accounting.registry import formula
from privtune.files import json_lines
from privtune.ledger import Charge, Ledger, export_certificate
from privtune.ledger.wording import PromiseWording
from privtune.numbers import ceil_to, floor_to, show_epsilon
from privtune.plots.style import looks_of
from privtune.prose import capitalise
from privtune.strategies import Ending
from privtune.strategies.plan import epsilon_spent
from privtune.strategies.spread import Spread, values_of
from privtune.study.arm_row import ArmRow
from privtune.study.observer import ArmStatus
from privtune.tasks import PRECISION, PRETRAINED, TRAINED
from privtune.training.mechanism.metric_name import MetricName
from privtune.views.arm import LEDGER_TABLE, ArmRecord, Point, Sample
from privtune.views.headline import headline
from privtune.views.templating import render
from privtune.views.text import (
    budget_line,
    charged_repetitions,
    chosen_line,
    declared_sentences,
    stage_line,
    together,
    weakened,
)

if TYPE_CHECKING:
    from privtune.accounting import Guarantee
    from privtune.strategies import Plan, Release, TrialResult
    from privtune.study import Study
    from privtune.study.observer import Arms
    from privtune.training.mechanism.estimates import ScoreEstimate

CURVE_NAMES = {"learning_rate": "lr", "max_grad_norm": "clip", "val_accuracy": "acc/val"}
"""Short names of curves: MLflow cuts its columns at about thirteen characters."""

_SHORT = {"accuracy": "acc", "balanced_accuracy": "bal_acc"}

MACHINE = "machine.json"
"""The file beside an arm's release that keeps system metrics until they are logged."""

SWITCH = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"  # MLflow's own
SEALED_STATE = (
    "off: they would show how long a selection took, and so how many candidates it trained"
)
UNWATCHED_STATE = (
    "off: they would show how many records there are, or how many candidates an earlier selection trained; "
    f"{SWITCH}=true logs them for the arms before the first selection"
)


@dataclass(frozen=True)
class BudgetView:
    """The public state of a study's budget at one moment, without the times of charges.

    Args:
        charges: All of the budget, also those of other studies.
        spent: What they cost together.
        left: ε that the filter still grants.
        certificate: The budget's.
        ledger: The charges in the form of MLflow's table artifacts, from :func:`ledger_table`.
    """

    charges: tuple[Charge, ...]
    spent: Guarantee
    left: float
    certificate: Mapping[str, Any]
    ledger: Mapping[str, Any]

    @cached_property
    def section(self) -> Markup:
        """The sections on the charges and on how to check them, as HTML: the same on all arms' pages."""
        html = render("charges.html", ledger=self.ledger, certificate=self.certificate)
        return Markup(html)  # noqa: S704 (a template escaped it)

    @cached_property
    def documents(self) -> Mapping[str, str]:
        """The artifacts that all arms share, as JSON text by path."""
        return {
            LEDGER_TABLE: json_lines(self.ledger),
            "certificate.json": json_lines(self.certificate),
        }


def budget_view(study: Study) -> BudgetView:
    """Read the public state of a study's budget.

    All of it at once: numbers of one page that were read at different moments contradict each other.
    """
    name = study.spec.budget.name
    with Ledger(study.storage) as ledger:
        charges = tuple(ledger.charges(name))
        return BudgetView(
            charges=charges,
            spent=ledger.spent(name),
            left=ledger.remaining(name),
            certificate=export_certificate(ledger.log.storage, name),
            ledger=ledger_table(charges, study),
        )


def arm_record(study: Study, plan: Plan, release: Release, view: BudgetView) -> ArmRecord:
    """Build the record of one arm for a tracker, from its release and the state of the budget.

    Args:
        study: The arm's.
        plan: The arm's.
        release: What the arm released.
        view: From :func:`budget_view`.

    Returns:
        All that a tracker's run of the arm holds. Trials are in it only where all are released.
    """
    budget = study.spec.budget
    one_run = budget.guarantee_of(plan.training.event).epsilon
    status = ArmStatus(plan, release.guarantee, "settled", release)
    row = ArmRow.of(status)
    system_metrics, samples = _machine(study, plan)
    params = _params(study, plan, release)
    note = _arm_note(study, plan, release, view, one_run)
    numbers = {
        "ε of this arm alone": show_epsilon(release.guarantee.epsilon, 4),
        "ε of the budget, all charges together": show_epsilon(view.spent.epsilon, 4),
        "ε of one training (not the promise)": show_epsilon(one_run, 4),
    }
    page = render(
        "arm.html",
        title=f"{plan.arm}: privacy report",
        arm=plan.arm,
        note=[line.replace("**", "") for line in note.splitlines() if line],
        numbers={**numbers, **params},
        charges=view.section,
    )
    arms = [other.arm for other in study.plans]
    look = looks_of(study.plans)[plan.arm]
    colour = {"mlflow.runColor": look.colour}
    children: tuple[ArmRecord, ...] = ()
    if not plan.is_sealed:
        children = tuple(_child(plan, trial, colour) for trial in release.trials)
    budget_metrics = {
        "eps/one_run": ceil_to(one_run, 4),
        "eps/budget": ceil_to(view.spent.epsilon, 4),
        "eps/left": floor_to(view.left, 4),
    }
    return ArmRecord(
        arm=plan.arm,
        digest=plan.digest(),
        tags={
            **_tags(study, plan, release),
            **row.to_tags(),
            **colour,
            "privtune.system_metrics": system_metrics,
        },
        params=params,
        points=_points(study, plan, release, row, budget_metrics),
        note=note,
        number=arms.index(plan.arm),
        samples=samples,
        documents={
            **view.documents,
            "privacy/event.json": json_lines(plan.charged.to_dict()),
            "privacy/guarantee.json": json_lines(release.guarantee.to_dict()),
        },
        report=page,
        model=study.model_path(plan.arm),
        children=children,
    )


def _points(
    study: Study,
    plan: Plan,
    release: Release,
    row: ArmRow,
    budget_metrics: Mapping[str, float],
) -> tuple[Point, ...]:
    """Return an arm's metrics as points, with upper bounds rounded up and what is left rounded down.

    Args:
        study: The arm's.
        plan: The arm's: curves of a sealed one, and ε by step, stay behind.
        release: What the arm released.
        row: The arm's row of the comparison.
        budget_metrics: Rounded values about the budget, by name.
    """
    budget = study.spec.budget
    values = {
        **row.to_metrics(),
        **budget_metrics,
        **_scores(release.estimates),
        **_scores(release.choice, curves=release.curves),
    }
    points = _at_first_step(values)
    points += _repetitions(release)
    if not plan.is_sealed:
        points += _curves(release.curves)
    if not plan.is_sealed and plan.is_private:
        curve = epsilon_spent(plan, delta=budget.delta, adjacency=budget.adjacency)
        for step, value in curve:
            points.append(("eps/arm_steps", ceil_to(value, 4), step))
    # MLflow stores infinity as 1.8e308, which reads like a number: it is never logged.
    return tuple(point for point in points if math.isfinite(point[1]))


def _at_first_step(values: Mapping[str, float]) -> list[Point]:
    """Return metrics as points at step 0: trackers show a single point as a number, not as a curve."""
    return [(name, value, 0) for name, value in values.items()]


def _repetitions(release: Release) -> list[Point]:
    """Return a repeated arm's means and standard errors, and each metric with a step a repetition.

    Empty of one draw. Standard errors have one digit more than means: they are smaller.
    """
    if not release.repetitions:
        return []
    points: list[Point] = [("repeats", len(release.repetitions), 0)]
    for name, row in values_of(release).items():
        short = short_name(MetricName.parse(name))
        for repetition, value in enumerate(row):
            if value is not None:
                points.append((f"{short}_each", round(value, 4), repetition))
        spread = Spread.of(row)
        if spread is None:
            continue
        points.append((f"{short}_mean", round(spread.mean, 4), 0))
        if spread.error is not None:
            points.append((f"{short}_se", round(spread.error, 5), 0))
    return points


def _machine(study: Study, plan: Plan) -> tuple[str, tuple[Sample, ...]]:
    """Return a text on how an arm's machine was watched, and the samples that were kept.

    Of a sealed arm there are none, whatever lies in the folder: how long a selection took tells how
    many trials it had.
    """
    path = study.folder / plan.arm / MACHINE
    if plan.is_sealed:
        return SEALED_STATE, ()
    if not path.exists():
        return UNWATCHED_STATE, ()
    text = path.read_text(encoding="utf-8")
    record = json.loads(text)
    samples = tuple((seconds, values) for seconds, values in record["samples"])
    return record["state"], samples


def ledger_table(charges: Sequence[Charge], study: Study) -> dict[str, Any]:
    """Return the charges of a budget in the form of MLflow's table artifacts.

    ε is that of each charge alone: such numbers do not add up to that of all together.
    """
    budget = study.spec.budget
    rows = []
    for charge in charges:
        alone = budget.guarantee_of(charge.event)
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


def study_note(study: Study, view: BudgetView, arms: Arms) -> str:
    """Return the experiment's note: MLflow shows its first two lines and folds the rest.

    Args:
        study: The study.
        view: From :func:`budget_view`.
        arms: The states of its arms.
    """
    answer = headline(study, arms)
    # MLflow breaks lines where the note does: a blank one would push the command below the fold.
    return render(
        "study.md",
        answer=answer.answer,
        use=answer.use,
        advice=answer.advice,
        budget=budget_line(study.spec.budget, view.spent, view.left),
        together=together(view.spent),
        caveat=PromiseWording(study.spec.budget.unit).caveat,
        weakened=weakened(study),
    )


def short_name(name: MetricName) -> str:
    """Return the short name of a metric on a split.

    Example:
        >>> short_name(MetricName("test", "accuracy")), short_name(MetricName("validation", "loss"))
        ('acc/test', 'loss/val')
        >>> short_name(MetricName("tuning", "accuracy"))  # of another model than the released one
        'acc/tuning'
    """
    short_metric = _SHORT.get(name.metric, name.metric)
    short_split = "val" if name.split == "validation" else name.split
    return f"{short_metric}/{short_split}"


def _child(plan: Plan, trial: TrialResult, colour: Mapping[str, str]) -> ArmRecord:
    """Return the record of one trial, for an arm whose trials are all released."""
    tags = {
        "privtune.kind": "trial",
        "privtune.strategy": plan.strategy,
        **colour,
    }
    if trial.ended is not Ending.TRAINED:
        tags["privtune.ended"] = str(trial.ended)
    points = _trial_points(plan, trial)
    points += _curves(trial.curves)
    return ArmRecord(
        arm=f"{plan.arm}/{trial.index}",
        digest=f"{plan.digest()}/{trial.index}",
        tags=tags,
        params={name: str(value) for name, value in trial.params.items()},
        points=tuple(points),
        note=f"Trial {trial.index} of {plan.arm}. This arm releases every trial, and each one was charged.",
    )


def _trial_points(plan: Plan, trial: TrialResult) -> list[Point]:
    """Return a trial's score with the ends of its interval, and its ε if it has one, as points at step 0."""
    values: dict[str, float] = {}
    own_epsilon = plan.trial_epsilon
    if own_epsilon is not None:
        values["eps/trial"] = ceil_to(own_epsilon, 4)
    name = plan.score_name
    if name is not None and trial.estimate is not None:
        values |= _scores({str(name): trial.estimate}, curves=trial.curves)
    return _at_first_step(values)


def _scores(
    scores: Mapping[str, ScoreEstimate], *, curves: Mapping[str, object] | None = None
) -> dict[str, float]:
    """Return scores and interval ends by short name; of a score with a useless interval, only its ends.

    A value whose curve is logged is left out: it would stand at the curve's first step.
    """
    curve_names = {CURVE_NAMES.get(name, name) for name in curves or ()}
    values = {}
    for name, score in scores.items():
        short = short_name(MetricName.parse(name))
        if score.is_informative and short not in curve_names:
            values[short] = round(score.value, 4)
        values |= {
            f"{short}_low": round(score.low, 4),
            f"{short}_high": round(score.high, 4),
        }
    return values


def _curves(curves: Mapping[str, Sequence[float]]) -> list[Point]:
    """Return the finite values of curves by short name, with their steps."""
    points = []
    for name, curve in curves.items():
        short = CURVE_NAMES.get(name, name)
        for step, value in enumerate(curve):
            if math.isfinite(value):
                points.append((short, value, step))
    return points


def _tags(study: Study, plan: Plan, release: Release) -> dict[str, str]:
    """Return an arm's tags: short texts about it, those that apply."""
    budget = study.spec.budget
    facts = plan.public_facts
    machine = dict(release.machine)  # not this machine, where a worker trained
    device = machine.pop("device", "")
    is_private = math.isfinite(release.guarantee.epsilon)
    temperature = ""
    if release.temperature is not None:
        temperature = f"{release.temperature:.4g}"
    tags = {
        "privtune.kind": "arm",
        "privtune.study": study.name,
        "privtune.adjacency": str(budget.adjacency),
        "privtune.unit": plan.unit,
        "privtune.budget": budget.name,
        "privtune.dataset": study.dataset or f"the data of budget {budget.name}",
        "privtune.dataset_read": str(study.spec.dataset_of(plan.dataset)),
        "privtune.repetitions": charged_repetitions(plan),
        "privtune.device": device,
        "privtune.versions": ", ".join(f"{name} {value}" for name, value in machine.items()),
        "privtune.not_private": "" if is_private else "no guarantee: ε is infinite",
        "privtune.weakened": weakened(study),
        "privtune.checked": release.checked,
        "privtune.temperature": temperature,
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
    """Return an arm's parameters as texts: its options, what follows from them, and its released values."""
    training = plan.training_of(release.params)
    method = training.to_dict()["method"]
    params: dict[str, Any] = {}
    for name, value in method.items():
        if name != "name":
            params[f"method.{name}"] = value
    for name, value in _options(study, plan.arm).items():
        params[f"option.{name}"] = value
    groups = {
        "law": plan.runs,
        "score": plan.score,
        "report": plan.report,
    }
    for kind, terms in groups.items():
        if terms is None:
            continue
        for name, value in terms.to_dict().items():
            params[f"{kind}.{name}"] = value
    if plan.search is not None:
        params["trials"] = plan.search.trials
    params["tuning_rate"] = plan.rate
    for stage in study.stages:
        params[f"stage.{stage.plan.arm}"] = stage.plan.stage.to_dict()
    for name, value in plan.details.items():
        if isinstance(value, str | int | float):
            params[f"plan.{name}"] = value
    for name, value in release.params.items():
        params[name] = str(value)
    params |= {
        "strategy": plan.strategy,
        "delta": f"{release.guarantee.delta:g}",
        "method": str(method["name"]),
        "noise_multiplier": str(method.get("noise_multiplier") or ""),
        "sample_rate": f"{training.schedule.sample_rate:.6g}",
        "steps": str(training.schedule.steps),
    }
    return _as_texts(params)


def _options(study: Study, name: str) -> Mapping[str, Any]:
    """Return the options of an arm of a spec; an open study's arms have none.

    Args:
        study: The arm's.
        name: The arm's.
    """
    for arm in study.spec.arms:
        if arm.name == name:
            return arm.model_extra or {}
    return {}


def _as_texts(params: Mapping[str, Any]) -> dict[str, str]:
    """Return parameters as texts, without those that are None or empty."""
    texts = {}
    for name, value in params.items():
        if value is None:
            continue
        text = value
        if not isinstance(value, str):
            # A mapping in the order of its names, so that arms alike read alike.
            text = json.dumps(value, sort_keys=True, default=str)
        if text:
            texts[name] = text
    return texts


def _arm_note(study: Study, plan: Plan, release: Release, view: BudgetView, one_run: float) -> str:
    """Return the note of an arm's run: its budget first, then sentences about its ε."""
    budget = study.spec.budget
    notes = [chosen_line(budget, release.guarantee, view.spent)]
    notes += declared_sentences([plan])
    if release.checked:
        sentence = capitalise(release.checked)
        notes.append(f"{sentence}.")
    notes += filter(None, (release.note, charged_repetitions(plan)))
    notes += map(stage_line, study.stages)
    return render(
        "arm.md",
        budget=budget_line(budget, view.spent, view.left),
        caveat=PromiseWording(budget.unit).short_caveat,
        plan=plan,
        guarantee=release.guarantee,
        total=release.guarantee.epsilon,
        one_run=one_run,
        delta=f"{budget.delta:g}",
        notes=notes,
    )
