"""Clipped sums of many candidates in one pass, planned, run and captured by the rules of layers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.training.engine.capture import Captured, NotCapturedError, capture, changed
from privtune.training.engine.compute import full_precision
from privtune.training.engine.operations import Intercept
from privtune.training.engine.passes import Lowered, Passes, PassPlan, Program, Tape
from privtune.training.engine.rules import (
    ProductUse,
    Tensors,
    Transformed,
    add_sums,
    count,
    emptied,
    held_by_norms,
    length,
    norms_by_use,
    split,
    unusable_rows,
    with_norms,
)
from privtune.training.engine.watch import ruled, unruled
from privtune.training.mechanism.clipping import CoordinateTransform, Flat, looks_freely
from privtune.training.mechanism.kernel import (
    REACHED_RECORDS,
    SAME_SHAPE,
    Layout,
    LossOf,
    Rows,
    add_reach,
    describe_shapes,
    fresh,
    share_flat,
    unlike_fixed,
    unwritten,
)
from privtune.training.mechanism.made_up import Domain
from privtune.training.mechanism.streams import GLOBAL_GENERATOR, Streams

if TYPE_CHECKING:
    from privtune.training.mechanism.clipping import Clipping


_TOLERANCE = 1e-4
_ROUGH = 0.1  # what 8 binary digits may differ by, in the check of a pass in fewer digits
_RARE = 4  # a capture costs as much as some 20 runs without one, but sizes are few: most come again
_LARGE = 2**22  # a model of more weights, frozen ones included, is bound by its products
_ANY_DOMAIN = Domain()
_FEW_BYTES = 2**23  # of transformed norms in a capture: the memory model has room for them


class NotBatchableError(PrivTuneError):
    """The batched engine cannot take a model; another path may."""


@contextmanager
def _not_batchable() -> Iterator[None]:
    """Say of whatever a user's code raises under ``vmap`` that the model does not suit it."""
    try:
        yield
    except PrivTuneError:
        raise
    except Exception as error:
        raise NotBatchableError(f"{type(error).__name__}: {error}") from error


def _refused(attempt: Callable[[], None]) -> bool:
    try:
        attempt()
    except NotBatchableError:
        return True
    return False


class BatchedKernel:
    """Clipped sums of all candidates at once, without per-sample gradients of large layers."""

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
        domain: Domain = _ANY_DOMAIN,
    ) -> None:
        self.module = model().to(device)
        own = ruled(self.module)
        self._device = device
        self._domain = domain
        self._x, self._y = domain.draw(x, y, (1, 1), device)
        self._x, self._y = self._x[0], self._y[0]
        refuse_coupling(self.module)
        self.layout = Layout(self.module)
        self.passes = Passes(self.module, loss_of, self.layout)
        # Held while the model itself runs: other weights are put into it. Programs need no lock.
        self._running = threading.Lock()
        self._seen: Counter[tuple[int, ...]] = Counter()
        self._rare: dict[tuple[int, ...], Tape] = {}
        self._programs: dict[tuple[int, ...], Tape] = {}
        self._loss_programs: dict[tuple[int, int], Program] = {}
        x, y = domain.draw(x, y, (2, 3), device)

        def try_plan(*, copy_all: bool = False) -> None:
            with _not_batchable():
                self.passes.find_plan(x, y, all_classes=all_classes, copy_all=copy_all)
                self._norms_hold = held_by_norms(self.plan.uses, self.layout)
                self._check(x, y)

        try:
            try_plan()
        except NotBatchableError as error:
            unruled(self.module)
            if own and not _refused(try_plan):
                raise InvalidInputError(
                    "norms_of", ", ".join(own), f"must give the gradients of each record ({error})"
                ) from error
            if _refused(partial(try_plan, copy_all=True)):
                raise error from None
        if low is not None:
            self.passes.low = Lowered.of(self.module, low)
            with _not_batchable():
                self._check(x, y, tolerance=_ROUGH)

    @property
    def plan(self) -> PassPlan:
        """How the model uses its parameters."""
        return self.passes.plan

    def _check(self, x: torch.Tensor, y: torch.Tensor, *, tolerance: float = _TOLERANCE) -> None:
        """Compare clipped sums of made-up records with those of records taken one by one.

        One bound clips about half of the records, another none; the sums show wrong norms, wrong
        gradients, missed uses of parameters, and losses that couple the records of a batch.
        """
        self._rare.clear()
        candidates, records = x.shape[:2]
        layout = self.layout
        generator = torch.Generator().manual_seed(1)
        params = 0.3 * torch.randn(candidates, layout.size, generator=generator, dtype=layout.dtype)
        params = params.to(x.device)

        def rows() -> Rows:
            ones, sizes = params.new_ones(candidates, records), [records] * candidates
            # The check's masks are public: they touch no data.
            own = range(candidates)
            drops = [Streams(bytes(32)).generator("dropout", k, device=x.device) for k in own]
            return Rows(x, y, sizes, ones, drops)

        masks = self._masks(rows())

        def alone() -> torch.Tensor:
            """Return the gradients of records taken one by one, shape ``[K, B, P]``."""
            pairs = [(k, b) for k in range(candidates) for b in range(records)]
            found = [
                self.passes.gradient(params[k], x[k, b], y[k, b], [mask[k, b] for mask in masks])
                for k, b in pairs
            ]
            return torch.stack(found).view(candidates, records, -1)

        gradients = alone()
        if x.is_floating_point() and not bool(gradients.isfinite().all()):
            x = x.abs() + 1.0  # a loss may take logarithms or roots of inputs that are above 0
            gradients = alone()
        norms = length(gradients)
        if not bool(norms.isfinite().all()):
            raise NotBatchableError(
                "gradients of made-up records are not finite, so the path cannot be checked"
            )
        for bound in (float(norms.median()), 10.0 * float(norms.max()) + 1.0):
            clipping = Flat(max(bound, 1e-6))
            coefficients = clipping.coefficients(norms.unsqueeze(0))[0]
            expected = (coefficients.unsqueeze(-1) * gradients).sum(dim=1)
            found = torch.zeros_like(params)
            self.accumulate(params, rows(), clipping, out=found)
            scale = float(expected.abs().max())
            if not torch.allclose(found, expected, rtol=tolerance, atol=tolerance * scale + 1e-9):
                raise NotBatchableError(
                    "clipped sums of a few synthetic records differ from those of records taken one "
                    "by one: the model or the loss couples records, or uses a parameter in a way "
                    "that this path does not see"
                )

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
            unusable = unusable_rows(norms, look=looks_freely(norms.device))
            if unusable is None:
                coefficients = clipping.factors(norms).mul_(rows.mask)
            else:
                saved = emptied(saved, unusable)
                norms.masked_fill_(unusable, torch.inf)
                coefficients = clipping.coefficients(norms).mul_(rows.mask)
            add_sums(used, saved, coefficients, layout.split(out), layout=layout)
            return count(clipping, norms, rows, unusable, halves)

    @cached_property
    def row_bytes(self) -> tuple[float, float]:
        """Return the bytes of work space that a record takes in a step, and while it is captured."""
        rows = 32 if self.captures else 4
        example = torch.zeros(1, self.layout.size, dtype=self.layout.dtype, device=self._device)
        masks = tuple(s.empty((1, rows), example) for s in self.plan.sites)
        x, y = self._domain.draw(self._x, self._y, (1, rows), self._device)
        program, uses = self.passes.tape()
        inputs = (example, x, y, *masks)
        try:
            captured = capture(program, inputs, self._others(inputs, 1))
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
                    x, y = self._domain.draw(rows.x[0], rows.y[0], key, params.device)
                    example = (inputs[0], x, y)
                    self._loss_programs[key] = self._captured(self.passes.losses(), example, 1)
                program = self._loss_programs[key]
                if not isinstance(program, Captured):
                    return program(*inputs)[0]
            return program(*inputs)[0]

    def reach(self, params: torch.Tensor) -> dict[str, float]:
        """Return which parameters the losses of made-up records reach: see ``Kernel``."""
        shape = (1, REACHED_RECORDS)
        x, y = self._domain.draw(self._x, self._y, shape, self._device)
        stream = Streams(bytes(32)).generator("dropout", device=self._device)
        rows = Rows(x, y, [REACHED_RECORDS], params.new_ones(shape), [stream])
        masks = self._masks(rows)
        reach: dict[str, float] = {}
        with self._running:
            for b in range(REACHED_RECORDS):
                drawn = [mask[0, b] for mask in masks]
                gradients = self.passes.gradients(params, x[0, b], y[0, b], drawn)
                add_reach(reach, self.layout.shapes, gradients)
        return reach

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
        if self._seen[key] <= _RARE or not self.captures:
            if key not in self._rare:
                self._rare[key] = self.passes.tape()
            return self._rare[key]
        if key not in self._programs:
            x, y = self._domain.draw(rows.x[0], rows.y[0], shape, params.device)
            drawn = tuple(site.empty(shape, params) for site in self.plan.sites)
            # Not from the global generator, which a trial in another thread may be drawing from.
            own = torch.Generator(params.device).manual_seed(0)
            made_up = torch.randn(
                params.shape, dtype=params.dtype, device=params.device, generator=own
            )
            example = (made_up, x, y, *drawn)
            place = 1
            plain, uses = self.passes.tape()
            whole = plain
            if normed:
                example = (0.1 * made_up, made_up.square() + 1.0, *example)
                place = 3
                whole = with_norms(plain, uses, layout=self.layout)
            program = self._captured(whole, example, place)
            self._programs[key] = (program if isinstance(program, Captured) else plain), uses
        return self._programs[key]

    def _captured(self, program: Program, example: Tensors, place: int) -> Program:
        """Return a program as a graph; one that reads a value, or that is not worth it, as it is.

        The inputs of records are at a ``place`` of what the program takes, and their targets follow.
        """
        if not self.captures:
            return program
        try:
            return capture(program, example, self._others(example, place))
        except NotCapturedError:
            return program

    def _others(self, example: Tensors, place: int) -> Tensors:
        """Return other tensors than those of an example, with other made-up records of the domain."""
        x, y = example[place], example[place + 1]
        others = list(changed(example))
        # Numbers outside of the domain would make the loss raise.
        shape = (x.shape[0], x.shape[1])
        others[place : place + 2] = self._domain.draw(x[0], y[0], shape, x.device, seed=1)
        return tuple(others)

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


class OneByOneKernel:
    """Plain autograd on batches of one record: for what no transform takes."""

    drops = True
    """Whether a pass draws from the streams of dropout: nothing says that it does not."""

    def __init__(
        self,
        model: Callable[[], nn.Module],
        loss_of: LossOf,
        *,
        x: torch.Tensor,
        y: torch.Tensor,
        device: torch.device,
        domain: Domain = _ANY_DOMAIN,
    ) -> None:
        module = model().to(device)
        refuse_coupling(module)
        self._flat = share_flat(module)  # weights are written while the model runs, and put back
        self.layout = Layout(module)
        self.module, self._loss_of = module, loss_of
        self._params = [p for p in module.parameters() if p.requires_grad]
        self._x = x[:0]
        self._y = y[:0]
        self._domain = domain
        inputs, targets = domain.draw(x, y, (1, 2), device)
        mask = self._flat.new_ones(1, 2)
        rows = Rows(inputs, targets, [2], mask, [torch.Generator(device)])
        try:
            out = torch.zeros_like(self._flat)[None]
            self.accumulate(self._flat[None], rows, Flat(1.0), out=out)
            seen, own_loss = fresh(module, loss_of)
            # With gradients: a loss may take some of its own.
            with torch.enable_grad(), Intercept(None, deterministic=True):
                own_loss(seen, inputs[0, :1], targets[0, :1])
        except PrivTuneError:
            raise
        except Exception as error:
            raise _no_loss(error, module, inputs[0, :1], targets[0, :1]) from error
        if changed_parts := sorted(unlike_fixed(seen, module)):
            remedy = "Use GroupNorm or LayerNorm in place of running statistics."
            if any("parametrizations" in name or name.endswith("_u") for name in changed_parts):
                remedy = (
                    "Spectral norm takes a step at each record: use "
                    "torch.nn.utils.parametrizations.weight_norm, or no bound on weights."
                )
            raise InvalidInputError(
                "model",
                type(module).__name__,
                f"must not change its buffers in a pass ({', '.join(changed_parts[:3])}): they would hold "
                "something of every record",
                remedy,
            )

    def accumulate(
        self,
        params: torch.Tensor,
        rows: Rows,
        clipping: Clipping,
        *,
        out: torch.Tensor,
        halves: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Add the clipped sums, record after record: see ``Kernel``."""
        unusable = torch.zeros(len(params), dtype=torch.long)
        sums, counts = torch.zeros_like(out), out.new_zeros(len(out))
        lengths = [self.layout.size]
        if clipping.by_layer:
            owned = self.layout.layers.values()
            lengths = [sum(self.layout.shapes[n].numel() for n in names) for names in owned]
        for k, size in enumerate(int(n) for n in rows.sizes):
            with self._at(params[k]), _seeded(rows.dropout[k]):
                for b in range(size):
                    gradient = self._gradient(rows, k, b)
                    if isinstance(clipping, CoordinateTransform):
                        gradient = (gradient - clipping.center[k]) / clipping.scale[k]
                    parts = torch.split(gradient, lengths)
                    norms = torch.stack([length(part.unsqueeze(0)) for part in parts])
                    if not rows.mask[k, b]:
                        continue
                    if not bool(norms.isfinite().all()):
                        unusable[k] += 1
                        continue
                    stacked = norms.unsqueeze(1).expand(-1, len(params), -1)
                    own = clipping.coefficients(stacked)[:, k]
                    sums[k] += torch.cat([c * part for c, part in zip(own, parts, strict=True)])
                    counts[k] += clipping.unclipped(stacked)[k, 0].to(norms) - 0.5
        out += sums  # all at once: a pass that raises has changed nothing
        if halves is not None:
            halves += counts
        return unusable.to(out.device) if bool(unusable.any()) else None

    def _gradient(self, rows: Rows, k: int, b: int) -> torch.Tensor:
        """Return the gradient of one record, shape ``[P]``, by a copy of the model that forgets it."""
        parts = []
        for parameter, part in zip(self._params, self._gradients(rows, k, b), strict=True):
            gradient = torch.zeros_like(parameter) if part is None else part
            parts.append((gradient.to_dense() if gradient.is_sparse else gradient).flatten())
        return torch.cat(parts)

    def _gradients(self, rows: Rows, k: int, b: int) -> Sequence[torch.Tensor | None]:
        """Return the gradient of one record in each parameter, None where the loss does not reach it."""
        module, loss_of = fresh(self.module, self._loss_of)
        with torch.enable_grad(), Intercept(None, generator=rows.dropout[k]):
            loss = loss_of(module, rows.x[k, b : b + 1], rows.y[k, b : b + 1])
            if not loss.requires_grad:  # a branch on which no weight has a part
                return [None for _ in self._params]
            return torch.autograd.grad(loss.sum(), self._params, allow_unused=True)

    def reach(self, params: torch.Tensor) -> dict[str, float]:
        """Return which parameters the losses of made-up records reach: see ``Kernel``."""
        shape = (1, REACHED_RECORDS)
        x, y = self._domain.draw(self._x, self._y, shape, params.device)
        stream = Streams(bytes(32)).generator("dropout", device=params.device)
        rows = Rows(x, y, [REACHED_RECORDS], params.new_ones(shape), [stream])
        reach: dict[str, float] = {}
        with self._at(params), _seeded(stream):
            for b in range(REACHED_RECORDS):
                add_reach(reach, self.layout.shapes, self._gradients(rows, 0, b))
        return reach

    def losses(self, params: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the loss of every record, without dropout, shape ``[K, M]``."""
        out = params.new_zeros(rows.mask.shape)
        for k, size in enumerate(int(n) for n in rows.sizes):
            with self._at(params[k]), torch.enable_grad(), Intercept(None, deterministic=True):
                for b in range(size):
                    module, loss_of = fresh(self.module, self._loss_of)
                    loss = loss_of(module, rows.x[k, b : b + 1], rows.y[k, b : b + 1])
                    out[k, b] = loss.detach().sum()
        return out

    @contextmanager
    def _at(self, point: torch.Tensor) -> Iterator[None]:
        """Put the model where it is to be evaluated, and back."""
        stood = self._flat.clone()
        self._flat.copy_(point)
        try:
            with unwritten(self.module):
                yield
        finally:
            self._flat.copy_(stood)


_WANTS_WHOLE = ("scalar type Long", "target dtype to be Long")  # what torch says of targets


def _no_loss(
    error: Exception, module: nn.Module, x: torch.Tensor, y: torch.Tensor
) -> InvalidInputError:
    """Return the error of a loss that raises on a made-up record: its message, the shapes, what helps."""
    shapes, unlike = describe_shapes(module, x, y)
    first = str(error).strip().partition("\n")[0]
    whole = "" if y.is_floating_point() else " and write y.long() in the loss"
    remedy = (
        "Numbers around 0, in [0, 1], whole ones from 0 or 1 and shares of 1 were tried: let codes and "
        "labels begin at 0 in the data where model or loss subtract an offset; declare target_range=(low, "
        f"high){whole} where the loss takes other targets; and correct the loss where it takes no record."
    )
    wants_whole = any(words in first for words in _WANTS_WHOLE)
    if y.is_floating_point() and wants_whole:
        remedy = "Write y.long() in the loss: targets are floating, as target_range makes whole ones, too."
    if unlike and ("size" in first or "shape" in first):
        remedy = SAME_SHAPE
    return InvalidInputError(
        "model",
        type(module).__name__,
        f"must have a loss on a made-up record by itself ({type(error).__name__}: {first}), with {shapes}",
        remedy,
    )


@contextmanager
def _seeded(stream: torch.Generator) -> Iterator[None]:
    """Seed the global generator from a candidate's own stream, and leave it as it was."""
    seed = int(torch.randint(2**62, (), generator=stream, device=stream.device))
    devices = [] if stream.device.type == "cpu" else [stream.device]
    with GLOBAL_GENERATOR, torch.random.fork_rng(devices=devices):
        torch.random.manual_seed(seed)
        yield


def _is_fixed(norm: nn.Module) -> bool:
    """Say whether a normalisation works by numbers that no record changes: those of evaluation mode."""
    # It is w (x - m) / sqrt(v + e) + b there. Mean m and variance v are buffers that no step updates; a pass
    # that writes to them, as one does that goes back to training mode, is refused. So outputs hang on one
    # record and the weights alone, also where w and b are trained: a record has a gradient of its own, and
    # clipping bounds it.
    return not norm.training and norm.running_mean is not None


def refuse_coupling(module: nn.Module) -> None:
    """Refuse layers that mix the records of a batch: no per-sample gradient exists for them."""
    coupled = [
        f"{name} ({type(part).__name__})"
        for name, part in module.named_modules()
        if (isinstance(part, _BatchNorm) and not _is_fixed(part))
        or (isinstance(part, _InstanceNorm) and part.track_running_stats and part.training)
    ]
    if coupled:
        raise InvalidInputError(
            "model",
            ", ".join(coupled),
            "must treat each record by itself",
            "Use GroupNorm or LayerNorm in place of batch statistics, or leave it in evaluation mode: "
            "module.eval().",
        )
    changing = [
        f"{name} ({type(part).__name__})"
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag)
        and (part.max_norm is not None or part.scale_grad_by_freq)
    ]
    if changing:
        raise InvalidInputError(
            "model",
            ", ".join(changing),
            "must not have max_norm, which changes the rows that occur, nor scale_grad_by_freq, "
            "which counts words across records",
            "Leave both options off; clipping bounds each record.",
        )
