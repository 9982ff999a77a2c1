"""What a row costs a worker beside what it costs one process: CPU, without either's start.

    python studies/benchmarks/scale/overhead.py

The same trainings, in this process and by a worker that leases single rows: of a task, as a selection and
as `everything`. SQLite in a folder that is deleted.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from privtune.execution import table
from privtune.study import Study, StudySpec
from privtune.study.lifecycle import Life
from privtune.study.workers import _work

ARMS: dict[str, dict[str, Any]] = {
    "selection": {"strategy": "papernot-steinke", "mean_runs": 40, "law": "poisson"},
    "everything": {"strategy": "everything", "sampler": "random", "trials": 40},
}


def spec(arm: str) -> StudySpec:
    """Return a study of one arm."""
    return StudySpec.parse(
        {
            "name": "overhead",
            "task": "digits-mlp",
            "budget": {"name": "b", "epsilon": 8.0, "delta": 1e-5},
            "space": {
                "learning_rate": {"type": "float", "low": 0.05, "high": 5.0, "log": True},
                "max_grad_norm": {"type": "float", "low": 0.1, "high": 10.0, "log": True},
            },
            "arms": [{"name": "arm", **ARMS[arm]}],
            "epochs": 0.5,
            "expected_batch_size": 64,
            "stack": 1,
            "device": "cpu",
            "seed": 11,
        }
    )


def split(run: Any, spent: list[tuple[float, float]]) -> Any:
    """Note, of every row, the CPU of its training and of all around it."""

    def rows(leases: Sequence[Any]) -> Iterator[Any]:
        begin = time.process_time()
        for done in run(leases):
            trained = time.process_time() - begin
            outside = time.process_time()
            yield done
            begin = time.process_time()
            spent.append((trained, begin - outside))

    return rows


def main() -> None:
    """Measure and print."""
    whole = table.work_through
    import privtune.study.arm_rounds as rounds
    import privtune.study.run as running

    for arm in ARMS:
        spent: list[tuple[float, float]] = []
        total: list[float] = []

        def noted(*args: Any, **options: Any) -> int:
            table_rounds, charge, run = args
            begin = time.process_time()
            count = whole(table_rounds, charge, split(run, spent), **options)  # noqa: B023
            total.append(time.process_time() - begin)  # noqa: B023
            return count

        rounds.work_through = noted  # type: ignore[assignment]
        with tempfile.TemporaryDirectory() as folder:
            url = f"sqlite:///{Path(folder) / 'o.db'}"

            def beside(_executor: Any, _life: Life, plan: Any, **_: Any) -> Any:
                def give(_rounds: Any, charge: str) -> None:
                    with closing(Life("overhead", url)) as worker:  # noqa: B023
                        _work(worker, plan, charge_id=charge)

                return give

            running.give_out = beside
            with closing(Study.create(spec(arm), url)) as study:
                study.run(executor="external")
        trained = sum(t for t, _ in spent)
        print(
            f"{arm}: {len(spent)} rows, {1e3 * trained / len(spent):.1f} ms of training a row, "
            f"{1e3 * (sum(total) - trained) / len(spent):.1f} ms of lease, hand-in and all else"
        )


if __name__ == "__main__":
    main()
