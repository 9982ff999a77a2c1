"""Workers as jobs of SLURM (``privtune[slurm]``), by submitit.

submitit writes what jobs are given, and what they raise, into a folder that the nodes share. So they
are given two names, and raise nothing. A job that is preempted is requeued and begins anew: its rows
went to others meanwhile, or come back to it with the same seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.execution.supervise import keep_workers
from privtune.files import private_folder
from privtune.imports import find_extra

_DIED = 1


class _Job:
    def __init__(self, job: Any) -> None:
        self._job = job

    def ended(self) -> int | None:
        if not self._job.done():
            return None
        try:
            return int(self._job.result())
        except Exception:  # whatever ended it: submitit has types of its own for each
            return _DIED

    def stop(self, *, finished: bool) -> None:
        self._job.cancel(check=False)


def run_on_slurm(
    assist: Callable[[str, str], int],
    names: tuple[str, str],
    *,
    jobs: int,
    folder: Path,
    options: Mapping[str, Any],
    open_count: Callable[[], int],
) -> None:
    """Have jobs of SLURM work until no row is open.

    Args:
        assist: Given the study's and the arm's name, works through the arm's rows; returns 0, or
            ``STOPPED`` after an error, and never raises. The nodes import it.
        names: The study's and the arm's.
        jobs: How many jobs at once; they are submitted as arrays.
        folder: Where submitit keeps its files: shared by the nodes, for its owner alone.
        options: submitit's: ``timeout_min``, ``slurm_partition``, ``gpus_per_node``, ...; and
            ``cluster: local`` runs them on this machine.
        open_count: Returns how many rows have no result yet.

    Raises:
        PrivTuneError: If submitit is missing, or there is no SLURM here.
        InvalidInputError: If submitit does not know an option.
        WorkersDiedError: If jobs keep dying and no row gets a result.
        WorkerStoppedError: If an error stopped one.
    """
    submitit = find_extra("submitit", extra="slurm", what="executor: slurm")
    asked = dict(options)
    private_folder(folder)
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=asked.pop("cluster", "slurm"))
        executor.update_parameters(name="privtune", **asked)
    except (NameError, TypeError, ValueError) as error:
        raise InvalidInputError("executor", dict(options), f"submitit says: {error}") from None
    except RuntimeError as error:
        raise PrivTuneError(f"SLURM cannot be used from here: {error}") from None

    def start(count: int) -> list[_Job]:
        with executor.batch():
            submitted = [executor.submit(assist, *names) for _ in range(count)]
        return [_Job(job) for job in submitted]

    keep_workers(lambda n: start(n) if n else [], jobs=jobs, open_count=open_count)
