"""Workers as spawned processes, tasks of Ray or jobs of SLURM, kept at work until a round is finished."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.files import private_folder
from privtune.imports import OWN_PROCESS, find_extra

STOPPED = 70  # how a worker ends that an error stopped, which it kept for the curator
_DIED = 1
_GRACE = 5.0  # seconds for a worker to see that no row is open, and leave
_POLL = 0.2
_LONELY = 60.0  # seconds without a worker after which whoever waits is reminded of it
_QUICK_DEATHS = 5  # workers that die in a row without any progress


class WorkersDiedError(PrivTuneError):
    """Workers kept dying before they finished anything."""


class WorkerStoppedError(Exception):
    """An error stopped a worker, and would stop any other worker of the round, too."""


class Worker(Protocol):
    """The interface of a worker: a process, a task of Ray or a job of SLURM that trains a round's rows."""

    def ended(self) -> int | None:
        """Return None while the worker runs; then 0, ``STOPPED``, or another number if it died."""
        ...

    def stop(self, *, finished: bool) -> None:
        """End the worker at once, or give it time to leave by itself if the round is finished."""
        ...


def keep_workers(
    start: Callable[[int], Sequence[Worker]], *, jobs: int, open_count: Callable[[], int]
) -> None:
    """Start workers, and replace those that die, until no row of the round is open.

    Args:
        start: Starts as many workers as it is told to, or fewer.
        jobs: How many there are at once, at most.
        open_count: Returns how many rows have no result yet.

    Raises:
        WorkerStoppedError: If an error stopped a worker, which every other one would meet.
        WorkersDiedError: If one after the other died, and no row was finished meanwhile.
    """
    workers: list[Worker] = []
    open_rows = open_count()
    deaths = 0
    most_deaths = 2 * max(_QUICK_DEATHS, 2 * jobs)
    try:
        while open_rows:
            ends = {worker: worker.ended() for worker in workers}
            if STOPPED in ends.values():
                raise WorkerStoppedError
            deaths += sum(end not in {None, 0} for end in ends.values())
            if deaths >= most_deaths:
                raise WorkersDiedError(
                    f"{deaths} workers died one after the other and finished nothing. What was "
                    "charged stays charged; see what kills them (memory?), then run the study "
                    "again: it goes on where it was."
                )
            workers = [worker for worker, end in ends.items() if end is None]
            missing = min(jobs, open_rows) - len(workers)
            workers += start(max(0, missing))
            time.sleep(_POLL)
            rows_before = open_rows
            open_rows = open_count()
            if open_rows < rows_before:
                deaths = 0
    finally:
        # With no row open, a worker that is still busy trains what a round's early end made useless,
        # or would hand in a second result.
        for worker in workers:
            worker.stop(finished=not open_rows)


def wait_for(
    open_count: Callable[[], int],
    stopped: Callable[[], bool],
    *,
    at_work: Callable[[], bool] = lambda: True,
    remind: Callable[[], None] = lambda: None,
) -> None:
    """Wait until workers that were started elsewhere have given every row a result.

    Args:
        open_count: Returns how many rows have no result yet.
        stopped: Returns whether an error stopped a worker.
        at_work: Returns whether anybody holds a row.
        remind: Called once nobody has for a minute: whoever waits may have forgotten to start a worker.

    Raises:
        WorkerStoppedError: If an error stopped a worker.
    """
    last_look = time.monotonic()
    last_work = last_look
    is_reminded = False
    while open_count():
        if stopped():
            raise WorkerStoppedError
        now = time.monotonic()
        if now - last_look >= _LONELY / 12:
            last_look = now
            if at_work():
                last_work = now
                is_reminded = False
            elif now - last_work >= _LONELY and not is_reminded:
                is_reminded = True
                remind()
        time.sleep(_POLL)


class _Process(Worker):
    """A worker that is a process of this machine, on a slot of its GPUs."""

    def __init__(self, process: BaseProcess, slot: int) -> None:
        self._process = process
        self.slot = slot
        process.start()

    def ended(self) -> int | None:
        return self._process.exitcode

    def stop(self, *, finished: bool) -> None:
        self._process.join(_GRACE if finished else 0)
        if self._process.is_alive():
            self._process.terminate()
        self._process.join()


def run_in_processes(
    target: Callable[..., int | None],
    args: tuple[Any, ...],
    *,
    slots: Sequence[str | None],
    open_count: Callable[[], int],
    **options: object,
) -> None:
    """Run ``target(*args, **options)`` in a spawned process for each slot of GPUs, until no row is open."""
    context = multiprocessing.get_context("spawn")
    workers: list[_Process] = []

    def start(count: int) -> list[_Process]:
        workers[:] = [worker for worker in workers if worker.ended() is None]
        busy_slots = {worker.slot for worker in workers}
        free_slots = sorted(set(range(len(slots))) - busy_slots)
        new_workers = []
        for slot in free_slots[:count]:
            with _environment(slots[slot]):
                process = context.Process(
                    target=_exit_with,
                    args=(target, args, options),
                    daemon=True,
                )
                new_workers.append(_Process(process, slot))
        workers.extend(new_workers)
        return new_workers

    keep_workers(start, jobs=len(slots), open_count=open_count)


def _exit_with(
    target: Callable[..., int | None], args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Run a worker's function, and exit its process with the number that it returns."""
    sys.exit(target(*args, **options))


@contextmanager
def _environment(gpus: str | None) -> Iterator[None]:
    """Set one compute thread and the given GPUs for the processes that are spawned in a ``with`` block."""
    variables = {"OMP_NUM_THREADS": "1"}
    if gpus is not None:
        variables["CUDA_VISIBLE_DEVICES"] = gpus
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _RayWorker(Worker):
    """A worker that is a task of Ray."""

    def __init__(self, ray: Any, reference: Any) -> None:
        self._ray = ray
        self._reference = reference

    def ended(self) -> int | None:
        ready, _ = self._ray.wait([self._reference], timeout=0)
        if not ready:
            return None
        try:
            return int(self._ray.get(self._reference))
        except self._ray.exceptions.RayError:  # its process or its node is gone
            return _DIED

    def stop(self, *, finished: bool) -> None:
        self._ray.cancel(self._reference, force=not finished)


def run_on_ray(
    assist: Callable[[str, str], int],
    names: tuple[str, str],
    *,
    jobs: int,
    gpus: float,
    open_count: Callable[[], int],
) -> None:
    """Run an arm's workers as tasks of Ray until no row is open.

    Args:
        assist: Works for an arm in some process, and returns how it ended.
        names: What ``assist`` is given: the study and the arm.
        jobs: How many tasks there are at once.
        gpus: Of each task; a fraction shares one.
        open_count: Returns how many rows have no result yet.

    Raises:
        PrivTuneError: If no node has what one task asks for.
    """
    ray = find_extra("ray", extra="ray", what="executor: ray")
    if not ray.is_initialized():
        _start_ray(ray)
    _check_nodes(ray, gpus)
    # Ray would run a killed task again, with other workers at its rows.
    task = ray.remote(max_retries=0, num_cpus=1, num_gpus=gpus)(_assist_in)
    folder = os.getcwd()

    def start(count: int) -> list[_RayWorker]:
        references = [task.remote(folder, assist, names) for _ in range(count)]
        return [_RayWorker(ray, reference) for reference in references]

    keep_workers(start, jobs=jobs, open_count=open_count)


def _start_ray(ray: Any) -> None:
    """Connect to the cluster that the environment names, or start one on this machine."""
    address = os.environ.get("RAY_ADDRESS", "local")
    options: dict[str, Any] = {}
    if address == "local":
        # Whoever reaches the ports of a cluster of our own needs its token, and it writes nothing to disk.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        options["_system_config"] = {"automatic_object_spilling_enabled": False}
    with _empty_folder():
        ray.init(address=address, log_to_driver=False, configure_logging=False, **options)


def _check_nodes(ray: Any, gpus: float) -> None:
    """Refuse tasks that no node of the cluster has room for: Ray would wait silently."""
    most = 0
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        resources = node["Resources"]
        node_gpus = resources.get("GPU", 0)
        most = max(most, node_gpus)
        if resources.get("CPU", 0) >= 1 and node_gpus >= gpus:
            return
    raise PrivTuneError(
        f"Each worker asks for 1 CPU and {gpus:g} GPUs, and no node of the cluster has both (at "
        f"most {most:g} GPUs): Ray would wait for ever. Ask for less, or add nodes."
    )


@contextmanager
def _empty_folder() -> Iterator[None]:
    """Change to an empty folder inside a ``with`` block, if this process is the command line.

    Ray puts the folder in which it is started first on the path of its workers: whatever lies in the user's
    would hide libraries there.
    """
    if not OWN_PROCESS.is_set():
        yield
        return
    with TemporaryDirectory(prefix="privtune-ray-") as empty, chdir(empty):
        yield


def _assist_in(
    folder: str,
    assist: Callable[[str, str], int],
    names: tuple[str, str],
) -> int:
    """Work for an arm in the driver's folder if this machine has it, as the task's code may lie there."""
    if Path(folder).is_dir():
        os.chdir(folder)
    return assist(*names)


class _SlurmWorker(Worker):
    """A worker that is a job of SLURM.

    submitit writes what jobs are given, and what they raise, into a folder that the nodes share: so they are
    given two names, and raise nothing.
    """

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
    options: Mapping[str, object],
    open_count: Callable[[], int],
) -> None:
    """Run an arm's workers as jobs of SLURM until no row is open.

    Args:
        assist: Works for an arm in some process, and returns how it ended.
        names: What ``assist`` is given: the study and the arm.
        jobs: How many jobs there are at once.
        folder: Where submitit puts its files; made for its owner alone.
        options: Those of submitit.
        open_count: Returns how many rows have no result yet.

    Raises:
        InvalidInputError: If submitit takes an option for none of its own.
        PrivTuneError: If there is no SLURM here.
    """
    submitit = find_extra("submitit", extra="slurm", what="executor: slurm")
    parameters = dict(options)
    private_folder(folder)
    try:
        cluster = parameters.pop("cluster", "slurm")
        executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
        executor.update_parameters(name="privtune", **parameters)
    except (NameError, TypeError, ValueError) as error:
        raise InvalidInputError("executor", dict(options), f"submitit says: {error}") from None
    except RuntimeError as error:
        raise PrivTuneError(f"SLURM cannot be used from here: {error}") from None

    def start(count: int) -> list[_SlurmWorker]:
        if count == 0:  # submitit warns of an empty batch
            return []
        with executor.batch():
            submissions = [executor.submit(assist, *names) for _ in range(count)]
        # A job of a batch is there once the batch has ended.
        return [_SlurmWorker(job) for job in submissions]

    keep_workers(start, jobs=jobs, open_count=open_count)
