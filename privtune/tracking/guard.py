"""Nothing leaves a sealed round: while one runs, this process cannot reach an MLflow store."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from privtune.errors import PrivTuneError
from privtune.study.observer import NullObserver

if TYPE_CHECKING:
    from privtune.strategies import Plan

__all__ = [
    "SealedError",
    "SealedGuard",
    "guard_of",
    "sealed_round",
    "sealed_round_begin",
    "sealed_round_end",
]


class SealedError(PrivTuneError):
    """Code inside a sealed round tried to reach a tracking server."""


_lock = threading.Lock()
_rounds = 0
_originals: list[tuple[Any, str, Any]] = []
_environment: list[str | None] = []
_URI = "MLFLOW_TRACKING_URI"


def sealed_round_begin() -> None:
    """Refuse every read and write of MLflow in this process until :func:`sealed_round_end`.

    Every client, the fluent functions, autologging and tracing ask MLflow for their store at each
    call; it refuses. Calls may be nested. A seat belt, not a sandbox: code that took a store object
    apart beforehand, or opens a database itself, is inside the trust boundary like the data.
    """
    global _rounds  # noqa: PLW0603 - one process, one state
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about MLflow's own imports
        from mlflow.tracking._model_registry.registry import ModelRegistryStoreRegistry
        from mlflow.tracking._tracking_service.client import TrackingServiceClient
        from mlflow.tracking._tracking_service.registry import TrackingStoreRegistry

    with _lock:
        _rounds += 1
        if _rounds > 1:
            return
        for owner, method in (
            (TrackingStoreRegistry, "get_store"),
            (ModelRegistryStoreRegistry, "get_store"),
            (TrackingServiceClient, "_get_artifact_repo"),  # repositories are cached by run
        ):
            _originals.append((owner, method, getattr(owner, method)))
            setattr(owner, method, _refuse)
        # Worker processes inherit an address that leads nowhere.
        _environment.append(os.environ.get(_URI))
        os.environ[_URI] = "privtune-sealed://round"


def sealed_round_end() -> None:
    """Undo one :func:`sealed_round_begin`."""
    global _rounds  # noqa: PLW0603
    with _lock:
        if _rounds == 0:
            return
        _rounds -= 1
        while _rounds == 0 and _originals:
            owner, method, original = _originals.pop()
            setattr(owner, method, original)
        while _rounds == 0 and _environment:
            before = _environment.pop()
            if before is None:
                os.environ.pop(_URI, None)
            else:
                os.environ[_URI] = before


@contextlib.contextmanager
def sealed_round() -> Iterator[None]:
    """Guard a block: see :func:`sealed_round_begin`."""
    sealed_round_begin()
    try:
        yield
    finally:
        sealed_round_end()


def guard_of(plan: Plan) -> AbstractContextManager[None]:
    """Return the guard for code that an arm runs: :func:`sealed_round` if the arm is sealed."""
    return sealed_round() if plan.is_sealed else nullcontext()


class SealedGuard(NullObserver):
    """An observer that logs nothing, and keeps sealed rounds from logging."""

    def guard(self, plan: Plan) -> AbstractContextManager[None]:
        """Bar every way to MLflow while code of a sealed arm runs."""
        return guard_of(plan)


def _refuse(*_args: Any, **_kwargs: Any) -> Any:
    raise SealedError(
        "A sealed round is running: nothing in it may be logged to MLflow, for its trials are not "
        "paid for. To see every trial, use the strategy that pays for everything."
    )
