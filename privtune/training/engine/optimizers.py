"""torch's optimizers as the steps of a method: they are given noisy clipped gradients, and no more.

What an optimizer makes of a release is post-processing, so the charge is that of the method whose gradients
it steps along. Plain SGD, Adam and AdamW of a whole stack are stepped by one call; any other one, as one with
several groups of parameters, steps those of its own candidate.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import optimizer as hooks
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from privtune.errors import InvalidInputError
from privtune.training.methods import AutomaticClipping, FixedDPSGD
from privtune.training.methods._base import candidate_column

if TYPE_CHECKING:
    from privtune.training.mechanism.oracle import Oracle
    from privtune.training.methods import Candidate

OPTIMIZER = "optimizer"
"""Under which name a candidate's values hold its :class:`Own`."""

_AS_ONE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def checked(
    optimizer: torch.optim.Optimizer, model: nn.Module, scheduler: LRScheduler | None = None
) -> None:
    """Refuse an optimizer whose steps would not be torch's own steps along the gradients that it is given."""
    for problem in _problems(optimizer, model):
        raise InvalidInputError("optimizer", *problem)
    for problem in () if scheduler is None else _schedule_problems(scheduler, optimizer):
        raise InvalidInputError("schedule", type(scheduler).__name__, *problem)


def _problems(optimizer: torch.optim.Optimizer, model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Yield what is wrong with an optimizer: what it is, what it must be, what helps."""
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    name = kind.__name__
    if isinstance(optimizer, type) or not isinstance(optimizer, torch.optim.Optimizer):
        yield name, "must be one optimizer made over the model's parameters"
    if kind.__module__.partition(".")[0] != "torch":
        must = (
            "must be one of torch's classes: one of your own may take steps that were not charged"
        )
        yield name, must, "Choose a method of PrivTune's in its place, or one of torch.optim."
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        yield "another step()", f"must be that of {name}, as torch has it"
    found = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    found += [hooks._global_optimizer_pre_hooks, hooks._global_optimizer_post_hooks]
    if any(found):
        yield "a step hook", "must have no hooks on its steps", "Remove the hook."
    if any(float(kept.get("step", 1)) for kept in optimizer.state.values()):
        must = "must be new for each candidate, so that it remembers nothing"
        yield "one that has stepped", must, "Make it in build."
    yield from _parameter_problems(optimizer, model)
    closure = signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        must = "must step along the gradient that it is given, but asks for more of them"
        yield name, must, "Use SGD, Adam, or another one whose step() needs no closure."


def _parameter_problems(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> Iterator[tuple[str, ...]]:
    """Yield what is wrong with the parameters that an optimizer holds, by name.

    Those of the model that are frozen may be among them: they have no gradient, and no step moves them.
    """
    named = {id(p): (name, p) for name, p in model.named_parameters()}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [name for key, (name, p) in named.items() if p.requires_grad and key not in held]
    count = f"{len(held)} parameters"
    if not any(p.requires_grad for _, p in named.values()):
        must = "must hold parameters of the candidate's model, none of which requires gradients"
        yield count, must, "Call requires_grad_(True) on what shall be trained."
    elif held - named.keys():
        must = "must hold parameters of the candidate's model alone, and some are of another model"
        remedy = "Make it after the model is complete, over the parameters that require gradients."
        yield count, must, remedy
    elif missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        must = f"must hold every parameter that requires gradients, and lacks {', '.join(missing[:3])}{more}"
        remedy = (
            "Call requires_grad_(False) on what shall stay as it is, before the optimizer is made."
        )
        yield count, must, remedy


def _schedule_problems(
    scheduler: LRScheduler, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, ...]]:
    """Yield what a schedule must be, and is not, and what helps."""
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        must = "must be a scheduler of torch's that is stepped once after every step, by no metric"
        yield must, "Name a schedule such as 'cosine', or use one of torch.optim.lr_scheduler."
    if scheduler.optimizer is not optimizer:
        yield ("must be made over the candidate's own optimizer",)
    parts = getattr(scheduler, "_schedulers", [scheduler])  # one that chains others has no position
    if parts[0].last_epoch > 0:
        yield ("must be new: it has been stepped",)


@dataclass(eq=False)
class Own:
    """The optimizer of one candidate, over parameters in the order of the model's."""

    optimizer: torch.optim.Optimizer
    params: Sequence[torch.Tensor] = field(repr=False)
    alone: bool = field(repr=False)
    scheduler: LRScheduler | None = field(repr=False)
    paces: tuple[float, ...]
    steps: int = field(default=0, repr=False)

    @classmethod
    def of(
        cls,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        scheduler: LRScheduler | None,
        steps: int,
    ) -> Own:
        """Check what steps a candidate so many times; return a copy of it, over copies of the parameters."""
        checked(optimizer, model, scheduler)
        trained = [p for p in model.parameters() if p.requires_grad]
        # A model that build keeps beside its trial would hold the weights of every step.
        copies: dict[int, Any] = {id(p): nn.Parameter(p.detach().clone()) for p in trained}
        params = [copies[id(p)] for p in trained]
        optimizer, scheduler = deepcopy((optimizer, scheduler), copies)
        if scheduler is not None:
            _mark_step(optimizer)
        level = (1.0,) * steps
        paces = level if scheduler is None else _paces(scheduler, steps)
        if paces is None or not _as_one(optimizer):
            return cls(optimizer, params, True, scheduler, level)
        for group in optimizer.param_groups if scheduler is not None else ():
            group["lr"] = group["initial_lr"]
        return cls(optimizer, params, False, None, paces)

    @property
    def kind(self) -> type | None:
        """Optimizers of one kind are stepped by one call; None for one that steps by itself."""
        return None if self.alone else type(self.optimizer)

    @property
    def widens(self) -> bool:
        """Whether its rule leaves weights of zero that have no gradient at zero, by one setting for all."""
        return not self.alone and self.optimizer.param_groups[0].get("eps", 1.0) > 0.0

    @property
    def rate(self) -> float:
        """Learning rate of the first group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def step(self, gradient: torch.Tensor, pace: float) -> torch.Tensor:
        """Step by itself along a gradient of shape ``[P]``; return the parameters, ``[P]``."""
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for p, part in _parts(gradient.to(self.params[0]), self.params):
            p.grad = part
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate if pace == 1.0 else rate * pace
        self.optimizer.step()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        for p in self.params:
            p.grad = None
        if self.scheduler is not None:
            self.scheduler.step()
        self.steps += 1
        return torch.cat([p.detach().flatten() for p in self.params])

    def memory(self) -> torch.Tensor:
        """Return what the optimizer remembers as one vector."""
        empty = self.params[0].detach().new_empty(0)
        return torch.cat([empty, *(t.flatten().to(empty) for t in self._remembered())])

    def go_to(self, params: torch.Tensor, memory: torch.Tensor, steps: int) -> None:
        """Go on from a step that another process has taken, if this one has not."""
        if self.steps == steps:
            return
        while self.steps < steps:  # makes places for what is remembered, and moves the schedule
            self.step(torch.zeros_like(params), 1.0)
        for held, vector in ((self.params, params), (self._remembered(), memory)):
            for tensor, part in _parts(vector, held):
                tensor.data.copy_(part)

    def _remembered(self) -> list[torch.Tensor]:
        state = self.optimizer.state
        found = (state[p] for p in self.params if p in state)
        return [v for own in found for _, v in sorted(own.items()) if torch.is_tensor(v)]


def _mark_step(optimizer: torch.optim.Optimizer) -> None:
    """Mark the copy of an optimizer as one that a schedule knows: torch would warn that it is another."""
    step: Any = partial(type(optimizer).step, optimizer)
    step._wrapped_by_lr_sched = True
    optimizer.step = step  # type: ignore[method-assign]
    optimizer._opt_called = True  # type: ignore[attr-defined]


def _parts(
    vector: torch.Tensor, like: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield some tensors, each with the part of a vector that lies in its place."""
    parts = torch.split(vector, [tensor.numel() for tensor in like])
    return ((tensor, part.view_as(tensor)) for tensor, part in zip(like, parts, strict=True))


def _as_one(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether an optimizer's steps can be taken with those of others: one plain rule for all weights."""
    first, *more = optimizer.param_groups
    if type(optimizer) not in _AS_ONE or more:
        return False
    numbers = (first["lr"], first["weight_decay"], *first.get("betas", ()))
    others = ("amsgrad", "capturable", "differentiable")
    return all(isinstance(n, int | float) for n in numbers) and not any(map(first.get, others))


def _paces(scheduler: LRScheduler, steps: int) -> tuple[float, ...] | None:
    """Return a schedule's factors on the first rate, one a step; None where it changes more."""
    base = float(scheduler.optimizer.param_groups[0]["initial_lr"])
    walk = [groups[0] for groups in walked(scheduler, steps)]
    rates = [float(own.pop("lr")) for own in walk]
    if not base or any(own != walk[0] for own in walk):
        return None
    return tuple(rate / base for rate in rates)


def walked(scheduler: LRScheduler, steps: int) -> list[list[dict[str, Any]]]:
    """Return what a schedule of torch's sets the groups of its optimizer to, step by step."""
    held = [p for group in scheduler.optimizer.param_groups for p in group["params"]]
    tried, found = deepcopy(scheduler, {id(p): p for p in held}), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no step was taken before the schedule's
        for step in range(steps):
            groups = tried.optimizer.param_groups
            found.append([{n: v for n, v in group.items() if n != "params"} for group in groups])
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


def _columns(owns: Sequence[Own], like: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the settings of K optimizers of one kind by name, ``[K, 1]``."""
    groups = [group for own in owns for group in own.optimizer.param_groups]
    betas = torch.tensor([group.get("betas", (0.0, 0.0)) for group in groups], dtype=torch.float64)

    def column(name: str, default: float = 0.0) -> torch.Tensor:
        values = [[float(group.get(name, default))] for group in groups]
        return torch.tensor(values, dtype=torch.float64, device=like.device)

    rate, decay, momentum = column("lr"), column("weight_decay"), column("momentum")
    used = (decay, momentum, column("maximize"))
    if owns[0].kind is torch.optim.SGD and not any(bool(values.any()) for values in used):
        return {"rate": rate}
    # Older versions of torch's AdamW are no Adam and have no such setting.
    apart = column("decoupled_weight_decay", isinstance(owns[0].optimizer, torch.optim.AdamW))
    # Without momentum torch takes the gradient as it is, whatever its dampening.
    dampening = column("dampening") * (momentum != 0)
    own_type = {
        "decay": decay * (1 - apart),
        "sign": 1 - 2 * column("maximize"),
        "momentum": momentum,
        "new": 1 - dampening,
        "epsilon": column("eps"),
    }
    return {
        "rate": rate,
        "apart": decay * apart,
        "nesterov": column("nesterov"),
        "beta1": betas[:, :1].to(like.device),
        "beta2": betas[:, 1:].to(like.device),
        **{name: values.to(like.dtype) for name, values in own_type.items()},
    }


@dataclass(frozen=True, eq=False)
class _State:
    """State of K trainings that optimizers of one kind step: parameters ``[K, P]``, numbers ``[K]``."""

    params: torch.Tensor
    learning_rate: torch.Tensor
    max_grad_norm: torch.Tensor
    step: int
    first: torch.Tensor
    second: torch.Tensor
    owns: tuple[Own, ...] = field(metadata={"kept": False})
    columns: Mapping[str, torch.Tensor] = field(metadata={"kept": False})


def _of_columns(state: _State, gradient: torch.Tensor, pace: torch.Tensor | float) -> _State:
    """Step SGD, Adam or AdamW of all rows by torch's own rules."""
    columns, params = state.columns, state.params
    rate = columns["rate"]
    rate = rate * pace.unsqueeze(1) if isinstance(pace, torch.Tensor) else rate
    own = rate.to(params)
    now = replace(state, step=state.step + 1, learning_rate=own[:, 0])
    if columns.keys() == {"rate"}:
        return replace(now, params=torch.addcmul(params, gradient, own, value=-1.0))
    gradient = (gradient * columns["sign"]).addcmul_(params, columns["decay"])
    if state.owns[0].kind is torch.optim.SGD:
        first = gradient
        if state.step:
            first = (state.first * columns["momentum"]).addcmul_(gradient, columns["new"])
        ahead = torch.addcmul(gradient, first, columns["momentum"])
        direction = torch.where(columns["nesterov"] > 0, ahead, first)
        return replace(now, params=torch.addcmul(params, direction, own, value=-1.0), first=first)
    beta1, beta2 = columns["beta1"], columns["beta2"]
    empty = torch.zeros_like(gradient)
    first, second = (state.first, state.second) if state.step else (empty, empty)
    first = first.lerp(gradient, (1 - beta1).to(params))
    second = (second * beta2.to(params)).addcmul_(gradient, gradient * (1 - beta2).to(params))
    one, two = (1 - beta**now.step for beta in (beta1, beta2))
    root = second.sqrt().div_(two.sqrt().to(params)).add_(columns["epsilon"])
    kept = params * (1 - rate * columns["apart"]).to(params)
    params = kept - torch.div(first, root).mul_((rate / one).to(params))
    return replace(now, params=params, first=first, second=second)


def _by_themselves(state: _State, gradient: torch.Tensor, pace: torch.Tensor | float) -> _State:
    """Let every optimizer step its own candidate's parameters."""
    paces = pace.tolist() if isinstance(pace, torch.Tensor) else [pace] * len(gradient)
    rates, rows = [], []
    for k, (own, factor) in enumerate(zip(state.owns, paces, strict=True)):
        own.go_to(state.params[k], state.first[k], state.step)
        rates.append(own.rate * factor)
        rows.append(own.step(gradient[k], factor))
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

    **Guarantee**: as the method's.
    """

    method: Any

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

    def init(self, params: torch.Tensor, candidates: Sequence[Candidate]) -> _State:
        """Make the state of K candidates, whose optimizers are all of one kind."""
        owns: tuple[Own, ...] = tuple(candidate[OPTIMIZER] for candidate in candidates)
        norms = params.new_zeros(len(owns))
        if isinstance(self.method, FixedDPSGD):
            norms = candidate_column(candidates, "max_grad_norm", params)
        empty = params.new_zeros(len(owns), 0)
        rates = params.new_tensor([own.rate for own in owns])
        columns = {} if owns[0].kind is None else _columns(owns, params)
        return _State(params, rates, norms, 0, empty, empty, owns, columns)

    def update(self, state: _State, oracle: Oracle) -> _State:
        """Take one step of every optimizer along its row of the release."""
        method = self.method
        if isinstance(method, FixedDPSGD):
            clipping = method.clip(state.max_grad_norm)
        else:
            clipping = method.normalise(method.stabilizer)
        gradient = method.gradient(oracle, state.params, clipping)
        step = _of_columns if state.columns else _by_themselves
        return step(state, gradient, oracle.pace)

    def report(self, state: _State) -> Mapping[str, torch.Tensor]:
        """Return what the method reports: the learning rate of the first group, and its clipping norm."""
        found: Mapping[str, torch.Tensor] = self.method.report(state)
        return found
