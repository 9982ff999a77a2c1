"""Write the table of what other accountants say: `python studies/benchmarks/accountants/run.py`."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from privtune.accounting import (
    ZCDP,
    ApproximateDP,
    Composed,
    Event,
    Gaussian,
    Geometric,
    Joint,
    Laplace,
    Parallel,
    Poisson,
    PoissonSampled,
    PrivateSelection,
    Repeated,
    SubsampledTuning,
    ThresholdSelection,
)
from privtune.accounting.compare import TOOLS, compare

DELTA = 1e-5
TABLE = Path(__file__).parents[3] / "docs" / "accountants.md"


def training(rate: float, noise: float, steps: int) -> Event:
    """Return the event of one training by DP-SGD."""
    return Repeated(steps, PoissonSampled(rate, Gaussian(noise)))


MNIST = training(256 / 60_000, 1.0, 2340)
EVENTS: dict[str, Event] = {
    "one Gaussian release, σ = 1": Gaussian(1.0),
    "100 Gaussian releases, σ = 20": Repeated(100, Gaussian(20.0)),
    "one Laplace release, b = 1": Laplace(1.0),
    "20 Laplace releases, b = 10": Repeated(20, Laplace(10.0)),
    "zCDP, ρ = 0.1": ZCDP(0.1),
    "10 releases of approximate DP": Repeated(10, ApproximateDP(0.2, 1e-7)),
    "MNIST, 2,340 steps, q = 256/60000, σ = 1": MNIST,
    "400 steps, q = 0.05, σ = 2": training(0.05, 2.0, 400),
    "1,000 steps, q = 0.02, σ = 0.8": training(0.02, 0.8, 1000),
    "100,000 steps, q = 1e-4, σ = 1": training(1e-4, 1.0, 100_000),
    "200 steps, q = 0.2, σ = 4": training(0.2, 4.0, 200),
    "MNIST and a Laplace count": Composed([MNIST, Laplace(4.0)]),
    "three trainings of other rates": Composed(
        [MNIST, training(0.02, 1.5, 500), training(0.001, 0.7, 5000)]
    ),
    "100 sampled Laplace releases, q = 0.01": Repeated(100, PoissonSampled(0.01, Laplace(1.0))),
    "100 steps of a Gaussian and a Laplace release": Repeated(
        100, PoissonSampled(0.05, Joint([Gaussian(2.0), Laplace(8.0)]))
    ),
    "best of K trainings, geometric 10": PrivateSelection(MNIST, Geometric(10)),
    "best of K trainings, Poisson 10": PrivateSelection(MNIST, Poisson(10)),
    "first training above a threshold": ThresholdSelection(MNIST, 0.1),
    "tuning on a tenth, then a training": SubsampledTuning(
        2, 0.1, PrivateSelection(training(0.05, 2.0, 200), Geometric(10)), MNIST
    ),
    "two counts on disjoint parts": Parallel([Gaussian(2.0), Gaussian(3.0)]),
}


def row(name: str) -> str:
    """Return one line of the table; numbers are rounded up, as all that is printed of ε."""
    found = compare(EVENTS[name], DELTA)
    cells = [f"**{found.ours.epsilon + 5e-5:.4f}**", f"{found.lower:.4f}"]
    cells += [
        "cannot" if other.epsilon is None else f"{other.epsilon:.4f}" for other in found.others
    ]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Write the table."""
    versions = ", ".join(
        f"{name} {version(name)}" for name in ("dp-accounting", "autodp", "opacus")
    )
    lines = [
        "# Other accountants",
        "",
        f"ε at δ = {DELTA:g} under add-remove, of twenty events; by {versions}, each asked with its own",
        "events and default settings. “Lower” is the cost of one explicit mechanism with the event: no valid",
        "bound is below it. “Cannot” means that the accountant has no such event. For an event of your own,",
        "with the reason for each difference:",
        "`privtune account compare EVENT.json`. Made by `python studies/benchmarks/accountants/run.py`.",
        "",
        f"| event | PrivTune | lower | {' | '.join(TOOLS)} |",
        f"| --- |{' ---: |' * (len(TOOLS) + 2)}",
        *map(row, EVENTS),
        "",
        "Rényi accounts lose in the conversion to (ε, δ). Opacus' PRV account allows an",
        "error of 0.01 in ε and reports the upper end. dp-accounting uses a lattice of 1e-4 for every",
        "event: fine if ε is above 0.1, coarse for many steps at a small rate.",
    ]
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
