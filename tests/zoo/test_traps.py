"""Every trap of the zoo: refused, harmless and shown to be, or on the page Pitfalls."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch

import privtune
from privtune.errors import PrivTuneError
from privtune.ledger import Ledger
from privtune.study import Study
from privtune.training.mechanism.clipping import Flat
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import flatten_params
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import FixedDPSGD
from privtune.training.own_loop.private_training import PrivateTraining
from tests.zoo import traps
from tests.zoo.trap import HONEST, Toy, Trap, linear, sgd
from tests.zoo.trap_harmless import momentum_encoder
from tests.zoo.traps import TRAPS, run

PAGE = (Path(__file__).parents[2] / "docs" / "pitfalls.md").read_text(encoding="utf-8")
BY_VERDICT = {
    verdict: [trap for trap in TRAPS if trap.verdict == verdict]
    for verdict in ("refused", "harmless", "undecidable")
}
REFERENCES = {
    **HONEST,
    "momentum encoder, one by one": momentum_encoder(one_by_one=True),
    **{trap.name: trap.objective for trap in TRAPS},
}
BOUND = 0.5

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def of(verdict):
    return pytest.mark.parametrize("trap", BY_VERDICT[verdict], ids=lambda trap: trap.name)


@cache
def reference(name, arm):
    outcome = run(REFERENCES[name], arm=arm)
    assert outcome.error is None
    return outcome.results


@of("refused")
def test_refused_traps_release_nothing(trap: Trap) -> None:
    outcome = run(trap.objective, arm=trap.arm)
    assert isinstance(outcome.error, PrivTuneError), outcome.error
    assert not outcome.results
    assert outcome.charged == (trap.when == "after")


@of("harmless")
def test_harmless_traps_release_what_was_charged(trap: Trap) -> None:
    outcome = run(trap.objective, arm=trap.arm)
    assert outcome.error is None
    if trap.loss is not None:
        assert largest_share(trap) <= BOUND * (1.0 + 1e-4)
        return
    expected = reference(trap.like, trap.arm)
    for found, honest in zip(outcome.results, expected, strict=True):
        torch.testing.assert_close(found.weights, honest.weights, rtol=1e-5, atol=1e-6)
        assert found.params == honest.params
        assert found.score == honest.score


def largest_share(trap: Trap) -> float:
    """How far the sum of clipped gradients moves when one record leaves, over hostile records."""
    x, y = (t[:12] for t in Toy().train)
    x = x.clone()
    x[0], x[1], x[2, :3], x[3] = 1e4 * x[0], 0.0, 1e9, x[4]
    make = trap.model or linear
    whole = summed(trap, make, x, y)
    kept = torch.ones(len(x), dtype=torch.bool)
    shares = []
    for left in range(6):
        kept[left] = False
        shares.append(float((whole - summed(trap, make, x[kept], y[kept])).norm()))
        kept[left] = True
    return max(shares)


def summed(trap, make, x, y):
    torch.manual_seed(4)
    model = make()
    before = flatten_params(model)
    private = PrivateTraining(
        model,
        TensorData(x, y, sealed_size=True),
        schedule=Schedule(12, 1.0, 1),
        method=FixedDPSGD(0.0),
        optimizer=torch.optim.SGD(model.parameters(), 12.0),
        clipping=Flat(BOUND),
        secret=bytes(32),
    )
    try:
        private.fit(trap.loss)
    finally:
        private.close()
    return flatten_params(model) - before


@of("undecidable")
def test_what_nothing_can_see_runs_and_is_on_the_page(trap: Trap) -> None:
    assert run(trap.objective, arm=trap.arm).error is None
    section = PAGE.split(f"### {trap.severity.capitalize()}")[1].split("\n#")[0]
    assert f"**{trap.name}".lower() in section.lower()


@pytest.mark.quick
def test_the_page_counts_them() -> None:
    numbers = Counter(trap.verdict for trap in TRAPS)
    before = sum(trap.when == "before" for trap in BY_VERDICT["refused"])
    assert len(TRAPS) >= 60
    assert len({trap.name for trap in TRAPS}) == len(TRAPS)
    rows = dict(re.findall(r"^\| ([a-z ]+?) +\| +(\d+) \|", PAGE, re.MULTILINE))
    assert rows == {
        "refused before anything is charged": str(before),
        "refused after the charge": str(numbers["refused"] - before),
        "harmless": str(numbers["harmless"]),
        "undecidable": str(numbers["undecidable"]),
        "all": str(len(TRAPS)),
    }


@pytest.mark.quick
def test_every_pitfall_names_what_guards_it_or_that_nothing_can() -> None:
    section, checked = PAGE.split("## What nothing can check")[1].split("## What is checked")
    bullets = re.findall(r"^- \*\*.*\n(?:  .*\n)*", section, re.MULTILINE)
    assert len(bullets) == len(BY_VERDICT["undecidable"])
    assert all(bullet.endswith("Nothing can check this.\n") for bullet in bullets)
    verdicts = {trap.name: trap.verdict for trap in TRAPS}
    rows = [line[2:-2].split(" |") for line in checked.splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 12
    for habit, happens, _, guards in rows:
        named = re.findall(r"`([^`]+)`", guards)
        assert named, habit
        assert set(named) <= verdicts.keys(), habit
        assert any(verdicts[name] == happens.partition(":")[0].split()[0] for name in named), habit
    for test in re.findall(r"`(test_\w+\w)[`\[]", PAGE):
        assert test in globals(), test


@pytest.mark.parametrize("name", ["mixup: losses", "continue on a loss that is not a number"])
def test_a_study_keeps_the_charge_of_what_it_refuses_and_releases_nothing(
    tmp_path: Path, name: str
) -> None:
    (trap,) = [trap for trap in TRAPS if trap.name == name]
    storage, data = f"sqlite:///{tmp_path / 'privtune.db'}", Toy()
    study: Study = privtune.create_study("zoo", budget=traps.BUDGET, storage=storage)
    with pytest.raises(PrivTuneError):
        study.optimize(
            lambda trial: trap.objective(trial, data),
            strategy=privtune.strategies.Fixed(),
            training=traps.LOOP,
        )
    assert not study.releases()
    with Ledger(storage) as ledger:
        assert len(ledger.charges(traps.BUDGET.name)) == (trap.when == "after")


@pytest.mark.quick
def test_the_share_of_a_coupled_loss_is_found_to_be_too_large() -> None:
    """The reference can fail: without the checks, a mean over the batch is seen as unbounded."""
    x, y = (t[:12] for t in Toy().train)
    moved = []
    for rows in (slice(0, 12), slice(1, 12)):
        model = linear()
        torch.nn.init.constant_(model.weight, 0.1)
        optimizer = sgd(model)
        a = x[rows] * torch.where(torch.arange(len(x[rows])) == 0, 1e4, 1.0)[:, None]
        losses = torch.nn.functional.cross_entropy(model(a - a.mean(0)), y[rows], reduction="none")
        total = torch.zeros(18)
        for loss in losses:
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            gradient = model.weight.grad.flatten()
            total += gradient * min(1.0, BOUND / float(gradient.norm()))
        moved.append(total)
    assert float((moved[0] - moved[1]).norm()) > 2.0 * BOUND
