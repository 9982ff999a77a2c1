"""Plans: frozen values that say what will touch the data, and therefore what it costs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from privtune.accounting import (
    Event,
    NonPrivate,
    RunLaw,
    event_from_dict,
    run_law_from_dict,
)
from privtune.accounting.reach import mass_beyond_reach
from privtune.ledger import RECORD
from privtune.strategies.score_plan import ScorePlan
from privtune.strategies.trainings import SearchPlan, TrainingPlan
from privtune.training.mechanism.schedule import NoiseOptions

if TYPE_CHECKING:
    from privtune.spaces import SearchSpace
    from privtune.training.mechanism.streams import Streams


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one arm will do to the data, before it does anything.

    Args:
        arm: Name of the arm.
        strategy: Name of the strategy.
        event: What the arm costs; the ledger charges exactly this.
        training: What the released model's training runs.
        params: Hyperparameters given in advance; empty where they are drawn or adapted.
        runs: Law of the secret number of runs; ``None`` where the number is public.
        score: How trials are scored; ``None`` where nothing is chosen.
        released: What leaves the trust boundary, in words.
        sealed: What does not, in words.
        search: The trials that hyperparameters are chosen from; ``None`` where nothing is chosen.
        final: Whether the released model is trained after the search, and not one of its trials.
        rate: Probability that a record is in the subset that is tuned on; ``None`` without subset.
        report: How the released model is scored on the test split; ``None`` where it is not asked.
        details: What else there is to say about the plan, JSON-ready.

    Example:
        >>> from privtune import NoiseOptions
        >>> plan = study.plans[1]
        >>> plan.strategy, plan.event.type, plan.is_sealed, round(plan.expected_runs)
        ('papernot-steinke', 'private_selection', True, 4)
        >>> Plan.from_dict(plan.to_dict()).digest() == plan.digest()  # the digest is kept with the charge
        True
        >>> plan.with_noise(NoiseOptions.of("secure")).digest() == plan.digest()
        False
        >>> from privtune.training.mechanism.streams import Streams
        >>> drawn = plan.candidate(study.spec.planning_context().space, Streams(bytes(32)), 0)
        >>> sorted(drawn), plan.training_of(drawn) == plan.training
        (['learning_rate', 'max_grad_norm'], True)
    """

    arm: str
    strategy: str
    event: Event
    training: TrainingPlan
    params: Mapping[str, float]
    runs: RunLaw | None
    score: ScorePlan | None
    released: tuple[str, ...]
    sealed: tuple[str, ...]
    search: SearchPlan | None = None
    final: bool = True
    rate: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    report: ScorePlan | None = None

    @property
    def public_facts(self) -> Mapping[str, str]:
        """What the plan rests on that is declared public, as people read it, in order."""
        facts: Mapping[str, str] = self.details.get("public", {})
        return facts

    def candidate(self, space: SearchSpace, streams: Streams, number: int) -> dict[str, Any]:
        """Draw a candidate of a round: a function of the streams and its number alone.

        Args:
            space: What candidates are drawn from.
            streams: The round's random streams.
            number: Its number, from 0.

        Returns:
            Its hyperparameters.
        """
        drawn = {**self.params, **space.draw(streams, number)}
        return drawn if self.search is None else self.search.placed(drawn, streams, number)

    def training_of(self, params: Mapping[str, Any]) -> TrainingPlan:
        """Return what the model of a release was trained by.

        Args:
            params: The release's hyperparameters; empty where there is no model.

        Returns:
            The training; the plan's own where nothing differs.
        """
        if self.final or self.search is None or not params:
            return self.training
        return self.search.training_of(params)

    @property
    def first_training(self) -> TrainingPlan:
        """What its first trial runs: of a search the first training, else the plan's own."""
        return self.training if self.search is None else self.search.trainings[0]

    @property
    def fixed(self) -> dict[str, Any]:
        """Hyperparameters that its first trial does not draw."""
        return {**self.params, **({} if self.search is None else self.search.points[0])}

    @property
    def unit(self) -> str:
        """What its event counts as one: what is sampled, clipped and scored."""
        return str(self.details.get("unit", RECORD))

    @property
    def noise_note(self) -> str:
        """What weakens the noise of its trainings, in words."""
        return self.training.noise.note

    @property
    def is_private(self) -> bool:
        """Whether the arm has any guarantee. One that has none is no part of a budget."""
        return not isinstance(self.event, NonPrivate)

    @property
    def is_sealed(self) -> bool:
        """Whether anything about the trials, their number or their time must stay secret."""
        return self.runs is not None

    @property
    def scored(self) -> str:
        """What the score of its release is of: ``validation`` of the released model, or ``tuning``.

        Where the released model is trained after a search, the score is that of the search's winner.
        """
        return "tuning" if self.final and self.search is not None else "validation"

    @property
    def threshold(self) -> float | None:
        """The known score at which a sealed round ends early; ``None`` if all its runs run."""
        return self.details.get("threshold")

    def with_noise(self, noise: NoiseOptions) -> Plan:
        """Return the plan with the noise of every training from this source.

        Args:
            noise: Where noise comes from, and how it is treated.
        """
        return dataclasses.replace(
            self,
            training=dataclasses.replace(self.training, noise=noise),
            search=None if self.search is None else self.search.with_noise(noise),
        )

    @property
    def beyond_reach(self) -> float:
        """Mass of the outputs that the generator cannot reach: see ``accounting.reach``."""
        return mass_beyond_reach(self.event)

    @property
    def expected_runs(self) -> float:
        """Expected number of trainings; with a :attr:`threshold`, the most it can be."""
        last = 1.0 if self.final else 0.0
        if self.runs is not None:
            return self.runs.expected_runs + last
        return last + (0.0 if self.search is None else float(self.search.trials or 0))

    @property
    def expected_gradient_evaluations(self) -> float:
        """Expected per-sample gradients of the whole arm."""
        last = self.training.expected_gradient_evaluations if self.final else 0.0
        if self.search is None:
            return last
        trials = self.expected_runs - (1.0 if self.final else 0.0)
        return last + trials * self.search.mean_gradient_evaluations

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-ready data."""
        return {
            "arm": self.arm,
            "strategy": self.strategy,
            "event": self.event.to_dict(),
            "training": self.training.to_dict(),
            "params": dict(self.params),
            "runs": None if self.runs is None else self.runs.to_dict(),
            "score": None if self.score is None else self.score.to_dict(),
            "released": list(self.released),
            "sealed": list(self.sealed),
            "search": None if self.search is None else self.search.to_dict(),
            "final": self.final,
            "rate": self.rate,
            "details": dict(self.details),
            "report": None if self.report is None else self.report.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Read what :meth:`to_dict` wrote.

        Args:
            data: What :meth:`to_dict` wrote.

        Returns:
            The plan.
        """
        return cls(
            arm=data["arm"],
            strategy=data["strategy"],
            event=event_from_dict(data["event"]),
            training=TrainingPlan.from_dict(data["training"]),
            params=data["params"],
            runs=None if data["runs"] is None else run_law_from_dict(data["runs"]),
            score=None if data["score"] is None else ScorePlan(**data["score"]),
            released=tuple(data["released"]),
            sealed=tuple(data["sealed"]),
            search=None if data["search"] is None else SearchPlan.from_dict(data["search"]),
            final=data["final"],
            rate=data["rate"],
            details=data["details"],
            report=None if data["report"] is None else ScorePlan(**data["report"]),
        )

    def digest(self) -> str:
        """Return the SHA-256 of the plan's canonical JSON, kept with its charge.

        Numbers count to nine digits: calibrations on two machines may differ in the last ones.
        """
        rounded = json.loads(json.dumps(self.to_dict()), parse_float=lambda x: f"{float(x):.9g}")
        text = json.dumps(rounded, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()
