"""HyFreeDP: learning rate and clipping without hyperparameters (Bu & Liu 2025, Algorithm 1).

What differs from the paper:

* The account. The paper composes the loss releases as if each had been sampled separately, but all
  of them see one batch; ``event`` charges one joint release (``loss_batch="same"``), or the losses
  have a batch of their own (``loss_batch="separate"``). So it is for Laplace noise on the losses.
* The fit, unless ``fit="paper"``. At the initial rate of 1e-4 the three losses of a small batch
  differ by less than their noise; Algorithm 1 then divides two noises, a half-Cauchy ratio of scale
  ``sqrt(2)/(2 sqrt(6)) = 0.29``, so the rate shrinks geometrically and training never starts. And
  the rate that lowers the next loss most is far below the one that gets farthest in many noisy
  steps: one step's direction has the stiff coordinates, where training swings to and fro. So
  ``fit="robust"``, the default:

  - begins at a rate of the size of the public first weights, and stays within a public interval
    about it: with much noise the losses say too little to be followed anywhere;
  - probes the losses along the way of the last 20 steps, at its beginning and as far ahead, which
    says by what factor the rate was off; a factor counts as far as it stands out from the noise;
  - steps at the geometric mean of the fitted rates, which falls to 0 over the last three tenths of
    the steps;
  - clips losses to 1.5 times the mean loss at the iterate, and never below the initial bound.

  As many losses are released, with the same noise.
* Guards. ``fit="paper"`` is Algorithm 1, but a fit that is no number above 0 moves nothing. Its loss
  bound is that of the paper's runs, the sum of the three noisy losses ("in practice, we set a more
  conservative loss clipping threshold"), in place of line 7's ``R_l = L̃(0)``, at which about half of
  the records' losses are clipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from privtune.errors import InvalidInputError
from privtune.training.methods import method as base

if TYPE_CHECKING:
    import torch

    from privtune.accounting import Event
    from privtune.training.mechanism.oracle import Oracle, Sample
    from privtune.training.mechanism.schedule import Schedule


_DEVIATIONS: Mapping[str, float] = {"gaussian": 1.0, "laplace": 2.0**0.5}  # of noise of scale 1
_PAPER_RATE = 1e-4
_PAPER_SPREAD = 1e24  # the paper's first rate; its rates have no bounds
_LEAST = 0.1  # least rate over the size of a first weight
_SPREAD = 5.0
_FREE_SPREAD = 100.0  # where little can be spoilt: a head or biases alone, weights from zero
_LOUD = 0.25  # three deviations of a probe's noise over the bound: beyond, losses say nothing
_FEW = 25  # fits: with fewer, much of a training is over before the rate is where it should be


@dataclass(frozen=True, eq=False)
class HyFreeDPState:
    """The state of K HyFreeDP trainings; ``loss`` is the last noisy loss at the present weights."""

    params: torch.Tensor
    fit: Fit
    loss_bound: torch.Tensor
    loss: torch.Tensor
    moments: base.Moments
    past: torch.Tensor
    step: int


@dataclass(frozen=True)
class HyFreeDP(base.Method):
    """A method on normalised noisy gradients, whose learning rate is fitted to three noisy losses.

    Args:
        gradient_noise_multiplier: Noise standard deviation of the normalised gradient sum, >= 0.
        loss_noise_multiplier: Noise scale of each loss sum over its bound, >= 0: the standard
            deviation of Gaussian noise, the scale of Laplace noise.
        interval: Steps K from one update of the learning rate to the next, >= 1.
        loss_batch: ``"same"`` asks for the losses about the gradient's batch, ``"separate"`` about
            an independent one.
        loss_noise: ``"gaussian"`` or ``"laplace"`` (Algorithm 2): the noise on the losses.
        optimizer: What the noisy gradient goes through: ``"adamw"`` with 0.9, 0.999 and a decay of
            0.01, which the paper fixes, or ``"sgd"``.
        learning_rate: First learning rate, above 0. None takes what moves a weight by the geometric
            middle of 0.1 and ``0.1 * spread`` times the size of the first weights: that is the rate of
            AdamW, and for SGD it is over the size of a noisy gradient. 1e-4 for ``"paper"``.
        spread: Largest over smallest learning rate, at least 1; the first is their geometric middle.
            None takes 5; 100 where the head or biases alone are trained, and where all first
            weights are 0.
        loss_bound: Initial bound on a record's loss, above 0; also its floor.
        fit: ``"robust"``, or ``"paper"`` for Algorithm 1 with the loss bound of the paper's runs.
        stabilizer: Added to the gradient norm before dividing by it, above 0.
        momentum: Momentum of the optimizer ``"sgd"``.
        weight_decay: Weight decay of the optimizer; None takes 0 for SGD and 0.01 for AdamW.

    Raises:
        InvalidInputError: If a field is out of its range.

    **Interval**: the rate stays within ``first / sqrt(spread)`` and ``first * sqrt(spread)``, before the
    factors of ``schedule``: by default 0.1 to 0.5 times the size of the first weights, their root
    mean square, or ``1 / sqrt(3 fan_in)`` where they are all 0. The loss bound stays between its
    first value and 1e6. ``fit="paper"``: 1e-12 to 1e12 times the first rate; loss bounds 1e-6 to 1e6.

    **Guarantee**: each step is one Poisson-sampled Gaussian release; with ``loss_batch="same"`` one that
    also releases losses is joint. A record moves a loss sum by its bound at most, in either norm.

    References:
        Bu & Liu 2025, Algorithm 1 and 2; Bu et al. 2023, arXiv 2206.07136 (automatic clipping).

    Example:
        >>> from privtune.training.mechanism.schedule import Schedule
        >>> method = HyFreeDP(gradient_noise_multiplier=1.2, loss_noise_multiplier=8.0, interval=5)
        >>> event = method.event(Schedule(records=1000, sample_rate=0.05, steps=20))
        >>> [(part.count, part.event.event.type) for part in event.events]  # losses every fifth step
        [(16, 'gaussian'), (4, 'joint')]
    """

    gradient_noise_multiplier: float
    loss_noise_multiplier: float
    interval: int = base.whole(5)
    loss_batch: str = base.choice("same", "separate")
    loss_noise: str = base.choice("gaussian", "laplace")
    optimizer: str = base.choice("adamw", "sgd")
    learning_rate: float | None = base.positive(None)
    spread: float | None = None
    loss_bound: float = base.positive(1.0)
    fit: str = base.choice("robust", "paper")
    stabilizer: float = base.positive(0.01)
    momentum: float = base.fraction(0.0)
    weight_decay: float | None = base.nonnegative(None)
    clipping: str = base.by_layer_option()

    name: ClassVar[str] = "hyfreedp"
    summary: ClassVar[str] = "Learning rate fitted to three noisy losses; normalised gradients"
    adapts: ClassVar[tuple[str, ...]] = ("learning_rate", "max_grad_norm")
    normalises: ClassVar[bool] = True
    releases: ClassVar[str] = (
        "one normalised noisy gradient; every K-th step also three clipped noisy losses"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.spread is not None and not 1.0 <= self.spread <= _PAPER_SPREAD:
            raise InvalidInputError("spread", self.spread, f"must be from 1 to {_PAPER_SPREAD:g}")

    def _inner(self) -> base.InnerOptimizer:
        if self.optimizer == "adamw":
            return base.AdamW(weight_decay=0.01 if self.weight_decay is None else self.weight_decay)
        return base.SGD(momentum=self.momentum, weight_decay=self.weight_decay or 0.0)

    @classmethod
    def complete(cls, options: Mapping[str, Any], **facts: Any) -> dict[str, Any]:
        """Return the options, with a spread or a schedule to suit tasks that train only a part of a model.

        Example:
            >>> HyFreeDP.complete({}, part="head"), HyFreeDP.complete({}, part="lora:4")
            ({'spread': 100.0}, {'schedule': 'constant'})
        """
        settings: dict[str, Any] = {}
        part = facts["part"]
        if part.startswith("lora"):  # adapters still learn when the rate would begin to fall
            settings = {"schedule": "constant"}
        elif part in ("head", "biases") and options.get("fit") != "paper":
            settings = {"spread": _FREE_SPREAD}
        return {**settings, **options}

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
        """Build the method for a target, with slightly more gradient noise than DP-SGD needs.

        Args:
            schedule: The public clockwork.
            epsilon: Target, above 0.
            delta: Target, in (0, 1).
            options: Other fields. With ``fit="robust"`` the rate falls linearly from 0.7 of the steps on,
                unless ``schedule`` is given. ``loss_batch`` may be ``"auto"``, the default: what needs
                less noise on the losses. ``gradient_noise_factor``, above 1, is the gradient noise over
                that of DP-SGD: 1.01 in the paper; small batches do better with 1.05.
        """
        from privtune.training.methods.hyfreedp_account import hyfreedp_noise

        settings: dict[str, Any] = dict(options)
        factor = settings.pop("gradient_noise_factor", 1.01)
        batch = settings.pop("loss_batch", "auto")
        if settings.get("fit", "robust") == "robust":
            settings = {"schedule": {"type": "linear", "start": 0.7}, **settings}
        # Refuses what is no option before it takes time to solve for the noise.
        unit = base.build(cls, settings, gradient_noise_multiplier=1.0, loss_noise_multiplier=1.0)
        noise = hyfreedp_noise(
            schedule.sample_rate,
            schedule.steps,
            interval=unit.interval,
            epsilon=epsilon,
            delta=delta,
            loss_batch=batch,
            gradient_noise_factor=factor,
            mechanism=unit.loss_noise,
        )
        return base.build(
            cls,
            settings | {"loss_batch": noise.loss_batch},
            gradient_noise_multiplier=noise.gradient_noise,
            loss_noise_multiplier=noise.loss_noise,
        )

    def advice(self, schedule: Schedule, dimension: Callable[[], int]) -> str:
        """Return a warning if noise hides the losses, or if the learning rate is fitted too rarely.

        Example:
            >>> from privtune.training.mechanism.schedule import Schedule
            >>> HyFreeDP(1.2, 2.0).advice(Schedule(records=1000, sample_rate=0.2, steps=50), lambda: 9)
            'The learning rate is fitted 10 times. On a training this short, fixed hyperparameters are ...
        """
        # Three deviations of a curvature's noise over the bound of the losses: both are public.
        deviation = 6.0**0.5 * _DEVIATIONS[self.loss_noise] * self.loss_noise_multiplier
        loud = 3.0 * deviation / schedule.expected_batch_size
        fits = -(-schedule.steps // self.interval)
        sentences = []
        if loud > _LOUD:
            sentences.append(
                f"The noise on the losses (three standard deviations) is {loud:.2g} times their bound, so "
                "the learning rate rests on little. For a network, compare it with the strategy "
                "public-rate, whose learning rate is fixed."
            )
        if fits < _FEW:
            sentences.append(
                f"The learning rate is fitted {fits} times. On a training this short, fixed hyperparameters "
                "are often better. Otherwise use more epochs."
            )
        return " ".join(sentences)

    def event(self, schedule: Schedule) -> Event:
        """Return the event of T gradient releases, of which every K-th step also releases three losses."""
        from privtune.accounting import NonPrivate
        from privtune.training.methods.hyfreedp_account import hyfreedp_event

        if self.gradient_noise_multiplier == 0.0 or self.loss_noise_multiplier == 0.0:
            return NonPrivate()
        return hyfreedp_event(
            schedule.sample_rate,
            schedule.steps,
            interval=self.interval,
            gradient_noise=self.gradient_noise_multiplier,
            loss_noise=self.loss_noise_multiplier,
            loss_batch=self.loss_batch,
            mechanism=self.loss_noise,
        )

    def init(self, params: torch.Tensor, candidates: Sequence[base.Candidate]) -> HyFreeDPState:
        """Make the state of K candidates; a candidate may give a first ``learning_rate``."""
        rates = [candidate.get("learning_rate", self.learning_rate) for candidate in candidates]
        for rate in rates:
            if rate is not None:
                base.check_hyperparameter("learning_rate", "learning_rate", rate)
        paper = self.fit == "paper"
        first_rates = params.new_tensor([rate or _PAPER_RATE * paper for rate in rates])
        return HyFreeDPState(
            params=params,
            fit=Fit(
                first_rates,
                first_rates,
                first_rates,
                first_rates.new_zeros(first_rates.shape),
                first_rates,
            ),
            loss_bound=first_rates.new_full(first_rates.shape, self.loss_bound),
            loss=first_rates.new_full(first_rates.shape, float("nan")),
            moments=self._inner().init(params),
            past=params.unsqueeze(1).repeat(1, 0 if paper else -(-WINDOW // self.interval), 1),
            step=0,
        )

    def _begun(self, state: HyFreeDPState, oracle: Oracle) -> Fit:
        """Return the first learning rate and its interval, computed from the public first weights."""
        size, zero = base.first_weight_size(state.params, oracle)
        usual = _PAPER_SPREAD if self.fit == "paper" else _SPREAD
        spread = size.new_full(size.shape, self.spread or usual)
        if self.spread is None and self.fit == "robust":
            spread = spread.where(~zero, _FREE_SPREAD)
        learning_rate = state.fit.learning_rate
        around = spread.sqrt()
        moved = 1.0  # about how far a step at a rate of 1 moves a weight: with AdamW, whatever the noise
        if self.optimizer == "sgd":
            noise = self.gradient_noise_multiplier / oracle.schedule.expected_batch_size
            moved = math.hypot(noise, state.params.shape[1] ** -0.5) / (1.0 - self.momentum)
        rate = learning_rate.where(learning_rate > 0.0, _LEAST * around * size / moved)
        return Fit(rate, rate / around, rate * around, state.fit.fits, rate)

    def update(self, state: HyFreeDPState, oracle: Oracle) -> HyFreeDPState:
        """Take one step along a noisy gradient; in every K-th step, fit the learning rate first."""
        if state.step == 0:
            state = replace(state, fit=self._begun(state, oracle))
        sample = oracle.sample()
        due = state.step % self.interval == 0
        same = self.loss_batch == "same"
        gradient = oracle.gradient(
            sample,
            state.params,
            clipping=self.normalise(self.stabilizer),
            noise_multiplier=self.gradient_noise_multiplier,
        )
        direction, moments = self._inner().direction(state.moments, gradient, state.params)
        if due:
            probe = sample if same else oracle.sample()
            state = self._refit(state, oracle, probe, direction)
        return replace(
            state,
            params=base.descend(state.params, state.fit.step_rate * oracle.pace, direction),
            moments=moments,
            step=state.step + 1,
        )

    def _refit(
        self,
        state: HyFreeDPState,
        oracle: Oracle,
        sample: Sample,
        direction: torch.Tensor,
    ) -> HyFreeDPState:
        """Ask for three noisy losses, and update learning rate and loss bound by them."""
        import torch

        step = state.fit.learning_rate.unsqueeze(1) * direction
        past = state.past
        if self.fit == "robust":
            # Before the first step there is no way to look back on.
            if state.step:
                step = past[:, 0] - state.params
            else:
                step = self.interval * step
            past = torch.cat([past[:, 1:], state.params.unsqueeze(1)], dim=1)
        losses = oracle.losses(
            sample,
            (state.params + step, state.params, state.params - step),
            bound=state.loss_bound,
            noise_multiplier=self.loss_noise_multiplier,
            mechanism=self.loss_noise,
        )
        if self.fit == "paper":
            fit = fit_paper(state.fit, losses)
            loss_bound = paper_bound(state.loss_bound, losses)
        else:
            scale = self.loss_noise_multiplier / oracle.schedule.expected_batch_size
            fit = fit_robust(
                state.fit,
                losses,
                deviation=_DEVIATIONS[self.loss_noise] * scale * state.loss_bound,
                bound=state.loss_bound,
                interval=self.interval,
                moved=state.step > 0,
            )
            loss_bound = robust_bound(state.loss_bound, losses, self.loss_bound)
        return replace(state, fit=fit, loss_bound=loss_bound, loss=losses[1], past=past)

    def report(self, state: HyFreeDPState) -> Mapping[str, torch.Tensor]:
        """Return the learning rate, the loss bound and the last noisy loss."""
        figures = {"loss_bound": state.loss_bound, "loss": state.loss}
        return {"learning_rate": state.fit.step_rate, **figures}


# Steps that the robust fit looks back. The rate grows 16-fold at most in as many: what it sees lags
# behind by them, and a faster rate is beyond the best one before the losses say so.
WINDOW = 20
_BOUND_CEILING = 1e6
_SATURATED = 0.9  # losses above this part of their bound are flat because they were clipped
_ROOM = 1.5  # bound on a record's loss over the mean loss


@dataclass(frozen=True, eq=False)
class Fit:
    """The last fitted learning rate, its public interval, and the rate of steps, each of shape ``[K]``."""

    learning_rate: torch.Tensor
    lowest: torch.Tensor
    highest: torch.Tensor
    fits: torch.Tensor
    step_rate: torch.Tensor


def fit_paper(fit: Fit, losses: torch.Tensor) -> Fit:
    """Return the fit with the learning rate at the minimum of a parabola through the losses (equation 6)."""
    import torch

    backward, here, forward = losses
    probed = fit.learning_rate
    slope = (backward - forward) / (2.0 * probed)
    curvature = (backward + forward - 2.0 * here) / probed**2
    rate = slope / curvature
    # A fit that is no minimum moves nothing.
    good = (slope > 0) & (curvature > 0) & torch.isfinite(rate) & (rate > 0)
    rate = torch.where(good, rate, probed).clamp(fit.lowest, fit.highest)
    return replace(fit, learning_rate=rate, step_rate=rate)


def fit_robust(
    fit: Fit,
    losses: torch.Tensor,
    *,
    deviation: torch.Tensor,
    bound: torch.Tensor,
    interval: int,
    moved: bool,
) -> Fit:
    """Return the fit with its rate scaled by a factor, from three losses along the last steps' direction."""
    import torch

    behind, here, ahead = losses
    slope = (behind - ahead) / 2.0
    curvature = behind + ahead - 2.0 * here
    # The difference of two noises has variance 2 deviation^2, the second difference 1 + 1 + 4 = 6.
    slope_noise = 0.5**0.5 * deviation
    curvature_noise = 6.0**0.5 * deviation
    # A fit grows the rate 4-fold at most, and 16-fold in all fits of a window; it halves it at most.
    share = min(1.0, 2.0 * interval / WINDOW)
    largest = 4.0**share
    smallest = 0.5**share
    sure = slope.sign() * (slope.abs() - slope_noise).clamp_min(0.0)
    # Where no curvature shows, a slope that does says in which direction to go, and no more.
    direction = torch.where(slope.abs() > 2.0 * slope_noise, slope.sign(), torch.zeros_like(slope))
    factor = torch.where(
        curvature > curvature_noise, 1.0 + sure / curvature, 1.0 + direction * largest
    )
    factor = factor.nan_to_num(1.0).clamp(smallest, largest)
    rate = (fit.learning_rate * factor).clamp(fit.lowest, fit.highest)
    fits = fit.fits
    if moved:  # the mean begins where the rate first stops growing
        fits = torch.where((fits > 0) | (factor <= 1.0), fits + 1, fits)
    mean = fit.step_rate * (rate / fit.step_rate) ** (1.0 / fits.clamp_min(1.0))
    is_usable = torch.isfinite(losses).all(dim=0) & (here <= _SATURATED * bound)
    return replace(
        fit,
        learning_rate=torch.where(is_usable, rate, fit.learning_rate),
        fits=torch.where(is_usable, fits, fit.fits),
        step_rate=torch.where(is_usable, mean, fit.step_rate).clamp(fit.lowest, fit.highest),
    )


def paper_bound(bound: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
    """Return the paper's loss bound: the sum of the three noisy losses, or the old bound if that is unusable.

    Section 4: line 7 has the loss at the iterate, "in practice" it is the sum over the three probes.
    """
    import torch

    total = losses.sum(dim=0)
    is_usable = torch.isfinite(total) & (total > 0)
    return torch.where(is_usable, total, bound).clamp(1.0 / _BOUND_CEILING, _BOUND_CEILING)


def robust_bound(bound: torch.Tensor, losses: torch.Tensor, floor: float) -> torch.Tensor:
    """Return 1.5 times the mean loss, at least half the old bound and at least a smallest bound."""
    import torch

    # Losses elsewhere do not count: far from the iterate they are large, and so would the noise be.
    # The few records with large losses, which may grow while accuracy does, must not decide either.
    here = losses[1]
    updated = torch.maximum(_ROOM * here, (0.5 * bound).clamp_min(floor))
    # Noise of several times the bound would feed on itself.
    return torch.where(torch.isfinite(here), updated, bound).clamp_max(_BOUND_CEILING)
