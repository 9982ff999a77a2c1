"""What is noted while a model runs on one record: uses of parameters, and places where it draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch._C import _functorch as functorch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode

from privtune.training.engine.layers.uses import Use

Law = Literal["keep", "uniform", "normal", "integers", "permutation"]


@dataclass(frozen=True)
class Site:
    """A place where a model or a loss draws: dropout, and the random numbers of augmentation.

    Args:
        shape: Shape of what is drawn for a record.
        law: ``keep`` draws 1 with probability ``kept`` and 0 else; ``uniform`` in [0, 1);
            ``normal``; ``integers`` from ``low`` to ``high - 1``; ``permutation`` of ``shape[0]``.
        kept: See ``law``.
        low: See ``law``.
        high: See ``law``.
    """

    shape: tuple[int, ...]
    law: Law = "keep"
    kept: float = 1.0
    low: int = 0
    high: int = 1

    def empty(self, lead: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Return fixed values in place of drawn ones, shape ``[*lead, *shape]``: the mean, or the like."""
        shape = (*lead, *self.shape)
        if self.law == "permutation":
            return torch.arange(self.shape[0], device=like.device).expand(shape).clone()
        if self.law == "integers":
            return torch.full(shape, self.low, device=like.device)
        mean = {"keep": 1.0, "uniform": 0.5, "normal": 0.0}[self.law]
        return torch.full(shape, mean, dtype=like.dtype, device=like.device)

    def fill(self, out: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Draw into ``out``, shape ``[n, *shape]``, and return it."""
        if self.law == "keep":
            return out.bernoulli_(self.kept, generator=generator)
        if self.law == "uniform":
            return out.uniform_(generator=generator)
        if self.law == "normal":
            return out.normal_(generator=generator)
        if self.law == "integers":
            return out.random_(self.low, self.high, generator=generator)
        keys = torch.empty(out.shape, device=out.device).uniform_(generator=generator)
        return out.copy_(keys.argsort(dim=-1))


@dataclass(frozen=True, eq=False)
class Entry:
    """One use of parameters on the tape: what went in, and what came out."""

    use: Use
    a: torch.Tensor
    out: torch.Tensor
    version: int


@dataclass(frozen=True)
class Levels:
    """Where the two batch axes live: functorch levels of candidates and records; their sizes."""

    candidates: int
    records: int
    sizes: tuple[int, int]

    def physical(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor behind both levels, shape ``[K, B, ...]``."""
        return self._unwrap(tensor, (self.records, self.candidates))

    def by_candidate(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor behind the level of candidates, shape ``[K, ...]``: a parameter."""
        return self._unwrap(tensor, (self.candidates,))

    def wrap(self, tensor: torch.Tensor) -> torch.Tensor:
        """Hide the axes ``[K, B]`` of a physical tensor again."""
        inner = functorch._add_batch_dim(tensor, 0, self.candidates)
        return functorch._add_batch_dim(inner, 0, self.records)

    def _unwrap(self, tensor: torch.Tensor, levels: Sequence[int]) -> torch.Tensor:
        places: list[int | None] = []
        for level in levels:
            if functorch.is_batchedtensor(tensor) and functorch.maybe_get_level(tensor) == level:
                places.append(functorch.maybe_get_bdim(tensor))
                tensor = functorch.get_unwrapped(tensor)
            else:
                places.append(None)
        for done, place in enumerate(reversed(places)):
            if place is None:
                tensor = tensor.unsqueeze(done)
                tensor = tensor.expand(
                    [self.sizes[done] if d == done else -1 for d in range(tensor.ndim)]
                )
            else:
                tensor = tensor.movedim(place + done, done)
        return tensor


@dataclass(eq=False)
class Watching(TorchFunctionMode):
    """What is known and noted while a model runs on one record.

    Args:
        levels: Where the batch axes live; None outside of ``vmap``, where only dropout is caught.
        names: Name of each parameter, by the ``id`` of the tensor that stands for it.
        masks: What was drawn for each place; None to note the places in ``sites``.
        deterministic: Whether dropout passes its input on, as in evaluation, and whatever else is
            drawn is its mean.
        generator: Draws at every place, where there are no masks: for code that runs as it is.
        classes: The targets ``[K, B, ...]``, if each is a class: at least 0.
    """

    levels: Levels | None
    names: Mapping[int, str] = field(default_factory=dict)
    masks: Sequence[torch.Tensor] | None = None
    deterministic: bool = False
    generator: torch.Generator | None = None
    classes: torch.Tensor | None = None
    entries: list[Entry] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def names_of(self, *tensors: Any) -> tuple[str | None, ...] | None:
        """Return the names of a weight and its bias, or None if this is not a use to catch."""
        if self.levels is None:
            return None
        found = tuple(None if t is None else self.names.get(id(t)) for t in tensors)
        if found[0] is None or any(
            t is not None and n is None for t, n in zip(tensors, found, strict=True)
        ):
            return None
        owners = {name.rpartition(".")[0] for name in found if name is not None}
        return found if len(owners) == 1 else None

    def all_classes(self, targets: torch.Tensor) -> bool:
        """Say whether physical targets are those that are known to be classes, not made from them."""
        known = self.classes
        return (
            known is not None and known.untyped_storage()._cdata == targets.untyped_storage()._cdata
        )

    def put(self, use: Use, a: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Note a use on the tape and return its output for the model to go on with."""
        if self.levels is None:
            raise RuntimeError("a use of a parameter was caught outside of vmap")
        with temporarily_clear_interpreter_stack():
            if not out.requires_grad:
                out.requires_grad_()
            self.entries.append(Entry(use, a.detach(), out, out._version))
        return self.levels.wrap(out)

    def drop(self, x: torch.Tensor, p: float, shape: Sequence[int]) -> torch.Tensor:
        """Drop entries of ``x`` by the next mask, of a shape that broadcasts over ``x``."""
        if p == 0.0 or self.deterministic:
            return x
        if p >= 1.0:
            return x * 0.0
        kept = self.drawn(Site(tuple(shape), kept=1.0 - p), x)
        return x * kept * (1.0 / (1.0 - p))

    def drawn(self, site: Site, like: torch.Tensor) -> torch.Tensor:
        """Return what is drawn at the next place, of a floating type and device like ``like``."""
        if self.generator is not None:
            return site.fill(site.empty((1,), like), self.generator).squeeze(0)
        if self.deterministic:
            return site.empty((), like)
        number = len(self.sites)
        self.sites.append(site)
        return site.empty((), like) if self.masks is None else self.masks[number]


Handler = Callable[["Watching", Sequence[Any], Mapping[str, Any]], Any]
"""Computes a call of torch, or returns ``NotImplemented`` to let it run as it is."""


def bind(
    args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str], defaults: Sequence[Any]
) -> Iterator[Any]:
    """Yield the arguments of a call by name, with the defaults of the last ones."""
    required = len(names) - len(defaults)
    for i, name in enumerate(names):
        if i < len(args):
            yield args[i]
        elif i < required:
            yield kwargs[name]
        else:
            yield kwargs.get(name, defaults[i - required])
