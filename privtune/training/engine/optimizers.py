"""torch's optimizers as steps of a training method, along noisy clipped gradients only.

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
from privtune.names import first_names
from privtune.training.methods.method import candidate_column

if TYPE_CHECKING:
    from privtune.training.mechanism.oracle import Oracle
    from privtune.training.methods import Candidate

OPTIMIZER = "optimizer"
"""Under which name a candidate's values hold its :class:`Own`."""

_AS_ONE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def checked(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    scheduler: LRScheduler | None = None,
) -> None:
    """Check that an optimizer and its schedule take torch's own steps along released gradients only.

    The charge is that of the gradients that a method releases. An optimizer that asks for more of
    them (a closure), that remembers another trial, or that a user wrote could take steps that nobody
    charged, or compare candidates by more than their hyperparameters. The first problem that is found
    is raised.

    Raises:
        InvalidInputError: Of ``optimizer`` or of ``schedule``, with what helps.
    """
    for problem in _problems(optimizer, model):
        raise InvalidInputError("optimizer", *problem)
    if scheduler is None:
        return
    for problem in _schedule_problems(scheduler, optimizer):
        raise InvalidInputError("schedule", type(scheduler).__name__, *problem)


def _problems(optimizer: torch.optim.Optimizer, model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Yield the problems of an optimizer as texts: what it is, what it must be, a remedy.

    A schedule wraps ``step`` on the instance; that mark of torch's is known and let pass.
    """
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
    hook_tables = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        hooks._global_optimizer_pre_hooks,
        hooks._global_optimizer_post_hooks,
    )
    if any(hook_tables):
        yield "a step hook", "must have no hooks on its steps", "Remove the hook."
    steps = [float(state.get("step", 1)) for state in optimizer.state.values()]
    if any(steps):
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
    """Yield the problems of an optimizer's parameters: none trained, some missing, or another model's.

    Those of the model that are frozen may be among them: they have no gradient, and no step moves them.
    """
    parameters = {id(p): (name, p) for name, p in model.named_parameters()}
    identities = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = []
    for key, (name, p) in parameters.items():
        if p.requires_grad and key not in identities:
            missing.append(name)
    count = f"{len(identities)} parameters"
    if not any(p.requires_grad for _, p in parameters.values()):
        must = "must hold parameters of the candidate's model, none of which requires gradients"
        yield count, must, "Call requires_grad_(True) on what shall be trained."
    elif identities - parameters.keys():
        must = "must hold parameters of the candidate's model alone, and some are of another model"
        remedy = "Make it after the model is complete, over the parameters that require gradients."
        yield count, must, remedy
    elif missing:
        names = first_names(missing)
        must = f"must hold every parameter that requires gradients, and lacks {names}"
        remedy = (
            "Call requires_grad_(False) on what shall stay as it is, before the optimizer is made."
        )
        yield count, must, remedy


def _schedule_problems(
    scheduler: LRScheduler, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, ...]]:
    """Yield the problems of a schedule as texts: what it must be, and a remedy.

    A schedule by a metric would look at a loss that was not released.
    """
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
    """A copy of one candidate's optimizer, over copies of the parameters in the model's order.

    Attributes:
        optimizer: A copy, over copies of the parameters: the user's own never step.
        params: The copies, in the order of the model's trained parameters.
        alone: Whether it steps by itself, and not with others by one formula.
        scheduler: A copy of what moves its settings; None where ``paces`` says all of it.
        paces: Factors on its rate, one a step.
        steps: How many it has taken by itself.
    """

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
        """Check a user's optimizer and schedule; return a copy over copies of the model's parameters.

        Most schedules change the rate alone. Such a one is walked once, here, and becomes a list of
        factors, so that the steps of a whole stack can be taken by one formula.

        Args:
            optimizer: Of the user's, made over parameters of the model.
            model: The candidate's, whose trained parameters it steps.
            scheduler: Moves its settings after every step, or None.
            steps: How many steps a training has.
        """
        checked(optimizer, model, scheduler)
        trained = [p for p in model.parameters() if p.requires_grad]
        # A model that build keeps beside its trial would hold the weights of every step.
        copies: dict[int, Any] = {id(p): nn.Parameter(p.detach().clone()) for p in trained}
        params = [copies[id(p)] for p in trained]
        optimizer, scheduler = deepcopy((optimizer, scheduler), copies)
        if scheduler is not None:
            _mark_step(optimizer)
        level = (1.0,) * steps
        paces: tuple[float, ...] | None = level
        if scheduler is not None:
            paces = _paces(scheduler, steps)
        if paces is None or not _as_one(optimizer):
            return cls(optimizer, params, True, scheduler, level)
        if scheduler is not None:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"]
        return cls(optimizer, params, False, None, paces)

    @property
    def kind(self) -> type | None:
        """The optimizer's class, whose members one call steps together; None if it is stepped alone."""
        if self.alone:
            return None
        return type(self.optimizer)

    @property
    def widens(self) -> bool:
        """Whether zero-padded weights without a gradient stay zero in its steps.

        Adam's step is ``m / (sqrt(v) + eps)``: with eps of 0, a weight whose gradients are all zero
        would be 0 / 0.
        """
        return not self.alone and self.optimizer.param_groups[0].get("eps", 1.0) > 0.0

    @property
    def rate(self) -> float:
        """The learning rate of the first parameter group.

        It is shown in reports, and stands for all groups there.
        """
        return float(self.optimizer.param_groups[0]["lr"])

    def step(self, gradient: torch.Tensor, pace: float) -> torch.Tensor:
        """Step this optimizer along a gradient ``[P]`` at its rate times ``pace``; return the parameters.

        The pace is a public factor on the rates of this step; they are put back after it, so that a
        schedule of torch's moves them from where it left them.
        """
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        gradient = gradient.to(self.params[0])
        for p, part in _parts(gradient, self.params):
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
        """Return the optimizer's state tensors as one vector, for a checkpoint.

        Shape ``[M]``, in the order of the parameters and of the names of what is kept of each; empty
        before the first step. It is what a checkpoint keeps.
        """
        empty = self.params[0].detach().new_empty(0)
        vectors = [tensor.flatten().to(empty) for tensor in self._remembered()]
        return torch.cat([empty, *vectors])

    def go_to(
        self,
        params: torch.Tensor,
        memory: torch.Tensor,
        steps: int,
    ) -> None:
        """Set parameters and optimizer state to those of a checkpoint, if this process is behind it.

        torch makes the tensors of an optimizer's memory in its first step, and moves a schedule by
        steps alone. So as many steps are taken along zeros, and then weights and memory are
        overwritten.

        Args:
            params: Weights after so many steps, ``[P]``.
            memory: What ``memory`` gave then.
            steps: How many had been taken.
        """
        if self.steps == steps:
            return
        while self.steps < steps:  # makes places for what is remembered, and moves the schedule
            self.step(torch.zeros_like(params), 1.0)
        for p, part in _parts(params, self.params):
            p.data.copy_(part)
        for tensor, part in _parts(memory, self._remembered()):
            tensor.data.copy_(part)

    def _remembered(self) -> list[torch.Tensor]:
        """Return the optimizer's state tensors, sorted by name within each parameter."""
        tensors = []
        for p in self.params:
            if p not in self.optimizer.state:
                continue
            for _, value in sorted(self.optimizer.state[p].items()):
                if torch.is_tensor(value):
                    tensors.append(value)
        return tensors


def _mark_step(optimizer: torch.optim.Optimizer) -> None:
    """Mark a copied optimizer as already wrapped by its schedule, so that torch does not warn."""
    step: Any = partial(type(optimizer).step, optimizer)
    step._wrapped_by_lr_sched = True
    optimizer.step = step  # type: ignore[method-assign]
    optimizer._opt_called = True  # type: ignore[attr-defined]


def _parts(
    vector: torch.Tensor, like: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each tensor of ``like`` with its part of a flat vector, in the tensor's shape.

    A view of each tensor's shape, in the order in which ``torch.cat`` would have joined them.
    """
    sizes = [tensor.numel() for tensor in like]
    parts = torch.split(vector, sizes)
    for tensor, part in zip(like, parts, strict=True):
        yield tensor, part.view_as(tensor)


def _as_one(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether an optimizer has a plain rule, so that it can be stepped together with others.

    One group, of plain numbers, and none of the options that change the rule itself: ``_of_columns``
    knows of momentum, dampening, Nesterov, both decays and ``maximize``.
    """
    first, *more = optimizer.param_groups
    if type(optimizer) not in _AS_ONE or more:
        return False
    numbers = (first["lr"], first["weight_decay"], *first.get("betas", ()))
    if not all(isinstance(number, int | float) for number in numbers):
        return False
    others = ("amsgrad", "capturable", "differentiable")
    return not any(first.get(name) for name in others)


def _paces(scheduler: LRScheduler, steps: int) -> tuple[float, ...] | None:
    """Return a schedule's factors on the first rate, one a step; None where it changes more.

    A rate of 0 has no factors, and a schedule that moves momentum (a one-cycle one) is not a factor
    on the rate.
    """
    base = float(scheduler.optimizer.param_groups[0]["initial_lr"])
    walk = [groups[0] for groups in walked(scheduler, steps)]
    rates = [float(settings.pop("lr")) for settings in walk]
    changes_more = any(settings != walk[0] for settings in walk)
    if not base or changes_more:
        return None
    return tuple(rate / base for rate in rates)


def walked(scheduler: LRScheduler, steps: int) -> list[list[dict[str, Any]]]:
    """Return the settings that a schedule gives each parameter group, step by step.

    One entry a step: the settings of each group. A copy is walked, since a schedule cannot be put
    back. One of a fixed length that is too short would raise in the middle of a training, after its
    charge; here it is refused before.
    """
    shared: dict[int, Any] = {}  # the parameters, which are not copied
    for group in scheduler.optimizer.param_groups:
        for p in group["params"]:
            shared[id(p)] = p
    copy = deepcopy(scheduler, shared)
    settings = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no step was taken before the schedule's
        for step in range(steps):
            groups = []
            for group in copy.optimizer.param_groups:
                settings_of_group = {n: v for n, v in group.items() if n != "params"}
                groups.append(settings_of_group)
            settings.append(groups)
            try:
                copy.step()
            except Exception as error:
                raise InvalidInputError(
                    "schedule",
                    type(scheduler).__name__,
                    f"must have a rate for each of the {steps} steps of a training, and fails after "
                    f"{step + 1}: {error}",
                    "It is stepped once after every step, not every epoch: trial.steps is their number.",
                ) from error
    return settings


def _columns(owns: Sequence[Own], like: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the settings of K optimizers as columns ``[K, 1]`` by name.

    They are float64 where they enter powers (``beta ** step``) or small products (rates), else in the
    type of the parameters.

    Args:
        owns: Optimizers of one kind, of one group each.
        like: Parameters, of which type and device are read.

    Returns:
        The rate alone for plain SGD, whose step is then one call.
    """
    groups = [optimizer.optimizer.param_groups[0] for optimizer in owns]
    pairs = [group.get("betas", (0.0, 0.0)) for group in groups]
    betas = torch.tensor(pairs, dtype=torch.float64)

    def column(name: str, default: float = 0.0) -> torch.Tensor:
        """Return one setting of every optimizer, float64 ``[K, 1]``."""
        values = [float(group.get(name, default)) for group in groups]
        numbers = torch.tensor(values, dtype=torch.float64, device=like.device)
        return numbers.unsqueeze(1)

    rate = column("lr")
    decay = column("weight_decay")
    momentum = column("momentum")
    has_more = [bool(values.any()) for values in (decay, momentum, column("maximize"))]
    if owns[0].kind is torch.optim.SGD and not any(has_more):
        return {"rate": rate}
    # Older versions of torch's AdamW are no Adam and have no such setting.
    is_adamw = isinstance(owns[0].optimizer, torch.optim.AdamW)
    apart = column("decoupled_weight_decay", is_adamw)
    # Without momentum torch takes the gradient as it is, whatever its dampening.
    dampening = column("dampening") * (momentum != 0)
    of_type = {
        "decay": decay * (1 - apart),
        "sign": 1 - 2 * column("maximize"),
        "momentum": momentum,
        "new": 1 - dampening,
        "epsilon": column("eps"),
    }
    columns = {
        "rate": rate,
        "apart": decay * apart,
        "nesterov": column("nesterov"),
        "beta1": betas[:, :1].to(like.device),
        "beta2": betas[:, 1:].to(like.device),
    }
    for name, values in of_type.items():
        columns[name] = values.to(like.dtype)
    return columns


@dataclass(frozen=True, eq=False)
class _State:
    """State of K trainings that optimizers of one kind step: parameters ``[K, P]``, numbers ``[K]``.

    Attributes:
        first: The first moment, or momentum, ``[K, P]``; the memory of optimizers that step by
            themselves.
        second: The second moment, ``[K, P]``; empty where there is none.
        owns: Not stored in a checkpoint: a new process makes them again from the trial.
        columns: Settings by name, ``[K, 1]``; empty where each steps by itself.
    """

    params: torch.Tensor
    learning_rate: torch.Tensor
    max_grad_norm: torch.Tensor
    step: int
    first: torch.Tensor
    second: torch.Tensor
    owns: tuple[Own, ...] = field(metadata={"kept": False})
    columns: Mapping[str, torch.Tensor] = field(metadata={"kept": False})


def _of_columns(state: _State, gradient: torch.Tensor, pace: torch.Tensor | float) -> _State:
    """Step SGD, Adam or AdamW of all candidates in one formula, by torch's rules.

    SGD as torch has it: ``b' = momentum b + (1 - dampening) g``, in the first step ``b' = g``.
    Candidates of a stack may have other settings, so a rule without momentum is the one with a
    momentum of 0. Weight decay is added to the gradient (``decay``) or shrinks the weights by
    themselves (``apart``: AdamW, Loshchilov and Hutter 2019).

    The methods of PrivTune's own step by ``methods._base.SGD`` and ``AdamW``: the same rules, rounded
    otherwise. Those have one setting for all candidates and give a direction, for the method to set the
    rate; so Adam's corrections of the bias lie in one divisor there, and not in the rate, and a decay is
    a product and a sum, where torch rounds once. Neither rule can take the place of the other without
    other last digits: here they are torch's, there those of results that are recorded.

    Args:
        state: Parameters and moments, ``[K, P]``.
        gradient: Of the release, ``[K, P]``.
        pace: Factor on the rates, ``[K]`` or one for all.
    """
    columns = state.columns
    params = state.params
    rate = columns["rate"]
    if isinstance(pace, torch.Tensor):
        rate = rate * pace.unsqueeze(1)
    scaled_rate = rate.to(params)
    now = replace(state, step=state.step + 1, learning_rate=scaled_rate[:, 0])
    if columns.keys() == {"rate"}:
        stepped = torch.addcmul(params, gradient, scaled_rate, value=-1.0)
        return replace(now, params=stepped)
    gradient = (gradient * columns["sign"]).addcmul_(params, columns["decay"])
    if state.owns[0].kind is torch.optim.SGD:
        first = gradient
        if state.step:
            first = (state.first * columns["momentum"]).addcmul_(gradient, columns["new"])
        ahead = torch.addcmul(gradient, first, columns["momentum"])
        direction = torch.where(columns["nesterov"] > 0, ahead, first)
        stepped = torch.addcmul(params, direction, scaled_rate, value=-1.0)
        return replace(now, params=stepped, first=first)
    # Kingma and Ba 2015, Algorithm 1: moments m and v, divided by what they lack of a whole mean.
    # m' = beta1 m + (1 - beta1) g,  v' = beta2 v + (1 - beta2) g²,
    # p' = (1 - rate decay) p - rate / (1 - beta1^t) m' / (sqrt(v') / sqrt(1 - beta2^t) + epsilon)
    beta1 = columns["beta1"]
    beta2 = columns["beta2"]
    first = state.first
    second = state.second
    if not state.step:
        first = torch.zeros_like(gradient)
        second = first
    first = first.lerp(gradient, (1 - beta1).to(params))
    share = (1 - beta2).to(params)
    second = (second * beta2.to(params)).addcmul_(gradient, gradient * share)
    one = 1 - beta1**now.step
    two = 1 - beta2**now.step
    root = second.sqrt()
    root = root.div_(two.sqrt().to(params)).add_(columns["epsilon"])
    stays = 1 - rate * columns["apart"]
    decayed = params * stays.to(params)
    step = torch.div(first, root).mul_((rate / one).to(params))
    return replace(
        now,
        params=decayed - step,
        first=first,
        second=second,
    )


def _by_themselves(state: _State, gradient: torch.Tensor, pace: torch.Tensor | float) -> _State:
    """Let every optimizer step its own candidate's parameters.

    K calls in the place of one. A process that took a checkpoint over brings each optimizer up to the
    step first; in all other steps that does nothing.

    Args:
        state: Parameters ``[K, P]``, and what each optimizer remembers as a row.
        gradient: Of the release, ``[K, P]``.
        pace: Factor on the rates, ``[K]`` or one for all.
    """
    if isinstance(pace, torch.Tensor):
        paces = pace.tolist()
    else:
        paces = [pace] * len(gradient)
    rates = []
    rows = []
    memories = []
    for k, (optimizer, factor) in enumerate(zip(state.owns, paces, strict=True)):
        optimizer.go_to(state.params[k], state.first[k], state.step)
        rates.append(optimizer.rate * factor)
        rows.append(optimizer.step(gradient[k], factor))
        memories.append(optimizer.memory())
    return replace(
        state,
        params=torch.stack(rows).to(state.params),
        learning_rate=state.params.new_tensor(rates),
        step=state.step + 1,
        first=torch.stack(memories),
    )


@dataclass(frozen=True)
class Optimized:
    """A training method whose noisy gradients are followed by torch optimizers, one a candidate.

    It has the interface of a method, so a training need not know. Only methods that say so are taken
    (``takes_optimizer``): one that adapts has a step of its own, which the optimizer's would replace.

    **Guarantee**: as the method's.
    """

    method: Any

    def __post_init__(self) -> None:
        method = self.method
        if not method.takes_optimizer:
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
        if "max_grad_norm" in self.method.parameters:
            norms = candidate_column(candidates, "max_grad_norm", params)
        empty = params.new_zeros(len(owns), 0)
        rates = params.new_tensor([optimizer.rate for optimizer in owns])
        columns: Mapping[str, torch.Tensor] = {}
        if owns[0].kind is not None:
            columns = _columns(owns, params)
        return _State(
            params=params,
            learning_rate=rates,
            max_grad_norm=norms,
            step=0,
            first=empty,
            second=empty,
            owns=owns,
            columns=columns,
        )

    def update(self, state: _State, oracle: Oracle) -> _State:
        """Ask for one noisy gradient of each candidate, and step its optimizer along it.

        One release, as the method asks for it: the optimizer sees nothing but the noisy mean gradient
        ``[K, P]``.
        """
        method = self.method
        clipping = method.clipping_of(state.max_grad_norm)
        gradient = method.gradient(oracle, state.params, clipping)
        step = _of_columns if state.columns else _by_themselves
        return step(state, gradient, oracle.pace)

    def report(self, state: _State) -> Mapping[str, torch.Tensor]:
        """Return the method's report, with the learning rate of the first parameter group."""
        figures: Mapping[str, torch.Tensor] = self.method.report(state)
        return figures
