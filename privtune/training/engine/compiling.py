"""Clipped sums as one program of Inductor: forward, backward, norms, clipping, sums.

Worth it for long trainings of small models: a program takes seconds to make, one for each shape
that is common, and saves a third or so of every step from then on. It needs a C++ compiler.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import nn

from privtune.training.engine.compute import CompileError
from privtune.training.engine.graph.capture import PassPlan, tape_of
from privtune.training.engine.layers.sums import add_sums, norms_of, pairs_of
from privtune.training.mechanism.clipping import Clipping
from privtune.training.mechanism.data import synthetic
from privtune.training.mechanism.kernel import FallbackWarning, Layout, LossOf, Rows

Tensors = tuple[torch.Tensor, ...]
Shape = tuple[int, int, bool, str]
Rule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_COMMON = 48  # times that a shape is seen before a program for it is made
_TOLERANCE = 1e-5


class CompiledSums:
    """Clipped sums of whole stacks by compiled programs, one for each common shape.

    Args:
        module: The model.
        loss_of: The loss of a record.
        layout: Where parameters lie.
        plan: How they are used.
        x: Inputs of a few records, for shape and type alone.
        y: Targets of a few records, likewise.
    """

    def __init__(
        self,
        module: nn.Module,
        loss_of: LossOf,
        *,
        layout: Layout,
        plan: PassPlan,
        x: torch.Tensor,
        y: torch.Tensor,
    ) -> None:
        self._module, self._loss_of, self._layout, self._plan = module, loss_of, layout, plan
        self._x, self._y = x, y
        self.seen: Counter[Shape] = Counter()
        """How often each shape was seen. A program rounds otherwise than what it replaces, so what
        goes on from a checkpoint goes on from these counts."""
        self._programs: dict[Shape, Callable[..., Tensors] | None] = {}
        self.patience = 0
        """Times that a shape is seen before a program is made for it; errors are raised at 0."""

    def settle(self) -> None:
        """From here on compile common shapes only, and go on without where that fails."""
        self.patience = _COMMON

    def __call__(
        self, params: torch.Tensor, rows: Rows, masks: Sequence[torch.Tensor], clipping: Clipping
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return clipped sums ``[K, P]`` and norms ``[G, K, B]``, or None without a program."""
        shape = (rows.mask.shape[0], rows.mask.shape[1])
        key = (*shape, clipping.by_layer, clipping.rule.__qualname__)
        self.seen[key] += 1
        if self.seen[key] <= self.patience:
            return None
        if key not in self._programs:
            self._programs[key] = self._make(shape, clipping, params.device)
        program = self._programs[key]
        if program is None:
            return None
        limits = self._limits(params, shape, clipping)
        with torch.inference_mode():
            sums, norms = program(params, rows.x, rows.y, rows.mask.contiguous(), limits, *masks)
        return sums, norms

    def _make(
        self, shape: tuple[int, int], clipping: Clipping, device: torch.device
    ) -> Callable[..., Tensors] | None:
        """Compile and check the program for a shape."""
        example = self._example(shape, clipping, device)
        plain = self._program(shape, by_layer=clipping.by_layer, rule=clipping.rule)
        try:
            program = _compile(plain, example)
            with torch.inference_mode():
                found = program(*example)
            for one, other in zip(found, plain(*example), strict=True):
                scale = float(other.abs().max())
                torch.testing.assert_close(
                    one, other, rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True
                )
        except Exception as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            message = f"compile: Inductor cannot compile {type(self._module).__name__} ({reason})"
            if self.patience == 0:
                raise CompileError(f"{message}; leave compile off.") from error
            warnings.warn(
                f"{message} for stacks of {shape[0]} with {shape[1]} rows each: they are trained "
                "as they are, with the same results.",
                FallbackWarning,
                stacklevel=2,
            )
            return None
        return program

    def _example(self, shape: tuple[int, int], clipping: Clipping, device: torch.device) -> Tensors:
        """Return inputs that hold no data."""
        layout = self._layout
        generator = torch.Generator().manual_seed(2)
        params = 0.1 * torch.randn(shape[0], layout.size, generator=generator, dtype=layout.dtype)
        params = params.to(device)
        x, y = synthetic(self._x, self._y, shape, device)
        ones = tuple(site.empty(shape, params) for site in self._plan.sites)
        # The bounds in use may be infinite and clip nothing. The check needs bounds that clip some
        # of the records.
        limits = torch.ones_like(self._limits(params, shape, clipping))
        return (params, x, y, params.new_ones(shape), limits, *ones)

    def _limits(
        self, params: torch.Tensor, shape: tuple[int, int], clipping: Clipping
    ) -> torch.Tensor:
        groups = len(self._layout.layers) if clipping.by_layer else 1
        return clipping.limits(params.new_empty((groups, *shape))).contiguous()

    def _program(
        self, shape: tuple[int, int], *, by_layer: bool, rule: Rule
    ) -> Callable[..., Tensors]:
        """Return the pass, run as it is."""
        layout = self._layout
        tape, uses = tape_of(self._module, self._loss_of, layout, self._plan)

        def program(
            params: torch.Tensor,
            x: torch.Tensor,
            y: torch.Tensor,
            mask: torch.Tensor,
            limits: torch.Tensor,
            *masks: torch.Tensor,
        ) -> Tensors:
            pairs = pairs_of(tape(params, x, y, *masks))
            norms, saved = norms_of(uses, pairs, layout=layout, by_layer=by_layer)
            # One tensor for each parameter: the compiler would copy sums into views of a common one.
            targets = {
                name: params.new_zeros(shape[0], length)
                for name, length in zip(layout.spans, layout.lengths, strict=True)
            }
            add_sums(uses, saved, rule(norms, limits) * mask, targets, layout=layout)
            return torch.cat(list(targets.values()), dim=1), norms

        return program


def _compile(program: Callable[..., Tensors], example: Tensors) -> Callable[..., Tensors]:
    """Capture a program and compile it in this process: no pool of workers is left behind."""
    from torch import _inductor
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # Inductor looks graphs up in its cache on disk only where their shapes have a place to be guarded.
    context = TracingContext(FakeTensorMode(shape_env=ShapeEnv()))
    with _inductor.config.patch({"compile_threads": 1}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = make_fx(program)(*example)
        with tracing(context):
            compiled: Callable[..., Tensors] = _inductor.compile(graph, [*example])
    return compiled
