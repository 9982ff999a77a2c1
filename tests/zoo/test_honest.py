"""Honest models train: through ``optimize``, and right against records one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

import privtune
from privtune.strategies import Fixed, PapernotSteinke, TrainingPlan
from privtune.study.build import build_candidate
from privtune.tasks.own import own_task
from privtune.training.engine.train import Training
from privtune.training.mechanism.kernel import flatten_params
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import FixedDPSGD
from tests.zoo.honest import HONEST, RECORDS, Honest

BOUND = 0.3
pytestmark = [
    pytest.mark.filterwarnings("ignore::privtune.training.mechanism.kernel.FallbackWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections"),
    # The pooler of an encoder, which no loss here uses.
    pytest.mark.filterwarnings(
        "ignore::privtune.execution.trained_weights.UntrainedWeightsWarning"
    ),
]


def optimize(honest: Honest, tmp_path: Path) -> privtune.strategies.Release:
    budget = privtune.Budget(8.0, 1e-3, name="honest")
    study = privtune.create_study(
        "honest", budget=budget, storage=f"sqlite:///{tmp_path / 'p.db'}", seed=3
    )
    records, scored = honest.data(), dict[str, Any]()
    if honest.score is not None:
        held_out = tree_map(lambda t: t[36:], records)
        records = tree_map(lambda t: t[:36], records)
        scored = {"score": honest.score, "public": {"validation": held_out}}
    task = privtune.make_task(honest.build, loss=honest.loss, train=records, **scored)
    return study.optimize(
        task,
        strategy=PapernotSteinke(mean_runs=2) if scored else Fixed(),
        epochs=0.8,
        expected_batch_size=10,
    )


@pytest.mark.parametrize("honest", HONEST, ids=[h.name for h in HONEST])
def test_optimize_takes_it(honest: Honest, tmp_path: Path) -> None:
    release = optimize(honest, tmp_path)
    assert bool(release.weights.isfinite().all())
    assert sum(p.numel() for p in release.model.parameters() if p.requires_grad) == len(
        release.weights
    )


@pytest.mark.parametrize("honest", HONEST, ids=[h.name for h in HONEST])
def test_a_step_without_noise_is_the_clipped_sum_of_records_one_by_one(honest: Honest) -> None:
    task = own_task(honest.build, loss=honest.loss, train=honest.data())
    schedule, method = Schedule(RECORDS, 1.0, 1), FixedDPSGD(0.0)
    built = build_candidate(task, TrainingPlan(schedule, method), secret=bytes(range(32)), fixed={})
    model, data, before = built.model, task.load().train, flatten_params(built.model).clone()
    trained = [p for p in model.parameters() if p.requires_grad]
    if not honest.draws:
        rows = []
        for x, y in zip(data.x.split(1), data.y.split(1), strict=True):
            loss = task.record_loss(model, x, y)
            assert loss.shape == (1,)
            found = torch.autograd.grad(
                loss.sum(), trained, allow_unused=True, materialize_grads=True
            )
            rows.append(torch.cat([g.flatten() for g in found]))
        own = torch.stack(rows)
        expected = ((BOUND / own.norm(dim=1)).clamp(max=1.0).unsqueeze(1) * own).sum(dim=0)
    made = replace(
        built.made,
        optimizer=torch.optim.SGD(trained, float(RECORDS)),
        scheduler=None,
        values={"max_grad_norm": BOUND},
    )
    (outcome,) = Training(method, schedule, task.record_loss, data).of([made])
    moved = before - outcome.params
    if honest.draws:  # masks are the engine's own
        assert 0.0 < float(moved.norm()) <= BOUND * RECORDS * 1.0001
    else:
        torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-5)
