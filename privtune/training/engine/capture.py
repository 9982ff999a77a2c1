"""What a pass does, followed below autograd: captured as a flat graph, or told by value.

Small stacks are bound by the number of calls, and about two thirds of what a pass does are chains of views,
left over from ``vmap`` and autograd: each becomes one ``as_strided`` or nothing. ``make_fx`` records the same
calls; it imports a compiler and an algebra system, which takes longer than all captures of a study.

Models whose passes are told alike differ in parameters, buffers and records alone, so one captured pass
computes all of them. So does that of a wider net, where every tensor of a narrower one that is filled up with
zeros is a tensor of the wider one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from privtune.training.engine.compute import sums_in_float32
from privtune.training.engine.watch import Watch
from privtune.training.mechanism.kernel import LossOf, fresh, traced
from privtune.training.mechanism.made_up import Domain
from privtune.training.mechanism.streams import GLOBAL_GENERATOR

Tensors = tuple[torch.Tensor, ...]

_aten = torch.ops.aten


def _calls(names: str) -> dict[Any, str]:
    """Return torch's calls below autograd by their names, and whose overloads they are."""
    parts = [name.partition(".") for name in names.split()]
    return {getattr(getattr(_aten, name), own or "default"): name for name, _, own in parts}


_NOTHING = frozenset(_calls("detach alias"))
_UNCHANGING = (
    _NOTHING
    | _calls(
        "view _unsafe_view unsqueeze squeeze squeeze.dim squeeze.dims permute transpose.int t slice.Tensor "
        "select.int expand as_strided"
    ).keys()
)

# The same operations, called without the detour over the dispatcher's Python object.
_DIRECT: dict[Any, Callable[..., Any]] = {
    call: getattr(torch, name)
    for call, name in _calls(
        "_log_softmax _softmax add.Tensor addcmul as_strided baddbmm bmm clamp_min clone div.Tensor "
        "eq.Scalar exp full_like gather masked_fill.Scalar mul.Scalar mul.Tensor neg reciprocal relu "
        "scatter_add sigmoid sqrt sub.Tensor sum.dim_IntList tanh"
    ).items()
}


_CHECKING = _calls("binary_cross_entropy").keys()
"""Calls that raise at numbers which they do not accept, where the way back raises nothing."""


def _must_run(node: fx.Node) -> bool:
    """Say whether a call runs even if nothing uses what it gives."""
    # Else a record that raises in a pass as it is written would have a gradient in the captured one, and
    # whether it counts would hang on how often a shape was seen before.
    return node.is_impure() or node.target in _CHECKING


class NotCapturedError(RuntimeError):
    """A program reads a value, so it may do another thing the next time: it is run as it is."""

    def __init__(self, message: str, held: int = 0) -> None:
        super().__init__(message)
        self.held = held  # bytes of all tensors of a run


@dataclass(frozen=True)
class _Geometry:
    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    bytes: int


class Captured:
    """A captured graph, to run as a function."""

    def __init__(self, graph: fx.GraphModule, peak_bytes: int) -> None:
        self.peak_bytes = peak_bytes  # of one run, inputs included
        # The graph's own call prints what a run raised, which may hold a value of a record.
        self._run: Callable[..., Tensors] = graph.forward

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        """Run the graph."""
        return self._run(*inputs)


def capture(
    program: Callable[..., Tensors], example: Tensors, others: Tensors | None = None
) -> Captured:
    """Return the graph of what a program does with tensors that lie at the start of their storage.

    Args:
        program: The program.
        example: Tensors that it takes.
        others: Other ones that it takes, on which graph and program are compared; made from ``example``,
            if not given.

    Raises:
        NotCapturedError: If it reads a value, or the graph gives other results on other inputs.
    """
    recording = _Recording(example)
    with recording:
        found = program(*example)
    if recording.read is not None:
        said = f"{recording.read}: what a model does must not depend on values"
        raise NotCapturedError(said, recording.held)
    graph, geometry, held = recording.graph, recording.geometry, recording.held
    graph.output(tuple(recording.node(tensor) for tensor in found))
    del found
    peak = _peak(graph, geometry)
    _fold_views(graph, geometry)
    graph.eliminate_dead_code(_must_run)
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _DIRECT:
            node.target = _DIRECT[node.target]
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != "pin_memory"}
    captured = Captured(fx.GraphModule(recording.root, graph), peak)
    others = changed(example) if others is None else others
    with torch.no_grad():
        expected, replayed = program(*others), captured(*others)
    for one, other in zip(expected, replayed, strict=True):
        if not torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True):
            said = "what the model does depends on more than the shapes of its inputs"
            raise NotCapturedError(said, held)
    return captured


def changed(tensors: Tensors) -> Tensors:
    """Return tensors of the same shapes and types, with other floating numbers."""
    return tuple(t.flip(0) + 1 if t.is_floating_point() else t.clone() for t in tensors)


def shape_is_data(func: Any, args: Sequence[Any]) -> bool:
    """Say whether the shape of a result tells values: code that looks at it may branch by the record."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func is not _aten.index.Tensor:
        return True
    return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every call below autograd and vmap, and holds no tensor that the program lets go."""

    def __init__(self, inputs: Tensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.root = fx.Graph(), nn.Module()
        self.read: Any = None
        self.geometry: dict[fx.Node, _Geometry] = {}
        self._nodes = WeakTensorKeyDictionary()
        self._key = inputs[0].device.type.upper()
        self._fixed: set[int] = set()  # storages of constants
        self._whole: set[Any] = set()  # calls that are not made of others
        for place, tensor in enumerate(inputs):
            self._keep(tensor, self.graph.placeholder(f"input_{place}"), ())

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in here: else the compiler would be imported to be told so."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one call, and note it."""
        named = dict(kwargs or {})
        if func not in self._whole and not self._has_kernel(func):
            with self:
                parts = func.decompose(*args, **named)
            if parts is not NotImplemented:
                return parts
            self._whole.add(func)
        made = func(*args, **named)
        if func is _aten.ones_like.default and made.ndim == 0:
            # What a gradient starts from is no function of the losses: as a constant it lets these go unused.
            self._constant(made)
            return made
        seen: list[torch.Tensor] = []
        given = self._nodes_of(args, seen)
        node = self.graph.call_function(func, given, self._nodes_of(named, seen))
        if shape_is_data(func, args) or self._writes_to_constant(func, given):
            self.read = func
        if isinstance(made, torch.Tensor):
            self._keep(made, node, seen)
        elif isinstance(made, tuple | list):
            for place, part in enumerate(made):
                if isinstance(part, torch.Tensor):
                    self._keep(part, self.graph.call_function(getitem, (node, place)), seen)
        else:
            self.read = func
        return made

    @property
    def held(self) -> int:
        """Bytes of all tensors that were seen."""
        return sum({known.storage: known.bytes for known in self.geometry.values()}.values())

    def _has_kernel(self, func: Any) -> bool:
        """Say whether the device has a kernel for a call: its parts would give other last digits."""
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), self._key))

    def node(self, tensor: torch.Tensor) -> fx.Node:
        """Return what stands for a tensor: a constant, if no call made it."""
        if tensor not in self._nodes:
            self._constant(tensor)
        node: fx.Node = self._nodes[tensor]
        return node

    def _constant(self, tensor: torch.Tensor) -> None:
        name = f"_constant{len(list(self.root.buffers()))}"
        self.root.register_buffer(name, tensor.detach(), persistent=False)
        node = self.graph.get_attr(name)
        self._keep(tensor, node, ())
        if node in self.geometry:
            self._fixed.add(self.geometry[node].storage)

    def _writes_to_constant(self, func: Any, given: Any) -> bool:
        """Say whether a call leaves something in a constant, where every later run would find it."""
        for argument, told in zip(func._schema.arguments, given, strict=False):
            known = self.geometry.get(told) if isinstance(told, fx.Node) else None
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and known is not None and known.storage in self._fixed:
                return True
        return False

    def _nodes_of(self, value: Any, seen: list[torch.Tensor]) -> Any:
        if isinstance(value, torch.Tensor):
            seen.append(value)
            return self.node(value)
        if isinstance(value, Mapping):
            return {name: self._nodes_of(part, seen) for name, part in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(self._nodes_of(part, seen) for part in value)
        return value

    def _keep(self, tensor: torch.Tensor, node: fx.Node, seen: Any) -> None:
        """Note a tensor and how it lies in memory: in that of an argument, or in its own."""
        strided = tensor.layout == torch.strided
        place, number = tensor.untyped_storage().data_ptr() if strided else 0, len(self.geometry)
        for other in seen:  # the tensor itself may be one, where a call writes to it
            known = self.geometry.get(self._nodes[other])
            if known is not None and other.untyped_storage().data_ptr() == place:
                number = known.storage
        self._nodes[tensor] = node
        if not strided:
            return
        self.geometry[node] = _Geometry(
            number,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.untyped_storage().nbytes(),
        )


def _peak(graph: fx.Graph, geometry: dict[fx.Node, _Geometry]) -> int:
    """Return the most bytes that live at once when every tensor goes after its last use."""
    last: dict[int, int] = {}
    first: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for place, node in enumerate(graph.nodes):
        for user in (node, *node.all_input_nodes):
            if user in geometry:
                storage = geometry[user].storage
                first.setdefault(storage, place)
                last[storage] = place
                sizes[storage] = geometry[user].bytes
    changes = [0] * (len(graph.nodes) + 1)
    for storage, size in sizes.items():
        changes[first[storage]] += size
        changes[last[storage] + 1] -= size
    live = peak = 0
    for change in changes:
        live += change
        peak = max(peak, live)
    return peak


def _fold_views(graph: fx.Graph, geometry: dict[fx.Node, _Geometry]) -> None:
    """Replace every chain of views by one call on the tensor that it starts from."""
    base: dict[fx.Node, fx.Node] = {}
    made: dict[tuple[fx.Node, _Geometry], fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _UNCHANGING:
            continue
        source = node.args[0]
        if not isinstance(source, fx.Node) or node not in geometry or source not in geometry:
            continue
        start = base.get(source, source)
        here, there = geometry[node], geometry.get(start)
        if there is None or here.storage != there.storage:
            continue
        base[node] = start
        if here == there:
            node.replace_all_uses_with(start)
            continue
        key = (start, here)
        if key not in made:
            with graph.inserting_after(node):
                made[key] = graph.call_function(
                    _aten.as_strided.default, (start, here.size, here.stride, here.offset)
                )
            geometry[made[key]] = here
            base[made[key]] = start
        node.replace_all_uses_with(made[key])


_PLAIN = (int, float, complex, str, bool, type(None))
_VALUES = (*_PLAIN, torch.dtype, torch.device, torch.layout, torch.memory_format)
_VIEW_NAMES = frozenset({"view", "_unsafe_view"})
_SUMS = frozenset({"add.Tensor", "sub.Tensor", "addmm"})
# Calls that give tensors filled up with zeros for tensors filled up with zeros, the same beside these.
_KEEP_ZEROS = frozenset({
    "input", "t", "transpose.int", "detach", "clone", "mm", "mul.Tensor", "neg", "abs", "sum",
    "sum.dim_IntList", "relu", "relu_", "tanh", "gelu", "silu", "elu", "leaky_relu", "mish", "hardswish",
    "threshold_backward", "tanh_backward", "gelu_backward", "silu_backward", "elu_backward",
    "leaky_relu_backward", "mish_backward", "hardswish_backward", *_SUMS, *_VIEW_NAMES,
})  # fmt: skip

_Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Program:
    """What model and loss do with a record."""

    digest: str  # the same for models that differ in their numbers alone
    family: str  # the same for models that differ in numbers and sizes
    calls: tuple[tuple[str, _Shapes], ...]  # with the shapes that went in and the one that came out

    def holds(self, other: Program) -> bool:
        """Say whether this computes another program too, whose parameters are filled up with zeros."""
        # By induction over the calls: every tensor of the other, filled up with zeros, is one of this, the
        # gradients of parameters included. A call that is not known to keep that must have one size.
        return self.family == other.family and all(
            one == two or (name in _KEEP_ZEROS and _filled_up(name, one, two))
            for (name, one), (_, two) in zip(self.calls, other.calls, strict=True)
        )


def _filled_up(name: str, wide: _Shapes, narrow: _Shapes) -> bool:
    """Say whether a call on wider tensors fills up with zeros what it gives on narrower ones."""
    for one, two in zip(wide, narrow, strict=True):
        if len(one) != len(two) or any(a < b for a, b in zip(one, two, strict=True)):
            return False
    if name in _VIEW_NAMES:
        (before, after), (small, seen) = wide, narrow
        numbered = torch.arange(1, math.prod(small) + 1)
        filled = _fill_up(numbered.view(small), before).view(after)
        return torch.equal(filled, _fill_up(numbered.view(seen), after))
    if name not in _SUMS:
        return True
    # Nothing that is spread over a wider axis may be added there.
    out, old = wide[-1], narrow[-1]
    widened = [place for place in range(1, len(out) + 1) if out[-place] != old[-place]]
    terms = wide[:1] if name == "addmm" else wide[:-1]
    spread = any(
        place > len(term) or term[-place] != out[-place] for term in terms for place in widened
    )
    return not spread and (name == "addmm" or len(terms) == 2)  # the other one may be a number


def _fill_up(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    out = tensor.new_zeros(shape)
    out[tuple(slice(n) for n in tensor.shape)] = tensor
    return out


_ANY_DOMAIN = Domain()


def program_of(
    model: nn.Module,
    loss_of: LossOf,
    x: torch.Tensor,
    y: torch.Tensor,
    domain: Domain = _ANY_DOMAIN,
) -> Program | None:
    """Return what model and loss do with a record, forward and back; None if that hangs on values.

    The model is run as a copy, on a made-up record of a domain, of the shape and type of those of ``x`` and
    ``y``.

    Example:
        >>> from torch import nn
        >>> def loss(model, x, y):
        ...     return (model(x) - y).square().sum(1)
        >>> x, y = torch.zeros(0, 3), torch.zeros(0, 2)
        >>> def net(width):
        ...     return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2))
        >>> one, other, wide = (program_of(net(width), loss, x, y) for width in (4, 4, 7))
        >>> one == other, one.digest == wide.digest, wide.holds(one), one.holds(wide)
        (True, False, True, False)
    """
    try:
        return _told(model, loss_of, x, y, domain)
    except Exception:  # whatever a user's code raises: the kernel's own check says what is wrong
        return None


def _told(
    model: nn.Module, loss_of: LossOf, x: torch.Tensor, y: torch.Tensor, domain: Domain
) -> Program:
    # A pass may write to its weights, which the kernel refuses.
    copied, _ = fresh(model, trained=True)
    trained = [p for p in copied.parameters() if p.requires_grad]
    device = trained[0].device
    (inputs,), (targets,) = domain.draw(x, y, (1, 1), device)
    held = [
        *copied.named_parameters(remove_duplicate=False),
        *copied.named_buffers(remove_duplicate=False),
        ("x", inputs),
        ("y", targets),
    ]
    recording = _Recording(tuple(tensor for _, tensor in held))
    forked = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    with GLOBAL_GENERATOR, forked, sums_in_float32(), torch.enable_grad(), traced():
        with Watch(None), recording:
            loss = loss_of(copied, inputs, targets)
            grads: Sequence[torch.Tensor | None] = ()
            if loss.requires_grad:
                grads = torch.autograd.grad(loss.sum(), trained, allow_unused=True)
        out = [None if g is None else recording.node(g) for g in grads]
    if recording.read is not None:
        raise NotCapturedError("the next pass may do another thing")
    first: dict[int, int] = {}
    inner = [(n, first.setdefault(id(t), i), t.requires_grad) for i, (n, t) in enumerate(held)]
    family = [*inner, *_parts_of(copied, whole=False), tuple(loss.shape)]
    return _Telling(recording).program(family, [*_parts_of(copied, whole=True)], out)


def _parts_of(model: nn.Module, *, whole: bool) -> Iterator[tuple[Any, ...]]:
    """Yield the class and the plain attributes of every part of a model: whole numbers, or all others."""
    for name, part in model.named_modules(remove_duplicate=False):
        plain = sorted(
            (n, v)
            for n, v in vars(part).items()
            # What torch's compiler notes there is of one model each.
            if isinstance(v, _PLAIN)
            and (type(v) is int) is whole
            and not n.startswith("_torchdynamo")
        )
        yield (name, type(part).__module__, type(part).__qualname__, *plain)


class _Telling:
    """Tells a recorded pass by value: tensors by who made them, constants by their contents."""

    def __init__(self, recording: _Recording) -> None:
        self._graph, self._root = recording.graph, recording.root
        self._geometry = recording.geometry
        self._numbers = {node: number for number, node in enumerate(self._graph.nodes)}

    def program(self, family: list[Any], sizes: list[Any], out: list[fx.Node | None]) -> Program:
        """Return the program, of which other facts are known."""
        calls: list[tuple[str, _Shapes]] = []
        for node in self._graph.nodes:
            name = "input" if node.op == "placeholder" else self._name(node)
            views = name in _VIEW_NAMES
            family.append((name, node.args[:1] if views else node.args, node.kwargs))
            if views:
                sizes.append(node.args[1:])
            if node in self._geometry:
                family.append(self._geometry[node].dtype)
            given = node.all_input_nodes if node.op != "get_attr" else ()
            shapes = [self._geometry[n].size for n in (*given, node) if n in self._geometry]
            sizes.append(shapes)
            calls.append((name, tuple(shapes)))
        known = hashlib.sha256(self._spell([family, out]).encode())
        digest = known.copy()
        digest.update(self._spell(sizes).encode())
        return Program(digest.hexdigest(), known.hexdigest(), tuple(calls))

    def _name(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            return self._contents(self._root.get_buffer(str(node.target)))
        func: Any = node.target
        if func is getitem:
            return "getitem"
        name: str = func._schema.name.removeprefix("aten::")
        return name if func._overloadname == "default" else f"{name}.{func._overloadname}"

    def _spell(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return f"%{self._numbers[value]};"
        if isinstance(value, tuple | list):
            return f"({''.join(map(self._spell, value))})"
        if isinstance(value, Mapping):
            return f"{{{''.join(f'{name}={self._spell(part)}' for name, part in value.items())}}}"
        if isinstance(value, _VALUES):
            return f"{value!r};"
        raise NotCapturedError(f"{type(value).__name__} cannot be told by value")

    @staticmethod
    def _contents(tensor: torch.Tensor) -> str:
        if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, nn.Parameter):
            raise NotCapturedError("a tensor of another kind cannot be told by value")
        held = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy()
        found = hashlib.sha256(held.data).hexdigest()
        return f"{tuple(tensor.shape)}{tensor.dtype}{tensor.device}{found}"
