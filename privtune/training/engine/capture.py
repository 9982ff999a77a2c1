"""Recording of the torch calls of a pass: as a flat graph to run again, or as a digest to compare models.

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

from privtune.training.engine.compute import full_float32, release_memory
from privtune.training.engine.replay import MemoryPool, Replay
from privtune.training.engine.watch import Watch
from privtune.training.mechanism.kernel import LossOf, fresh, traced
from privtune.training.mechanism.made_up import Domain
from privtune.training.mechanism.streams import GLOBAL_GENERATOR

Tensors = tuple[torch.Tensor, ...]

_aten = torch.ops.aten


def _calls(names: str) -> dict[Any, str]:
    """Return the torch operations that a text names, each with its name without the overload.

    A name may have an overload behind a dot, ``sum.dim_IntList``; without one it is torch's default.
    """
    calls = {}
    for name in names.split():
        packet, _, overload = name.partition(".")
        call = getattr(getattr(_aten, packet), overload or "default")
        calls[call] = packet
    return calls


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
    """Say whether a call must stay in a captured graph even if nothing reads its result.

    Dead code is taken out of a graph, and a check whose result nobody reads is dead code to it.
    """
    # Else a record that raises in a pass as it is written would have a gradient in the captured one, and
    # whether it counts would hang on how often a shape was seen before.
    return node.is_impure() or node.target in _CHECKING


class NotCapturedError(RuntimeError):
    """The error that a program cannot be captured: it reads a value, or does not match its graph."""

    def __init__(self, message: str, size: int = 0) -> None:
        super().__init__(message)
        self.held = size  # bytes of all tensors of a run


@dataclass(frozen=True)
class _Geometry:
    """How a tensor lies in memory: the number of its storage, its shape, strides, offset and type.

    Two views of equal geometry hold the same numbers: a chain of views is then one view, or none.

    Attributes:
        storage: Counted within one recording.
        offset: In numbers, from the start of the storage.
        bytes: Of the whole storage, which lives as long as any view of it.
    """

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    bytes: int


class Captured:
    """A captured graph, to run as a function.

    Outputs are in the order of the program's. It holds no tensor but its constants, and no lock is
    needed to run it from several threads.
    """

    def __init__(self, graph: fx.GraphModule, peak_bytes: int) -> None:
        self.peak_bytes = peak_bytes  # of one run, inputs included
        # The graph's own call prints what a run raised, which may hold a value of a record.
        self._run: Callable[..., Tensors] = graph.forward
        self._replay: Replay | None = None

    def replayed(self, pool: MemoryPool) -> Captured:
        """Return this graph, to be replayed as a CUDA graph from its third run on.

        Its outputs are then valid until the next run of a graph that has the same pool.

        Args:
            pool: Where its tensors lie.
        """
        self._replay = Replay(self._run, pool)
        return self

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        """Run the graph and return its outputs, in the order of the program's."""
        if self._replay is not None:
            return self._replay(*inputs)
        return self._run(*inputs)


def capture(
    program: Callable[..., Tensors],
    example: Tensors,
    others: Tensors | None = None,
) -> Captured:
    """Capture a program as a flat graph; its inputs must lie at the start of their storage.

    Nothing says that a program does the same for all inputs, so it is asked: it may read no value and
    write to no constant, and its graph must agree with it on other inputs. A graph that drops a
    branch would give gradients of another loss, and the clipping would not notice.

    What it gives is compared for the first two records, since a program does the same for all of them:
    else the results of both would be held at once, which is more than any step takes.

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
        outputs = program(*example)
    if recording.read is not None:
        reason = f"{recording.read}: what a model does must not depend on values"
        raise NotCapturedError(reason, recording.held)
    graph = recording.graph
    geometry = recording.geometry
    size = recording.held
    results = [recording.node(tensor) for tensor in outputs]
    graph.output(tuple(results))
    del outputs
    peak = _peak(graph, geometry)
    _fold_views(graph, geometry)
    graph.eliminate_dead_code(_must_run)
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _DIRECT:
            continue
        node.target = _DIRECT[node.target]
        # torch's own functions take all other keywords of the dispatcher's.
        node.kwargs = {k: v for k, v in node.kwargs.items() if k != "pin_memory"}
    captured = Captured(fx.GraphModule(recording.root, graph), peak)
    if others is None:
        others = changed(example)
    with torch.no_grad():
        expected = _of_two_records(program(*others))
        replayed = _of_two_records(captured(*others))
    for one, other in zip(expected, replayed, strict=True):
        if not torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True):
            reason = "what the model does depends on more than the shapes of its inputs"
            raise NotCapturedError(reason, size)
    release_memory()
    return captured


def _of_two_records(results: Tensors) -> Tensors:
    """Return copies of what belongs to the first two records in results ``[K, B, ...]`` of a program."""
    return tuple(part[:, :2].clone() if part.ndim > 1 else part for part in results)


def changed(tensors: Tensors) -> Tensors:
    """Return tensors of the same shapes and types, in which all floating-point numbers are different.

    Flipped along the first axis and moved by 1, so that no number stays; what is whole (an index)
    stays, as another one may be out of range.
    """
    copies = []
    for tensor in tensors:
        if tensor.is_floating_point():
            copy = tensor.flip(0) + 1
        else:
            copy = tensor.clone()
        copies.append(copy)
    return tuple(copies)


def shape_is_data(func: Any, args: Sequence[Any]) -> bool:
    """Say whether the shape of a call's result depends on values, as that of rows picked by a mask does.

    An example is to pick rows by a mask: how many there are is read off the shape, without a call
    that gives a value.
    """
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func is not _aten.index.Tensor:
        return True
    _, indices, *_ = args
    masks = (torch.bool, torch.uint8)
    return any(index is not None and index.dtype in masks for index in indices)


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A recorder of every torch call below autograd and vmap, without keeping freed tensors alive.

    The mode lies below autograd and vmap, so it sees calls on tensors ``[K, B, ...]``, those of the
    way back included. A composite call is run as its parts, unless the device has a kernel of its own
    for it.

    Attributes:
        graph: The calls so far.
        root: Holds constants, as buffers of a module.
        read: The first call that makes the program depend on values, if any did.
        geometry: How the tensor of each node lies in memory.
    """

    def __init__(self, inputs: Tensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.read: Any = None
        self.geometry: dict[fx.Node, _Geometry] = {}
        self._nodes = WeakTensorKeyDictionary()
        self._key = inputs[0].device.type.upper()
        self._fixed: set[int] = set()  # storages of constants
        self._whole: set[Any] = set()  # calls that are not made of others
        for place, tensor in enumerate(inputs):
            node = self.graph.placeholder(f"input_{place}")
            self._keep(tensor, node, ())

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not import its compiler while this mode is active."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Run one call and add it to the graph.

        Args:
            func: The overload of the dispatcher's.
            types: Not used.
            args: Its arguments by place, tensors among them.
            kwargs: Its arguments by name; None for none.
        """
        keywords = dict(kwargs or {})
        if func not in self._whole and not self._has_kernel(func):
            with self:
                parts = func.decompose(*args, **keywords)
            if parts is not NotImplemented:
                return parts
            self._whole.add(func)
        results = func(*args, **keywords)
        if func is _aten.ones_like.default and results.ndim == 0:
            # What a gradient starts from is no function of the losses: as a constant it lets these go unused.
            self._constant(results)
            return results
        tensors: list[torch.Tensor] = []
        arguments = self._nodes_of(args, tensors)
        keywords = self._nodes_of(keywords, tensors)
        node = self.graph.call_function(func, arguments, keywords)
        if shape_is_data(func, args) or self._writes_to_constant(func, arguments):
            self.read = func
        if isinstance(results, torch.Tensor):
            self._keep(results, node, tensors)
        elif isinstance(results, tuple | list):
            for place, part in enumerate(results):
                if isinstance(part, torch.Tensor):
                    node_of_part = self.graph.call_function(getitem, (node, place))
                    self._keep(part, node_of_part, tensors)
        else:
            self.read = func
        return results

    @property
    def held(self) -> int:
        """Bytes of all tensors that were seen, freed ones included.

        Those that were let go count as well: it is what a run without a graph takes at most, not at
        once.
        """
        sizes = {geometry.storage: geometry.bytes for geometry in self.geometry.values()}
        return sum(sizes.values())

    def _has_kernel(self, func: Any) -> bool:
        """Say whether the device has a kernel of its own for a call, which is then recorded as one call.

        Last digits matter where a captured pass takes the place of one that was not.
        """
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), self._key))

    def node(self, tensor: torch.Tensor) -> fx.Node:
        """Return the graph node of a tensor; a tensor that no call made becomes a constant.

        A constant is what a model or a loss makes of nothing, such as class weights in a closure.
        """
        if tensor not in self._nodes:
            self._constant(tensor)
        node: fx.Node = self._nodes[tensor]
        return node

    def _constant(self, tensor: torch.Tensor) -> None:
        """Add a tensor that no call made to the graph, as a constant with its present values."""
        number = len(list(self.root.buffers()))
        name = f"_constant{number}"
        self.root.register_buffer(name, tensor.detach(), persistent=False)
        node = self.graph.get_attr(name)
        self._keep(tensor, node, ())
        if node in self.geometry:
            self._fixed.add(self.geometry[node].storage)

    def _writes_to_constant(self, func: Any, arguments: Any) -> bool:
        """Say whether a call writes to a constant of the graph, which later runs would read.

        A running mean that a pass keeps is such a tensor: written to in a graph, it would carry one
        batch into the next one.
        """
        for argument, value in zip(func._schema.arguments, arguments, strict=False):
            if not isinstance(value, fx.Node):
                continue
            geometry = self.geometry.get(value)
            alias = argument.alias_info
            written = alias is not None and alias.is_write
            if written and geometry is not None and geometry.storage in self._fixed:
                return True
        return False

    def _nodes_of(self, value: Any, tensors: list[torch.Tensor]) -> Any:
        """Return arguments with nodes in the place of tensors, which are added to ``tensors``."""
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return self.node(value)
        if isinstance(value, Mapping):
            return {name: self._nodes_of(part, tensors) for name, part in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(self._nodes_of(part, tensors) for part in value)
        return value

    def _keep(
        self,
        tensor: torch.Tensor,
        node: fx.Node,
        tensors: Any,
    ) -> None:
        """Note the node of a tensor and its place in memory: an argument's storage, or a new one.

        The storage has a number of its own rather than its address: an address is given out again
        once a tensor is gone, and two tensors would then seem to share memory.

        Args:
            tensor: What a call gave, or an input, or a constant.
            node: What stands for it in the graph.
            tensors: The arguments of the call.
        """
        strided = tensor.layout == torch.strided
        place = tensor.untyped_storage().data_ptr() if strided else 0
        number = len(self.geometry)
        for other in tensors:  # the tensor itself may be one, where a call writes to it
            geometry = self.geometry.get(self._nodes[other])
            if geometry is not None and other.untyped_storage().data_ptr() == place:
                number = geometry.storage
        self._nodes[tensor] = node
        if not strided:
            return
        self.geometry[node] = _Geometry(
            storage=number,
            size=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
            dtype=tensor.dtype,
            bytes=tensor.untyped_storage().nbytes(),
        )


def _peak(graph: fx.Graph, geometry: dict[fx.Node, _Geometry]) -> int:
    """Return the most bytes that a graph's tensors hold at once, each freed after its last use.

    The memory model bounds a training's memory by it, before anything private is computed.

    Args:
        graph: All calls, in order.
        geometry: How the tensor of each node lies in memory.
    """
    # By the number of a storage: the places of its first and last use, and its bytes.
    last: dict[int, int] = {}
    first: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for place, node in enumerate(graph.nodes):
        for user in (node, *node.all_input_nodes):
            if user not in geometry:
                continue
            storage = geometry[user].storage
            first.setdefault(storage, place)
            last[storage] = place
            sizes[storage] = geometry[user].bytes
    changes = [0] * (len(graph.nodes) + 1)
    for storage, size in sizes.items():
        changes[first[storage]] += size
        changes[last[storage] + 1] -= size
    live = 0
    peak = 0
    for change in changes:
        live += change
        peak = max(peak, live)
    return peak


def _fold_views(graph: fx.Graph, geometry: dict[fx.Node, _Geometry]) -> None:
    """Replace every chain of views by one view of the tensor that the chain starts from.

    The calls are left where they are; what nothing uses any more goes with the dead code. A view of
    the same geometry as its base is the base.
    """
    base: dict[fx.Node, fx.Node] = {}
    views: dict[tuple[fx.Node, _Geometry], fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _UNCHANGING:
            continue
        source = node.args[0]
        if not isinstance(source, fx.Node) or node not in geometry or source not in geometry:
            continue
        start = base.get(source, source)
        here = geometry[node]
        geometry_of_base = geometry.get(start)
        if geometry_of_base is None or here.storage != geometry_of_base.storage:
            continue
        base[node] = start
        if here == geometry_of_base:
            node.replace_all_uses_with(start)
            continue
        key = (start, here)
        if key not in views:
            place = (start, here.size, here.stride, here.offset)
            with graph.inserting_after(node):
                view = graph.call_function(_aten.as_strided.default, place)
            views[key] = view
            geometry[view] = here
            base[view] = start
        node.replace_all_uses_with(views[key])


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
    """The recorded calls of a model and its loss on one record, with digests that compare programs.

    Attributes:
        digest: Trainings whose programs share one may be one stack.
        family: Of programs that differ in widths alone, of which a wide one may compute a narrow one.
        calls: Names, with the shapes of their tensors, in order.
    """

    digest: str  # the same for models that differ in their numbers alone
    family: str  # the same for models that differ in numbers and sizes
    calls: tuple[tuple[str, _Shapes], ...]  # with the shapes that went in and the one that came out

    def holds(self, other: Program) -> bool:
        """Say whether this wider program computes another one when its parameters are padded with zeros.

        Only shapes are compared, call by call, so a wide program is never run to find out. What is
        said of values follows from what each call does with zeros.
        """
        # By induction over the calls: every tensor of the other, filled up with zeros, is one of this, the
        # gradients of parameters included. A call that is not known to keep that must have one size.
        if self.family != other.family:
            return False
        for (name, wide), (_, narrow) in zip(self.calls, other.calls, strict=True):
            if wide == narrow:
                continue
            if name not in _KEEP_ZEROS or not _filled_up(name, wide, narrow):
                return False
        return True


def _filled_up(name: str, wide: _Shapes, narrow: _Shapes) -> bool:
    """Say whether a call on zero-padded inputs gives the narrow call's result, padded with zeros.

    Larger axes are not enough: a view that joins two axes would put the narrow numbers between
    others, which is tried on numbers 1, 2, 3, ... And a bias that is broadcast along a wider axis
    would put its values where zeros must be.

    Args:
        name: Of a call of ``_KEEP_ZEROS``.
        wide: Shapes of what goes in, then of what comes out.
        narrow: The same for the narrow program.
    """
    for one, two in zip(wide, narrow, strict=True):
        if len(one) != len(two):
            return False
        if any(a < b for a, b in zip(one, two, strict=True)):
            return False
    if name in _VIEW_NAMES:
        before, after = wide
        small, view = narrow
        numbered = torch.arange(1, math.prod(small) + 1)
        # Filled up and then viewed, as the wide net does, or viewed and then filled up.
        filled = _fill_up(numbered.view(small), before)
        expected = _fill_up(numbered.view(view), after)
        return torch.equal(filled.view(after), expected)
    if name not in _SUMS:
        return True
    # Nothing that is spread over a wider axis may be added there.
    out = wide[-1]
    old = narrow[-1]
    # Axes counted from the end, as they are broadcast.
    widened = [place for place in range(1, len(out) + 1) if out[-place] != old[-place]]
    terms = wide[:-1]
    if name == "addmm":
        terms = wide[:1]
    for term in terms:
        for place in widened:
            if place > len(term) or term[-place] != out[-place]:
                return False
    return name == "addmm" or len(terms) == 2  # the other one may be a number


def _fill_up(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor of zeros of a larger shape, with the given tensor in its first places.

    The first places are those in which ``Group.add`` puts the parameters of a narrow model.
    """
    out = tensor.new_zeros(shape)
    corner = tuple(slice(n) for n in tensor.shape)
    out[corner] = tensor
    return out


_ANY_DOMAIN = Domain()


def program_of(
    model: nn.Module,
    loss_of: LossOf,
    x: torch.Tensor,
    y: torch.Tensor,
    domain: Domain = _ANY_DOMAIN,
) -> Program | None:
    """Return the recorded program of model and loss on one record; None if it depends on values.

    The model is run as a copy, on a made-up record of a domain, of the shape and type of those of ``x`` and
    ``y``.

    Which trials become one stack hangs on it, so it must not hang on a private record: what is run is
    made up. A user's code that raises is no error here, since the kernel runs it again and says what
    is wrong.

    Args:
        model: As a trial trains it.
        loss_of: The loss of records, one number each.
        x: Inputs like those of the records, which may be none.
        y: Targets like those of the records.
        domain: The numbers that made-up records are drawn from.

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
        return _record_program(model, loss_of, x, y, domain)
    except Exception:  # whatever a user's code raises: the kernel's own check says what is wrong
        return None


def _record_program(
    model: nn.Module,
    loss_of: LossOf,
    x: torch.Tensor,
    y: torch.Tensor,
    domain: Domain,
) -> Program:
    """Record the forward and backward pass of a made-up record, and return its program.

    The random state is put back, so that a trial draws the same numbers whether it was recorded or
    not.

    Raises:
        NotCapturedError: If the pass reads a value.
    """
    # A pass may write to its weights, which the kernel refuses.
    copied, _ = fresh(model, trained=True)
    trained = [p for p in copied.parameters() if p.requires_grad]
    device = trained[0].device
    (inputs,), (targets,) = domain.draw(x, y, (1, 1), device)
    facts = [
        *copied.named_parameters(remove_duplicate=False),
        *copied.named_buffers(remove_duplicate=False),
        ("x", inputs),
        ("y", targets),
    ]
    tensors = [tensor for _, tensor in facts]
    recording = _Recording(tuple(tensors))
    devices = [device] if device.type == "cuda" else []
    forked = torch.random.fork_rng(devices=devices)
    with GLOBAL_GENERATOR, forked, full_float32(), torch.enable_grad(), traced():
        with Watch(None), recording:
            loss = loss_of(copied, inputs, targets)
            grads: Sequence[torch.Tensor | None] = ()
            if loss.requires_grad:
                grads = torch.autograd.grad(loss.sum(), trained, allow_unused=True)
        out = [None if g is None else recording.node(g) for g in grads]
    if recording.read is not None:
        raise NotCapturedError("the next pass may do another thing")
    # Two names may share a tensor: its place is that of the first.
    first: dict[int, int] = {}
    inner: list[Any] = []
    for place, (name, tensor) in enumerate(facts):
        place_of_tensor = first.setdefault(id(tensor), place)
        inner.append((name, place_of_tensor, tensor.requires_grad))
    attributes = _parts_of(copied, whole_numbers=False)
    family = [*inner, *attributes, tuple(loss.shape)]
    sizes = [*_parts_of(copied, whole_numbers=True)]
    return _Telling(recording).program(family, sizes, out)


def _parts_of(model: nn.Module, *, whole_numbers: bool) -> Iterator[tuple[Any, ...]]:
    """Yield each module's name, class and plain attributes: only whole numbers, or all except them.

    Attributes may steer what a pass does without a call that a recording sees, as ``training`` does,
    so models that differ in one are told apart. Whole numbers are sizes as often as not, and belong
    to the digest alone.
    """
    for name, part in model.named_modules(remove_duplicate=False):
        plain = []
        for key, value in vars(part).items():
            # What torch's compiler notes there is of one model each.
            if not isinstance(value, _PLAIN) or key.startswith("_torchdynamo"):
                continue
            if (type(value) is int) is whole_numbers:
                plain.append((key, value))
        plain.sort()
        kind = type(part)
        yield (name, kind.__module__, kind.__qualname__, *plain)


class _Telling:
    """A writer of a recording as text that is equal in every process, without addresses or variable names.

    Memory addresses, ids and the names of variables change from process to process and have no part
    in it.
    """

    def __init__(self, recording: _Recording) -> None:
        self._graph = recording.graph
        self._root = recording.root
        self._geometry = recording.geometry
        self._numbers = {node: number for number, node in enumerate(self._graph.nodes)}

    def program(
        self,
        family: list[Any],
        sizes: list[Any],
        out: list[fx.Node | None],
    ) -> Program:
        """Return the program of the recording: its calls, and the digests of calls, facts and sizes.

        Args:
            family: Facts beside the calls that models of one family share.
            sizes: Facts in which they may differ.
            out: Nodes of the gradients, in the order of the parameters; None where there is none.
        """
        calls: list[tuple[str, _Shapes]] = []
        for node in self._graph.nodes:
            name = "input" if node.op == "placeholder" else self._name(node)
            arguments = node.args
            if name in _VIEW_NAMES:  # the shape of a view is a size, and says nothing of the family
                arguments = node.args[:1]
                sizes.append(node.args[1:])
            family.append((name, arguments, node.kwargs))
            if node in self._geometry:
                family.append(self._geometry[node].dtype)
            # A constant is known by its contents, whatever it was made of.
            inputs = () if node.op == "get_attr" else node.all_input_nodes
            nodes = (*inputs, node)
            shapes = [self._geometry[n].size for n in nodes if n in self._geometry]
            sizes.append(shapes)
            calls.append((name, tuple(shapes)))
        text_of_family = self._spell([family, out])
        digest_of_family = hashlib.sha256(text_of_family.encode())
        digest = digest_of_family.copy()
        text_of_sizes = self._spell(sizes)
        digest.update(text_of_sizes.encode())
        return Program(digest.hexdigest(), digest_of_family.hexdigest(), tuple(calls))

    def _name(self, node: fx.Node) -> str:
        """Return the name of a node's call with its overload, or a digest of the constant that it reads."""
        if node.op == "get_attr":
            constant = self._root.get_buffer(str(node.target))
            return self._contents(constant)
        func: Any = node.target
        if func is getitem:
            return "getitem"
        name: str = func._schema.name.removeprefix("aten::")
        if func._overloadname == "default":
            return name
        return f"{name}.{func._overloadname}"

    def _spell(self, value: Any) -> str:
        """Return a value as text that is the same in every process."""
        if isinstance(value, fx.Node):
            return f"%{self._numbers[value]};"
        if isinstance(value, tuple | list):
            parts = [self._spell(part) for part in value]
            return f"({''.join(parts)})"
        if isinstance(value, Mapping):
            entries = [f"{name}={self._spell(part)}" for name, part in value.items()]
            return f"{{{''.join(entries)}}}"
        if isinstance(value, _VALUES):
            return f"{value!r};"
        raise NotCapturedError(f"{type(value).__name__} cannot be told by value")

    @staticmethod
    def _contents(tensor: torch.Tensor) -> str:
        """Return a constant's shape, type, device and a digest of its bytes, as text.

        Two losses with other class weights are two programs, although their calls are the same.
        """
        if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, nn.Parameter):
            raise NotCapturedError("a tensor of another kind cannot be told by value")
        numbers = tensor.cpu().contiguous().flatten()
        contents = numbers.view(torch.uint8).numpy()
        digest = hashlib.sha256(contents.data).hexdigest()
        shape = tuple(tensor.shape)
        return f"{shape}{tensor.dtype}{tensor.device}{digest}"
