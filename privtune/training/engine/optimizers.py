"""torch's optimizers as the steps of a method: they are given noisy clipped gradients, and no more.

What an optimizer makes of a release is post-processing, so the charge is that of the method whose gradients
it steps along. Plain SGD, Adam and AdamW of a whole stack are stepped by one call; any other one steps the
parameters of its own candidate.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import nn
from torch.optim import optimizer as hooks
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from privtune.errors import InvalidInputError
from privtune.training.mechanism.kernel import share_flat
from privtune.training.methods import AutomaticClipping, FixedDPSGD
from privtune.training.methods._common import candidate_column

if TYPE_CHECKING:
    from privtune.accounting import Event
    from privtune.training.mechanism.oracle import Oracle
    from privtune.training.mechanism.schedule import Schedule
    from privtune.training.methods import Candidate

OPTIMIZER = "optimizer"
"""Under which name a candidate's values hold its :class:`Own`."""

_SAME = 1e-12  # relative: factors of several groups that differ by rounding alone
_AS_ONE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def checked(
    optimizer: torch.optim.Optimizer, model: nn.Module, scheduler: LRScheduler | None = None
) -> None:
    """Refuse an optimizer whose steps would not be torch's own steps along the gradients that it is given.

    Args:
        optimizer: What a candidate gave.
        model: Its model.
        scheduler: Its learning-rate schedule, if it is one of torch's.

    Raises:
        InvalidInputError: Naming what is wrong.
    """
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if isinstance(optimizer, type) or not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidInputError(
            "optimizer", kind.__name__, "must be one optimizer made over the model's parameters"
        )
    if kind.__module__.partition(".")[0] != "torch":
        raise InvalidInputError(
            "optimizer",
            kind.__name__,
            "must be one of torch's classes, since a class of your own may take steps that were not charged",
            "Choose a method of PrivTune's in its place, or one of torch.optim.",
        )
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise InvalidInputError(
            "optimizer.step", "replaced", f"must be that of {kind.__name__}, as torch has it"
        )
    found = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    found += [hooks._global_optimizer_pre_hooks, hooks._global_optimizer_post_hooks]
    if any(found):
        raise InvalidInputError(
            "optimizer", "a step hook", "must have no hooks on its steps", "Remove the hook."
        )
    if any(float(kept.get("step", 1)) for kept in optimizer.state.values()):
        raise InvalidInputError(
            "optimizer",
            "one that has stepped",
            "must be new for each candidate, so that it remembers nothing",
            "Make it in build.",
        )
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held != trainable:
        raise InvalidInputError(
            "optimizer",
            f"{len(held)} parameters",
            f"must hold exactly the {len(trainable)} trainable parameters of the candidate's model",
            "Make it after the model is complete, over the parameters that require gradients.",
        )
    closure = signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise InvalidInputError(
            "optimizer",
            kind.__name__,
            "must step along the gradient that it is given, but asks for more of them",
            "Use SGD, Adam, or another one whose step() needs no closure.",
        )
    if scheduler is not None:
        _check_scheduler(scheduler, optimizer)


def _check_scheduler(scheduler: LRScheduler, optimizer: torch.optim.Optimizer) -> None:
    name = type(scheduler).__name__
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        raise InvalidInputError(
            "schedule",
            name,
            "must be a scheduler of torch's that is stepped once after every step, by no metric",
            "Name a schedule such as 'cosine', or use one of torch.optim.lr_scheduler.",
        )
    if scheduler.optimizer is not optimizer:
        raise InvalidInputError("schedule", name, "must be made over the candidate's own optimizer")
    parts = getattr(scheduler, "_schedulers", [scheduler])  # one that chains others has no position
    if any(part.last_epoch > 0 for part in parts[:1]):
        raise InvalidInputError("schedule", name, "must be new: it has been stepped")


@dataclass(frozen=True, eq=False)
class Own:
    """The optimizer of one candidate.

    Args:
        optimizer: It.
        params: What it steps, in the order of the model's parameters.
        flat: Their memory, where they lie in one vector: if it steps by itself.
        scheduler: Stepped after every step; None where there is none, or ``paces`` says it all.
        paces: Factors of a schedule of torch's on every learning rate, one a step.
    """

    optimizer: torch.optim.Optimizer
    params: Sequence[torch.Tensor] = field(repr=False)
    flat: torch.Tensor | None = field(repr=False)
    scheduler: LRScheduler | None = field(repr=False)
    paces: tuple[float, ...]
    _steps: list[int] = field(default_factory=lambda: [0], repr=False)

    @classmethod
    def of(
        cls,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        scheduler: LRScheduler | None,
        steps: int,
    ) -> Own:
        """Return what steps a candidate.

        Args:
            optimizer: It was checked.
            model: The candidate's model.
            scheduler: Its schedule.
            steps: How many steps it will take.
        """
        params = [p for p in model.parameters() if p.requires_grad]
        paces = (1.0,) * steps if scheduler is None else _paces(scheduler, steps)
        if paces is None or not _as_one(optimizer):
            return cls(optimizer, params, share_flat(model), scheduler, (1.0,) * steps)
        for group in optimizer.param_groups if scheduler is not None else ():
            group["lr"] = group["initial_lr"]
        return cls(optimizer, params, None, None, paces)

    @property
    def kind(self) -> type | None:
        """Optimizers of one kind are stepped by one call; None for one that steps by itself."""
        return type(self.optimizer) if self.flat is None else None

    @property
    def widens(self) -> bool:
        """Whether its rule leaves weights of zero that have no gradient at zero, by one setting for all."""
        groups = self.optimizer.param_groups
        return self.flat is None and len(groups) == 1 and groups[0].get("eps", 1.0) > 0.0

    @property
    def rate(self) -> float:
        """Learning rate of the first group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def step(self, gradient: torch.Tensor, pace: float, number: int) -> torch.Tensor:
        """Step by itself along a gradient of shape ``[P]``; return the parameters, ``[P]``."""
        if self.flat is None:
            raise RuntimeError("an optimizer that is stepped with others")
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        lengths = [p.numel() for p in self.params]
        for p, part in zip(self.params, torch.split(gradient.to(self.flat), lengths), strict=True):
            p.grad = part.view_as(p)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate if pace == 1.0 else rate * pace
        self.optimizer.step()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        for p in self.params:
            p.grad = None
        if self.scheduler is not None:
            self.scheduler.step()
        self._steps[0] = number + 1
        return self.flat

    def memory(self) -> torch.Tensor:
        """Return what the optimizer remembers as one vector."""
        return torch.cat([self._held(), *(t.flatten().to(self._held()) for t in self._tensors())])

    def go_to(self, params: torch.Tensor, memory: torch.Tensor, number: int) -> None:
        """Go on from a step that another process has taken, if this one has not."""
        if self._steps[0] == number or self.flat is None:
            return
        while (
            self._steps[0] < number
        ):  # makes the places of what is remembered, and the schedule's position
            self.step(torch.zeros_like(self.flat), 1.0, self._steps[0])
        self.flat.copy_(params)
        held = self._tensors()
        parts = torch.split(memory, [t.numel() for t in held])
        for tensor, part in zip(held, parts, strict=True):
            tensor.copy_(part.view_as(tensor))

    def _held(self) -> torch.Tensor:
        return self.params[0].detach().new_empty(0)

    def _tensors(self) -> list[torch.Tensor]:
        state = self.optimizer.state
        found = (state[p] for p in self.params if p in state)
        return [v for own in found for _, v in sorted(own.items()) if torch.is_tensor(v)]


def _as_one(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether an optimizer's steps can be taken with those of others: its rule is the plain one."""

    def plain(group: Mapping[str, Any]) -> bool:
        numbers = (group["lr"], group["weight_decay"], *group.get("betas", ()))
        others = ("amsgrad", "capturable", "differentiable")
        return all(isinstance(n, int | float) for n in numbers) and not any(map(group.get, others))

    return type(optimizer) in _AS_ONE and all(map(plain, optimizer.param_groups))


def _paces(scheduler: LRScheduler, steps: int) -> tuple[float, ...] | None:
    """Return a schedule's factors, one a step; None where groups differ, or more than rates changes."""
    groups = scheduler.optimizer.param_groups
    base = [float(group["initial_lr"]) for group in groups]
    before, found = [_others(group) for group in groups], []
    for own in walked(scheduler, steps) if all(base) else ():
        rates = [float(group["lr"]) for group in own]
        factors = [rate / first for rate, first in zip(rates, base, strict=True)]
        apart = any(abs(factor - factors[0]) > _SAME * abs(factors[0]) for factor in factors)
        if apart or [_others(group) for group in own] != before:
            return None
        found.append(factors[0])
    return tuple(found) if found else None


def walked(scheduler: LRScheduler, steps: int) -> list[list[dict[str, Any]]]:
    """Return what a schedule sets the groups of its optimizer to, step by step; it stays where it is.

    Args:
        scheduler: One of torch's.
        steps: How many steps a training takes.

    Raises:
        InvalidInputError: If it fails in one of them.
    """
    groups, found = scheduler.optimizer.param_groups, []
    tried = deepcopy(scheduler, {id(p): p for group in groups for p in group["params"]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no step was taken before the schedule's
        for step in range(steps):
            own = tried.optimizer.param_groups
            found.append([{n: v for n, v in g.items() if n != "params"} for g in own])
            try:
                tried.step()
            except Exception as error:
                raise InvalidInputError(
                    "schedule",
                    type(scheduler).__name__,
                    f"must have a rate for each of the {steps} steps of a training, and fails after "
                    f"{step + 1}: {error}",
                    "It is stepped once after every step, not every epoch: trial.steps is their number.",
                ) from error
    return found


def _others(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a schedule of the learning rate leaves alone."""
    return {name: value for name, value in group.items() if name not in ("params", "lr")}


@dataclass(frozen=True, eq=False)
class _Columns:
    """Settings of K optimizers: a number of each, shape ``[K, 1]``; ``[K, P]`` where any has groups."""

    rate: torch.Tensor
    decay: torch.Tensor
    sign: torch.Tensor
    apart: torch.Tensor
    momentum: torch.Tensor
    nesterov: torch.Tensor
    new: torch.Tensor
    beta1: torch.Tensor
    beta2: torch.Tensor
    epsilon: torch.Tensor

    @classmethod
    def of(cls, owns: Sequence[Own], like: torch.Tensor) -> _Columns:
        """Read the settings of optimizers of one kind."""
        single = all(len(own.optimizer.param_groups) == 1 for own in owns)
        groups = []
        for own in owns:
            each = {id(p): g for g in own.optimizer.param_groups for p in g["params"]}
            groups.append([(each[id(p)], p.numel()) for p in own.params[: 1 if single else None]])

        def column(of: Callable[[Mapping[str, Any]], float]) -> torch.Tensor:
            rows = [
                torch.tensor([float(of(g)) for g, _ in own], dtype=torch.float64).repeat_interleave(
                    torch.tensor([1 if single else n for _, n in own])
                )
                for own in groups
            ]
            return torch.stack(rows).to(like.device)

        def of_type(column: torch.Tensor) -> torch.Tensor:
            return column.to(like.dtype)

        # Older versions of torch's AdamW are no Adam and have no such setting.
        adamw = isinstance(owns[0].optimizer, torch.optim.AdamW)
        apart = column(lambda g: g.get("decoupled_weight_decay", adamw))
        decay, momentum = (
            column(lambda g: g["weight_decay"]),
            column(lambda g: g.get("momentum", 0)),
        )
        # Without momentum torch takes the gradient as it is, whatever its dampening.
        dampening = column(lambda g: g.get("dampening", 0)) * (momentum != 0)
        return cls(
            rate=column(lambda g: g["lr"]),
            decay=of_type(decay * (1 - apart)),
            sign=of_type(1 - 2 * column(lambda g: g["maximize"])),
            apart=decay * apart,
            momentum=of_type(momentum),
            nesterov=column(lambda g: g.get("nesterov", False)) > 0,
            new=of_type(1 - dampening),
            beta1=column(lambda g: g.get("betas", (0, 0))[0]),
            beta2=column(lambda g: g.get("betas", (0, 0))[1]),
            epsilon=of_type(column(lambda g: g.get("eps", 0))),
        )


@dataclass(frozen=True, eq=False)
class _State:
    """State of K trainings that optimizers step.

    Args:
        params: Shape ``[K, P]``.
        learning_rate: Of the first group in the last step, shape ``[K]``.
        max_grad_norm: Shape ``[K]``; 0 for methods without.
        step: How many were taken.
        first: What is remembered: momentum, the average gradient, or all of what an optimizer that steps
            by itself remembers; ``[K, 0]`` before there is any.
        second: The average squared gradient, or ``[K, 0]``.
    """

    params: torch.Tensor
    learning_rate: torch.Tensor
    max_grad_norm: torch.Tensor
    step: int
    first: torch.Tensor
    second: torch.Tensor


@dataclass(frozen=True, eq=False)
class _AsOne(_State):
    """Of optimizers that are stepped by one call."""

    columns: _Columns
    adaptive: int
    plain: int


@dataclass(frozen=True, eq=False)
class _Alone(_State):
    """Of optimizers that step by themselves."""

    owns: tuple[Own, ...] = field(metadata={"kept": False})


def _of_columns(state: _AsOne, gradient: torch.Tensor, pace: torch.Tensor | float) -> _State:
    """Step SGD, Adam or AdamW of all rows by torch's own rules."""
    columns, params = state.columns, state.params
    rate = columns.rate * pace.unsqueeze(1) if isinstance(pace, torch.Tensor) else columns.rate
    own = rate.to(params)
    now = replace(state, step=state.step + 1, learning_rate=own[:, 0])
    if state.plain:
        return replace(now, params=torch.addcmul(params, gradient, own, value=-1.0))
    gradient = (gradient * columns.sign).addcmul_(params, columns.decay)
    if not state.adaptive:
        first = gradient
        if state.step:
            first = (state.first * columns.momentum).addcmul_(gradient, columns.new)
        ahead = torch.addcmul(gradient, first, columns.momentum)
        direction = torch.where(columns.nesterov, ahead, first)
        return replace(now, params=torch.addcmul(params, direction, own, value=-1.0), first=first)
    beta1, beta2 = columns.beta1, columns.beta2
    empty = torch.zeros_like(gradient)
    first, second = (state.first, state.second) if state.step else (empty, empty)
    first = first.lerp(gradient, (1 - beta1).to(params))
    second = (second * beta2.to(params)).addcmul_(gradient, gradient * (1 - beta2).to(params))
    one, two = (1 - beta**now.step for beta in (beta1, beta2))
    root = second.sqrt().div_(two.sqrt().to(params)).add_(columns.epsilon)
    kept = params * (1 - rate * columns.apart).to(params)
    params = kept - torch.div(first, root).mul_((rate / one).to(params))
    return replace(now, params=params, first=first, second=second)


def _by_themselves(state: _Alone, gradient: torch.Tensor, pace: torch.Tensor | float) -> _State:
    """Let every optimizer step its own candidate's parameters."""
    paces = pace.tolist() if isinstance(pace, torch.Tensor) else [pace] * len(gradient)
    rates, rows = [], []
    for own, params, memory, row, factor in zip(
        state.owns, state.params, state.first, gradient, paces, strict=True
    ):
        own.go_to(params, memory, state.step)
        rates.append(own.rate * factor)
        rows.append(own.step(row, factor, state.step))
    return replace(
        state,
        params=torch.stack(rows).to(state.params),
        learning_rate=state.params.new_tensor(rates),
        step=state.step + 1,
        first=torch.stack([own.memory() for own in state.owns]),
    )


@dataclass(frozen=True)
class Optimized:
    """A method whose gradients an optimizer of torch's steps along, one for each candidate.

    Args:
        method: What releases the gradients, and is charged: DP-SGD or automatic clipping, with no
            momentum or weight decay of its own.

    Raises:
        InvalidInputError: If the method does more than release gradients.

    **Guarantee**: as the method's.
    """

    method: Any

    open_ended: ClassVar[bool] = True

    def __post_init__(self) -> None:
        method = self.method
        plain = isinstance(method, FixedDPSGD | AutomaticClipping)
        if not plain or method.momentum or method.weight_decay:
            raise InvalidInputError(
                "optimizer",
                "one of torch's",
                f"must be None: method {method.name!r} steps by itself, with its own options",
                "Leave the optimizer out; methods dpsgd and automatic-clipping, without momentum or weight "
                "decay of their own, take any.",
            )

    @property
    def schedule(self) -> Mapping[str, Any] | str:
        """The method's schedule, which scales what the optimizer's rates are."""
        own: Mapping[str, Any] | str = self.method.schedule
        return own

    @property
    def average(self) -> str:
        """Which average of the iterates is released: the method's."""
        own: str = self.method.average
        return own

    def event(self, schedule: Schedule) -> Event:
        """Return what the method's releases cost."""
        own: Event = self.method.event(schedule)
        return own

    def init(self, params: torch.Tensor, candidates: Sequence[Candidate]) -> _State:
        """Make the state of K candidates, whose optimizers are all of one kind."""
        owns: list[Own] = [candidate[OPTIMIZER] for candidate in candidates]
        norms = params.new_zeros(len(owns))
        if isinstance(self.method, FixedDPSGD):
            norms = candidate_column(candidates, "max_grad_norm", params)
        empty = params.new_zeros(len(owns), 0)
        rates = params.new_tensor([own.rate for own in owns])
        common = (params, rates, norms, 0, empty, empty)
        if owns[0].kind is None:
            return _Alone(*common, owns=tuple(owns))
        columns, adaptive = _Columns.of(owns, params), owns[0].kind is not torch.optim.SGD
        used = (columns.decay, columns.momentum, columns.sign - 1)
        plain = not adaptive and not any(bool(column.any()) for column in used)
        return _AsOne(*common, columns=columns, adaptive=int(adaptive), plain=int(plain))

    def update(self, state: _State, oracle: Oracle) -> _State:
        """Take one step of every optimizer along its row of the release."""
        method = self.method
        if isinstance(method, FixedDPSGD):
            clipping = method.clip(state.max_grad_norm)
        else:
            clipping = method.normalise(method.stabilizer)
        gradient = oracle.gradient(
            oracle.sample(),
            state.params,
            clipping=clipping,
            noise_multiplier=method.noise_multiplier,
        )
        if isinstance(state, _AsOne):
            return _of_columns(state, gradient, oracle.pace)
        return _by_themselves(cast(_Alone, state), gradient, oracle.pace)

    def report(self, state: _State) -> Mapping[str, torch.Tensor]:
        """Return the learning rate of the first group, and the norm that gradients are clipped to."""
        found = {"learning_rate": state.learning_rate}
        if isinstance(self.method, FixedDPSGD):
            found["max_grad_norm"] = state.max_grad_norm
        return found
