"""Recording of a program as a flat graph: the calls that reach the kernels, in their order.

`make_fx` does the same for more kinds of programs; it imports a compiler, which takes longer than all
captures of a study.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

ONES = "_ones"
"""Begins the name of a constant that a pass made of ones: that of a model's may come to hold others."""

Tensors = tuple[torch.Tensor, ...]
_ONES = torch.ops.aten.ones_like.default


@dataclass(frozen=True, eq=False)
class Recorded:
    """A graph, and what holds its constants. To write it as a module takes longer than to run it."""

    root: nn.Module
    graph: fx.Graph

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        """Run the graph, call by call."""
        found: Tensors = fx.Interpreter(self.root, graph=self.graph).run(*inputs)
        return found


class NotRecordedError(RuntimeError):
    """A program reads a value, so it may do another thing the next time: it is run as it is.

    Args:
        message: What it does.
        held: Bytes of all tensors of a run.
    """

    def __init__(self, message: str, held: int) -> None:
        super().__init__(message)
        self.held = held


def record(program: Callable[..., Tensors], example: Tensors) -> Recorded:
    """Return the graph of what a program does with tensors like these.

    Args:
        program: Takes tensors, returns tensors. What it does must depend on their shapes alone, and
            what it draws is drawn once.
        example: What it is run on.

    Raises:
        NotRecordedError: If it reads a value, or the graph gives other results on other inputs.
    """
    recording = _Recording(example)
    with recording:
        found = program(*example)
    if recording.read is not None:
        said = f"{recording.read}: what a model does must not depend on values"
        raise NotRecordedError(said, recording.held)
    recording.graph.output(tuple(recording.node(tensor) for tensor in found))
    recorded = Recorded(recording.root, recording.graph)
    others = tuple(t.flip(0) + 1 if t.is_floating_point() else t.clone() for t in example)
    with torch.no_grad():
        expected, replayed = program(*others), recorded(*others)
    for one, other in zip(expected, replayed, strict=True):
        if not torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True):
            said = "what the model does depends on more than the shapes of its inputs"
            raise NotRecordedError(said, recording.held)
    return recorded


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every call below autograd and vmap."""

    def __init__(self, inputs: Tensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.root = fx.Graph(), nn.Module()
        self.read: Any = None
        self._nodes: dict[int, fx.Node] = {}
        self._key = inputs[0].device.type.upper()
        self._whole: set[Any] = set()  # calls that are not made of others
        self._kept: list[torch.Tensor] = []  # else another tensor could take the identity of one
        for place, tensor in enumerate(inputs):
            self._keep(tensor, self.graph.placeholder(f"input_{place}"))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in here, and the compiler need not be imported to be told so."""
        return False

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
        if func is _ONES:
            self._constant(made, ONES)
            return made
        node = self.graph.call_function(func, self._nodes_of(args), self._nodes_of(named))
        if isinstance(made, torch.Tensor):
            self._keep(made, node)
        elif isinstance(made, tuple | list):
            for place, part in enumerate(made):
                if isinstance(part, torch.Tensor):
                    self._keep(part, self.graph.call_function(getitem, (node, place)))
        else:
            self.read = func
        return made

    def _has_kernel(self, func: Any) -> bool:
        """Say whether the device has a kernel for a call: its parts would give other last digits."""
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), self._key))

    @property
    def held(self) -> int:
        """Bytes of all tensors that were seen."""
        found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self._kept}
        return sum(found.values())

    def node(self, tensor: torch.Tensor) -> fx.Node:
        """Return what stands for a tensor: a constant, if no call made it."""
        return self._nodes.get(id(tensor)) or self._constant(tensor)

    def _nodes_of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.node(value)
        if isinstance(value, Mapping):
            return {name: self._nodes_of(part) for name, part in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(self._nodes_of(part) for part in value)
        return value

    def _constant(self, tensor: torch.Tensor, kind: str = "_constant") -> fx.Node:
        name = f"{kind}{len(self._kept)}"
        self.root.register_buffer(name, tensor.detach(), persistent=False)
        return self._keep(tensor, self.graph.get_attr(name))

    def _keep(self, tensor: torch.Tensor, node: fx.Node) -> fx.Node:
        self._nodes[id(tensor)] = node
        self._kept.append(tensor)
        return node
