"""What one charge costs, with 10 to 100,000 charges in the log.

python studies/benchmarks/ledger/benchmark.py [--smoke] [--storage URL] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from privtune.accounting import Gaussian
from privtune.ledger import Budget, ChargeRequest, Ledger, verify
from privtune.ledger.chain import Kind
from privtune.ledger.log import Line

NAME = "benchmark"
SIZES = (10, 100, 1_000, 10_000, 100_000)
DISTINCT = 50


def request(number: int) -> ChargeRequest:
    """One of fifty different releases, small enough that 100,000 of them fit."""
    return ChargeRequest(Gaussian(1000.0 + number % DISTINCT), study="s", arm="a")


def fill(ledger: Ledger, size: int) -> None:
    """Bring the log to a size, many charges a transaction; their admission is not measured."""
    have = len(ledger.charges(NAME))
    while have < size:
        batch = min(2_000, size - have)

        def lines(_connection: object, history: Any, batch: int = batch) -> list[Line]:
            first = len(history.charges) + 1
            made: list[Line] = []
            for number in range(first, first + batch):
                asked = request(number)
                body = {"event": asked.event.to_dict(), "study": "s", "arm": "a", "note": ""}
                body |= {"plan_digest": "", "basis": "filter", "unit": "record"}
                made += [Line(Kind.RESERVED, number, body=body)]
                made += [Line(Kind.STARTED, number), Line(Kind.SETTLED, number)]
            return made

        ledger.log.write(NAME, lines)
        have += batch


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = call()
    return (time.perf_counter() - begin) * 1e3, result


def measure(url: str, size: int, repeats: int) -> dict[str, float]:
    """Return milliseconds: medians of one charge's steps, and of what is done once."""
    opened, ledger = timed(lambda: Ledger(url))
    with ledger:
        rebuilt, _ = timed(lambda: ledger.charges(NAME))
        steps: dict[str, list[float]] = {"reserve": [], "start": [], "settle": [], "charge": []}
        cpu = time.process_time()
        for number in range(repeats):
            reserve, [charge] = timed(lambda n=number: ledger.reserve(NAME, [request(n)]))
            start, _ = timed(lambda c=charge: ledger.start(c.id))
            settle, _ = timed(lambda c=charge: ledger.settle(c.id, "d" * 64))
            for step, taken in zip(
                steps, (reserve, start, settle, reserve + start + settle), strict=True
            ):
                steps[step].append(taken)
        cpu = (time.process_time() - cpu) * 1e3 / repeats
        spent, _ = timed(lambda: ledger.spent(NAME))
        verified, _ = timed(lambda: verify(ledger.log.storage, NAME))
    medians = {step: statistics.median(values) for step, values in steps.items()}
    once = {"open": opened, "rebuild": rebuilt, "spent": spent, "verify": verified}
    return {"charges": size, **medians, "cpu": cpu, **once}


def fsync(folder: Path) -> float:
    """Return the median of what one small durable write costs here: a charge makes three."""
    taken = []
    with (folder / "fsync").open("wb") as file:
        for _ in range(100):
            file.write(b"x" * 4096)
            file.flush()
            taken.append(timed(lambda: os.fsync(file.fileno()))[0])
    return statistics.median(taken)


def run(url: str, sizes: tuple[int, ...], repeats: int) -> list[dict[str, float]]:
    with Ledger(url) as ledger:
        ledger.create_budget(Budget(8.0, 1e-5, name=NAME))
        [first] = ledger.reserve(NAME, [request(0)])
        ledger.settle(ledger.start(first.id).id)
    rows = []
    for size in sizes:
        with Ledger(url) as ledger:
            fill(ledger, size)
        rows.append(measure(url, size, repeats))
        print("  ".join(f"{key} {value:,.2f}" for key, value in rows[-1].items()), file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", help="other sizes")
    parser.add_argument("--smoke", action="store_true", help="small sizes, for CI")
    parser.add_argument("--storage", help="an empty storage; a temporary SQLite file if not given")
    parser.add_argument("--output", type=Path, help="write the rows here as JSON")
    options = parser.parse_args()
    sizes = tuple(options.sizes or (SIZES[:2] if options.smoke else SIZES))
    with tempfile.TemporaryDirectory() as folder:
        url = options.storage or f"sqlite:///{folder}/ledger.db"
        print(f"fsync {fsync(Path(folder)):.2f}", file=sys.stderr)
        rows = run(url, sizes, repeats=20 if options.smoke else 200)
    text = json.dumps(rows, indent=1)
    if options.output:
        options.output.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
