"""Fine-tuning: which parameters of a public model are trained, and adapters for the others.

What is frozen is public, and one copy of it serves all candidates: the kernel stacks what is
trained alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from privtune.errors import InvalidInputError
from privtune.training.engine.kernels import refuse_coupling
from privtune.training.mechanism.data import TensorData, find_facts, find_unusable
from privtune.training.mechanism.kernel import Largest, by_record, fresh, unwritten

_PASS = 256  # records whose features are computed at once at most


class Lora(nn.Module):
    """A frozen layer beside a trained product of two thin ones, of ``rank`` columns or channels.

    References:
        Hu et al. 2021, arXiv 2106.09685. Its factor alpha / r is 1 here: the learning rate is
        searched, or adapted, anyway.
    """

    def __init__(self, base: Any, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        like = {"bias": False, "device": base.weight.device, "dtype": base.weight.dtype}
        self.down: nn.Module
        self.up: nn.Module
        if isinstance(base, nn.Conv2d):
            windows: Any = (base.kernel_size, base.stride, base.padding, base.dilation)
            self.down = nn.Conv2d(base.in_channels, rank, *windows, **like)
            self.up = nn.Conv2d(rank, base.out_channels, 1, **like)
        else:
            # GPT-2 has its weights the other way round.
            sizes = base.weight.shape if isinstance(base, nn.Linear) else base.weight.shape[::-1]
            self.down = nn.Linear(sizes[1], rank, **like)
            self.up = nn.Linear(rank, sizes[0], **like)
        nn.init.zeros_(self.up.weight)  # so that it starts as the public model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's outputs plus those of the adapter."""
        adapted: torch.Tensor = self.base(x) + self.up(self.down(x))
        return adapted


def head_of(model: nn.Module) -> str:
    """Return the name of the last layer that has parameters of its own."""
    owners = [name for name, module in model.named_modules() if [*module.parameters(recurse=False)]]
    if not owners:
        raise InvalidInputError("model", type(model).__name__, "must have parameters")
    return str(owners[-1])


def load_public(model: nn.Module, weights: Mapping[str, torch.Tensor], *, source: str) -> set[str]:
    """Give a model its public weights; return the names of what stays as it was drawn."""
    head, saved = head_of(model), model.state_dict()  # which is without buffers that no file holds
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    wanted = {**dict(model.named_parameters()), **buffers}
    fits = {n for n, t in wanted.items() if n in weights and weights[n].shape == t.shape}
    lacking = wanted.keys() - fits
    if beyond := sorted(name for name in lacking if name.rpartition(".")[0] != head):
        raise InvalidInputError(
            "pretrained",
            source,
            f"holds no {', '.join(beyond[:3])}{', ...' if len(beyond) > 3 else ''} of the model's shape",
            f"Of the model, the head ({head}) alone may be missing.",
        )
    for name in fits:
        wanted[name].data = weights[name].to(wanted[name].dtype)
    return lacking


def set_trainable(
    model: nn.Module, kind: str, *, rank: int = 0, targets: Collection[str] | None = None
) -> nn.Module:
    """Freeze a model but for what is to be trained, put adapters where they are asked for; return it."""
    if kind == "all":
        return model
    head = head_of(model)
    for part in model.modules():
        if isinstance(part, _BatchNorm):
            part.eval()  # its running statistics are frozen with the rest
    for name, parameter in model.named_parameters():
        owner, _, own = name.rpartition(".")
        parameter.requires_grad_(owner == head or (kind == "biases" and own.endswith("bias")))
    if kind != "lora":
        return model
    layers = {n: m for n, m in model.named_modules() if n != head and _adapts(m)}
    linear = [n for n, m in layers.items() if not isinstance(m, nn.Conv2d)]
    # Of a network of convolutions, these; else they are adapted where they are named.
    chosen = (
        (linear or [*layers])
        if targets is None
        else [n for n in layers if any(f".{n}".endswith(f".{target}") for target in targets)]
    )
    if not chosen:
        raise InvalidInputError(
            "target_modules",
            None if targets is None else list(targets),
            "names no linear layer and no convolution beside the head; there are "
            f"{', '.join(layers) or 'none'}",
        )
    for name in chosen:
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, Lora(layers[name], rank))
    return model


def _adapts(layer: nn.Module) -> bool:
    """Whether an adapter can take the place of a layer, whose weight attention would read by itself."""
    kind = f"{type(layer).__module__}.{type(layer).__name__}"
    return kind == "transformers.pytorch_utils.Conv1D" or (
        isinstance(layer, nn.Linear | nn.Conv2d)
        and not isinstance(layer, NonDynamicallyQuantizableLinear)
    )


class _Nested(nn.Module):
    """One layer under the name that it has in the whole model."""

    def __init__(self, name: str, layer: nn.Module) -> None:
        super().__init__()
        self._path = name
        first, _, rest = name.partition(".")
        self.add_module(first, _Nested(rest, layer) if rest else layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's outputs."""
        (inner,) = self.children()
        outputs: torch.Tensor = inner(x)
        return outputs


@dataclass(frozen=True, eq=False)
class FrozenPart:
    """A model whose head alone is trained: the head, and what comes before it, once a record."""

    whole: nn.Module
    head: str
    together: bool = False
    at_once: int = _PASS
    _known: weakref.WeakKeyDictionary[TensorData, TensorData] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the head is given for these inputs, shape ``[N, ...]``."""
        with torch.no_grad(), unwritten(self.whole):
            if not self.together:
                return torch.stack([self._one(record) for record in x])
            # Always as many: sums of another number of records end in other last digits, so that one
            # record more would change the features of others.
            spare = x.new_zeros((-len(x) % self.at_once, *x.shape[1:]))
            *pieces, last = torch.split(x, self.at_once)
            pieces = [*pieces, torch.cat([last, spare])]  # the records themselves are not copied
            return torch.cat([by_record(self._one)(piece) for piece in pieces])[: len(x)]

    def _one(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the head is given for one record."""
        caught: list[torch.Tensor] = []
        whole, _ = fresh(self.whole)
        whole.get_submodule(self.head).register_forward_pre_hook(
            lambda _, given: caught.append(given[0].detach())
        )
        whole(x.unsqueeze(0))
        return caught[-1].squeeze(0)

    def reduce(self, data: TensorData) -> TensorData:
        """Return the data with features in the place of inputs; computed once for each data."""
        if data not in self._known:
            held = data.held_to(find_facts(lambda x, _: self.whole(x), *data.like))
            x, _, _ = held.fetch(torch.arange(len(held), device=held.x.device))

            def only(kept: torch.Tensor) -> torch.Tensor:
                """Compute these, and nothing in the place of others."""
                there = kept.view(-1, *(1 for _ in x.shape[1:]))
                return self.features(torch.where(there, x, torch.zeros_like(x[:1])))

            try:
                features = self.features(x)
            except Exception as error:
                unusable = find_unusable(error, len(x), only)
                features, held = only(~unusable), held.marked(unusable)
            self._known[data] = replace(held, x=features)
        return self._known[data]

    def model(self, module: nn.Module) -> nn.Module:
        """Return the head of a model as one of its own, its parameters under the same names."""
        return _Nested(self.head, module.get_submodule(self.head))


def part_of_model(model: nn.Module, x: torch.Tensor) -> FrozenPart | None:
    """Split a model into its head and the rest, if the head alone is trained, and comes last."""
    head = head_of(model)
    if {n.rpartition(".")[0] for n, p in model.named_parameters() if p.requires_grad} != {head}:
        return None
    refuse_coupling(model)
    part = FrozenPart(model, head)
    with torch.no_grad():
        with Largest() as largest:
            features = part.features(x)
        seen = [fresh(model)[0](x) for _ in range(2)]
        found = part.model(model)(features)
        if not torch.equal(*seen) or found.shape != seen[0].shape:
            return None
        if not _close(found, seen[0]):
            alone = torch.cat([fresh(model)[0](record) for record in torch.split(x, 1)])
            if _close(alone, seen[0]):
                return None  # the head is not what comes last
            raise InvalidInputError(
                "model",
                type(model).__name__,
                "must take each record by itself: others change its features",
            )
    together = replace(part, together=True, at_once=largest.at_once(_PASS))
    try:
        return together if _close(together.features(x), features) else part
    except Exception:  # no rule for an operation, a choice by value, numbers that are drawn
        return part


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-3, atol=1e-4)
