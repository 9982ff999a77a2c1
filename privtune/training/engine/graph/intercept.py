"""Watching a model run on one record, and routing what it does with its parameters.

The model runs under two nested ``vmap``: over candidates and over records. That is its meaning: it
sees one record, as a batch of one, so that records cannot touch each other. This mode catches the
operations that use a parameter in a known way and computes them on the physical tensors of all
candidates and records, with the parameter cut off from autograd; what went in and what came out
goes onto a tape. Everything else runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Literal

import torch
from torch._C import _functorch as functorch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from privtune.training.engine.layers.fastops import cross_entropy, stacked_conv2d
from privtune.training.engine.layers.recurrent import Tensors, run_gru, run_lstm, run_simple
from privtune.training.engine.layers.uses import ConvUse, EmbeddingUse, LinearUse, Use, cheaper_form

__all__ = ["Entry", "Intercept", "Levels", "Site"]


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


Handler = Callable[["Intercept", Sequence[Any], Mapping[str, Any]], Any]


@dataclass(eq=False)
class Intercept(TorchFunctionMode):
    """Catches uses of parameters and dropout while a model runs on one record.

    Args:
        levels: Where the batch axes live; None outside of ``vmap``, where only dropout is caught.
        names: Name of each parameter, by the ``id`` of the tensor that stands for it.
        masks: What was drawn for each place; None to note the places in ``sites``.
        deterministic: Whether dropout passes its input on, as in evaluation, and whatever else is
            drawn is its mean.
        generator: Draws at every place, where there are no masks: for code that runs as it is.
        all_classes: Whether every target is a class, none of them an index to ignore.
    """

    levels: Levels | None
    names: Mapping[int, str] = field(default_factory=dict)
    masks: Sequence[torch.Tensor] | None = None
    deterministic: bool = False
    generator: torch.Generator | None = None
    all_classes: bool = False
    entries: list[Entry] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Route one call; anything without a handler, or not in a known form, runs as it is."""
        kwargs = kwargs or {}
        if func in _IN_PLACE and self.generator is None:
            args, kwargs = _out_of_place(args, kwargs, _IN_PLACE[func])
        handler = _HANDLERS.get(func)
        if handler is not None:
            result = handler(self, args, kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)

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


def _linear(mode: Intercept, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    x, weight, bias = _bind(args, kwargs, ("input", "weight", "bias"), (None,))
    found = mode.names_of(weight, bias)
    if found is None or mode.levels is None:
        return NotImplemented
    levels = mode.levels
    a, w = levels.physical(x), levels.by_candidate(weight).detach()
    b = None if bias is None else levels.by_candidate(bias).detach()
    with temporarily_clear_interpreter_stack():
        lead, (outputs, inputs) = a.shape[:-1], w.shape[1:]
        a = a.reshape(*lead[:2], -1, inputs)
        rows = a.flatten(1, 2)
        y = torch.bmm(rows, w.mT) if b is None else torch.baddbmm(b.unsqueeze(1), rows, w.mT)
        y = y.view(*lead[:2], -1, outputs)
        form = cheaper_form(a.shape[2], inputs, outputs, rows=lead[0] * lead[1])
    wrapped = mode.put(LinearUse(str(found[0]), found[1], form), a, y)
    return wrapped.view(*x.shape[:-1], outputs)


def _conv2d(mode: Intercept, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return _conv(mode, args, kwargs, 2)


def _conv1d(mode: Intercept, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return _conv(mode, args, kwargs, 1)


def _conv(mode: Intercept, args: Sequence[Any], kwargs: Mapping[str, Any], axes: int) -> Any:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    x, weight, bias, *rest, groups = _bind(args, kwargs, names, (None, 1, 0, 1, 1))
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
    wrapped = mode.put(use, a, y)
    if axes == 1:
        wrapped = wrapped.squeeze(-2)
    return wrapped if batched else wrapped.squeeze(0)


def _embedding(mode: Intercept, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    names = (
        "input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"
    )  # fmt: skip
    index, weight, padding, max_norm, _, by_frequency, _ = _bind(
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


def _embedding_bag(mode: Intercept, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    names = (
        "input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode",
        "sparse", "per_sample_weights", "include_last_offset", "padding_idx",
    )  # fmt: skip
    index, weight, offsets, max_norm, _, by_frequency, how, _, weights, _, padding = _bind(
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


def _weight_norm(mode: Intercept, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    v, g, dim = _bind(args, kwargs, ("v", "g", "dim"), (0,))
    if mode.levels is None:
        return NotImplemented
    others = [d for d in range(v.ndim) if d != dim % v.ndim] if dim != -1 else list(range(v.ndim))
    return v * (g / torch.linalg.vector_norm(v, dim=others, keepdim=True))


def _dropout(mode: Intercept, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    x, p, training, _ = _bind(
        args, kwargs, ("input", "p", "training", "inplace"), (0.5, True, False)
    )
    return mode.drop(x, p, x.shape) if training else x


def _dropout_channels(mode: Intercept, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    x, p, training, _ = _bind(
        args, kwargs, ("input", "p", "training", "inplace"), (0.5, True, False)
    )
    return mode.drop(x, p, (*x.shape[:2], *(1 for _ in x.shape[2:]))) if training else x


def _cross_entropy(mode: Intercept, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    names = (
        "input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction",
        "label_smoothing",
    )  # fmt: skip
    logits, targets, weight, _, ignored, _, reduction, smoothing = _bind(
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
        losses = cross_entropy(z, t, ignored=None if mode.all_classes else ignored)
    return NotImplemented if losses is None else mode.levels.wrap(losses)


def _attention(mode: Intercept, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    q, k, v, mask, p, causal, scale, grouped = _bind(
        args, kwargs, names, (None, 0.0, False, None, False)
    )
    if mode.levels is None and p == 0.0:
        return NotImplemented
    if grouped and q.shape[-3] != k.shape[-3]:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3)
        v = v.repeat_interleave(q.shape[-3] // v.shape[-3], dim=-3)
    scores = torch.matmul(q, k.transpose(-1, -2)) * (scale or q.shape[-1] ** -0.5)
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    if mask is not None:
        barred = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, float("-inf")) if barred else scores + mask
    weights = torch.softmax(scores, dim=-1)
    return torch.matmul(mode.drop(weights, p, weights.shape), v)


def _size_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    size = kwargs.get("size", args[0] if len(args) == 1 else args)
    return (int(size),) if isinstance(size, int) else tuple(int(n) for n in size)


def _made(
    mode: Intercept, site: Site, kwargs: Mapping[str, Any], like: torch.Tensor | None = None
) -> Any:
    """Draw a new tensor, of the type and device that a call asks for, or of those of ``like``."""
    if kwargs.get("generator") is not None or kwargs.get("out") is not None:
        return NotImplemented  # the caller's own
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


def _rand(mode: Intercept, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return _made(mode, Site(_size_of(args, kwargs), "uniform"), kwargs)


def _randn(mode: Intercept, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return _made(mode, Site(_size_of(args, kwargs), "normal"), kwargs)


def _rand_like(mode: Intercept, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    (x,) = _bind(args, kwargs, ("input",), ())
    return _made(mode, Site(tuple(x.shape), "uniform"), kwargs, x)


def _randn_like(mode: Intercept, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    (x,) = _bind(args, kwargs, ("input",), ())
    return _made(mode, Site(tuple(x.shape), "normal"), kwargs, x)


def _randint(mode: Intercept, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    given = [a for a in args if isinstance(a, int)]
    low, high = (given[0], given[1]) if len(given) == 2 else (kwargs.get("low", 0), None)
    high = high or kwargs.get("high") or given[0]
    sizes = [a for a in args if not isinstance(a, int)]
    size = _size_of(sizes, kwargs)
    return _made(mode, Site(size, "integers", low=int(low), high=int(high)), kwargs)


def _randperm(mode: Intercept, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    (n,) = _bind(args, kwargs, ("n",), ())
    return _made(mode, Site((int(n),), "permutation"), kwargs)


def _bernoulli(mode: Intercept, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    p, chance = _bind(args, kwargs, ("input", "p"), (None,))
    value = _made(mode, Site(tuple(p.shape), "uniform"), kwargs, p)
    if value is NotImplemented:
        return value
    return (value < (p if chance is None else chance)).to(p.dtype)


def _in_place(method: str) -> Handler:
    """Return the handler of a method that fills its tensor with random numbers."""

    def handler(mode: Intercept, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        own = mode.generator
        x = args[0]
        if own is None or kwargs.get("generator") is not None or x.device != own.device:
            return NotImplemented
        return getattr(x, method)(*args[1:], **{**kwargs, "generator": own})

    return handler


def _multi_head(mode: Intercept, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with mode:  # it is made of other operations, which are to be caught
        return _open_multi_head(*args, **kwargs)


def _recurrent(run: Callable[..., Tensors]) -> Handler:
    """Return the handler of a recurrent layer, place by place, where torch's own cannot run."""

    def handler(mode: Intercept, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        names = (
            "input", "hx", "params", "has_biases", "num_layers", "dropout", "train",
            "bidirectional", "batch_first",
        )  # fmt: skip
        x, first, weights, biased, layers, p, train, both_ways, batch_first = _bind(
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

    return handler


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


def _bind(
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


def _out_of_place(
    args: Sequence[Any], kwargs: Mapping[str, Any], place: int
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Turn ``inplace`` off: an output on the tape must stay what the operation gave."""
    if len(args) > place:
        return (*args[:place], False, *args[place + 1 :]), kwargs
    return args, {**kwargs, "inplace": False}


def _without_override(func: Any) -> Any:
    """Copy a composite of torch without its check for overrides, which would call the mode."""
    scope = {**func.__globals__, "has_torch_function": lambda _: False}
    copy = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


_open_multi_head = _without_override(functional.multi_head_attention_forward)

# Activations, and where their argument ``inplace`` stands.
_IN_PLACE: Mapping[Any, int] = {
    functional.relu: 1,
    functional.relu6: 1,
    functional.selu: 1,
    functional.silu: 1,
    functional.mish: 1,
    functional.hardswish: 1,
    functional.hardsigmoid: 1,
    functional.elu: 2,
    functional.celu: 2,
    functional.leaky_relu: 2,
    functional.hardtanh: 3,
    functional.threshold: 3,
}

_FILLING = (
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_",
    "uniform_",
)  # fmt: skip

_HANDLERS: Mapping[Any, Handler] = {
    functional.linear: _linear,
    functional.conv1d: _conv1d,
    functional.conv2d: _conv2d,
    functional.embedding: _embedding,
    functional.embedding_bag: _embedding_bag,
    torch._weight_norm: _weight_norm,
    functional.dropout: _dropout,
    functional.dropout1d: _dropout_channels,
    functional.dropout2d: _dropout_channels,
    functional.cross_entropy: _cross_entropy,
    functional.scaled_dot_product_attention: _attention,
    functional.multi_head_attention_forward: _multi_head,
    torch.lstm: _recurrent(run_lstm),
    torch.gru: _recurrent(run_gru),
    torch.rnn_tanh: _recurrent(run_simple(torch.tanh)),
    torch.rnn_relu: _recurrent(run_simple(torch.relu)),
    torch.rand: _rand,
    torch.randn: _randn,
    torch.rand_like: _rand_like,
    torch.randn_like: _randn_like,
    torch.randint: _randint,
    torch.randperm: _randperm,
    torch.bernoulli: _bernoulli,
    **{getattr(torch.Tensor, method): _in_place(method) for method in _FILLING},
}
