"""Handlers of operations that use parameters, or that have a form of their own for one record.

Convolutions run candidate by candidate in a layout with channels last: on CPU that makes them and the
pooling behind them several times faster. Recurrent layers run place by place: their kernels have no rule for
``vmap``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn import functional

from privtune.training.engine.rules import (
    EmbeddingUse,
    ProductUse,
    Tensors,
    Use,
    multiplied,
    turns,
)
from privtune.training.engine.watch import DRAWS, Handler, Levels, Watch, bind

Back = list[tuple[Use, Tensors]]
Cell = Callable[[torch.Tensor, Tensors, Tensors], Tensors]

_SMALL_CLASSES = 64  # up to here, softmax over the leading axis beats softmax over the last


def _convolved(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, windows: Sequence[Any]
) -> torch.Tensor:
    """Convolve ``[K, N, C, H, W]`` with ``[K, O, C/groups, kh, kw]``, candidate by candidate."""
    biases = [None] * len(x) if b is None else b.unbind()
    return _joined(
        [
            torch.conv2d(_channels_last(images), _channels_last(weight), bias, *windows)
            for images, weight, bias in zip(x.unbind(), w.unbind(), biases, strict=True)
        ]
    )


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Stack images with channels last; one candidate needs no copy."""
    if len(parts) == 1:
        return _channels_last(parts[0]).unsqueeze(0)
    return torch.stack([part.permute(0, 2, 3, 1) for part in parts]).permute(0, 1, 4, 2, 3)


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    """Lay out ``[N, C, H, W]`` with channels last, with strides that say so even if C is 1."""
    _, channels, height, width = x.shape
    if channels == 1 or height * width == 1:
        strides = (channels * height * width, 1, width * channels, channels)
        return x.contiguous().as_strided(x.shape, strides)
    return x.contiguous(memory_format=torch.channels_last)


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy of ``[C, R]``: few classes, laid out first."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, targets: torch.Tensor, ignored: int | None
    ) -> torch.Tensor:
        skip = None if ignored is None else targets == ignored
        if skip is not None:
            targets = targets.masked_fill(skip, 0)
        # Both the probabilities (for the way back) and the losses are written here; a captured graph
        # drops what its pass does not read.
        ctx.save_for_backward(torch.softmax(rows, dim=0), targets, skip)
        picked = torch.log_softmax(rows, dim=0).gather(0, targets.unsqueeze(0)).squeeze(0)
        return -picked if skip is None else -picked.masked_fill(skip, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        p, targets, skip = ctx.saved_tensors
        scale = (grads[0] if skip is None else grads[0].masked_fill(skip, 0.0)).unsqueeze(0)
        gradient = p.scatter_add(0, targets.unsqueeze(0), torch.full_like(scale, -1.0))
        return gradient * scale, None, None


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, *, ignored: int | None
) -> torch.Tensor | None:
    """Return the cross-entropy of ``[..., C]`` and ``[...]``, or None where the plain form is best."""
    classes = logits.shape[-1]
    if classes > _SMALL_CLASSES:
        return None
    rows = logits.movedim(-1, 0).reshape(classes, -1)
    losses: torch.Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        rows, targets.reshape(-1), ignored
    )
    return losses.view(targets.shape)


def _linear(mode: Watch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    x, weight, bias = bind(args, kwargs, "input weight", bias=None)
    found = mode.names_of(weight, bias)
    if mode.adds(weight, bias):
        with mode:
            return functional.linear(x, weight) + bias
    if found is None or mode.levels is None:
        return NotImplemented
    levels, name = mode.levels, str(found[0])
    a, w = levels.physical(x), levels.by_candidate(weight).detach()
    b = None if bias is None else levels.by_candidate(bias).detach()
    with temporarily_clear_interpreter_stack():
        lead, (outputs, inputs) = a.shape[:2], w.shape[1:]
        rows = a.reshape(lead[0], -1, inputs)
        y = multiplied(rows, w, b, turned=turns(outputs, rows.device) and not rows.requires_grad)
        y = y.reshape(*lead, -1, outputs)
        seen = rows.detach().view(*lead, -1, inputs)
    out = mode.put(found, y, lambda g: [(ProductUse(name, found[1]), (seen, g))])
    return out.view(*x.shape[:-1], outputs)


def _matmul(mode: Watch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Handle a product whose right side is a parameter: its gradient is that of its transpose, transposed."""
    x, weight = bind(args, kwargs, "input other")
    if mode.levels is not None and id(weight) in mode.turned:
        with mode:
            return functional.linear(x, mode.turned[id(weight)][1])
    found = mode.names_of(weight)
    if found is None or mode.levels is None or weight.ndim != 2 or x.ndim < 2:
        return NotImplemented
    a, w = mode.levels.physical(x), mode.levels.by_candidate(weight).detach()
    name, lead, (inputs, outputs) = str(found[0]), a.shape[:2], w.shape[1:]
    with temporarily_clear_interpreter_stack():
        rows = a.reshape(lead[0], -1, inputs)
        y = torch.bmm(rows, w).view(*lead, -1, outputs)
        seen = rows.detach().view(*lead, -1, inputs)
    out = mode.put(found, y, lambda g: [(ProductUse(name), (g, seen))])
    return out.view(*x.shape[:-1], outputs)


def _addmm(mode: Watch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    added, x, weight, beta, alpha = bind(args, kwargs, "input mat1 mat2", beta=1, alpha=1)
    known = mode.names_of(weight) is not None or id(weight) in mode.turned
    if not known or (beta, alpha) != (1, 1):
        return NotImplemented
    with mode:
        return torch.matmul(x, weight) + added


def _conv(mode: Watch, args: Sequence[Any], kwargs: Mapping[str, Any], *, axes: int) -> Any:
    own = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    x, weight, bias, *rest, groups = bind(args, kwargs, "input weight", **own)
    found = mode.names_of(weight, bias)
    if mode.adds(weight, bias):
        run: Any = functional.conv1d if axes == 1 else functional.conv2d
        with mode:
            return run(x, weight, None, *rest, groups) + bias.view(-1, *(1,) * axes)
    if found is None or mode.levels is None:
        return NotImplemented
    levels = mode.levels
    kernel = tuple(weight.shape[2:])
    stride, padding, dilation = _windows(kernel, *rest, axes=axes)
    if stride is None:
        return NotImplemented
    a, w = levels.physical(x), levels.by_candidate(weight).detach()
    b = None if bias is None else levels.by_candidate(bias).detach()
    batched = x.ndim == axes + 2
    with temporarily_clear_interpreter_stack():
        a = a if batched else a.unsqueeze(2)
        if axes == 1:
            a, w, kernel = a.unsqueeze(-2), w.unsqueeze(-2), (1, *kernel)
        images = a.flatten(1, 2)
        windows = (list(stride), list(padding), list(dilation), groups)
        y = _convolved(images, w, b, windows)
        y = y.view(*a.shape[:3], *y.shape[2:])
        use = ProductUse(
            str(found[0]), found[1], taps=kernel[0] * kernel[1], depth=w.shape[2], groups=groups
        )
        unfold = partial(_unfolded, a.detach(), kernel, stride, padding, dilation)
    wrapped = mode.put(found, y, lambda g: [(use, unfold(g))])
    if axes == 1:
        wrapped = wrapped.squeeze(-2)
    return wrapped if batched else wrapped.squeeze(0)


def _unfolded(  # noqa: PLR0917
    a: torch.Tensor,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    g: torch.Tensor,
) -> Tensors:
    """Lay out images ``[K, B, n, C, H, W]`` and gradients ``[K, B, n, O, H', W']`` as matrices, by place."""
    lead, (pad_h, pad_w) = a.shape[:2], padding
    x = a.flatten(0, 2).permute(0, 2, 3, 1)
    if pad_h or pad_w:
        x = functional.pad(x, (0, 0, pad_w, pad_w, pad_h, pad_h))
    x = x.contiguous()
    (s_n, s_h, s_w, s_c), (out_h, out_w) = x.stride(), g.shape[-2:]
    patches = x.as_strided(
        (x.shape[0], out_h, out_w, *kernel, x.shape[3]),
        (s_n, s_h * stride[0], s_w * stride[1], s_h * dilation[0], s_w * dilation[1], s_c),
    )
    rows = g.permute(0, 1, 2, 4, 5, 3).reshape(*lead, -1, g.shape[3])
    return patches.reshape(*lead, -1, kernel[0] * kernel[1] * x.shape[3]), rows


def _embedding(mode: Watch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    own = {"max_norm": None, "norm_type": 2.0, "scale_grad_by_freq": False, "sparse": False}
    index, weight, padding, max_norm, _, by_frequency, _ = bind(
        args, kwargs, "input weight", padding_idx=None, **own
    )
    found = mode.names_of(weight)
    if mode.levels is None or max_norm is not None or by_frequency:
        return NotImplemented
    if found is None:
        if padding is None or not mode.levels.of_record(weight):
            return NotImplemented
        # Of a table that was copied for each record, torch would let rows that fill up have a gradient.
        rows = functional.embedding(index, weight)
        return torch.where((index == padding % len(weight)).unsqueeze(-1), rows.detach(), rows)
    levels = mode.levels
    a, w = levels.physical(index), levels.by_candidate(weight).detach()
    with temporarily_clear_interpreter_stack():
        shape = a.shape
        a = a.reshape(*shape[:2], -1)
        stack = torch.arange(shape[0], device=a.device).view(-1, 1, 1)
        # A negative index would count from the end of the table here, and raise only later, in the
        # sums. Sent beyond the end it raises here, as in plain torch.
        y = w[stack, torch.where(a < 0, w.shape[1], a)]
        if padding is not None and padding < 0:
            padding += w.shape[1]
    use = EmbeddingUse(str(found[0]), rows=w.shape[1])

    def back(g: torch.Tensor) -> Back:
        filled = None if padding is None else (a == padding).unsqueeze(-1)
        return [(use, (a, g if filled is None else g.masked_fill(filled, 0.0)))]

    wrapped = mode.put(found, y, back)
    return wrapped.view(*index.shape, w.shape[-1])


def _embedding_bag(mode: Watch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    own = {"offsets": None, "max_norm": None, "norm_type": 2.0, "scale_grad_by_freq": False}
    more = {"sparse": False, "per_sample_weights": None, "include_last_offset": False}
    index, weight, offsets, max_norm, _, by_frequency, how, _, weights, _, padding = bind(
        args, kwargs, "input weight", **own, mode="mean", **more, padding_idx=None
    )
    plain = offsets is None and max_norm is None and not by_frequency and index.ndim == 2
    if mode.levels is None or not plain:
        return NotImplemented
    with mode:
        rows = functional.embedding(index, weight, padding)
    if weights is not None:
        rows = rows * weights.unsqueeze(-1)
    if padding is None:
        return getattr(rows, "amax" if how == "max" else how)(dim=1)
    kept = (index != padding % len(weight)).unsqueeze(-1)
    if how == "max":
        least = rows.masked_fill(~kept, float("-inf")).amax(dim=1)
        return torch.where(kept.any(dim=1), least, 0.0)
    total = (rows * kept).sum(dim=1)
    return total if how == "sum" else total / kept.sum(dim=1).clamp(min=1)


def _weight_norm(mode: Watch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    v, g, dim = bind(args, kwargs, "v g", dim=0)
    if mode.levels is None:
        return NotImplemented
    others = [d for d in range(v.ndim) if d != dim % v.ndim] if dim != -1 else list(range(v.ndim))
    return v * (g / torch.linalg.vector_norm(v, dim=others, keepdim=True))


def _cross_entropy(mode: Watch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    own = {"size_average": None, "ignore_index": -100, "reduce": None, "reduction": "mean"}
    logits, targets, weight, _, ignored, _, reduction, smoothing = bind(
        args, kwargs, "input target", weight=None, **own, label_smoothing=0.0
    )
    plain = reduction == "none" and weight is None and smoothing == 0.0
    # Where no use is caught (`copy_all`), the loss may take gradients itself: plain torch serves it.
    if mode.levels is None or not mode.names:
        return NotImplemented
    if not plain or logits.ndim != 2 or targets.is_floating_point():
        return NotImplemented
    z, t = mode.levels.physical(logits), mode.levels.physical(targets)
    with temporarily_clear_interpreter_stack():
        none = ignored < 0 and mode.all_classes(t)
        losses = cross_entropy(z, t, ignored=None if none else ignored)
    return NotImplemented if losses is None else mode.levels.wrap(losses)


def _attention(mode: Watch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    own = {"dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    q, k, v, mask, p, causal, scale, grouped = bind(
        args, kwargs, "query key value", attn_mask=None, **own
    )
    p = 0.0 if mode.deterministic else p
    if mode.levels is None and p == 0.0:
        return NotImplemented
    if grouped and q.shape[-3] != k.shape[-3]:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3)
        v = v.repeat_interleave(q.shape[-3] // v.shape[-3], dim=-3)
    if mode.levels is not None and p == 0.0:
        return _fused(mode.levels, q, k, v, mask, is_causal=causal, scale=scale)
    scores = torch.matmul(q, k.transpose(-1, -2)) * (
        q.shape[-1] ** -0.5 if scale is None else scale
    )
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    if mask is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        scores = (
            scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        )
        # As torch has it, a place that sees no other, a padded one, gets zeros: not NaN, for which its
        # record would count as none.
        blind = (scores == float("-inf")).all(dim=-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)
    return torch.matmul(mode.drop(weights, p, weights.shape), v)


def _fused(
    levels: Levels,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    **how: Any,
) -> Any:
    """Run torch's own attention on the physical tensors: under ``vmap`` it would hold every score."""
    held = [levels.physical(part) for part in (q, k, v, *(() if mask is None else (mask,)))]
    most = max(part.ndim for part in held)
    # Candidates, records, and what torch has a fast kernel for: heads, places, features.
    axes = max(most, 5)
    with temporarily_clear_interpreter_stack():
        wide = [part[(slice(None),) * 2 + (None,) * (axes - part.ndim)] for part in held]
        lead = [max(sizes) for sizes in zip(*(part.shape[:-2] for part in wide), strict=True)]
        parts = [part.expand(*lead, *part.shape[-2:]).flatten(0, -4) for part in wide]
        how["attn_mask"] = None if mask is None else parts[3]
        out = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], **how)
        out = out.view(*lead, *out.shape[-2:])
        out = out[(slice(None),) * 2 + (0,) * (axes - most)]
    return levels.wrap(out)


def _multi_head(mode: Watch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with mode:  # it is made of other operations, which are to be caught
        return _open_multi_head(*args, **kwargs)


def _recurrent(mode: Watch, args: Sequence[Any], kwargs: Mapping[str, Any], *, cell: Cell) -> Any:
    """Handle a recurrent layer place by place: of all layers and directions, every product is caught."""
    names = "input hx params has_biases num_layers dropout train bidirectional batch_first"
    x, first, weights, biased, layers, p, train, both_ways, batch_first = bind(args, kwargs, names)
    p = p if train else 0.0
    # Packed sequences come with other arguments, and with lengths that depend on the data.
    if not isinstance(biased, bool) or (mode.levels is None and p == 0.0):
        return NotImplemented
    states = tuple(first) if isinstance(first, tuple | list) else (first,)
    places = x.transpose(0, 1) if batch_first else x
    ways = 2 if both_ways else 1
    each = len(weights) // (layers * ways)
    last: list[Tensors] = []
    with mode:
        for layer in range(layers):
            if layer and p:
                places = mode.drop(places, p, places.shape)
            outputs = []
            for way in range(ways):
                number = layer * ways + way
                own = tuple(weights[number * each : (number + 1) * each])
                state = tuple(s[number] for s in states)
                inputs = functional.linear(places, own[0], own[2] if biased else None).unbind(0)
                seen = []
                for given in inputs if way == 0 else inputs[::-1]:
                    state = cell(given, state, own)
                    seen.append(state[0])
                outputs.append(torch.stack(seen if way == 0 else seen[::-1]))
                last.append(state)
            places = torch.cat(outputs, dim=-1)
        ends = tuple(torch.stack(parts) for parts in zip(*last, strict=True))
    return (places.transpose(0, 1) if batch_first else places, *ends)


def _by_state(h: torch.Tensor, weights: Tensors) -> torch.Tensor:
    biased = len(weights) > 3
    return functional.linear(h, weights[1], weights[3] if biased else None)


def _lstm_cell(x: torch.Tensor, states: Tensors, weights: Tensors) -> Tensors:
    h, c = states
    first, forget, fresh, out = (x + _by_state(h, weights)).chunk(4, dim=-1)
    c = torch.sigmoid(forget) * c + torch.sigmoid(first) * torch.tanh(fresh)
    h = torch.sigmoid(out) * torch.tanh(c)
    if len(weights) in (3, 5):  # a projection of the state
        h = functional.linear(h, weights[-1])
    return h, c


def _gru_cell(x: torch.Tensor, states: Tensors, weights: Tensors) -> Tensors:
    (h,) = states
    reset, update, fresh = x.chunk(3, dim=-1)
    by_reset, by_update, by_fresh = _by_state(h, weights).chunk(3, dim=-1)
    update = torch.sigmoid(update + by_update)
    fresh = torch.tanh(fresh + torch.sigmoid(reset + by_reset) * by_fresh)
    return (fresh + update * (h - fresh),)


def _simple_cell(x: torch.Tensor, states: Tensors, weights: Tensors, *, squash: Any) -> Tensors:
    return (squash(x + _by_state(states[0], weights)),)


def _windows(
    kernel: Sequence[int], stride: Any, padding: Any, dilation: Any, *, axes: int
) -> tuple[Any, Any, Any]:
    """Return stride, padding and dilation of a convolution as pairs, or Nones if unknown."""

    def pair(value: Any, fill: int) -> tuple[int, int]:
        values = [value] * axes if isinstance(value, int) else list(value)
        values = values * axes if len(values) < axes else values
        return (fill, values[0]) if axes == 1 else (values[0], values[1])

    spread = pair(dilation, 1)
    if isinstance(padding, str):
        sizes = kernel if axes == 2 else (1, *kernel)
        total = [d * (k - 1) for d, k in zip(spread, sizes, strict=True)]
        if padding not in ("same", "valid") or (padding == "same" and any(t % 2 for t in total)):
            return None, None, None
        edges = (0, 0) if padding == "valid" else (total[0] // 2, total[1] // 2)
    else:
        edges = pair(padding, 0)
    return pair(stride, 1), edges, spread


def _without_override(func: Any) -> Any:
    """Copy a composite of torch without its check for overrides, which would call the mode."""
    scope = {**func.__globals__, "has_torch_function": lambda _: False}
    copy = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


_open_multi_head = _without_override(functional.multi_head_attention_forward)


@dataclass(eq=False)
class Intercept(Watch):
    """Catches uses of parameters and draws while a model runs on one record."""

    handlers: ClassVar[Mapping[Any, Handler]] = {
        **DRAWS,
        functional.linear: _linear,
        **dict.fromkeys((torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm), _matmul),
        torch.addmm: _addmm,
        functional.conv1d: partial(_conv, axes=1),
        functional.conv2d: partial(_conv, axes=2),
        functional.embedding: _embedding,
        functional.embedding_bag: _embedding_bag,
        torch._weight_norm: _weight_norm,
        functional.cross_entropy: _cross_entropy,
        functional.scaled_dot_product_attention: _attention,
        functional.multi_head_attention_forward: _multi_head,
        torch.lstm: partial(_recurrent, cell=_lstm_cell),
        torch.gru: partial(_recurrent, cell=_gru_cell),
        torch.rnn_tanh: partial(_recurrent, cell=partial(_simple_cell, squash=torch.tanh)),
        torch.rnn_relu: partial(_recurrent, cell=partial(_simple_cell, squash=torch.relu)),
    }
