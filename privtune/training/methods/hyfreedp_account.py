"""The privacy account of HyFreeDP (Bu and Liu 2025): its event, and the noise that meets a target.

Every step releases the noisy normalised gradient; every `interval`-th step also three noisy losses.
On the same Poisson batch all of them see one sample: with Gaussian losses one Poisson-sampled
Gaussian with `1/σ² = 1/σ_g² + 3/σ_l²`, with Laplace losses the sampled product of a Gaussian and
three Laplace releases. The paper composes the losses as if each were sampled separately (its
equation 9), which understates the cost. With a separate Poisson batch for the losses they are one
sampled step of their own, for Gaussians of `σ_l/√3`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from privtune.accounting import events as ev
from privtune.accounting.accountant import Guarantee, quick_epsilon
from privtune.accounting.accountant import epsilon as report
from privtune.accounting.calibration import CalibrationError, calibrate, solve_decreasing
from privtune.accounting.checks import check_integer, check_number
from privtune.errors import InvalidInputError

_LOSSES = 3
_LOSS_BATCHES = ("same", "separate")
_MECHANISMS: dict[str, type[ev.Gaussian | ev.Laplace]] = {
    "gaussian": ev.Gaussian,
    "laplace": ev.Laplace,
}
_STEEP = 60.0  # 1% of ε is for the losses: their noise changes so much faster than ε
GRADIENT_NOISE_FACTOR = 1.01  # the paper's γ: about 1% of the budget goes to the losses


@dataclass(frozen=True)
class HyFreeNoise:
    """The two noise multipliers of HyFreeDP, with the event and the guarantee of the training.

    Args:
        gradient_noise: σ_g, on the sum of normalised gradients.
        loss_noise: σ_l, on the sum of each clipped loss; for Laplace noise its scale.
        loss_batch: "same" or "separate".
        event: The event of the whole training.
        guarantee: Its guarantee, at most the target.

    Example:
        >>> noise = hyfreedp_noise(0.01, 100, interval=5, epsilon=1.0, delta=1e-5, loss_batch="same")
        >>> noise.guarantee.epsilon <= 1.0, noise.loss_noise > noise.gradient_noise
        (True, True)
    """

    gradient_noise: float
    loss_noise: float
    loss_batch: str
    event: ev.Event
    guarantee: Guarantee


def hyfreedp_loss_steps(steps: int, interval: int) -> int:
    """Return how many of `steps` steps release losses: steps 0, interval, 2·interval, ...

    Args:
        steps: Number of gradient steps, at least 1.
        interval: Steps from one release of losses to the next, at least 1.

    Example:
        >>> hyfreedp_loss_steps(100, 5), hyfreedp_loss_steps(101, 5)
        (20, 21)
    """
    total = check_integer("steps", steps, at_least=1, at_most=10**9)
    every = check_integer("interval", interval, at_least=1, at_most=10**9)
    return -(-total // every)


def hyfreedp_event(
    rate: float,
    steps: int,
    *,
    interval: int,
    gradient_noise: float,
    loss_noise: float,
    loss_batch: str = "same",
    mechanism: str = "gaussian",
) -> ev.Event:
    """Return the privacy event of one HyFreeDP training: gradients, and losses every few steps.

    Args:
        rate: Sampling probability of the Poisson batches, in (0, 1].
        steps: Number of gradient steps.
        interval: A step releases three losses when its number, from 0, is a multiple of this.
        gradient_noise: σ_g over the sensitivity of the gradient sum.
        loss_noise: σ_l over the sensitivity of each loss sum; for Laplace noise its scale.
        loss_batch: "same": the losses see the batch of the gradient; "separate": one batch of
            their own, drawn independently at the same rate.
        mechanism: Noise of the losses, "gaussian" or "laplace".

    Returns:
        A composition: the steps with losses, and those without.

    Raises:
        InvalidInputError: A value out of its range, or a word that is none of these.

    Example:
        >>> event = hyfreedp_event(0.01, 100, interval=5, gradient_noise=1.2, loss_noise=8.0)
        >>> [part.count for part in event.events]
        [80, 20]
    """
    if loss_batch not in _LOSS_BATCHES:
        raise InvalidInputError("loss_batch", loss_batch, "must be same or separate")
    if mechanism not in _MECHANISMS:
        raise InvalidInputError("mechanism", mechanism, "must be gaussian or laplace")
    with_losses = hyfreedp_loss_steps(steps, interval)
    gradient = ev.Gaussian(gradient_noise)
    losses = [_MECHANISMS[mechanism](loss_noise)] * _LOSSES
    if loss_batch == "separate":
        return ev.Composed(
            [
                ev.Repeated(steps, ev.PoissonSampled(rate, gradient)),
                ev.Repeated(with_losses, ev.PoissonSampled(rate, ev.Joint(losses))),
            ]
        )
    joint = ev.Joint([gradient, *losses])
    together = ev.Repeated(with_losses, ev.PoissonSampled(rate, joint))
    if with_losses == steps:
        return together
    return ev.Composed(
        [ev.Repeated(steps - with_losses, ev.PoissonSampled(rate, gradient)), together]
    )


def hyfreedp_noise(
    rate: float,
    steps: int,
    *,
    interval: int,
    epsilon: float,
    delta: float,
    loss_batch: str = "auto",
    gradient_noise_factor: float = GRADIENT_NOISE_FACTOR,
    mechanism: str = "gaussian",
) -> HyFreeNoise:
    """Return the noise on gradients and losses with which a HyFreeDP training meets a target.

    σ_g is a little more than the noise σ that plain DP-SGD needs; σ_l is solved for by the joint
    account.

    Args:
        rate: Sampling probability of the Poisson batches, in (0, 1].
        steps: Number of gradient steps.
        interval: Steps between two loss releases.
        epsilon: Target, above 0.
        delta: Target, in (0, 1).
        loss_batch: "same", "separate", or "auto" for the one with the smaller loss noise.
        gradient_noise_factor: σ_g over σ, above 1. Small batches need more than the paper's 1.01
            to learn anything from their losses.
        mechanism: Noise of the losses, "gaussian" or "laplace".

    Returns:
        Both noises, the event of the whole and its guarantee.

    Raises:
        CalibrationError: No noise meets the target.

    Guarantee:
        `guarantee.epsilon` is at most the target, as the accountant reports it.

    Example:
        >>> noise = hyfreedp_noise(0.01, 100, interval=5, epsilon=1.0, delta=1e-5)
        >>> noise.loss_batch, [part.count for part in noise.event.events]
        ('separate', [100, 20])
    """
    target = check_number("epsilon", epsilon, above=0.0)
    if loss_batch not in (*_LOSS_BATCHES, "auto"):
        raise InvalidInputError("loss_batch", loss_batch, "must be same, separate or auto")
    plain_training = ev.Repeated(steps, ev.PoissonSampled(rate, ev.Gaussian(1.0)))
    plain = calibrate(plain_training, epsilon=target, delta=delta)
    factor = check_number("gradient_noise_factor", gradient_noise_factor, above=1.0)
    gradient_noise = factor * plain.scale
    law: dict[str, Any] = {"interval": interval, "gradient_noise": gradient_noise}
    event = partial(
        hyfreedp_event,
        rate,
        steps,
        mechanism=mechanism,
        **law,
    )
    impossible = partial(CalibrationError, f"no noise on the losses meets epsilon = {target:g}.")

    def cost(kind: str, loss_noise: float) -> float:
        return report(event(loss_batch=kind, loss_noise=loss_noise), delta).epsilon

    def rough(kind: str, loss_noise: float) -> float:
        training = event(loss_batch=kind, loss_noise=loss_noise)
        estimate = quick_epsilon(training, delta, target, fineness=1.0)
        return cost(kind, loss_noise) if estimate is None else estimate

    def solve(
        cost_of: Callable[[float], float],
        tolerance: float,
        start: float,
    ) -> float:
        return solve_decreasing(
            cost_of,
            target,
            tolerance,
            impossible,
            start=start,
            steep=_STEEP,
        )

    # One lattice says which kind needs less noise, about how much, and how little ε falls with it.
    kind = "separate" if loss_batch == "auto" else loss_batch
    near = solve(partial(rough, kind), 1e-2, 1.0)
    if loss_batch == "auto" and rough("same", near) <= target:
        kind = "same"
        near = solve(partial(rough, kind), 1e-2, near)
    noise = solve(partial(cost, kind), 2e-4, near)
    training = event(loss_batch=kind, loss_noise=noise)
    return HyFreeNoise(
        gradient_noise=gradient_noise,
        loss_noise=noise,
        loss_batch=kind,
        event=training,
        guarantee=report(training, delta),
    )
