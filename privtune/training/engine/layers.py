"""Rules for layers of one's own: gradients of records from what a layer saw and what it sent back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module

from privtune.errors import InvalidInputError
from privtune.training.engine.rules import DirectUse, Tensors, Use
from privtune.training.engine.watch import ACTIVE
from privtune.training.mechanism.apart import Apart

Rule = Callable[[Any, Tensors, torch.Tensor], Mapping[str, torch.Tensor]]
R = TypeVar("R", bound=Rule)

_RULES: dict[type[nn.Module], Rule] = {}


def norms_of(layer: type[nn.Module]) -> Callable[[R], R]:
    """Register the rule that gives the gradients of a layer's parameters for each record.

    Without a rule, parameters that a layer multiplies with are copied for each record, which is exact and
    slow. Norms and weighted sums are taken of what the rule gives. Every training first compares both with
    records taken one by one, as it does for the layers of PyTorch; a rule that gives something else is
    refused.

    Args:
        layer: Class of the layer. Its ``forward`` takes tensors and gives one, all with the batch axis first.

    Returns:
        A decorator of the rule: a function of the layer, with one candidate's parameters; its inputs, a tuple
        of tensors ``[1, ...]``; and the gradient of its output, ``[1, ...]``. It returns a gradient
        ``[1, *shape]`` for each trained parameter, by the parameter's name in the layer.

    **Guarantee**: a rule sees one record, under ``torch.vmap``, so it cannot make a gradient hang on another
    record. Norm and sum come from the same numbers: a rule that is wrong changes what is learned, and no
    sensitivity.

    Raises:
        InvalidInputError: If ``layer`` is no class of layers.

    Example:
        >>> class Scale(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.by = nn.Parameter(torch.ones(3))
        ...     def forward(self, x):
        ...         return x * self.by
        >>> @norms_of(Scale)
        ... def scale(layer, inputs, grad):
        ...     return {"by": inputs[0] * grad}
    """
    if not (isinstance(layer, type) and issubclass(layer, nn.Module)):
        raise InvalidInputError("norms_of", layer, "must be given a class of torch.nn.Module")

    def register(rule: R) -> R:
        _RULES[layer] = rule
        return rule

    return register


def registered() -> tuple[int, ...]:
    """Return what tells the registered rules from others: with others, a kernel is built anew."""
    return tuple(map(id, _RULES.values()))


def ruled(module: nn.Module) -> list[str]:
    """Let layers of a model that have a rule note how they use their parameters; return their names."""
    every = module.named_modules()
    found = [(n, m) for n, m in every if type(m) in _RULES and "forward" not in vars(m)]
    for _, part in found:
        part.forward = partial(_forward, part, _RULES[type(part)])
    return [f"{name or 'model'} ({type(part).__name__})" for name, part in found]


def unruled(module: nn.Module) -> None:
    """Let the layers of a model run as they are again."""
    for part in module.modules():
        if getattr(vars(part).get("forward"), "func", None) is _forward:
            del part.forward


def _forward(layer: nn.Module, rule: Rule, *args: Any, **kwargs: Any) -> Any:
    """Run a layer; where it uses parameters of a stack, note what its rule makes of their gradients."""
    watch, run = ACTIVE.watch, type(layer).forward
    plain = not kwargs and all(torch.is_tensor(arg) and arg.shape[:1] == (1,) for arg in args)
    if watch is None or watch.levels is None or not plain:
        return run(layer, *args, **kwargs)
    params, levels = dict(layer.named_parameters()), watch.levels
    trained = {n: watch.names[id(p)] for n, p in params.items() if id(p) in watch.names}
    if not trained:
        return run(layer, *args)
    with _reparametrize_module(layer, {n: params[n].detach() for n in trained}):
        value = run(layer, *args)
    if not torch.is_tensor(value) or value.shape[:1] != (1,):
        raise RuntimeError(f"{type(layer).__name__} has a rule, and gives more than one tensor")
    seen = tuple(levels.physical(arg).detach() for arg in args)
    held = {n: levels.by_candidate(params[n]).detach() for n in trained}
    shapes = {n: p.shape[1:] for n, p in held.items()}

    versions = [a._version for a in seen]

    def one(*record: torch.Tensor) -> dict[str, torch.Tensor]:
        *inputs, grad = (part.unsqueeze(0) for part in record)
        own = rule(layer, tuple(inputs), grad)
        for n, shape in shapes.items():
            if n not in own or own[n].shape != (1, *shape):
                raise RuntimeError(f"the rule gives no gradient of {n} for each record")
        return {n: own[n].squeeze(0) for n in shapes}

    def back(g: torch.Tensor) -> list[tuple[Use, Tensors]]:
        found: dict[str, list[torch.Tensor]] = {n: [] for n in trained}
        for k in range(len(g)):
            own = {n: p[k] for n, p in held.items()}
            # A rule that saw a batch could make a record's gradient hang on another's values.
            with _reparametrize_module(layer, own), torch.no_grad(), Apart():
                made = torch.vmap(one)(*(a[k].squeeze(1) for a in seen), g[k].squeeze(1))
            for n, parts in found.items():
                parts.append(made[n])
        if versions != [a._version for a in seen]:
            raise RuntimeError("the rule writes to what the layer saw")
        return [(DirectUse(trained[n]), (torch.stack(parts),)) for n, parts in found.items()]

    return watch.put(tuple(trained.values()), levels.physical(value), back)
