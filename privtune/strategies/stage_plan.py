"""The plan of a stage: one noised release before the arms, charged by itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from privtune.accounting import Adjacency, Event, Gaussian, calibrate, event_from_dict
from privtune.accounting.reach import mass_beyond_reach
from privtune.errors import PrivTuneError
from privtune.ledger import RECORD
from privtune.tasks._stage import TaskStage
from privtune.training.mechanism.metrics import noised
from privtune.training.mechanism.schedule import NoiseOptions
from privtune.training.mechanism.streams import Streams

_NEGLIGIBLE = 1e-3  # of δ


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """What a stage will do to the data: it stands beside the plans of arms, and lives as they do.

    Args:
        arm: The stage's name.
        stage: What it releases.
        event: What it costs; the ledger charges exactly this.
        scale: Standard deviation of the noise on each of its sums.
        noise: Where noise comes from.
        public_facts: What it rests on that is declared public.
    """

    arm: str
    stage: TaskStage
    event: Event
    scale: float
    noise: NoiseOptions = field(default_factory=NoiseOptions)
    public_facts: Mapping[str, str] = field(default_factory=dict)

    unit = RECORD
    is_private = True
    is_sealed = True
    runs = None

    @property
    def noise_note(self) -> str:
        """What weakens its noise, in words."""
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
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StagePlan:
        """Read what :meth:`to_dict` wrote."""
        from privtune.tasks.stages import make_stage

        return cls(
            arm=data["arm"],
            stage=make_stage(data["stage"]),
            event=event_from_dict(data["event"]),
            scale=data["scale"],
            noise=NoiseOptions.of(data["noise"]),
            public_facts=data["public"],
        )

    def digest(self) -> str:
        """Return the SHA-256 of the plan's canonical JSON, kept with its charge."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def plan_stage(
    stage: TaskStage,
    task: Mapping[str, Any],
    *,
    epsilon: float,
    delta: float,
    adjacency: Adjacency,
    noise: NoiseOptions,
    public_facts: Mapping[str, str],
) -> StagePlan:
    """Plan a stage at its share of a study's ε, or at its own noise.

    Args:
        stage: What is released.
        task: The task, as those before it leave it.
        epsilon: What the whole study may cost.
        delta: The budget's δ.
        adjacency: The budget's neighbouring relation.
        noise: Where noise comes from.
        public_facts: What is declared public of the task.

    Returns:
        The plan, whose noise is the event's multiplier times the proven sensitivity.
    """
    multiplier = stage.noise_multiplier
    if multiplier is None:
        share = epsilon * (stage.epsilon_share or 0.0)
        unit = Gaussian(1.0)
        multiplier = calibrate(unit, epsilon=share, delta=delta, adjacency=adjacency).scale
    event = Gaussian(multiplier)
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
        noise=noise,
        public_facts=public_facts,
    )


def release_stage(plan: StagePlan, task: Mapping[str, Any], streams: Streams) -> dict[str, Any]:
    """Read the data, and return what a stage releases of it: asked again, the same.

    Args:
        plan: The stage's plan; its charge has been started.
        task: The task, with what the stages before it released.
        streams: Of the stage's own secret.

    **Guarantee**: the sums move by at most ``sensitivity`` between neighbours, and get Gaussian noise
    of the event's multiplier times that; what is released is a function of the noised sums alone.
    """
    sums = plan.stage.sums(task)
    values = noised(sums, scale=plan.scale, streams=streams, noise=plan.noise)
    return plan.stage.document(task, values, plan.scale)
