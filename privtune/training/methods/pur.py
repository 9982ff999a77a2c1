"""Noise schedules by the privacy-utility ratio, for full-batch noisy gradient descent.

"Adaptive Hyperparameter Selection for Differentially Private Gradient Descent" (TMLR submission,
anonymous). Its slips, and what is done here instead:

* Definition 6 writes ``Δ / 2σ²`` for the zCDP of a Gaussian; it is ``Δ² / 2σ²``.
* In Proposition 4 (a) and (b), ``sqrt(dt)`` must read ``sqrt(d) t``, as in Proposition 3's proof.
* Proposition 4's horizons bound ``Σ t²`` by ``T³``, which wastes a factor of 3, and its (c) drops
  ``κ = M/μ``, which overspends κ-fold. The horizon here comes from the exact composition of
  Gaussians: ``μ² = Σ (Δ/σ_t)²``.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from privtune.errors import InvalidInputError
from privtune.training.mechanism.clipping import Clipping, Flat
from privtune.training.methods import method as base

if TYPE_CHECKING:
    import torch

    from privtune.accounting import Event
    from privtune.training.mechanism.oracle import Oracle
    from privtune.training.mechanism.schedule import Schedule


_SPARE = 0.5  # noise over the paper's below which more steps are worth more than less noise
_REACH = 5.0  # how far clipped gradients can move the weights, over what their noise does
_ROUNDING = 1e-9  # relative; the account may sum in another order, and round otherwise


@dataclass(frozen=True, eq=False)
class _WholeRecord(Clipping):
    """Flat clipping whose sensitivity is that of the adjacency: twice the norm for replacement."""

    max_grad_norm: float
    adjacency: str

    def sensitivity(self, candidates: int) -> torch.Tensor:
        factor = 2.0 if self.adjacency == "replace-one" else 1.0
        return factor * Flat(self.max_grad_norm).sensitivity(candidates)

    def limits(self, norms: torch.Tensor) -> torch.Tensor:
        return Flat(self.max_grad_norm).limits(norms)

    @staticmethod
    def rule(norms: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
        return Flat.rule(norms, limits)


@dataclass(frozen=True, eq=False)
class PURState:
    """The state of K trainings: weights, the noise of the last update, and the number of updates."""

    params: torch.Tensor
    noise: torch.Tensor
    step: int


@dataclass(frozen=True)
class FullBatchDescent(base.Method):
    """Noisy gradient descent ``θ - (∇F(θ) + noise) / 2M`` on all records, up to a number of updates.

    A study gives what a spec leaves out and its task knows: ``lipschitz``, ``smoothness``, ``gap`` of a
    linear model on features of public bounds, ``dimension``, and the budget's ``adjacency``.

    Args:
        lipschitz: L, what a record's gradient is clipped to, above 0: of the loss on data alone.
        smoothness: M, above 0, with the regularisation's; the rate is ``1 / 2M``.
        dimension: d, the number of parameters.
        horizon: Updates that release anything; None for every step of the schedule.
        regularisation: λ, added to the gradient as ``λ θ``; it touches no data.
        adjacency: ``"replace-one"`` (the paper's, sensitivity 2L) or ``"add-remove"`` (L, with a
            public number of records).
    """

    lipschitz: float = base.positive()
    smoothness: float = base.positive()
    dimension: int = base.whole()
    horizon: int | None = base.whole(None)
    regularisation: float = base.nonnegative(0.0)
    adjacency: str = base.choice("replace-one", "add-remove")

    proven: ClassVar[tuple[str, ...]] = ("lipschitz", "smoothness")
    clips_whole: ClassVar[str] = (
        "lipschitz bounds the whole gradient, and the noise follows from it"
    )
    releases: ClassVar[str] = "one noisy gradient of all records"
    reported: ClassVar[tuple[str, ...]] = ("noise",)

    @classmethod
    def complete(cls, options: Mapping[str, Any], **facts: Any) -> dict[str, Any]:
        """Return the options, with the task's bounds, parameter count and adjacency filled in."""
        constants: dict[str, Any] = dict(facts["constants"])
        penalty = options.get("regularisation", 0.0)
        if "smoothness" in constants and isinstance(penalty, int | float):
            constants["smoothness"] += penalty
        constants |= {"dimension": facts["dimension"](), "adjacency": facts["adjacency"]}
        names = {field.name for field in fields(cls)}
        return {**{name: value for name, value in constants.items() if name in names}, **options}

    @property
    def learning_rate(self) -> float:
        """The learning rate ``1 / 2M``."""
        return 1.0 / (2.0 * self.smoothness)

    def _sensitivity(self, records: int) -> float:
        """Return the L2 sensitivity of the mean gradient under the adjacency."""
        factor = 2.0 if self.adjacency == "replace-one" else 1.0
        return factor * self.lipschitz / records

    def _updates(self, schedule: Schedule) -> int:
        if self.horizon is None:
            return schedule.steps
        return min(schedule.steps, self.horizon)

    def gradient_evaluations(self, schedule: Schedule) -> float:
        """Return the number of per-sample gradients: N for each update of the horizon."""
        return float(schedule.records * self._updates(schedule))

    def advice(self, schedule: Schedule, dimension: Callable[[], int]) -> str:
        """Return a warning if the steps can move the weights little, compared with their noise.

        Every gradient is clipped to L, so that H steps of rate 1/2M move the weights by H L / 2M at
        most, and gradients of a mean are soon a tenth of L and less. The noise moves them by
        ``sqrt(d Σ σ_t²) / 2M`` in the root of the mean square. Both are public.

        Args:
            schedule: Records, rate and number of steps.
            dimension: Unused; the method has the number of parameters.

        Returns:
            One sentence and a remedy; empty where the steps reach five times as far as their noise.
        """
        updates = self._updates(schedule)
        reach = updates * self.learning_rate * self.lipschitz
        deviation = self._sensitivity(schedule.records) * self.learning_rate
        multipliers = (self._multiplier(step, schedule.records) for step in range(updates))
        squares = sum(multiplier**2 for multiplier in multipliers)
        drift = deviation * math.sqrt(self.dimension * squares)
        if reach >= _REACH * drift:
            return ""
        return (
            f"In {updates} steps at learning rate {self.learning_rate:.3g}, gradients can move the weights "
            f"by {reach:.3g} at most, while noise moves them by {drift:.3g}. So the model hardly leaves its "
            "initial weights, or leaves them at random. Use hyfreedp, or fixed with a learning rate that "
            "you choose; or more records or ε."
        )

    def init(self, params: torch.Tensor, candidates: Sequence[base.Candidate]) -> PURState:
        """Make the state of K candidates, which must give no hyperparameters."""
        if params.shape[1] != self.dimension:
            raise InvalidInputError(
                "dimension",
                self.dimension,
                f"must be the model's, {params.shape[1]}",
            )
        base.expect_nothing(candidates)
        return PURState(
            params=params,
            noise=params.new_full((params.shape[0],), float("nan")),
            step=0,
        )

    @abstractmethod
    def _multiplier(self, step: int, records: int) -> float:
        """Return the noise of update ``step``, from 0, over the sensitivity of the mean gradient."""

    def update(self, state: PURState, oracle: Oracle) -> PURState:
        """Take one step along the noisy mean gradient; after the horizon, only count the step."""
        if state.step >= self._updates(oracle.schedule):
            return replace(state, step=state.step + 1)
        records = oracle.schedule.records
        noise_multiplier = self._multiplier(state.step, records)
        gradient = oracle.gradient(
            oracle.everything(),
            state.params,
            clipping=_WholeRecord(self.lipschitz, self.adjacency),
            noise_multiplier=noise_multiplier,
        )
        gradient = gradient + self.regularisation * state.params
        rate = state.noise.new_full(state.noise.shape, self.learning_rate)
        return replace(
            state,
            params=base.descend(state.params, rate * oracle.pace, gradient),
            noise=state.noise.new_full(
                state.noise.shape, noise_multiplier * self._sensitivity(records)
            ),
            step=state.step + 1,
        )


def _exceeds(mu: float, *, epsilon: float, delta: float) -> bool:
    """Say whether Gaussian releases of total μ cost more than the target (ε, δ)."""
    from privtune.accounting.rdp import gaussian_delta

    return gaussian_delta(mu * (1.0 + _ROUNDING), epsilon) > delta


def _largest_mu(within: float, *, epsilon: float, delta: float) -> float:
    """Return the largest total μ of Gaussian releases that meets the target (ε, δ), by bisection."""
    low = within
    high = 2.0 * within
    while not _exceeds(high, epsilon=epsilon, delta=delta):
        low = high
        high = 2.0 * high
    while high - low > _ROUNDING * low:
        middle = 0.5 * (low + high)
        if _exceeds(middle, epsilon=epsilon, delta=delta):
            high = middle
        else:
            low = middle
    return low


@dataclass(frozen=True)
class PUR(FullBatchDescent):
    """Full-batch noisy gradient descent with the data-independent schedule of Proposition 3.

    ``σ_t`` is ``4 M sqrt(F(θ_0) - F*) / (sqrt(d) t)`` for non-convex, ``4 M R / (sqrt(d) t)`` for
    convex and ``sqrt(2 μ (F(θ_0) - F*) (1 - μ/2M)^t / d)`` for μ-strongly convex losses, t from 1.

    Args:
        regime: ``"non-convex"``, ``"convex"`` or ``"strongly-convex"``.
        gap: Data-independent bound on ``F(θ_0) - F*``, above 0 (log 2 for logistic at 0).
        distance: Data-independent bound R on ``|θ_t - θ*|``; needed for ``"convex"``.
        strong_convexity: μ; needed for ``"strongly-convex"``.
        noise_multiplier: Factor on every σ_t; 1 is the paper's schedule. A plan takes the factor, at
            most 1, with which the whole steps that fit cost the target exactly.

    Raises:
        InvalidInputError: If a field is out of its range, or one that the regime needs is missing.

    **Interval**: the rate is the constant ``1 / 2M`` and the noise the printed function of t: no release
    moves either.

    **Guarantee**: one Gaussian release about all records in each update.

    Example:
        >>> from privtune.training.mechanism.schedule import Schedule
        >>> schedule = Schedule(records=10_000, sample_rate=1.0, steps=500)
        >>> method = PUR.for_budget(
        ...     schedule, epsilon=1.0, delta=1e-5, lipschitz=1.0, smoothness=0.25, dimension=20,
        ...     regime="convex", distance=3.0,
        ... )
        >>> method.horizon, [round(method.deviation(step), 3) for step in (0, 1, method.horizon - 1)]
        (133, [0.664, 0.332, 0.005])
    """

    regime: str = base.choice("strongly-convex", "convex", "non-convex")
    gap: float = base.positive(math.log(2.0))
    distance: float | None = base.positive(None)
    strong_convexity: float | None = base.positive(None)
    noise_multiplier: float = 1.0

    name: ClassVar[str] = "pur"
    summary: ClassVar[str] = "Full-batch descent; the privacy-utility ratio sets its decaying noise"
    adapts: ClassVar[tuple[str, ...]] = ("learning_rate", "noise", "number of steps")

    def __post_init__(self) -> None:
        super().__post_init__()
        constant = {"convex": "distance", "strongly-convex": "strong_convexity"}.get(self.regime)
        if constant is not None and getattr(self, constant) is None:
            raise InvalidInputError(constant, None, f"must be given for a {self.regime} loss")

    @classmethod
    def complete(cls, options: Mapping[str, Any], **facts: Any) -> dict[str, Any]:
        """Return the options, with a regime and its constant filled in for losses with known bounds."""
        settings = super().complete(options, **facts)
        penalty = options.get("regularisation", 0.0)
        if not facts["constants"]:
            return settings
        if penalty:
            return {"regime": "strongly-convex", "strong_convexity": penalty, **settings}
        return {"regime": "convex" if "distance" in options else "non-convex", **settings}

    @classmethod
    def for_budget(
        cls,
        schedule: Schedule,
        /,
        *,
        epsilon: float,
        delta: float,
        **options: Any,
    ) -> Self:
        """Build the method with as many steps of the paper's schedule as the target (ε, δ) allows.

        The horizon is the longest, of the schedule's steps at most, that costs no more than the target
        at the paper's noise. A whole number of steps leaves a part of the target; one factor on all
        noise then takes the rest.

        Args:
            schedule: Records, rate and number of steps.
            epsilon: Target, above 0.
            delta: Target, in (0, 1).
            options: Other fields but ``horizon``. With ``noise_multiplier`` the noise stays as it is
                given: 1 is the paper's schedule to the letter, whose whole steps cost less than the
                target.

        Raises:
            InvalidInputError: If not even the first step costs as little as the target.
        """
        unit = base.build(cls, options, horizon=None)
        horizon = unit._longest(schedule, epsilon=epsilon, delta=delta)
        method = replace(unit, horizon=horizon)
        if "noise_multiplier" in options:
            return method
        spent = math.sqrt(sum(method._costs(schedule)))
        affordable = _largest_mu(spent, epsilon=epsilon, delta=delta)
        return replace(method, noise_multiplier=method.noise_multiplier * spent / affordable)

    def _costs(self, schedule: Schedule) -> Iterator[float]:
        """Yield the amount that each update adds to the total μ²."""
        for step in range(self._updates(schedule)):
            yield self._multiplier(step, schedule.records) ** -2

    def _longest(self, schedule: Schedule, *, epsilon: float, delta: float) -> int:
        """Return how many steps the target (ε, δ) allows, by exact composition of Gaussians."""
        spent = 0.0
        for step, cost in enumerate(self._costs(schedule)):
            spent += cost
            if _exceeds(math.sqrt(spent), epsilon=epsilon, delta=delta):
                if step == 0:
                    raise InvalidInputError(
                        "epsilon",
                        epsilon,
                        "does not pay for a single step of this schedule",
                    )
                return step
        return schedule.steps

    def advice(self, schedule: Schedule, dimension: Callable[[], int]) -> str:
        """Return a warning if steps move the weights little, or if the target would pay for more steps.

        Example:
            >>> from privtune.training.mechanism.schedule import Schedule
            >>> schedule = Schedule(records=100_000, sample_rate=1.0, steps=40)
            >>> bounds = {"lipschitz": 1.0, "smoothness": 0.25, "dimension": 20}
            >>> method = PUR.for_budget(schedule, epsilon=1.0, delta=1e-5, regime="non-convex", **bounds)
            >>> method.advice(schedule, lambda: 20)[:60]
            'All 40 steps need only 0.0596 of the noise that the method i'
        """
        few = ""
        if self._updates(schedule) == schedule.steps and 0.0 < self.noise_multiplier < _SPARE:
            few = (
                f"All {schedule.steps} steps need only {self.noise_multiplier:.3g} of the noise that the "
                "method intends, so with more epochs the same ε would pay for more steps."
            )
        return " ".join(filter(None, (super().advice(schedule, dimension), few)))

    def deviation(self, step: int) -> float:
        """Return the noise's standard deviation σ in an update, by Proposition 3 at ``t = step + 1``.

        Args:
            step: The update, from 0.
        """
        t = step + 1
        if self.regime == "strongly-convex":
            mu = self.strong_convexity or 0.0
            shrink = (1.0 - mu / (2.0 * self.smoothness)) ** t
            sigma = math.sqrt(2.0 * mu * self.gap * shrink / self.dimension)
        else:
            if self.regime == "non-convex":
                reach = math.sqrt(self.gap)
            else:
                reach = self.distance or 0.0
            sigma = 4.0 * self.smoothness * reach / (math.sqrt(self.dimension) * t)
        return self.noise_multiplier * sigma

    def _multiplier(self, step: int, records: int) -> float:
        return self.deviation(step) / self._sensitivity(records)

    def event(self, schedule: Schedule) -> Event:
        """Return the event of one Gaussian release for each update of the horizon."""
        from privtune.accounting import Composed, Gaussian, NonPrivate

        if self.noise_multiplier == 0.0:
            return NonPrivate()
        steps = range(self._updates(schedule))
        return Composed([Gaussian(self._multiplier(t, schedule.records)) for t in steps])


@dataclass(frozen=True)
class PURConstant(FullBatchDescent):
    """Full-batch noisy gradient descent with the same noise in every step.

    Args:
        noise_multiplier: Noise standard deviation over the sensitivity of the mean, at least 0.

    **Guarantee**: one Gaussian release about all records in each update.

    Example:
        >>> from privtune.training.mechanism.schedule import Schedule
        >>> schedule = Schedule(records=10_000, sample_rate=1.0, steps=500)
        >>> bounds = {"lipschitz": 1.0, "smoothness": 0.25, "dimension": 20, "horizon": 100}
        >>> method = PURConstant.for_budget(schedule, epsilon=1.0, delta=1e-5, **bounds)
        >>> round(method.noise_multiplier, 2), method.gradient_evaluations(schedule)
        (37.31, 1000000.0)
    """

    noise_multiplier: float = 1.0

    name: ClassVar[str] = "pur-constant"
    summary: ClassVar[str] = "Full-batch descent with constant noise"
    adapts: ClassVar[tuple[str, ...]] = ("learning_rate",)

    @classmethod
    def for_budget(
        cls,
        schedule: Schedule,
        /,
        *,
        epsilon: float,
        delta: float,
        **options: Any,
    ) -> Self:
        """Build the method with the least noise that keeps its steps at (epsilon, delta)."""
        from privtune.accounting import Adjacency, calibrate

        unit = base.build(cls, options, noise_multiplier=1.0)
        calibrated = calibrate(
            unit.event(schedule),
            epsilon=epsilon,
            delta=delta,
            adjacency=Adjacency(unit.adjacency),
        )
        return replace(unit, noise_multiplier=calibrated.scale)

    def _multiplier(self, step: int, records: int) -> float:
        return self.noise_multiplier

    def event(self, schedule: Schedule) -> Event:
        """Return the event of equal Gaussian releases about all records, one for each update."""
        from privtune.accounting import Gaussian, NonPrivate, Repeated

        if self.noise_multiplier == 0.0:
            return NonPrivate()
        return Repeated(self._updates(schedule), Gaussian(self.noise_multiplier))
