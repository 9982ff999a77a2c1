"""Workers as tasks of a Ray cluster (``privtune[ray]``): Ray places them, and nothing else.

Ray runs a killed task again by itself, shows exceptions and start times in its dashboard, and writes
what tasks are given into its logs. So its retries are off (the round's table has them), a task is
given two names, and what goes wrong inside stays inside. The dashboard belongs inside the trust
boundary: when tasks start and end tells of the number of runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from privtune.errors import PrivTuneError
from privtune.execution.supervise import keep_workers
from privtune.imports import find_extra

_DIED = 1


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
    """Have tasks of Ray work until no row is open.

    Args:
        assist: Given the study's and the arm's name, works through the arm's rows; returns 0, or
            ``STOPPED`` after an error, and never raises. The nodes import it.
        names: The study's and the arm's.
        jobs: How many tasks at once.
        gpus: GPUs of each; a fraction shares one.
        open_count: Returns how many rows have no result yet.

    Raises:
        PrivTuneError: If Ray is missing, or the cluster cannot hold such a task: Ray would wait for
            ever.
        WorkersDiedError: If tasks keep dying and no row gets a result.
        WorkerStoppedError: If an error stopped one.
    """
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
    task = ray.remote(max_retries=0, num_cpus=1, num_gpus=gpus)(assist)
    keep_workers(
        lambda count: [_Task(ray, task.remote(*names)) for _ in range(count)],
        jobs=jobs,
        open_count=open_count,
    )
