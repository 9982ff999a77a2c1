"""How fast workers lease and hand in rows of no work, and what that means for a thousand of them.

    python studies/benchmarks/scale/leases.py --storage sqlite:///scale.db --rows 2000 --out sqlite.json

Every worker is a process with connections of its own, and works as all workers do: rows are leased in
bundles, since they are short, and handed in one by one. The storage must be a new one. The simulation
takes the table for one server. Its service time is what a row costs one worker in CPU, stretched by the
share of the machine that was had: so it is held against the measured rates before anything is concluded
from it. For a thousand workers the server's own CPU is taken: the workers' is spent elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import multiprocessing
import os
import platform
import random
import sqlite3
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from privtune.accounting import Gaussian, Geometric, PrivateSelection
from privtune.execution import table
from privtune.execution.table import LEASE_SECONDS, RowResult, make_rounds, work_through
from privtune.ledger import Budget, ChargeRequest, Ledger
from privtune.ledger.rounds import Lease

EVENT = PrivateSelection(Gaussian(50.0), Geometric(10))
TRAINING, CROWD = 10.0, 1000


def open_round(url: str, count: int) -> str:
    """Open a round of so many rows, paid for by a charge of its own."""
    with Ledger(url) as ledger:
        if not ledger.budgets():
            ledger.create_budget(Budget(50.0, 1e-5, name="scale"))
        [charge] = ledger.reserve("scale", [ChargeRequest(EVENT)])
        return make_rounds(ledger).open(charge.id, count=count).charge_id


def spent(pids: set[int]) -> float:
    """Return the CPU seconds of processes of this machine that are known by number; 0 elsewhere."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def work(url: str, charge: str, warm: str, most: int, bundle: int, gate: Any, found: Any) -> None:
    """Work through rows of no work as every worker does; tell how long each question took."""
    table._MOST = bundle
    leases: list[tuple[float, int]] = []
    results: list[float] = []
    server: set[int] = set()

    def timed(name: str, note: Callable[[float, Any], None]) -> None:
        whole = getattr(rounds, name)

        def call(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            done = whole(*args, **options)
            note(time.perf_counter() - begin, done)
            return done

        setattr(rounds, name, call)

    def run(rows: Sequence[Lease]) -> Iterator[RowResult]:
        for lease in rows:
            yield RowResult(lease, 0.5, {})

    with Ledger(url) as ledger:
        engine = ledger.log.storage.engine
        if engine.dialect.name == "postgresql":
            note = lambda connection, *_: server.add(connection.info.backend_pid)  # noqa: E731
            sa.event.listen(engine, "checkout", note)
        rounds = make_rounds(ledger)
        work_through(rounds, warm, run, stack=1, most=4)  # connections, statements, imports
        timed("lease_some", lambda took, rows: leases.append((took, len(rows))) if rows else None)
        timed("complete", lambda took, _: results.append(took))
        gate.wait()
        used, served = time.process_time(), spent(server)
        work_through(rounds, charge, run, stack=1, most=most)
        used, served = time.process_time() - used, spent(server) - served
    found.put((leases, results, used, served))


def measure(
    url: str, workers: int, rows: int, most: int, *, bundle: int = table._MOST
) -> dict[str, float]:
    """Have so many workers run rows of no work; return rates and times."""
    charge, warm = open_round(url, rows), open_round(url, 5 * workers)
    context = multiprocessing.get_context("fork")
    gate, found = context.Barrier(workers + 1), context.Queue()
    args = (url, charge, warm, most, bundle, gate, found)
    running = [context.Process(target=work, args=args) for _ in range(workers)]
    for process in running:
        process.start()
    gate.wait()
    begin = time.perf_counter()
    parts = [found.get() for _ in running]
    took = time.perf_counter() - begin
    for process in running:
        process.join()
    leases = sorted(t for part, *_ in parts for t, _ in part)
    results = [t for _, part, *_ in parts for t in part]
    client, server = sum(p[2] for p in parts), sum(p[3] for p in parts)
    return {
        "workers": workers,
        "rows": len(results),
        "rows_per_second": len(results) / took,
        "rows_per_lease": len(results) / len(leases),
        "lease_median_ms": 1e3 * statistics.median(leases),
        "lease_p99_ms": 1e3 * leases[int(0.99 * (len(leases) - 1))],
        "hand_in_median_ms": 1e3 * statistics.median(results),
        "worker_cpu_ms_per_row": 1e3 * client / len(results),
        "server_cpu_ms_per_row": 1e3 * server / len(results),
        "cores": (client + server) / took,
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


def cpu(crowd: Mapping[str, float]) -> float:
    """Return the CPU seconds of a row, the worker's and the server's."""
    return (crowd["worker_cpu_ms_per_row"] + crowd["server_cpu_ms_per_row"]) / 1e3


def main() -> None:
    """Measure, validate, simulate; write all of it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--storage", required=True)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument(
        "--most", type=int, default=10000, help="rows of the largest crowd once more"
    )
    parser.add_argument("--growth", type=int, nargs="*", default=[100, 1000, 10000])
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    url = asked.storage
    crowds = [measure(url, n, asked.rows, asked.rows) for n in asked.workers]
    if asked.most:
        crowds.append(measure(url, max(asked.workers), asked.most, asked.most))
    growth = [{**measure(url, 1, n, 100), "open": n} for n in asked.growth]
    # What a row costs one worker, in CPU: a machine that others load shows it, and its clock does not.
    alone = cpu(crowds[0])
    for crowd in crowds:
        share = alone / crowd["cores"] / 2
        took = simulate(int(crowd["workers"]), int(crowd["rows"]), 0.0, lease=share, hand_in=share)
        crowd["simulated_rows_per_second"] = crowd["rows"] / took
    # A server of one core, at the most that a row cost it at any number of workers, shared by a lease,
    # a hand-in and a renewal. SQLite has no server: its writers' own CPU stands for it.
    kind = (
        "server_cpu_ms_per_row" if crowds[0]["server_cpu_ms_per_row"] else "worker_cpu_ms_per_row"
    )
    single = measure(url, 1, 500, 500, bundle=1)  # as trainings of ten seconds are leased
    each = max(single[kind], *(crowd[kind] for crowd in crowds)) / 1e3 / 2
    ideal = 10 * TRAINING
    # Sessions of a server wait for the disk together; SQLite's writers one after the other.
    disk = single["hand_in_median_ms"] / 1e3
    alone_at_disk = kind == "worker_cpu_ms_per_row"
    many = simulate(
        CROWD,
        10 * CROWD,
        TRAINING + (0.0 if alone_at_disk else disk),
        lease=each,
        hand_in=each + (disk if alone_at_disk else 0.0),
    )
    document = {
        "storage": url.partition(":")[0],
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "workers": crowds,
        "growth": growth,
        "one_row_a_lease": single,
        "thousand": {
            "transaction_ms": 1e3 * each,
            "disk_ms": 1e3 * disk,
            "seconds": many,
            "ideal": ideal,
            "overhead": many / ideal - 1,
        },
    }
    asked.out.write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
