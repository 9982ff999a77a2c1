"""Conversion of training results and releases to stored bytes, and back."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from privtune.accounting import Adjacency, Guarantee
from privtune.errors import PrivTuneError
from privtune.ledger.errors import Place
from privtune.ledger.reading import parsing
from privtune.spaces import with_tuples
from privtune.strategies import (
    Cost,
    Ending,
    Outcome,
    Plan,
    Release,
    Repetition,
    Reporting,
    Scoring,
    TrialResult,
)
from privtune.strategies.release import split
from privtune.study.trials import INDEX
from privtune.training.mechanism.constant import constant_answer, declared_constant
from privtune.training.mechanism.estimates import ScoreEstimate
from privtune.training.mechanism.metric_name import MetricName
from privtune.training.mechanism.metrics import lower_is_better

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
_STORED = Place("privtune_blobs", "data")


class ReleaseError(PrivTuneError):
    """A rehearsal's release cannot be stored, or is read back as something else."""


def pack_result(
    result: TrialResult, *, certificate: Mapping[str, object] | None = None, request: str = ""
) -> bytes:
    """Return a result as the content of a safetensors file.

    Args:
        result: What one trial ended with.
        certificate: What a released model says of its guarantee, for whoever opens the file elsewhere.
        request: What a worker was asked for, where its answer is not a row of a round.

    Returns:
        Tensors by parameter name, or one flat tensor ``weights`` where shapes are not known. The rest is JSON
        in the header's metadata, with the score as text: JSON knows no ``-inf``.
    """
    from safetensors.torch import save

    document = {
        "index": result.index,
        "params": dict(result.params),
        **_score_document(result),
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
    tensors = split(result.weights, result.shapes)
    if not tensors:
        tensors = {"weights": result.weights}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return save(tensors, metadata=metadata)


def _score_document(result: TrialResult) -> dict[str, Any]:
    """Return a result's score as text and its estimate as a dict; None for each that is missing."""
    score = None
    if result.score is not None:
        score = repr(result.score)
    estimate = None
    if result.estimate is not None:
        estimate = result.estimate.to_dict()
    return {"score": score, "estimate": estimate}


def _read_score(text: str | None) -> float | None:
    """Return a score from its stored text; None if it was stored without one."""
    return None if text is None else float(text)


def _read_estimate(document: Mapping[str, object] | None) -> ScoreEstimate | None:
    """Return a score estimate from its stored dict; None if it was stored without one."""
    return None if document is None else ScoreEstimate.from_dict(document)


def unpack_result(content: bytes) -> TrialResult:
    """Return the training result in bytes that :func:`pack_result` made."""
    with parsing(_STORED):
        return _unpacked(content)


def _unpacked(content: bytes) -> TrialResult:
    """Return the training result in a safetensors file, whose weights are read only when used."""
    header = _header(content)
    metadata = header.get("__metadata__", {})
    if "result" not in metadata:
        raise _STORED.error("holds a model that is not a trial's result")
    document = json.loads(metadata["result"])
    params = document["params"]
    document["params"] = {name: with_tuples(value) for name, value in params.items()}
    shapes = document["shapes"]
    # A parameter of a model may be called "weights", too.
    has_names = shapes and shapes.keys() <= header.keys()
    names = list(shapes) if has_names else ["weights"]
    score = _read_score(document.pop("score"))
    estimate = _read_estimate(document.pop("estimate"))
    ended = Ending(document.pop("ended"))

    def weights() -> Any:
        import torch
        from safetensors.torch import load

        tensors = load(content)
        vectors = [tensors[name].reshape(-1) for name in names]
        return torch.cat(vectors)

    return TrialResult(
        weights=weights,
        score=score,
        estimate=estimate,
        ended=ended,
        **document,
    )


def request_of(content: bytes) -> str:
    """Return the request stored with a packed result; empty for a row of a round."""
    with parsing(_STORED):
        metadata = _header(content).get("__metadata__", {})
        return str(metadata.get("request", ""))


def _header(content: bytes) -> Any:
    """Return the header of a safetensors file: tensors by name, and ``__metadata__``."""
    # JSON, after its length: https://github.com/huggingface/safetensors#format
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length])


def make_release(
    plan: Plan,
    outcomes: Sequence[Outcome],
    *,
    guarantee: Guarantee,
    seconds: float | None,
    measured: Sequence[Measurement],
    machine: Mapping[str, str],
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return a release as it is stored: a JSON document, and the content of each file by name.

    The model is that of the first repetition: the best of all would be another selection.

    Args:
        plan: The arm's plan, which says what may be shown.
        outcomes: One a repetition.
        guarantee: What the arm costs alone, for the model's certificate.
        seconds: CPU seconds that the rehearsal expects of the arm, if it says any.
        measured: What the test split says of each outcome's model, one a repetition.
        machine: Where the arm was trained.
    """
    import torch

    outcome = outcomes[0]
    result = outcome.result
    if result is None:
        result = TrialResult(
            index=0,
            params={},
            weights=torch.empty(0),
            score=None,
        )
    if plan.is_sealed:
        # The plan promises no curves; the winner's position would bound the number of runs.
        result = replace(result, curves={}, index=0)
    result = replace(result, unusable=0)
    certificate = {
        "arm": plan.arm,
        "strategy": plan.strategy,
        "guarantee": guarantee.to_dict(),
        "event": plan.charged.to_dict(),
        "plan_digest": plan.digest(),
    }
    repetitions = [
        _repetition(each, measurement) for each, measurement in zip(outcomes, measured, strict=True)
    ]
    document = {
        "estimates": _to_dicts(measured[0].estimates),
        "temperature": measured[0].temperature,
        "repetitions": repetitions,
        "note": outcome.note,
        "checked": result.checked,
        "transcript_digest": result.transcript_digest,
        "machine": dict(machine),
        "cost": {
            "gradient_evaluations": plan.expected_gradient_evaluations,
            "cpu_seconds": seconds,
        },
    }
    files = {MODEL: pack_result(result, certificate=certificate)}
    for number, trial in enumerate(outcome.trials):
        # By its place among the trials that are shown: names of trainings say nothing of their order.
        public_trial = replace(trial, unusable=0, index=number)
        name = f"{_TRIALS}{number:06d}.safetensors"
        files[name] = pack_result(public_trial)
    # With the document the ledger's log holds the models fast, too.
    document["files"] = {name: _digest(content) for name, content in files.items()}
    return document, files


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _to_dicts(estimates: Mapping[str, ScoreEstimate]) -> dict[str, Any]:
    return {name: score.to_dict() for name, score in estimates.items()}


def _read_estimates(document: Mapping[str, Any]) -> dict[str, ScoreEstimate]:
    """Return stored scores by name; a text that names no metric on a split is refused."""
    estimates = {}
    for text, score in document.items():
        name = MetricName.parse(text)
        estimates[str(name)] = ScoreEstimate.from_dict(score)
    return estimates


def _repetition(outcome: Outcome, measurement: Measurement) -> dict[str, Any]:
    """Return the stored document of one repetition, without its model."""
    estimates = _to_dicts(measurement.estimates)
    result = outcome.result
    if result is None:  # the law drew no run
        return {
            "params": {},
            "score": None,
            "estimate": None,
            "estimates": estimates,
            "nothing": True,
            "diverged": False,
        }
    has_no_model = result.weights.numel() == 0
    return {
        "params": dict(result.params),
        **_score_document(result),
        "estimates": estimates,
        "nothing": has_no_model,
        "diverged": not has_no_model and result.ended is Ending.DIVERGED,
    }


def _read_repetition(plan: Plan, document: Mapping[str, Any]) -> Repetition:
    """Return one repetition from its stored document."""
    score = _read_score(document["score"])
    choice = _read_estimate(document["estimate"])
    return Repetition(
        params=with_tuples(document["params"]),
        score=_shown_score(plan, score, choice),
        choice=_choice(plan, choice),
        estimates=_read_estimates(document["estimates"]),
        nothing=document["nothing"],
        diverged=document["diverged"],
    )


def _choice(plan: Plan, estimate: ScoreEstimate | None) -> dict[str, ScoreEstimate]:
    """Return the estimate that chose the release, by split and metric; empty without one."""
    name = plan.score_name
    if name is None or estimate is None:
        return {}
    return {str(name): estimate}


def _shown_score(
    plan: Plan,
    score: float | None,
    estimate: ScoreEstimate | None,
) -> float | None:
    """Return a score within its metric's range, higher for better; None if it says nothing.

    None where its interval is all that the metric can be: whatever number it has says nothing.
    """
    if plan.score is None or estimate is None:
        return score
    if not estimate.is_informative:
        return None
    if lower_is_better(plan.score.metric):
        return 0.0 - estimate.value  # no -0.0, which a table would show
    return estimate.value


@dataclass(frozen=True)
class Measurement:
    """The metrics and temperature of a released model on the test split.

    Args:
        estimates: Its metrics by name.
        temperature: What its logits are divided by before a softmax; None without one.
    """

    estimates: Mapping[str, ScoreEstimate] = field(default_factory=dict)
    temperature: float | None = None


def measure_release(
    plan: Plan,
    task: Task,
    model: nn.Module,
    test: TensorData,
    rng: np.random.Generator,
) -> Measurement:
    """Return a model's metrics and temperature, exact on a public test split and noised on others.

    Args:
        plan: The arm's plan, with the report that is charged.
        task: The task.
        model: The released model.
        test: The test split.
        rng: The stream of the report's noise: run again, an arm reports the same numbers.
    """
    from privtune.execution.trial_training import mark_foreign_targets, scored_as
    from privtune.training.mechanism.scoring import fit_temperature, measure_each

    report = plan.report
    if report is None and _is_test_public(task):
        report = _exact(plan, task, test)
    if report is None:
        return Measurement()
    test = mark_foreign_targets(test, task.classes)
    public: TensorData | None = None
    if report.event is None:  # a public split: its true size is known
        public = test
        report = replace(report, records=len(test))
    module, loss = scored_as(report, task, model.eval())
    scores = measure_each(report, module, test, rng=rng, loss=loss)
    estimates = {}
    for metric, score in scores.items():
        name = MetricName("test", metric)
        constant = _constant(metric, task, public)
        estimates[str(name)] = replace(score, constant=constant)
    of_accuracy = replace(report, metric="accuracy")
    classifier, _ = scored_as(of_accuracy, task, model)
    temperature = fit_temperature(report, classifier, test, rng=rng)
    return Measurement(estimates, temperature)


def _is_test_public(task: Task) -> bool:
    """Return whether exact scores on the test split cost nothing."""
    if task.public_test:
        return True
    return task.benchmark and task.test_records > 0


def _constant(metric: str, task: Task, public: TensorData | None) -> float | None:
    """Return the metric of the best constant answer, from public facts alone; None if unknown."""
    if public is None or public.y.ndim != 1:
        return declared_constant(metric, classes=task.classes, rarest=task.rarest_share)
    targets = public.y.double().numpy()
    has_classes = task.classes is not None
    answer = constant_answer(metric, targets, of_classes=has_classes)
    return None if answer is None else answer.value


def _exact(plan: Plan, task: Task, test: TensorData) -> ScorePlan | None:
    """Return a plan of an exact score on a public test split if a metric suits the task, else None."""
    has_build = task.build is not None
    is_one_a_record = not has_build or test.y.ndim == 1
    has_classes = is_one_a_record and not test.y.is_floating_point()
    exact: ScorePlan | None
    if task.target_range is not None:
        exact = Scoring().exact(records=task.test_records, target_range=task.target_range)
    elif not has_classes or (has_build and plan.score):
        # Neither a class a record nor numbers in a range, as for a density: only what scored the trials.
        if plan.score is None:
            return None
        exact = replace(plan.score, noise_multiplier=None, candidates=1.0)
    else:
        exact = Scoring().exact(records=task.test_records, target_range=None)
    if exact is None:
        return None
    return Reporting().with_temperature(exact, classes=task.classes)


def check_end(plan: Plan, result: TrialResult) -> None:
    """Pack and unpack a rehearsal's result and release; refuse them if anything changes.

    Raises:
        ReleaseError: If something cannot be stored, or is read back as something else. After a charge it
            would be paid for and lost.
    """
    trials = () if plan.is_sealed else (result,)
    try:
        _, files = make_release(
            plan,
            [Outcome(result, trials=trials)],
            guarantee=Guarantee(0.0, 0.0, "rehearsal", Adjacency.ADD_REMOVE),
            seconds=None,
            measured=[Measurement()],
            machine={},
        )
        for content in (pack_result(result), *files.values()):
            if not _is_same(result, unpack_result(content)):
                raise ReleaseError("something else is read from it than was written")
    except Exception as error:
        kind = type(error).__name__
        words = f"{kind}: {error}".split()
        reason = " ".join(words).rstrip(".")
        raise ReleaseError(
            f"A trial of arm {plan.arm!r} would end in what no file of a release can hold ({reason}). "
            "Hyperparameters are numbers, texts, booleans, None or tuples of these; parameters of models "
            "are real floating-point tensors. Nothing was charged."
        ) from error


def _is_same(result: TrialResult, other: TrialResult) -> bool:
    """Return whether two results have the same hyperparameters and weights."""
    params = dict(result.params)
    other_params = dict(other.params)
    # As text: 1 and True are equal, and a number that is none is not itself.
    if repr(other_params) != repr(params):
        return False
    weights = result.weights.cpu()
    other_weights = other.weights
    if weights.shape != other_weights.shape:
        return False
    return bool((weights == other_weights).all())


def load_release(
    plan: Plan,
    results: Results,
    document: Mapping[str, object],
    guarantee: Guarantee,
    read_trials: Callable[[], Sequence[FrozenTrial]],
) -> Release:
    """Return an arm's release from its stored document and files.

    Args:
        plan: The arm's plan.
        results: The arm's files.
        document: What :func:`make_release` returned first.
        guarantee: What the arm costs alone.
        read_trials: Returns the arm's trials as Optuna's storage has them, with laws and reported values.

    Raises:
        DamagedResultError: If a file is missing, or is not the one that the ledger's log holds fast.
    """
    place = Place("privtune_arms", "release", f"name = {plan.arm!r}")
    with parsing(place):
        return _loaded(plan, results, document, guarantee, read_trials)


def _loaded(
    plan: Plan,
    results: Results,
    document: Mapping[str, Any],
    guarantee: Guarantee,
    read_trials: Callable[[], Sequence[FrozenTrial]],
) -> Release:
    """Return the release of a document, with errors of parsing left to the caller."""
    digests = document["files"]

    def read(name: str) -> TrialResult:
        content = results.get(name)
        if content is None or _digest(content) != digests[name]:
            raise results.damaged(name)
        result = unpack_result(content)
        score = _shown_score(plan, result.score, result.estimate)
        return result.with_score(score)

    result = read(MODEL)
    trials = [read(name) for name in digests if name.startswith(_TRIALS)]
    trials.sort(key=lambda trial: trial.index)
    repetitions = document["repetitions"]
    shown_repetitions = repetitions if plan.repeats > 1 else []
    return Release(
        arm=plan.arm,
        strategy=plan.strategy,
        params=dict(result.params),
        weights=lambda: result.weights,
        is_nothing=repetitions[0]["nothing"],
        score=result.score,
        curves=result.curves,
        guarantee=guarantee,
        choice=_choice(plan, result.estimate),
        estimates=_read_estimates(document["estimates"]),
        temperature=document["temperature"],
        cost=Cost(**document["cost"]),
        sealed=plan.is_sealed,
        trials=tuple(trials),
        note=document["note"],
        shapes=result.shapes,
        machine=document["machine"],
        shown=lambda: _optuna_trials(read_trials(), trials, plan.trial_epsilon),
        checked=document["checked"],
        repetitions=tuple(_read_repetition(plan, each) for each in shown_repetitions),
    )


def _optuna_trials(
    originals: Sequence[FrozenTrial], released: Sequence[TrialResult], own_epsilon: float | None
) -> list[FrozenTrial]:
    """Return released trials as Optuna's, reduced to what was released: their times, for one, stay out.

    Args:
        originals: The trials in the study's storage.
        released: Those that the arm releases.
        own_epsilon: What one of them costs alone, which becomes an attribute; None if it is not told.
    """
    original_by_index = {trial.user_attrs.get(INDEX): trial for trial in originals}
    trials = []
    for trial in released:
        original = original_by_index.get(trial.index)
        shown_trial = _optuna_trial(trial, original)
        if own_epsilon is not None:
            shown_trial.set_user_attr("epsilon", own_epsilon)
        trials.append(shown_trial)
    return trials


def _optuna_trial(trial: TrialResult, original: FrozenTrial | None) -> FrozenTrial:
    """Return a released trial as a trial of Optuna's, with laws of the original one.

    Hyperparameters without a law, such as those that the arm fixes, become attributes: Optuna takes no
    parameter without a distribution.
    """
    from optuna.trial import TrialState, create_trial

    laws = {} if original is None else original.distributions
    params = {}
    attributes = {}
    for name, value in trial.params.items():
        if name in laws:
            params[name] = value
        else:
            attributes[name] = value
    state = TrialState.COMPLETE
    value = trial.score
    if trial.ended is Ending.PRUNED:
        state = TrialState.PRUNED
        value = None
    elif value is None or math.isnan(value):
        value = -math.inf
    return create_trial(
        state=state,
        value=value,
        params=params,
        distributions=laws,
        user_attrs=attributes,
        intermediate_values={} if original is None else original.intermediate_values,
    )
