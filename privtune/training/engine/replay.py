"""Replays of captured passes as CUDA graphs: one launch in the place of one for each operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from privtune.training.engine.rules import Tensors

_PLAIN_RUNS = (
    2  # libraries choose their algorithms in the first runs, which a recording must not hold
)


class MemoryPool:
    """Memory that the graphs of one kernel share: they run one after the other, so it is the largest one's.

    It is made at the first recording: a machine without a GPU has none.
    """

    def __init__(self) -> None:
        self._handle: Any = None  # torch's type for it is private

    def handle(self) -> Any:
        """Return the pool's identity, as torch's graphs take it."""
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle


class Replay:
    """A function of CUDA tensors that is recorded after its first runs, and replayed from then on.

    A small model's pass takes the GPU less time than Python takes to launch it. The function must read no
    value and draw no random number, as captured graphs do. What cannot be recorded runs as it is, for good.

    Args:
        run: The function; its inputs have the same shapes and types at each call.
        pool: Shared with the functions that run before and after it; outputs are valid until the next run
            of any of them.
    """

    def __init__(self, run: Callable[..., Tensors], pool: MemoryPool) -> None:
        self._run = run
        self._pool = pool
        self._runs = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[torch.Tensor] = []
        self._outputs: Tensors = ()

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        """Return the function's outputs for these inputs."""
        self._runs += 1
        if self._graph is None and self._runs == _PLAIN_RUNS + 1 and _lie_on_gpu(inputs):
            self._record(inputs)
        if self._graph is None:
            return self._run(*inputs)
        for buffer, tensor in zip(self._inputs, inputs, strict=True):
            buffer.copy_(tensor)
        self._graph.replay()
        return self._outputs

    def _record(self, inputs: Tensors) -> None:
        """Record the function, unless torch refuses to: then it goes on running as it is."""
        graph = torch.cuda.CUDAGraph()
        buffers = [tensor.clone() for tensor in inputs]
        try:
            with torch.cuda.graph(graph, pool=self._pool.handle()):
                outputs = self._run(*buffers)
        except RuntimeError:
            return  # an operation waits for the GPU, or there is no memory to keep
        self._inputs = buffers
        self._outputs = outputs
        self._graph = graph


def _lie_on_gpu(tensors: Tensors) -> bool:
    """Say whether all tensors lie on a GPU: what lies elsewhere cannot be part of its graph."""
    return all(tensor.is_cuda for tensor in tensors)
