"""Nothing leaves a sealed round: while one runs, this process cannot reach an MLflow store."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

from privtune.errors import PrivTuneError

__all__ = ["SealedError", "sealed_round", "sealed_round_begin", "sealed_round_end"]


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


def _refuse(*_args: Any, **_kwargs: Any) -> Any:
    raise SealedError(
        "A sealed round is running: nothing in it may be logged to MLflow, for its trials are not "
        "paid for. To see every trial, use the strategy that pays for everything."
    )
