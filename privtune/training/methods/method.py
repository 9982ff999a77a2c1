"""The base class of training methods, the checks of their fields, and inner optimizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from privtune.accounting.checks import check_integer, check_number
from privtune.errors import InvalidInputError
from privtune.names import refuse_name
from privtune.numbers import is_number
from privtune.training.mechanism import clipping as clippings
from privtune.training.methods.rate_schedule import AVERAGES, RateSchedule

if TYPE_CHECKING:
    import torch

    from privtune.accounting import Event
    from privtune.training.mechanism.oracle import Oracle
    from privtune.training.mechanism.schedule import Schedule

T = TypeVar("T")

Candidate = Mapping[str, Any]
"""The hyperparameters of one candidate, by their field names (``learning_rate``, ...): numbers, but
for the type of a schedule."""

_LARGEST_INTEGER = 10**9
_NORMS = (1e-15, 1e30)  # float32 sees no norm below 1e-19, and holds no noise above 3e38


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Refuse a value that is not one of ``choices``."""
    if value not in choices:
        refuse_name(name, value, choices)


def check_hyperparameter(where: str, name: str, value: object) -> None:
    """Refuse a hyperparameter that is not finite and above 0, or a clipping norm beyond float32's range."""
    if not is_number(value) or value <= 0.0:
        raise InvalidInputError(where, value, "must be a finite number above 0")
    least, most = _NORMS
    if name == "max_grad_norm" and not least <= value <= most:
        raise InvalidInputError(where, value, f"must be from {least:g} to {most:g}")


def _checked(default: Any, check: Callable[[str, Any], object]) -> Any:
    return field(default=default, metadata={"check": check})


def positive(default: Any = MISSING) -> Any:
    """Declare a field that is a finite number above 0."""
    return _checked(default, lambda name, value: check_number(name, value, above=0.0))


def nonnegative(default: Any = MISSING) -> Any:
    """Declare a field that is a finite number of at least 0."""
    return _checked(default, lambda name, value: check_number(name, value, at_least=0.0))


def fraction(default: Any = MISSING) -> Any:
    """Declare a field that is a number from 0 to below 1."""
    return _checked(default, lambda name, value: check_number(name, value, at_least=0.0, below=1.0))


def whole(default: Any = MISSING) -> Any:
    """Declare a field that is a whole number of at least 1."""
    most = {"at_least": 1, "at_most": _LARGEST_INTEGER}
    return _checked(default, lambda name, value: check_integer(name, value, **most))


def norm(default: Any = MISSING) -> Any:
    """Declare a dataclass field that must be a clipping norm, from 1e-15 to 1e30."""
    return _checked(default, lambda name, value: check_hyperparameter(name, "max_grad_norm", value))


def choice(*choices: str) -> Any:
    """Declare a dataclass field that must be one of ``choices``; the first is the default."""
    return _checked(choices[0], lambda name, value: check_choice(name, value, choices))


@dataclass(frozen=True)
class Method(ABC):
    """A DP training method with its noise fixed by a plan.

    A method is a frozen dataclass that inherits from this and writes :meth:`init` and :meth:`update`. Its
    fields are what a plan fixes for every candidate (noise multipliers, momentum, intervals); what
    differs between candidates is given to ``init``. It keeps nothing: one method trains several stacks
    at once. Its state is a frozen dataclass of tensors and whole numbers, ``params`` of shape ``[K, P]``
    among them. What is written here is for a method of one noisy gradient a step, with a field
    ``noise_multiplier``; other methods write :meth:`event` and :meth:`for_budget`, too.

    Args:
        noise_multiplier: Noise standard deviation over the clipping's sensitivity, at least 0; at 0 the
            method is not private, and its event says so.
        clipping: ``flat``, or ``by-layer``: each of L layers to the norm over sqrt(L), or normalised to
            1/sqrt(L), of the same sensitivity.
        schedule: The learning rate's schedule: a type, or a mapping of ``type`` and what it takes.
        average: What is scored and released of the iterates: ``last``, ``tail`` or ``ema``. It is a
            function of what each step releases, and costs nothing.

    Raises:
        InvalidInputError: If a field is out of its range.

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
        >>> method.scaled(2.0).noise_multiplier == 2.0 * method.noise_multiplier
        True
        >>> method.clip(0.5), method.normalise(), method.advice(schedule, lambda: 2)
        (Flat(max_grad_norm=0.5), Automatic(stabilizer=0.01), '')
        >>> method.takes_optimizer, method.clipping_of(torch.tensor([0.5]))
        (True, Flat(max_grad_norm=tensor([0.5000])))
        >>> facts = {"part": "all", "constants": {}, "dimension": lambda: 2, "adjacency": "add-remove"}
        >>> FixedDPSGD.complete({"momentum": 0.9}, **facts)
        {'momentum': 0.9}
    """

    name: ClassVar[str]
    """Name in specs and on the command line."""
    summary: ClassVar[str]
    """One line: what it does."""
    adapts: ClassVar[tuple[str, ...]] = ()
    """Hyperparameters it sets by itself."""
    parameters: ClassVar[tuple[str, ...]] = ()
    """Hyperparameters that a candidate must give."""
    releases: ClassVar[str] = "one clipped noisy gradient"
    """What one step releases, in words."""
    reported: ClassVar[tuple[str, ...]] = ("learning_rate",)
    """Fields of the state that may be plotted by step: functions of releases alone, shape ``[K]``."""
    proven: ClassVar[tuple[str, ...]] = ()
    """Options that an arm gives or its task declares: bounds of the loss for every possible record."""
    scale_free: ClassVar[bool] = False
    """Whether its steps are the same whatever the gradients are multiplied by."""
    normalises: ClassVar[bool] = False
    """Whether the gradients of all records are made equally long, unless ``max_grad_norm`` is an option that
    is given. Weights in a loss then change nothing."""
    steps_by_weight: ClassVar[bool] = False
    """Whether a weight moves by its own gradient alone: then narrow models share the stacks of wide ones. A
    method that takes a mean over all weights, or counts them, must leave it False."""
    clips_whole: ClassVar[str] = ""
    """Why it cannot clip layer by layer, if it cannot; one that can has the option `by_layer_option`."""

    schedule: Mapping[str, Any] | str = field(default="constant", kw_only=True)
    average: str = field(default="last", kw_only=True)

    if TYPE_CHECKING:

        @property
        def noise_multiplier(self) -> float:
            """The noise's standard deviation over the sensitivity, for a method with one noise a step."""

    def __post_init__(self) -> None:
        for each in fields(self):
            check = each.metadata.get("check")
            value = getattr(self, each.name)
            if each.name.endswith("noise_multiplier"):
                check_number(each.name, value, at_least=0.0)
                continue
            is_left_out = value is None and "None" in str(each.type)
            if check is not None and not is_left_out:
                check(each.name, value)
        RateSchedule.of(self.schedule)
        check_choice("average", self.average, tuple(AVERAGES))

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
        """Build the method with the least noise that keeps one training at (epsilon, delta).

        Args:
            schedule: Records, rate and number of steps.
            epsilon: Target, above 0.
            delta: Target, in (0, 1).
            **options: Fields of the method, but for those that this finds.

        Returns:
            The method; its event at this schedule costs (epsilon, delta) at most.

        Raises:
            PrivTuneError: If an option is not a field, or nothing meets the target.
        """
        from privtune.accounting import calibrate

        unit = build(cls, options, noise_multiplier=1.0)
        calibrated = calibrate(unit.event(schedule), epsilon=epsilon, delta=delta)
        return build(cls, options, noise_multiplier=calibrated.scale)

    @classmethod
    def complete(cls, options: Mapping[str, Any], **_facts: Any) -> dict[str, Any]:
        """Return a spec's options with missing ones filled in from facts of a study, as a pure function.

        Args:
            options: As a spec has them.
            **_facts: ``part`` (which part of its model the task trains: ``all``, ``head``, ``biases``,
                ``lora:R``), ``constants`` (proven bounds of the task's loss, by name), ``dimension`` (a
                function that makes the model and counts its trained parameters) and ``adjacency``.
        """
        return dict(options)

    def scaled(self, factor: float) -> Self:
        """Return the method with every noise multiplier times ``factor``; at 0 it has no guarantee."""
        noises: dict[str, Any] = {}
        for each in fields(self):
            if each.name.endswith("noise_multiplier"):
                noises[each.name] = getattr(self, each.name) * factor
        return replace(self, **noises)

    def event(self, schedule: Schedule) -> Event:
        """Return the privacy event of one training, T Poisson-sampled Gaussian releases, as a pure function.

        Args:
            schedule: Records, rate and number of steps.
        """
        from privtune.accounting import Gaussian, NonPrivate, PoissonSampled, Repeated

        if self.noise_multiplier == 0.0:
            return NonPrivate()
        step = PoissonSampled(schedule.sample_rate, Gaussian(self.noise_multiplier))
        return Repeated(schedule.steps, step)

    def gradient_evaluations(self, schedule: Schedule) -> float:
        """Return the expected number of per-sample gradients in one training, as a pure function.

        Args:
            schedule: Records, rate and number of steps.
        """
        return schedule.expected_gradient_evaluations

    def advice(self, schedule: Schedule, dimension: Callable[[], int]) -> str:
        """Return a warning about the method in such a training, for its plan; empty if there is none.

        Args:
            schedule: Records, rate and number of steps.
            dimension: Counts the trained parameters, for which it makes the model.
        """
        return ""

    @abstractmethod
    def init(self, params: torch.Tensor, candidates: Sequence[Candidate]) -> Any:
        """Make the state of K candidates before the first step.

        Args:
            params: Initial parameters, shape ``[K, P]``.
            candidates: What each candidate chose for :attr:`parameters`, K of them.

        Returns:
            The state before the first step.

        Raises:
            InvalidInputError: If a candidate lacks a hyperparameter, or one is not above 0.
        """

    @abstractmethod
    def update(self, state: Any, oracle: Oracle) -> Any:
        """Return the state after one step along noisy releases of the oracle.

        Args:
            state: The state before the step.
            oracle: What all access to the data goes through: it samples, clips, adds noise, and
                writes the transcript. Steps are in proportion to its ``pace``.

        Returns:
            The state after the step, a new value.
        """

    def report(self, state: Any) -> Mapping[str, torch.Tensor]:
        """Return the values of a ``state`` that may be plotted, by the names in :attr:`reported`."""
        return {name: getattr(state, name) for name in self.reported}

    @property
    def takes_optimizer(self) -> bool:
        """Whether one of torch's optimizers, returned by ``build``, may take the method's steps.

        True for a method that steps along one released gradient as it is, at a rate, and remembers nothing;
        such a method writes :meth:`clipping_of`, too. One that adapts has a step of its own, which the
        optimizer's would replace: False, unless a method says otherwise.
        """
        return False

    def clipping_of(self, max_grad_norm: torch.Tensor) -> clippings.Clipping:
        """Return the clipping of the gradient that each step releases.

        Args:
            max_grad_norm: The clipping norm of each candidate, shape ``[K]``; 0 where candidates give none.
        """
        raise NotImplementedError(f"method {self.name} does not say how it clips")

    @property
    def by_layer(self) -> bool:
        """Whether gradients are clipped layer by layer, each of L layers to the norm over sqrt(L)."""
        return getattr(self, "clipping", "flat") == "by-layer"

    def clip(self, max_grad_norm: float | torch.Tensor) -> clippings.Clipping:
        """Return a clipping to ``max_grad_norm``, a float or shape ``[K]``, whole or by layer."""
        return (clippings.EqualByLayer if self.by_layer else clippings.Flat)(max_grad_norm)

    def normalise(self, stabilizer: float = 0.01) -> clippings.Clipping:
        """Return a clipping to norm 1, whole or by layer; ``stabilizer``, above 0, is added to norms."""
        kind = clippings.AutomaticByLayer if self.by_layer else clippings.Automatic
        return kind(stabilizer)

    def gradient(
        self,
        oracle: Oracle,
        params: torch.Tensor,
        clipping: clippings.Clipping,
    ) -> torch.Tensor:
        """Return the noisy mean gradient of a new sample, shape ``[K, P]``.

        Args:
            oracle: The oracle of the update.
            params: Where the gradient is taken, shape ``[K, P]``.
            clipping: What bounds a record's part: of :meth:`clip` or :meth:`normalise`.
        """
        return oracle.gradient(
            oracle.sample(),
            params,
            clipping=clipping,
            noise_multiplier=self.noise_multiplier,
        )


def by_layer_option() -> Any:
    """Return the field ``clipping`` of a method that can clip layer by layer.

    Returns:
        A keyword field of a dataclass: ``flat`` unless given, or ``by-layer``.

    Example:
        >>> @dataclass(frozen=True)
        ... class Plain:
        ...     clipping: str = by_layer_option()
        >>> Plain().clipping
        'flat'
    """
    check = {"check": lambda name, value: check_choice(name, value, ("flat", "by-layer"))}
    return field(default="flat", kw_only=True, metadata=check)


def build(method: type[T], options: Mapping[str, Any], **fixed: Any) -> T:
    """Make a method from the options of a spec and the fields that a plan fixes."""
    accepted = [f for f in fields(method) if f.name not in fixed]  # type: ignore[arg-type]
    allowed = [
        f.name for f in sorted(accepted, key=lambda f: bool(f.kw_only))
    ]  # its own options first
    for name in options:
        if name == "clipping" and (why := getattr(method, "clips_whole", "")):
            raise InvalidInputError("option", name, f"cannot be had here: {why}")
        check_choice("option", name, allowed)
    required = [f.name for f in accepted if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in required if name not in options]:
        raise InvalidInputError(
            "options",
            sorted(options),
            f"the method also needs {', '.join(missing)}",
        )
    return method(**{**options, **fixed})


def expect_nothing(candidates: Sequence[Candidate]) -> None:
    """Refuse candidates with hyperparameters, for a method that sets all of them itself."""
    if candidate := next(filter(None, candidates), None):
        raise InvalidInputError(
            "candidate",
            dict(candidate),
            "must be empty: the method sets everything itself",
        )


def candidate_column(
    candidates: Sequence[Candidate],
    name: str,
    like: torch.Tensor,
    default: float | None = None,
) -> torch.Tensor:
    """Return one positive hyperparameter of every candidate as a tensor of shape ``[K]``.

    Args:
        candidates: What each candidate chose.
        name: The hyperparameter.
        like: A tensor of the type and device that is wanted.
        default: For candidates that do not give it.

    Raises:
        InvalidInputError: If a candidate must give it and does not, or it is not above 0.

    Example:
        >>> import torch
        >>> candidate_column([{"learning_rate": 0.5}, {}], "learning_rate", torch.zeros(1), default=1.0)
        tensor([0.5000, 1.0000])
    """
    import torch

    values = []
    for candidate in candidates:
        value = candidate.get(name, default)
        if value is None:
            raise InvalidInputError(
                "candidate",
                dict(candidate),
                f"must give {name}",
                "The method does not set it.",
            )
        values.append(check_number(name, value, above=0.0))
    return torch.tensor(values, dtype=like.dtype, device=like.device)


def rows(values: torch.Tensor) -> torch.Tensor:
    """Turn shape ``[K]`` into ``[K, 1]``, to scale rows of ``[K, P]``."""
    return values.unsqueeze(-1)


def descend(
    params: torch.Tensor,
    rate: torch.Tensor,
    direction: torch.Tensor,
) -> torch.Tensor:
    """Return ``params - rate * direction``, for a rate of each candidate, in one pass."""
    import torch

    return torch.addcmul(params, rate.unsqueeze(-1), direction, value=-1.0)


def first_weight_size(params: torch.Tensor, oracle: Oracle) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the root mean square of first weights, or torch's usual one if all are 0, and which are 0."""
    size = params.square().mean(dim=1).sqrt()
    return size.where(size > 0.0, oracle.usual_size), size == 0.0


@dataclass(frozen=True, eq=False)
class Moments:
    """State of an inner optimizer: moving averages of shape ``[K, P]`` and a step count."""

    first: torch.Tensor
    second: torch.Tensor
    step: int


@dataclass(frozen=True)
class SGD:
    """SGD with momentum, as ``torch.optim.SGD`` defines it: a step is ``params - rate * direction``."""

    momentum: float = 0.0
    weight_decay: float = 0.0

    def init(self, params: torch.Tensor) -> Moments:
        """Return the state before the first step, with zero momentum."""
        empty = params.new_zeros((params.shape[0], 0))
        first = params.new_zeros(params.shape) if self.momentum else empty
        return Moments(first=first, second=empty, step=0)

    def direction(
        self,
        state: Moments,
        gradient: torch.Tensor,
        params: torch.Tensor,
    ) -> tuple[torch.Tensor, Moments]:
        """Return SGD's direction of this step, shape ``[K, P]``, and the next state."""
        if self.weight_decay:
            gradient = gradient + self.weight_decay * params
        if not self.momentum:
            return gradient, Moments(state.first, state.second, state.step + 1)
        first = self.momentum * state.first + gradient
        return first, Moments(first, state.second, state.step + 1)


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay, as ``torch.optim.AdamW``; else as ``torch.optim.Adam``."""

    beta1: float = 0.9
    beta2: float = 0.999
    stability: float = 1e-8
    weight_decay: float = 0.01
    decoupled: bool = True

    def init(self, params: torch.Tensor) -> Moments:
        """Return the state before the first step, with zero moments."""
        zeros = params.new_zeros(params.shape)
        return Moments(first=zeros, second=zeros.clone(), step=0)

    def direction(
        self,
        state: Moments,
        gradient: torch.Tensor,
        params: torch.Tensor,
    ) -> tuple[torch.Tensor, Moments]:
        """Return Adam's direction of this step, shape ``[K, P]``, and the next state."""
        if self.weight_decay and not self.decoupled:
            gradient = gradient + self.weight_decay * params
        step = state.step + 1
        first = state.first.lerp(gradient, 1.0 - self.beta1)
        second = self.beta2 * state.second
        second.addcmul_(gradient, gradient, value=1.0 - self.beta2)
        # Both corrections of the bias go into the divisor: every pass over the vectors counts.
        bias = 1.0 - self.beta1**step
        divisor = second.sqrt().mul_(bias / (1.0 - self.beta2**step) ** 0.5)
        direction = first / divisor.add_(bias * self.stability)
        if self.weight_decay and self.decoupled:
            direction.add_(params, alpha=self.weight_decay)
        return direction, Moments(first, second, step)


InnerOptimizer = SGD | AdamW


def _kept(state: Any) -> list[Field[Any]]:
    """Return the fields of a state that a checkpoint keeps: all but those marked ``kept: False``."""
    return [field for field in fields(state) if field.metadata.get("kept", True)]


def state_tensors(state: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a state by dotted path, such as ``"moments.first"``; numbers become tensors."""
    import torch

    tensors: dict[str, torch.Tensor] = {}
    for each in _kept(state):
        value = getattr(state, each.name)
        if is_dataclass(value):
            for name, tensor in state_tensors(value).items():
                tensors[f"{each.name}.{name}"] = tensor
        elif isinstance(value, torch.Tensor):
            # A copy: safetensors refuses tensors that share memory, and so do expanded views.
            tensors[each.name] = value.detach().clone().contiguous()
        else:
            tensors[each.name] = torch.tensor(value)
    return tensors


def restore_state(template: T, tensors: Mapping[str, torch.Tensor]) -> T:
    """Return a state like ``template`` that holds the tensors that :func:`state_tensors` returned."""
    expected = state_tensors(template)
    if expected.keys() != tensors.keys():
        raise InvalidInputError(
            "tensors",
            sorted(tensors),
            f"must be exactly {', '.join(sorted(expected))}",
        )
    for name, tensor in tensors.items():
        like = expected[name]
        # What is empty in the template may have grown.
        has_shape = like.numel() == 0 or tensor.shape == like.shape
        if not has_shape or tensor.dtype != like.dtype:
            raise InvalidInputError(name, tuple(tensor.shape), "must fit the method's state")
    restored: T = _restored(template, tensors, "")
    return restored


def _restored(
    template: Any,
    tensors: Mapping[str, torch.Tensor],
    prefix: str,
) -> Any:
    values: dict[str, Any] = {}
    for each in _kept(template):
        old = getattr(template, each.name)
        path = prefix + each.name
        if is_dataclass(old):
            values[each.name] = _restored(old, tensors, f"{path}.")
        elif isinstance(old, int):
            values[each.name] = int(tensors[path])
        else:
            values[each.name] = tensors[path].to(old.device)
    return replace(template, **values)
