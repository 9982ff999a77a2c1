"""Workers as spawned processes, tasks of Ray or jobs of SLURM, kept at work until a round is finished."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.files import private_folder
from privtune.imports import find_extra

STOPPED = 70  # how a worker ends that an error stopped, which it kept for the curator
_DIED = 1
_GRACE = 5.0  # seconds for a worker to see that no row is open, and leave
_POLL = 0.2
_LONELY = 60.0  # seconds without a worker after which whoever waits is reminded of it
_QUICK_DEATHS = 5  # workers that die in a row without any progress


class WorkersDiedError(PrivTuneError):
    """Workers kept dying before they finished anything."""


class WorkerStoppedError(Exception):
    """An error stopped a worker: another one would meet it, too."""


class Worker(Protocol):
    """Something that works through a round's rows somewhere, and was started for that."""

    def ended(self) -> int | None:
        """Return ``None`` while it works; 0, ``STOPPED``, or another number if it died."""
        ...

    def stop(self, *, finished: bool) -> None:
        """End it: at once, or with time to leave by itself if the round is finished."""
        ...


def keep_workers(
    start: Callable[[int], Sequence[Worker]], *, jobs: int, open_count: Callable[[], int]
) -> None:
    """Keep workers at work until no row is open; those that die are replaced."""
    workers: list[Worker] = []
    left, deaths = open_count(), 0
    try:
        while left:
            ends = {worker: worker.ended() for worker in workers}
            if STOPPED in ends.values():
                raise WorkerStoppedError
            deaths += sum(1 for end in ends.values() if end not in {None, 0})
            if deaths >= max(_QUICK_DEATHS, 2 * jobs) * 2:
                raise WorkersDiedError(
                    f"{deaths} workers died one after the other and finished nothing. What was "
                    "charged stays charged; see what kills them (memory?), then run the study "
                    "again: it goes on where it was."
                )
            workers = [worker for worker, end in ends.items() if end is None]
            workers += start(max(0, min(jobs, left) - len(workers)))
            time.sleep(_POLL)
            before, left = left, open_count()
            if left < before:
                deaths = 0
    finally:
        # With no row open, a worker that is still busy trains what a round's early end made useless,
        # or would hand in a second result.
        for worker in workers:
            worker.stop(finished=not left)


def wait_for(
    open_count: Callable[[], int],
    stopped: Callable[[], bool],
    *,
    at_work: Callable[[], bool] = lambda: True,
    remind: Callable[[], None] = lambda: None,
) -> None:
    """Wait until workers that somebody else started have given every row a result."""
    asked = seen = time.monotonic()
    reminded = False
    while open_count():
        if stopped():
            raise WorkerStoppedError
        now = time.monotonic()
        if now - asked >= _LONELY / 12:
            asked = now
            if at_work():
                seen, reminded = now, False
            elif now - seen >= _LONELY and not reminded:
                reminded = True
                remind()
        time.sleep(_POLL)


class _Process:
    def __init__(self, process: BaseProcess, slot: int) -> None:
        self._process, self.slot = process, slot
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
    **options: Any,
) -> None:
    """Run ``target(*args, **options)`` in a spawned process for each slot of GPUs, until no row is open."""
    context = multiprocessing.get_context("spawn")
    running: list[_Process] = []

    def start(count: int) -> list[_Process]:
        running[:] = [process for process in running if process.ended() is None]
        taken = {process.slot for process in running}
        started = []
        for slot in [slot for slot in range(len(slots)) if slot not in taken][:count]:
            with _environment(slots[slot]):
                process = context.Process(
                    target=_exit_with, args=(target, args, options), daemon=True
                )
                started.append(_Process(process, slot))
        running.extend(started)
        return started

    keep_workers(start, jobs=len(slots), open_count=open_count)


def _exit_with(
    target: Callable[..., int | None], args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    sys.exit(target(*args, **options))


@contextmanager
def _environment(gpus: str | None) -> Iterator[None]:
    """Spawn children with one compute thread, since they share the cores, and with their own GPUs."""
    asked = {"OMP_NUM_THREADS": "1"} | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})
    before = {name: os.environ.get(name) for name in asked}
    os.environ.update(asked)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _Task:
    def __init__(self, ray: Any, reference: Any) -> None:
        self._ray, self._reference = ray, reference

    def ended(self) -> int | None:
        done, _ = self._ray.wait([self._reference], timeout=0)
        if not done:
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
    """Have tasks of Ray work until no row is open."""
    ray = find_extra("ray", extra="ray", what="executor: ray")
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS", "local")
        own: dict[str, Any] = {}
        if address == "local":  # a cluster of our own: whoever reaches its ports needs its token
            os.environ.setdefault("RAY_AUTH_MODE", "token")
            own = {"_system_config": {"automatic_object_spilling_enabled": False}}
        ray.init(address=address, log_to_driver=False, configure_logging=False, **own)
    has = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(node.get("CPU", 0) >= 1 and node.get("GPU", 0) >= gpus for node in has):
        most = max((node.get("GPU", 0) for node in has), default=0)
        raise PrivTuneError(
            f"Each worker asks for 1 CPU and {gpus:g} GPUs, and no node of the cluster has both (at "
            f"most {most:g} GPUs): Ray would wait for ever. Ask for less, or add nodes."
        )
    # Ray would run a killed task again, with other workers at its rows.
    task = ray.remote(max_retries=0, num_cpus=1, num_gpus=gpus)(assist)
    keep_workers(
        lambda count: [_Task(ray, task.remote(*names)) for _ in range(count)],
        jobs=jobs,
        open_count=open_count,
    )


# submitit writes what jobs are given, and what they raise, into a folder that the nodes share: so they are
# given two names, and raise nothing.
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
    """Have jobs of SLURM work until no row is open."""
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
