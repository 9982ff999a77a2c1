"""Handlers that compute torch operations on all candidates and records, and note how weights are used.

Convolutions run candidate by candidate in a layout with channels last: on CPU that makes them and the
pooling behind them several times faster. Recurrent layers run place by place: their kernels have no rule for
``vmap``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn import functional

from privtune.training.engine.rules import (
    DirectUse,
    EmbeddingUse,
    ProductUse,
    Tensors,
    Use,
    multiplied,
    turns,
)
from privtune.training.engine.watch import DRAWS, Handler, Levels, Watch, bind
from privtune.training.engine.windows import Windows

Back = list[tuple[Use, Tensors]]
Cell = Callable[[torch.Tensor, Tensors, Tensors], Tensors]

_SMALL_CLASSES = 64  # up to here, softmax over the leading axis beats softmax over the last


def _convolved(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    windows: Sequence[Any],
) -> torch.Tensor:
    """Convolve ``[K, N, C, H, W]`` with ``[K, O, C/groups, kh, kw]``, candidate by candidate.

    K is a loop: torch has no convolution of K weights but one in groups, which is slower.

    Args:
        x: Images. N is the records of a candidate times what a model folds into its batch axis.
        w: Kernels.
        b: Biases, ``[K, O]``, or None.
        windows: Stride, padding, dilation and groups, as torch takes them.

    Returns:
        ``[K, N, O, H', W']``, with channels last in memory.
    """
    biases: Sequence[torch.Tensor | None] = [None] * len(x)
    if b is not None:
        biases = b.unbind()
    convolved = []
    for images, weight, bias in zip(x.unbind(), w.unbind(), biases, strict=True):
        rows = _channels_last(images)
        kernels = _channels_last(weight)
        y = torch.conv2d(rows, kernels, bias, *windows)
        convolved.append(y)
    return _joined(convolved)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Stack images of K candidates with channels last in memory; a single one is not copied.

    ``[K, N, O, H', W']`` by view, channels last in memory: the pooling behind it runs fast there,
    too.
    """
    if len(parts) == 1:
        return _channels_last(parts[0]).unsqueeze(0)
    rows = [part.permute(0, 2, 3, 1) for part in parts]  # [N, H', W', O]
    stack = torch.stack(rows)
    return stack.permute(0, 1, 4, 2, 3)


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    """Lay out ``[N, C, H, W]`` with channels last in memory, and with strides that show this even for C = 1.

    Of one channel, both layouts have the same bytes, and torch takes the slow way unless strides say
    the other.
    """
    _, channels, height, width = x.shape
    if channels == 1 or height * width == 1:
        of_image = channels * height * width
        of_row = channels * width
        strides = (of_image, 1, of_row, channels)
        return x.contiguous().as_strided(x.shape, strides)
    return x.contiguous(memory_format=torch.channels_last)


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy of logits ``[C, R]``, with the axis of classes first: faster for few classes.

    Softmax over the last axis of ``[R, C]`` with C of 10 works on vectors that are mostly empty. With
    classes first, each number of a vector is another row. It is the loss of most tasks, computed in
    every step.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        targets: torch.Tensor,
        ignored: int | None,
    ) -> torch.Tensor:
        """Return the losses ``[R]`` of logits ``[C, R]`` and targets ``[R]``; 0 where a target is ignored."""
        skip = None
        if ignored is not None:
            skip = targets == ignored
            targets = targets.masked_fill(skip, 0)
        # Both the probabilities (for the way back) and the losses are written here; a captured graph
        # drops what its pass does not read.
        probabilities = torch.softmax(rows, dim=0)
        ctx.save_for_backward(probabilities, targets, skip)
        logs = torch.log_softmax(rows, dim=0)
        picked = logs.gather(0, targets.unsqueeze(0)).squeeze(0)
        if skip is None:
            return -picked
        return -picked.masked_fill(skip, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of the logits, ``[C, R]``: softmax minus one-hot, times each loss's own."""
        p, targets, skip = ctx.saved_tensors
        (scale,) = grads
        if skip is not None:
            scale = scale.masked_fill(skip, 0.0)
        scale = scale.unsqueeze(0)
        # The gradient of -log p_y by the logits is p less the one-hot vector of y.
        minus_one = torch.full_like(scale, -1.0)
        gradient = p.scatter_add(0, targets.unsqueeze(0), minus_one)
        return gradient * scale, None, None


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignored: int | None,
) -> torch.Tensor | None:
    """Return the losses of logits ``[..., C]`` and targets ``[...]``; None if there are many classes.

    Plain torch is as fast for many classes.

    Args:
        logits: ``[..., C]``, of which the leading axes may be candidates and records.
        targets: Classes, ``[...]``.
        ignored: A class whose loss is 0, or None where no target can be one: then no mask is made.
    """
    classes = logits.shape[-1]
    if classes > _SMALL_CLASSES:
        return None
    rows = logits.movedim(-1, 0).reshape(classes, -1)
    flat = targets.reshape(-1)
    losses: torch.Tensor = _CrossEntropy.apply(rows, flat, ignored)  # type: ignore[no-untyped-call]
    return losses.view(targets.shape)


def _linear(mode: Watch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute a linear layer for all candidates in one product, and note the use of its weight.

    The rule needs ``a`` ``[K, B, T, d]`` and, on the way back, ``g`` ``[K, B, T, p]``. A layer whose
    weight is frozen and whose bias is trained becomes a product and a sum, of which autograd copies
    the bias alone.
    """
    x, weight, bias = bind(args, kwargs, "input weight", bias=None)
    names = mode.names_of(weight, bias)
    if mode.adds(weight, bias):
        with mode:
            return functional.linear(x, weight) + bias
    if names is None or mode.levels is None:
        return NotImplemented
    levels = mode.levels
    a = levels.physical(x)
    w = levels.by_candidate(weight).detach()
    b = None
    if bias is not None:
        b = levels.by_candidate(bias).detach()
    with temporarily_clear_interpreter_stack():
        lead = a.shape[:2]
        outputs = w.shape[1]
        inputs = w.shape[2]
        rows = a.reshape(lead[0], -1, inputs)
        turned = turns(outputs, rows.device) and not rows.requires_grad
        y = multiplied(rows, w, b, turned=turned)
        y = y.reshape(*lead, -1, outputs)
        inputs_seen = rows.detach().view(*lead, -1, inputs)
    use = ProductUse(str(names[0]), names[1])

    def back(g: torch.Tensor) -> Back:
        """Return the use of the weight: inputs ``[K, B, T, d]``, output gradients ``[K, B, T, p]``."""
        return [(use, (inputs_seen, g))]

    out = mode.put(names, y, back)
    return out.view(*x.shape[:-1], outputs)


def _matmul(mode: Watch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute a product ``x @ W`` with a parameter W, and note it as a use with swapped sides.

    ``x @ W`` is a linear layer with the weight ``W^T``, so the roles of ``a`` and ``g`` are exchanged
    for the rule: the gradient ``a^T g`` of W ``[d, p]`` comes out in the order of the parameter. Of
    ``x @ W.T`` the transpose is recognised, and it is a linear layer as it stands.
    """
    x, weight = bind(args, kwargs, "input other")
    if mode.levels is not None and id(weight) in mode.turned:
        _, original = mode.turned[id(weight)]
        with mode:
            return functional.linear(x, original)
    names = mode.names_of(weight)
    if names is None or mode.levels is None or weight.ndim != 2 or x.ndim < 2:
        return NotImplemented
    a = mode.levels.physical(x)
    w = mode.levels.by_candidate(weight).detach()
    lead = a.shape[:2]
    inputs = w.shape[1]
    outputs = w.shape[2]
    with temporarily_clear_interpreter_stack():
        rows = a.reshape(lead[0], -1, inputs)
        y = torch.bmm(rows, w).view(*lead, -1, outputs)
        inputs_seen = rows.detach().view(*lead, -1, inputs)
    use = ProductUse(str(names[0]))

    def back(g: torch.Tensor) -> Back:
        """Return the use of W: output gradients ``[K, B, T, p]`` and inputs ``[K, B, T, d]``, swapped."""
        return [(use, (g, inputs_seen))]

    out = mode.put(names, y, back)
    return out.view(*x.shape[:-1], outputs)


def _addmm(mode: Watch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute ``addmm`` as a product and a sum, so that the handler of products notes its weight.

    GPT-2's layers are calls of it. With other factors than 1 torch's own form is left as it is.
    """
    added, x, weight, beta, alpha = bind(
        args,
        kwargs,
        "input mat1 mat2",
        beta=1,
        alpha=1,
    )
    is_parameter = mode.names_of(weight) is not None or id(weight) in mode.turned
    if not is_parameter or (beta, alpha) != (1, 1):
        return NotImplemented
    with mode:
        return torch.matmul(x, weight) + added


def _conv(
    mode: Watch,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    axes: int,
) -> Any:
    """Compute a convolution along one or two axes for all candidates, and note the use of its weight.

    What it cannot write as patches (a padding ``"same"`` of two unequal sides) runs as it is, and the
    weight is copied for each record. An input without a batch axis is given one, as torch does.

    Args:
        mode: The watch.
        args: The call's arguments: input ``[N, C, H, W]`` (``[N, C, W]``), weight, bias, windows.
        kwargs: Those that it has by name.
        axes: 1 or 2.
    """
    defaults = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    x, weight, bias, *rest, groups = bind(args, kwargs, "input weight", **defaults)
    names = mode.names_of(weight, bias)
    if mode.adds(weight, bias):
        run: Any = functional.conv1d if axes == 1 else functional.conv2d
        with mode:
            y = run(x, weight, None, *rest, groups)
            return y + bias.view(-1, *(1,) * axes)
    if names is None or mode.levels is None:
        return NotImplemented
    levels = mode.levels
    kernel = tuple(weight.shape[2:])
    stride, padding, dilation = _windows(kernel, *rest, axes=axes)
    if stride is None:
        return NotImplemented
    a = levels.physical(x)
    w = levels.by_candidate(weight).detach()
    b = None
    if bias is not None:
        b = levels.by_candidate(bias).detach()
    batched = x.ndim == axes + 2
    with temporarily_clear_interpreter_stack():
        if not batched:
            a = a.unsqueeze(2)
        if axes == 1:
            a = a.unsqueeze(-2)
            w = w.unsqueeze(-2)
            kernel = (1, *kernel)
        images = a.flatten(1, 2)
        windows = (list(stride), list(padding), list(dilation), groups)
        y = _convolved(images, w, b, windows)
        y = y.view(*a.shape[:3], *y.shape[2:])
        look = Windows(kernel, stride, padding, dilation, (y.shape[-2], y.shape[-1]))
        use = ProductUse(
            str(names[0]),
            names[1],
            taps=look.taps,
            depth=w.shape[2],
            groups=groups,
            windows=look,
        )
        images_seen = a.detach()

    def back(g: torch.Tensor) -> Back:
        """Return the use of the weight: images, and output gradients ``[K, B, n H' W', O]``."""
        channels_last = g.permute(0, 1, 2, 4, 5, 3)
        rows = channels_last.reshape(*g.shape[:2], -1, g.shape[3])
        return [(use, (images_seen, rows))]

    wrapped = mode.put(names, y, back)
    if axes == 1:
        wrapped = wrapped.squeeze(-2)
    if batched:
        return wrapped
    return wrapped.squeeze(0)


def _group_norm(mode: Watch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute a group norm by torch's own kernel for each candidate, and note the use of its parameters.

    Under ``vmap`` torch normalises without weights, in another layout than that of convolutions, and
    weighs copies for each record. Gradients of a weight are those that torch computes on the way back
    (``sum g x^``, with ``x^`` what is normalised), before it adds them up over records.
    """
    x, groups, weight, bias, eps = bind(
        args,
        kwargs,
        "input num_groups",
        weight=None,
        bias=None,
        eps=1e-5,
    )
    names = mode.names_of(weight, bias)
    if names is None or mode.levels is None or x.ndim < 3:
        return NotImplemented
    a = mode.levels.physical(x)
    w = mode.levels.by_candidate(weight).detach()
    biases: Sequence[torch.Tensor | None] = [None] * len(a)
    if bias is not None:
        biases = mode.levels.by_candidate(bias).detach().unbind()
    lead = a.shape[:3]
    channels = a.shape[3]
    places = math.prod(a.shape[4:])
    sizes = (lead[1] * lead[2], channels, places)
    with temporarily_clear_interpreter_stack():
        of_images = a.ndim == 6
        parts = []
        for rows, factors, shifts in zip(a.flatten(1, 2), w, biases, strict=True):
            images = _channels_last(rows) if of_images else rows
            normed = torch.native_group_norm(images, factors, shifts, *sizes, groups, eps)
            parts.append(normed)
        outputs, means, inverses = zip(*parts, strict=True)
        joined = _joined([*outputs]) if of_images else torch.stack(outputs)
        y = joined.view(a.shape)
        by_channel = (*lead, groups, 1)
        mean = torch.stack(means).detach().view(by_channel)
        inverse = torch.stack(inverses).detach().view(by_channel)
    seen = a.detach()

    def back(g: torch.Tensor) -> Back:
        """Return the uses of weight and bias, each with its gradients ``[K, B, C]``."""
        of_bias = g.flatten(4).sum(dim=4)
        products = (g * seen).flatten(4).sum(dim=4)
        grouped = (*lead, groups, channels // groups)
        moved = products.view(grouped) - mean * of_bias.view(grouped)
        of_weight = (moved * inverse).view(*lead, channels).sum(dim=2)
        uses: Back = [(DirectUse(str(names[0])), (of_weight,))]
        if names[1] is not None:
            uses.append((DirectUse(names[1]), (of_bias.sum(dim=2),)))
        return uses

    return mode.put(names, y, back)


def _embedding(mode: Watch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Look up indices ``[K, B, ...]`` in each candidate's table, and note the use of the table.

    ``max_norm`` writes to the table, and a frequency counts words of other records: neither is caught
    here, and ``refuse_coupling`` refuses both in layers. At a filler (``padding_idx``) torch gives no
    gradient, and so does the rule; what is looked up there is the same.
    """
    defaults = {"max_norm": None, "norm_type": 2.0, "scale_grad_by_freq": False, "sparse": False}
    index, weight, padding, max_norm, _, by_frequency, _ = bind(
        args,
        kwargs,
        "input weight",
        padding_idx=None,
        **defaults,
    )
    names = mode.names_of(weight)
    if mode.levels is None or max_norm is not None or by_frequency:
        return NotImplemented
    if names is None:
        if padding is None or not mode.levels.of_record(weight):
            return NotImplemented
        # Of a table that was copied for each record, torch would let rows that fill up have a gradient.
        rows = functional.embedding(index, weight)
        filler = padding % len(weight)
        is_filler = (index == filler).unsqueeze(-1)
        return torch.where(is_filler, rows.detach(), rows)
    levels = mode.levels
    a = levels.physical(index)
    w = levels.by_candidate(weight).detach()
    with temporarily_clear_interpreter_stack():
        shape = a.shape
        a = a.reshape(*shape[:2], -1)
        words = w.shape[1]
        stack = torch.arange(shape[0], device=a.device).view(-1, 1, 1)
        # A negative index would count from the end of the table here, and raise only later, in the
        # sums. Sent beyond the end it raises here, as in plain torch.
        places = torch.where(a < 0, words, a)
        y = w[stack, places]
        if padding is not None and padding < 0:
            padding += words
    use = EmbeddingUse(str(names[0]), rows=words)

    def back(g: torch.Tensor) -> Back:
        """Return the use of the table: indices, and output gradients that are 0 at padding indices."""
        if padding is not None:
            is_filler = (a == padding).unsqueeze(-1)
            g = g.masked_fill(is_filler, 0.0)
        return [(use, (a, g))]

    wrapped = mode.put(names, y, back)
    return wrapped.view(*index.shape, w.shape[-1])


def _embedding_bag(mode: Watch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute an embedding bag as a look-up, then a sum, mean or maximum without padding indices.

    Written so, the look-up is one that is caught. Bags by offsets have lengths that hang on the data,
    and are left to torch.
    """
    defaults = {"offsets": None, "max_norm": None, "norm_type": 2.0, "scale_grad_by_freq": False}
    more = {"sparse": False, "per_sample_weights": None, "include_last_offset": False}
    index, weight, offsets, max_norm, _, by_frequency, how, _, weights, _, padding = bind(
        args,
        kwargs,
        "input weight",
        **defaults,
        mode="mean",
        **more,
        padding_idx=None,
    )
    plain = offsets is None and max_norm is None and not by_frequency and index.ndim == 2
    if mode.levels is None or not plain:
        return NotImplemented
    with mode:
        rows = functional.embedding(index, weight, padding)
    if weights is not None:
        rows = rows * weights.unsqueeze(-1)
    if padding is None:
        method = "amax" if how == "max" else how
        return getattr(rows, method)(dim=1)
    filler = padding % len(weight)
    is_word = (index != filler).unsqueeze(-1)
    if how == "max":
        words_alone = rows.masked_fill(~is_word, float("-inf"))
        largest = words_alone.amax(dim=1)
        return torch.where(is_word.any(dim=1), largest, 0.0)
    total = (rows * is_word).sum(dim=1)
    if how == "sum":
        return total
    words = is_word.sum(dim=1)
    return total / words.clamp(min=1)


def _weight_norm(mode: Watch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute weight normalisation ``g v / |v|`` from plain operations, which run under ``vmap``.

    ``w = g v / |v|`` (Salimans, Kingma 2016, arXiv 1602.07868), the norm over all axes but ``dim``.
    The result is no parameter, so ``v`` and ``g`` are copied for each record.
    """
    # v as the weight, g [out, 1, ...] with axes of 1 beside `dim`.
    v, g, dim = bind(args, kwargs, "v g", dim=0)
    if mode.levels is None:
        return NotImplemented
    others = list(range(v.ndim))
    if dim != -1:
        others.remove(dim % v.ndim)
    norm = torch.linalg.vector_norm(v, dim=others, keepdim=True)
    return v * (g / norm)


def _cross_entropy(mode: Watch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute the cross-entropy of few classes over all candidates and records at once.

    Only for one number a record (``reduction="none"``), without weights and smoothing; else torch's
    own runs.
    """
    defaults = {"size_average": None, "ignore_index": -100, "reduce": None, "reduction": "mean"}
    logits, targets, weight, _, ignored, _, reduction, smoothing = bind(
        args,
        kwargs,
        "input target",
        weight=None,
        **defaults,
        label_smoothing=0.0,
    )
    plain = reduction == "none" and weight is None and smoothing == 0.0
    # Where no use is caught (`copy_all`), the loss may take gradients itself: plain torch serves it.
    if mode.levels is None or not mode.names:
        return NotImplemented
    if not plain or logits.ndim != 2 or targets.is_floating_point():
        return NotImplemented
    z = mode.levels.physical(logits)
    t = mode.levels.physical(targets)
    with temporarily_clear_interpreter_stack():
        # What is below 0 occurs in no targets that are all classes.
        if ignored < 0 and mode.all_classes(t):
            ignored = None
        losses = cross_entropy(z, t, ignored=ignored)
    if losses is None:
        return NotImplemented
    return mode.levels.wrap(losses)


def _attention(mode: Watch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute attention: by torch's fused kernel, or by its formula where weights are dropped.

    Dropout on the weights of attention needs a mask of this candidate's stream, which the fused
    kernel does not take. Heads that share keys and values (``enable_gqa``) have these repeated.
    """
    defaults = {"dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    q, k, v, mask, p, causal, scale, grouped = bind(
        args,
        kwargs,
        "query key value",
        attn_mask=None,
        **defaults,
    )
    p = 0.0 if mode.deterministic else p
    if mode.levels is None and p == 0.0:
        return NotImplemented
    if grouped and q.shape[-3] != k.shape[-3]:
        heads_a_group = q.shape[-3] // k.shape[-3]
        k = k.repeat_interleave(heads_a_group, dim=-3)
        v = v.repeat_interleave(heads_a_group, dim=-3)
    if mode.levels is not None and p == 0.0:
        return _fused(
            mode.levels,
            q,
            k,
            v,
            mask,
            is_causal=causal,
            scale=scale,
        )
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.matmul(q, k.transpose(-1, -2)) * factor
    if causal:
        places = scores.shape[-2:]
        everywhere = torch.ones(places, dtype=torch.bool, device=scores.device)
        later = ~everywhere.tril()
        scores = scores.masked_fill(later, float("-inf"))
    if mask is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, float("-inf"))
        else:
            scores = scores + mask
        # As torch has it, a place that sees no other, a padded one, gets zeros: not NaN, for which its
        # record would count as none.
        blind = (scores == float("-inf")).all(dim=-1, keepdim=True)
        scores = scores.masked_fill(blind, 0.0)
        weights = torch.softmax(scores, dim=-1)
        weights = weights.masked_fill(blind, 0.0)
    weights = mode.drop(weights, p, weights.shape)
    return torch.matmul(weights, v)


def _fused(
    levels: Levels,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    **how: Any,
) -> Any:
    """Run torch's fused attention on the tensors of all candidates and records at once.

    Tensors are ``[K, B, ..., heads, places, features]``; leading axes are made one, as the kernel
    takes four. Leading axes that a tensor lacks are expanded as a view.

    Args:
        levels: Where the axes of candidates and records live.
        q: Queries.
        k: Keys.
        v: Values.
        mask: Which places are seen, or what is added to their scores; None for all.
        **how: ``is_causal`` and ``scale``, as torch takes them.
    """
    arguments = [q, k, v]
    if mask is not None:
        arguments.append(mask)
    tensors = [levels.physical(part) for part in arguments]
    most = max(part.ndim for part in tensors)
    # Candidates, records, and what torch has a fast kernel for: heads, places, features.
    axes = max(most, 5)
    lead_axes = (slice(None),) * 2
    with temporarily_clear_interpreter_stack():
        wide = []
        for part in tensors:
            # New axes of 1 behind those of candidates and records.
            further_axes = (None,) * (axes - part.ndim)
            wide.append(part[lead_axes + further_axes])
        shapes = [part.shape[:-2] for part in wide]
        lead = [max(sizes) for sizes in zip(*shapes, strict=True)]
        parts = []
        for part in wide:
            expanded = part.expand(*lead, *part.shape[-2:])
            parts.append(expanded.flatten(0, -4))
        queries, keys, values, *masks = parts
        how["attn_mask"] = masks[0] if masks else None
        out = functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            **how,
        )
        out = out.view(*lead, *out.shape[-2:])
        further_axes_of_one = (0,) * (axes - most)
        out = out[lead_axes + further_axes_of_one]
    return levels.wrap(out)


def _multi_head(mode: Watch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run torch's multi-head attention as separate operations, so that their uses are noted.

    Under a mode torch calls an override in place of the composite, which would hide its products.
    """
    with mode:  # it is made of other operations, which are to be caught
        return _open_multi_head(*args, **kwargs)


def _recurrent(
    mode: Watch,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    cell: Cell,
) -> Any:
    """Compute a recurrent layer step by step from plain products, so that their uses are noted.

    torch's kernels of recurrent layers do not run under ``vmap``. Written as a loop, the product with
    the inputs is one call for all places, and those with the state are one each; a weight is used T
    times, and ``merged`` makes one use of all. Results are torch's own but for rounding.

    Args:
        mode: The watch.
        args: The call's arguments, as torch passes them: inputs ``[T, ..., d]`` with places first,
            unless ``batch_first`` is set, the first states, weights, and settings.
        kwargs: Those that it has by name.
        cell: Takes one step, from what the inputs add, the state, and a layer's weights.

    Returns:
        The hidden states of all places, then the last states ``[layers * ways, ..., H]``, as torch's.
    """
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
                is_forward = way == 0
                start = number * each
                layer_weights = tuple(weights[start : start + each])
                bias = layer_weights[2] if biased else None
                state = tuple(s[number] for s in states)
                by_inputs = functional.linear(places, layer_weights[0], bias)
                inputs = by_inputs.unbind(0)
                if not is_forward:
                    inputs = inputs[::-1]
                hidden = []
                for place in inputs:
                    state = cell(place, state, layer_weights)
                    hidden.append(state[0])
                if not is_forward:
                    hidden.reverse()
                outputs.append(torch.stack(hidden))
                last.append(state)
            places = torch.cat(outputs, dim=-1)
        ends = [torch.stack(parts) for parts in zip(*last, strict=True)]
    if batch_first:
        places = places.transpose(0, 1)
    return (places, *ends)


def _by_state(h: torch.Tensor, weights: Tensors) -> torch.Tensor:
    """Return what the hidden state ``[..., H]`` adds to the gates of a recurrent cell.

    Weights are those of one layer and way in torch's order: inputs, state, then two biases if there
    are any.
    """
    biased = len(weights) > 3
    bias = weights[3] if biased else None
    return functional.linear(h, weights[1], bias)


def _lstm_cell(x: torch.Tensor, states: Tensors, weights: Tensors) -> Tensors:
    """Take one step of an LSTM, from ``(h, c)`` to the next (Hochreiter, Schmidhuber 1997).

    torch's order of gates: input, forget, cell, output, ``[..., 4 H]``. A projection makes ``h``
    shorter than ``c``.
    """
    h, c = states
    gates = x + _by_state(h, weights)
    i, f, g, o = gates.chunk(4, dim=-1)
    # c' = sigmoid(f) c + sigmoid(i) tanh(g), and h' = sigmoid(o) tanh(c').
    remembered = torch.sigmoid(f) * c
    c = remembered + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    if len(weights) in (3, 5):  # a projection of the state
        h = functional.linear(h, weights[-1])
    return h, c


def _gru_cell(x: torch.Tensor, states: Tensors, weights: Tensors) -> Tensors:
    """Take one step of a GRU in torch's form, with the reset gate after the product with the state.

    Cho et al. 2014 have the gate before the product. ``(1 - z) n + z h`` is written
    ``n + z (h - n)``.
    """
    (h,) = states
    reset, update, fresh = x.chunk(3, dim=-1)
    by_reset, by_update, by_fresh = _by_state(h, weights).chunk(3, dim=-1)
    reset = torch.sigmoid(reset + by_reset)
    update = torch.sigmoid(update + by_update)
    fresh = torch.tanh(fresh + reset * by_fresh)
    return (fresh + update * (h - fresh),)


def _simple_cell(
    x: torch.Tensor,
    states: Tensors,
    weights: Tensors,
    *,
    squash: Any,
) -> Tensors:
    """Take one step of a plain recurrent layer, ``h' = squash(W x + U h + b)``.

    ``h' = squash(W x + U h + b)``, with tanh or relu (Elman 1990).
    """
    (h,) = states
    return (squash(x + _by_state(h, weights)),)


def _windows(
    kernel: Sequence[int],
    stride: Any,
    padding: Any,
    dilation: Any,
    *,
    axes: int,
) -> tuple[Any, Any, Any]:
    """Return stride, padding and dilation of a convolution as pairs; Nones for an unsupported padding.

    ``"same"`` needs ``dilation (kernel - 1)`` zeros along an axis, half of them on either side.

    Args:
        kernel: Sizes of the kernel along its axes.
        stride: As torch takes it: a number, or one for each axis.
        padding: Likewise, or ``"same"`` or ``"valid"``.
        dilation: Likewise.
        axes: 1 or 2; along one axis, images have a height of 1.
    """

    def pair(value: Any, fill: int) -> tuple[int, int]:
        """Return a setting as a pair for height and width; of one axis, the height gets ``fill``."""
        values = [value] if isinstance(value, int) else list(value)
        if len(values) < axes:
            values = values * axes
        if axes == 1:
            return (fill, values[0])
        return (values[0], values[1])

    steps = pair(stride, 1)
    spread = pair(dilation, 1)
    if not isinstance(padding, str):
        return steps, pair(padding, 0), spread
    if padding == "valid":
        return steps, (0, 0), spread
    if padding != "same":
        return None, None, None
    sizes = kernel if axes == 2 else (1, *kernel)
    total_h = spread[0] * (sizes[0] - 1)
    total_w = spread[1] * (sizes[1] - 1)
    if total_h % 2 or total_w % 2:  # torch fills up one side more than the other
        return None, None, None
    half = (total_h // 2, total_w // 2)
    return steps, half, spread


def _without_override(func: Any) -> Any:
    """Return a copy of a torch function that skips its check for overrides.

    The composite asks whether some argument has an override, and a mode counts as one: it would go
    round for ever.
    """
    scope = {**func.__globals__, "has_torch_function": lambda _: False}
    copy = FunctionType(
        func.__code__,
        scope,
        func.__name__,
        func.__defaults__,
        func.__closure__,
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


_open_multi_head = _without_override(functional.multi_head_attention_forward)


@dataclass(eq=False)
class Intercept(Watch):
    """A watch that also computes operations with a gradient rule on all candidates and records.

    It adds to a ``Watch``, which knows of draws alone, the operations that a rule covers. An
    operation that is not in the table runs as it is; a parameter that it uses is then found by
    autograd and copied.
    """

    handlers: ClassVar[Mapping[Any, Handler]] = {
        **DRAWS,
        functional.linear: _linear,
        **dict.fromkeys((torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm), _matmul),
        torch.addmm: _addmm,
        functional.conv1d: partial(_conv, axes=1),
        functional.conv2d: partial(_conv, axes=2),
        functional.group_norm: _group_norm,
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
