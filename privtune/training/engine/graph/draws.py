"""Handlers of what a model draws: dropout, and random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from privtune.training.engine.graph.tape import Handler, Law, Site, Watching, bind


def _dropout(
    mode: Watching, args: Sequence[Any], kwargs: Mapping[str, Any], *, channels: bool = False
) -> Any:
    x, p, training, _ = bind(
        args, kwargs, ("input", "p", "training", "inplace"), (0.5, True, False)
    )
    shape = (*x.shape[:2], *(1 for _ in x.shape[2:])) if channels else x.shape
    return mode.drop(x, p, shape) if training else x


def _size_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    size = kwargs.get("size", args[0] if len(args) == 1 else args)
    return (int(size),) if isinstance(size, int) else tuple(int(n) for n in size)


def _made(
    mode: Watching, site: Site, kwargs: Mapping[str, Any], like: torch.Tensor | None = None
) -> Any:
    """Draw a new tensor, of the type and device that a call asks for, or of those of ``like``."""
    if kwargs.get("generator") is not None or kwargs.get("out") is not None:
        return NotImplemented  # a generator or a tensor of the caller's own
    idle = mode.masks is None and mode.generator is None and not mode.deterministic
    if mode.levels is None and idle:
        return NotImplemented
    whole = site.law in ("integers", "permutation")
    dtype = kwargs.get("dtype") or (None if like is None else like.dtype)
    device = kwargs.get("device") or (None if like is None else like.device)
    if mode.generator is not None and torch.device(device or "cpu") != mode.generator.device:
        return NotImplemented
    floating = dtype if dtype is not None and dtype.is_floating_point else None
    value = mode.drawn(site, torch.empty((), dtype=floating, device=device))
    return value if dtype is None or (whole and dtype == torch.int64) else value.to(dtype)


def _new(mode: Watching, args: Sequence[Any], kwargs: Mapping[str, Any], *, law: Law) -> Any:
    return _made(mode, Site(_size_of(args, kwargs), law), kwargs)


def _like(mode: Watching, args: Sequence[Any], kwargs: Mapping[str, Any], *, law: Law) -> Any:
    (x,) = bind(args, kwargs, ("input",), ())
    return _made(mode, Site(tuple(x.shape), law), kwargs, x)


def _randint(mode: Watching, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    given = [a for a in args if isinstance(a, int)]
    low, high = (given[0], given[1]) if len(given) == 2 else (kwargs.get("low", 0), None)
    high = high or kwargs.get("high") or given[0]
    sizes = [a for a in args if not isinstance(a, int)]
    size = _size_of(sizes, kwargs)
    return _made(mode, Site(size, "integers", low=int(low), high=int(high)), kwargs)


def _randperm(mode: Watching, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    (n,) = bind(args, kwargs, ("n",), ())
    return _made(mode, Site((int(n),), "permutation"), kwargs)


def _bernoulli(mode: Watching, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    p, chance = bind(args, kwargs, ("input", "p"), (None,))
    value = _made(mode, Site(tuple(p.shape), "uniform"), kwargs, p)
    if value is NotImplemented:
        return value
    return (value < (p if chance is None else chance)).to(p.dtype)


def _in_place(
    mode: Watching, args: Sequence[Any], kwargs: Mapping[str, Any], *, method: str
) -> Any:
    """Handle a method that fills its tensor with random numbers."""
    own = mode.generator
    x = args[0]
    if own is None or kwargs.get("generator") is not None or x.device != own.device:
        return NotImplemented
    return getattr(x, method)(*args[1:], **{**kwargs, "generator": own})


_FILLING = (
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_",
    "uniform_",
)  # fmt: skip

DRAWS: Mapping[Any, Handler] = {
    functional.dropout: _dropout,
    functional.dropout1d: partial(_dropout, channels=True),
    functional.dropout2d: partial(_dropout, channels=True),
    torch.rand: partial(_new, law="uniform"),
    torch.randn: partial(_new, law="normal"),
    torch.rand_like: partial(_like, law="uniform"),
    torch.randn_like: partial(_like, law="normal"),
    torch.randint: _randint,
    torch.randperm: _randperm,
    torch.bernoulli: _bernoulli,
    **{getattr(torch.Tensor, method): partial(_in_place, method=method) for method in _FILLING},
}
