"""A linear model on a table of many rows: memory and processor time, from the file to the release.

    python studies/benchmarks/tables/run.py --rows 10000000 --columns 50

The table is made up a chunk at a time by this script, and the study runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

CHUNK = 2**17


def make(path: Path, rows: int, columns: int) -> None:
    """Write a Parquet file of numbers in [-1, 1] and a class that they say something about."""
    rng = np.random.default_rng(1)
    slopes = rng.standard_normal(columns - 1)
    names = [f"c{number:02d}" for number in range(columns - 1)]
    writer = None
    for start in range(0, rows, CHUNK):
        x = rng.uniform(-1.0, 1.0, (min(CHUNK, rows - start), columns - 1)).astype(np.float32)
        y = np.where(x @ slopes + rng.logistic(size=len(x)) > 0, "yes", "no")
        chunk = pa.table({**{n: x[:, i] for i, n in enumerate(names)}, "y": y})
        writer = writer or parquet.ParquetWriter(path, chunk.schema)
        writer.write_table(chunk)
    if writer is not None:
        writer.close()


def run(path: Path, rows: int, columns: int, folder: Path) -> None:
    """Run a study of one arm, and print what it took."""
    import privtune
    from privtune.tables.reader import ON_READ

    heard: list[float] = []
    ON_READ.set(heard.append)
    study = privtune.create_study(
        name="many-rows",
        task={
            "type": "tabular",
            "path": str(path),
            "target": "y",
            "classes": ["no", "yes"],
            "bounds": {f"c{number:02d}": [-1, 1] for number in range(columns - 1)},
            "train": rows * 8 // 10,
            "validation": rows // 10,
            "test": rows // 10,
        },
        budget=privtune.Budget(1.0, 1e-9, name="many-rows"),
        arms=[
            {
                "name": "linear",
                "strategy": "fixed",
                "parameters": {"learning_rate": 1.0, "max_grad_norm": 1.0},
            }
        ],
        report={"metric": "accuracy"},
        epochs=1,
        expected_batch_size=rows // 1000,
        device="cpu",
        storage=f"sqlite:///{folder}/privtune.db",
    )
    start = time.perf_counter()
    (release,) = study.run()
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(
        json.dumps(
            {
                "rows": rows,
                "columns": columns,
                "file_gb": round(path.stat().st_size / 1e9, 2),
                "peak_rss_gb": round(used.ru_maxrss * 1024 / 1e9, 2),
                "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
                "run_seconds": round(time.perf_counter() - start, 1),
                "heard_while_reading": len(heard),
                "estimates": {
                    name: [estimate.value, estimate.low, estimate.high]
                    for name, estimate in release.estimates.items()
                },
            }
        )
    )


def main() -> None:
    """Make the table, and run the study on it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--columns", type=int, default=50)
    parser.add_argument("--inside", type=Path)
    given = parser.parse_args()
    if given.inside is not None:
        run(given.inside / "table.parquet", given.rows, given.columns, given.inside)
        return
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder) / "table.parquet", given.rows, given.columns)
        size = ["--rows", str(given.rows), "--columns", str(given.columns)]
        subprocess.run([sys.executable, __file__, *size, "--inside", folder], check=True)


if __name__ == "__main__":
    main()
