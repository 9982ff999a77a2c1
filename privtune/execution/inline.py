"""Train candidates in this process, as one stack, and score them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from privtune.strategies import Plan, ScorePlan, TrialResult
from privtune.training.streams import Streams

if TYPE_CHECKING:
    import torch

    from privtune.tasks import Task, TaskData
    from privtune.training.engine import TensorData

__all__ = ["accuracy", "estimate_seconds", "train_trials"]

OnStep = Callable[[int, int], None]
"""Called with the steps done and the steps planned."""


def train_trials(
    plan: Plan,
    *,
    task: Task,
    data: TaskData,
    trials: Mapping[int, Mapping[str, float]],
    secrets: Mapping[int, bytes],
    device: str = "auto",
    on_step: OnStep | None = None,
) -> list[TrialResult]:
    """Train the given trials of a round and score each.

    Args:
        plan: The arm's plan.
        task: The task.
        data: Its data; the arm's charge has been started.
        trials: Hyperparameters by the trial's index in the round.
        secrets: The secret of each trial, by index: everything random in it derives from it.
        device: ``auto``, ``cpu`` or ``cuda``.
        on_step: Progress.

    Returns:
        One result a trial, in the order of ``trials``.
    """
    from privtune.training.engine import train

    steps = plan.training.schedule.steps
    trained = train(
        plan.training.method,
        plan.training.schedule,
        model=task.model,
        loss=task.loss,
        data=data.train,
        candidates=list(trials.values()),
        secrets=[secrets[index] for index in trials],
        device=device,
        on_step=None if on_step is None else lambda step, _: on_step(step + 1, steps),
    )
    results = []
    for row, (index, params) in enumerate(trials.items()):
        weights = trained.params[row].detach().cpu()
        results.append(
            TrialResult(
                index=index,
                params=dict(params),
                weights=weights,
                score=None
                if plan.score is None
                else _score(plan.score, task, weights, data.validation, secrets[index]),
                curves={name: values[:, row].tolist() for name, values in trained.report.items()},
                transcript_digest=trained.transcripts[row].digest(),
            )
        )
    return results


def accuracy(task: Task, weights: torch.Tensor, data: TensorData) -> float:
    """Return the fraction of records that the model classifies correctly.

    Args:
        task: Builds the model.
        weights: Its parameters, flat, shape ``[P]``.
        data: Records and labels.
    """
    import torch

    from privtune.training.engine import load_params

    model = task.model()
    load_params(model, weights)
    model.eval()
    with torch.no_grad():
        return float((model(data.x).argmax(dim=-1) == data.y).double().mean())


def estimate_seconds(plan: Plan, task: Task, *, device: str = "auto", steps: int = 12) -> float:
    """Estimate how long an arm takes in expectation, on made-up records. Touches no data.

    Args:
        plan: The arm's plan.
        task: Gives the shapes.
        device: Where to measure.
        steps: How many steps to time.

    Returns:
        Seconds: expected runs x planned steps x the measured time of a step.
    """
    import torch

    from privtune.training.engine import TensorData, train
    from privtune.training.schedule import Schedule

    schedule = plan.training.schedule
    generator = torch.Generator().manual_seed(0)
    made_up = TensorData(
        torch.rand((schedule.records, *task.input_shape), generator=generator),
        torch.randint(task.classes, (schedule.records,), generator=generator),
    )
    # Any admissible value times the same: a step costs the same at every learning rate.
    params = {name: plan.params.get(name, 1.0) for name in plan.training.method.parameters}
    short = Schedule(schedule.records, schedule.sample_rate, steps)
    started = time.perf_counter()
    train(
        plan.training.method,
        short,
        model=task.model,
        loss=task.loss,
        data=made_up,
        candidates=[params],
        secrets=[bytes(32)],
        device=device,
    )
    per_step = (time.perf_counter() - started) / steps
    return plan.expected_runs * schedule.steps * per_step


def _score(
    score: ScorePlan, task: Task, weights: torch.Tensor, data: TensorData, secret: bytes
) -> float:
    import torch

    if not bool(torch.isfinite(weights).all()):
        return -math.inf  # a diverged training is a result, the worst one
    noise = float(Streams(secret).numpy("score", 0).standard_normal()) * score.standard_deviation
    return accuracy(task, weights, data) + noise


def chunks(indices: Sequence[int], size: int) -> list[Sequence[int]]:
    """Split indices into consecutive stacks of at most ``size``."""
    return [indices[start : start + size] for start in range(0, len(indices), size)]
