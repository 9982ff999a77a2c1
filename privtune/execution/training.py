"""Train candidates as one stack, and score them. What fails in training is a result."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from privtune.errors import PrivTuneError
from privtune.strategies import Plan, ScorePlan, TrainingPlan, TrialResult
from privtune.training import tails
from privtune.training.compute import CompileError, Compute
from privtune.training.streams import Streams

if TYPE_CHECKING:
    import torch

    from privtune.tasks import Task, TaskData
    from privtune.training.engine import TensorData

__all__ = ["PROGRAM_ERRORS", "accuracy", "dry_run", "train_trials"]

PROGRAM_ERRORS = (AttributeError, NameError, TypeError, ImportError, NotImplementedError)
"""Mistakes of the program, not of a training: they stop a round, which can go on once corrected.
As results they would spend a whole charge on a typo. Nothing is released; who sees them is inside
the trust boundary."""

_TIMED = 8  # candidates in the stack that a dry run times

_COMPUTE = Compute()

OnStep = Callable[[int, int], None]
"""Called with the steps done and the steps planned."""


def part_of(data: TensorData, part: str, rate: float | None, streams: Streams) -> TensorData:
    """Return the records that a training may see: all, the Poisson subset, or the rest of it."""
    import torch

    if part == "all" or rate is None:
        return data
    inside = torch.from_numpy(streams.numpy("subset", 0).random(len(data.y)) < rate)
    chosen = (inside if part == "subset" else ~inside).nonzero().squeeze(1)
    return data.part(chosen, sealed_size=True)


def train_trials(
    training: TrainingPlan,
    *,
    task: Task,
    data: TaskData,
    records: Any,
    score: ScorePlan | None,
    trials: Mapping[int, Mapping[str, Any]],
    secrets: Mapping[int, bytes],
    compute: Compute = _COMPUTE,
    on_step: OnStep | None = None,
    validated: bool = False,
) -> list[TrialResult]:
    """Train the given trials as one stack and score each.

    Args:
        training: What each runs.
        task: The task.
        data: Its splits; the arm's charge has been started.
        records: The training records that it may see.
        score: How to score, or None.
        trials: Hyperparameters by the trial's index in the round.
        secrets: The secret of each trial, by index: everything random in it derives from it.
        compute: Where, how many at once, compiled or not.
        on_step: Progress.
        validated: Whether to note the validation accuracy by step, in the curve ``val_accuracy``,
            NaN where it was not looked at. Only for a public validation split and trials that are
            released whole: it is neither noised nor charged.

    Returns:
        One result a trial, in the order of ``trials``. An exception or an out-of-memory of the
        training is a result with score −∞: a trial that was dropped would be a choice by data.

    Raises:
        PrivTuneError: If a private validation split is to be shown.
        TranscriptMismatchError: If more was released than was charged: that is a defect.
        CompileError: If this machine cannot compile what is to be compiled.
        PROGRAM_ERRORS: Mistakes of the program.
    """
    from privtune.training.transcript import TranscriptMismatchError

    if validated and not task.public_validation:
        raise PrivTuneError(
            f"The validation split of task {task.name!r} is private: its accuracy is not shown."
        )
    try:
        return _train(
            training,
            task=task,
            data=data,
            records=records,
            score=score,
            trials=trials,
            secrets=secrets,
            compute=compute,
            on_step=on_step,
            validated=validated,
        )
    except (TranscriptMismatchError, CompileError, *PROGRAM_ERRORS):
        raise
    except Exception as error:
        if len(trials) == 1:
            return [failed(index, params, error) for index, params in trials.items()]
    # One of a stack has failed: each alone, so that none answers for another.
    return [
        result
        for index, params in trials.items()
        for result in train_trials(
            training,
            task=task,
            data=data,
            records=records,
            score=score,
            trials={index: params},
            secrets=secrets,
            compute=compute,
            on_step=on_step,
            validated=validated,
        )
    ]


def failed(index: int, params: Mapping[str, Any], error: BaseException) -> TrialResult:
    """Return the result of a training that failed. What the error says stays sealed."""
    import torch

    return TrialResult(
        index=index,
        params=dict(params),
        weights=torch.empty(0),
        score=-math.inf,
        failed=type(error).__name__,
    )


def _train(
    training: TrainingPlan,
    *,
    task: Task,
    data: TaskData,
    records: Any,
    score: ScorePlan | None,
    trials: Mapping[int, Mapping[str, Any]],
    secrets: Mapping[int, bytes],
    compute: Compute,
    on_step: OnStep | None,
    validated: bool,
) -> list[TrialResult]:
    from privtune.training.engine import train

    steps = training.schedule.steps
    wanted = training.method.parameters
    trained = train(
        training.method,
        training.schedule,
        model=task.model,
        loss=task.loss,
        data=records,
        candidates=[{name: params[name] for name in wanted} for params in trials.values()],
        secrets=[secrets[index] for index in trials],
        device=compute.device,
        stack=compute.stack,
        compiled=compute.compiled,
        noise=training.noise,
        on_step=None if on_step is None else lambda step, _: on_step(step + 1, steps),
        snapshots_at=training.schedule.checkpoints() if validated else (),
    )
    results = []
    for row, (index, params) in enumerate(trials.items()):
        weights = trained.params[row].detach().cpu()
        curves = {name: values[:, row].tolist() for name, values in trained.report.items()}
        if validated:
            curves["val_accuracy"] = _accuracies(task, trained.snapshots[row], data, steps)
        results.append(
            TrialResult(
                index=index,
                params=dict(params),
                weights=weights,
                score=None
                if score is None
                else noised_score(score, task, weights, data.validation, secrets[index]),
                curves=curves,
                transcript_digest=trained.transcripts[row].digest(),
            )
        )
    return results


def _accuracies(
    task: Task, snapshots: Mapping[int, torch.Tensor], data: TaskData, steps: int
) -> list[float]:
    """Return the validation accuracy by step, NaN where there is no model to look at."""
    return [
        accuracy(task, weights, data.validation)
        if (weights := snapshots.get(step)) is not None and bool(weights.isfinite().all())
        else math.nan
        for step in range(steps)
    ]


def accuracy(task: Task, weights: torch.Tensor, data: TensorData) -> float:
    """Return the fraction of a public split's records that the model classifies correctly.

    Args:
        task: Builds the model.
        weights: Its parameters, flat, shape ``[P]``.
        data: Records and labels.
    """
    return float(_correct(_outputs(task, weights, data), data).double().mean())


def _correct(outputs: torch.Tensor, data: TensorData) -> torch.Tensor:
    """Return which records are classified correctly; one that gives NaN never is."""
    return (outputs.argmax(dim=-1) == data.y) & ~outputs.isnan().any(dim=-1)


def _outputs(task: Task, weights: torch.Tensor, data: TensorData) -> torch.Tensor:
    import torch

    from privtune.training.engine import load_params

    model = task.model()
    load_params(model, weights)
    model.eval()
    with torch.no_grad():
        outputs: torch.Tensor = model(data.x)
    return outputs


def noised_score(
    score: ScorePlan, task: Task, weights: torch.Tensor, data: TensorData, secret: bytes
) -> float:
    """Return the score of a model as the plan has it, noise included; higher is better.

    A sum over the records, divided by their declared number: how many there really are is private.
    """
    import torch

    if weights.numel() == 0 or not bool(torch.isfinite(weights).all()):
        return -math.inf  # a diverged training is a result, the worst one
    outputs = _outputs(task, weights, data)
    if score.metric == "accuracy":
        value = float(_correct(outputs, data).double().sum()) / score.records
    else:
        losses = task.loss(outputs, data.y).double()
        # A loss that is not a number counts as the worst one, so that the bound holds.
        losses = losses.nan_to_num(nan=score.bound, posinf=score.bound)
        value = -float(losses.clamp(0.0, score.bound).sum()) / score.records
    draw = tails.gaussian if score.mechanism == "gaussian" else tails.laplace
    unit = float(draw(Streams(secret).numpy("score", 0).random, 1)[0])
    return value + unit * score.standard_deviation


def dry_run(plan: Plan, task: Task, *, compute: Compute = _COMPUTE, steps: int = 16) -> float:
    """Train a few steps on made-up records. Touches no data.

    A model that cannot be trained privately is found out here, before anything is charged.

    Args:
        plan: The arm's plan.
        task: Gives the shapes.
        compute: Where, how many at once. Compiling is only tried: it does not pay in a few steps.
        steps: How many steps to time.

    Returns:
        How long the arm takes in expectation, in seconds: expected gradient evaluations over the
        measured speed.
    """
    import torch

    from privtune.training.engine import TensorData, train
    from privtune.training.methods import DPSGD
    from privtune.training.schedule import Schedule

    schedule = plan.training.schedule
    records = max(2, min(schedule.records, 4 * math.ceil(schedule.expected_batch_size)))
    rate = min(1.0, schedule.expected_batch_size / records)
    generator = torch.Generator().manual_seed(0)
    made_up = TensorData(
        torch.rand((records, *task.input_shape), generator=generator),
        torch.randint(task.classes, (records,), generator=generator),
    )
    # What a step costs hangs on its gradients, not on the method or the learning rate. A round
    # trains its candidates in stacks, so a stack is timed.
    stack = max(1, min(_TIMED, round(plan.expected_runs)))
    clock = [time.perf_counter()]
    train(
        DPSGD(noise_multiplier=1.0),
        Schedule(records, rate, steps),
        model=task.model,
        loss=task.loss,
        data=made_up,
        candidates=[{"learning_rate": 1e-3, "max_grad_norm": 1.0}] * stack,
        secrets=[index.to_bytes(32, "big") for index in range(stack)],
        device=compute.device,
        stack=compute.stack,
        compiled=compute.compiled,
        noise=plan.training.noise,
        on_step=lambda *_: clock.append(time.perf_counter()),
    )
    # The median: some steps capture or allocate once, and are not what a step costs. The engine may
    # split the stack, and then takes that many more steps.
    splits = (len(clock) - 1) / steps
    per_step = statistics.median(b - a for a, b in itertools.pairwise(clock)) * splits / stack
    return plan.expected_gradient_evaluations * per_step / schedule.expected_batch_size
