"""What a training method is: one base class, and what its updates are made of.

A method says what a training costs (``event``, without torch), makes the state of K candidates
(``init``) and takes one step through the oracle (``update``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar

from privtune.errors import InvalidInputError
from privtune.numbers import is_number

if TYPE_CHECKING:
    import torch

    from privtune.accounting import Event
    from privtune.training.mechanism.oracle import Oracle
    from privtune.training.mechanism.schedule import Schedule


Candidate = Mapping[str, Any]
"""The hyperparameters of one candidate, by their field names (``learning_rate``, ...): numbers, but
for the type of a schedule."""


class MethodState(Protocol):
    """State of a stack of K candidates: a frozen dataclass of tensors whose first axis is K.

    Example:
        >>> import torch
        >>> from privtune.training.methods import FixedDPSGD
        >>> candidate = {"learning_rate": 0.1, "max_grad_norm": 1.0}
        >>> state = FixedDPSGD(1.0).init(torch.zeros(2, 5), [candidate, candidate])
        >>> state.params.shape, state.learning_rate
        (torch.Size([2, 5]), tensor([0.1000, 0.1000]))
    """

    @property
    def params(self) -> torch.Tensor:
        """The current parameters, shape ``[K, P]``."""
        ...


S = TypeVar("S", bound=MethodState)


class Method(Protocol[S]):
    """A DP training method with its noise fixed by a plan: a frozen dataclass.

    The fields are what the plan fixes for every candidate (noise multipliers, intervals, momentum).
    What differs between candidates is passed to ``init``. Nothing is kept in the method itself: one
    method trains several stacks, each in a thread of its own.

    Example:
        What a study does, without its oracle's noise and clipping:

        >>> from types import SimpleNamespace
        >>> import torch
        >>> from privtune.training.mechanism.schedule import Schedule
        >>> from privtune.training.methods import FixedDPSGD
        >>> schedule = Schedule(records=1000, sample_rate=0.05, steps=20)
        >>> method = FixedDPSGD.for_budget(schedule, epsilon=2.0, delta=1e-5)
        >>> round(method.noise_multiplier, 2), method.event(schedule).count
        (1.0, 20)
        >>> method.gradient_evaluations(schedule)
        1000.0
        >>> state = method.init(torch.zeros(1, 2), [{"learning_rate": 0.5, "max_grad_norm": 1.0}])
        >>> gradient = torch.tensor([[1.0, -2.0]])
        >>> oracle = SimpleNamespace(
        ...     pace=1.0, sample=lambda: None, gradient=lambda *_, **__: gradient
        ... )
        >>> method.update(state, oracle).params
        tensor([[-0.5000,  1.0000]])
        >>> sorted(method.report(state))
        ['learning_rate', 'max_grad_norm']
    """

    name: ClassVar[str]
    """Name in specs and on the command line."""

    summary: ClassVar[str]
    """One line: what it does."""

    adapts: ClassVar[tuple[str, ...]]
    """Hyperparameters it sets by itself."""

    parameters: ClassVar[tuple[str, ...]]
    """Hyperparameters that a candidate must give."""

    releases: ClassVar[str]
    """What one step releases, in words."""

    @classmethod
    def for_budget(cls, *args: Any, **options: Any) -> Self:
        """Build the method with the least noise that keeps one training at a target.

        Called as ``for_budget(schedule, epsilon=..., delta=..., **options)``; the options are the
        method's own, which is why they are not typed here.

        Args:
            *args: The schedule, by position.
            schedule: Records, rate and number of steps.
            epsilon: Target, above 0.
            delta: Target, in (0, 1).
            **options: Fields of the method, but for those that this finds.

        Returns:
            The method; its event at this schedule costs (epsilon, delta) at most.

        Raises:
            PrivTuneError: If an option is not a field, or nothing meets the target.
        """
        ...

    def event(self, schedule: Schedule) -> Event:
        """Return the privacy event of one training with this schedule. Pure.

        Args:
            schedule: Records, rate and number of steps.

        Returns:
            What an accountant needs to know of it.
        """
        ...

    def gradient_evaluations(self, schedule: Schedule) -> float:
        """Return the expected per-sample gradients of one training with this schedule. Pure.

        Args:
            schedule: Records, rate and number of steps.

        Returns:
            Gradients of single records, in expectation over the samples.
        """
        ...

    def init(self, params: torch.Tensor, candidates: Sequence[Candidate]) -> S:
        """Make the state of K candidates from their initial parameters, shape ``[K, P]``.

        Args:
            params: Initial parameters, shape ``[K, P]``.
            candidates: What each candidate chose for :attr:`parameters`, K of them.

        Returns:
            The state before the first step.

        Raises:
            InvalidInputError: If a candidate lacks a hyperparameter, or one is not above 0.
        """
        ...

    def update(self, state: S, oracle: Oracle) -> S:
        """Take one step: ask the oracle for releases, return the next state.

        Args:
            state: The state before the step.
            oracle: What all access to the data goes through: it samples, clips, adds noise, and
                writes the transcript.

        Returns:
            The state after the step; a new value.
        """
        ...

    def report(self, state: S) -> Mapping[str, torch.Tensor]:
        """Return what may be plotted by step (shape ``[K]`` each): functions of releases only.

        Args:
            state: Any state.

        Returns:
            Values by name, shape ``[K]`` each.
        """
        ...


M = TypeVar("M", bound="Method[Any]")


def scale_noise_of(method: M, factor: float) -> M:
    """Return the method with every one of its noise multipliers times ``factor``.

    Its event is then the old one scaled by the same factor (``accounting.scale_noise``).
    """
    noises = [f.name for f in fields(method) if f.name.endswith("noise_multiplier")]  # type: ignore[arg-type]
    scaled: M = replace(method, **{name: getattr(method, name) * factor for name in noises})  # type: ignore[type-var]
    return scaled


T = TypeVar("T")


def build(method: type[T], options: Mapping[str, Any], **fixed: Any) -> T:
    """Make a method from the options of a spec and the fields that a plan fixes."""
    own = [f for f in fields(method) if f.name not in fixed]  # type: ignore[arg-type]
    allowed = [f.name for f in sorted(own, key=lambda f: bool(f.kw_only))]  # its own options first
    for name in options:
        if name == "clipping" and (why := getattr(method, "clips_whole", "")):
            raise InvalidInputError("option", name, f"cannot be had here: {why}")
        if name not in allowed:
            raise InvalidInputError("option", name, f"must be one of {', '.join(allowed)}")
    for field in own:
        _check_kind(field.name, options.get(field.name, field.default), str(field.type))
    needed = [f.name for f in own if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in needed if name not in options]:
        raise InvalidInputError(
            "options", sorted(options), f"the method also needs {', '.join(missing)}"
        )
    return method(**{**options, **fixed})


_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "float": ((int, float), "a number"),
    "int": ((int,), "a whole number"),
    "str": ((str,), "text"),
    "bool": ((bool,), "true or false"),
}


def _check_kind(name: str, value: object, kind: str) -> None:
    """Refuse an option of another kind than its field is declared as, where that is a plain one."""
    plain, _, nothing = kind.partition(" | ")
    if plain not in _KINDS or nothing not in ("", "None") or value is MISSING:
        return
    if value is None and nothing:
        return
    types, word = _KINDS[plain]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise InvalidInputError(name, value, f"must be {word}")


def _is_finite(value: object) -> bool:
    """Say whether a value is a number that a float holds, of NumPy's types as well."""
    known = isinstance(value, int | float)
    return is_number(value) or (not known and isinstance(value, Real) and math.isfinite(value))


def check_positive(name: str, value: float) -> None:
    """Refuse a field that is not a finite number above 0."""
    if not (_is_finite(value) and value > 0.0):
        raise InvalidInputError(name, value, "must be a finite number above 0")


_NORMS = (1e-15, 1e30)  # float32 sees no norm below 1e-19, and holds no noise above 3e38


def check_hyperparameter(where: str, name: str, value: object) -> None:
    """Refuse a value that no training can begin with: one that fails after the charge is paid for.

    Args:
        where: Where it stands, for the message.
        name: Of the hyperparameter.
        value: Its value.
    """
    if not is_number(value) or value <= 0.0:
        raise InvalidInputError(where, value, "must be a finite number above 0")
    if name == "max_grad_norm" and not _NORMS[0] <= value <= _NORMS[1]:
        raise InvalidInputError(where, value, "must be from {:g} to {:g}".format(*_NORMS))


def check_nonnegative(name: str, value: float) -> None:
    """Refuse a field that is not a finite number of at least 0."""
    if not (_is_finite(value) and value >= 0.0):
        raise InvalidInputError(name, value, "must be a finite number of at least 0")


def check_fraction(name: str, value: float) -> None:
    """Refuse a field outside [0, 1)."""
    if not (_is_finite(value) and 0.0 <= value < 1.0):
        raise InvalidInputError(name, value, "must lie in [0, 1)")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Refuse a field that is not one of ``choices``."""
    if value not in choices:
        raise InvalidInputError(name, value, f"must be one of {', '.join(choices)}")


def expect_nothing(candidates: Sequence[Candidate]) -> None:
    """Refuse hyperparameters where none is left to set."""
    if given := next(filter(None, candidates), None):
        raise InvalidInputError(
            "candidate", dict(given), "must be empty: the method sets everything itself"
        )


def candidate_column(
    candidates: Sequence[Candidate], name: str, like: torch.Tensor, default: float | None = None
) -> torch.Tensor:
    """Collect one positive hyperparameter of every candidate into a tensor of shape ``[K]``."""
    import torch

    values = []
    for candidate in candidates:
        value = candidate.get(name, default)
        if value is None:
            raise InvalidInputError(
                "candidate", dict(candidate), f"must give {name}", "The method does not set it."
            )
        check_positive(name, float(value))
        values.append(float(value))
    return torch.tensor(values, dtype=like.dtype, device=like.device)


def rows(values: torch.Tensor) -> torch.Tensor:
    """Turn shape ``[K]`` into ``[K, 1]``, to scale rows of ``[K, P]``."""
    return values.unsqueeze(-1)


def descend(params: torch.Tensor, rate: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    """Return ``params - rate * direction``, for a rate of each candidate, in one pass."""
    import torch

    return torch.addcmul(params, rate.unsqueeze(-1), direction, value=-1.0)


def first_size(params: torch.Tensor, oracle: Oracle) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the size of the first weights, shape ``[K]``, and where all of them are 0.

    It is their root mean square, or that of what torch's layers usually begin with where they are
    all 0. First weights are public: a file's, or drawn without the data.

    Args:
        params: First parameters, shape ``[K, P]``.
        oracle: Knows the layers' shapes.
    """
    size = params.square().mean(dim=1).sqrt()
    return size.where(size > 0.0, oracle.usual_size), size == 0.0


def noise_scale_for(event: Event, *, epsilon: float, delta: float) -> float:
    """Return the factor on every noise multiplier of ``event`` that meets (epsilon, delta)."""
    from privtune.accounting import calibrate

    return calibrate(event, epsilon=epsilon, delta=delta).scale


@dataclass(frozen=True, eq=False)
class Moments:
    """State of an inner optimizer: moving averages of shape ``[K, P]`` and a step count."""

    first: torch.Tensor
    second: torch.Tensor
    step: int


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum, as ``torch.optim.SGD`` defines it.

    Args:
        momentum: Factor in [0, 1) on the running sum of gradients; 0 for none.
        weight_decay: Weight of the L2 penalty that is added to the gradient, at least 0.
    """

    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_fraction("momentum", self.momentum)
        check_nonnegative("weight_decay", self.weight_decay)

    def init(self, params: torch.Tensor) -> Moments:
        """Return the state before the first step."""
        empty = params.new_zeros((params.shape[0], 0))
        first = params.new_zeros(params.shape) if self.momentum else empty
        return Moments(first=first, second=empty, step=0)

    def direction(
        self, state: Moments, gradient: torch.Tensor, params: torch.Tensor
    ) -> tuple[torch.Tensor, Moments]:
        """Return the direction of this step, shape ``[K, P]``, and the next state."""
        if self.weight_decay:
            gradient = gradient + self.weight_decay * params
        if not self.momentum:
            return gradient, Moments(state.first, state.second, state.step + 1)
        first = self.momentum * state.first + gradient
        return first, Moments(first, state.second, state.step + 1)


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay, as ``torch.optim.AdamW`` defines it.

    Args:
        beta1: Decay of the average gradient, in [0, 1).
        beta2: Decay of the average squared gradient, in [0, 1).
        stability: Added to the root of the second moment, above 0.
        weight_decay: Decay of the parameters per unit of learning rate, at least 0.
        decoupled: False adds the decay to the gradient, as ``torch.optim.Adam`` does.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    stability: float = 1e-8
    weight_decay: float = 0.01
    decoupled: bool = True

    def __post_init__(self) -> None:
        check_fraction("beta1", self.beta1)
        check_fraction("beta2", self.beta2)
        check_positive("stability", self.stability)
        check_nonnegative("weight_decay", self.weight_decay)

    def init(self, params: torch.Tensor) -> Moments:
        """Return the state before the first step."""
        zeros = params.new_zeros(params.shape)
        return Moments(first=zeros, second=zeros.clone(), step=0)

    def direction(
        self, state: Moments, gradient: torch.Tensor, params: torch.Tensor
    ) -> tuple[torch.Tensor, Moments]:
        """Return the direction of this step, shape ``[K, P]``, and the next state."""
        if self.weight_decay and not self.decoupled:
            gradient = gradient + self.weight_decay * params
        step = state.step + 1
        first = state.first.lerp(gradient, 1.0 - self.beta1)
        second = (self.beta2 * state.second).addcmul_(gradient, gradient, value=1.0 - self.beta2)
        # Both corrections of the bias go into the divisor: every pass over the vectors counts.
        bias = 1.0 - self.beta1**step
        divisor = second.sqrt().mul_(bias / (1.0 - self.beta2**step) ** 0.5)
        direction = first / divisor.add_(bias * self.stability)
        if self.weight_decay and self.decoupled:
            direction.add_(params, alpha=self.weight_decay)
        return direction, Moments(first, second, step)


InnerOptimizer = SGD | AdamW


def state_tensors(state: Any) -> dict[str, torch.Tensor]:
    """Return every tensor of a state by its path (``"moments.first"``); numbers become tensors.

    Args:
        state: A method's state.

    Raises:
        InvalidInputError: If the state holds something else.
    """
    import torch

    found: dict[str, torch.Tensor] = {}
    for field in _kept(state):
        value = getattr(state, field.name)
        if is_dataclass(value):
            inner = state_tensors(value)
            found.update({f"{field.name}.{name}": tensor for name, tensor in inner.items()})
        elif isinstance(value, torch.Tensor):
            # A copy: safetensors refuses tensors that share memory, and so do expanded views.
            found[field.name] = value.detach().clone().contiguous()
        elif isinstance(value, int):
            found[field.name] = torch.tensor(value)
        else:
            raise InvalidInputError(field.name, value, "must be a tensor or a whole number")
    return found


def _kept(state: Any) -> list[Field[Any]]:
    """Return the fields that a checkpoint keeps: an optimizer of torch's is none, what it remembers is."""
    return [field for field in fields(state) if field.metadata.get("kept", True)]


def restore_state(template: T, tensors: Mapping[str, torch.Tensor]) -> T:
    """Return a state like ``template`` that holds ``tensors``.

    Args:
        template: A state of the same method and candidates, as ``init`` makes it; what is empty in it may
            have grown.
        tensors: What ``state_tensors`` returned.

    Raises:
        InvalidInputError: If a tensor is missing, left over, or of another shape or type.
    """
    expected = state_tensors(template)
    if expected.keys() != tensors.keys():
        raise InvalidInputError(
            "tensors", sorted(tensors), f"must be exactly {', '.join(sorted(expected))}"
        )
    for name, tensor in tensors.items():
        shape = tensor.shape if expected[name].numel() == 0 else expected[name].shape
        if tensor.shape != shape or tensor.dtype != expected[name].dtype:
            raise InvalidInputError(name, tuple(tensor.shape), "must fit the method's state")
    restored: T = _restored(template, tensors, "")
    return restored


def _restored(template: Any, tensors: Mapping[str, torch.Tensor], prefix: str) -> Any:
    values: dict[str, Any] = {}
    for field in _kept(template):
        old, path = getattr(template, field.name), prefix + field.name
        if is_dataclass(old):
            values[field.name] = _restored(old, tensors, f"{path}.")
        elif isinstance(old, int):
            values[field.name] = int(tensors[path])
        else:
            values[field.name] = tensors[path].to(old.device)
    return replace(template, **values)
