"""Handlers of operations that use parameters, or that have a form of their own for one record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn import functional

from privtune.training.engine.graph.tape import Handler, Watching, bind
from privtune.training.engine.layers.fastops import cross_entropy, stacked_conv2d, stacked_linear
from privtune.training.engine.layers.recurrent import Tensors, run_gru, run_lstm, run_simple
from privtune.training.engine.layers.uses import (
    ConvUse,
    EmbeddingUse,
    LinearUse,
    bands_of,
    cheaper_form,
)


def _linear(mode: Watching, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    x, weight, bias = bind(args, kwargs, ("input", "weight", "bias"), (None,))
    found = mode.names_of(weight, bias)
    if found is None or mode.levels is None:
        return NotImplemented
    levels = mode.levels
    a, w = levels.physical(x), levels.by_candidate(weight).detach()
    b = None if bias is None else levels.by_candidate(bias).detach()
    with temporarily_clear_interpreter_stack():
        lead, (outputs, inputs) = a.shape[:-1], w.shape[1:]
        a = a.reshape(*lead[:2], -1, inputs)
        y = stacked_linear(a.flatten(1, 2), w, b, one_place=a.shape[2] == 1)
        y = y.view(*lead[:2], -1, outputs)
        form = cheaper_form(a.shape[2], inputs, outputs, rows=lead[0] * lead[1])
    wrapped = mode.put(LinearUse(str(found[0]), found[1], form), a, y)
    return wrapped.view(*x.shape[:-1], outputs)


def _conv(mode: Watching, args: Sequence[Any], kwargs: Mapping[str, Any], *, axes: int) -> Any:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    x, weight, bias, *rest, groups = bind(args, kwargs, names, (None, 1, 0, 1, 1))
    found = mode.names_of(weight, bias)
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
        y = stacked_conv2d(
            images,
            w,
            b,
            stride=list(stride),
            padding=list(padding),
            dilation=list(dilation),
            groups=groups,
        )
        y = y.view(*a.shape[:3], *y.shape[2:])
        outputs, depth = w.shape[1], w.shape[2]
        places = a.shape[2] * y.shape[-1] * y.shape[-2]
        form = (
            cheaper_form(
                places, depth * kernel[0] * kernel[1], outputs, rows=a.shape[0] * a.shape[1]
            )
            if groups == 1
            else "direct"
        )
        use = ConvUse(
            str(found[0]), found[1], form, kernel, stride, padding, dilation, groups, depth
        )
        use = replace(use, bands=bands_of(use, images=a.shape[2], places=places, outputs=outputs))
    wrapped = mode.put(use, a, y)
    if axes == 1:
        wrapped = wrapped.squeeze(-2)
    return wrapped if batched else wrapped.squeeze(0)


def _embedding(mode: Watching, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    names = (
        "input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"
    )  # fmt: skip
    index, weight, padding, max_norm, _, by_frequency, _ = bind(
        args, kwargs, names, (None, None, 2.0, False, False)
    )
    found = mode.names_of(weight)
    if found is None or mode.levels is None or max_norm is not None or by_frequency:
        return NotImplemented
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
    wrapped = mode.put(EmbeddingUse(str(found[0]), None, w.shape[1], padding), a, y)
    return wrapped.view(*index.shape, w.shape[-1])


def _embedding_bag(mode: Watching, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    names = (
        "input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode",
        "sparse", "per_sample_weights", "include_last_offset", "padding_idx",
    )  # fmt: skip
    index, weight, offsets, max_norm, _, by_frequency, how, _, weights, _, padding = bind(
        args, kwargs, names, (None, None, 2.0, False, "mean", False, None, False, None)
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


def _weight_norm(mode: Watching, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    v, g, dim = bind(args, kwargs, ("v", "g", "dim"), (0,))
    if mode.levels is None:
        return NotImplemented
    others = [d for d in range(v.ndim) if d != dim % v.ndim] if dim != -1 else list(range(v.ndim))
    return v * (g / torch.linalg.vector_norm(v, dim=others, keepdim=True))


def _cross_entropy(mode: Watching, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    names = (
        "input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction",
        "label_smoothing",
    )  # fmt: skip
    logits, targets, weight, _, ignored, _, reduction, smoothing = bind(
        args, kwargs, names, (None, None, -100, None, "mean", 0.0)
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


def _attention(mode: Watching, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    q, k, v, mask, p, causal, scale, grouped = bind(
        args, kwargs, names, (None, 0.0, False, None, False)
    )
    if mode.levels is None and p == 0.0:
        return NotImplemented
    if grouped and q.shape[-3] != k.shape[-3]:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3)
        v = v.repeat_interleave(q.shape[-3] // v.shape[-3], dim=-3)
    scores = torch.matmul(q, k.transpose(-1, -2)) * (
        q.shape[-1] ** -0.5 if scale is None else scale
    )
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    if mask is not None:
        barred = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, float("-inf")) if barred else scores + mask
    if mask is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        # As torch has it, a place that sees no other, a padded one, gets zeros: not NaN, for which its
        # record would count as none.
        blind = (scores == float("-inf")).all(dim=-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)
    return torch.matmul(mode.drop(weights, p, weights.shape), v)


def _multi_head(mode: Watching, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with mode:  # it is made of other operations, which are to be caught
        return _open_multi_head(*args, **kwargs)


def _recurrent(
    mode: Watching,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    run: Callable[..., Tensors],
) -> Any:
    """Handle a recurrent layer, place by place, where torch's own cannot run."""
    names = (
        "input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional",
        "batch_first",
    )  # fmt: skip
    x, first, weights, biased, layers, p, train, both_ways, batch_first = bind(
        args, kwargs, names, ()
    )
    p = p if train else 0.0
    # Packed sequences come with other arguments, and with lengths that depend on the data.
    if not isinstance(biased, bool) or (mode.levels is None and p == 0.0):
        return NotImplemented
    with mode:
        return run(
            x,
            tuple(first) if isinstance(first, tuple | list) else (first,),
            weights,
            biased=biased,
            layers=layers,
            dropout=p,
            both_ways=both_ways,
            batch_first=batch_first,
            drop=lambda h, p: mode.drop(h, p, h.shape),
        )


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

OPERATIONS: Mapping[Any, Handler] = {
    functional.linear: _linear,
    functional.conv1d: partial(_conv, axes=1),
    functional.conv2d: partial(_conv, axes=2),
    functional.embedding: _embedding,
    functional.embedding_bag: _embedding_bag,
    torch._weight_norm: _weight_norm,
    functional.cross_entropy: _cross_entropy,
    functional.scaled_dot_product_attention: _attention,
    functional.multi_head_attention_forward: _multi_head,
    torch.lstm: partial(_recurrent, run=run_lstm),
    torch.gru: partial(_recurrent, run=run_gru),
    torch.rnn_tanh: partial(_recurrent, run=run_simple(torch.tanh)),
    torch.rnn_relu: partial(_recurrent, run=run_simple(torch.relu)),
}
