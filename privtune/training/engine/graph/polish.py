"""Polishing of captured graphs: fewer and cheaper calls, same numbers.

Small stacks are bound by the number of calls. About two thirds of a captured graph are chains of
views, left over from ``vmap`` and autograd: each chain becomes one ``as_strided`` or nothing. The
geometry comes from a run on the example, since a node's metadata loses the storage offset. The
polished graph must give the same bits as the captured one on the example, or it is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from privtune.training.engine.graph.record import ONES, Recorded

PEAK = "peak_bytes"
"""Key in a polished graph's ``meta``: the most bytes that one run holds, inputs included."""

HELD = "held_bytes"
"""Likewise: the bytes of every tensor of one run, which is what capturing it holds at once."""

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

_UNCHANGING = _VIEWS | _NOTHING  # what reads the storage of its input

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

# Operations that may write over their first argument, and the method that does. Each reads an
# element of it no later than it writes that element.
_OVER: dict[Any, str] = {
    _aten.add.Tensor: "add_",
    _aten.baddbmm.default: "baddbmm_",
    _aten.clamp_min.default: "clamp_min_",
    _aten.exp.default: "exp_",
    _aten.masked_fill.Scalar: "masked_fill_",
    _aten.mul.Tensor: "mul_",
    _aten.neg.default: "neg_",
    _aten.relu.default: "relu_",
    _aten.scatter_add.default: "scatter_add_",
    _aten.sigmoid.default: "sigmoid_",
    _aten.sqrt.default: "sqrt_",
    _aten.sub.Tensor: "sub_",
    _aten.tanh.default: "tanh_",
}


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
        meta: What is known of it.
    """

    def __init__(self, graph: fx.GraphModule, meta: dict[str, int]) -> None:
        self.meta = meta
        self._run: Callable[..., tuple[torch.Tensor, ...]] = graph.forward

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the graph."""
        return self._run(*inputs)


class _Recorder(fx.Interpreter):
    """Runs a graph and notes the geometry of every tensor."""

    def __init__(self, recorded: Recorded) -> None:
        super().__init__(recorded.root, garbage_collect_values=False, graph=recorded.graph)
        self.geometry: dict[fx.Node, _Geometry] = {}
        self.ones: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        value = super().run_node(n)
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            self.geometry[n] = _Geometry(
                value.untyped_storage().data_ptr(),
                tuple(value.shape),
                value.stride(),
                int(value.storage_offset()),
                value.dtype,
                value.untyped_storage().nbytes(),
            )
            kept = n.op == "call_function" and n.target in _UNCHANGING
            fixed = (n.op == "get_attr" and str(n.target).startswith(ONES)) or kept
            if fixed and all(source in self.ones for source in n.all_input_nodes):
                self.ones.add(n)
        return value


def polish(recorded: Recorded, example: tuple[torch.Tensor, ...]) -> Captured:
    """Return a graph with folded views and direct calls.

    Args:
        recorded: A captured graph of functional calls.
        example: Inputs; later inputs must have the same shapes and be contiguous from the start
            of their storage.
    """
    root, graph, twins = recorded.root, fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(recorded.graph, twins))
    with torch.no_grad():
        recorder = _Recorder(recorded)
        expected = recorder.run(*example)
        geometry = {twins[node]: g for node, g in recorder.geometry.items() if node in twins}
        ones = {twins[n] for n in recorder.ones}
        _drop_ones(graph, geometry, ones)
        _fold_views(graph, geometry)
        graph.eliminate_dead_code()
        _write_over(graph, geometry)
        for node in graph.nodes:
            if node.op == "call_function" and node.target in _DIRECT:
                node.target = _DIRECT[node.target]
                node.kwargs = {k: v for k, v in node.kwargs.items() if k != "pin_memory"}
        _fold_constants(root, graph, geometry, example[0].device)
        graph.eliminate_dead_code()
        polished = fx.GraphModule(root, graph)
        found = polished(*example)
    held = {g.storage: g.bytes for g in recorder.geometry.values()}
    meta = {PEAK: _peak(recorded.graph, recorder.geometry), HELD: sum(held.values())}
    same = all(torch.equal(f, e) or f.isnan().any() for f, e in zip(found, expected, strict=True))
    return Captured(polished if same else fx.GraphModule(root, recorded.graph), meta)


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


def _drop_ones(graph: fx.Graph, geometry: dict[fx.Node, _Geometry], ones: set[fx.Node]) -> None:
    """Drop products with ones, which is what the gradient of a sum of losses starts from."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is _aten.mul.Tensor:
            left, right = node.args
            if right in ones and geometry[left].size == geometry[node].size:
                same = geometry[left].stride == geometry[node].stride
                if same:
                    node.replace_all_uses_with(left)


def _write_over(graph: fx.Graph, geometry: dict[fx.Node, _Geometry]) -> None:
    """Let operations write over an argument that nothing reads any more: fewer cold caches."""
    last: dict[int, fx.Node] = {}
    held: set[int] = set()
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            if source in geometry:
                last[geometry[source].storage] = node
        if node in geometry and (node.op != "call_function" or node.target is torch.full_like):
            held.add(geometry[node].storage)
    for node in order:
        over = node.op == "call_function" and node.args and node.args[0] in geometry
        if not over or node not in geometry:
            continue
        source, here, there = node.args[0], geometry[node], geometry[node.args[0]]
        same = (here.size, here.stride, here.dtype) == (there.size, there.stride, there.dtype)
        others = {geometry[n].storage for n in node.all_input_nodes[1:] if n in geometry}
        free = last.get(there.storage) is node and there.storage not in held | others
        if not (same and free and here.storage != there.storage):
            continue
        if node.target is _aten.threshold_backward.default:
            node.target = _aten.threshold_backward.grad_input
            node.kwargs = {**node.kwargs, "grad_input": source}
        elif node.target in _OVER:
            node.op, node.target = "call_method", _OVER[node.target]
        else:
            continue
        # From here on the result lies in the argument's memory, and so does all that shares its own.
        last[there.storage] = last.get(here.storage, node)
        for other, known in geometry.items():
            if known.storage == here.storage:
                geometry[other] = replace(known, storage=there.storage)


def _fold_constants(
    root: nn.Module, graph: fx.Graph, geometry: dict[fx.Node, _Geometry], device: torch.device
) -> None:
    """Fill tensors of a constant once, not in every run."""
    for number, node in enumerate(list(graph.nodes)):
        if node.target is torch.full_like and node in geometry:
            known = geometry[node]
            value = torch.full(known.size, node.args[1], dtype=known.dtype, device=device)
            name = f"_filled{number}"
            root.register_buffer(name, value)
            with graph.inserting_after(node):
                node.replace_all_uses_with(graph.get_attr(name))


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
