"""A user's own training loop under a plan: planned samples in, losses of records back.

Two forms. In the first, the loop hands over the loss of *one record*, ``private.step(batch,
loss_of)`` or ``private.fit(loss_of)``: records cannot touch each other, and every kernel and method
of the engine serves the loop. In the second, Opacus', the loop reads the batch and hands back a
vector of losses, ``private.step(losses)``; then what it did is checked, not believed.

Either way sampling, clipping, noise and transcript stay here, the weights change by releases alone,
and every sample that was drawn is released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from privtune.accounting import Event
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.training.engine.batched import refuse_coupling
from privtune.training.engine.graph.intercept import Intercept
from privtune.training.mechanism.clipping import Clipping
from privtune.training.mechanism.data import Data, DatasetData, targets_are_classes
from privtune.training.mechanism.kernel import Layout, LossOf
from privtune.training.mechanism.noise_options import NoiseOptions
from privtune.training.mechanism.oracle import Sample
from privtune.training.mechanism.records import NO_FACTS, Lookups, RecordFacts
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.stack_oracle import StackOracle
from privtune.training.mechanism.streams import Streams
from privtune.training.mechanism.transcript import Transcript
from privtune.training.mechanism.units import sum_of_rows
from privtune.training.methods import Candidate, Method
from privtune.training.methods._rate_schedule import SEARCHED, rate_factors
from privtune.training.own_loop.batch import Batch, OpenSample
from privtune.training.own_loop.hooked import HookedModel
from privtune.training.own_loop.optimizer import UserOptimizer, checked
from privtune.training.own_loop.record_loss import RecordLossKernel, numbers_in
from privtune.training.own_loop.replay import (
    Following,
    Held,
    Recording,
    refuse_coupled,
    refuse_foreign,
    storage_of,
)
from privtune.training.own_loop.weights import LoopError, WatchedWeights

__all__ = ["Batch", "PlanExhaustedError", "PrivateTraining"]

_CHECKS = "A step may be taken with the losses of its own batch alone."


class PlanExhaustedError(PrivTuneError):
    """A loop asked for more than its plan charged. No data was touched for it."""


class _LoopOracle(StackOracle):
    """An oracle that answers about the sample that the loop has read, where it has read one."""

    drawn: Sample | None = None

    def sample(self) -> Sample:
        """Return the sample that the loop holds, or draw one."""
        known, self.drawn = self.drawn, None
        return super().sample() if known is None else known


class PrivateTraining:
    """Private samples and steps for a loop of one's own.

    Made by :meth:`privtune.Trial.make_private`; its arguments come from the plan.

    Args:
        model: The model. Its parameters are moved into one piece of memory.
        data: ``TensorData``, or a map-style dataset.
        schedule: Records, rate, and how many steps are planned.
        method: The training method, with its noise; it steps by itself unless an optimizer is given.
        candidate: Hyperparameters that the method leaves to the loop.
        optimizer: Over exactly the trainable parameters of the model: then ``clipping`` and the
            method's noise multiplier make its gradients. Regularisers belong here, as weight decay.
        clipping: Bounds each record's gradient, with an optimizer; fixed for the whole run.
        secret: 32 bytes to derive sampling and noise from; None for OS entropy.
        noise: Where noise comes from and how it is treated; None for the defaults.
        max_physical_batch_size: Most records that are computed at once, at least 1; None to choose.
            It changes nothing but memory and time.
        one_by_one: Whether the loss of a record is computed in a pass of its own: for models that
            ``torch.vmap`` cannot take.
        limit: Steps to take, where fewer than planned: for rehearsals on made-up records, which
            also find the ranges of whole numbers (:attr:`facts`).
        facts: Public ranges that records are held to, as a rehearsal found them: a record outside of
            them contributes nothing. In the form by record they are found anew.

    Raises:
        InvalidInputError: If an argument is outside its domain, or the model couples records.

    **Guarantee**: the transcript holds what was released, each release a Poisson-sampled, clipped,
    noisy sum of functions of single records. By construction for ``step(batch, loss_of)``; for
    ``step(losses)`` as far as the checks of :mod:`privtune.training.own_loop.replay` reach. What no check can
    see (weights that were made from records, numbers that left torch, ...) stands in the docs, on the
    page *Pitfalls* (``docs/pitfalls.md``).
    """

    def __init__(
        self,
        model: nn.Module,
        data: Data | Dataset[Any],
        *,
        schedule: Schedule,
        method: Method[Any],
        candidate: Candidate | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        clipping: Clipping | None = None,
        secret: bytes | None = None,
        noise: NoiseOptions | None = None,
        max_physical_batch_size: int | None = None,
        one_by_one: bool = False,
        limit: int | None = None,
        facts: RecordFacts = NO_FACTS,
    ) -> None:
        if max_physical_batch_size is not None and max_physical_batch_size < 1:
            raise InvalidInputError(
                "max_physical_batch_size", max_physical_batch_size, "must be at least 1, or None"
            )
        model = _uncompiled(model)
        refuse_coupling(model)
        local = DatasetData(data) if isinstance(data, Dataset) else data
        self.layout = Layout(model)
        self.schedule = schedule
        self._model = model
        self._steps = schedule.steps if limit is None else min(limit, schedule.steps)
        self._physical = max_physical_batch_size
        held = None if optimizer is None else checked(optimizer, model)
        self._weights = WatchedWeights(model, self.layout)
        flat = self._weights.flat
        local = local.to(flat.device)
        streams = Streams(secret)
        self._records = _tensors_of(data)
        self._record_versions = [t._version for t in self._records]
        self._unit: str = getattr(local, "unit", "")
        self._of_rows: tuple[LossOf, LossOf] | None = None
        x, y = local.like
        self._kernel = RecordLossKernel(
            model,
            self.layout,
            flat=flat,
            x=x,
            y=y,
            one_by_one=one_by_one,
            all_classes=targets_are_classes(local),
        )
        self._oracle = _LoopOracle(
            schedule,
            data=local,
            kernel=self._kernel,
            streams=[streams],
            device=flat.device,
            physical_rows=max_physical_batch_size or schedule.records,
            noise=noise,
        )
        self._oracle.hold_to(facts)
        self._rehearsed = limit is not None
        self.facts = facts
        self._method = method
        self._own: UserOptimizer | None = None
        self._state: Any = None
        self._history: list[Mapping[str, torch.Tensor]] = []
        given = dict(candidate or {})
        self._paces = rate_factors(method, given, schedule)
        if optimizer is None:
            own = {name: value for name, value in given.items() if name not in SEARCHED}
            self._state = method.init(flat.clone().unsqueeze(0), [own])
        elif any(pace != 1.0 for pace in self._paces):
            raise InvalidInputError(
                "schedule",
                getattr(method, "schedule", given),
                "is of the method's own steps, but an optimizer was given",
                "Leave the optimizer out, or step a scheduler of torch's with it.",
            )
        elif held is not None and clipping is not None:
            multiplier: float = method.noise_multiplier  # type: ignore[attr-defined]
            self._own = UserOptimizer(held, clipping, multiplier)
            held.register_step_pre_hook(self._refuse_step)
        else:
            raise InvalidInputError("clipping", clipping, "must be given with an optimizer")
        self._releasing = False
        self._taken = 0
        self._open: OpenSample | None = None
        self._hooked: HookedModel | None = None
        self._unhookable: InvalidInputError | None = None
        self._total = torch.zeros_like(flat)
        self._checked_at = _checked_at(streams, self._steps)
        self._choices = streams.generator("checks")
        self._draws = streams.generator("loop", device=flat.device)
        self._by_record = False
        self._lookups: Lookups | None = None
        self._sized: tuple[int, set[int]] | None = None
        self._held = Held()
        self._after: Following | None = None

    @property
    def model(self) -> Any:
        """The model as the Opacus form runs it: with hooks, where it was read from a batch.

        Raises:
            InvalidInputError: If Opacus' hooks cannot take it. The other form needs no hooks.
        """
        return self._hook().module

    @property
    def bare(self) -> nn.Module:
        """The model as it was given, whatever hooks are on it."""
        return self._model

    @property
    def transcript(self) -> Transcript:
        """What was released so far."""
        return self._oracle.transcripts()[0]

    @property
    def steps_taken(self) -> int:
        """How many steps were taken, of ``schedule.steps``."""
        return self._taken

    @property
    def curves(self) -> dict[str, list[float]]:
        """What the method reports, by name, one value a step: functions of releases alone."""
        names = self._history[0] if self._history else ()
        return {name: [float(entry[name][0]) for entry in self._history] for name in names}

    def batches(self) -> Iterator[Batch]:
        """Yield each planned sample; ``step`` must follow each.

        Read one as ``x, y = batch`` for the Opacus form. With ``max_physical_batch_size`` a longer
        sample is then read in several batches. An empty sample shows one made-up record, whose loss
        counts nothing, so that a loop cannot see that it was empty.

        Raises:
            PlanExhaustedError: If every planned step was taken already.
            LoopError: If a batch was not followed by its step, or the weights were changed by
                something else than a release.
        """
        if self._taken >= self._steps:
            raise PlanExhaustedError(
                f"The plan charged {self.schedule.steps} steps and all of them are taken. More "
                "steps need a plan of their own."
            )
        self._refuse_skipped()
        self.check()
        try:
            while self._taken < self._steps:
                self._stop_after()
                self._refuse_skipped()
                self._weights.check_parts()
                batch = Batch(self._read)
                if self._open is None:
                    self._open = OpenSample(batch)
                else:
                    self._open.batch = batch
                yield batch
        finally:
            self.close()

    def step(self, batch: object, loss_of: LossOf | None = None) -> bool:
        """Take one step along the noisy release about a sample.

        Args:
            batch: What ``batches`` yielded; or, in the Opacus form, the losses of its records,
                shape ``[B]``, as ``reduction="none"`` gives them.
            loss_of: The loss of one record: called with the model and a batch of one, inputs and
                targets with a leading axis of 1; returns its loss, shape ``[1]``. Random numbers
                in it (dropout, augmentation) come from the trial's own streams. Where records are
                units of several rows, the loss of a row, called with the rows of one unit.

        Returns:
            Whether the optimizer stepped: False after all but the last batch of a sample that comes
            in several.

        Raises:
            PlanExhaustedError: If no batch is open: every batch has one step.
            LoopError: If what is handed over is not this batch's, couples its records, or the
                weights were changed by something else than a release.
            InvalidInputError: If the losses are not one a record, or reach a parameter by another
                way than through its own module; if ``loss_of`` cannot be computed record by record.
        """
        if self._open is None:
            raise PlanExhaustedError(
                "There is no open batch: every batch that batches() yields has exactly one step."
            )
        opened = self._open
        opened.leave()
        if self._lookups is not None:
            self.facts = self._lookups.facts()
        self.check()
        if loss_of is not None:
            return self._step_by_record(opened, batch, self._of_records(loss_of))
        if self._unit:
            raise InvalidInputError(
                "loss_of",
                None,
                f"must be given, as the loss of a row: one {self._unit} has several rows",
            )
        if not isinstance(batch, torch.Tensor):
            raise InvalidInputError(
                "batch",
                type(batch).__name__,
                "must come with loss_of, the loss of one record, or be a vector of losses",
            )
        return self._step_on_losses(opened, batch)

    def _of_records(self, loss_of: LossOf) -> LossOf:
        """Return the loss of a record; where that is a unit, of the rows that ``loss_of`` is of."""
        if not self._unit:
            return loss_of
        if self._of_rows is None or self._of_rows[0] is not loss_of:
            self._of_rows = loss_of, sum_of_rows(loss_of)
        return self._of_rows[1]

    def fit(self, loss_of: LossOf, *, on_step: Callable[[int, int], object] | None = None) -> None:
        """Take every planned step.

        Args:
            loss_of: The loss of one record: see :meth:`step`.
            on_step: Called after each step with the steps done and the steps planned: for a
                learning-rate schedule, or for ``trial.report``.
        """
        for batch in self.batches():
            self.step(batch, loss_of)
            if on_step is not None:
                on_step(self._taken, self.schedule.steps)

    def check(self) -> None:
        """Check that nothing but releases has changed the model, and nothing the records.

        Raises:
            LoopError: Naming what was changed.
        """
        self._stop_after()
        self._weights.check()
        if [t._version for t in self._records] != self._record_versions:
            raise LoopError(
                "The training records were changed after make_private, so a record may hold what "
                "others did. Prepare records before the loop; augment inside loss_of."
            )

    def close(self) -> None:
        """Stop watching the loop; a trial does so when its objective returns or raises."""
        self._stop_after()
        if self._open is not None:
            self._open.leave()

    def finish(self, event: Event, *, stopped: bool = False) -> None:
        """Check at the end that the loop released what was charged: no more, no less, nothing else.

        Args:
            event: What the training was charged as.
            stopped: Whether it was stopped early by numbers that were paid for.

        Raises:
            LoopError: If a sample is open, steps are missing, or weights changed elsewhere.
            TranscriptMismatchError: If something else was released than was charged.
        """
        self._refuse_skipped()
        self._weights.check(whole=True)
        if self._taken < self._steps and not stopped:
            raise LoopError(
                f"The loop took {self._taken} of the {self._steps} steps that its plan charged. "
                "When it ends must not hang on data that nobody paid for: take every step, declare "
                "fewer epochs, or stop where trial.should_prune() says so."
            )
        if self._steps == self.schedule.steps:
            self.transcript.check_within(event)
            if not stopped:
                self.transcript.check_whole(event)

    # Which tensors hold something of the batches that the loop has read.

    def _remember(self, recording: Recording) -> None:
        """Note what a recording computed from its batch, for as long as the loop keeps it."""
        found = recording.touched({*recording.from_batch(), *self._held.alive()})
        found -= {storage_of(self._weights.flat)}
        for tensor in (recording.x, recording.y, *recording.lying_in(found)):
            self._held.add(tensor)

    def _watch_after(self, opened: OpenSample) -> None:
        """Go on to follow a loop that still has the batch in its hands."""
        if opened.recording is not None:
            self._after = Following(self._held)
            self._after.start()

    def _stop_after(self) -> None:
        if self._after is not None:
            after, self._after = self._after, None
            after.stop()

    def _refuse_foreign(self, recording: Recording, losses: torch.Tensor) -> None:
        refuse_foreign(recording, losses, earlier=self._held.alive(), records=self._records)

    def _refuse_step(self, *_: object) -> None:
        # A step without gradients moves nothing; trainers of other libraries take one after ours.
        if not self._releasing and any(p.grad is not None for p in self._weights.params):
            raise LoopError(
                "optimizer.step() was called by the loop itself, along gradients that were neither "
                "clipped nor noised. Call private.step(batch, loss_of), or private.step(losses): it "
                "runs the backward pass and steps the optimizer."
            )

    def _refuse_skipped(self) -> None:
        """Refuse to go on, or to end, with a sample that was handed out and not released."""
        opened = self._open
        if opened is not None and (opened.batch._tensors is not None or opened.start == 0):
            raise LoopError(
                "A batch was not followed by its step (a continue, a break, a return, or batches "
                "that are fetched ahead). Which samples are released must not hang on what is in "
                "them: call private.step once for every batch, in order."
            )

    # The form step(batch, loss_of): the loop hands over the loss of one record.

    def _step_by_record(self, opened: OpenSample, batch: object, loss_of: LossOf) -> bool:
        if not opened.batch.holds(batch):
            raise LoopError(
                "step was given another batch than the one that batches() yielded last, as it was "
                "yielded. Augment and transform inside loss_of, which sees one record."
            )
        self._by_record = True
        if self._hooked is not None:
            self._hooked.remove()
            self._hooked = None
        if opened.recording is not None:
            self._remember(opened.recording)
            if numbers_in(loss_of) & opened.recording.numbers_read():
                raise LoopError(
                    "loss_of uses a number that the loop read from the batch (a mean, a largest "
                    "value), so every record's loss hangs on all the others. Compute it from the "
                    "record inside loss_of, or take a public number."
                )
        if self._kernel.use(loss_of, self._refuse_foreign):
            self._weights.check()
            self._oracle.hold_to(self._kernel.facts(loss_of))
            self._oracle.compute_at_once(self._physical or self._kernel.rows_at_once(self.schedule))
        self._oracle.drawn = opened.sample
        if self._own is not None:
            gradient = self._oracle.gradient(
                self._oracle.sample(),
                self._weights.flat.unsqueeze(0),
                clipping=self._own.clipping,
                noise_multiplier=self._own.noise_multiplier,
            )
            self._descend(self._own, gradient[0])
        else:
            self._oracle.pace = self._paces[self._taken]
            self._state = self._method.update(self._state, self._oracle)
            with torch.no_grad():
                self._weights.flat.copy_(self._state.params[0])
            self._history.append(self._method.report(self._state))
        self._close_step()
        self._watch_after(opened)
        return True

    def _descend(self, own: UserOptimizer, gradient: torch.Tensor) -> None:
        parts = torch.split(gradient, self.layout.lengths)
        for parameter, part in zip(self._weights.params, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        self._releasing = True
        try:
            own.optimizer.step()
        finally:
            self._releasing = False
        for parameter in self._weights.params:
            parameter.grad = None

    def _close_step(self) -> None:
        self._open = None
        self._taken += 1
        self._weights.accept(last=self._taken == self._steps)

    # Opacus' form, step(losses): the loop reads the batch and hands back its losses.

    def _refuse_sizes(self, recording: Recording, losses: torch.Tensor) -> None:
        """Refuse, in a rehearsal of two sizes, a number that is the batch's size in both."""
        size, found = len(losses), recording.factors_of(losses)
        before, self._sized = self._sized, (size, found)
        if before is not None and before[0] != size and found & before[1]:
            raise LoopError(_SIZES_SAID)

    def _hook(self) -> HookedModel:
        if self._hooked is None:
            self._hooked = HookedModel(self._model, self.layout)
        return self._hooked

    def _read(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand out records of the sample that is open."""
        opened = self._open
        if opened is None or opened.batch is not batch:
            raise LoopError(f"A batch was read after its step. {_CHECKS}")
        try:
            if not self._by_record:
                self._hook()
        except InvalidInputError as error:
            self._unhookable = error
        if opened.sample is None:
            opened.sample = self._oracle.sample()
            self._total.zero_()
        width = self._physical or self.schedule.records
        rows, size = self._oracle.records(opened.sample, opened.start, opened.start + width)
        opened.last = opened.start + width >= size
        opened.shown = max(1, min(width, size - opened.start))
        opened.mask = rows.mask[0, : opened.shown]
        x, y = rows.x[0, : opened.shown].clone(), rows.y[0, : opened.shown].clone()
        opened.draws = Intercept(None, generator=self._draws)
        if self._rehearsed:
            opened.lookups = self._lookups = Lookups(x, y)
        if self._by_record or self._taken in self._checked_at:
            opened.recording = Recording(x, y)
        opened.watch()
        return x, y

    def _step_on_losses(self, opened: OpenSample, losses: torch.Tensor) -> bool:
        own = self._own
        if own is None:
            raise InvalidInputError(
                "losses",
                type(self._method).__name__,
                "asks for gradients and losses at points of its own",
                "Call private.step(batch, loss_of), which gives it both.",
            )
        if opened.batch._tensors is None or opened.mask is None:
            raise LoopError(f"The losses were computed without reading the batch. {_CHECKS}")
        if self._unhookable is not None:
            raise InvalidInputError(
                "model",
                type(self._model).__name__,
                f"cannot be hooked by Opacus ({self._unhookable})",
                "Hand the loss over record by record: private.step(batch, loss_of).",
            )
        if losses.shape != (opened.shown,) or not losses.requires_grad:
            raise InvalidInputError(
                "losses",
                f"{losses.ndim} axes" if losses.ndim != 1 else "one number",
                "must be one loss a record, shape (B,), with gradients",
                'Use reduction="none": a mean couples the records and hides their gradients.',
            )
        if opened.recording is not None:
            refuse_coupled(
                opened.recording,
                losses,
                earlier=self._held.alive(),
                records=self._records,
                generator=self._choices,
            )
            self._remember(opened.recording)
            if self._rehearsed:
                self._refuse_sizes(opened.recording, losses)
        total, bad = self._hook().clipped_sum(
            losses,
            opened.mask,
            own.clipping,
            recording=opened.recording,
            generator=None if opened.recording is None else self._choices,
        )
        self._weights.check()  # hooks of the loop's own may have written in the backward pass
        self._total += total
        self._oracle.nonfinite += bad
        if not opened.last:
            opened.start += opened.shown
            opened.batch = Batch(self._read)
            opened.recording = None
            return False
        if opened.sample is None:
            raise LoopError(_CHECKS)
        gradient = self._oracle.release_sum(
            opened.sample,
            self._total.unsqueeze(0),
            clipping=own.clipping,
            noise_multiplier=own.noise_multiplier,
        )
        self._descend(own, gradient[0])
        self._close_step()
        self._watch_after(opened)
        return True


_SIZES_SAID = (
    "The losses are multiplied or divided by how many records the batch holds, which is private: one "
    "record more scales every other's gradient. Leave out the mean: private.step divides by the "
    "expected batch size, which is public."
)


def _uncompiled(model: nn.Module) -> nn.Module:
    """Return what ``torch.compile`` has wrapped: passes of single records are compiled otherwise."""
    inner = model._modules.get("_orig_mod")
    return model if inner is None else inner


def _tensors_of(data: object) -> tuple[torch.Tensor, ...]:
    """Return the training records that lie in memory as tensors."""
    hidden = getattr(data, "stands_for", data)
    found = (*getattr(hidden, "tensors", ()), *(getattr(hidden, n, None) for n in "xy"))
    return tuple(t for t in found if isinstance(t, torch.Tensor))


def _checked_at(streams: Streams, steps: int) -> frozenset[int]:
    """Return the steps whose losses are replayed: the first two, and a later one drawn at random.

    So a rehearsal of two steps sees what the first leaves behind for the second; the step before
    the last of them is replayed, too.
    """
    late = int(streams.numpy("checked-step").integers(2, steps)) if steps > 2 else 0
    return frozenset({0, 1, max(0, late - 1), late})
