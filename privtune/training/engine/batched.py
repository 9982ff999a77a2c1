"""Clipped sums of many candidates in one pass, planned, run and captured by the rules of layers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import nn

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.training.engine.compute import full_precision
from privtune.training.engine.coupled import refuse_coupling
from privtune.training.engine.layers import ruled, unruled
from privtune.training.engine.passes import Lowered, Program, Tape, losses_of, plan_model, tape_of
from privtune.training.engine.record import Captured, NotCapturedError, capture
from privtune.training.engine.rules import (
    ProductUse,
    add_sums,
    count,
    emptied,
    nonfinite,
    norms_by_use,
    split,
)
from privtune.training.engine.self_check import KernelMismatchError, check_kernel
from privtune.training.engine.transforms import Transformed, held_by_norms, with_norms
from privtune.training.mechanism.clipping import CoordinateTransform
from privtune.training.mechanism.data import synthetic
from privtune.training.mechanism.device import looks_freely
from privtune.training.mechanism.kernel import Layout, LossOf, Rows

if TYPE_CHECKING:
    from privtune.training.mechanism.clipping import Clipping

_ROUGH = 0.1  # what 8 binary digits may differ by, in the check of a pass in fewer digits
_RARE = 4  # a capture costs as much as some 20 runs without one, but sizes are few: most come again
_LARGE = 2**22  # a model of more weights, frozen ones included, is bound by its products
_FEW_BYTES = 2**23  # of transformed norms in a capture: the memory model has room for them


class NotBatchableError(PrivTuneError):
    """The batched engine cannot take a model; another path may."""


class BatchedKernel:
    """Clipped sums of all candidates at once, without per-sample gradients of large layers.

    The model is run on one record of one candidate, under two nested ``vmap``; forward and
    backward pass are captured once for each shape and replayed.

    Args:
        model: Makes the model, in the mode to train it in: dropout in evaluation stays off.
        loss_of: The loss of a record.
        x: Inputs of a few records, for shape and type alone, ``[n, ...]``.
        y: Targets of a few records, likewise.
        device: Where to compute.
        all_classes: Whether no target is negative, so that none can be an index to ignore.
        low: In what numbers passes are run, if not those of the parameters; norms, sums, and losses
            that are released stay in those.

    Raises:
        InvalidInputError: If layers couple the records of a batch, or the loss couples them.
        NotBatchableError: If the model cannot run under ``vmap``, or the check fails: norms and
            clipped sums of a few synthetic records must equal those of records taken one by one.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        loss_of: LossOf,
        *,
        x: torch.Tensor,
        y: torch.Tensor,
        device: torch.device,
        all_classes: bool = False,
        low: torch.dtype | None = None,
    ) -> None:
        self.module = model().to(device)
        own = ruled(self.module)
        self._device = device
        self._x, self._y = synthetic(x, y, (1, 1), device)
        self._x, self._y = self._x[0], self._y[0]
        refuse_coupling(self.module)
        self.layout = Layout(self.module)
        self._loss_of = loss_of
        # Held while the model itself runs: other weights are put into it. Programs need no lock.
        self._running = threading.Lock()
        self._seen: Counter[tuple[int, ...]] = Counter()
        self._rare: dict[tuple[int, ...], Tape] = {}
        self._programs: dict[tuple[int, ...], Tape] = {}
        self._loss_programs: dict[tuple[int, int], Program] = {}
        self._low: Lowered | None = None
        example = synthetic(x, y, (2, 3), device)
        try:
            self._plan(example, all_classes, copy_all=False)
        except NotBatchableError as error:
            unruled(self.module)
            if own and self._plans(example, all_classes, copy_all=False):
                raise InvalidInputError(
                    "norms_of", ", ".join(own), f"must give the gradients of each record ({error})"
                ) from error
            if not self._plans(example, all_classes, copy_all=True):
                raise error from None
        if low is not None:
            self._lower(low, *example)

    def _plans(
        self, example: tuple[torch.Tensor, ...], all_classes: bool, *, copy_all: bool
    ) -> bool:
        """Say whether a kernel with another plan passes its check, and plan so."""
        try:
            self._plan(example, all_classes, copy_all=copy_all)
        except NotBatchableError:
            return False
        return True

    def _plan(
        self, example: tuple[torch.Tensor, ...], all_classes: bool, *, copy_all: bool
    ) -> None:
        """Plan how parameters are used, and check the kernel with that plan."""
        x, y = example
        try:
            self.plan = plan_model(
                self.module,
                self._loss_of,
                self.layout,
                x=x,
                y=y,
                all_classes=all_classes,
                copy_all=copy_all,
            )
            self._norms_hold = held_by_norms(self.plan.uses, self.layout)
            self._rare.clear()
            check_kernel(self, self.module, self._loss_of, x, y, sites=self.plan.sites)
        except KernelMismatchError as error:
            raise NotBatchableError(str(error)) from error
        except PrivTuneError:
            raise
        except Exception as error:
            raise NotBatchableError(f"{type(error).__name__}: {error}") from error

    def _lower(self, dtype: torch.dtype, x: torch.Tensor, y: torch.Tensor) -> None:
        """Run passes in numbers of fewer digits from here on, and check that these suffice."""
        self._low = Lowered.of(self.module, dtype)
        self._rare.clear()
        sites = self.plan.sites
        try:
            check_kernel(self, self.module, self._loss_of, x, y, sites=sites, tolerance=_ROUGH)
        except Exception as error:
            raise NotBatchableError(f"{type(error).__name__}: {error}") from error

    def accumulate(
        self,
        params: torch.Tensor,
        rows: Rows,
        clipping: Clipping,
        *,
        out: torch.Tensor,
        halves: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Add the clipped sums over the records of ``rows`` to ``out``: see ``Kernel``."""
        masks = self._masks(rows)
        inputs = (_plain(params), _plain(rows.x), _plain(rows.y), *masks)
        normed = self._norms_too(rows, clipping)
        with self._running:
            program, uses = self._program(params, rows, masks, normed=normed)
            early = None if isinstance(program, Captured) else program(*inputs)
            used = tuple(uses)
        with torch.inference_mode():
            if early is not None:
                tape, early = early, None
            elif normed and isinstance(clipping, CoordinateTransform):
                tape = program(_plain(clipping.center), _plain(clipping.scale), *inputs)
            else:
                tape = program(*inputs)
            parts = split(used, tape)
            if isinstance(clipping, CoordinateTransform):
                known = tape[2 * len(used) :] if isinstance(program, Captured) and normed else ()
                sums = Transformed(used, self.layout, clipping, known)
                return sums.accumulate(parts, rows, out=out, halves=halves)
            del tape  # norms let go of what they have read
            layout, by_layer = self.layout, clipping.by_layer
            norms, saved = norms_by_use(used, parts, layout=layout, by_layer=by_layer)
            bad = nonfinite(norms, look=looks_freely(norms.device))
            if bad is None:
                coefficients = clipping.factors(norms).mul_(rows.mask)
            else:
                saved = emptied(saved, bad)
                norms.masked_fill_(bad, torch.inf)
                coefficients = clipping.coefficients(norms).mul_(rows.mask)
            add_sums(used, saved, coefficients, layout.split(out), layout=layout)
            return count(clipping, norms, rows, bad, halves)

    @cached_property
    def row_bytes(self) -> tuple[float, float]:
        """Return the bytes of work space that a record takes in a step, and while it is captured.

        The pass itself is followed tensor by tensor; what norms and sums add is what they keep, and the
        scaled copy of the largest output gradient. A capture holds the results of a pass twice to compare
        them.
        """
        rows = 32 if self.captures else 4
        example = torch.zeros(1, self.layout.size, dtype=self.layout.dtype, device=self._device)
        masks = tuple(s.empty((1, rows), example) for s in self.plan.sites)
        x, y = synthetic(self._x, self._y, (1, rows), self._device)
        program, uses = tape_of(self.module, self._loss_of, self.layout, self.plan)
        try:
            captured = capture(program, (example, x, y, *masks))
            peak, tape = captured.peak_bytes, captured(example, x, y, *masks)
        except NotCapturedError as error:
            peak, tape = error.held, program(example, x, y, *masks)
        held = {t.untyped_storage().data_ptr() for t in tape}
        scaled, results = max(t.nbytes for t in tape), sum(t.nbytes for t in tape)
        with torch.inference_mode():
            _, saved = norms_by_use(uses, split(uses, tape), layout=self.layout, by_layer=False)
        extra = sum(
            t.untyped_storage().nbytes()
            for kept in saved
            for t in kept
            if t.untyped_storage().data_ptr() not in held
        )
        working = (peak + extra + scaled - example.nbytes) / rows
        return working, working + results / rows

    @cached_property
    def captures(self) -> bool:
        """Whether passes are captured: a large model is bound by its products, and gains nothing."""
        return sum(p.numel() for p in self.module.parameters()) <= _LARGE

    @property
    def drops(self) -> bool:
        """Whether a pass draws from the streams of dropout."""
        return bool(self.plan.sites)

    @property
    def convolves(self) -> bool:
        """Whether the model has convolutions, which run candidate by candidate."""
        return any(isinstance(use, ProductUse) and use.taps > 1 for use in self.plan.uses)

    def losses(self, params: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the loss of every row, shape ``[K, M]``."""
        key = (rows.mask.shape[0], rows.mask.shape[1])
        inputs = (_plain(params), _plain(rows.x), _plain(rows.y))
        with torch.no_grad():
            with self._running:
                if key not in self._loss_programs:
                    example = (inputs[0], *synthetic(rows.x[0], rows.y[0], key, params.device))
                    plain = losses_of(self.module, self._loss_of, self.layout, self.plan)
                    self._loss_programs[key] = self._captured(plain, example)
                program = self._loss_programs[key]
                if not isinstance(program, Captured):
                    return program(*inputs)[0]
            return program(*inputs)[0]

    def _norms_too(self, rows: Rows, clipping: Clipping) -> bool:
        """Say whether a captured pass gives the norms of transformed gradients, too."""
        held = self._norms_hold
        if held is None or not isinstance(clipping, CoordinateTransform):
            return False
        k, m = rows.mask.shape
        few = k * (held[0] + m * held[1]) <= _FEW_BYTES
        return few and full_precision(rows.mask.device)

    def _program(
        self, params: torch.Tensor, rows: Rows, masks: Sequence[torch.Tensor], *, normed: bool
    ) -> Tape:
        """Return the program for the shape of ``rows``: captured once the shape is common."""
        shape = (rows.mask.shape[0], rows.mask.shape[1])
        key = (*shape, 1) if normed else shape
        self._seen[key] += 1
        every = (self.module, self._loss_of, self.layout, self.plan)
        if self._seen[key] <= _RARE or not self.captures:
            if key not in self._rare:
                self._rare[key] = tape_of(*every, low=self._low)
            return self._rare[key]
        if key not in self._programs:
            x, y = synthetic(rows.x[0], rows.y[0], shape, params.device)
            drawn = tuple(site.empty(shape, params) for site in self.plan.sites)
            # Not from the global generator, which a trial in another thread may be drawing from.
            own = torch.Generator(params.device).manual_seed(0)
            made_up = torch.randn(
                params.shape, dtype=params.dtype, device=params.device, generator=own
            )
            example = (made_up, x, y, *drawn)
            plain, uses = tape_of(*every, low=self._low)
            whole = plain
            if normed:
                example = (0.1 * made_up, made_up.square() + 1.0, *example)
                whole = with_norms(plain, uses, layout=self.layout)
            program = self._captured(whole, example)
            self._programs[key] = (program if isinstance(program, Captured) else plain), uses
        return self._programs[key]

    def _captured(self, program: Program, example: tuple[torch.Tensor, ...]) -> Program:
        """Return a program as a graph; one that reads a value, or that is not worth it, as it is."""
        try:
            return capture(program, example) if self.captures else program
        except NotCapturedError:
            return program

    def _masks(self, rows: Rows) -> tuple[torch.Tensor, ...]:
        """Draw a mask for every place of dropout, each candidate's from its own stream."""
        masks: list[torch.Tensor] = []
        for site in self.plan.sites:
            mask = site.empty(rows.mask.shape, rows.mask)
            for row, size, stream in zip(mask, rows.sizes, rows.dropout, strict=True):
                site.fill(row[:size], stream)
            masks.append(mask)
        return tuple(masks)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor laid out as captured graphs expect it: of another, they would read other places."""
    tensor = tensor.detach().contiguous()
    return tensor if tensor.storage_offset() == 0 else tensor.clone()
