"""The kernel behind a loop's ``loss_of``: made once, and anew when the function means another thing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from privtune.errors import InvalidInputError
from privtune.training.engine.batched import BatchedKernel, NotBatchableError
from privtune.training.engine.graph.capture import run_one
from privtune.training.engine.one_by_one import OneByOneKernel
from privtune.training.engine.stacks import granule, longest_sample, memory_model
from privtune.training.mechanism.data import synthetic
from privtune.training.mechanism.kernel import Kernel, Layout, LossOf, Rows, say_once
from privtune.training.mechanism.meaning import DEPTH, PLAIN, attributes_in, is_constant, meaning_of
from privtune.training.mechanism.records import RecordFacts, find_facts
from privtune.training.mechanism.sampling import GRANULE
from privtune.training.mechanism.schedule import Schedule
from privtune.training.own_loop.replay import Recording
from privtune.training.own_loop.weights import LoopError, storage_of

if TYPE_CHECKING:
    from privtune.training.mechanism.clipping import Clipping

__all__ = ["RecordLossKernel", "numbers_in"]

Allowed = Callable[[Recording, torch.Tensor], None]

_SMALL = 2**24  # up to this many records times weights a sample is computed in one pass
_HELD = (*PLAIN, torch.Tensor, list, tuple, dict)
_EVERY_MODULE = frozenset(vars(nn.Module())) - {
    "training", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
}  # fmt: skip
_PATIENCE = 8  # after this many changes of the loss a warning says that each costs a capture


class RecordLossKernel:
    """Clipped sums of the losses that a loop defines record by record.

    Args:
        model: The loop's model.
        layout: Where its trainable parameters lie.
        flat: Their memory, shape ``[P]``.
        x: Inputs of some records, for shape and type alone; may be none.
        y: Targets of a record, likewise.
        one_by_one: Whether records are taken in passes of their own.
        all_classes: Whether no target is negative, so that none can be an index to ignore.

    **Guarantee**: records are coupled by nothing: the function sees one record at a time, under
    ``vmap`` or in a pass of its own, and keeps nothing from one to the next.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        *,
        flat: torch.Tensor,
        x: torch.Tensor,
        y: torch.Tensor,
        one_by_one: bool,
        all_classes: bool = False,
    ) -> None:
        self.layout = layout
        self._all_classes = all_classes
        self.module, self._flat, self._x, self._y = model, flat, x, y
        self.one_by_one = one_by_one
        self._kernel: Kernel | None = None
        self._meaning: Hashable = None
        self._modes = _Modes(model, flat)
        self._known: object = None
        self._settled: list[tuple[dict[str, Any], str, object]] | None = None
        self._changes = 0

    @property
    def drops(self) -> bool:
        """Whether a pass draws from the streams of dropout."""
        return self._current().drops

    @property
    def batched(self) -> BatchedKernel | None:
        """What computes many records at once, where the loss that was taken is computed so."""
        return self._kernel if isinstance(self._kernel, BatchedKernel) else None

    def use(self, loss_of: LossOf, allowed: Allowed = lambda *_: None) -> bool:
        """Take the loss of the next step.

        Args:
            loss_of: The loss of one record.
            allowed: Refuses what it reads beside its record, from a recording of one.

        Returns:
            Whether it is another one than before.

        Raises:
            InvalidInputError: If it cannot be computed record by record: names the way out.
            LoopError: If computing it changes the model, or gives another number when it is
                computed again.
        """
        if self._kernel is not None and self._modes.same() and self._same(loss_of):
            return False
        self._changes += self._kernel is not None
        if self._changes == _PATIENCE:
            say_once(
                "loss_of, or what it refers to, has changed from step to step: each change is "
                "captured anew, which costs more than a step. Pass what changes as a tensor."
            )
        self._kernel = self._make(loss_of, allowed)
        self._meaning, self._modes = self._told(loss_of), _Modes(self.module, self._flat)
        self._known, self._settled = loss_of, _settled(loss_of)
        return True

    def _same(self, loss_of: LossOf) -> bool:
        """Say whether a function means what the last one meant; quickly where it is that one."""
        if loss_of is self._known and self._settled is not None:
            return all(table.get(name) is value for table, name, value in self._settled)
        return self._told(loss_of) == self._meaning

    def _told(self, loss_of: LossOf) -> Hashable:
        return meaning_of(loss_of, trained=(storage_of(self._flat),))

    def facts(self, loss_of: LossOf) -> RecordFacts:
        """Return what is public about records, as far as model and loss show it."""
        device = self._flat.device
        return find_facts(lambda x, y: loss_of(self.module, x, y), self._x, self._y, device=device)

    def rows_at_once(self, schedule: Schedule) -> tuple[int, int]:
        """Return how many records to compute at once, where the loop does not say, in what multiples."""
        kernel, longest = self._current(), max(longest_sample(schedule), 1024)
        if isinstance(kernel, OneByOneKernel):
            return longest, GRANULE
        if longest * self.layout.size <= _SMALL:
            return longest, granule(schedule, 4.0 * self.layout.size, 1)
        memory = memory_model(kernel, longest=longest)
        return memory.piece, granule(schedule, memory.row_bytes, 1)

    def accumulate(
        self,
        params: torch.Tensor,
        rows: Rows,
        clipping: Clipping,
        *,
        out: torch.Tensor,
        halves: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Add the clipped sums: see ``Kernel``."""
        return self._current().accumulate(params, rows, clipping, out=out, halves=halves)

    def losses(self, params: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the loss of every row: see ``Kernel``."""
        return self._current().losses(params, rows)

    def _current(self) -> Kernel:
        if self._kernel is None:
            raise LoopError("No loss was given: call private.step(batch, loss_of).")
        return self._kernel

    def _make(self, loss_of: LossOf, allowed: Allowed) -> Kernel:
        self._refuse_memory(loss_of, allowed)
        if self.one_by_one:
            return OneByOneKernel(self.module, loss_of, self._flat)
        try:
            kernel = BatchedKernel(
                lambda: self.module,
                loss_of,
                x=self._x,
                y=self._y,
                device=self._flat.device,
                all_classes=self._all_classes,
            )
        except NotBatchableError as reason:
            raise InvalidInputError(
                "loss_of",
                type(self.module).__name__,
                f"must be computable record by record under torch.vmap ({reason})",
                "make_private(..., one_by_one=True) takes each record in a pass of its own, slowly "
                "and rightly; the Opacus form, private.step(losses), is the other way.",
            ) from None
        return kernel

    def _refuse_memory(self, loss_of: LossOf, allowed: Allowed) -> None:
        """Refuse a loss that remembers records, or reads others than its own."""
        named = {
            n: p.detach().requires_grad_(p.requires_grad) for n, p in self.module.named_parameters()
        }
        (xs, ys) = synthetic(self._x, self._y, (1, 2), self._flat.device)
        found = []
        for record in (0, 1, 0):
            x, y = xs[0, record], ys[0, record]
            recording = Recording(x, y)
            recording.start()
            try:
                with torch.enable_grad():
                    loss = run_one(self.module, loss_of, named, x, y, masks=())
            except ValueError as error:
                if "Expected more than 1 value" not in str(error):
                    raise
                raise InvalidInputError(
                    "loss_of", "batch_norm", "must be computable for a record by itself"
                ) from None
            finally:
                recording.stop()
            allowed(recording, loss)
            self._refuse_constants(recording)
            found.append(loss.detach().clone())
        if not torch.equal(found[0].nan_to_num(), found[2].nan_to_num()):
            raise LoopError(
                "loss_of gives another number when the same record is evaluated again: it, or a "
                "module, keeps something of the records that it sees (a running mean, a list). A "
                "record's loss must be a function of the record and the weights alone."
            )

    def _refuse_constants(self, recording: Recording) -> None:
        """Refuse weights that are not reached through the model that the loss is given."""
        own = {id(p) for p in self.module.parameters() if p.requires_grad}
        if not self.one_by_one and any(id(t) in own for t in recording.sources()):
            raise LoopError(
                "loss_of reads a weight of the model that it did not reach through the model that it "
                "was given, so it would be a constant. Reach weights through the first argument: "
                "model.parameters()."
            )


class _Modes:
    """What a captured pass takes for constant: modes, and plain attributes of a model's parts.

    They are compared at every step, so numbers and words are looked up and nothing else is done.
    """

    def __init__(self, model: nn.Module, flat: torch.Tensor) -> None:
        self._trained = (storage_of(flat),)
        self._plain: list[tuple[dict[str, Any], int, list[tuple[str, Any]]]] = []
        self._held: list[tuple[dict[str, Any], str, int, Hashable]] = []
        own_code = (p.forward for p in model.modules() if not is_constant(type(p)))
        self._code = [(each, meaning_of(each, trained=self._trained)) for each in own_code]
        self._everywhere = _hooks_everywhere()
        for part in model.modules():
            own = {n: v for n, v in vars(part).items() if n not in _EVERY_MODULE}
            plain = [(name, value) for name, value in own.items() if isinstance(value, PLAIN)]
            self._plain.append((vars(part), len(vars(part)), plain))
            held = (n for n, v in own.items() if isinstance(v, _HELD) and not isinstance(v, PLAIN))
            self._hold(vars(part), {n: DEPTH if n.endswith("_hooks") else 0 for n in held})

    def same(self) -> bool:
        """Say whether nothing of it has changed."""
        for table, size, plain in self._plain:
            if len(table) != size:
                return False
            for name, value in plain:
                now = table.get(name)
                if now is not value and now != value:
                    return False
        if _hooks_everywhere() != self._everywhere:
            return False
        if any(meaning_of(each, trained=self._trained) != known for each, known in self._code):
            return False
        return all(meaning_of(table.get(name), depth) == m for table, name, depth, m in self._held)

    def _hold(self, table: dict[str, Any], depths: Mapping[str, int]) -> None:
        """Compare parts of a table from now on; hooks are looked into, as what runs."""
        self._held += [
            (table, n, depth, meaning_of(table[n], depth)) for n, depth in depths.items()
        ]


def _hooks_everywhere() -> Hashable:
    held = vars(nn.modules.module)
    return tuple(meaning_of(held[f"_global_forward_{kind}"]) for kind in ("hooks", "pre_hooks"))


def numbers_in(loss_of: LossOf) -> set[float]:
    """Return the numbers that a function refers to, a few levels down."""
    found: set[float] = set()
    waiting: list[Any] = [meaning_of(loss_of)]
    while waiting:
        part = waiting.pop()
        if isinstance(part, tuple):
            waiting += part
        elif isinstance(part, float):
            found.add(part)
    return found


def _settled(value: Any) -> list[tuple[dict[str, Any], str, object]] | None:
    """Return all that a plain function refers to, if that is of libraries alone."""
    if not isinstance(value, FunctionType) or value.__closure__:
        return None
    if value.__defaults__ or value.__kwdefaults__:
        return None
    table = value.__globals__
    found = [(table, name, table.get(name)) for name in attributes_in(value.__code__)]
    read = [part for _, name, held in found for part in (held, sys.modules.get(name))]
    return found if all(part is None or is_constant(part) for part in read) else None
