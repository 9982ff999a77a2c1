"""Traps in the loop: samples that are not released."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from privtune.study.trial import Trial
from tests.zoo.trap import Toy, Trap, begin, entering, plain

__all__ = ["SAMPLES"]

T = torch.Tensor
SAMPLES: list[Trap] = []
_trap = entering(SAMPLES)

_SKIPPED = "Which samples are released must not hang on what is in them."


@_trap("refused", "a loop of the habit, without private.step", _SKIPPED)
def _habit(trial: Trial, data: Toy) -> float:
    model, optimizer, private = begin(trial, data)
    for x, y in private.batches():
        optimizer.zero_grad()
        plain(model, x, y).mean().backward()
        optimizer.step()
    return trial.score(model, data.validation)


@_trap("refused", "gradient accumulation by hand", _SKIPPED)
def _accumulated(trial: Trial, data: Toy) -> float:
    model, optimizer, private = begin(trial, data)
    for number, (x, y) in enumerate(private.batches()):
        (plain(model, x, y).mean() / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return trial.score(model, data.validation)


@_trap("refused", "two batches in one step", _SKIPPED)
def _joined(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    batches = private.batches()
    for x, y in batches:
        a, b = next(batches)
        private.step(plain(private.model, torch.cat([x, a]), torch.cat([y, b])))
    return trial.score(model, data.validation)


def _stopping(skip: Callable[[T], object], how: str, *, form: str = "losses") -> Any:
    def objective(trial: Trial, data: Toy) -> float:
        model, _, private = begin(trial, data)
        for x, y in private.batches():
            losses = plain(model if form == "by record" else private.model, x, y)
            if skip(losses):
                if how == "continue":
                    continue
                if how == "break":
                    break
                return trial.score(model, data.validation)
            if form == "by record":
                private.step((x, y), plain)
            else:
                private.step(losses)
        return trial.score(model, data.validation)

    return objective


for _how in ("continue", "break", "return"):
    for _form in ("losses", "by record"):
        _trap("refused", f"{_how} on a high loss: {_form}", _SKIPPED)(
            _stopping(lambda losses: losses.max() > 1e-3, _how, form=_form)
        )


@_trap("refused", "continue on a loss that is not a number", _SKIPPED, when="after")
def _not_a_number(trial: Trial, data: Toy) -> float:
    x, y = data.train
    poisoned = torch.where(torch.arange(len(x))[:, None] < 9, torch.nan, x)
    model, _, private = begin(trial, data, train=(poisoned, y))
    for a, b in private.batches():
        losses = plain(private.model, a, b)
        if losses.isnan().any():
            continue
        private.step(losses)
    return trial.score(model, data.validation)


@_trap("refused", "early stopping on the training loss", _SKIPPED)
def _early(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for x, y in private.batches():
        losses = plain(private.model, x, y)
        private.step(losses)
        if losses.mean() < 99.0:
            break
    return trial.score(model, data.validation)


@_trap("refused", "fit left by an exception of on_step", _SKIPPED)
def _left(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)

    def stop(done: int, planned: int) -> None:
        raise StopIteration

    with contextlib.suppress(StopIteration):
        private.fit(plain, on_step=stop)
    return trial.score(model, data.validation)


@_trap("refused", "batches fetched ahead", _SKIPPED)
def _ahead(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for x, y in list(private.batches()):
        private.step(plain(private.model, x, y))
    return trial.score(model, data.validation)


@_trap("refused", "next() twice before one step", _SKIPPED)
def _twice(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    batches = private.batches()
    next(batches)
    x, y = next(batches)
    private.step(plain(private.model, x, y))
    return trial.score(model, data.validation)


@_trap("refused", "two steps on one batch", "The second was not charged.")
def _two_steps(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for batch in private.batches():
        private.step(batch, plain)
        private.step(batch, plain)
    return trial.score(model, data.validation)


@_trap("refused", "an epoch more", "It was not charged.")
def _more(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for _ in range(2):
        private.fit(plain)
    return trial.score(model, data.validation)


@_trap("refused", "no step at all", "Nothing was trained.")
def _never(trial: Trial, data: Toy) -> float:
    model, _, _ = begin(trial, data)
    return trial.score(model, data.validation)


@_trap("refused", "refusals caught and passed over", _SKIPPED)
def _swallowed(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    batches = private.batches()
    for _ in range(3):
        try:
            x, y = next(batches)
            private.step(plain(private.model, x - x.mean(0), y))
        except Exception:
            continue
    return trial.score(model, data.validation)


@_trap("refused", "half of a batch", "One loss a record, of every record that was drawn.")
def _half(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for x, y in private.batches():
        private.step(plain(private.model, x, y)[: len(x) // 2])
    return trial.score(model, data.validation)


@_trap("refused", "the hardest few of a batch (OHEM)", "One loss a record, of every record.")
def _hard(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for x, y in private.batches():
        private.step(plain(private.model, x, y).topk(max(1, len(x) // 2)).values)
    return trial.score(model, data.validation)


@_trap("refused", "a mean loss", "A mean hides the gradients of records.")
def _mean(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for x, y in private.batches():
        private.step(functional.cross_entropy(private.model(x), y))
    return trial.score(model, data.validation)


@_trap(
    "refused", "the first batch again and again", "A step reads records that it does not charge."
)
def _replayed(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    first: Any = None
    for x, y in private.batches():
        first = (x, y) if first is None else first
        size = len(x)
        private.step(
            plain(private.model, *(t.repeat(9, *[1] * (t.ndim - 1))[:size] for t in first))
        )
    return trial.score(model, data.validation)


def _bank(*, features: bool, by_record: bool) -> Any:
    """A memory bank: what was computed of earlier batches is compared with this one."""

    def objective(trial: Trial, data: Toy) -> float:
        model, _, private = begin(trial, data)
        bank: list[T] = []

        def loss(m: Any, x: T, y: T) -> T:
            z = m(x)
            known = torch.stack([kept[0] for kept in bank]) if bank else z.detach()[:1]
            far: T = (z @ known.T).logsumexp(1)
            return far + functional.cross_entropy(z, y, reduction="none")

        for batch in private.batches():
            x, y = batch
            if by_record:
                bank.append(model(x).detach() if features else x[:, :3])
                private.step(batch, loss)
            else:
                private.step(loss(private.model, x, y))
                bank.append(private.model(x).detach() if features else x[:, :3])
                private.model.zero_grad()
        return trial.score(model, data.validation)

    return objective


_READ = "A step reads records that it does not charge."
for _features in (True, False):
    for _by_record in (True, False):
        _what = "features" if _features else "records"
        _form = "by record" if _by_record else "losses"
        _trap("refused", f"memory bank of {_what}: {_form}", _READ)(
            _bank(features=_features, by_record=_by_record)
        )


@_trap("refused", "a queue of features in one tensor", _READ)
def _queue(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    queue = torch.zeros(4, 3)
    for number, (x, y) in enumerate(private.batches()):
        z = private.model(x)
        queue[number % 4] = z.detach()[0]
        private.step(functional.cross_entropy(z, y, reduction="none") + (z @ queue.T).logsumexp(1))
    return trial.score(model, data.validation)


@_trap("refused", "the batch's mean captured by loss_of", _READ)
def _captured(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for batch in private.batches():
        mean = batch[0].mean(0)
        private.step(batch, lambda m, x, y: plain(m, x - mean, y))  # noqa: B023
    return trial.score(model, data.validation)


@_trap("refused", "the whole training set captured by loss_of", _READ)
def _whole(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    private.fit(lambda m, x, y: plain(m, x, y) + (m(x) @ m(data.train[0]).T).logsumexp(1))
    return trial.score(model, data.validation)


@_trap("refused", "the whole training set in every loss", _READ)
def _whole_losses(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for x, y in private.batches():
        private.step(plain(private.model, x - data.train[0].mean(0), y))
    return trial.score(model, data.validation)


@_trap("refused", "another batch than was drawn", _READ)
def _own_batch(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for _ in private.batches():
        private.step((data.train[0][:20], data.train[1][:20]), plain)
    return trial.score(model, data.validation)


@_trap("refused", "losses computed in a thread", "No check sees what another thread does.")
def _thread(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for x, y in private.batches():
        found: list[T] = []
        worker = threading.Thread(
            target=lambda: found.append(plain(private.model, x - x.mean(0), y))  # noqa: B023
        )
        worker.start()
        worker.join()
        private.step(found[0])
    return trial.score(model, data.validation)


@_trap(
    "refused", "the batch changed in place, then stepped by record", "The step would not see it."
)
def _in_place(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for x, y in private.batches():
        x.add_(0.1 * torch.randn_like(x))
        private.step((x, y), plain)
    return trial.score(model, data.validation)


@_trap("refused", "training records overwritten in the loop", "Records would stand in for others.")
def _overwritten(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for batch in private.batches():
        private.step(batch, plain)
        data.train[0][1:] = data.train[0][:1]
    return trial.score(model, data.validation)
