"""A program captured as a flat graph: the calls that reach the kernels, in their order, without their views.

Small stacks are bound by the number of calls, and about two thirds of what a pass does are chains of views,
left over from ``vmap`` and autograd: each becomes one ``as_strided`` or nothing. ``make_fx`` records the same
calls; it imports a compiler and an algebra system, which takes longer than all captures of a study.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

Tensors = tuple[torch.Tensor, ...]

_aten = torch.ops.aten

_NOTHING = frozenset({_aten.detach.default, _aten.alias.default})

_VIEWS = frozenset(
    {
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.unsqueeze.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        _aten.squeeze.default,
        _aten.permute.default,
        _aten.transpose.int,
        _aten.t.default,
        _aten.slice.Tensor,
        _aten.select.int,
        _aten.expand.default,
        _aten.as_strided.default,
    }
)

_UNCHANGING = _VIEWS | _NOTHING

# The same operations, called without the detour over the dispatcher's Python object.
_DIRECT: dict[Any, Callable[..., Any]] = {
    _aten._log_softmax.default: torch._log_softmax,
    _aten._softmax.default: torch._softmax,
    _aten.add.Tensor: torch.add,
    _aten.addcmul.default: torch.addcmul,
    _aten.as_strided.default: torch.as_strided,
    _aten.baddbmm.default: torch.baddbmm,
    _aten.bmm.default: torch.bmm,
    _aten.clamp_min.default: torch.clamp_min,
    _aten.clone.default: torch.clone,
    _aten.div.Tensor: torch.div,
    _aten.eq.Scalar: torch.eq,
    _aten.exp.default: torch.exp,
    _aten.full_like.default: torch.full_like,
    _aten.gather.default: torch.gather,
    _aten.masked_fill.Scalar: torch.masked_fill,
    _aten.mul.Scalar: torch.mul,
    _aten.mul.Tensor: torch.mul,
    _aten.neg.default: torch.neg,
    _aten.reciprocal.default: torch.reciprocal,
    _aten.relu.default: torch.relu,
    _aten.scatter_add.default: torch.scatter_add,
    _aten.sigmoid.default: torch.sigmoid,
    _aten.sqrt.default: torch.sqrt,
    _aten.sub.Tensor: torch.sub,
    _aten.sum.dim_IntList: torch.sum,
    _aten.tanh.default: torch.tanh,
}


class NotCapturedError(RuntimeError):
    """A program reads a value, so it may do another thing the next time: it is run as it is.

    Args:
        message: What it does.
        held: Bytes of all tensors of a run.
    """

    def __init__(self, message: str, held: int) -> None:
        super().__init__(message)
        self.held = held


@dataclass(frozen=True)
class _Geometry:
    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    bytes: int


class Captured:
    """A captured graph, to run as a function.

    It does not go through the call of torch.fx, which prints what a run raised to standard error:
    the message may hold a value of a record.

    Args:
        graph: The graph.
        peak_bytes: The most bytes that one run holds, inputs included.
    """

    def __init__(self, graph: fx.GraphModule, peak_bytes: int) -> None:
        self.peak_bytes = peak_bytes
        self._run: Callable[..., Tensors] = graph.forward

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        """Run the graph."""
        return self._run(*inputs)


def capture(program: Callable[..., Tensors], example: Tensors) -> Captured:
    """Return the graph of what a program does with tensors like these.

    Args:
        program: Takes tensors, returns tensors. What it does must depend on their shapes alone, and
            what it draws is drawn once.
        example: What it is run on; later inputs must have the same shapes and be contiguous from the start of
            their storage.

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
    graph.eliminate_dead_code()
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _DIRECT:
            node.target = _DIRECT[node.target]
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != "pin_memory"}
    captured = Captured(fx.GraphModule(recording.root, graph), peak)
    others = tuple(t.flip(0) + 1 if t.is_floating_point() else t.clone() for t in example)
    with torch.no_grad():
        expected, replayed = program(*others), captured(*others)
    for one, other in zip(expected, replayed, strict=True):
        if not torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True):
            said = "what the model does depends on more than the shapes of its inputs"
            raise NotCapturedError(said, held)
    return captured


def shape_is_data(func: Any, args: Sequence[Any]) -> bool:
    """Say whether the shape of a result tells values: code that looks at it may branch by the record."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func is not _aten.index.Tensor:
        return True
    return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])


class Following(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Is handed every call below autograd."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in here, and the compiler need not be imported to be told so."""
        return False


class _Recording(Following):
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

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
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
