"""Plan of a stage: what it reads and releases, and what that costs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import privtune.accounting as acc
from privtune.accounting.reach import mass_beyond_reach
from privtune.errors import PrivTuneError
from privtune.ledger import RECORD
from privtune.training.mechanism.metrics import noised
from privtune.training.mechanism.schedule import NoiseOptions
from privtune.training.mechanism.streams import Streams

if TYPE_CHECKING:
    from privtune.stages.stage import TaskStage

_NEGLIGIBLE = 1e-3  # of δ


def digest_of_document(data: Any) -> str:
    """Return the SHA-256 of JSON-ready data in its canonical form: names sorted, no spaces."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """Plan of what a stage does to the data, kept beside the plans of arms.

    Args:
        arm: The name that its charge goes under, that of the stage.
        stage: What is released of the data before any arm.
        event: What that costs.
        scale: Standard deviation of the noise on each of the stage's sums, in their units.
        noise: Where the noise comes from.
        public_facts: What the plan rests on that is declared public, as people read it.
        dataset: Which dataset it reads; None where nothing is said.
    """

    arm: str
    stage: TaskStage
    event: acc.Event
    scale: float
    noise: NoiseOptions = field(default_factory=NoiseOptions)
    public_facts: Mapping[str, str] = field(default_factory=dict)
    dataset: Mapping[str, Any] | None = None

    unit = RECORD
    is_private = True
    is_sealed = True
    runs = None

    @property
    def charged(self) -> acc.Event:
        """The event that the ledger charges."""
        return self.event

    @property
    def noise_note(self) -> str:
        """The noise options that differ from the defaults, in words; empty if none does."""
        return self.noise.note

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-ready data."""
        return {
            "stage": self.stage.to_dict(),
            "arm": self.arm,
            "event": self.event.to_dict(),
            "scale": self.scale,
            "noise": self.noise.to_dict(),
            "public": dict(self.public_facts),
            "dataset": None if self.dataset is None else dict(self.dataset),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StagePlan:
        """Return the plan that the data of :meth:`to_dict` describes."""
        from privtune.stages.spec_stages import make_stage

        return cls(
            arm=data["arm"],
            stage=make_stage(data["stage"]),
            event=acc.event_from_dict(data["event"]),
            scale=data["scale"],
            noise=NoiseOptions.of(data["noise"]),
            public_facts=data["public"],
            dataset=data["dataset"],
        )

    def digest(self) -> str:
        """Return the SHA-256 of the plan's canonical JSON, kept with its charge."""
        return digest_of_document(self.to_dict())


def plan_stage(
    stage: TaskStage,
    task: Mapping[str, Any],
    *,
    epsilon: float,
    delta: float,
    adjacency: acc.Adjacency,
    noise: NoiseOptions,
    public_facts: Mapping[str, str],
    dataset: Mapping[str, Any] | None,
) -> StagePlan:
    """Plan a stage at its share of a study's ε, or at its own noise.

    Args:
        stage: What is released before any arm.
        task: What the spec says of the task: its public facts give the sensitivity.
        epsilon: ε of the study, of which the stage has a share.
        delta: δ of the study's budget.
        adjacency: Which neighbours the noise hides.
        noise: Where the noise comes from.
        public_facts: What the plan rests on that is declared public.
        dataset: Which dataset the stage reads.

    Raises:
        PrivTuneError: If the noise is so little that what it cannot reach is not negligible.
    """
    multiplier = stage.noise_multiplier
    if multiplier is None:
        share = epsilon * (stage.epsilon_share or 0.0)
        calibration = acc.calibrate(
            acc.Gaussian(1.0), epsilon=share, delta=delta, adjacency=adjacency
        )
        multiplier = calibration.scale
    event = acc.Gaussian(multiplier)
    if mass_beyond_reach(event) > _NEGLIGIBLE * delta:
        raise PrivTuneError(
            f"Stage {stage.name!r}: with so little noise its outputs lie beyond the reach of any "
            f"generator here, and δ is {delta:g}; ask for a smaller epsilon_share."
        )
    return StagePlan(
        arm=stage.name,
        stage=stage,
        event=event,
        scale=multiplier * stage.sensitivity(task, adjacency),
        noise=noise.independent,
        public_facts=public_facts,
        dataset=dataset,
    )


def release_stage(plan: StagePlan, task: Mapping[str, Any], streams: Streams) -> dict[str, Any]:
    """Read the data and return the stage's release, the same at every call with the same streams."""
    sums = plan.stage.sums(task)
    values = noised(sums, scale=plan.scale, streams=streams, noise=plan.noise)
    return plan.stage.document(task, values, plan.scale)
