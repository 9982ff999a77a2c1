"""Loops that wait for each other in ``fit``, and are trained as one stack where they are alike.

What a stack shares is the pass: samples are fetched, gradients clipped and noise added for all loops
by one call each. What is a loop's own stays its own: its streams, its optimizer, its weights. Nothing of
the user's runs between two steps, so a model gets its weights at the end, and must then be as it was; at
each step, where an optimizer steps it by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import _C
from torch.optim import optimizer as optimizers

from privtune.training.engine.batched import BatchedKernel
from privtune.training.engine.compute import sums_in_float32
from privtune.training.engine.stacks import granule, longest_sample, memory_model, stack_sizes
from privtune.training.mechanism.clipping import Automatic, Clipping, Flat
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import LossOf, same_fixed
from privtune.training.mechanism.stack_oracle import StackOracle
from privtune.training.own_loop.alike import UnsureError, program_of
from privtune.training.own_loop.loop import Loop
from privtune.training.own_loop.optimizer import SteppedAsOne
from privtune.training.own_loop.weights import LoopError

__all__ = ["MEETING", "Offer", "groups_of", "held_bytes", "plain_modes", "train_stack"]

_VECTORS = 8  # of the length of the weights, for a loop that waits: as the engine counts them


@dataclass(frozen=True, eq=False)
class Offer:
    """A loop that waits in ``fit``.

    Args:
        loop: The loop; no sample of it was drawn.
        loss_of: The loss of a record, as it was given.
        use: Makes the loop's kernel of it, with the checks that a loop by itself makes; says whether it
            is another one than before.
        program: What tells model and loss apart, as they were when the loop came here.
        data: Its records.
        held_bytes: What the loop holds in memory as long as it waits.
    """

    loop: Loop
    loss_of: LossOf
    use: Callable[[], bool]
    program: Hashable
    data: TensorData
    held_bytes: int

    @classmethod
    def of(cls, loop: Loop, loss_of: LossOf, use: Callable[[], bool]) -> Offer | None:
        """Return a loop as one that may share a stack, or None for one that goes on by itself.

        Args:
            loop: The loop.
            loss_of: The loss of a record, as it was given.
            use: Makes its kernel.
        """
        data = getattr(loop._oracle._given, "stands_for", loop._oracle._given)
        fresh = loop._taken == 0 and loop._open is None
        if not (fresh and isinstance(data, TensorData) and plain_modes()):
            return None
        if loop._kernel.one_by_one or (loop._own is not None and not _steps_by_itself(loop)):
            return None
        try:
            # A rehearsal listens to its model; it waits as a trial does, and is never trained so.
            program = None if loop._rehearsed else program_of(loop._model, loss_of)
        except UnsureError:
            return None
        state = _VECTORS * loop._weights.flat.nbytes
        fixed = sum(t.nbytes for t in loop._weights._still.values())
        return cls(loop, loss_of, use, program, data, state + fixed)

    def stands(self) -> bool:
        """Say whether nothing that it refers to was changed by others while it waited."""
        try:
            same = program_of(self.loop._model, self.loss_of) == self.program
        except UnsureError:
            return False
        versions = [t._version for t in self.loop._records]
        return same and versions == self.loop._record_versions

    def like(self, other: Offer) -> bool:
        """Say whether two loops can share a stack: they differ in numbers alone."""
        one, two = self.loop, other.loop
        return (
            self.program == other.program
            and (one.schedule, one._physical, one._unit) == (two.schedule, two._physical, two._unit)
            and one._method == two._method
            and one._oracle._noise.options == two._oracle._noise.options
            and (one.facts is two.facts and one._tree == two._tree)
            and _clipped_alike(one, two)
            and same_fixed(one._model, two._model)
            and _same_data(self.data, other.data)
        )


MEETING: ContextVar[Callable[[Offer], bool] | None] = ContextVar("MEETING", default=None)
"""Where the loops of this thread wait for others; returns whether all of the training was done there."""


def plain_modes() -> bool:
    """Say whether torch runs in this thread as it runs in any new one: no mode, no other device or type."""
    modes = _C._len_torch_function_stack() + _C._len_torch_dispatch_stack()
    begun: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = begun and torch.cuda.current_device() != 0
    cast = any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    usual = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    usual = usual and torch.get_default_dtype() == torch.float32
    return usual and not (modes or cuda or cast)


def _steps_by_itself(loop: Loop) -> bool:
    """Say whether the step of a loop's optimizer runs torch's code and no other: in any thread, then."""
    optimizer = None if loop._own is None else loop._own.optimizer
    if optimizer is None or type(optimizer).__module__.partition(".")[0] != "torch":
        return False
    if "step" in vars(optimizer) or len(optimizer._optimizer_step_pre_hooks) != 1:
        return False
    everywhere = optimizers._global_optimizer_pre_hooks or optimizers._global_optimizer_post_hooks
    return not optimizer._optimizer_step_post_hooks and not everywhere


def _clipped_alike(one: Loop, two: Loop) -> bool:
    if one._own is None or two._own is None:
        return one._own is two._own
    a, b = one._own, two._own
    if a.noise_multiplier != b.noise_multiplier or type(a.clipping) is not type(b.clipping):
        return False
    return isinstance(a.clipping, Flat) or (
        isinstance(a.clipping, Automatic) and a.clipping == b.clipping
    )


def _same_data(one: TensorData, two: TensorData) -> bool:
    """Say whether two are the same records, in the same memory or with the same contents."""
    if (one.unit, one.sealed_size) != (two.unit, two.sealed_size):
        return False
    pairs = ((one.x, two.x), (one.y, two.y), (one.unusable, two.unusable))
    return all(a is b or (a is not None and b is not None and _equal(a, b)) for a, b in pairs)


def _equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    if (one.shape, one.dtype, one.device) != (two.shape, two.dtype, two.device):
        return False
    return (one.data_ptr(), one.stride()) == (two.data_ptr(), two.stride()) or torch.equal(one, two)


def held_bytes(offers: Sequence[Offer]) -> int:
    """Return what loops that wait hold in memory beside the records of the first.

    Args:
        offers: The loops.
    """
    records = {offer.data.x.data_ptr(): offer.data.x.nbytes for offer in offers}
    first = offers[0].data.x.nbytes if offers else 0
    return sum(offer.held_bytes for offer in offers) + sum(records.values()) - first


def groups_of(offers: Sequence[Offer]) -> list[list[Offer]]:
    """Put loops that can share a stack together, in their order.

    Args:
        offers: Loops that wait.
    """
    groups: list[list[Offer]] = []
    for offer in offers:
        known = next((group for group in groups if offer.like(group[0])), None)
        if known is None:
            groups.append([offer])
        else:
            known.append(offer)
    return groups


@sums_in_float32()
def train_stack(offers: Sequence[Offer]) -> list[Exception | None]:
    """Train loops that are alike from their first step to their last.

    Args:
        offers: Loops of one group.

    Returns:
        What stopped each of them, None for those that took every step. Nothing if a stack gains
        nothing here, or cannot be made: then no sample was drawn, and each goes on by itself.

    Raises:
        Exception: Whatever stops the pass of all of them.
    """
    if len(offers) < 2:
        return []
    leader = offers[0].loop
    try:
        offers[0].use()
    except Exception:
        return []  # by itself, it says so
    kernel = leader._kernel.batched
    if kernel is None:
        return []
    memory = memory_model(kernel, longest=longest_sample(leader.schedule))
    sizes = stack_sizes(kernel, memory, len(offers), stack=None)
    if max(sizes) < 2:
        return []
    left = iter(offers)
    found: list[Exception | None] = []
    for size in sizes:
        together = granule(leader.schedule, memory.row_bytes, size)
        found += _Stack(offers[0], [next(left) for _ in range(size)], kernel, together).train()
    return found


class _Stack:
    """Some loops that are trained together.

    Args:
        first: The loop whose kernel computes all passes; it need not be one of them.
        offers: The loops.
        kernel: The leader's kernel.
        multiple: What physical sizes are multiples of.
    """

    def __init__(
        self, first: Offer, offers: Sequence[Offer], kernel: BatchedKernel, multiple: int
    ) -> None:
        leader = first.loop
        self._loops = [offer.loop for offer in offers]
        self._failed: list[Exception | None] = [None] * len(offers)
        self._leader, self._use, self._taken = leader, first.use, 0
        self._oracle = StackOracle(
            leader.schedule,
            data=leader._oracle._data,
            kernel=kernel,
            streams=[loop._streams for loop in self._loops],
            device=leader._weights.flat.device,
            physical_rows=leader._oracle._physical_rows,
            noise=leader._oracle._noise.options,
        )
        self._oracle.compute_at_once(leader._oracle._physical_rows, multiple)
        self._params = torch.empty(
            (len(offers), leader.layout.size),
            dtype=leader.layout.dtype,
            device=self._oracle._device,
        )

    def train(self) -> list[Exception | None]:
        """Take every step; return what stopped each loop."""
        self._each(lambda _, loop: loop.check())
        if all(self._failed):
            return self._failed
        try:
            torch.stack([loop._weights.flat for loop in self._loops], out=self._params)
            if self._leader._own is None:
                self._by_method()
            else:
                self._by_optimizers()
        finally:
            for loop, transcript in zip(self._loops, self._oracle.transcripts(), strict=True):
                loop._of_stack = transcript
            self._each(self._end)
        return self._failed

    def _each(self, do: Callable[[int, Loop], None], rows: Sequence[int] | None = None) -> None:
        """Do something with each loop that goes on, or these; an error stops that loop alone."""
        for row in range(len(self._loops)) if rows is None else rows:
            if self._failed[row] is None:
                try:
                    do(row, self._loops[row])
                except Exception as error:
                    self._failed[row] = error

    def _end(self, row: int, loop: Loop) -> None:
        """Give a loop the weights that its releases have made, if nothing else has changed it."""
        loop.check()
        with torch.no_grad():
            loop._weights.flat.copy_(self._params[row])
        loop._close_steps(self._taken)

    def _steps(self) -> Iterator[int]:
        """Count the steps, each after a look at the program.

        Raises:
            LoopError: If that changes from step to step, as nothing in a stack may.
        """
        for step in range(self._leader.schedule.steps):
            if all(self._failed):
                return
            if self._use():
                raise LoopError("The model or its loss changes itself, so it is trained by itself.")
            yield step
            self._taken = step + 1

    def _by_optimizers(self) -> None:
        """Step every loop's own optimizer along its row of the release."""
        owns = [loop._own for loop in self._loops if loop._own is not None]
        clipping = _joined([own.clipping for own in owns])
        params = [loop._weights.params for loop in self._loops]
        kinds: dict[object, list[int]] = {}
        for row, own in enumerate(owns):
            one = SteppedAsOne.takes(own.optimizer, self._params.dtype)
            kinds.setdefault(type(own.optimizer) if one else row, []).append(row)
        as_one = [
            # All of them are one tensor, some of them a copy.
            (
                slice(None) if len(rows) == len(owns) else rows,
                SteppedAsOne([owns[k].optimizer for k in rows], [params[k] for k in rows]),
            )
            for kind, rows in kinds.items()
            if isinstance(kind, type)
        ]
        apart = [kind for kind in kinds if isinstance(kind, int)]

        def step(row: int, loop: Loop) -> None:
            loop.check()  # this one's weights are in its model, and are taken from there
            loop._descend(owns[row], release[row])
            loop._weights.accept()
            self._params[row] = loop._weights.flat

        for _ in self._steps():
            release = self._oracle.gradient(
                self._oracle.sample(),
                self._params,
                clipping=clipping,
                noise_multiplier=owns[0].noise_multiplier,
            )
            for rows, stepped in as_one:
                weights = self._params[rows]
                stepped.step(weights, release[rows])
                self._params[rows] = weights
            self._each(step, apart)
        for _, stepped in as_one:
            stepped.hand_back()

    def _by_method(self) -> None:
        """Let the method step for all loops."""
        method, paces = self._leader._method, [loop._paces for loop in self._loops]
        state: Any = method.init(self._params, [loop._candidate for loop in self._loops])
        level = all(pace == 1.0 for each in paces for pace in each)
        for step in self._steps():
            if not level:
                self._oracle.pace = self._params.new_tensor([each[step] for each in paces])
            state = method.update(state, self._oracle)
            self._params, report = state.params, method.report(state)
            for row, loop in enumerate(self._loops):
                own = {name: values[row : row + 1] for name, values in report.items()}
                loop._history.append(own)


def _joined(clippings: Sequence[Clipping]) -> Clipping:
    """Return the clipping of a stack: every loop's own bound."""
    first = clippings[0]
    if not isinstance(first, Flat):
        return first
    bounds = [each.max_grad_norm for each in clippings if isinstance(each, Flat)]
    return type(first)(torch.tensor(bounds, dtype=torch.float64))
