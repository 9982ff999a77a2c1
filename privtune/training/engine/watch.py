"""Watches that follow a model's run on one record: its uses of parameters and its random draws.

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
    """A place where a model or a loss draws random values: dropout or augmentation.

    What is drawn is drawn outside of the pass, by the candidate's own stream, and given to it as a
    tensor: the pass then draws nothing, so it can be captured, repeated and compared.

    Attributes:
        shape: Of what is drawn for one record.
        law: ``keep`` is 1 with a chance and else 0; ``permutation`` an order of the first n numbers.
        low: Least whole number.
        high: One more than the largest.
    """

    shape: tuple[int, ...]
    law: Law = "keep"
    chance: float = 1.0  # of an entry of dropout to stay
    low: int = 0
    high: int = 1

    def empty(self, lead: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Return fixed values in place of drawn ones, shape ``[*lead, *shape]``: mostly the law's mean.

        It stands where nothing may be drawn: in a plan, in an example for a capture, for rows that
        fill up.
        """
        shape = (*lead, *self.shape)
        if self.law == "permutation":
            order = torch.arange(self.shape[0], device=like.device)
            return order.expand(shape).clone()
        if self.law == "integers":
            return torch.full(shape, self.low, device=like.device)
        mean = {"keep": 1.0, "uniform": 0.5, "normal": 0.0}[self.law]
        return torch.full(shape, mean, dtype=like.dtype, device=like.device)

    def fill(self, out: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Draw values for n records of one candidate into ``out``, ``[n, *shape]``, and return it.

        For n records of one candidate; a permutation is the order of n uniform keys.
        """
        if self.law == "keep":
            return out.bernoulli_(self.chance, generator=generator)
        if self.law == "uniform":
            return out.uniform_(generator=generator)
        if self.law == "normal":
            return out.normal_(generator=generator)
        if self.law == "integers":
            return out.random_(self.low, self.high, generator=generator)
        keys = torch.empty(out.shape, device=out.device)
        keys.uniform_(generator=generator)
        return out.copy_(keys.argsort(dim=-1))


@dataclass(frozen=True, eq=False)
class ParameterUse:
    """One use of parameters: the output, and a function from its gradient to per-record gradients.

    Attributes:
        names: Of the weight and its bias, or of all parameters of a layer with a rule.
        back: From the gradient of ``out`` to uses and their parts, for ``rules``.
    """

    names: tuple[str, ...]
    out: torch.Tensor  # [K, B, ...]
    version: int  # of `out` when it was noted: a model must not write to it
    back: Callable[[torch.Tensor], list[tuple[Use, Tensors]]]


@dataclass(frozen=True)
class Levels:
    """The vmap levels of candidates and of records, and the numbers of both.

    Under vmap a tensor of a model looks as that of one record; behind it lies one of all. A handler
    takes off both levels, computes on ``[K, B, ...]`` at once, and puts them on again.
    """

    candidates: int
    records: int
    sizes: tuple[int, int]

    def physical(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor of all candidates and records behind a vmapped one, shape ``[K, B, ...]``.

        What is the same for all records, or all candidates, is expanded as a view: no memory is
        taken.
        """
        return self._unwrap(tensor, (self.records, self.candidates))

    def by_candidate(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor of all candidates behind a vmapped parameter, shape ``[K, ...]``."""
        return self._unwrap(tensor, (self.candidates,))

    def wrap(self, tensor: torch.Tensor) -> torch.Tensor:
        """Wrap a tensor ``[K, B, ...]`` as the vmapped tensor of one record, for the model to go on.

        The model goes on with it, as with an output of torch's own.
        """
        inner = functorch._add_batch_dim(tensor, 0, self.candidates)
        return functorch._add_batch_dim(inner, 0, self.records)

    def of_record(self, tensor: torch.Tensor) -> bool:
        """Say whether a vmapped tensor has a separate value for each record.

        A parameter does not, unless it was copied; what a model makes of parameters alone does not,
        either.
        """
        batched = functorch.is_batchedtensor(tensor)
        return batched and functorch.maybe_get_level(tensor) == self.records

    def _unwrap(self, tensor: torch.Tensor, levels: Sequence[int]) -> torch.Tensor:
        """Return the tensor behind the given vmap levels, with one leading axis for each.

        Args:
            tensor: As a model sees it: each level that it is wrapped in hides an axis.
            levels: The levels to take off, inner ones first.
        """
        # Where each level hides its axis; None where the tensor has none of it.
        places: list[int | None] = []
        for level in levels:
            if functorch.is_batchedtensor(tensor) and functorch.maybe_get_level(tensor) == level:
                places.append(functorch.maybe_get_bdim(tensor))
                tensor = functorch.get_unwrapped(tensor)
            else:
                places.append(None)
        for depth, place in enumerate(reversed(places)):
            if place is not None:
                tensor = tensor.movedim(place + depth, depth)
                continue
            tensor = tensor.unsqueeze(depth)
            sizes = [-1] * tensor.ndim
            sizes[depth] = self.sizes[depth]
            tensor = tensor.expand(sizes)
        return tensor


# What reads values without a call that a recording would see.
_READ = frozenset(
    {
        torch.Tensor.numpy,
        torch.Tensor.tolist,
        torch.Tensor.__array__,
    }
)

_TRAINED = torch.Tensor.requires_grad
_MADE_BY = torch.Tensor.grad_fn
_TURNS = frozenset(
    {
        torch.Tensor.T,
        torch.Tensor.mT,
        torch.Tensor.t,
        torch.t,
    }
)  # what transposes a matrix

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
    """The watch that is active in this thread, None outside of one.

    A layer's ``forward`` has no argument for it, and functorch's levels do not tell which watch is
    meant.
    """

    watch: Watch | None = None


ACTIVE = _Active()


@dataclass(eq=False)
class Watch(TorchFunctionMode):
    """A torch mode that notes uses of parameters and steers random draws while a model runs.

    Three uses are made of it: to plan (``masks`` None: sites and uses are noted), to run (``masks``
    given), and outside of vmap, where ``levels`` is None and only draws are steered: to the mean, or
    to a generator.
    """

    levels: Levels | None  # None outside of vmap, where only draws are caught
    # Of parameters, by id of what stands for them.
    names: Mapping[int, str] = field(default_factory=dict)
    # Drawn for each place; None to note the places in `sites`.
    masks: Sequence[torch.Tensor] | None = None
    deterministic: bool = False  # dropout passes on, and whatever else is drawn is its mean
    generator: torch.Generator | None = None  # draws at every place where there are no masks
    classes: torch.Tensor | None = None  # the targets [K, B, ...], if each is a class: at least 0
    entries: list[ParameterUse] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    # Uncaught, and by more than element by element.
    multiplied: set[str] = field(default_factory=set)
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

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Run one torch call by its handler if it has one, else as it is; refuse unsafe calls.

        Some calls are refused, since under vmap they would do something else than for one record and
        say nothing: a hook would see all records, and ``grad_fn`` and ``requires_grad`` would answer
        for the wrapper. An activation in place would overwrite an output that a rule still needs.
        """
        kwargs = kwargs or {}
        read = getattr(func, "__self__", None)
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
                if id(args[0]) in self.names:
                    return True
                return self.levels.physical(args[0]).requires_grad
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
        is_transpose = func in _TURNS or read in _TURNS
        if is_transpose and id(args[0]) in self.names and args[0].ndim == 2:
            self.turned[id(result)] = (result, args[0])
        has_plan = self.masks is not None  # what a plan asks for is known by then
        if self.levels is not None and not has_plan and torch.is_tensor(result):
            arguments = (*args, *kwargs.values())
            self._follow(func, arguments, result)
        return result

    def _follow(
        self,
        func: Any,
        arguments: Sequence[Any],
        result: torch.Tensor,
    ) -> None:
        """Note the parameters that a result is made of, or that were multiplied with records.

        A parameter may be transposed, scaled or joined with others before it meets a record. Only
        then does it count how it is used: element by element its copy for each record is a view and
        costs nothing, while a product with a copy is one product for each record. A person is told of
        the latter.

        Args:
            func: What was called.
            arguments: All of its arguments; lists of tensors among them.
            result: What it gave.
        """
        names: set[str] = set()
        for part in arguments:
            tensors = part if isinstance(part, tuple | list) else (part,)
            for tensor in tensors:
                key = id(tensor)
                if key in self.names:
                    names.add(self.names[key])
                elif key in self._made_of:
                    _, names_of_tensor = self._made_of[key]
                    names |= names_of_tensor
        if not names or self.levels is None:
            return
        if not self.levels.of_record(result):
            self._made_of[id(result)] = (result, names)
            return
        call = getattr(func, "__name__", "").strip("_")
        if call not in _ELEMENT_BY_ELEMENT:
            self.multiplied |= names

    def names_of(self, *tensors: Any) -> tuple[str | None, ...] | None:
        """Return the names of a weight and its bias; None unless all are trained parameters themselves.

        All of them must be trained parameters as they are: of a bias that is a function of others,
        autograd could not be cut off by name.

        Args:
            *tensors: The weight, and the bias or None.
        """
        if self.levels is None:
            return None
        names: list[str | None] = []
        for tensor in tensors:
            name = None if tensor is None else self.names.get(id(tensor))
            names.append(name)
        if names[0] is None:
            return None
        for tensor, name in zip(tensors, names, strict=True):
            if tensor is not None and name is None:
                return None
        return tuple(names)

    def adds(self, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Say whether a bias is trained and its weight frozen: it is then added in a call of its own."""
        if self.levels is None or id(weight) in self.names:
            return False
        return id(bias) in self.names

    def all_classes(self, targets: torch.Tensor) -> bool:
        """Say whether a tensor of targets shares memory with the targets known to be classes.

        Then no target is an index to ignore, and the loss needs no mask.
        """
        if self.classes is None:
            return False
        # As a storage, whatever view of it a tensor is.
        memory = self.classes.untyped_storage()._cdata
        return bool(memory == targets.untyped_storage()._cdata)

    def put(
        self,
        names: Sequence[str | None],
        out: torch.Tensor,
        back: Callable[[torch.Tensor], list[tuple[Use, Tensors]]],
    ) -> torch.Tensor:
        """Note that an operation used parameters, and return its output as a new leaf of autograd.

        The output is a leaf of autograd, whatever made it: so the way back ends there, and what comes
        back to it is the ``g`` of the rule.

        Args:
            names: Of the parameters that the rule gives gradients of.
            out: Physical output, ``[K, B, ...]``, computed without autograd for the parameters.
            back: See ``ParameterUse``.
        """
        if self.levels is None:
            raise RuntimeError("a use of a parameter was caught outside of vmap")
        with temporarily_clear_interpreter_stack():
            if not out.requires_grad:
                out.requires_grad_()
            parameters = tuple(name for name in names if name is not None)
            use = ParameterUse(parameters, out, out._version, back)
            self.entries.append(use)
        return self.levels.wrap(out)

    def drop(
        self,
        x: torch.Tensor,
        p: float,
        shape: Sequence[int],
    ) -> torch.Tensor:
        """Drop entries of ``x`` by the next mask, of a shape that broadcasts over ``x``.

        What stays is scaled by ``1 / (1 - p)``, as torch has it.

        Args:
            x: Of one record, or outside of vmap of any.
            p: Chance of an entry to be dropped, in [0, 1].
            shape: Of the mask.
        """
        if p == 0.0 or self.deterministic:
            return x
        if p >= 1.0:
            return x * 0.0
        site = Site(tuple(shape), chance=1.0 - p)
        mask = self.drawn(site, x)
        return x * mask * (1.0 / (1.0 - p))

    def drawn(self, site: Site, like: torch.Tensor) -> torch.Tensor:
        """Return the random values that the next place of a draw gets, of the type and device of ``like``.

        Places are told apart by their order in a pass, so a pass must draw in the same order for all
        records; a model that branches by value is refused elsewhere.
        """
        if self.generator is not None:
            empty = site.empty((1,), like)
            return site.fill(empty, self.generator).squeeze(0)
        if self.deterministic:
            return site.empty((), like)
        number = len(self.sites)
        self.sites.append(site)
        if self.masks is None:
            return site.empty((), like)
        return self.masks[number]


def bind(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    required: str,
    /,
    **defaults: Any,
) -> list[Any]:
    """Return the argument values of a call, in the order of the named parameters.

    torch's functions take the same argument by place or by name, and a handler must know all of them.

    Args:
        args: Arguments of the call by place.
        kwargs: Arguments of the call by name.
        required: Names of those without a default, in order, between spaces.
        **defaults: Names and values of the others, in order.
    """
    names = [*required.split(), *defaults]
    by_place = dict(zip(names, args, strict=False))
    values = {**defaults, **kwargs, **by_place}
    return [values[name] for name in names]


def _out_of_place(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    place: int,
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return a call's arguments with ``inplace`` turned off.

    ``place`` is where the argument ``inplace`` stands, if it is not given by name.
    """
    if len(args) > place:
        before = args[:place]
        after = args[place + 1 :]
        return (*before, False, *after), kwargs
    return args, {**kwargs, "inplace": False}


def _dropout(
    mode: Watch,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    channels: bool = False,
) -> Any:
    """Drop entries, or whole channels, by the watch's next mask; outside of training drop nothing.

    With ``channels`` the mask is ``[N, C, 1, ...]``. In evaluation nothing is dropped, whoever
    watches.
    """
    x, p, training, _ = bind(
        args,
        kwargs,
        "input",
        p=0.5,
        training=True,
        inplace=False,
    )
    if not training:
        return x
    shape = x.shape
    if channels:
        further_axes = x.ndim - 2
        shape = (*x.shape[:2], *[1] * further_axes)
    return mode.drop(x, p, shape)


def _size_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the size that a call asks for, as one argument or as several."""
    size = args[0] if len(args) == 1 else args
    size = kwargs.get("size", size)
    if isinstance(size, int):
        return (int(size),)
    return tuple(int(n) for n in size)


def _draw(
    mode: Watch,
    site: Site,
    kwargs: Mapping[str, Any],
    like: torch.Tensor | None = None,
) -> Any:
    """Draw random values from the active watch, of the type and device that the call or ``like`` names.

    Where it is not known how to draw by a stream (a generator of the caller's, another device), torch
    draws itself: under vmap that raises, and the kernel that takes record after record draws from the
    generator that it has seeded.

    Args:
        mode: The watch that steers draws.
        site: What is drawn for one record.
        kwargs: Of the call; read for ``dtype``, ``device``, ``generator`` and ``out``.
        like: A tensor whose type and device hold where the call names none.
    """
    if kwargs.get("generator") is not None or kwargs.get("out") is not None:
        return NotImplemented  # a generator or a tensor of the caller's own
    steers = mode.masks is not None or mode.generator is not None or mode.deterministic
    if mode.levels is None and not steers:
        return NotImplemented
    are_integers = site.law in ("integers", "permutation")
    dtype = kwargs.get("dtype")
    device = kwargs.get("device")
    if like is not None:
        dtype = dtype or like.dtype
        device = device or like.device
    if mode.generator is not None:
        place = torch.device(device or "cpu")
        if place != mode.generator.device:
            return NotImplemented
    # Whole numbers are drawn in their own law; else torch's default type stands for none.
    floating = None
    if dtype is not None and dtype.is_floating_point:
        floating = dtype
    example = torch.empty((), dtype=floating, device=device)
    value = mode.drawn(site, example)
    if dtype is None or (are_integers and dtype == torch.int64):
        return value
    return value.to(dtype)


def _new(
    mode: Watch,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    law: Law,
) -> Any:
    """Draw a new tensor of the call's size from a law."""
    site = Site(_size_of(args, kwargs), law)
    return _draw(mode, site, kwargs)


def _like(
    mode: Watch,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    law: Law,
) -> Any:
    """Draw a tensor from a law, with the shape, type and device of the call's input."""
    (x,) = bind(args, kwargs, "input")
    site = Site(tuple(x.shape), law)
    return _draw(mode, site, kwargs, x)


def _randint(mode: Watch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Draw whole numbers from ``low`` to below ``high``, as ``torch.randint`` takes them.

    ``randint(high, size)``, ``randint(low, high, size)``, or by names.
    """
    bounds = [a for a in args if isinstance(a, int)]
    low = kwargs.get("low", 0)
    high = None
    if len(bounds) == 2:
        low, high = bounds
    high = high or kwargs.get("high") or bounds[0]
    sizes = [a for a in args if not isinstance(a, int)]
    size = _size_of(sizes, kwargs)
    site = Site(
        size,
        "integers",
        low=int(low),
        high=int(high),
    )
    return _draw(mode, site, kwargs)


def _randperm(mode: Watch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Draw a random order of the numbers from 0 to n - 1."""
    (n,) = bind(args, kwargs, "n")
    site = Site((int(n),), "permutation")
    return _draw(mode, site, kwargs)


def _bernoulli(mode: Watch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Draw 0 or 1 with a given chance, by comparing uniform numbers with it.

    The chance may differ by record, so what is drawn is uniform, of a law that does not.
    """
    p, chance = bind(args, kwargs, "input", p=None)
    site = Site(tuple(p.shape), "uniform")
    value = _draw(mode, site, kwargs, p)
    if value is NotImplemented:
        return value
    threshold = p if chance is None else chance
    return (value < threshold).to(p.dtype)


def _in_place(
    mode: Watch,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    method: str,
) -> Any:
    """Fill a tensor with random numbers from the candidate's generator, by an in-place method.

    Only outside of vmap, with a generator of the candidate's.

    Args:
        mode: The watch, of which the generator is taken.
        args: The tensor, then what the method takes.
        kwargs: Its arguments by name.
        method: Its name, as ``normal_``.
    """
    generator = mode.generator
    x, *more = args
    if generator is None or kwargs.get("generator") is not None:
        return NotImplemented
    if x.device != generator.device:
        return NotImplemented
    fill = getattr(x, method)
    return fill(*more, **{**kwargs, "generator": generator})


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
    """Run a checkpointed part without torch's checkpoint while a watch is active, so it draws only once.

    What it gives is the same; the memory that a checkpoint would save is taken.
    """
    if ACTIVE.watch is None:
        usual: Any = torch._dynamo.disable(_CHECKPOINT)  # type: ignore[no-untyped-call]
        return usual(part, *args, **kwargs)
    options = {*signature(_CHECKPOINT).parameters, "preserve_rng_state"}
    arguments = {name: value for name, value in kwargs.items() if name not in options}
    return part(*args, **arguments)


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
        """Store the rule for the layer's class, in place of an earlier one."""
        _RULES[layer] = rule
        return rule

    return register


def registered() -> tuple[int, ...]:
    """Return the identities of all registered rules, as part of the key of cached kernels.

    It is part of the key under which kernels are kept.
    """
    return tuple(map(id, _RULES.values()))


def ruled(module: nn.Module) -> list[str]:
    """Make layers with a registered rule note their uses of parameters; return their names.

    The class itself stays as it is, since other models of the process use it.
    """
    layers = []
    for name, part in module.named_modules():
        # One that has a forward of its own computes something else than its class.
        if type(part) in _RULES and "forward" not in vars(part):
            layers.append((name, part))
    titles = []
    for name, part in layers:
        kind = type(part)
        part.forward = partial(_forward, part, _RULES[kind])
        titles.append(f"{name or 'model'} ({kind.__name__})")
    return titles


def unruled(module: nn.Module) -> None:
    """Undo ``ruled``: give all layers their own ``forward`` back."""
    for part in module.modules():
        forward = vars(part).get("forward")
        if getattr(forward, "func", None) is _forward:
            del part.forward


def _forward(
    layer: nn.Module,
    rule: Rule,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a layer with a rule; under a watch, note the use of its parameters.

    The layer runs on detached weights, so that autograd does not reach them: their gradients are
    those of the rule. Its inputs are kept for the rule, which gets them record by record.

    Args:
        layer: With a stack's parameters in place of its own.
        rule: What ``norms_of`` registered for its class.
        args: Tensors of one record, with a batch axis of 1.
        kwargs: If there are any, the layer runs as it is.

    Raises:
        RuntimeError: If it gives more than one tensor, or the rule not all gradients.
    """
    watch = ACTIVE.watch
    run = type(layer).forward
    plain = not kwargs and all(map(_is_of_one_record, args))
    if watch is None or watch.levels is None or not plain:
        return run(layer, *args, **kwargs)
    params = dict(layer.named_parameters())
    levels = watch.levels
    trained: dict[str, str] = {}  # names in the model by names in the layer
    for n, p in params.items():
        if id(p) in watch.names:
            trained[n] = watch.names[id(p)]
    if not trained:
        return run(layer, *args)
    detached = {n: params[n].detach() for n in trained}
    with _reparametrize_module(layer, detached):
        value = run(layer, *args)
    if not _is_of_one_record(value):
        raise RuntimeError(f"{type(layer).__name__} has a rule, and gives more than one tensor")
    inputs_seen = [levels.physical(arg).detach() for arg in args]  # [K, B, 1, ...]
    versions = [a._version for a in inputs_seen]
    values: dict[str, torch.Tensor] = {}  # [K, *shape]
    shapes: dict[str, torch.Size] = {}
    for n in trained:
        values[n] = levels.by_candidate(params[n]).detach()
        shapes[n] = values[n].shape[1:]

    def one(*record: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the gradients of one record by the rule; refuse missing ones and wrong shapes."""
        *inputs, grad = [part.unsqueeze(0) for part in record]
        gradients = rule(layer, tuple(inputs), grad)
        of_record: dict[str, torch.Tensor] = {}
        for n, shape in shapes.items():
            if n not in gradients or gradients[n].shape != (1, *shape):
                raise RuntimeError(f"the rule gives no gradient of {n} for each record")
            of_record[n] = gradients[n].squeeze(0)
        return of_record

    def back(g: torch.Tensor) -> list[tuple[Use, Tensors]]:
        """Return one use of each parameter, with its gradients ``[K, B, *shape]``.

        Candidate by candidate, since a rule reads the layer's parameters as attributes, and these are
        of one.
        """
        collected: dict[str, list[torch.Tensor]] = {n: [] for n in trained}
        for k in range(len(g)):
            weights = {n: p[k] for n, p in values.items()}
            inputs = [a[k].squeeze(1) for a in inputs_seen]
            # A rule that saw a batch could make a record's gradient hang on another's values.
            with _reparametrize_module(layer, weights), torch.no_grad(), Apart():
                gradients = torch.vmap(one)(*inputs, g[k].squeeze(1))
            for n, parts in collected.items():
                parts.append(gradients[n])
        if versions != [a._version for a in inputs_seen]:
            raise RuntimeError("the rule writes to what the layer saw")
        uses: list[tuple[Use, Tensors]] = []
        for n, parts in collected.items():
            use = DirectUse(trained[n])
            uses.append((use, (torch.stack(parts),)))
        return uses

    names = tuple(trained.values())
    return watch.put(names, levels.physical(value), back)


def _is_of_one_record(value: Any) -> bool:
    """Say whether a value is a tensor whose first axis, the batch, has length 1."""
    return torch.is_tensor(value) and value.shape[:1] == (1,)
