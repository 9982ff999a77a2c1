"""Results as bytes, and releases: from a strategy's outcome to what is stored, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from privtune.accounting import Adjacency, Guarantee
from privtune.errors import PrivTuneError
from privtune.spaces import with_tuples
from privtune.strategies import (
    Cost,
    Ending,
    Outcome,
    Plan,
    Release,
    Repetition,
    Scoring,
    TrialResult,
)
from privtune.strategies.release import split
from privtune.study.trials import INDEX
from privtune.training.mechanism.estimates import ScoreEstimate
from privtune.training.mechanism.metrics import label, lower_is_better

if TYPE_CHECKING:
    import numpy as np
    from optuna.trial import FrozenTrial
    from torch import nn

    from privtune.strategies import ScorePlan
    from privtune.study.rows import Results
    from privtune.tasks import Task
    from privtune.training.mechanism.data import TensorData

MODEL = "model.safetensors"
"""Name of the released model in its arm's folder."""

_TRIALS = "trials/"


class ReleaseError(PrivTuneError):
    """A rehearsal's release differs from what is read back from its file."""


def pack_result(
    result: TrialResult, *, certificate: Mapping[str, Any] | None = None, request: str = ""
) -> bytes:
    """Return a result as the content of a safetensors file."""
    from safetensors.torch import save

    document = {
        "index": result.index,
        "params": dict(result.params),
        "score": None if result.score is None else repr(result.score),
        "estimate": None if result.estimate is None else result.estimate.to_dict(),
        "curves": {name: list(values) for name, values in result.curves.items()},
        "transcript_digest": result.transcript_digest,
        "ended": result.ended,
        "unusable": result.unusable,
        "checked": result.checked,
        "shapes": {name: list(shape) for name, shape in result.shapes.items()},
    }
    metadata = {"result": json.dumps(document)}
    if certificate is not None:
        metadata["privtune"] = json.dumps(certificate)
    if request:
        metadata["request"] = request
    tensors = split(result.weights, result.shapes) or {"weights": result.weights}
    return save({name: t.contiguous() for name, t in tensors.items()}, metadata=metadata)


def unpack_result(content: bytes) -> TrialResult:
    """Return what :func:`pack_result` packed."""
    header = _header(content)
    metadata = header.get("__metadata__", {})
    if "result" not in metadata:
        raise PrivTuneError("A stored model is not a trial's result: the store was edited.")
    document = json.loads(metadata["result"])
    document["params"] = {name: with_tuples(v) for name, v in document["params"].items()}
    # A parameter of a model may be called "weights", too.
    named = document["shapes"] and document["shapes"].keys() <= header.keys()
    names = list(document["shapes"]) if named else ["weights"]
    score = document.pop("score")
    estimate = document.pop("estimate")
    ended = Ending(document.pop("ended"))

    def weights() -> Any:
        import torch
        from safetensors.torch import load

        tensors = load(content)
        return torch.cat([tensors[name].reshape(-1) for name in names])

    return TrialResult(
        weights=weights,
        score=None if score is None else float(score),
        estimate=None if estimate is None else ScoreEstimate.from_dict(estimate),
        ended=ended,
        **document,
    )


def request_of(content: bytes) -> str:
    """Return the request stored with a packed result; empty for a row of a round."""
    return str(_header(content).get("__metadata__", {}).get("request", ""))


def _header(content: bytes) -> Any:
    # JSON, after its length: https://github.com/huggingface/safetensors#format
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def make_release(
    plan: Plan,
    outcomes: Sequence[Outcome],
    *,
    guarantee: Guarantee,
    seconds: float | None,
    measured: Sequence[Mapping[str, ScoreEstimate]],
    machine: Mapping[str, str],
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return a release as it is stored: a JSON document, and the content of each file by name.

    The model is that of the first repetition: the best of all would be another selection.
    """
    import torch

    outcome = outcomes[0]
    result = outcome.result
    if result is None:
        result = TrialResult(index=0, params={}, weights=torch.empty(0), score=None)
    if plan.is_sealed:
        # The plan promises no curves; the winner's position would bound the number of runs.
        result = replace(result, curves={}, index=0)
    result = replace(result, unusable=0)
    # By its place among the trials that are shown: names of trainings say nothing of their order.
    trials = tuple(replace(t, unusable=0, index=n) for n, t in enumerate(outcome.trials))
    certificate = {
        "arm": plan.arm,
        "strategy": plan.strategy,
        "guarantee": guarantee.to_dict(),
        "event": plan.charged.to_dict(),
        "plan_digest": plan.digest(),
    }
    document = {
        "estimates": _to_dicts(measured[0]),
        "repetitions": [_repetition(*one) for one in zip(outcomes, measured, strict=True)],
        "note": outcome.note,
        "checked": result.checked,
        "transcript_digest": result.transcript_digest,
        "machine": dict(machine),
        "cost": {
            "gradient_evaluations": plan.expected_gradient_evaluations,
            "wall_seconds": seconds,
            "expected": plan.is_private,
        },
    }
    files = {f"{_TRIALS}{t.index:06d}.safetensors": pack_result(t) for t in trials}
    return document, {MODEL: pack_result(result, certificate=certificate), **files}


def _to_dicts(estimates: Mapping[str, ScoreEstimate]) -> dict[str, Any]:
    return {name: score.to_dict() for name, score in estimates.items()}


def _read_estimates(document: Mapping[str, Any]) -> dict[str, ScoreEstimate]:
    return {name: ScoreEstimate.from_dict(score) for name, score in document.items()}


def _repetition(outcome: Outcome, measured: Mapping[str, ScoreEstimate]) -> dict[str, Any]:
    result = outcome.result
    nothing = result is None or result.weights.numel() == 0
    score = None if result is None or result.score is None else repr(result.score)
    estimate = None if result is None or result.estimate is None else result.estimate.to_dict()
    return {
        "params": {} if result is None else dict(result.params),
        "score": score,
        "estimate": estimate,
        "estimates": _to_dicts(measured),
        "nothing": nothing,
        "diverged": not nothing and result is not None and result.ended is Ending.DIVERGED,
    }


def _read_repetition(plan: Plan, document: Mapping[str, Any]) -> Repetition:
    score = None if document["score"] is None else float(document["score"])
    estimate = document["estimate"]
    chosen_by = None if estimate is None else ScoreEstimate.from_dict(estimate)
    return Repetition(
        params=with_tuples(document["params"]),
        score=_shown_score(plan, score, chosen_by),
        choice=_choice(plan, chosen_by),
        estimates=_read_estimates(document["estimates"]),
        nothing=document["nothing"],
        diverged=document["diverged"],
    )


def _choice(plan: Plan, estimate: ScoreEstimate | None) -> dict[str, ScoreEstimate]:
    """Return a score under the name of its split and metric; nothing without one."""
    if plan.score is None or estimate is None:
        return {}
    return {f"{plan.scored}_{label(plan.score.metric)}": estimate}


def _shown_score(plan: Plan, score: float | None, estimate: ScoreEstimate | None) -> float | None:
    """Return a score as it is shown: within what its metric can be, and higher for better ones.

    None where its interval is all that the metric can be: whatever number it has says nothing.
    """
    if plan.score is None or estimate is None:
        return score
    if not estimate.is_informative:
        return None
    return 0.0 - estimate.value if lower_is_better(plan.score.metric) else estimate.value


def utility_of(
    plan: Plan, task: Task, model: nn.Module, test: TensorData, rng: np.random.Generator
) -> dict[str, ScoreEstimate]:
    """Return a model's metrics on the test split: exact on a public one, else noised as planned."""
    from privtune.execution.training import held_to_classes, scored_as
    from privtune.training.mechanism.scoring import measure_each

    report = plan.report
    if report is None and (task.public_test or (task.benchmark and task.test_records > 0)):
        report = _exact(plan, task, test)
    if report is None:
        return {}
    test = held_to_classes(test, task.classes)
    if report.event is None:  # a public split: its true size is known
        report = replace(report, records=len(test))
    module, loss = scored_as(report, task, model.eval())
    found = measure_each(report, module, test, rng=rng, loss=loss)
    return {f"test_{name}": value for name, value in found.items()}


def _exact(plan: Plan, task: Task, test: TensorData) -> ScorePlan | None:
    """Return an exact score on a public test split where no report is planned; None where no metric suits."""
    of_classes = not test.y.is_floating_point() and (task.build is None or test.y.ndim == 1)
    if task.target_range is None and (not of_classes or (task.build is not None and plan.score)):
        # Neither a class a record nor numbers in a range, as for a density: only what scored the trials.
        return plan.score and replace(plan.score, noise_multiplier=None, candidates=1.0)
    return Scoring().exact(records=task.test_records, target_range=task.target_range)


def check_end(plan: Plan, result: TrialResult) -> None:
    """Pack, release and load what a rehearsal ended with, as a round and a release do."""
    nothing = Guarantee(0.0, 0.0, "rehearsal", Adjacency.ADD_REMOVE)
    outcome = Outcome(result, trials=() if plan.is_sealed else (result,))
    try:
        _, files = make_release(
            plan, [outcome], guarantee=nothing, seconds=None, measured=[{}], machine={}
        )
        for content in (pack_result(result), *files.values()):
            found = unpack_result(content)
            # As text: 1 and True are equal, and a number that is none is not itself.
            same = repr(dict(found.params)) == repr(dict(result.params))
            there, back = result.weights.cpu(), found.weights
            if not same or there.shape != back.shape or not bool((there == back).all()):
                raise ReleaseError("something else is read from it than was written")
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
        raise ReleaseError(
            f"A trial of arm {plan.arm!r} would end in what no file of a release can hold ({said}). "
            "Hyperparameters are numbers, texts, booleans, None or tuples of these; parameters of models "
            "are real floating-point tensors. Nothing was charged."
        ) from error


def load_release(
    plan: Plan,
    results: Results,
    document: Mapping[str, Any],
    guarantee: Guarantee,
    kept: Callable[[], Sequence[FrozenTrial]],
) -> Release:
    """Return a release as it was stored; ``kept`` returns the arm's trials as Optuna's storage has them."""

    def read(name: str) -> TrialResult:
        result = unpack_result(results.get(name) or b"")
        return result.with_score(_shown_score(plan, result.score, result.estimate))

    result = read(MODEL)
    trials = [read(name) for name in results.names() if name.startswith(_TRIALS)]
    return Release(
        arm=plan.arm,
        strategy=plan.strategy,
        params=dict(result.params),
        weights=lambda: result.weights,
        score=result.score,
        curves=result.curves,
        guarantee=guarantee,
        choice=_choice(plan, result.estimate),
        estimates=_read_estimates(document["estimates"]),
        cost=Cost(**document["cost"]),
        sealed=plan.is_sealed,
        trials=tuple(sorted(trials, key=lambda trial: trial.index)),
        note=document["note"],
        shapes=result.shapes,
        machine=document["machine"],
        shown=lambda: _shown(kept(), trials),
        checked=document["checked"],
        repetitions=tuple(_read_repetition(plan, r) for r in document["repetitions"])
        if plan.repeats > 1
        else (),
    )


def _shown(kept: Sequence[FrozenTrial], released: Sequence[TrialResult]) -> list[FrozenTrial]:
    """Return released trials as Optuna's, without what was not released, such as their times."""
    from optuna.trial import TrialState, create_trial

    places = {trial.user_attrs.get(INDEX): trial for trial in kept}
    found = []
    for trial in sorted(released, key=lambda trial: trial.index):
        own = places.get(trial.index)
        laws = {} if own is None else own.distributions
        pruned = trial.ended is Ending.PRUNED
        missing = trial.score is None or math.isnan(trial.score)
        found.append(
            create_trial(
                state=TrialState.PRUNED if pruned else TrialState.COMPLETE,
                value=None if pruned else -math.inf if missing else trial.score,
                params={n: v for n, v in trial.params.items() if n in laws},
                distributions=laws,
                user_attrs={n: v for n, v in trial.params.items() if n not in laws},
                intermediate_values={} if own is None else own.intermediate_values,
            )
        )
    return found
