"""How fast workers lease and hand in rows of no work, and what that means for a thousand of them.

    python studies/benchmarks/scale/leases.py --storage sqlite:///scale.db --rows 2000 --out sqlite.json

Every worker is a process with connections of its own; a row is leased and handed in at once. The
storage must be a new one. The simulation takes the database for one server with the service times that
one worker measured alone; it is held against the measured rates before anything is concluded from it.
"""

from __future__ import annotations

import argparse
import heapq
import json
import multiprocessing
import platform
import random
import sqlite3
import statistics
import time
from pathlib import Path
from typing import Any

from privtune.accounting import Gaussian, Geometric, PrivateSelection
from privtune.execution.table import LEASE_SECONDS, make_rounds
from privtune.ledger import Budget, ChargeRequest, Ledger

EVENT = PrivateSelection(Gaussian(50.0), Geometric(10))
TRAINING, CROWD = 10.0, 1000


def open_round(url: str, count: int) -> str:
    """Open a round of so many rows, paid for by a charge of its own."""
    with Ledger(url) as ledger:
        if not ledger.budgets():
            ledger.create_budget(Budget(50.0, 1e-5, name="scale"))
        [charge] = ledger.reserve("scale", [ChargeRequest(EVENT)])
        return make_rounds(ledger).open(charge.id, count=count).charge_id


def work(url: str, charge: str, most: int, gate: Any, found: Any) -> None:
    """Lease a row, hand it in, until none is left; tell how long each took."""
    leases, results = [], []
    with Ledger(url) as ledger:
        rounds = make_rounds(ledger)
        rounds.open_count(charge)
        gate.wait()
        used = time.process_time()
        while len(leases) < most:
            begin = time.perf_counter()
            lease = rounds.lease(charge, multiprocessing.current_process().name)
            leases.append(time.perf_counter() - begin)
            if lease is None:
                if rounds.open_count(charge) == 0:
                    break
                time.sleep(0.01)
                continue
            begin = time.perf_counter()
            rounds.complete(lease, 0.5, {})
            results.append(time.perf_counter() - begin)
        used = time.process_time() - used
    found.put((leases, results, used))


def measure(url: str, workers: int, rows: int, most: int) -> dict[str, float]:
    """Have so many workers run rows of no work; return rates and times."""
    charge = open_round(url, rows)
    context = multiprocessing.get_context("fork")
    gate, found = context.Barrier(workers + 1), context.Queue()
    args = (url, charge, most, gate, found)
    running = [context.Process(target=work, args=args) for _ in range(workers)]
    for process in running:
        process.start()
    gate.wait()
    begin = time.perf_counter()
    parts = [found.get() for _ in running]
    took = time.perf_counter() - begin
    for process in running:
        process.join()
    leases = sorted(t for part, _, _ in parts for t in part)
    results = [t for _, part, _ in parts for t in part]
    return {
        "workers": workers,
        "rows": len(results),
        "rows_per_second": len(results) / took,
        "lease_median_ms": 1e3 * statistics.median(leases),
        "lease_p99_ms": 1e3 * leases[int(0.99 * (len(leases) - 1))],
        "hand_in_median_ms": 1e3 * statistics.median(results),
        "worker_cpu_ms_per_row": 1e3 * sum(used for _, _, used in parts) / len(results),
    }


def simulate(
    workers: int, rows: int, training: float, *, lease: float, hand_in: float, seed: int = 0
) -> float:
    """Return how long the rows take: a queue before one server, exponential service times.

    Every worker asks for a row, trains, hands in; while it trains it renews its lease thrice a lease.
    """
    random.seed(seed)
    free, left = 0.0, rows
    events: list[tuple[float, int, str, float]] = [
        (random.random() * lease, n, "lease", 0.0) for n in range(workers)
    ]
    heapq.heapify(events)
    end = 0.0
    while events:
        now, worker, what, until = heapq.heappop(events)
        free = max(free, now) + random.expovariate(1 / (hand_in if what == "hand in" else lease))
        end = max(end, free)
        if what == "lease":
            if not left:
                continue
            left, until = left - 1, free + training
        if what == "hand in":
            heapq.heappush(events, (free, worker, "lease", 0.0))
        elif until - free > LEASE_SECONDS / 3:
            heapq.heappush(events, (free + LEASE_SECONDS / 3, worker, "renew", until))
        else:
            heapq.heappush(events, (max(until, free), worker, "hand in", 0.0))
    return end


def main() -> None:
    """Measure, validate, simulate; write all of it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--storage", required=True)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--growth", type=int, nargs="*", default=[100, 1000, 10000])
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    url = asked.storage
    crowds = [measure(url, n, asked.rows, asked.rows) for n in asked.workers]
    growth = [{**measure(url, 1, n, 100), "open": n} for n in asked.growth]
    lease, hand_in = (crowds[0][k] / 1e3 for k in ("lease_median_ms", "hand_in_median_ms"))
    for crowd in crowds:
        took = simulate(
            int(crowd["workers"]), int(crowd["rows"]), 0.0, lease=lease, hand_in=hand_in
        )
        crowd["simulated_rows_per_second"] = crowd["rows"] / took
    # The slowest that was measured, not the best: what a crowd costs each transaction.
    slowest = min(crowd["rows_per_second"] for crowd in crowds) * (lease + hand_in)
    ideal = 10 * TRAINING
    many = simulate(CROWD, 10 * CROWD, TRAINING, lease=lease / slowest, hand_in=hand_in / slowest)
    document = {
        "storage": url.partition(":")[0],
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "workers": crowds,
        "growth": growth,
        "thousand": {"seconds": many, "ideal": ideal, "overhead": many / ideal - 1},
    }
    asked.out.write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
