"""Every honest objective is taken: through ``optimize``, and right against records one by one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import privtune
from privtune.errors import InvalidInputError
from privtune.strategies import Fixed
from privtune.training.engine.batched import BatchedKernel
from privtune.training.engine.graph.capture import run_one
from privtune.training.mechanism.clipping import Flat
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import flatten_params
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import FixedDPSGD
from privtune.training.own_loop.private_training import PrivateTraining
from tests.zoo.honest import HONEST, RECORDS, Honest, table

pytestmark = [
    pytest.mark.filterwarnings("ignore::privtune.training.mechanism.kernel.FallbackWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections"),
]
LOOP = privtune.DPSGD(records=RECORDS, epochs=0.8, expected_batch_size=10)
BOUND, RATE = 0.3, 0.2


@pytest.mark.parametrize("honest", HONEST, ids=[h.name for h in HONEST])
def test_optimize_takes_it(honest: Honest, storage: str) -> None:
    def objective(trial: privtune.Trial) -> float:
        model = honest.model()
        optimizer = honest.optimizer([p for p in model.parameters() if p.requires_grad])
        by_record = "by record" in honest.forms
        private = trial.make_private(
            model, optimizer, TensorData(*honest.data()), one_by_one=not by_record
        )
        decay = honest.schedule(optimizer) if honest.schedule else None
        private.fit(honest.loss_of, on_step=lambda *_: decay.step() if decay else None)
        return trial.score(model, None)

    budget = privtune.Budget(8.0, 1e-3, name="honest")
    study = privtune.create_study("honest", budget=budget, storage=storage)
    release = study.optimize(objective, strategy=Fixed(), training=LOOP)
    assert bool(release.weights.isfinite().all())


def loop(honest: Honest, form: str) -> PrivateTraining:
    torch.manual_seed(0)
    model = honest.model()
    return PrivateTraining(
        model,
        TensorData(*honest.data()),
        schedule=Schedule(RECORDS, RATE, 3),
        method=FixedDPSGD(0.0),
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0),
        clipping=Flat(BOUND),
        secret=bytes(range(32)),
        one_by_one=form == "one by one",
    )


def gradients(honest: Honest, model: torch.nn.Module, x: Any, y: Any, masks: Any) -> torch.Tensor:
    """Each record's, by plain autograd on a batch of one; random draws as the kernel made them."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    rows = []
    for b in range(len(x)):
        if honest.draws:
            own = [mask[0, b] for mask in masks]
            loss = run_one(
                model, honest.loss_of, dict(model.named_parameters()), x[b], y[b], masks=own
            )
        else:
            loss = honest.loss_of(model, x[b : b + 1], y[b : b + 1])
            assert loss.shape == (1,)
        found = torch.autograd.grad(
            loss.sum(), list(named.values()), allow_unused=True, materialize_grads=True
        )
        rows.append(torch.cat([g.flatten() for g in found]))
    return torch.stack(rows)


def steps(honest: Honest, form: str, drawn: list[Any]) -> None:
    """Hold each step of a loop against records taken one by one."""
    private = loop(honest, form)
    private._checked_at = frozenset(range(3))  # every step, where two are drawn elsewhere
    reference = copy.deepcopy(private.bare)
    try:
        for batch in private.batches():
            before = flatten_params(private.bare)
            x, y = batch
            if form == "losses":
                private.step(honest.loss_of(private.model, x, y))
            else:
                private.step((x, y), honest.loss_of)
            moved = (before - flatten_params(private.bare)) * RATE * RECORDS
            if honest.draws and form != "by record":  # other draws than those that are known here
                assert 0.0 < float(moved.norm()) <= BOUND * len(x) * 1.0001
                continue
            load(reference, before)
            own = gradients(honest, reference, x, y, drawn[-1] if honest.draws else ())
            norms = own.norm(dim=1)
            expected = ((BOUND / norms).clamp(max=1.0).unsqueeze(1) * own).sum(dim=0)
            torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-5)
    finally:
        private.close()


@pytest.mark.parametrize("honest", HONEST, ids=[h.name for h in HONEST])
def test_each_form_takes_it_or_names_another(
    honest: Honest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step without noise is the clipped sum of micro-batches of one; nothing is a false alarm."""
    drawn: list[Any] = []
    draw = BatchedKernel._masks
    monkeypatch.setattr(
        BatchedKernel, "_masks", lambda self, rows: drawn.append(draw(self, rows)) or drawn[-1]
    )
    for form in honest.forms:
        steps(honest, form, drawn)
    for form in honest.refused:
        way_out = {"by record": "one_by_one=True", "losses": r"private\.step\(batch, loss_of\)"}[
            form
        ]
        if honest.name.startswith("gradient penalty"):  # torch refuses the loop's own line
            way_out = "setup_context"
        with pytest.raises((InvalidInputError, RuntimeError), match=way_out):
            steps(honest, form, drawn)


def load(model: torch.nn.Module, flat: torch.Tensor) -> None:
    start = 0
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(flat[start : start + parameter.numel()].view_as(parameter))
                start += parameter.numel()


def test_nearly_all_are_taken_record_by_record_and_all_by_option() -> None:
    assert len(HONEST) >= 45
    assert sum("by record" in h.forms for h in HONEST) >= len(HONEST) - 1
    assert all("one by one" in h.forms for h in HONEST)


def test_the_guide_prints_the_table() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guide.md").read_text("utf-8")
    assert table() in guide
