"""Kernels that compute clipped sums: many candidates in one batched pass, or record by record."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch._C import _functorch as functorch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.training.engine.capture import Captured, NotCapturedError, capture, changed
from privtune.training.engine.compute import full_precision
from privtune.training.engine.operations import Intercept
from privtune.training.engine.passes import Lowered, Passes, PassPlan, Program, Tape
from privtune.training.engine.replay import MemoryPool
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
    Kernel,
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
from privtune.training.mechanism.streams import GLOBAL_GENERATOR, Streams, seed_global_generator

if TYPE_CHECKING:
    from privtune.training.mechanism.clipping import Clipping


_TOLERANCE = 1e-4
_ROUGH = 0.1  # what 8 binary digits may differ by, in the check of a pass in fewer digits
_RARE = 4  # a capture costs as much as some 20 runs without one, but sizes are few: most come again
_LARGE = 2**22  # a model of more weights, frozen ones included, is bound by its products
_ANY_DOMAIN = Domain()
_REPLAYED_BYTES = 2**28  # a graph keeps its memory, and a larger pass is bound by its products
_FEW_BYTES = 2**23  # of transformed norms in a capture: the memory model has room for them


class NotBatchableError(PrivTuneError):
    """The error that the batched kernel cannot compute a model; the kernel for single records may."""


@contextmanager
def _not_batchable() -> Iterator[None]:
    """Turn any error of a user's code under ``vmap`` into ``NotBatchableError``.

    PrivTune's own errors pass: they name what a user did wrong, and no other kernel would take it
    either.
    """
    try:
        yield
    except PrivTuneError:
        raise
    except Exception as error:
        raise NotBatchableError(f"{type(error).__name__}: {error}") from error


def _refused(attempt: Callable[[], None]) -> bool:
    """Run a function; say whether it raised ``NotBatchableError``.

    Every other error passes: it is no reason to try a slower way.
    """
    try:
        attempt()
    except NotBatchableError:
        return True
    return False


class BatchedKernel(Kernel):
    """The kernel that computes clipped sums of all candidates at once by the gradient rules of layers.

    Everything that could be wrong is looked for once, when the kernel is made, on made-up records of
    the domain: which parameters a rule covers, and whether clipped sums equal those of records taken
    one by one. What is left for a step is to find the program for the shape of its rows and to run
    it.

    A kernel is tried in three ways, the fastest first: with the rules of users' layers and of
    torch's; without those of users (if that works, the user's rule is at fault, and is refused); and
    with a copy of every parameter for each record, which is exact for any use.

    Attributes:
        module: A copy of the model, on the device. Its own weights are never trained: programs are
            given the candidates' weights as tensors.
        layout: Where its trained parameters lie in a vector ``[P]``.
        passes: The forward and backward pass of one record, over many candidates and records at once.

    Args:
        model: Makes the copy.
        loss_of: The loss of one record.
        x: Inputs like those of the records, of which shape and type are read.
        y: Targets likewise.
        device: Where to run.
        all_classes: Whether no target is an index to ignore, so that a pass need not look for one.
        low: A type of fewer digits for the passes, or None.
        domain: What made-up records are drawn from.

    Raises:
        NotBatchableError: If all three ways fail.
        InvalidInputError: If the model couples the records of a batch, or a rule of a user's is
            wrong.
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
        domain: Domain = _ANY_DOMAIN,
    ) -> None:
        self.module = model().to(device)
        _leave_batched_weights(self.module)
        layers = ruled(self.module)
        self._device = device
        self._domain = domain
        xs, ys = domain.draw(x, y, (1, 1), device)
        self._x = xs[0]
        self._y = ys[0]
        refuse_coupling(self.module)
        self.layout = Layout(self.module)
        self.passes = Passes(self.module, loss_of, self.layout)
        # Held while the model itself runs: other weights are put into it. Programs need no lock.
        self._running = threading.Lock()
        self._seen: Counter[tuple[int, ...]] = Counter()
        self._rare: dict[tuple[int, ...], Tape] = {}
        self._programs: dict[tuple[int, ...], Tape] = {}
        self._loss_programs: dict[tuple[int, int], Program] = {}
        self._pool = MemoryPool()
        x, y = domain.draw(x, y, (2, 3), device)

        def try_plan(*, copy_all: bool = False) -> None:
            """Plan and check the passes on made-up data of two candidates and three records.

            With one candidate or one record a model that mixes candidates or records up would look as
            one that does not.
            """
            with _not_batchable():
                self.passes.find_plan(
                    x,
                    y,
                    all_classes=all_classes,
                    copy_all=copy_all,
                )
                self._norms_hold = held_by_norms(self.plan.uses, self.layout)
                self._check(x, y)

        try:
            try_plan()
        except NotBatchableError as error:
            unruled(self.module)
            if layers and not _refused(try_plan):
                raise InvalidInputError(
                    "norms_of",
                    ", ".join(layers),
                    f"must give the gradients of each record ({error})",
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

    def _check(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        *,
        tolerance: float = _TOLERANCE,
    ) -> None:
        """Compare clipped sums of made-up records with those of records taken one by one.

        One bound clips about half of the records, another none; the sums show wrong norms, wrong
        gradients, missed uses of parameters, and losses that couple the records of a batch.

        Candidates have other weights and other rows, so a mix-up of them shows as well. Weights are
        0.3 times normal numbers, so that deep models neither vanish nor overflow. All numbers are
        drawn from fixed seeds and streams, so a model passes or fails the same way every time, and no
        private record is looked at.

        Args:
            x: Made-up inputs ``[K, B, ...]``.
            y: Made-up targets ``[K, B, ...]``.
            tolerance: How far the sums may differ, as a share of their largest number.

        Raises:
            NotBatchableError: If they differ by more, or gradients are not finite even for inputs
                above 0.
        """
        self._rare.clear()
        candidates, records = x.shape[:2]
        layout = self.layout
        generator = torch.Generator().manual_seed(1)
        shape = (candidates, layout.size)
        params = 0.3 * torch.randn(shape, generator=generator, dtype=layout.dtype)
        params = params.to(x.device)

        def rows() -> Rows:
            """Return the rows with new dropout streams, so that each pass draws the same masks."""
            ones = params.new_ones(candidates, records)
            sizes = [records] * candidates
            # The check's masks are public: they touch no data.
            streams = Streams(bytes(32))
            drops = []
            for k in range(candidates):
                drops.append(streams.generator("dropout", k, device=x.device))
            return Rows(x, y, sizes, ones, drops)

        masks = self._masks(rows())

        def alone() -> torch.Tensor:
            """Return the gradients of records taken one by one, shape ``[K, B, P]``."""
            # Written where they stay: a large table's gradients would else be held twice.
            rows_alone = params.new_empty(candidates, records, layout.size)
            for k in range(candidates):
                for b in range(records):
                    masks_of_record = [mask[k, b] for mask in masks]
                    rows_alone[k, b] = self.passes.gradient(
                        params[k],
                        x[k, b],
                        y[k, b],
                        masks_of_record,
                    )
            return rows_alone

        gradients = alone()
        norms = length(gradients)
        if x.is_floating_point() and not bool(norms.isfinite().all()):
            x = x.abs() + 1.0  # a loss may take logarithms or roots of inputs that are above 0
            gradients = alone()
            norms = length(gradients)
        if not bool(norms.isfinite().all()):
            raise NotBatchableError(
                "gradients of made-up records are not finite, so the path cannot be checked"
            )
        # One bound that clips about half of the records, and one that clips none.
        half = float(norms.median())
        none = 10.0 * float(norms.max()) + 1.0
        clippings = [Flat(max(bound, 1e-6)) for bound in (half, none)]
        sums_alone = []
        for clipping in clippings:
            row = clipping.coefficients(norms.unsqueeze(0))[0].unsqueeze(1)
            sums_alone.append(torch.bmm(row, gradients).squeeze(1))
        del gradients  # which a large model's passes need not lie beside
        for clipping, expected in zip(clippings, sums_alone, strict=True):
            sums = torch.zeros_like(params)
            self.accumulate(params, rows(), clipping, out=sums)
            scale = float(torch.linalg.vector_norm(expected, torch.inf))
            distance = tolerance * scale + 1e-9
            # In place, since a large table's sums are many times a step's memory.
            sums.sub_(expected).abs_()
            allowed = expected.abs_().mul_(tolerance).add_(distance)
            if not bool((sums <= allowed).all()):
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
        """Add each candidate's clipped gradient sum over ``rows`` to ``out``, in one batched pass.

        In four stages: masks of dropout are drawn, the program gives the tape (for each use of a
        parameter what went in and what came back), the rules make norms of it, and the clipping makes
        coefficients of those, with which the rules form the sums. The per-record gradients
        ``[K, B, P]`` are never held at once.

        Nothing is added to ``out`` before the last stage, so a pass that raises has changed nothing.
        A record whose norm is not finite has its part of the tape emptied: times a coefficient of 0
        it would still be NaN. A program that is not captured puts weights into the model, so it runs
        under the lock; a graph needs none.

        Args:
            params: Weights of the candidates, ``[K, P]``.
            rows: M rows a candidate; rows of mask 0 are computed, and weighted by 0.
            clipping: Gives coefficients ``[1 or L, K, M]`` from norms.
            out: What is added to, ``[K, P]``; the caller may have put noise there.
            halves: What is added to, ``[K]``: 1/2 for each unclipped record, -1/2 for each clipped
                one.

        Returns:
            How many records of each candidate could not be used, ``[K]``; None where it is known to
            be none.
        """
        masks = self._masks(rows)
        inputs = (_plain(params), _plain(rows.x), _plain(rows.y), *masks)
        normed = self._norms_too(rows, clipping)
        with self._running:
            program, uses = self._program(params, rows, masks, normed=normed)
            early = None if isinstance(program, Captured) else program(*inputs)
            used = tuple(uses)
        with torch.inference_mode():
            if early is not None:
                tape = early
                early = None
            elif normed and isinstance(clipping, CoordinateTransform):
                center = _plain(clipping.center)
                scale = _plain(clipping.scale)
                tape = program(center, scale, *inputs)
            else:
                tape = program(*inputs)
            parts = split(used, tape)
            if isinstance(clipping, CoordinateTransform):
                captured_norms: Tensors = ()
                if isinstance(program, Captured) and normed:
                    # Behind both sides of each use, which is a product.
                    captured_norms = tape[2 * len(used) :]
                sums = Transformed(used, self.layout, clipping, captured_norms)
                return sums.accumulate(parts, rows, out=out, halves=halves)
            del tape  # norms let go of what they have read
            layout = self.layout
            norms, saved = norms_by_use(
                used,
                parts,
                layout=layout,
                by_layer=clipping.by_layer,
            )
            unusable = unusable_rows(norms, may_wait=looks_freely(norms.device))
            if unusable is None:
                coefficients = clipping.factors(norms)
            else:
                saved = emptied(saved, unusable)
                norms.masked_fill_(unusable, torch.inf)
                coefficients = clipping.coefficients(norms)
            coefficients = coefficients.mul_(rows.mask)
            targets = layout.split(out)
            add_sums(used, saved, coefficients, targets, layout=layout)
            return count(clipping, norms, rows, unusable, halves)

    @cached_property
    def row_bytes(self) -> tuple[float, float]:
        """The bytes of work space for one record: in an ordinary step, and during a capture.

        It is measured on one candidate and a few made-up rows, by the peak of the captured graph,
        plus what the norms keep for the sums. A small model is measured on 32 rows, since fixed costs
        count there; of a large one, 32 rows might not fit. ``stacks`` divides memory by these numbers
        before anything private runs.
        """
        rows = 32 if self.captures else 4
        layout = self.layout
        example = torch.zeros(1, layout.size, dtype=layout.dtype, device=self._device)
        masks = [site.empty((1, rows), example) for site in self.plan.sites]
        x, y = self._domain.draw(self._x, self._y, (1, rows), self._device)
        program, uses = self.passes.tape()
        inputs = (example, x, y, *masks)
        try:
            captured = capture(program, inputs, self._others(inputs, 1))
            peak = captured.peak_bytes
            tape = captured(*inputs)
        except NotCapturedError as error:
            peak = error.held
            tape = program(*inputs)
        storages = {t.untyped_storage().data_ptr() for t in tape}
        scaled = max(t.nbytes for t in tape)
        results = sum(t.nbytes for t in tape)
        with torch.inference_mode():
            parts = split(uses, tape)
            _, saved = norms_by_use(uses, parts, layout=layout, by_layer=False)
        # What norms leave for the sums, beside what lies in the tape.
        extra = 0
        for tensors in saved:
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in storages:
                    extra += storage.nbytes()
        working = (peak + extra + scaled - example.nbytes) / rows
        return working, working + results / rows

    @cached_property
    def captures(self) -> bool:
        """Whether passes are captured as graphs: only for models of at most ``_LARGE`` weights.

        A capture saves calls, of which a pass of a small model mostly consists; the limit is
        ``_LARGE`` weights.
        """
        return sum(p.numel() for p in self.module.parameters()) <= _LARGE

    @property
    def drops(self) -> bool:
        """Whether a pass uses random draws, such as dropout masks.

        Where it does, the oracle notes the streams' positions before each pass, to repeat one that
        raised.
        """
        return bool(self.plan.sites)

    @property
    def convolves(self) -> bool:
        """Whether the model has convolutions, which run candidate by candidate.

        Then a stack of candidates costs as much as these one by one, and ``stacks`` does not build
        one.
        """
        uses = self.plan.uses
        return any(isinstance(use, ProductUse) and use.taps > 1 for use in uses)

    def losses(self, params: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the loss of every row without dropout, shape ``[K, M]``, by a captured pass if possible.

        There is no gradient and no dropout, so that a score does not hang on a draw. A program is
        captured the first time that a shape occurs; sizes are padded, so shapes are few.
        """
        candidates, records = rows.mask.shape
        key = (candidates, records)
        inputs = (_plain(params), _plain(rows.x), _plain(rows.y))
        with torch.no_grad():
            with self._running:
                if key not in self._loss_programs:
                    x, y = self._domain.draw(rows.x[0], rows.y[0], key, params.device)
                    example = (inputs[0], x, y)
                    program = self._captured(self.passes.losses(), example, 1)
                    self._loss_programs[key] = program
                program = self._loss_programs[key]
                if not isinstance(program, Captured):
                    (losses,) = program(*inputs)
                    return losses
            (losses,) = program(*inputs)
            return losses

    def reach(self, params: torch.Tensor) -> dict[str, float]:
        """Return the largest gradient norm of each parameter that losses of made-up records reach, by name.

        One record at a time, by plain autograd: the rules and vmap would give zeros where a loss does
        not reach a parameter, and that a parameter is not reached is what this is to show. The
        streams have a public key.
        """
        shape = (1, REACHED_RECORDS)
        x, y = self._domain.draw(self._x, self._y, shape, self._device)
        stream = Streams(bytes(32)).generator("dropout", device=self._device)
        ones = params.new_ones(shape)
        rows = Rows(x, y, [REACHED_RECORDS], ones, [stream])
        masks = self._masks(rows)
        reach: dict[str, float] = {}
        with self._running:
            for b in range(REACHED_RECORDS):
                draws = [mask[0, b] for mask in masks]
                gradients = self.passes.gradients(params, x[0, b], y[0, b], draws)
                add_reach(reach, self.layout.shapes, gradients)
        return reach

    def _norms_too(self, rows: Rows, clipping: Clipping) -> bool:
        """Say whether a captured pass gives the norms of transformed gradients, too.

        Then one graph does more of a step, which pays where calls cost more than numbers: that is,
        for few bytes. Where torch may shorten products of float32, norms would not be as right as the
        bound on them says.
        """
        sizes = self._norms_hold
        if sizes is None or not isinstance(clipping, CoordinateTransform):
            return False
        candidates, records = rows.mask.shape
        bytes_of_candidate, bytes_of_row = sizes
        size = candidates * (bytes_of_candidate + records * bytes_of_row)
        return size <= _FEW_BYTES and full_precision(rows.mask.device)

    def _program(
        self,
        params: torch.Tensor,
        rows: Rows,
        masks: Sequence[torch.Tensor],
        *,
        normed: bool,
    ) -> Tape:
        """Return the program for the shape of ``rows``, captured once that shape has been seen often enough.

        Which program runs hangs on how often a shape was seen, which a sample's size decides. So both
        must give the same, but for rounding: a record that one of them refused and the other did not
        would tell of others.

        The example that a graph is captured on is made up: a graph could hold a value of a private
        record as a constant. Centers are small and scales above 1 there, so that norms of transformed
        gradients are finite.

        Args:
            params: Weights ``[K, P]``, of which shape, type and device are read.
            rows: Rows, of which the shape ``[K, M]`` is the key, and a record the example of a shape.
            masks: Drawn values for each place of dropout.
            normed: Whether the graph gives norms of transformed gradients, too.

        Returns:
            The program, and the uses whose parts it gives, filled by a run or by the capture.
        """
        candidates, records = rows.mask.shape
        shape = (candidates, records)
        key: tuple[int, ...] = shape
        if normed:
            key = (*shape, 1)
        self._seen[key] += 1
        if self._seen[key] <= _RARE or not self.captures:
            if key not in self._rare:
                self._rare[key] = self.passes.tape()
            return self._rare[key]
        if key not in self._programs:
            x, y = self._domain.draw(rows.x[0], rows.y[0], shape, params.device)
            draws = [site.empty(shape, params) for site in self.plan.sites]
            # Not from the global generator, which a trial in another thread may be drawing from.
            generator = torch.Generator(params.device).manual_seed(0)
            made_up = torch.randn(
                params.shape,
                dtype=params.dtype,
                device=params.device,
                generator=generator,
            )
            example = (made_up, x, y, *draws)
            place = 1
            plain, uses = self.passes.tape()
            body = plain
            if normed:
                center = 0.1 * made_up
                scale = made_up.square() + 1.0
                example = (center, scale, *example)
                place = 3
                body = with_norms(plain, uses, layout=self.layout)
            program = self._captured(body, example, place)
            if not isinstance(program, Captured):
                program = plain
            elif params.is_cuda and program.peak_bytes <= _REPLAYED_BYTES:
                # What a tape holds is used up before the next pass begins.
                program = program.replayed(self._pool)
            self._programs[key] = (program, uses)
        return self._programs[key]

    def _captured(
        self,
        program: Program,
        example: Tensors,
        place: int,
    ) -> Program:
        """Return a program as a captured graph, or unchanged where a capture fails or saves nothing.

        It is compared with the program on other made-up inputs: one that branches by value passes no
        capture.

        Args:
            program: What is captured.
            example: Tensors that it takes, with made-up records among them.
            place: Where among them the inputs of records stand; their targets follow.
        """
        if not self.captures:
            return program
        try:
            return capture(program, example, self._others(example, place))
        except NotCapturedError:
            return program

    def _others(self, example: Tensors, place: int) -> Tensors:
        """Return other example tensors, with new made-up records, on which to check a captured graph.

        Masks and weights are changed in their numbers, records are drawn anew.
        """
        x = example[place]
        y = example[place + 1]
        others = list(changed(example))
        # Numbers outside of the domain would make the loss raise.
        shape = (x.shape[0], x.shape[1])
        other_x, other_y = self._domain.draw(x[0], y[0], shape, x.device, seed=1)
        others[place] = other_x
        others[place + 1] = other_y
        return tuple(others)

    def _masks(self, rows: Rows) -> tuple[torch.Tensor, ...]:
        """Draw the random values for all dropout of a pass, each candidate's from its own stream.

        Shape ``[K, M, *site.shape]`` each. Rows that fill up get the mean and no draw: a stream moves
        by the number of a candidate's own records, and so does not hang on the widest sample of its
        stack.
        """
        masks: list[torch.Tensor] = []
        for site in self.plan.sites:
            mask = site.empty(rows.mask.shape, rows.mask)
            for row, size, stream in zip(mask, rows.sizes, rows.dropout, strict=True):
                site.fill(row[:size], stream)
            masks.append(mask)
        return tuple(masks)


def _leave_batched_weights(module: nn.Module) -> None:
    """Let recurrent layers lay out weights for cuDNN only where these have memory of their own.

    A layer does so whenever its weights were replaced. Under ``vmap`` they have no address, and the layer
    would raise on a GPU alone.
    """
    for part in module.modules():
        if isinstance(part, nn.RNNBase):
            part.__dict__["flatten_parameters"] = partial(_flatten_plain, part)


def _flatten_plain(layer: nn.RNNBase) -> None:
    """Lay out a recurrent layer's weights for cuDNN, unless ``vmap`` stands around the call."""
    for weight in layer._flat_weights:
        if weight is not None and functorch.is_batchedtensor(weight):
            return
    type(layer).flatten_parameters(layer)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as contiguous memory from offset 0, the layout that captured graphs read.

    A graph reads memory by strides and offsets that were noted at its capture. A view that starts in
    the middle of its storage would shift every one of them.
    """
    tensor = tensor.detach().contiguous()
    if tensor.storage_offset() == 0:
        return tensor
    return tensor.clone()


class OneByOneKernel(Kernel):
    """The kernel that computes one record after another by plain autograd, for models without a batched path.

    A step costs as many passes as it has records, so this is the last resort. It needs no rule and no
    plan: a record's gradient is what autograd gives for a batch of one, by a copy of the model that
    is thrown away. So nothing that a pass leaves in the model reaches the next record. It is also the
    plainest statement of what ``BatchedKernel`` computes.

    Attributes:
        module: A copy of the model, whose trained parameters are views of one vector ``[P]``.
        layout: Where they lie in it.

    Raises:
        InvalidInputError: If the loss raises on a made-up record, or a pass changes a buffer.
    """

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
        self.module = module
        self._loss_of = loss_of
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
            copied, own_loss = fresh(module, loss_of)
            # With gradients: a loss may take some of its own.
            with torch.enable_grad(), Intercept(None, deterministic=True):
                own_loss(copied, inputs[0, :1], targets[0, :1])
        except PrivTuneError:
            raise
        except Exception as error:
            raise _no_loss(error, module, inputs[0, :1], targets[0, :1]) from error
        if changed_parts := sorted(unlike_fixed(copied, module)):
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
        """Add the clipped sums to ``out``, one record after another.

        The formulas are those of ``Clipping``: norms are expanded to ``[G, K, 1]``, as coefficients
        are asked for, and of the answer column k is read. A record of mask 0 is computed and then
        left out, so that those behind it draw the same numbers as without it.

        Args:
            params: Weights of the candidates, ``[K, P]``.
            rows: Their records.
            clipping: Gives coefficients from norms.
            out: What is added to, ``[K, P]``.
            halves: What is added to, ``[K]``.

        Returns:
            How many records of each candidate could not be used, ``[K]``; None for none.
        """
        unusable = torch.zeros(len(params), dtype=torch.long)
        sums = torch.zeros_like(out)
        counts = out.new_zeros(len(out))
        lengths = [self.layout.size]
        if clipping.by_layer:
            lengths = []
            for names in self.layout.layers.values():
                sizes = [self.layout.shapes[name].numel() for name in names]
                lengths.append(sum(sizes))
        for k, size in enumerate(rows.sizes):
            with self._use_weights(params[k]), _seeded(rows.dropout[k]):
                for b in range(int(size)):
                    gradient = self._gradient(rows, k, b)
                    if isinstance(clipping, CoordinateTransform):
                        gradient = (gradient - clipping.center[k]) / clipping.scale[k]
                    parts = torch.split(gradient, lengths)
                    of_parts = [length(part.unsqueeze(0)) for part in parts]
                    norms = torch.stack(of_parts)  # [G, 1]
                    if not rows.mask[k, b]:
                        continue
                    if not bool(norms.isfinite().all()):
                        unusable[k] += 1
                        continue
                    stacked = norms.unsqueeze(1).expand(-1, len(params), -1)
                    factors = clipping.coefficients(stacked)[:, k]
                    clipped = [c * part for c, part in zip(factors, parts, strict=True)]
                    sums[k] += torch.cat(clipped)
                    is_unclipped = clipping.unclipped(stacked)[k, 0].to(norms)
                    counts[k] += is_unclipped - 0.5
        out += sums  # all at once: a pass that raises has changed nothing
        if halves is not None:
            halves += counts
        if bool(unusable.any()):
            return unusable.to(out.device)
        return None

    def _gradient(
        self,
        rows: Rows,
        k: int,
        b: int,
    ) -> torch.Tensor:
        """Return the gradient of one record as a flat vector ``[P]``, zeros where a parameter is unused.

        Sparse gradients, as an embedding may give, are made dense; a parameter that is not reached
        has zeros.

        Args:
            rows: Records of all candidates.
            k: The candidate.
            b: The record among those of the candidate.
        """
        parts = []
        gradients = self._gradients(rows, k, b)
        for parameter, gradient in zip(self._params, gradients, strict=True):
            if gradient is None:
                dense = torch.zeros_like(parameter)
            elif gradient.is_sparse:
                dense = gradient.to_dense()
            else:
                dense = gradient
            parts.append(dense.flatten())
        return torch.cat(parts)

    def _gradients(
        self,
        rows: Rows,
        k: int,
        b: int,
    ) -> Sequence[torch.Tensor | None]:
        """Return the gradient of one record in each parameter, None where the loss does not reach it.

        Dropout of torch's own layers is drawn from the candidate's stream by the intercept; what else
        draws takes the global generator, which ``_seeded`` has put in a state of that stream.
        """
        module, loss_of = fresh(self.module, self._loss_of)
        with torch.enable_grad(), Intercept(None, generator=rows.dropout[k]):
            x = rows.x[k, b : b + 1]
            y = rows.y[k, b : b + 1]
            loss = loss_of(module, x, y)
            if not loss.requires_grad:  # a branch on which no weight has a part
                return [None] * len(self._params)
            return torch.autograd.grad(loss.sum(), self._params, allow_unused=True)

    def reach(self, params: torch.Tensor) -> dict[str, float]:
        """Return the largest gradient norm of each parameter that losses of made-up records reach, by name.

        Unlike ``BatchedKernel.reach``, weights lie in the model itself while it runs, and are put
        back.
        """
        shape = (1, REACHED_RECORDS)
        x, y = self._domain.draw(self._x, self._y, shape, params.device)
        stream = Streams(bytes(32)).generator("dropout", device=params.device)
        ones = params.new_ones(shape)
        rows = Rows(x, y, [REACHED_RECORDS], ones, [stream])
        reach: dict[str, float] = {}
        with self._use_weights(params), _seeded(stream):
            for b in range(REACHED_RECORDS):
                gradients = self._gradients(rows, 0, b)
                add_reach(reach, self.layout.shapes, gradients)
        return reach

    def losses(self, params: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the loss of every record without dropout, shape ``[K, M]``, one record after another.

        Gradients stay on, since a loss may take some of its own, as a penalty on them does.
        """
        out = params.new_zeros(rows.mask.shape)
        for k, size in enumerate(rows.sizes):
            with (
                self._use_weights(params[k]),
                torch.enable_grad(),
                Intercept(None, deterministic=True),
            ):
                for b in range(int(size)):
                    module, loss_of = fresh(self.module, self._loss_of)
                    x = rows.x[k, b : b + 1]
                    y = rows.y[k, b : b + 1]
                    loss = loss_of(module, x, y)
                    out[k, b] = loss.detach().sum()
        return out

    @contextmanager
    def _use_weights(self, point: torch.Tensor) -> Iterator[None]:
        """Give the model the weights of one candidate inside the ``with`` block, then restore its own.

        The copies that a pass works with share these weights, so they are watched: one that a pass
        wrote to would carry something of a record into every later one.
        """
        stood = self._flat.clone()
        self._flat.copy_(point)
        try:
            with unwritten(self.module):
                yield
        finally:
            self._flat.copy_(stood)


_WANTS_WHOLE = ("scalar type Long", "target dtype to be Long")  # what torch says of targets


def _no_loss(
    error: Exception,
    module: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
) -> InvalidInputError:
    """Return the error of a loss that fails on a made-up record, with shapes and a remedy.

    torch's messages speak of types and axes; a user looks for what to write instead. The message of
    the loss is cut to its first line.

    Args:
        error: What the loss raised.
        module: The model.
        x: Made-up inputs, ``[1, ...]``.
        y: Made-up targets, ``[1, ...]``.
    """
    shapes, unlike = describe_shapes(module, x, y)
    first, _, _ = str(error).strip().partition("\n")
    advice = " and write y.long() in the loss"
    if y.is_floating_point():
        advice = ""
    remedy = (
        "Numbers around 0, in [0, 1], whole ones from 0 or 1 and shares of 1 were tried: let codes and "
        "labels begin at 0 in the data where model or loss subtract an offset; declare target_range=(low, "
        f"high){advice} where the loss takes other targets; and correct the loss where it takes no record."
    )
    wants_whole = any(words in first for words in _WANTS_WHOLE)
    if y.is_floating_point() and wants_whole:
        remedy = "Write y.long() in the loss: targets are floating, as target_range makes whole ones, too."
    if unlike and ("size" in first or "shape" in first):
        remedy = SAME_SHAPE
    if isinstance(error, TypeError) and "positional argument" in first:
        remedy = "A loss takes the model and the parts of a record: def loss(model, x, y)."
    elif not x.is_floating_point() and "same dtype" in first:
        remedy = "The inputs are whole numbers: give x.float(), or convert them in the model."
    elif y.ndim == 2 and "multi-target" in first:
        remedy = "The targets have a second axis of length 1: give y.squeeze(1) in the data."
    return InvalidInputError(
        "model",
        type(module).__name__,
        f"must have a loss on a made-up record by itself ({type(error).__name__}: {first}), with {shapes}",
        remedy,
    )


@contextmanager
def _seeded(stream: torch.Generator) -> Iterator[None]:
    """Seed torch's global generator from a candidate's stream inside the ``with`` block, then restore it.

    The global generator is one for the process, so others wait meanwhile. It is forked, since a
    user's code may draw from it elsewhere and expects the numbers of its own seed.
    """
    draw = torch.randint(2**62, (), generator=stream, device=stream.device)
    seed = int(draw)
    devices = [] if stream.device.type == "cpu" else [stream.device]
    with GLOBAL_GENERATOR, torch.random.fork_rng(devices=devices):
        seed_global_generator(seed)
        yield


def _is_fixed(norm: nn.Module) -> bool:
    """Say whether a batch norm uses fixed running statistics, as it does in evaluation mode.

    Instance norms have their own condition: without running statistics they look at one record alone.
    """
    # It is w (x - m) / sqrt(v + e) + b there. Mean m and variance v are buffers that no step updates; a pass
    # that writes to them, as one does that goes back to training mode, is refused. So outputs hang on one
    # record and the weights alone, also where w and b are trained: a record has a gradient of its own, and
    # clipping bounds it.
    return not norm.training and norm.running_mean is not None


def _mixes_records(part: nn.Module) -> bool:
    """Say whether a layer computes or updates statistics over a batch."""
    if isinstance(part, _BatchNorm):
        return not _is_fixed(part)
    if isinstance(part, _InstanceNorm):
        return bool(part.track_running_stats and part.training)
    return False


def _hangs_on_words_that_occur(part: nn.Module) -> bool:
    """Say whether an embedding has ``max_norm`` or scales gradients by word frequency."""
    if not isinstance(part, nn.Embedding | nn.EmbeddingBag):
        return False
    return part.max_norm is not None or part.scale_grad_by_freq


def refuse_coupling(module: nn.Module) -> None:
    """Refuse a model with layers that mix records of a batch: batch statistics, some embedding options.

    Batch statistics make every output of a batch a function of all of its records, so a record's
    influence on a sum would be bounded by no clipping. An embedding with ``max_norm`` writes to its
    table in a pass, and one that scales by frequency weighs a record's gradient by what others hold.
    """
    coupled = []
    changing = []
    for name, part in module.named_modules():
        title = f"{name} ({type(part).__name__})"
        if _mixes_records(part):
            coupled.append(title)
        if _hangs_on_words_that_occur(part):
            changing.append(title)
    if coupled:
        raise InvalidInputError(
            "model",
            ", ".join(coupled),
            "must treat each record by itself",
            "Use GroupNorm or LayerNorm in place of batch statistics, or leave it in evaluation mode: "
            "module.eval().",
        )
    if changing:
        raise InvalidInputError(
            "model",
            ", ".join(changing),
            "must not have max_norm, which changes the rows that occur, nor scale_grad_by_freq, "
            "which counts words across records",
            "Leave both options off; clipping bounds each record.",
        )
