"""Every trap of the zoo: refused, harmless and shown to be, or on the page Pitfalls."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from privtune.errors import PrivTuneError
from tests.zoo.trap import BOUND, Trap, linear, run, scored_share, share
from tests.zoo.traps_build import BUILDS
from tests.zoo.traps_data import DATA
from tests.zoo.traps_loss import LOSSES, SCORES

TRAPS = (*BUILDS, *LOSSES, *SCORES, *DATA)
PAGE = " ".join((Path(__file__).parents[2] / "docs" / "pitfalls.md").read_text("utf-8").split())

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def of(outcome):
    chosen = [trap for trap in TRAPS if trap.outcome == outcome]
    return pytest.mark.parametrize("trap", chosen, ids=lambda trap: trap.name)


@of("refused")
def test_a_refused_trap_charges_nothing_and_says_why(trap: Trap) -> None:
    failed, charged = run(trap)
    assert isinstance(failed, PrivTuneError | AssertionError), failed
    assert re.search(trap.says, f"{type(failed).__name__}: {failed}"), failed
    assert charged == 0


@of("harmless")
def test_a_harmless_trap_runs_and_a_record_moves_no_more_than_its_bound(trap: Trap) -> None:
    failed, charged = run(trap)
    assert failed is None
    assert charged == 1
    if trap in SCORES:
        assert scored_share(trap, 1.0) <= 1.0 + 1e-4
    else:
        assert share(trap) <= BOUND * (1.0 + 1e-4)


@of("on the page")
def test_what_nothing_can_see_runs_and_is_on_the_page(trap: Trap) -> None:
    failed, charged = run(trap)
    assert failed is None
    assert charged == 1
    assert trap.says.lower() in PAGE.lower()


@pytest.mark.quick
def test_there_are_as_many_as_there_should_be() -> None:
    assert len(TRAPS) >= 150
    assert len({trap.name for trap in TRAPS}) == len(TRAPS)
    for outcome in ("refused", "harmless", "on the page"):
        assert sum(trap.outcome == outcome for trap in TRAPS) >= 20


@pytest.mark.quick
def test_the_measure_can_fail() -> None:
    """A loss that couples the batch, in a loop that does not take records apart, moves it by more."""
    x, y = torch.randn(12, 6, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
    sums = []
    for rows in (slice(0, 12), slice(1, 12)):
        model, total = linear(), torch.zeros(18)
        torch.nn.init.constant_(model.weight, 0.1)
        a = x[rows].clone()
        a[0] *= 1e4
        for loss in functional.cross_entropy(model(a - a.mean(0)), y[rows], reduction="none"):
            (gradient,) = torch.autograd.grad(loss, [model.weight], retain_graph=True)
            total += gradient.flatten() * min(1.0, BOUND / float(gradient.norm()))
        sums.append(total)
    assert float((sums[0] - sums[1]).norm()) > 2.0 * BOUND
