"""Methods without a learning rate to choose: DoG, DoWG, D-Adaptation, Prodigy, and a public rate.

Their rules are pure functions of a state and a noisy gradient; each class says what its rule is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from privtune.errors import InvalidInputError
from privtune.public_priors import fall_of, public_guess
from privtune.training.mechanism.clipping import Clipping
from privtune.training.methods import method as base
from privtune.training.methods.fixed_rates import FixedRates, RateState

if TYPE_CHECKING:
    import torch

    from privtune.training.mechanism.oracle import Oracle
    from privtune.training.mechanism.schedule import Schedule

_SHARE = 0.2  # of the first weights: how far one goes in a step of AdamW at a constant rate
_SGD_NORM = 1.0  # at which the rates of SGD were measured
_FARTHEST = 1e12  # largest distance over the first: squares of it are still numbers


def farther(
    distance: torch.Tensor,
    candidate: torch.Tensor,
    first: torch.Tensor | float,
) -> torch.Tensor:
    """Return the larger of two distances, no more than 1e12 times the first one."""
    import torch

    # Of a number and none, fmax takes the number.
    return torch.fmax(distance, candidate).clamp(max=_FARTHEST * first)


@dataclass(frozen=True)
class FreeGradient(base.Method):
    """A method that leaves candidates nothing to set: gradients are normalised, or clipped to a fixed norm.

    Args:
        max_grad_norm: Clipping norm; None normalises every gradient (automatic clipping).
    """

    noise_multiplier: float
    max_grad_norm: float | None = base.norm(None)
    clipping: str = base.by_layer_option()

    adapts: ClassVar[tuple[str, ...]] = ("learning_rate", "max_grad_norm")
    normalises: ClassVar[bool] = True
    releases: ClassVar[str] = "one normalised noisy gradient"

    def clipping_of(self, max_grad_norm: torch.Tensor | None = None) -> Clipping:
        """Return the clipping that normalises gradients, or one to the method's own fixed norm."""
        if self.max_grad_norm is None:
            return self.normalise()
        return self.clip(self.max_grad_norm)


@dataclass(frozen=True, eq=False)
class StartState:
    """The state of K trainings with rates by distance from the start; ``params`` may be an average."""

    params: torch.Tensor
    iterate: torch.Tensor
    origin: torch.Tensor
    distance: torch.Tensor
    squares: torch.Tensor
    learning_rate: torch.Tensor
    step: int


Rate = tuple["torch.Tensor", "torch.Tensor"]


def dog(distance: torch.Tensor, squares: torch.Tensor, squared: torch.Tensor) -> Rate:
    """Return the sum of squared gradients and DoG's rate (equation 1)."""
    squares = squares + squared
    return squares, distance / (squares + 1e-8).sqrt()


def dowg(distance: torch.Tensor, squares: torch.Tensor, squared: torch.Tensor) -> Rate:
    """Return the sum of squared gradients, weighted by distances, and DoWG's rate (Algorithm 1)."""
    squares = squares + distance.square() * squared
    return squares, distance.square() / squares.sqrt().clamp_min(1e-20)


@dataclass(frozen=True)
class _FromStart(FreeGradient):
    """SGD whose rate follows from the largest distance from the start."""

    reported: ClassVar[tuple[str, ...]] = ("learning_rate", "distance")
    rule = staticmethod(dog)

    def _first(self, origin: torch.Tensor) -> torch.Tensor:
        """Return the assumed distance before the first step, shape ``[K]``."""
        raise NotImplementedError

    def _released(self, state: StartState, iterate: torch.Tensor) -> torch.Tensor:
        return iterate

    def init(self, params: torch.Tensor, candidates: Sequence[base.Candidate]) -> StartState:
        """Make the state of K candidates, which must give no hyperparameters."""
        base.expect_nothing(candidates)
        nothing = params.new_zeros(params.shape[0])
        return StartState(params, params, params, self._first(params), nothing, nothing, step=0)

    def update(self, state: StartState, oracle: Oracle) -> StartState:
        """Take one step at the rate that the rule computes from distance and squared gradients."""
        gradient = self.gradient(oracle, state.iterate, self.clipping_of())
        length = (state.iterate - state.origin).norm(dim=1)
        distance = farther(state.distance, length, self._first(state.origin))
        squares, rate = self.rule(distance, state.squares, gradient.square().sum(dim=1))
        rate = oracle.pace * rate.nan_to_num(0.0)
        iterate = state.iterate - base.rows(rate) * gradient
        return replace(
            state,
            params=self._released(state, iterate),
            iterate=iterate,
            distance=distance,
            squares=squares,
            learning_rate=rate,
            step=state.step + 1,
        )


@dataclass(frozen=True)
class DoG(_FromStart):
    """SGD with the rate ``max distance from the start / root of the sum of squared gradients``.

    Args:
        initial_distance: r_ε relative to ``1 + |x_0|``, above 0; 1e-6 is the paper's advice.
        averaging: γ of the polynomial-decay average that is released (8 in the paper); None
            releases the last iterate.

    **Interval**: the distance r stays within 1 and 1e12 times its first value, ``initial_distance * (1 +
    |x_0|)``, and the rate within 0 and 1e4 times it. A release that is no number makes the rate 0; the
    weights it moves are no numbers, which the training's result declares as diverged.

    **Guarantee**: as DP-SGD with the same noise multiplier. The norms are of noisy gradients, which
    hold about ``sqrt(P) * noise`` however small the true ones are.

    References:
        Ivgi, Hinder & Carmon 2023, arXiv 2302.12022.

    Example:
        >>> DoG(1.1).adapts, DoG(1.1, max_grad_norm=0.5).parameters  # nothing is left to tune
        (('learning_rate', 'max_grad_norm'), ())
    """

    initial_distance: float = base.positive(1e-6)
    averaging: float | None = base.nonnegative(8.0)

    name: ClassVar[str] = "dog"
    summary: ClassVar[str] = (
        "SGD with a learning rate of distance travelled / norm of past gradients"
    )

    def _first(self, origin: torch.Tensor) -> torch.Tensor:
        norms: torch.Tensor = origin.norm(dim=1)
        return self.initial_distance * (1.0 + norms)

    def _released(self, state: StartState, iterate: torch.Tensor) -> torch.Tensor:
        if self.averaging is None:
            return iterate
        weight = (self.averaging + 1.0) / (state.step + 1 + self.averaging)
        return state.params + weight * (iterate - state.params)


@dataclass(frozen=True)
class DoWG(_FromStart):
    """SGD with the rate ``r² / sqrt(sum of r² |g|²)``, r the largest distance from the start.

    Args:
        initial_distance: r_ε, above 0; 1e-4 is the default of the authors' code.

    **Interval**: the distance r stays within 1 and 1e12 times ``initial_distance``, and the rate within 0
    and ``1e20 r²``. A release that is no number makes the rate 0; the weights it moves are no numbers,
    which the training's result declares as diverged.

    **Guarantee**: as DP-SGD with the same noise multiplier.

    References:
        Khaled et al. 2023, arXiv 2305.16284.

    Example:
        >>> DoWG(1.1).initial_distance, DoWG(1.1, max_grad_norm=0.5).parameters
        (0.0001, ())
    """

    initial_distance: float = base.positive(1e-4)

    name: ClassVar[str] = "dowg"
    summary: ClassVar[str] = (
        "SGD with a learning rate of distance / distance-weighted past gradients"
    )
    rule = staticmethod(dowg)

    def _first(self, origin: torch.Tensor) -> torch.Tensor:
        return origin.new_full(origin.shape[:1], self.initial_distance)


@dataclass(frozen=True, eq=False)
class AdamState:
    """State of K trainings by an estimated distance; scalars have shape ``[K]``, in float64."""

    params: torch.Tensor
    origin: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    weighted: torch.Tensor
    distance: torch.Tensor
    largest: torch.Tensor
    numerator: torch.Tensor


@dataclass(frozen=True)
class DistanceAdam(FreeGradient):
    """Adam whose rate is an estimate of the distance to the solution.

    Args:
        learning_rate: Factor on the estimated rate; 1 is the authors' advice.
        beta1: Decay of the average gradient, in [0, 1).
        beta2: Decay of the average squared gradient, in [0, 1); its root weighs the estimate.
        stability: Added to the root of the second moment, above 0.
        weight_decay: Decoupled, at least 0.
        initial_distance: d_0, above 0.
    """

    learning_rate: float = base.positive(1.0)
    beta1: float = base.fraction(0.9)
    beta2: float = base.fraction(0.999)
    stability: float = base.positive(1e-8)
    weight_decay: float = base.nonnegative(0.0)
    initial_distance: float = base.positive(1e-6)

    def _step(
        self,
        state: AdamState,
        gradient: torch.Tensor,
        pace: torch.Tensor | float,
    ) -> AdamState:
        raise NotImplementedError

    def init(self, params: torch.Tensor, candidates: Sequence[base.Candidate]) -> AdamState:
        """Make the state of K candidates, which must give no hyperparameters."""
        base.expect_nothing(candidates)
        zeros = params.new_zeros(params.shape)
        scalar = params.new_zeros(params.shape[0]).double()
        first = scalar + self.initial_distance
        return AdamState(params, params, zeros, zeros, zeros, first, first, scalar)

    def update(self, state: AdamState, oracle: Oracle) -> AdamState:
        """Take one step and update the estimate of the distance."""
        return self._step(
            state, self.gradient(oracle, state.params, self.clipping_of()), oracle.pace
        )

    def report(self, state: AdamState) -> Mapping[str, torch.Tensor]:
        """Return the learning rate: the estimated distance times the factor ``learning_rate``."""
        return {"learning_rate": self.learning_rate * state.distance}


@dataclass(frozen=True)
class DAdaptation(DistanceAdam):
    """Adam on noisy gradients whose rate is a growing lower bound on the distance.

    The update of ``dadaptation.DAdaptAdam`` with its defaults, for K candidates at once on an
    explicit state (tests compare the two).

    **Interval**: the distance stays within 1 and 1e12 times ``initial_distance``, and the rate is
    ``learning_rate`` times it. A release that is no number moves neither; the weights it moves are
    no numbers, which the training's result declares as diverged.

    **Guarantee**: as DP-SGD with the same noise multiplier.

    References:
        Defazio & Mishchenko 2023, arXiv 2301.07733.

    Example:
        >>> DAdaptation(1.1).adapts
        ('learning_rate', 'max_grad_norm')
    """

    name: ClassVar[str] = "d-adaptation"
    summary: ClassVar[str] = (
        "Adam with a growing lower bound on the distance to the solution as rate"
    )

    def _step(
        self,
        state: AdamState,
        gradient: torch.Tensor,
        pace: torch.Tensor | float,
    ) -> AdamState:
        import torch

        root = self.beta2**0.5
        rate = state.distance * self.learning_rate
        by_row = base.rows(rate).to(gradient)
        scaled = state.weighted / (state.second.sqrt() + self.stability)
        inner = rate * (gradient * scaled).sum(dim=1).double()
        first = self.beta1 * state.first + by_row * (1.0 - self.beta1) * gradient
        second = self.beta2 * state.second + (1.0 - self.beta2) * gradient.square()
        weighted = root * state.weighted + by_row * (1.0 - root) * gradient
        numerator = root * state.numerator + (1.0 - root) * inner
        total = weighted.abs().sum(dim=1).double()
        has_total = total > 0
        estimate = torch.where(has_total, numerator / ((1.0 - root) * total), state.distance)
        # The average holds the rates of earlier steps, so a schedule scales the step as a whole.
        step = first / (second.sqrt() + self.stability)
        step = step + self.weight_decay * by_row * state.params
        params = state.params - torch.as_tensor(pace).to(step).reshape(-1, 1) * step
        return replace(
            state,
            params=torch.where(base.rows(has_total), params, state.params),
            first=first,
            second=second,
            weighted=weighted,
            distance=farther(state.distance, estimate, self.initial_distance),
            numerator=torch.where(has_total, numerator, state.numerator),
        )


@dataclass(frozen=True)
class Prodigy(DistanceAdam):
    """Adam on noisy gradients whose rate is a running estimate of the distance to the solution.

    The update of ``prodigyopt.Prodigy`` with its defaults, for K candidates at once on an explicit
    state (tests compare the two).

    **Interval**: the distance stays within 1 and 1e12 times ``initial_distance``, and the rate is
    ``learning_rate`` times it. A release that is no number moves neither; the weights it moves are
    no numbers, which the training's result declares as diverged.

    **Guarantee**: as DP-SGD with the same noise multiplier.

    References:
        Mishchenko & Defazio 2024, arXiv 2306.06101.

    Example:
        >>> Prodigy(1.1).learning_rate, Prodigy.adapts
        (1.0, ('learning_rate', 'max_grad_norm'))
    """

    name: ClassVar[str] = "prodigy"
    summary: ClassVar[str] = (
        "Adam with an estimate of the distance to the solution as learning rate"
    )

    def _step(
        self,
        state: AdamState,
        gradient: torch.Tensor,
        pace: torch.Tensor | float,
    ) -> AdamState:
        import torch

        beta3 = self.beta2**0.5
        distance = state.distance
        rate = distance * self.learning_rate * pace
        # Relative to d_0, as the authors do it, to stay clear of numbers that are too small.
        weight = distance / self.initial_distance * rate
        moved = (gradient * (state.origin - state.params)).sum(dim=1).double()
        numerator = beta3 * state.numerator + weight * moved

        def by_row(scalars: torch.Tensor) -> torch.Tensor:
            return base.rows(scalars).to(gradient)

        weighted = beta3 * state.weighted + by_row(weight) * gradient
        first = self.beta1 * state.first + by_row(distance * (1 - self.beta1)) * gradient
        second = self.beta2 * state.second
        second = second + by_row(distance**2 * (1 - self.beta2)) * gradient.square()
        total = weighted.abs().sum(dim=1).double()
        has_total = total > 0
        estimate = torch.where(has_total, numerator / total, distance)
        largest = farther(state.largest, estimate, self.initial_distance)
        params = state.params * (1.0 - self.weight_decay * by_row(rate))
        step = by_row(rate) * first / (second.sqrt() + by_row(largest * self.stability))
        return replace(
            state,
            params=torch.where(base.rows(has_total), params - step, state.params),
            first=first,
            second=second,
            weighted=weighted,
            distance=torch.where(has_total, largest, distance),
            largest=torch.where(has_total, largest, state.largest),
            numerator=torch.where(has_total, numerator, state.numerator),
        )


@dataclass(frozen=True)
class PublicRate(FreeGradient, FixedRates):
    """AdamW or SGD on noisy gradients, at a rate that was good on public data.

    Nothing is adapted to the data: a method that pays for its rate has to do better than this. AdamW
    steps along normalised gradients (Bu et al. 2023, arXiv 2206.07136), at a rate of ``share`` times the
    size of the first weights. SGD steps along gradients clipped to 1, at one rate for all tasks. The
    numbers are ours: of all rates, those lost the least accuracy on public tasks (``studies/priors``).

    Args:
        share: The rate over the size of the first weights, above 0. With a constant rate 0.2; where the
            ``schedule`` falls to 0 (``linear``, ``cosine``) that of public data, unless given.
        zero_share: The same where the first weights are all 0, over the size that torch usually draws;
            None takes ``share``. Under a falling ``schedule`` that of public data, unless given.
        weight_decay: Decoupled with AdamW, at least 0; 0.01 as in HyFreeDP, 0 with SGD.
        method: What a step is: ``"dp-adam"``, or ``"dpsgd"`` for SGD.
        learning_rate: The rate itself, above 0, in the place of ``share``. With ``"dpsgd"`` what was best
            on public data under the ``schedule``, unless given.

    **Interval**: the rate is a constant: ``learning_rate``, or ``share`` times the root mean square of the
    first weights, or ``zero_share`` times ``1 / sqrt(3 fan_in)`` where they are all 0. A ``schedule``
    scales it as its factors say.

    **Guarantee**: as DP-SGD with the same noise multiplier. First weights hold nothing of the data.

    Raises:
        InvalidInputError: If a field is out of its range.

    Example:
        >>> PublicRate(1.1).share, PublicRate.parameters  # nothing is left to tune
        (0.2, ())
        >>> from privtune.training.mechanism.schedule import Schedule
        >>> schedule = Schedule(records=1000, sample_rate=0.05, steps=20)
        >>> target = {"epsilon": 1.0, "delta": 1e-5}
        >>> PublicRate.for_budget(schedule, **target, method="dpsgd").learning_rate
        1.0
    """

    share: float = base.positive(_SHARE)
    zero_share: float | None = base.positive(None)
    weight_decay: float = base.nonnegative(0.01)
    method: str = base.choice("dp-adam", "dpsgd")
    learning_rate: float | None = base.positive(None)

    name: ClassVar[str] = "public-rate"
    summary: ClassVar[str] = "AdamW or SGD at a learning rate that was good on public data"
    adapts: ClassVar[tuple[str, ...]] = ()
    parameters: ClassVar[tuple[str, ...]] = ()
    reported: ClassVar[tuple[str, ...]] = ("learning_rate",)

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
        """Build the method with the least noise for a target, at the rate of public data.

        Args:
            schedule: Records, rate and number of steps.
            epsilon: Target, above 0.
            delta: Target, in (0, 1).
            options: Other fields; the rate of public data goes where none is given.

        Raises:
            InvalidInputError: If no rate was measured for the method with this schedule.
        """
        settings = {**_defaults(options), **options}
        return super().for_budget(schedule, epsilon=epsilon, delta=delta, **settings)

    def advice(self, schedule: Schedule, dimension: Callable[[], int]) -> str:
        """Return the rate in words, and that a falling one was better on public data if it is constant.

        Example:
            >>> from privtune.training.mechanism.schedule import Schedule
            >>> PublicRate(1.1).advice(Schedule(records=1000, sample_rate=0.2, steps=50), lambda: 9)
            'The learning rate is 0.2 times the size of the first weights. A rate that falls to 0 ...
        """
        if self.learning_rate is not None:
            words = f"The learning rate is {self.learning_rate:g}"
        else:
            words = f"The learning rate is {self.share:g} times the size of the first weights"
            if self.zero_share is not None:
                words += f", or {self.zero_share:g} times torch's usual size where they are all 0"
        if fall_of(self.schedule) != "constant":
            return f"{words}; its schedule multiplies it."
        return f"{words}. A rate that falls to 0 was better on public data: schedule: linear."

    def _optimizer(self) -> base.InnerOptimizer:
        if self.method == "dpsgd":
            return base.SGD(weight_decay=self.weight_decay)
        return base.AdamW(weight_decay=self.weight_decay)

    def init(self, params: torch.Tensor, candidates: Sequence[base.Candidate]) -> RateState:
        """Make the state of K candidates, which must give no hyperparameters; refuse SGD without a rate."""
        base.expect_nothing(candidates)
        if self.method == "dpsgd" and self.learning_rate is None:
            raise InvalidInputError(
                "learning_rate",
                None,
                "must be given with method dpsgd, whose rate is no share of the first weights",
                "for_budget takes that of public data.",
            )
        unknown = params.new_zeros(params.shape[0])  # until the first step
        return RateState(params, unknown, unknown, self._optimizer().init(params))

    def update(self, state: RateState, oracle: Oracle) -> RateState:
        """Take one step, at a rate that the first step sets from the options and the first weights."""
        if state.moments.step == 0:
            state = replace(state, learning_rate=self._first_rate(state.params, oracle))
        return super().update(state, oracle)

    def _first_rate(self, params: torch.Tensor, oracle: Oracle) -> torch.Tensor:
        """Return the rate of each candidate, shape ``[K]``."""
        if self.learning_rate is None:
            size, is_zero = base.first_weight_size(params, oracle)
            share = size.new_full(size.shape, self.share)
            if self.zero_share is not None:
                share = share.where(~is_zero, self.zero_share)
            return share * size
        return params.new_full((params.shape[0],), self.learning_rate)


def _defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what :class:`PublicRate` takes unless ``options`` say otherwise, the rate of public data too."""
    schedule = options.get("schedule", "constant")
    has_rate = options.get("learning_rate") is not None
    if options.get("method", "dp-adam") != "dpsgd":
        if has_rate or "share" in options or fall_of(schedule) != "falling":
            return {}
        return public_guess("dp-adam", schedule)
    for name in ("share", "zero_share"):
        if name in options:
            raise InvalidInputError(
                f"option {name}",
                options[name],
                "is AdamW's rate over the size of the first weights, and does not go with method dpsgd",
                "Give learning_rate, or leave both out.",
            )
    guess = {} if has_rate else public_guess("dpsgd", schedule)
    return {"max_grad_norm": _SGD_NORM, "weight_decay": 0.0, **guess}
