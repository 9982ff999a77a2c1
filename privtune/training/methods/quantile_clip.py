"""Quantile clipping: the clipping norm follows a quantile (Andrew et al. 2021, arXiv 1905.03871)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from privtune.errors import InvalidInputError
from privtune.training.methods import method as base
from privtune.training.methods.fixed_rates import RateState

if TYPE_CHECKING:
    import torch

    from privtune.accounting import Event
    from privtune.training.mechanism.oracle import Oracle
    from privtune.training.mechanism.schedule import Schedule

_BATCH_PER_COUNT_NOISE = 10.0  # the paper's σ_b = B/20 on the count, over its sensitivity of 1/2
_LEAST_RATIO = 3.0  # of count noise to joint noise: the count takes at most 6% more gradient noise
_NORM_RANGE = (1e-6, 1e6)  # a norm at 0 or infinity could not be noised
_ROUNDING = 1e-9  # keeps the joint noise above its target after it was split and joined again


@dataclass(frozen=True)
class QuantileClipping(base.Method):
    """SGD whose clipping norm is moved towards a quantile of the gradient norms.

    Beside the gradient, each step releases how many gradients were not clipped, encoded as ±1/2 a
    record, about the same sample: one joint release with
    ``1/σ² = 1/σ_g² + 1/(2 σ_b)²`` (Theorem 1).

    Args:
        count_noise_multiplier: 2 σ_b, noise standard deviation of the count over 1/2, at least 0.
        quantile: Fraction of gradients that should stay unclipped, in (0, 1).
        norm_rate: Learning rate of the logarithm of the norm, above 0.
        momentum: Momentum in [0, 1) on the noisy gradient.
        max_grad_norm: Initial clipping norm, above 0, for candidates that give none.
        clipping: ``flat``, or ``by-layer``; a record then counts as clipped where any of its layers is.

    Raises:
        InvalidInputError: If a field is out of its range.

    **Interval**: from the first step on, the norm stays within 1e-6 and 1e6; a fraction that is no number
    leaves it where it was. The rate is a constant.

    **Guarantee**: each step is one Poisson-sampled joint Gaussian release. The paper divides the
    count by the realised batch size; here both means divide by the public expected one.

    Example:
        >>> from privtune.training.mechanism.schedule import Schedule
        >>> schedule = Schedule.from_epochs(records=60_000, expected_batch_size=600, epochs=10)
        >>> method = QuantileClipping.for_budget(schedule, epsilon=1.0, delta=1e-5, quantile=0.3)
        >>> round(method.noise_multiplier, 3), method.count_noise_multiplier  # DP-SGD: 1.415
        (1.415, 60.0)
    """

    noise_multiplier: float
    count_noise_multiplier: float
    quantile: float = 0.5
    norm_rate: float = base.positive(0.2)
    momentum: float = base.fraction(0.0)
    max_grad_norm: float = base.norm(0.1)
    clipping: str = base.by_layer_option()

    name: ClassVar[str] = "quantile-clipping"
    summary: ClassVar[str] = "Clipping norm follows a quantile of the gradient norms"
    adapts: ClassVar[tuple[str, ...]] = ("max_grad_norm",)
    parameters: ClassVar[tuple[str, ...]] = ("learning_rate",)
    releases: ClassVar[str] = "one clipped noisy gradient and the noisy fraction not clipped"
    reported: ClassVar[tuple[str, ...]] = ("learning_rate", "max_grad_norm")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.quantile < 1.0:
            raise InvalidInputError("quantile", self.quantile, "must lie in (0, 1)")

    def _optimizer(self) -> base.SGD:
        return base.SGD(self.momentum)

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
        """Build the method with the least gradient noise that meets the target beside the count's noise."""
        from privtune.accounting import Gaussian, PoissonSampled, Repeated, calibrate
        from privtune.accounting.calibration import rounded_up

        settings = dict(options)
        multiplier = settings.pop("count_noise_multiplier", None)
        base.build(cls, settings, noise_multiplier=1.0, count_noise_multiplier=1.0)
        unit = Repeated(schedule.steps, PoissonSampled(schedule.sample_rate, Gaussian(1.0)))
        joint = calibrate(unit, epsilon=epsilon, delta=delta).scale * (1.0 + _ROUNDING)
        usual = max(schedule.expected_batch_size / _BATCH_PER_COUNT_NOISE, _LEAST_RATIO * joint)
        count = usual if multiplier is None else float(multiplier)
        if not count > joint:
            raise InvalidInputError(
                "count_noise_multiplier",
                count,
                f"must be above {joint:.3g}, the noise that the whole step needs",
                "Take a larger expected batch or more count noise.",
            )
        gradient = rounded_up((joint**-2 - count**-2) ** -0.5, 1e-4)
        return base.build(cls, settings, noise_multiplier=gradient, count_noise_multiplier=count)

    def event(self, schedule: Schedule) -> Event:
        """Return the event of T Poisson-sampled joint releases, each of a gradient and a count."""
        from privtune.accounting import Gaussian, Joint, NonPrivate, PoissonSampled, Repeated

        if self.noise_multiplier == 0.0 or self.count_noise_multiplier == 0.0:
            return NonPrivate()
        step = Joint([Gaussian(self.noise_multiplier), Gaussian(self.count_noise_multiplier)])
        return Repeated(schedule.steps, PoissonSampled(schedule.sample_rate, step))

    def init(self, params: torch.Tensor, candidates: Sequence[base.Candidate]) -> RateState:
        """Make the state of K candidates, each with a ``learning_rate`` and perhaps a ``max_grad_norm``."""
        return RateState(
            params=params,
            learning_rate=base.candidate_column(candidates, "learning_rate", params),
            max_grad_norm=base.candidate_column(
                candidates,
                "max_grad_norm",
                params,
                default=self.max_grad_norm,
            ),
            moments=self._optimizer().init(params),
        )

    def update(self, state: RateState, oracle: Oracle) -> RateState:
        """Take one step and move the clipping norm towards the quantile."""
        gradient, fraction = oracle.gradient_and_fraction(
            oracle.sample(),
            state.params,
            clipping=self.clip(state.max_grad_norm),
            noise_multiplier=self.noise_multiplier,
            count_noise_multiplier=self.count_noise_multiplier,
        )
        direction, moments = self._optimizer().direction(state.moments, gradient, state.params)
        # A fraction that is no number changes nothing.
        change = (-self.norm_rate * (fraction - self.quantile)).nan_to_num(0.0)
        return replace(
            state,
            params=base.descend(state.params, state.learning_rate * oracle.pace, direction),
            max_grad_norm=(state.max_grad_norm * change.exp().to(state.max_grad_norm)).clamp(
                *_NORM_RANGE
            ),
            moments=moments,
        )
