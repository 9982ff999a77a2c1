"""What a loop of one's own holds, and what is checked of it at every step and at the end."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import _C, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from privtune.accounting import Event
from privtune.errors import InvalidInputError
from privtune.training.engine.coupled import refuse_coupling
from privtune.training.mechanism.clipping import Clipping
from privtune.training.mechanism.data import Data, DatasetData, targets_are_classes
from privtune.training.mechanism.kernel import Layout
from privtune.training.mechanism.noise_options import NoiseOptions
from privtune.training.mechanism.oracle import Sample
from privtune.training.mechanism.packing import RecordTree
from privtune.training.mechanism.records import NO_FACTS, RecordFacts
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.stack_oracle import StackOracle
from privtune.training.mechanism.streams import Streams
from privtune.training.mechanism.transcript import Transcript
from privtune.training.methods import Candidate, Method
from privtune.training.methods._rate_schedule import SEARCHED, rate_factors
from privtune.training.own_loop.batch import OpenSample
from privtune.training.own_loop.optimizer import UserOptimizer, checked
from privtune.training.own_loop.record_loss import RecordLossKernel
from privtune.training.own_loop.replay import HELD, Following, Recording, storage_of
from privtune.training.own_loop.weights import LoopError, WatchedWeights

__all__ = ["Loop"]


class _LoopOracle(StackOracle):
    """An oracle that answers about the sample that the loop has read, where it has read one."""

    drawn: Sample | None = None

    def sample(self) -> Sample:
        """Return the sample that the loop holds, or draw one."""
        known, self.drawn = self.drawn, None
        return super().sample() if known is None else known


class _Calls:
    """What a model was called with last, outside of transforms; a copy of the model begins anew."""

    last: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if any(map(_C._functorch.is_functorch_wrapped_tensor, tensors)):
            return
        if any(bool(t.any()) for t in tensors):  # of zeros alone, outputs may hang on nothing
            self.last = args, kwargs

    def __deepcopy__(self, _: object) -> _Calls:
        return _Calls()


class Loop:
    """A loop under a plan: its records, weights, oracle and steps. See ``PrivateTraining``."""

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
        # What ``torch.compile`` has wrapped: passes of single records are compiled otherwise.
        model = getattr(model, "_orig_mod", model)
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
        streams = self._streams = Streams(secret)
        self._of_stack: Transcript | None = None
        self._records = _tensors_of(data)
        self._record_versions = [t._version for t in self._records]
        self._unit: str = getattr(local, "unit", "")
        self._tree: RecordTree | None = getattr(local, "tree", None)
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
        self.calls = _Calls()
        if self._rehearsed:
            model.register_forward_pre_hook(self.calls, with_kwargs=True)
        self.facts = facts
        self._own: UserOptimizer | None = None
        self._state: Any = None
        self._history: list[Mapping[str, torch.Tensor]] = []
        self._follow(method, dict(candidate or {}), held, clipping)
        self._releasing = False
        self._taken = 0
        self._open: OpenSample | None = None
        self._total = torch.zeros_like(flat)
        self._checked_at = _checked_at(streams, self._steps)
        self._choices = streams.generator("checks")
        self._draws = streams.generator("loop", device=flat.device)
        self._held = HELD
        self.has_read = False
        self.programs: list[Hashable] = []
        self._after: Following | None = None

    def _follow(
        self,
        method: Method[Any],
        given: dict[str, Any],
        held: torch.optim.Optimizer | None,
        clipping: Clipping | None,
    ) -> None:
        """Let the method step by itself, or the loop's optimizer along its gradients."""
        self._method = method
        self._paces = rate_factors(method, given, self.schedule)
        self._candidate = {name: value for name, value in given.items() if name not in SEARCHED}
        if held is None:
            self._state = method.init(self._weights.flat.clone().unsqueeze(0), [self._candidate])
        elif any(pace != 1.0 for pace in self._paces):
            raise InvalidInputError(
                "schedule",
                getattr(method, "schedule", given),
                "is of the method's own steps, but an optimizer was given",
                "Leave the optimizer out, or step a scheduler of torch's with it.",
            )
        elif clipping is not None:
            multiplier: float = method.noise_multiplier  # type: ignore[attr-defined]
            self._own = UserOptimizer(held, clipping, multiplier)
            held.register_step_pre_hook(self._refuse_step)
        else:
            raise InvalidInputError("clipping", clipping, "must be given with an optimizer")

    @property
    def bare(self) -> nn.Module:
        """The model as it was given, whatever hooks are on it."""
        return self._model

    @property
    def transcript(self) -> Transcript:
        """What was released so far."""
        return self._oracle.transcripts()[0] if self._of_stack is None else self._of_stack

    @property
    def steps_taken(self) -> int:
        """How many steps were taken, of ``schedule.steps``."""
        return self._taken

    @property
    def curves(self) -> dict[str, list[float]]:
        """What the method reports, by name, one value a step: functions of releases alone."""
        names = self._history[0] if self._history else ()
        return {name: [float(entry[name][0]) for entry in self._history] for name in names}

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

    def refuse_other_programs(self, other: Loop) -> None:
        """Refuse losses, or settings of the optimizer, that hang on records by another way than torch.

        Args:
            other: The loop of another rehearsal, from the same weights on other made-up records.

        Raises:
            LoopError: If it computed its losses by another program, or with other numbers.
        """
        if self.programs != other.programs:
            raise LoopError(
                "The losses, or the optimizer's settings, hang on the records of a batch by a way that "
                "no check can follow: a number, a choice or an array that has left torch (float(...), "
                ".item(), .tolist(), NumPy). So one record moves the others' gradients. Compute them in "
                "torch, record by record, as private.step(batch, loss_of) does, or prepare each record "
                "in the dataset."
            )

    def _stop_after(self) -> None:
        if self._after is not None:
            after, self._after = self._after, None
            after.stop()

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
        if opened is not None and (opened.batch.was_read or opened.start == 0):
            raise LoopError(
                "A batch was not followed by its step (a continue, a break, a return, or batches "
                "that are fetched ahead). Which samples are released must not hang on what is in "
                "them: call private.step once for every batch, in order."
            )

    def _note(self, recording: Recording, losses: torch.Tensor) -> None:
        """Keep, in a rehearsal, by what program losses were computed: see ``refuse_other_programs``."""
        if self._rehearsed and (self._own is not None or self._taken == 0):
            self.programs.append(recording.program(losses, storage_of(self._weights.flat)))

    def _descend(self, own: UserOptimizer, gradient: torch.Tensor) -> None:
        if (
            self._rehearsed
        ):  # of made-up records nothing is learned: what follows hangs on none of them
            gradient = torch.full_like(gradient, 1e-3)
            numbers = (v for g in own.optimizer.param_groups for v in g.values())
            self.programs.append(tuple(v for v in numbers if isinstance(v, int | float | tuple)))
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

    def _close_steps(self, count: int = 1) -> None:
        self._open = None
        self._taken += count
        self._weights.accept(last=self._taken == self._steps)


def _tensors_of(data: object) -> tuple[torch.Tensor, ...]:
    """Return the training records that lie in memory as tensors."""
    hidden = getattr(data, "stands_for", data)
    found = (*getattr(hidden, "tensors", ()), *(getattr(hidden, n, None) for n in "xy"))
    found += getattr(getattr(hidden, "tree", None), "given", ())
    return tuple(t for t in found if isinstance(t, torch.Tensor))


def _checked_at(streams: Streams, steps: int) -> frozenset[int]:
    """Return the steps whose losses are replayed: the first two, and a later one drawn at random.

    So a rehearsal of two steps sees what the first leaves behind for the second; the step before
    the last of them is replayed, too.
    """
    late = int(streams.numpy("checked-step").integers(2, steps)) if steps > 2 else 0
    return frozenset({0, 1, max(0, late - 1), late})
