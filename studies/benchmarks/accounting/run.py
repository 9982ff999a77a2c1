"""Benchmarks of the accounting: ratios of medians from one interleaved run.

    python studies/benchmarks/accounting/run.py            the speed table
    python studies/benchmarks/accounting/run.py --bounds   ratios of the bounds over many settings

Times are processor times of one thread, so that a busy machine changes them little. Every repetition
starts from cold caches.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import math
import statistics
import time
import warnings

from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from opacus.accountants.utils import get_noise_multiplier

from privtune import accounting as acc
from privtune.accounting import accountant, curves, pld, rdp


def steps(rate: float, noise: float, count: int) -> acc.Event:
    return acc.Repeated(count, acc.PoissonSampled(rate, acc.Gaussian(noise)))


def cold() -> None:
    """Empty every cache of the package."""
    for module in (accountant, curves, pld, rdp):
        for value in vars(module).values():
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()
    gc.collect()


def their_epsilon(rate: float, noise: float, count: int) -> float:
    account = PLDAccountant()
    sampled = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(noise))
    account.compose(dp_event.SelfComposedDpEvent(sampled, count))
    return account.get_epsilon(1e-5)


def their_noise() -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_noise_multiplier(
            target_epsilon=1.0, target_delta=1e-5, sample_rate=0.01, steps=1000, accountant="prv"
        )


LONG = (0.01, 1.0, 10_000)
TABLE = [
    ((256 / 60000, 1.0, 2340), acc.TruncatedNegativeBinomial(1.0, 20.0)),
    ((256 / 60000, 1.0, 2340), acc.TruncatedNegativeBinomial(0.0, 10.0)),
    ((256 / 60000, 1.0, 2340), acc.Poisson(12.0)),
    ((0.05, 2.0, 400), acc.Geometric(100.0)),
    ((256 / 1400, 4.0, 100), acc.TruncatedNegativeBinomial(0.0, 10.0)),
]
TUNED = acc.PrivateSelection(steps(*TABLE[0][0]), TABLE[0][1])
CHARGES = [steps(0.01 + 1e-5 * i, 1.0 + 1e-3 * i, 200 + i) for i in range(1000)]
CASES = {
    "PLD of 10,000 steps: ours": lambda: acc.epsilon(steps(*LONG), 1e-5, method="pld").epsilon,
    "PLD of 10,000 steps: dp-accounting": lambda: their_epsilon(*LONG),
    "base of a selection": lambda: acc.epsilon(TUNED.event, 1e-5).epsilon,
    "selection, all bounds": lambda: acc.epsilon(TUNED, 1e-5).epsilon,
    "the five selections of the table": lambda: max(
        acc.epsilon(acc.PrivateSelection(steps(*b), r), 1e-5).epsilon for b, r in TABLE
    ),
    "calibrate DP-SGD: ours": lambda: (
        acc.calibrate(steps(0.01, 1.0, 1000), epsilon=1.0, delta=1e-5).scale
    ),
    "calibrate DP-SGD: Opacus PRV": their_noise,
    "one charge": lambda: acc.epsilon(CHARGES[500], 1e-5).epsilon,
    "1,000 different charges": lambda: acc.epsilon(acc.Composed(CHARGES), 1e-5).epsilon,
}
RATIOS = [
    ("PLD of 10,000 steps: ours", "PLD of 10,000 steps: dp-accounting", 1.0),
    ("selection, all bounds", "base of a selection", 3.0),
    ("calibrate DP-SGD: ours", "calibrate DP-SGD: Opacus PRV", 0.2),
    ("1,000 different charges", "one charge", 20.0),
]


def speed(repetitions: int) -> None:
    times: dict[str, list[float]] = {name: [] for name in CASES}
    values: dict[str, float] = {}
    for _ in range(repetitions):
        for name, case in CASES.items():
            cold()
            started = time.process_time()
            values[name] = case()
            times[name].append(time.process_time() - started)
    median = {name: statistics.median(found) for name, found in times.items()}
    for name, seconds in median.items():
        print(f"{name:40s} {seconds:8.3f} s   answer {values[name]:.5g}")
    for first, second, ceiling in RATIOS:
        ratio = median[first] / median[second]
        print(f"{first} / {second}: {ratio:.3f} (at most {ceiling:g})")


def their_selection(base: tuple[float, float, int], law: acc.RunLaw, delta: float) -> float:
    """Return ε of a private selection by dp-accounting, at its default orders."""
    rate, noise, count = base
    shape = math.inf if isinstance(law, acc.Poisson) else law.shape_parameter
    single = dp_event.GaussianDpEvent(noise)
    if rate < 1.0:
        single = dp_event.PoissonSampledDpEvent(rate, single)
    account = RdpAccountant()
    account.compose(
        dp_event.RepeatAndSelectDpEvent(
            dp_event.SelfComposedDpEvent(single, count), law.mean, shape
        )
    )
    return account.get_epsilon(delta)


def bounds() -> None:
    bases = [
        (0.001, 0.7, 2000),
        (256 / 60000, 1.0, 2340),
        (0.02, 0.9, 300),
        (0.05, 2.0, 400),
        (256 / 1400, 4.0, 100),
        (1.0, 20.0, 100),
    ]
    laws = [
        acc.Geometric(20.0),
        acc.Geometric(100.0),
        acc.Logarithmic(10.0),
        acc.TruncatedNegativeBinomial(0.5, 12.0),
        acc.TruncatedNegativeBinomial(2.0, 20.0),
        acc.Poisson(12.0),
        acc.Poisson(40.0),
    ]
    ratios, own, gaps = [], [], []
    for base, law, delta in itertools.product(bases, laws, (1e-5, 1e-8)):
        event = acc.PrivateSelection(steps(*base), law)
        answer = acc.epsilon(event, delta)
        lower = acc.lower_bound(event, delta)
        theirs = their_selection(base, law, delta)
        ratios.append(answer.epsilon / theirs)
        own.append(answer.epsilon / answer.bounds["rdp"])
        gaps.append(answer.epsilon / lower)
        print(
            json.dumps({"base": base, "law": law.to_dict(), "delta": delta, "lower": lower})[:-1]
            + f', "reported": {answer.epsilon:.6g}, "rdp": {answer.bounds["rdp"]:.6g}'
            + f', "dp_accounting": {theirs:.6g}}}'
        )
    for name, found in (
        ("reported / dp-accounting's RepeatAndSelectDpEvent", ratios),
        ("reported / our RDP bound", own),
        ("reported / lower bound", gaps),
    ):
        print(
            f"{name}: median {statistics.median(found):.4f}, least {min(found):.4f}, "
            f"most {max(found):.4f}, settings {len(found)}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--bounds", action="store_true")
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.bounds:
        bounds()
    else:
        speed(arguments.repetitions)
