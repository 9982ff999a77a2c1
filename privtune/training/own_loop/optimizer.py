"""The optimizer that a loop hands over: what it may be, and what it steps along."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn

from privtune.errors import InvalidInputError
from privtune.training.mechanism.clipping import Clipping

__all__ = ["SteppedAsOne", "UserOptimizer", "checked"]


@dataclass(frozen=True)
class UserOptimizer:
    """Steps of the loop's own optimizer along noisy clipped mean gradients.

    Args:
        optimizer: Over exactly the trainable parameters.
        clipping: Fixed for the whole run.
        noise_multiplier: Noise standard deviation over the clipping's sensitivity.
    """

    optimizer: torch.optim.Optimizer
    clipping: Clipping
    noise_multiplier: float


def checked(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer, if it holds exactly the trainable parameters."""
    if isinstance(optimizer, type) or not hasattr(optimizer, "register_step_pre_hook"):
        raise InvalidInputError(
            "optimizer",
            getattr(optimizer, "__name__", type(optimizer).__name__),
            "must be one optimizer of torch's, made over the model's parameters, or None",
            "Groups of parameters go into one; a scheduler is stepped beside it.",
        )
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held != trainable:
        raise InvalidInputError(
            "optimizer",
            f"{len(held)} parameters",
            f"must hold exactly the {len(trainable)} trainable parameters of the model",
        )
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise InvalidInputError(
            "optimizer",
            type(optimizer).__name__,
            "must step along the gradient that it is given, but asks for more of them",
            "Use SGD, Adam, or another one whose step() needs no closure.",
        )
    return optimizer


class SteppedAsOne:
    """New optimizers of one class, each over the weights of a loop of its own, stepped by one call.

    A step is torch's own rule, with a number a row where torch has one: in Python, the step of a small
    net costs torch 40 to 110 microseconds, which is more than a loop's share of a stacked pass.

    Args:
        optimizers: All of one class, and each one that :meth:`takes` takes.
        params: What each of them steps, in the order of its loop's weights.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], params: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        self._optimizers, self._params = optimizers, params
        group_of = [
            {id(p): group for group in optimizer.param_groups for p in group["params"]}
            for optimizer in optimizers
        ]
        self._groups = [
            [groups[id(p)] for p in own] for groups, own in zip(group_of, params, strict=True)
        ]
        self._adaptive = not isinstance(optimizers[0], torch.optim.SGD)
        self._state: dict[str, torch.Tensor] = {}
        self._steps = 0
        rate, decay = self._column("lr"), self._column("weight_decay")
        if self._adaptive:
            # Older versions of torch's AdamW are no Adam and have no such setting.
            name, apart = "decoupled_weight_decay", isinstance(optimizers[0], torch.optim.AdamW)
            decoupled = self._column(lambda group: group.get(name, apart))
            self._betas = (
                self._column(lambda group: group["betas"][0]),
                self._column(lambda group: group["betas"][1]),
            )
            self._beta2, self._epsilon = self._own(self._betas[1]), self._own(self._column("eps"))
            self._new1, self._new2 = (self._own(1 - beta) for beta in self._betas)
            self._kept = self._own(1 - rate * decay * decoupled)
            decay = decay * (1 - decoupled)
        else:
            momentum, nesterov = self._column("momentum"), self._column("nesterov")
            # Without momentum torch takes the gradient as it is, whatever its dampening.
            self._new = self._own(1 - self._column("dampening") * (momentum != 0))
            self._momentum, self._nesterov = self._own(momentum), self._own(nesterov) > 0
        self._rate, self._decay = self._own(rate), self._own(decay)
        self._sign = self._own(1 - 2 * self._column("maximize"))

    @staticmethod
    def takes(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> bool:
        """Say whether an optimizer's steps can be taken with those of others.

        Args:
            optimizer: Any.
            dtype: Of the weights: in a narrow one, a column of rates is less than torch's one rate.
        """
        if type(optimizer) not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
            return False
        wide = dtype in (torch.float32, torch.float64)
        return wide and not optimizer.state and all(map(_is_plain, optimizer.param_groups))

    def step(self, weights: torch.Tensor, gradient: torch.Tensor) -> None:
        """Step along a gradient of each loop.

        Args:
            weights: Of the loops, shape ``[K, P]``; changed in place.
            gradient: Shape ``[K, P]``.
        """
        self._steps += 1
        gradient = (gradient * self._sign).addcmul_(weights, self._decay)
        if self._adaptive:
            self._step_adam(weights, gradient)
        else:
            self._step_sgd(weights, gradient)

    def hand_back(self) -> None:
        """Give each optimizer the state that it would have after these steps."""
        for row, (optimizer, own) in enumerate(zip(self._optimizers, self._params, strict=True)):
            lengths = [p.numel() for p in own]
            parts = {n: torch.split(value[row], lengths) for n, value in self._state.items()}
            for i, p in enumerate(own):
                if self._adaptive:
                    optimizer.state[p]["step"] = torch.tensor(float(self._steps))
                elif not self._groups[row][i]["momentum"]:
                    continue  # torch keeps nothing where nothing is remembered
                for name, part in parts.items():
                    optimizer.state[p][name] = part[i].view_as(p).clone()

    def _step_sgd(self, weights: torch.Tensor, gradient: torch.Tensor) -> None:
        if self._steps == 1:
            buffer = self._state["momentum_buffer"] = gradient.clone()
        else:
            buffer = self._state["momentum_buffer"]
            buffer.mul_(self._momentum).addcmul_(gradient, self._new)
        ahead = torch.addcmul(gradient, buffer, self._momentum)
        weights.sub_(torch.where(self._nesterov, ahead, buffer).mul_(self._rate))

    def _step_adam(self, weights: torch.Tensor, gradient: torch.Tensor) -> None:
        weights.mul_(self._kept)
        if self._steps == 1:
            self._state = {n: torch.zeros_like(gradient) for n in ("exp_avg", "exp_avg_sq")}
        mean, square = self._state.values()
        mean.lerp_(gradient, self._new1)
        square.mul_(self._beta2).addcmul_(gradient, gradient * self._new2)
        one, two = (1 - beta**self._steps for beta in self._betas)
        root = square.sqrt().div_(self._own(two.sqrt())).add_(self._epsilon)
        weights.sub_(torch.div(mean, root).mul_(self._rate / self._own(one)))

    def _column(self, of: str | Callable[[Mapping[str, Any]], float]) -> torch.Tensor:
        """Return a number of every loop, shape ``[K, 1]``; ``[K, P]`` where one has several groups."""
        rows = []
        for own, groups in zip(self._params, self._groups, strict=True):
            values = [float(group[of] if isinstance(of, str) else of(group)) for group in groups]
            lengths = torch.tensor([p.numel() for p in own])
            rows.append(torch.tensor(values, dtype=torch.float64).repeat_interleave(lengths))
        single = all(len(optimizer.param_groups) == 1 for optimizer in self._optimizers)
        return torch.stack(rows)[:, :1] if single else torch.stack(rows)

    def _own(self, column: torch.Tensor) -> torch.Tensor:
        """Return a column where the weights are, and as they are."""
        return column.to(self._params[0][0].detach())


def _is_plain(group: Mapping[str, Any]) -> bool:
    """Say whether a group's settings are numbers, and its rule the plain one."""
    numbers = (group["lr"], group["weight_decay"], *group.get("betas", ()))
    others = ("amsgrad", "capturable", "differentiable")
    return all(isinstance(n, int | float) for n in numbers) and not any(map(group.get, others))
