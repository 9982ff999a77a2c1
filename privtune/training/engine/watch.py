"""Watching a model run on one record: what it does with parameters, and where it draws random numbers.

The model runs under two nested ``vmap``: over candidates and over records. That is its meaning: it sees one
record, as a batch of one, so that records cannot touch each other. A :class:`Watch` catches operations that
use a parameter in a known way and computes them on the physical tensors of all candidates and records, with
the parameter cut off from autograd; how to make its gradient of what comes back is noted. All else runs as it
is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import nn
from torch._C import _functorch as functorch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn import functional
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from privtune.errors import InvalidInputError
from privtune.training.engine.compute import is_autocasting
from privtune.training.engine.rules import DirectUse, Tensors, Use
from privtune.training.mechanism.kernel import Apart

Law = Literal["keep", "uniform", "normal", "integers", "permutation"]


@dataclass(frozen=True)
class Site:
    """A place where a model or a loss draws: dropout, and the random numbers of augmentation."""

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
    """One use of parameters: what came out, and what to make of the gradient of that."""

    names: tuple[str, ...]
    out: torch.Tensor  # [K, B, ...]
    version: int  # of `out` when it was noted: a model must not write to it
    back: Callable[[torch.Tensor], list[tuple[Use, Tensors]]]


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

    def of_record(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor differs by record."""
        batched = functorch.is_batchedtensor(tensor)
        return batched and functorch.maybe_get_level(tensor) == self.records

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


# What reads values without a call that a recording would see.
_READ = frozenset({torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__})

_TRAINED, _MADE_BY = torch.Tensor.requires_grad, torch.Tensor.grad_fn
_TURNS = frozenset({torch.Tensor.T, torch.Tensor.mT, torch.Tensor.t, torch.t})

# Activations, and where their argument ``inplace`` stands.
_IN_PLACE: Mapping[Any, int] = {
    getattr(functional, name): place
    for place, names in (
        (1, "relu relu6 selu silu mish hardswish hardsigmoid"),
        (2, "elu celu leaky_relu"),
        (3, "hardtanh threshold"),
    )
    for name in names.split()
}


# Calls that use a parameter element by element: its gradient is a sum over places, and a copy of it for every
# record is a view. "radd" and the like are calls by operators.
_ELEMENT_BY_ELEMENT = frozenset({
    "add", "radd", "iadd", "sub", "rsub", "mul", "rmul", "imul", "div", "truediv", "rtruediv", "true_divide",
    "where", "lerp", "cat", "concat", "concatenate", "stack", "layer_norm", "rms_norm", "group_norm",
    "instance_norm", "batch_norm", "prelu", "minimum", "maximum", "masked_fill", "copy",
})  # fmt: skip

Handler = Callable[["Watch", Sequence[Any], Mapping[str, Any]], Any]
"""Computes a call of torch, or returns ``NotImplemented`` to let it run as it is."""


class _Active(threading.local):
    """The watch of this thread: a layer that has a rule of its own notes its use there."""

    watch: Watch | None = None


ACTIVE = _Active()


@dataclass(eq=False)
class Watch(TorchFunctionMode):
    """Catches uses of parameters and draws while a model runs on one record."""

    levels: Levels | None  # None outside of vmap, where only draws are caught
    names: Mapping[int, str] = field(
        default_factory=dict
    )  # of parameters, by id of what stands for them
    masks: Sequence[torch.Tensor] | None = (
        None  # drawn for each place; None to note the places in `sites`
    )
    deterministic: bool = False  # dropout passes on, and whatever else is drawn is its mean
    generator: torch.Generator | None = None  # draws at every place where there are no masks
    classes: torch.Tensor | None = None  # the targets [K, B, ...], if each is a class: at least 0
    entries: list[Entry] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    multiplied: set[str] = field(
        default_factory=set
    )  # uncaught, and by more than element by element
    # Transposes of parameters that are matrices, and these, by the id of the transpose.
    turned: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    _made_of: dict[int, tuple[torch.Tensor, set[str]]] = field(default_factory=dict)
    _outer: list[Watch | None] = field(default_factory=list)

    handlers: ClassVar[Mapping[Any, Handler]] = {}

    def __post_init__(self) -> None:
        super().__init__()

    def __enter__(self) -> Watch:
        self._outer.append(ACTIVE.watch)  # handlers enter again, within
        ACTIVE.watch = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        ACTIVE.watch = self._outer.pop()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Route one call; anything without a handler, or not in a known form, runs as it is."""
        kwargs, read = kwargs or {}, getattr(func, "__self__", None)
        if self.levels is not None:
            if is_autocasting():
                raise RuntimeError("autocast inside: leave it out, and pass precision='bfloat16'")
            if func is torch.Tensor.register_hook:
                raise RuntimeError("a hook on a gradient would see all records at once")
            if func is torch.Tensor.requires_grad_ and functorch.is_batchedtensor(args[0]):
                return args[0]  # whose gradient goes on in any case
            if read is _MADE_BY:  # under vmap there is none, and a hook on it would be left out
                raise RuntimeError("what reads grad_fn would see all records at once")
            if read is _TRAINED and len(args) == 1:
                # Under vmap no tensor says so, and what a model does only if it is would be left out.
                return id(args[0]) in self.names or self.levels.physical(args[0]).requires_grad
        if func in _READ:
            torch.equal(args[0], args[0])  # tells a recording that a value is read
        if func in _IN_PLACE and self.generator is None:
            args, kwargs = _out_of_place(args, kwargs, _IN_PLACE[func])
        handler = self.handlers.get(func)
        if handler is not None:
            result = handler(self, args, kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if (func in _TURNS or read in _TURNS) and id(args[0]) in self.names and args[0].ndim == 2:
            self.turned[id(result)] = result, args[0]
        planned = self.masks is not None  # what a plan asks for is known by then
        if self.levels is not None and not planned and torch.is_tensor(result):
            self._follow(func, (*args, *kwargs.values()), result)
        return result

    def _follow(self, func: Any, given: Sequence[Any], result: torch.Tensor) -> None:
        """Note which parameters a result is made of, or how they met what is made of records."""
        held = set[str]()
        for part in given:
            for tensor in part if isinstance(part, tuple | list) else (part,):
                if id(tensor) in self.names:
                    held.add(self.names[id(tensor)])
                elif id(tensor) in self._made_of:
                    held |= self._made_of[id(tensor)][1]
        if held and self.levels is not None:
            if not self.levels.of_record(result):
                self._made_of[id(result)] = result, held
            elif getattr(func, "__name__", "").strip("_") not in _ELEMENT_BY_ELEMENT:
                self.multiplied |= held

    def names_of(self, *tensors: Any) -> tuple[str | None, ...] | None:
        """Return the names of a weight and its bias, or None if this is not a use to catch."""
        if self.levels is None:
            return None
        found = tuple(None if t is None else self.names.get(id(t)) for t in tensors)
        if found[0] is None or any(
            t is not None and n is None for t, n in zip(tensors, found, strict=True)
        ):
            return None
        return found

    def adds(self, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Say whether the bias of an operation is trained, and its weight is not: then it is added apart."""
        return self.levels is not None and id(weight) not in self.names and id(bias) in self.names

    def all_classes(self, targets: torch.Tensor) -> bool:
        """Say whether physical targets are those that are known to be classes, not made from them."""
        known = self.classes
        return (
            known is not None and known.untyped_storage()._cdata == targets.untyped_storage()._cdata
        )

    def put(
        self,
        names: Sequence[str | None],
        out: torch.Tensor,
        back: Callable[[torch.Tensor], list[tuple[Use, Tensors]]],
    ) -> torch.Tensor:
        """Note a use of parameters and return its output for the model to go on with."""
        if self.levels is None:
            raise RuntimeError("a use of a parameter was caught outside of vmap")
        with temporarily_clear_interpreter_stack():
            if not out.requires_grad:
                out.requires_grad_()
            known = tuple(name for name in names if name is not None)
            self.entries.append(Entry(known, out, out._version, back))
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


def bind(
    args: Sequence[Any], kwargs: Mapping[str, Any], required: str, /, **defaults: Any
) -> list[Any]:
    """Return the arguments of a call, in the order of their names."""
    names = [*required.split(), *defaults]
    given = {**defaults, **kwargs, **dict(zip(names, args, strict=False))}
    return [given[name] for name in names]


def _out_of_place(
    args: Sequence[Any], kwargs: Mapping[str, Any], place: int
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Turn ``inplace`` off: an output on the tape must stay what the operation gave."""
    if len(args) > place:
        return (*args[:place], False, *args[place + 1 :]), kwargs
    return args, {**kwargs, "inplace": False}


def _dropout(
    mode: Watch, args: Sequence[Any], kwargs: Mapping[str, Any], *, channels: bool = False
) -> Any:
    x, p, training, _ = bind(args, kwargs, "input", p=0.5, training=True, inplace=False)
    shape = (*x.shape[:2], *(1 for _ in x.shape[2:])) if channels else x.shape
    return mode.drop(x, p, shape) if training else x


def _size_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    size = kwargs.get("size", args[0] if len(args) == 1 else args)
    return (int(size),) if isinstance(size, int) else tuple(int(n) for n in size)


def _made(
    mode: Watch, site: Site, kwargs: Mapping[str, Any], like: torch.Tensor | None = None
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


def _new(mode: Watch, args: Sequence[Any], kwargs: Mapping[str, Any], *, law: Law) -> Any:
    return _made(mode, Site(_size_of(args, kwargs), law), kwargs)


def _like(mode: Watch, args: Sequence[Any], kwargs: Mapping[str, Any], *, law: Law) -> Any:
    (x,) = bind(args, kwargs, "input")
    return _made(mode, Site(tuple(x.shape), law), kwargs, x)


def _randint(mode: Watch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    given = [a for a in args if isinstance(a, int)]
    low, high = (given[0], given[1]) if len(given) == 2 else (kwargs.get("low", 0), None)
    high = high or kwargs.get("high") or given[0]
    sizes = [a for a in args if not isinstance(a, int)]
    size = _size_of(sizes, kwargs)
    return _made(mode, Site(size, "integers", low=int(low), high=int(high)), kwargs)


def _randperm(mode: Watch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    (n,) = bind(args, kwargs, "n")
    return _made(mode, Site((int(n),), "permutation"), kwargs)


def _bernoulli(mode: Watch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    p, chance = bind(args, kwargs, "input", p=None)
    value = _made(mode, Site(tuple(p.shape), "uniform"), kwargs, p)
    if value is NotImplemented:
        return value
    return (value < (p if chance is None else chance)).to(p.dtype)


def _in_place(mode: Watch, args: Sequence[Any], kwargs: Mapping[str, Any], *, method: str) -> Any:
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


# The function that torch calls for a checkpoint, whoever holds a reference to `checkpoint`.
_CHECKPOINT: Any = getattr(checkpoint, "__wrapped__", checkpoint)


def _checkpoint(part: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a part once where a watch looks on: run again on the way back, it would draw other numbers."""
    if ACTIVE.watch is None:
        usual: Any = torch._dynamo.disable(_CHECKPOINT)  # type: ignore[no-untyped-call]
        return usual(part, *args, **kwargs)
    own = {*signature(_CHECKPOINT).parameters, "preserve_rng_state"}
    return part(*args, **{name: value for name, value in kwargs.items() if name not in own})


_CHECKPOINT.__dynamo_disable = _checkpoint


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
