"""AdaCliP against fixed clipping: the regression, Theorem 2, Tables 1 and 2, Figure 3, momentum.

python -m studies.adaclip.run --data mnist.npz        # goes on where it was
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import AdaCliP, FixedDPSGD, NormBound, PublicRate
from studies.adaclip import parts, shown
from studies.harness import Split, mnist
from studies.sheet import Again, Options, Sheet, releases_of, seed_of
from studies.two_factors.six import SIX

DELTA, BATCH, EPOCHS = 1e-5, 600, 10
FIXED = [{"learning_rate": r, "max_grad_norm": 4.0} for r in (0.03, 0.1, 0.3, 1.0)]
LITERAL = [
    {"learning_rate": r, "largest_variance": 1e-2} for r in (1e3, 1e4)
]  # of (5) as it stands
REGRESSION = ("fixed", "told, optimal", "told, whitened", "AdaCliP", "AdaCliP, σ = 0.03")
THEOREM = ("optimal", "whitened", "one norm", "optimal, γ = 1")
FALLING = "falling rate"
MOMENTS = "fixed, moments accountant"
SMALL = "fixed, norm of 1.6"
LONG = "AdaCliP, β₂ = 0.997"
STARTED = f"{LONG}, from h₂"
LATE = f"{STARTED}, cut late"
MENDED = "AdaCliP, from h₂"
LETTER = "AdaCliP, (5) to the letter"
TOLD, LOGITS = "AdaCliP, told", "noise in the logits"
PUBLIC, PUBLIC_CLIPPED = "public-rate", "public-rate, norm of 4"
SEEDS = dict.fromkeys(("fixed", STARTED, SMALL, LONG, "AdaCliP", MENDED, PUBLIC), 6)
SEEDS |= dict.fromkeys((TOLD, LATE, PUBLIC_CLIPPED), 4)
"""Seeds of Table 1 at ε = 2, where arms are compared by pairs; three elsewhere."""
BETAS = (0.0, 0.9, 0.99)
PCA = 4.0  # its noise multiplier over that of a step
STARTS = ("paper, 1e-3", "largest, 1e-3", "largest, 3e-3", "largest, 1e-2")
"""Where the scale begins, and h₂: the options that decide AdaCliP's accuracy on two small tasks."""
START, START_TASKS, REPEATS = "start on ", ("digits", "mnist cnn"), 10


def cells(options: Options) -> Iterator[dict[str, Any]]:
    """Yield the cells: those of both ends first, the dear ones of the network in the middle."""
    if options.smoke:
        for part, at, arm in SMOKE:
            yield {"part": part, "at": at, "arm": arm}
        return
    for at, arm in itertools.product((1, 10, 100, 1000), REGRESSION):
        yield {"part": "regression", "at": at, "arm": arm}
    for arm in SEEDS:
        yield {"part": "table 1", "at": 2.0, "arm": arm}
    for at, arm in itertools.product((10, 1000), THEOREM):
        yield {"part": "theorem 2", "at": at, "arm": arm}
    for at in (50, 300, 1000):
        yield {"part": LOGITS, "at": at, "arm": TOLD}
    for at, arm in itertools.product((0.1, 0.25, 0.5, 1.0), ("norm bound", "fixed")):
        yield {"part": "table 1", "at": at, "arm": arm}
    yield {"part": "table 1", "at": 2.0, "arm": "norm bound"}
    for at in (0.5, 2.0):
        yield {"part": "table 2", "at": at, "arm": "fixed"}
    yield {"part": "table 1", "at": 0.1, "arm": "AdaCliP"}
    yield {"part": "table 2", "at": 0.5, "arm": "AdaCliP"}
    yield {"part": "table 1", "at": 0.5, "arm": "AdaCliP"}
    yield {"part": "table 1", "at": 0.1, "arm": MOMENTS}
    yield {"part": "table 2", "at": 2.0, "arm": f"fixed, {FALLING}"}
    yield {"part": "table 2", "at": 2.0, "arm": "AdaCliP"}
    for beta in BETAS:
        yield {"part": "momentum", "at": 0.5, "arm": f"β = {beta:g}"}
    for at in (0.25, 1.0):
        yield {"part": "table 1", "at": at, "arm": "AdaCliP"}
    yield {"part": "table 2", "at": 2.0, "arm": f"AdaCliP, {FALLING}"}
    for at, arm in ((0.2, "fixed"), (4.0, f"fixed, {FALLING}"), (1.0, f"fixed, {FALLING}")):
        yield {"part": "table 2", "at": at, "arm": arm}
    for at in (0.5, 2.0, 0.25, 1.0):
        yield {"part": "table 1", "at": at, "arm": MOMENTS}
    yield {"part": "table 1", "at": 0.5, "arm": LETTER}
    yield {"part": "table 2", "at": 0.2, "arm": "AdaCliP"}
    for at, arm in itertools.product((0.1, 0.25, 0.5, 1.0, 2.0), (MENDED, LETTER)):
        if (at, arm) != (0.5, LETTER):
            yield {"part": "table 1", "at": at, "arm": arm}
    for task, at, arm in itertools.product(START_TASKS, (0.5, 1.0, 2.0, 4.0, 8.0), STARTS):
        yield {"part": f"{START}{task}", "at": at, "arm": arm}


SMOKE = (
    ("regression", 10, "AdaCliP"),
    ("theorem 2", 10, "whitened"),
    ("table 1", 2.0, LATE),
    ("table 1", 2.0, TOLD),
    (LOGITS, 5, TOLD),
    ("table 1", 2.0, "norm bound"),
    ("momentum", 2.0, "β = 0.9"),
    ("start on digits", 2.0, "paper, 1e-3"),
    ("table 2", 2.0, "fixed"),
    ("table 2", 2.0, "AdaCliP"),
)


def _adaclip(epsilon: float) -> list[dict[str, float]]:
    """Return AdaCliP's candidates for logistic regression: about the best of twelve in trials."""
    pairs = [(0.1, 1e-3), (0.3, 1e-4), (0.1, 1e-2), (0.3, 1e-2), (1.0, 1e-3), (1.0, 1e-2)]
    if epsilon != 0.25:
        pairs = pairs[:2] if epsilon < 0.25 else pairs[2 : 6 if epsilon == 2.0 else 4]
    return _pairs(*pairs[: 6 if epsilon == 2.0 else 4])


def _pairs(*pairs: tuple[float, float]) -> list[dict[str, float]]:
    return [{"learning_rate": rate, "largest_variance": h2} for rate, h2 in pairs]


def _rates(*rates: float) -> list[dict[str, float]]:
    return [{"learning_rate": rate} for rate in rates]


def _network(arm: str, epsilon: float) -> list[dict[str, Any]]:
    """Return the network's candidates.

    A norm of 4 for each of two layers is one of 4 sqrt(2) for the whole; AdaCliP's noise is about
    that at an h2 of 1e-3, and half of it at 1e-4.
    """
    small, falls = epsilon <= 0.5, {"schedule": "linear"} if arm.endswith(FALLING) else {}
    if arm.startswith("fixed"):
        rates = (0.05, 0.1, 0.25) if small else (0.5, 1.0) if falls else (0.1, 0.25, 0.5)
        own = {"max_grad_norm": 4.0 * 2**0.5, **falls}
        return [{"learning_rate": rate, **own} for rate in rates]
    pairs = ((0.1, 1e-3), (0.3, 1e-4)) if small else ((0.4, 1e-3), (1.0, 1e-4))
    if falls:
        pairs = ((0.5, 1e-3), (1.0, 1e-3))
    return [{"learning_rate": rate, "largest_variance": h2, **falls} for rate, h2 in pairs]


@lru_cache(maxsize=1)
def data(path: Path | None, smoke: bool) -> Split:
    """Load the records once."""
    return mnist(path, smoke=smoke)


def fill(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Run one arm at one ε or one number of dimensions."""
    part, at, arm = cell["part"], float(cell["at"]), str(cell["arm"])
    if part == "regression":
        return parts.regression(arm, int(at), epochs=0.1 if options.smoke else 2.0)
    if part == "theorem 2":
        return parts.bounded(arm, int(at), smoke=options.smoke)
    if part.startswith(START):
        return _started(part.removeprefix(START), at, arm, smoke=options.smoke)
    split = data(options.data, options.smoke)
    seeds = SEEDS.get(arm, 3) if (part, at) == ("table 1", 2.0) else 3
    seeds = 1 if options.smoke else seeds
    if part == LOGITS:
        whole = Schedule.from_epochs(records=60_000, expected_batch_size=BATCH, epochs=EPOCHS)
        sigma = FixedDPSGD.for_budget(whole, epsilon=2.0, delta=DELTA).noise_multiplier
        return parts.logit_noise(split, sigma, int(at), seeds)
    epochs, batch = (0.1, 60) if options.smoke else (EPOCHS, BATCH)
    schedule = Schedule.from_epochs(records=len(split), expected_batch_size=batch, epochs=epochs)
    budget = {"epsilon": at, "delta": DELTA}
    if part == "table 2":
        pca, noise = parts.shared(schedule, at, PCA)
        split, seeds = parts.projected(split, pca), min(seeds, 2)
        layers = FixedDPSGD(noise, clipping="by-layer")
        method: Any = AdaCliP(noise, start="paper") if arm.startswith("AdaCliP") else layers
        grid = _network(arm, at)
        return parts.chosen(method, schedule, parts.network, split, grid, seeds)
    if part == "momentum":
        beta = float(arm.removeprefix("β = "))
        method = FixedDPSGD.for_budget(schedule, **budget, momentum=beta)
        # The paper's average gives a new gradient the weight 1 - β; the sum here, all of it.
        rates = [
            {"learning_rate": round(r * (1.0 - beta), 6), "max_grad_norm": 28.0}
            for r in (0.03, 0.1)
        ]
        return parts.chosen(method, schedule, parts.logistic, split, rates, seeds)
    method, grid = _logistic(arm, schedule, at, split)
    return parts.chosen(method, schedule, parts.logistic, split, grid, seeds)


def _started(task: str, epsilon: float, arm: str, *, smoke: bool) -> list[dict[str, Any]]:
    """Run AdaCliP as a strategy on a small task, from a start and with a largest variance."""
    start, largest = arm.split(", ")
    work = SIX[task]
    lines = releases_of(
        {
            "strategy": "adaclip",
            "start": start,
            "parameters": {"learning_rate": 0.5, "largest_variance": float(largest)},
        },
        epsilon=epsilon,
        delta=DELTA,
        repeats=2 if smoke else REPEATS,
        seed=seed_of(task, epsilon),
        task=work.task,
        epochs=1 if smoke else work.epochs,
        expected_batch_size=work.batch,
    )
    return [
        {
            "seed": line["seed"],
            "value": round(100.0 * line["accuracy"], 2),
            "rate": 0.5,
            "h2": largest,
        }
        for line in lines
    ]


def _logistic(
    arm: str, schedule: Schedule, epsilon: float, split: Split
) -> tuple[Any, parts.Candidates]:
    """Return the method of an arm of Table 1, and what is tried of it."""
    if arm == MOMENTS:
        return FixedDPSGD(parts.moments_noise(schedule, epsilon, DELTA)), FIXED
    budget = {"epsilon": epsilon, "delta": DELTA}
    if arm == "norm bound":
        return NormBound.for_budget(schedule, **budget, gradient_bound=28.0), _rates(
            0.01, 0.03, 0.1, 0.3
        )
    if arm in (PUBLIC, PUBLIC_CLIPPED):
        norm = None if arm == PUBLIC else 4.0
        return PublicRate.for_budget(schedule, **budget, max_grad_norm=norm), [{}]
    if arm.startswith("fixed"):
        small = [{**one, "max_grad_norm": 1.6} for one in _rates(0.3, 1.0, 3.0)]
        return FixedDPSGD.for_budget(schedule, **budget), small if arm == SMALL else FIXED
    if arm == TOLD:
        known = parts.of_records(split)
        grid = _pairs((1.0, 1.0), (1.0, 3.0), (1.0, 10.0))
        return parts.Told.for_budget(schedule, **budget, known=known), grid
    if arm in (STARTED, LATE):
        # A variance that is cut late may be far below 0, and would leave its coordinate no room.
        own = {"late": True, "smallest_variance": 1e-5} if arm == LATE else {}
        started = parts.Started.for_budget(schedule, **budget, deviation_decay=0.997, **own)
        return started, _pairs((0.3, 1e-2), (1.0, 1e-3), (1.0, 3e-3), (1.0, 1e-2))
    if arm == LONG:
        method = AdaCliP.for_budget(schedule, **budget, deviation_decay=0.997, start="paper")
        return method, _pairs((0.3, 1e-1), (1.0, 1e-2), (1.0, 1e-1), (3.0, 1e-1))
    if arm == MENDED:
        return AdaCliP.for_budget(schedule, **budget), _adaclip(epsilon)
    if arm == LETTER:
        method = AdaCliP.for_budget(schedule, **budget, per_record=False, start="paper")
        return method, LITERAL
    return AdaCliP.for_budget(schedule, **budget, start="paper"), _adaclip(epsilon)


SHEET = Sheet(
    name="adaclip",
    key=("part", "at", "arm"),
    values=("seed", "value", "rate", "h2", "clipped", "noise", "even", "own", "steps", "bound"),
    cells=cells,
    fill=fill,
    figures=shown.figures,
    tables=shown.tables,
    charts=shown.charts,
    again=Again({"part": "regression", "at": "10", "arm": "AdaCliP"}, "value"),
)

if __name__ == "__main__":
    sys.exit(SHEET.main())
