"""HyFreeDP: learning rate and clipping without hyperparameters (Bu & Liu 2025, Algorithm 1).

What differs from the paper:

* The account. The paper composes the loss releases as if each had been sampled separately, but all
  of them see one batch; ``event`` charges one joint release (``loss_batch="same"``), or the losses
  have a batch of their own (``loss_batch="separate"``). So it is for Laplace noise on the losses.
* Guards. A noisy loss may be negative, and so may a fitted coefficient: the loss bound stays above
  its initial value, and the learning rate moves only by a fit whose coefficients are both positive.
  ``fit="paper"`` is Algorithm 1 to the letter, ``R_l = L̃(0)`` included, but for what is no number
  above 0: that moves nothing.
* The fit, unless ``fit="paper"``. At the initial rate of 1e-4 the three losses of a small batch
  differ by less than their noise; Algorithm 1 then divides two noises, a half-Cauchy ratio of scale
  ``sqrt(2)/(2 sqrt(6)) = 0.29``, so the rate shrinks geometrically and training never starts. The
  other fits use what is public, the scale of that noise: slope and curvature are filtered over the
  updates (Kalman), a fit counts only where its curvature stands out from the noise, and the losses
  are probed at a reach of their own, which grows until the curvature is visible. Probing far moves
  no parameter; no step goes farther than was probed. All of it is post-processing.
* ``fit="steady"``, the default where the noise lets anything be seen, asks for evidence: the
  curvature must exceed three deviations of its noise, and the rate moves no farther than into the
  interval of rates that the slope's noise leaves open, at most by a factor of two; steps take the
  geometric mean of the rates so far. The reach grows 16-fold while nothing is visible, also while
  the losses are clipped, so that a short training does not wait for its first fit. Small batches
  under much noise never see so much: for them a plan takes ``fit="eager"``: one deviation, any
  change, 16-fold, the geometric mean. ``fit="tracked"`` is the rule of earlier versions: one
  deviation, any change, the last rate, 4-fold. Without noise both are Algorithm 1 once the reach
  has grown to the fitted rate.
* ``fit="travelled"``, the default of tasks that train the head, or biases, alone. For few weights the
  first rate is far too small (the paper's is ten times larger with LoRA), and so is the rate that
  lowers the next loss most. So the first rate is a tenth of the root mean square of the public
  weights; the losses are probed along the way of the last 20 steps, at its beginning and as far
  ahead, which says by what factor the rate was off; they are clipped to 1.5 times their mean, for
  normalised gradients lower the losses of most records, not those of a few; and over the last three
  tenths of the steps the rate falls to 0. As many losses are released, with the same noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from privtune.errors import InvalidInputError
from privtune.training.methods._by_layer import LayerClipping
from privtune.training.methods._common import (
    build,
    candidate_column,
    check_choice,
    check_nonnegative,
    check_positive,
    descend,
    rows,
)
from privtune.training.methods._optimizers import SGD, AdamW, InnerOptimizer, Moments
from privtune.training.methods._parabola import (
    EAGER,
    STEADY,
    TRACKED,
    Fit,
    fit_paper,
    fit_tracked,
    next_bound,
    paper_bound,
)
from privtune.training.methods._travelled import (
    RELATIVE,
    first_rate,
    fit_travelled,
    of_a_part,
    places,
    robust_bound,
)

if TYPE_CHECKING:
    import torch

    from privtune.accounting import Event
    from privtune.training.mechanism.oracle import Oracle, Sample
    from privtune.training.mechanism.schedule import Schedule
    from privtune.training.methods._base import Candidate

__all__ = ["HyFreeDP", "HyFreeDPState"]

_LOSS_BATCHES = ("same", "separate")
_DEVIATIONS: Mapping[str, float] = {"gaussian": 1.0, "laplace": 2.0**0.5}  # of noise of scale 1
_RULES = {"steady": STEADY, "eager": EAGER, "tracked": TRACKED}
_FITS = (*_RULES, "travelled", "paper")
_LOUD = 0.25
"""Part of the losses' bound that three deviations of a probe's noise may be, for evidence to be had."""


_FEW = 25  # fits: with fewer, much of a training is over before the rate is where it should be


@dataclass(frozen=True, eq=False)
class HyFreeDPState:
    """State of K HyFreeDP trainings; ``loss`` is the last noisy loss at the iterate.

    ``past`` has the parameters at the last fits, shape ``[K, W, P]``, where the fit looks back.
    """

    params: torch.Tensor
    fit: Fit
    loss_bound: torch.Tensor
    loss: torch.Tensor
    moments: Moments
    past: torch.Tensor
    step: int


@dataclass(frozen=True)
class HyFreeDP(LayerClipping):
    """Normalised noisy gradients, with the learning rate fitted to three noisy losses.

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
        learning_rate: Initial learning rate, above 0; at least this where ``relative_rate`` is.
        relative_rate: Part, 0 to 1, of the root mean square of the first weights, which hold nothing
            of the data, that the initial rate is at least; for 0 ``"travelled"`` takes 0.1.
        loss_bound: Initial bound on a record's loss, above 0; also its floor.
        fit: ``"steady"``, ``"eager"``, ``"tracked"``, ``"travelled"``, or ``"paper"`` for Algorithm 1
            to the letter.
        resolution: Noise deviations that a curvature must exceed; None takes 3 (``"steady"``) or 1.
        stabilizer: Added to the gradient norm before dividing by it, above 0.
        momentum: Momentum of the optimizer ``"sgd"``.
        weight_decay: Weight decay of the optimizer; None takes 0 for SGD and 0.01 for AdamW.
        schedule: Public factors on the fitted rate: see ``RateSchedule``.
        clipping: ``flat``, or ``by-layer``: the gradient of each of L layers is normalised to 1/sqrt(L).

    Raises:
        InvalidInputError: If a field is out of its range.

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
    interval: int = 5
    loss_batch: str = "same"
    loss_noise: str = "gaussian"
    optimizer: str = "adamw"
    learning_rate: float = 1e-4
    loss_bound: float = 1.0
    fit: str = "steady"
    resolution: float | None = None
    stabilizer: float = 0.01
    momentum: float = 0.0
    weight_decay: float | None = None
    relative_rate: float = 0.0

    of_a_part = staticmethod(of_a_part)
    later: ClassVar[Mapping[str, Any]] = {**LayerClipping.later, "relative_rate": 0.0}

    name: ClassVar[str] = "hyfreedp"
    summary: ClassVar[str] = "Learning rate fitted to three noisy losses, normalised gradients"
    adapts: ClassVar[tuple[str, ...]] = ("learning_rate", "max_grad_norm")
    open_ended: ClassVar[bool] = True
    parameters: ClassVar[tuple[str, ...]] = ()
    releases: ClassVar[str] = (
        "one normalised noisy gradient; every K-th step also three clipped noisy losses"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_nonnegative("gradient_noise_multiplier", self.gradient_noise_multiplier)
        check_nonnegative("loss_noise_multiplier", self.loss_noise_multiplier)
        if self.interval < 1:
            raise InvalidInputError("interval", self.interval, "must be a whole number >= 1")
        check_choice("loss_batch", self.loss_batch, _LOSS_BATCHES)
        check_choice("loss_noise", self.loss_noise, tuple(_DEVIATIONS))
        check_choice("optimizer", self.optimizer, ("sgd", "adamw"))
        check_positive("learning_rate", self.learning_rate)
        check_positive("loss_bound", self.loss_bound)
        check_positive("stabilizer", self.stabilizer)
        check_choice("fit", self.fit, _FITS)
        if not 0.0 <= self.relative_rate <= 1.0:
            raise InvalidInputError("relative_rate", self.relative_rate, "must be between 0 and 1")
        check_nonnegative("resolution", self.resolution or 0.0)
        self._inner()

    def _inner(self) -> InnerOptimizer:
        if self.optimizer == "adamw":
            decay = 0.01 if self.weight_decay is None else self.weight_decay
            return AdamW(weight_decay=decay)
        return SGD(momentum=self.momentum, weight_decay=self.weight_decay or 0.0)

    @classmethod
    def for_budget(
        cls, schedule: Schedule, /, *, epsilon: float, delta: float, **options: Any
    ) -> Self:
        """Build the method with a little more gradient noise than DP-SGD, and the rest for losses.

        Args:
            schedule: The public clockwork.
            epsilon: Target, above 0.
            delta: Target, in (0, 1).
            options: Other fields. ``fit`` is ``"steady"`` unless given, or ``"eager"`` where the noise
                on the losses leaves no evidence to wait for, then with ``relative_rate`` 0.1 if no
                ``learning_rate`` is given; with ``"travelled"`` the rate falls linearly from 0.7 of the
                steps on unless ``schedule`` is given. ``loss_batch`` may be ``"auto"``, the default:
                what needs less noise on the losses. ``gradient_noise_factor``, above 1, is the gradient
                noise over that of DP-SGD: 1.01 in the paper; small batches do better with 1.05.

        Returns:
            The method with both noise multipliers, and the kind of batch that was chosen.

        Raises:
            PrivTuneError: If an option is not a field, or no noise meets the target.
        """
        from privtune.accounting import hyfreedp_noise

        defaults: dict[str, Any] = {"interval": 5, "loss_batch": "auto", "loss_noise": "gaussian"}
        if options.get("fit") == "travelled":
            defaults["schedule"] = {"type": "linear", "start": 0.7}
        chosen: dict[str, Any] = defaults | options
        factor, same = chosen.pop("gradient_noise_factor", 1.01), {"loss_batch": "same"}
        # Refuses what is no option before it takes time to solve for the noise.
        build(cls, chosen | same, gradient_noise_multiplier=1.0, loss_noise_multiplier=1.0)
        noise = hyfreedp_noise(
            schedule.sample_rate,
            schedule.steps,
            interval=chosen["interval"],
            epsilon=epsilon,
            delta=delta,
            loss_batch=chosen["loss_batch"],
            gradient_noise_factor=factor,
            mechanism=chosen["loss_noise"],
        )
        made = build(
            cls,
            {"fit": "steady"} | chosen | {"loss_batch": noise.loss_batch},
            gradient_noise_multiplier=noise.gradient_noise,
            loss_noise_multiplier=noise.loss_noise,
        )
        if "fit" in options or made._loudness(schedule) <= _LOUD:
            return made
        given = not {"learning_rate", "relative_rate"}.isdisjoint(options)
        return replace(made, fit="eager", relative_rate=made.relative_rate if given else RELATIVE)

    def _loudness(self, schedule: Schedule) -> float:
        """Return three deviations of a curvature's noise over the bound of the losses: both are public."""
        deviation = 6.0**0.5 * _DEVIATIONS[self.loss_noise] * self.loss_noise_multiplier
        found: float = 3.0 * deviation / schedule.expected_batch_size
        return found

    def advice(self, schedule: Schedule) -> str:
        """Say where losses tell little of the rate, or are asked for too rarely; empty if neither.

        Args:
            schedule: Records, rate and number of steps.

        Returns:
            A sentence.

        Example:
            >>> from privtune.training.mechanism.schedule import Schedule
            >>> HyFreeDP(1.2, 2.0).advice(Schedule(records=1000, sample_rate=0.2, steps=50))[:29]
            'The rate is fitted 10 times: '
        """
        loud, fits = self._loudness(schedule), -(-schedule.steps // self.interval)
        said = f"three deviations of their noise are {loud:.2g} of the losses' bound"
        found = [said] if loud > _LOUD else []
        if fits < _FEW:
            found.append(f"the rate is fitted {fits} times")
        if not found:
            return ""
        return (
            f"{' and '.join(found).capitalize()}: on a training this small or short fixed "
            "hyperparameters are often better; else take a larger batch, or more epochs."
        )

    def gradient_evaluations(self, schedule: Schedule) -> float:
        """Return one per-sample gradient for each record of a sample."""
        return schedule.expected_gradient_evaluations

    def event(self, schedule: Schedule) -> Event:
        """Return T gradient releases, every K-th of them with three losses beside it."""
        from privtune.accounting import NonPrivate, hyfreedp_event

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

    def init(self, params: torch.Tensor, candidates: Sequence[Candidate]) -> HyFreeDPState:
        """Make the state of K candidates; a candidate needs to give nothing."""
        rate = candidate_column(candidates, "learning_rate", params, default=self.learning_rate)
        travelled = self.fit == "travelled"
        if share := self.relative_rate or RELATIVE * travelled:
            given = rate.new_tensor([float("learning_rate" in own) for own in candidates]).bool()
            rate = rate.where(given, first_rate(params, rate, share))
        unknown = rate.new_full(rate.shape, float("inf"))
        nothing = rate.new_zeros(rate.shape)
        return HyFreeDPState(
            params=params,
            fit=Fit(rate, rate, nothing, unknown, nothing, unknown, nothing, rate),
            loss_bound=candidate_column(candidates, "loss_bound", params, default=self.loss_bound),
            loss=rate.new_full(rate.shape, float("nan")),
            moments=self._inner().init(params),
            past=params.unsqueeze(1).repeat(1, places(self.interval) * travelled, 1),
            step=0,
        )

    def update(self, state: HyFreeDPState, oracle: Oracle) -> HyFreeDPState:
        """Take one step; on every K-th, fit the learning rate first."""
        sample = oracle.sample()
        due, same = state.step % self.interval == 0, self.loss_batch == "same"
        gradient = oracle.gradient(
            sample,
            state.params,
            clipping=self.normalise(self.stabilizer),
            noise_multiplier=self.gradient_noise_multiplier,
            losses_follow=due and same,
        )
        direction, moments = self._inner().direction(state.moments, gradient, state.params)
        if due:
            probe = sample if same else oracle.sample()
            state = self._refit(state, oracle, probe, direction)
        return replace(
            state,
            params=descend(state.params, state.fit.step_rate * oracle.pace, direction),
            moments=moments,
            step=state.step + 1,
        )

    def _refit(
        self, state: HyFreeDPState, oracle: Oracle, sample: Sample, direction: torch.Tensor
    ) -> HyFreeDPState:
        """Ask for the three losses and learn from them."""
        import torch

        step, past = rows(state.fit.reach) * direction, state.past
        if self.fit == "travelled":
            # Before the first step nothing was travelled yet.
            step = past[:, 0] - state.params if state.step else self.interval * step
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
            known: dict[str, Any] = {
                "deviation": _DEVIATIONS[self.loss_noise] * scale * state.loss_bound,
                "bound": state.loss_bound,
            }
            if self.fit == "travelled":
                known |= {"interval": self.interval, "moved": state.step > 0}
                fit = fit_travelled(state.fit, losses, **known)
                loss_bound = robust_bound(state.loss_bound, losses, self.loss_bound)
            else:
                rules = _RULES[self.fit]
                if self.resolution is not None:
                    rules = replace(rules, resolution=self.resolution)
                fit = fit_tracked(state.fit, losses, rules=rules, **known)
                loss_bound = next_bound(state.loss_bound, losses, self.loss_bound)
        return replace(state, fit=fit, loss_bound=loss_bound, loss=losses[1], past=past)

    def report(self, state: HyFreeDPState) -> Mapping[str, torch.Tensor]:
        """Return the learning rate, the loss bound and the last noisy loss."""
        return {
            "learning_rate": state.fit.step_rate,
            "loss_bound": state.loss_bound,
            "loss": state.loss,
        }
