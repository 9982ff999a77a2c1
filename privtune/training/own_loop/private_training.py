"""A user's own training loop under a plan: planned samples in, losses of records back.

Two forms. In the first, the loop hands over the loss of *one record*, ``private.step(batch,
loss_of)`` or ``private.fit(loss_of)``: records cannot touch each other, and every kernel and method
of the engine serves the loop. In the second, Opacus', the loop reads the batch and hands back a
vector of losses, ``private.step(losses)``; then what it did is checked, not believed.

Either way sampling, clipping, noise and transcript stay here, the weights change by releases alone,
and every sample that was drawn is released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.training.engine.compute import sums_in_float32
from privtune.training.engine.graph.intercept import Intercept
from privtune.training.mechanism.kernel import LossOf
from privtune.training.mechanism.packing import RecordTree
from privtune.training.mechanism.records import Lookups
from privtune.training.mechanism.units import sum_of_rows
from privtune.training.own_loop.batch import Batch, OpenSample
from privtune.training.own_loop.coupling import refuse_coupled, refuse_foreign
from privtune.training.own_loop.hooked import HookedModel
from privtune.training.own_loop.loop import Loop
from privtune.training.own_loop.record_loss import numbers_in
from privtune.training.own_loop.replay import Following, Recording, storage_of
from privtune.training.own_loop.stacked import MEETING, Offer
from privtune.training.own_loop.weights import LoopError

__all__ = ["Batch", "PlanExhaustedError", "PrivateTraining"]

_CHECKS = "A step may be taken with the losses of its own batch alone."


class PlanExhaustedError(PrivTuneError):
    """A loop asked for more than its plan charged. No data was touched for it."""


class PrivateTraining(Loop):
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
            It changes nothing but memory and time, and with several places of dropout which draws are whose.
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

    _hooked: HookedModel | None = None
    _unhookable: InvalidInputError | None = None
    _by_record = False
    _of_parts: tuple[LossOf, LossOf] | None = None
    _lookups: Lookups | None = None
    _sized: tuple[int, set[int]] | None = None
    _trained_by: LossOf | None = None

    @property
    def model(self) -> Any:
        """The model as the Opacus form runs it: with hooks, where it was read from a batch.

        Raises:
            InvalidInputError: If Opacus' hooks cannot take it. The other form needs no hooks.
        """
        return self._hook().module

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
        if self._of_stack is not None:
            raise LoopError(
                "The training was stopped in fit, and what was drawn for it is not drawn again. Let what "
                "fit raises leave the function."
            )
        self._refuse_skipped()
        self.check()
        try:
            while self._taken < self._steps:
                self._stop_after()
                self._refuse_skipped()
                self._weights.check_parts()
                batch = Batch(self._read, self._tree)
                if self._open is None:
                    self._open = OpenSample(batch)
                else:
                    self._open.batch = batch
                yield batch
        finally:
            self.close()

    @sums_in_float32()
    def step(self, batch: object, loss_of: LossOf | None = None) -> bool:
        """Take one step along the noisy release about a sample; ``torch.autocast`` around it is off within.

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
        self._trained_by = loss_of
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
        """Return the loss of a record: of the rows of a unit, or of what lies packed in one tensor."""
        made = sum_of_rows if self._unit else None if self._tree is None else self._tree.loss_of
        if made is None:
            return loss_of
        if self._of_parts is None or self._of_parts[0] is not loss_of:
            self._of_parts = loss_of, made(loss_of)
        return self._of_parts[1]

    def loss_to_score(self, tree: RecordTree | None) -> LossOf:
        """Return the loss that the last step was trained on, for records that are packed like these.

        Args:
            tree: How records to score are packed; None for a pair of tensors.

        Raises:
            InvalidInputError: If the loop handed over numbers, and not the loss of a record.
        """
        if self._trained_by is None:
            raise InvalidInputError(
                "scoring.metric",
                "loss",
                "is not known here: the loop hands over losses that it has computed, private.step(losses)",
                "Train by private.fit(loss_of), or score by another metric, such as accuracy or "
                "package.module:function.",
            )
        if self._unit:
            return sum_of_rows(self._trained_by)
        found: LossOf = self._trained_by if tree is None else tree.loss_of(self._trained_by)
        return found

    def fit(self, loss_of: LossOf, *, on_step: Callable[[int, int], object] | None = None) -> None:
        """Take every planned step.

        Args:
            loss_of: The loss of one record: see :meth:`step`.
            on_step: Called after each step with the steps done and the steps planned: for a
                learning-rate schedule, or for ``trial.report``.

        Where trials of a round are trained together, this waits for the others, unless ``on_step`` is
        given: those of one architecture and one loss are trained as one stack, each with its own
        samples, noise and optimizer.
        """
        self._trained_by = loss_of
        if on_step is None and self._met(loss_of):
            return
        for batch in self.batches():
            self.step(batch, loss_of)
            if on_step is not None:
                on_step(self._taken, self.schedule.steps)

    def _met(self, loss_of: LossOf) -> bool:
        """Wait for other loops, where there is a meeting; say whether all was trained there."""
        meeting = MEETING.get()
        if meeting is None or self._hooked is not None:
            return False
        packed = self._of_records(loss_of)
        offer = Offer.of(self, loss_of, lambda: self._use(packed))
        return offer is not None and meeting(offer)

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

    def _refuse_foreign(self, recording: Recording, losses: torch.Tensor) -> None:
        refuse_foreign(recording, losses, earlier=self._held.alive(), records=self._records)
        self._note(recording, losses)

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
        self._use(loss_of)
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
        self._close_steps()
        self._watch_after(opened)
        return True

    def _use(self, loss_of: LossOf) -> bool:
        """Take the loss of the next step; say whether it is another one, whose records are looked at anew."""
        if not self._kernel.use(loss_of, self._refuse_foreign):
            return False
        self._weights.check()
        self._oracle.hold_to(self._kernel.facts(loss_of))
        rows, multiple = self._kernel.rows_at_once(self.schedule)
        self._oracle.compute_at_once(self._physical or rows, multiple)
        return True

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

    def _read(self, batch: Batch) -> Any:
        """Hand out records of the sample that is open."""
        opened = self._open
        if opened is None or opened.batch is not batch:
            raise LoopError(f"A batch was read after its step. {_CHECKS}")
        try:
            if not self._by_record:
                self._hook()
        except InvalidInputError as error:
            self._unhookable = error
        self.has_read = True
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
        return (x, y) if self._tree is None else self._tree.record(x, y)

    def _step_on_losses(self, opened: OpenSample, losses: torch.Tensor) -> bool:
        own = self._own
        if own is None:
            raise InvalidInputError(
                "losses",
                type(self._method).__name__,
                "asks for gradients and losses at points of its own",
                "Call private.step(batch, loss_of), which gives it both.",
            )
        if not opened.batch.was_read or opened.mask is None:
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
            self._note(opened.recording, losses)
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
            opened.batch = Batch(self._read, self._tree)
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
        self._close_steps()
        self._watch_after(opened)
        return True


_SIZES_SAID = (
    "The losses are multiplied or divided by how many records the batch holds, which is private: one "
    "record more scales every other's gradient. Leave out the mean: private.step divides by the "
    "expected batch size, which is public."
)
