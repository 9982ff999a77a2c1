"""From a strategy's outcome to a release, and back from storage."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privtune.accounting import Guarantee
from privtune.errors import PrivTuneError
from privtune.execution.files import read_result, write_result
from privtune.execution.training import accuracy
from privtune.files import open_private
from privtune.strategies import Cost, Outcome, Plan, Release, TrialResult

if TYPE_CHECKING:
    from privtune.tasks import Task, TaskData

__all__ = ["load_release", "release_document", "save_release"]


def save_release(
    plan: Plan,
    outcome: Outcome,
    *,
    guarantee: Guarantee,
    seconds: float | None,
    folder: Path,
    utility: Mapping[str, float],
) -> Release:
    """Write the released model with its certificate, and return the release.

    Args:
        plan: The arm's plan.
        outcome: What its strategy hands over.
        guarantee: What the arm cost.
        seconds: Time: measured, or the plan's estimate for a sealed arm.
        folder: The arm's folder.
        utility: Metrics on splits declared public.
    """
    import torch

    result = outcome.result
    if result is None:
        result = TrialResult(index=0, params={}, weights=torch.empty(0), score=None)
    if plan.is_sealed:
        # The plan promises no curves; the winner's position would bound the number of runs.
        result = replace(result, curves={}, index=0)
    result = replace(result, unusable=0)
    trials = tuple(replace(trial, unusable=0) for trial in outcome.trials)
    cost = Cost(plan.expected_gradient_evaluations, seconds, expected=plan.is_sealed)
    write_result(
        result,
        folder / "model.safetensors",
        certificate={
            "arm": plan.arm,
            "strategy": plan.strategy,
            "guarantee": guarantee.to_dict(),
            "event": plan.event.to_dict(),
            "plan_digest": plan.digest(),
        },
    )
    for trial in trials:
        write_result(trial, folder / "trials" / f"{trial.index:06d}.safetensors")
    return _release(
        plan,
        result,
        trials=trials,
        guarantee=guarantee,
        utility=utility,
        cost=cost,
        note=outcome.note,
    )


def utility_of(task: Task, result: TrialResult | None, data: TaskData) -> dict[str, float]:
    """Return the metrics of a model on splits that are declared public."""
    if result is None or result.weights.numel() == 0 or not task.public_test:
        return {}
    return {"test_accuracy": accuracy(task, result.weights, data.test)}


def release_document(release: Release) -> dict[str, Any]:
    """Return what is stored of a release beside its files."""
    cost = release.cost
    return {
        "utility": dict(release.utility),
        "note": release.note,
        "cost": {
            "gradient_evaluations": cost.gradient_evaluations,
            "wall_seconds": cost.wall_seconds,
            "expected": cost.expected,
        },
    }


def load_release(
    plan: Plan, folder: Path, document: Mapping[str, Any], guarantee: Guarantee
) -> Release:
    """Return a release as it was saved.

    Raises:
        PrivTuneError: If its files are elsewhere.
    """
    if not (folder / "model.safetensors").exists():
        raise PrivTuneError(
            f"Arm {plan.arm!r} was released, but its model is not in {folder}. Work in the directory "
            "where the study was run, or say where its files are: PRIVTUNE_ARTIFACTS=FOLDER."
        )
    trials = tuple(read_result(path) for path in sorted((folder / "trials").glob("*.safetensors")))
    return _release(
        plan,
        read_result(folder / "model.safetensors"),
        trials=trials,
        guarantee=guarantee,
        utility=document["utility"],
        cost=Cost(**document["cost"]),
        note=document["note"],
    )


def write_certificate(folder: Path, certificate: Mapping[str, Any]) -> None:
    """Write a budget's certificate beside the model, for whoever receives it."""
    path = folder / "certificate.json"
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with open_private(partial) as file:
        json.dump(certificate, file, indent=2, allow_nan=False)
    partial.replace(path)


def _release(
    plan: Plan,
    result: TrialResult,
    *,
    trials: tuple[TrialResult, ...],
    guarantee: Guarantee,
    utility: Mapping[str, float],
    cost: Cost,
    note: str,
) -> Release:
    return Release(
        arm=plan.arm,
        strategy=plan.strategy,
        params=dict(result.params),
        weights=result.weights,
        score=result.score,
        curves=result.curves,
        guarantee=guarantee,
        utility=utility,
        cost=cost,
        sealed=plan.is_sealed,
        trials=trials,
        note=note,
        shapes=result.shapes,
    )
