"""Fine-tuning of public models: trained heads, frozen parts, and low-rank adapters.

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
    """A frozen layer plus a trained low-rank adapter of ``rank`` columns or channels.

    ``base(x) + B A x`` with A ``[r, d]`` and B ``[p, r]``, so r (d + p) weights are trained in place
    of d p: fewer numbers get noise, whose length grows with the root of their number.

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
            windows: Any = (
                base.kernel_size,
                base.stride,
                base.padding,
                base.dilation,
            )
            self.down = nn.Conv2d(base.in_channels, rank, *windows, **like)
            self.up = nn.Conv2d(rank, base.out_channels, 1, **like)
        else:
            # GPT-2 has its weights the other way round.
            if isinstance(base, nn.Linear):
                sizes = base.weight.shape
            else:
                sizes = base.weight.shape[::-1]
            self.down = nn.Linear(sizes[1], rank, **like)
            self.up = nn.Linear(rank, sizes[0], **like)
        nn.init.zeros_(self.up.weight)  # so that it starts as the public model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's outputs plus those of the adapter."""
        outputs: torch.Tensor = self.base(x)
        change: torch.Tensor = self.up(self.down(x))
        return outputs + change


def head_of(model: nn.Module) -> str:
    """Return the name of the last layer that has parameters of its own.

    Order is that of ``named_modules``, which for the usual models is that of the forward pass; that
    the head really comes last is checked by ``part_of_model``.
    """
    owners = []
    for name, module in model.named_modules():
        parameters = [*module.parameters(recurse=False)]
        if parameters:
            owners.append(name)
    if not owners:
        raise InvalidInputError("model", type(model).__name__, "must have parameters")
    return str(owners[-1])


def load_public(model: nn.Module, weights: Mapping[str, torch.Tensor], *, source: str) -> set[str]:
    """Copy public weights into a model; return the names of parameters that keep their random values.

    A head of other classes does not fit and keeps its first, random weights. Anything else that is
    missing is refused: a model whose body stayed random would train without a word, and badly.

    Args:
        model: Changed in place.
        weights: Tensors by the names of parameters and buffers.
        source: Where they are from, for the error.

    Raises:
        InvalidInputError: If one of the body's is not among them.
    """
    head = head_of(model)
    saved = model.state_dict()  # which is without buffers that no file holds
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    for name, buffer in model.named_buffers():
        if name in saved:
            tensors[name] = buffer
    fits = set()
    for name, tensor in tensors.items():
        if name in weights and weights[name].shape == tensor.shape:
            fits.add(name)
    lacking = tensors.keys() - fits
    beyond = sorted(name for name in lacking if _owner_of(name) != head)
    if beyond:
        names = ", ".join(beyond[:3])
        if len(beyond) > 3:
            names = f"{names}, ..."
        raise InvalidInputError(
            "pretrained",
            source,
            f"holds no {names} of the model's shape",
            f"Of the model, the head ({head}) alone may be missing.",
        )
    for name in fits:
        tensors[name].data = weights[name].to(tensors[name].dtype)
    return lacking


def set_trainable(
    model: nn.Module,
    kind: str,
    *,
    rank: int = 0,
    targets: Collection[str] | None = None,
) -> nn.Module:
    """Freeze all parameters but those of the chosen kind, and add adapters if asked; return the model.

    Batch norms are put into evaluation mode: their statistics are public ones then, and couple no
    records.

    Args:
        model: Changed in place.
        kind: ``all``, ``head``, ``biases`` or ``lora``; all but the first train the head.
        rank: Of adapters.
        targets: Ends of the names of layers to adapt; None for all linear layers, or else all
            convolutions.

    Raises:
        InvalidInputError: If adapters are asked for and no layer takes one.
    """
    if kind == "all":
        return model
    head = head_of(model)
    for part in model.modules():
        if isinstance(part, _BatchNorm):
            part.eval()  # its running statistics are frozen with the rest
    for name, parameter in model.named_parameters():
        owner, _, attribute = name.rpartition(".")
        is_bias = kind == "biases" and attribute.endswith("bias")
        parameter.requires_grad_(owner == head or is_bias)
    if kind == "lora":
        _put_adapters(model, head, rank, targets)
    return model


def _put_adapters(
    model: nn.Module,
    head: str,
    rank: int,
    targets: Collection[str] | None,
) -> None:
    """Replace the chosen layers by adapted ones; refuse a choice that matches no layer.

    Args:
        model: Changed in place.
        head: Name of the head, which is trained as a whole.
        rank: Of adapters.
        targets: Ends of the names of layers to adapt; None for all linear layers, or else all
            convolutions.

    Raises:
        InvalidInputError: If no layer takes one.
    """
    layers = {n: m for n, m in model.named_modules() if n != head and _adapts(m)}
    if targets is None:
        # Of a network of convolutions, these; else they are adapted where they are named.
        linear = [n for n, m in layers.items() if not isinstance(m, nn.Conv2d)]
        matches = linear or [*layers]
    else:
        ends = tuple(f".{target}" for target in targets)
        matches = [n for n in layers if f".{n}".endswith(ends)]
    if not matches:
        names = ", ".join(layers) or "none"
        raise InvalidInputError(
            "target_modules",
            None if targets is None else list(targets),
            f"names no linear layer and no convolution beside the head; there are {names}",
        )
    for name in matches:
        parent, _, attribute = name.rpartition(".")
        adapter = Lora(layers[name], rank)
        setattr(model.get_submodule(parent), attribute, adapter)


def _owner_of(name: str) -> str:
    """Return the name of the layer that a parameter lies in."""
    owner, _, _ = name.rpartition(".")
    return owner


def _adapts(layer: nn.Module) -> bool:
    """Say whether an adapter can replace a layer: linear or convolution, and none inside attention."""
    kind = f"{type(layer).__module__}.{type(layer).__name__}"
    if kind == "transformers.pytorch_utils.Conv1D":
        return True
    if isinstance(layer, NonDynamicallyQuantizableLinear):
        return False
    return isinstance(layer, nn.Linear | nn.Conv2d)


class _Nested(nn.Module):
    """A module that holds one layer under the dotted name that the layer has in the whole model.

    A state dict of it fits into the model, since names are the same.
    """

    def __init__(self, name: str, layer: nn.Module) -> None:
        super().__init__()
        self._path = name
        first, _, rest = name.partition(".")
        inner = _Nested(rest, layer) if rest else layer
        self.add_module(first, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the inner layer's outputs."""
        (inner,) = self.children()
        outputs: torch.Tensor = inner(x)
        return outputs


@dataclass(frozen=True, eq=False)
class FrozenPart:
    """A model of which only the head is trained, with the frozen part's features computed once a record.

    A frozen body gives a record the same features in every step, so they are computed once, and a
    training of the head alone works on them: the same mechanism, on another view of the record.

    Attributes:
        whole: The model.
        head: Name of the layer that is trained.
        together: Whether many records may pass at once by ``vmap``, which has been tried.
        at_once: How many.
    """

    whole: nn.Module
    head: str
    together: bool = False
    at_once: int = _PASS
    _known: weakref.WeakKeyDictionary[TensorData, TensorData] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """Return the inputs of the head for the given records, shape ``[N, ...]``."""
        with torch.no_grad(), unwritten(self.whole):
            if not self.together:
                return torch.stack([self._one(record) for record in x])
            # Always as many: sums of another number of records end in other last digits, so that one
            # record more would change the features of others.
            missing = -len(x) % self.at_once
            spare = x.new_zeros((missing, *x.shape[1:]))
            *pieces, last = torch.split(x, self.at_once)
            pieces = [*pieces, torch.cat([last, spare])]  # the records themselves are not copied
            features = [by_record(self._one)(piece) for piece in pieces]
            return torch.cat(features)[: len(x)]

    def _one(self, x: torch.Tensor) -> torch.Tensor:
        """Return the inputs of the head for one record, by a hook on a copy of the model.

        A hook catches what goes into the head; the model is a copy, so nothing of the record stays in
        it.
        """
        inputs: list[torch.Tensor] = []

        def catch(_: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
            """Append the inputs of the head, ``[1, ...]``, to the list."""
            inputs.append(arguments[0].detach())

        model, _ = fresh(self.whole)
        head = model.get_submodule(self.head)
        head.register_forward_pre_hook(catch)
        model(x.unsqueeze(0))
        return inputs[-1].squeeze(0)

    def reduce(self, data: TensorData) -> TensorData:
        """Return the data with features in place of the inputs, cached by data object.

        A record that raises in the body, or breaks public facts, is marked unusable and counts as
        zero from then on; the features of the others do not change by it.
        """
        if data not in self._known:
            facts = find_facts(lambda x, _: self.whole(x), *data.like)
            records = data.held_to(facts)
            places = torch.arange(len(records), device=records.x.device)
            x, _, _ = records.fetch(places)

            def only(usable: torch.Tensor) -> torch.Tensor:
                """Return the features of usable records; the others are computed on zeros."""
                further_axes = x.ndim - 1
                mask = usable.view(-1, *[1] * further_axes)
                zeros = torch.zeros_like(x[:1])
                return self.features(torch.where(mask, x, zeros))

            try:
                features = self.features(x)
            except Exception as error:
                unusable = find_unusable(error, len(x), only)
                features = only(~unusable)
                records = records.marked(unusable)
            self._known[data] = replace(records, x=features)
        return self._known[data]

    def model(self, module: nn.Module) -> nn.Module:
        """Return the head of a model alone, with its parameters' full names."""
        return _Nested(self.head, module.get_submodule(self.head))


def part_of_model(model: nn.Module, x: torch.Tensor) -> FrozenPart | None:
    """Return the model split into head and frozen part; None unless only the last layer is trained.

    Tried on made-up records: the head on the features must give what the model gives, and a model
    must give the same twice. If records pass through a body together and then differ, they touch each
    other there, and a record's gradient in the head would hang on others: that is refused.

    Args:
        model: With all but the head frozen, or not.
        x: Made-up inputs ``[N, ...]``.

    Returns:
        The frozen part; None where a training must run the model as a whole.
    """
    head = head_of(model)
    owners = set()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            owners.add(_owner_of(name))
    if owners != {head}:
        return None
    refuse_coupling(model)
    part = FrozenPart(model, head)
    with torch.no_grad():
        with Largest() as largest:
            features = part.features(x)
        outputs = [fresh(model)[0](x) for _ in range(2)]
        reduced = part.model(model)(features)
        if not torch.equal(*outputs) or reduced.shape != outputs[0].shape:
            return None
        if not _close(reduced, outputs[0]):
            records = torch.split(x, 1)
            alone = torch.cat([fresh(model)[0](record) for record in records])
            if _close(alone, outputs[0]):
                return None  # the head is not what comes last
            raise InvalidInputError(
                "model",
                type(model).__name__,
                "must take each record by itself: others change its features",
            )
    together = replace(part, together=True, at_once=largest.at_once(_PASS))
    try:
        if _close(together.features(x), features):
            return together
        return part
    except Exception:  # no rule for an operation, a choice by value, numbers that are drawn
        return part


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two outputs are equal but for rounding."""
    return torch.allclose(one, other, rtol=1e-3, atol=1e-4)
