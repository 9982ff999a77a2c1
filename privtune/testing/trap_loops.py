"""Traps in the loop: samples that are not released, weights that something else changes."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from privtune.study.trial import Trial
from privtune.testing.trap import Toy, Trap, begin, linear, plain, sgd

__all__ = ["LOOPS"]

T = torch.Tensor
_LOOPS: list[Trap] = []


def _trap(verdict: Any, name: str, why: str, **options: Any) -> Callable[[Any], Any]:
    """Enter an objective into the list."""
    if verdict == "refused":
        options.setdefault("when", "before")

    def enter(objective: Any) -> Any:
        _LOOPS.append(Trap(name=name, objective=objective, verdict=verdict, why=why, **options))
        return objective

    return enter


def _loop(
    body: Callable[..., object], *, form: str = "losses", model: Callable[[], nn.Module] = linear
) -> Any:
    """Make an objective of what is done with each batch, beside its step."""

    def objective(trial: Trial, data: Toy) -> float:
        made, optimizer, private = begin(trial, data, model())
        for batch in private.batches():
            if form == "by record":
                private.step(batch, plain)
                body(made, optimizer, private, None, None)
                continue
            x, y = batch
            losses = plain(private.model, x, y)
            private.step(losses)
            body(made, optimizer, private, losses, (x, y))
        return trial.score(made, data.validation)

    return objective


def _both_forms(verdict: Any, name: str, why: str, **options: Any) -> Callable[[Any], Any]:
    """Enter what is done after each step, in both forms."""

    def enter(body: Any) -> Any:
        for form in ("losses", "by record"):
            more = {"like": "by record" if form == "by record" else "by losses"}
            extra = {**options, **(more if verdict == "harmless" else {})}
            _trap(verdict, f"{name}: {form}", why, **extra)(_loop(body, form=form))
        return body

    return enter


# Samples.

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

    try:
        private.fit(plain, on_step=stop)
    except StopIteration:
        pass
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


# Weights.

_ELSEWHERE = "Weights change by releases alone."


@_both_forms("refused", "weights overwritten by records", _ELSEWHERE)
def _by_copy(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    with torch.no_grad():
        model.weight.copy_(torch.ones(3, 6) if batch is None else batch[0][:1].expand(3, 6))


@_both_forms("refused", "weights written through .data", _ELSEWHERE)
def _by_data(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    model.weight.data[0] += 1.0


@_both_forms("refused", "weights written through NumPy", _ELSEWHERE)
def _by_numpy(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    model.bias.detach().numpy()[0] += np.float32(1.0)


@_both_forms("refused", "weights loaded back", _ELSEWHERE)
def _by_state(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    model.load_state_dict({k: v * 1.01 for k, v in model.state_dict().items()})


@_both_forms("refused", "a vector written to the parameters", _ELSEWHERE)
def _by_vector(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    flat = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(flat * 1.01, model.parameters())


@_both_forms("refused", "a parameter re-initialised", _ELSEWHERE)
def _by_init(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    nn.init.zeros_(model.bias)


@_both_forms("refused", "a weight replaced", _ELSEWHERE)
def _by_replacement(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    model.bias = nn.Parameter(torch.zeros(3))


@_both_forms("refused", "a parameter added late", _ELSEWHERE)
def _added(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    model.register_parameter("late", nn.Parameter(torch.zeros(3)))


@_both_forms("refused", "requires_grad toggled", _ELSEWHERE)
def _toggled(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    model.bias.requires_grad_(False)


@_both_forms("refused", "the optimizer stepped along a gradient of the loop's own", _ELSEWHERE)
def _stepped(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


@_both_forms("harmless", "the optimizer stepped again", "No gradient is left for it.")
def _stepped_again(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    optimizer.step()


@_both_forms("refused", "an optimizer that was replaced", _ELSEWHERE)
def _replaced(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    other = torch.optim.Adam(model.parameters(), 0.1)
    functional.mse_loss(model(torch.ones(2, 6)), torch.zeros(2, 3)).backward()
    other.step()


@_both_forms("refused", "averaged weights (EMA) loaded back", _ELSEWHERE)
def _averaged(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.99)


@_both_forms("refused", "forward swapped", "What is scored is not what is released.")
def _swapped(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    model.forward = lambda x: functional.one_hot(torch.zeros(len(x), dtype=torch.long), 3)


@_trap("refused", "the best checkpoint by un-noised accuracy", _ELSEWHERE)
def _checkpoint(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    best, kept = -1.0, copy.deepcopy(model.state_dict())
    for batch in private.batches():
        private.step(batch, plain)
        right = float((model(data.validation[0]).argmax(1) == data.validation[1]).double().mean())
        if right > best:
            best, kept = right, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
    return trial.score(model, data.validation)


@_trap("refused", "back to earlier weights where the loss rises", _ELSEWHERE)
def _rolled_back(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    before = [p.detach().clone() for p in model.parameters()]

    def back(done: int, planned: int) -> None:
        if float(plain(model, *data.train).mean().detach()) > 0.0:
            with torch.no_grad():
                for p, old in zip(model.parameters(), before, strict=True):
                    p.copy_(old)

    private.fit(plain, on_step=back)
    return trial.score(model, data.validation)


@_trap("refused", "sharpness-aware steps (SAM)", _ELSEWHERE)
def _sharpness(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for x, y in private.batches():
        plain(model, x, y).mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.05 * torch.nn.functional.normalize(torch.ones_like(p), dim=0))
        private.step(plain(private.model, x, y))
    return trial.score(model, data.validation)


@_trap(
    "refused", "LBFGS", "An optimizer that asks for gradients by itself was not charged for them."
)
def _lbfgs(trial: Trial, data: Toy) -> float:
    model = linear()
    model, _, private = begin(trial, data, model, optimizer=torch.optim.LBFGS(model.parameters()))
    private.fit(plain)
    return trial.score(model, data.validation)


@_trap("refused", "GradScaler", _ELSEWHERE)
def _scaler(trial: Trial, data: Toy) -> float:
    model, optimizer, private = begin(trial, data)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for x, y in private.batches():
        scaler.scale(plain(private.model, x, y).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    return trial.score(model, data.validation)


def _own_parameter(kind: str) -> Any:
    """Something beside the model that learns: a temperature, centers of classes."""

    def objective(trial: Trial, data: Toy) -> float:
        model, _, private = begin(trial, data)
        own = torch.ones((), requires_grad=True)
        own = nn.Parameter(own.detach().clone()) if kind == "parameter" else own
        beside = torch.optim.SGD([own], 0.1)
        for x, y in private.batches():
            private.step(functional.cross_entropy(private.model(x) * own, y, reduction="none"))
            beside.step()
            beside.zero_grad()
        return trial.score(model, data.validation)

    return objective


_BESIDE = "Its gradients were neither clipped nor noised, and the next losses read it."
_trap("refused", "a learned temperature beside the model", _BESIDE)(_own_parameter("parameter"))
_trap("refused", "a learned tensor beside the model", _BESIDE)(_own_parameter("tensor"))


@_trap("refused", "a penalty on captured weights: by record", "They would be constants.")
def _constant(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    weights = list(model.parameters())
    private.fit(lambda m, x, y: plain(m, x, y) + sum(w.square().sum() for w in weights))
    return trial.score(model, data.validation)


@_trap("refused", "a penalty on the weights: losses", "It reaches weights beside their modules.")
def _regularised(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for x, y in private.batches():
        penalty = sum(p.square().sum() for p in model.parameters())
        private.step(plain(private.model, x, y) + penalty)
    return trial.score(model, data.validation)


@_trap("refused", "hooks taken off", "Without them there are no gradients of records.")
def _unhooked(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for x, y in private.batches():
        private.model.disable_hooks()
        private.step(plain(private.model, x, y))
    return trial.score(model, data.validation)


@_trap("refused", "evaluation mode: losses", "Hooks sleep in it.")
def _evaluating(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for x, y in private.batches():
        private.model.eval()
        private.step(plain(private.model, x, y))
    return trial.score(model, data.validation)


@_trap("refused", "gradients switched off", "Losses without gradients release nothing.")
def _gradless(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for x, y in private.batches():
        with torch.no_grad():
            private.step(plain(private.model, x, y))
    return trial.score(model, data.validation)


# What changes nothing.


@_trap(
    "harmless", "evaluation mode: by record", "No layer of the model asks for it.", like="by record"
)
def _evaluating_by_record(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for batch in private.batches():
        model.eval()
        private.step(batch, plain)
    return trial.score(model, data.validation)


@_both_forms("harmless", "an averaged copy (SWA, EMA) kept aside", "It is made of releases.")
def _aside(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    torch.optim.swa_utils.AveragedModel(linear()).update_parameters(model)


@_both_forms("harmless", "zero_grad after the step", "Gradients of the loop's own are not used.")
def _zeroed(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    optimizer.zero_grad()


@_both_forms("harmless", "gradients clipped by hand after the step", "They are not used.")
def _clipped(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@_both_forms("harmless", "an un-noised gradient left in .grad", "It is not used.")
def _left_behind(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e6)


def _copied(form: str) -> Any:
    def objective(trial: Trial, data: Toy) -> float:
        model, _, private = begin(trial, data)
        other = copy.deepcopy(model)
        own = torch.optim.SGD(other.parameters(), 0.5)
        for batch in private.batches():
            x, y = batch
            plain(other, x, y).mean().backward()
            own.step()
            if form == "losses":
                private.step(plain(private.model, x, y))
            else:
                private.step(batch, plain)
        return trial.score(model, data.validation)

    return objective


for _form in ("losses", "by record"):
    _trap(
        "harmless", f"a copy trained aside: {_form}", "It is not released.",
        like="by losses" if _form == "losses" else _form,
    )(_copied(_form))  # fmt: skip


@_both_forms("harmless", "a second optimizer that has nothing to do", "No gradient is left for it.")
def _idle(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    torch.optim.SGD(model.parameters(), 9.0).step()


@_both_forms("harmless", "the global seed set in the loop", "Noise has streams of its own.")
def _seeded(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    torch.manual_seed(0)


@_both_forms("harmless", "the training loss summed up for a log", "No loss reads it.")
def _logged(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    if losses is not None:
        private.total = losses.detach().sum() + getattr(private, "total", 0.0)


@_trap(
    "harmless", "the training loss summed up before the step", "No loss reads it.", like="by losses"
)
def _summed(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    total = torch.zeros(())
    for x, y in private.batches():
        losses = plain(private.model, x, y)
        total = total + losses.detach().sum()
        private.step(losses)
    return trial.score(model, data.validation)


@_trap(
    "harmless", "forward hooks that store records: losses", "Nothing reads them.", like="by losses"
)
def _hooked(trial: Trial, data: Toy) -> float:
    seen: list[Any] = []
    model, _, private = begin(trial, data)
    model.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].detach()))
    for x, y in private.batches():
        private.step(plain(private.model, x, y))
    return trial.score(model, data.validation)


@_trap(
    "harmless",
    "forward hooks that store records: by record",
    "Nothing reads them.",
    like="by record",
)
def _hooked_by_record(trial: Trial, data: Toy) -> float:
    seen: list[Any] = []
    model, _, private = begin(trial, data)
    model.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape))
    private.fit(plain)
    return trial.score(model, data.validation)


@_trap(
    "harmless",
    "gradients multiplied by a hook on a weight",
    "The engine takes none.",
    like="by record",
)
def _multiplied(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for p in model.parameters():
        p.register_hook(lambda g: 1000.0 * g)
    private.fit(plain)
    return trial.score(model, data.validation)


@_trap("harmless", "DataParallel", "Each record is computed by itself.", like="by record")
def _parallel(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data, nn.DataParallel(linear()))
    private.fit(plain)
    return trial.score(model, data.validation)


@_trap("harmless", "torch.compile: losses", "What it wraps is trained.", like="by losses")
def _compiled_losses(trial: Trial, data: Toy) -> float:
    model = torch.compile(linear(), backend="eager")
    made, _, private = begin(trial, data, model)  # type: ignore[arg-type]
    for x, y in private.batches():
        private.step(plain(private.model, x, y))
    return trial.score(made, data.validation)


@_trap(
    "harmless", "torch.compile: by record", "Each record is computed by itself.", like="by record"
)
def _compiled(trial: Trial, data: Toy) -> float:
    model = torch.compile(linear(), backend="eager")
    made, _, private = begin(trial, data, model)  # type: ignore[arg-type]
    private.fit(plain)
    return trial.score(made, data.validation)


def momentum_encoder(**options: Any) -> Any:
    """Return the objective of a model that follows a slow copy of itself."""

    def objective(trial: Trial, data: Toy) -> float:
        model, _, private = begin(trial, data, **options)
        slow = copy.deepcopy(model).requires_grad_(False)

        def loss(m: Any, x: T, y: T) -> T:
            apart: T = (m(x) - slow(x)).square().sum(1)
            return plain(m, x, y) + apart

        def follow(*_: int) -> None:
            with torch.no_grad():
                for p, q in zip(slow.parameters(), model.parameters(), strict=True):
                    p.lerp_(q, 0.1)

        private.fit(loss, on_step=follow)
        return trial.score(model, data.validation)

    return objective


_trap(
    "harmless", "momentum encoder", "It is made of releases alone.", like="momentum encoder, one by one"
)(momentum_encoder())  # fmt: skip


# What nothing can see.

LATE = 2  # a step that is not replayed under the zoo's seeds


def _undecidable(name: str, severity: str, why: str, **options: Any) -> Callable[[Any], Any]:
    return _trap("undecidable", name, why, severity=severity, **options)


@_undecidable("weights initialised from records", "critical", "They were so when they were given.")
def _prototypes(trial: Trial, data: Toy) -> float:
    model = nn.Linear(6, 3)
    x, y = data.train
    with torch.no_grad():
        model.weight.copy_(torch.stack([x[y == c].mean(0) for c in range(3)]))
    _, _, private = begin(trial, data, model)
    private.fit(plain)
    return trial.score(model, data.validation)


@_undecidable("pretrained on the private records", "critical", "They were so when they were given.")
def _warm(trial: Trial, data: Toy) -> float:
    model = linear()
    own = sgd(model)
    for _ in range(3):
        own.zero_grad()
        plain(model, *data.train).mean().backward()
        own.step()
    _, _, private = begin(trial, data, model, optimizer=sgd(model))
    private.fit(plain)
    return trial.score(model, data.validation)


@_undecidable(
    "a teacher trained on the private records", "critical", "Its weights look like any others."
)
def _teacher(trial: Trial, data: Toy) -> float:
    teacher = linear()
    own = sgd(teacher)
    for _ in range(3):
        own.zero_grad()
        plain(teacher, *data.train).mean().backward()
        own.step()
    teacher.requires_grad_(False)
    model, _, private = begin(trial, data)
    private.fit(lambda m, x, y: (m(x) - teacher(x)).square().sum(1))
    return trial.score(model, data.validation)


class _Mixing(torch.utils.data.Dataset[Any]):
    """Mixes each record with another one when it is fetched."""

    def __init__(self, pair: Any) -> None:
        self.x, self.y = pair

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return 0.7 * self.x[index] + 0.3 * self.x[0], self.y[index]


@_undecidable("a dataset that mixes records", "critical", "What a dataset returns is a record.")
def _mixing(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data, train=_Mixing(data.train))
    private.fit(plain)
    return trial.score(model, data.validation)


@_undecidable(
    "records repeated to balance classes", "critical", "Equal rows may be different persons'."
)
def _balanced(trial: Trial, data: Toy) -> float:
    x, y = data.train
    rows = torch.cat([(y == c).nonzero().flatten().repeat(9)[:20] for c in range(3)])
    model, _, private = begin(trial, data, train=(x[rows], y[rows]))
    private.fit(plain)
    return trial.score(model, data.validation)


@_undecidable(
    "inputs standardised by the training set", "critical", "The columns look like any others."
)
def _standardised(trial: Trial, data: Toy) -> float:
    x, y = data.train
    model, _, private = begin(trial, data, train=((x - x.mean(0)) / x.std(0), y))
    private.fit(plain)
    return trial.score(model, data.validation)


@_undecidable(
    "class weights counted in the training set", "high", "They are numbers like any others."
)
def _weighted(trial: Trial, data: Toy) -> float:
    weights = 1.0 / torch.bincount(data.train[1], minlength=3)
    model, _, private = begin(trial, data)
    private.fit(lambda m, x, y: weights[y] * plain(m, x, y))
    return trial.score(model, data.validation)


@_undecidable("a running number of the batches in Python", "critical", "It has left torch.")
def _number(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    scale = 1.0
    for x, y in private.batches():
        losses = plain(private.model, x, y)
        scale = 0.9 * scale + 0.1 * float(losses.mean())
        private.step(losses / scale)
    return trial.score(model, data.validation)


@_undecidable("losses coupled in a later step", "critical", "Few steps are replayed.")
def _late(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for number, (x, y) in enumerate(private.batches()):
        private.step(plain(private.model, x - x.mean(0) if number == LATE else x, y))
    return trial.score(model, data.validation)


@_undecidable(
    "a learning rate that falls with the training loss", "high", "It is a number of the loop's."
)
def _plateau(trial: Trial, data: Toy) -> float:
    model, optimizer, private = begin(trial, data)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for x, y in private.batches():
        losses = plain(private.model, x, y)
        private.step(losses)
        scheduler.step(float(losses.mean()))
    return trial.score(model, data.validation)


@_undecidable("training records overwritten through NumPy", "critical", "NumPy leaves no trace.")
def _by_array(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for batch in private.batches():
        private.step(batch, plain)
        data.train[0].numpy()[1:] = data.train[0].numpy()[:1]
    return trial.score(model, data.validation)


@_undecidable("the training loss printed", "high", "Whoever sees the output sees un-noised data.")
def _printed(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    shown: list[str] = []
    for x, y in private.batches():
        losses = plain(private.model, x, y)
        private.step(losses)
        shown.append(f"loss {float(losses.mean()):.3f}")
    return trial.score(model, data.validation)


LOOPS: tuple[Trap, ...] = tuple(_LOOPS)
"""Traps in loops."""
