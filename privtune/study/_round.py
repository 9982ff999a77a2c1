"""A round: the trials of one arm, resumable without a second charge."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from privtune.errors import PrivTuneError
from privtune.execution.inline import OnStep, chunks, train_trials
from privtune.strategies import Plan, TrialResult
from privtune.study._store import StudyStore
from privtune.training.streams import Streams

if TYPE_CHECKING:
    from privtune.spaces import SearchSpace
    from privtune.tasks import Task, TaskData

__all__ = ["StudyRound", "read_result", "write_result"]

_STACK = 16  # candidates trained before their results are written


@dataclass(frozen=True, kw_only=True)
class StudyRound:
    """The round of one arm. Every trial derives from ``secret`` and its index.

    Args:
        study: Name of the study.
        arm: Name of the arm.
        secret: 32 secret bytes.
        store: Holds the trial rows.
        folder: Holds finished results; inside the trust boundary.
        task: The task.
        data: Its data; the arm's charge has been started.
        space: What candidates are drawn from, if the plan draws.
        device: ``auto``, ``cpu`` or ``cuda``.
        on_step: Progress of a stack.
    """

    study: str
    arm: str
    secret: bytes
    store: StudyStore
    folder: Path
    task: Task
    data: TaskData
    space: SearchSpace
    device: str = "auto"
    on_step: OnStep | None = None

    @property
    def streams(self) -> Streams:
        """The streams of the round as a whole: number of runs, candidates, ties."""
        return Streams(self.secret)

    def train(self, plan: Plan, count: int) -> Sequence[TrialResult]:
        """Train the trials that are not done yet, and return all ``count`` of them."""
        trials = self._candidates(plan, count)
        done = {i: read_result(self._path(i)) for i in trials if self._path(i).exists()}
        for stack in chunks([i for i in trials if i not in done], _STACK):
            for result in train_trials(
                plan,
                task=self.task,
                data=self.data,
                trials={i: trials[i] for i in stack},
                secrets={i: self._trial_secret(i) for i in stack},
                device=self.device,
                on_step=self.on_step,
            ):
                write_result(result, self._path(result.index))
                done[result.index] = result
        if plan.score is not None:
            self.store.finish(self.study, self.arm, {i: _told(r) for i, r in done.items()})
        return [done[i] for i in range(count)]

    def discard(self, *, keep: int) -> None:
        """Delete every result but one: losing models have no further use, and are private."""
        for path in self.folder.glob("trial-*.safetensors"):
            if path != self._path(keep):
                path.unlink()

    def _candidates(self, plan: Plan, count: int) -> Mapping[int, Mapping[str, float]]:
        if plan.runs is None:
            return {index: dict(plan.params) for index in range(count)}
        drawn = self.store.draw(
            self.study, self.arm, space=self.space, streams=self.streams, indices=range(count)
        )
        return {index: {**plan.params, **params} for index, params in drawn.items()}

    def _trial_secret(self, index: int) -> bytes:
        return self.streams.key("trial", index)

    def _path(self, index: int) -> Path:
        return self.folder / f"trial-{index:06d}.safetensors"


def write_result(result: TrialResult, path: Path) -> None:
    """Write a result so that it is there whole or not at all."""
    from safetensors.torch import save_file

    document = {
        "index": result.index,
        "params": dict(result.params),
        "score": None if result.score is None else repr(result.score),
        "curves": {name: list(values) for name, values in result.curves.items()},
        "transcript_digest": result.transcript_digest,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    partial = path.with_suffix(f".partial-{os.getpid()}")
    save_file(
        {"weights": result.weights.contiguous()}, partial, metadata={"result": json.dumps(document)}
    )
    partial.replace(path)


def read_result(path: Path) -> TrialResult:
    """Read what :func:`write_result` wrote."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        weights = file.get_tensor("weights")
    if "result" not in metadata:
        raise PrivTuneError(f"{path.name} is not a trial's result; move it away and run again.")
    document = json.loads(metadata["result"])
    score = document.pop("score")
    return TrialResult(weights=weights, score=None if score is None else float(score), **document)


def _told(result: TrialResult) -> float:
    score = -math.inf if result.score is None else result.score
    return -math.inf if math.isnan(score) else score
