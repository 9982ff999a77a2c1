"""`law: auto` against every law on a grid: none that finds as often would do with less noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import brentq

from privtune.accounting import (
    Adjacency,
    Binomial,
    Event,
    Gaussian,
    Geometric,
    Poisson,
    PoissonSampled,
    PrivateSelection,
    Repeated,
    RunLaw,
    TruncatedNegativeBinomial,
    epsilon,
    scale_noise,
)
from privtune.strategies.laws import choose_law

TRAINING = Repeated(100, PoissonSampled(0.05, Gaussian(1.0)))
SHAPES = (-0.5, 0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0, 10.0, 50.0)
LARGEST_MEAN = 1000.0


def finds(law: RunLaw) -> float:
    """The probability that one of the best tenth is among the runs, by the masses of the law."""
    few = np.arange(250)  # of more runs, hardly any misses
    return float(1.0 - law.pmf(few) @ 0.9**few)


def admissible(power: float) -> list[RunLaw]:
    """Each family with the least mean that finds with this probability, where one does."""
    fewest = math.ceil(math.log1p(-power) / math.log1p(-0.1))
    families = [lambda m, s=s: TruncatedNegativeBinomial(s, m) for s in SHAPES]
    families += [Poisson, lambda m: Poisson(m, maximum=2 * fewest)]
    families += [lambda m: Geometric(m, maximum=8 * fewest)]
    sizes = {fewest + 1, fewest + 2, 2 * fewest, 4 * fewest, 20 * fewest}
    families += [lambda m, n=n: Binomial(n, min(m, n)) for n in sizes]
    laws: list[RunLaw] = [Binomial(n, n) for n in (fewest, fewest + 1)]
    for family in families:
        if finds(family(1.0)) < power <= finds(family(LARGEST_MEAN)):
            mean = brentq(lambda m, f=family: finds(f(m)) - power, 1.0, LARGEST_MEAN, xtol=1e-4)
            laws.append(family(mean))
    return laws


def test_a_fixed_number_and_one_by_hand_find_as_often_as_the_table_says() -> None:
    assert finds(Binomial(9, 9)) == pytest.approx(1.0 - 0.9**9)
    assert finds(Geometric(13.5)) == pytest.approx(0.6, abs=1e-6)  # 1 - 0.9 / (1 + 0.1 * 12.5)


@pytest.mark.parametrize(
    ("base", "target", "power"),
    [
        (Gaussian(1.0), 2.0, 0.6),
        (Gaussian(1.0), 2.0, 0.3),
        (Gaussian(1.0), 0.5, 0.8),
        pytest.param(TRAINING, 1.0, 0.6, marks=pytest.mark.slow),
        pytest.param(TRAINING, 4.0, 0.9, marks=pytest.mark.slow),
    ],
)
def test_no_law_that_finds_as_often_does_with_less_noise(
    base: Event, target: float, power: float
) -> None:
    law, trade = choose_law(
        base, epsilon=target, delta=1e-5, adjacency=Adjacency.ADD_REMOVE, power=power
    )
    assert finds(law) >= power - 1e-6
    # The choice is made at a power of 1.25, and noise is calibrated to half a percent.
    level = 1.25 ** round(math.log(target, 1.25))
    (noise,) = (row["noise"] for row in trade if row["chosen"])
    enough, less = scale_noise(base, noise), scale_noise(base, 0.98 * noise)
    assert epsilon(PrivateSelection(enough, law), 1e-5).epsilon <= level * 1.001
    laws = admissible(power)
    assert len(laws) >= 15
    for other in laws:
        assert epsilon(PrivateSelection(less, other), 1e-5).epsilon > level, other


@pytest.mark.parametrize("power", [0.11, 0.9, 0.985])
def test_a_law_whose_tail_is_too_long_for_the_power_is_left_out(power: float) -> None:
    """The logarithmic law finds with 0.9 at no mean below a million."""
    law, trade = choose_law(
        Gaussian(1.0), epsilon=2.0, delta=1e-5, adjacency=Adjacency.ADD_REMOVE, power=power
    )
    names = {row["law"] for row in trade}
    assert ("logarithmic" in names) == (power < 0.9)
    assert {"geometric", "poisson", "binomial", "fixed number of runs"} <= names
    assert finds(law) >= power - 1e-6
