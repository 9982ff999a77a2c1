"""The process that alone writes to MLflow: it carries out its parent's requests, and ends with it.

A tracker can hold whoever speaks to it for ever: by an answer that comes a byte at a time, a lock that is
never freed, a pool of threads that Python joins at its exit. Of a process all of that can be ended.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import queue
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

from privtune.errors import PrivTuneError
from privtune.files import forget_times
from privtune.imports import libraries
from privtune.ledger.places import artifact_root
from privtune.tracking import store
from privtune.tracking.view import VIEW_TAG

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from privtune.views.arm import ArmRecord


@dataclass(frozen=True)
class TrackingPlace:
    """The store, experiment and environment of one study's tracking.

    Args:
        storage: The study's storage URL: says where artifacts and the lock are.
        uri: Tracking URI.
        study: Name of the study, and of its experiment.
        tags: Tags of an experiment that is made.
        folder: The working folder, which relative paths start from.
        environment: The variables, MLflow's own among them.
    """

    storage: str
    uri: str
    study: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    folder: str = field(default_factory=os.getcwd)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)

    def move_here(self) -> None:
        """Give this process the place's working folder and variables, which may be newer than its own."""
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update({**self.environment, "PYTHONSAFEPATH": "1"})


@dataclass(frozen=True)
class PackedModel:
    """A released model as files that MLflow's ``pyfunc`` flavour takes.

    Args:
        run: The run that it is logged to.
        flavour: What the flavour takes, its tags under ``metadata`` among it.
        registered: Its name in the registry; None if it is not registered.
        tags: More tags of the registered version.
        description: Description of the registered version.
    """

    run: str
    flavour: Mapping[str, Any]
    registered: str | None = None
    tags: Mapping[str, str] | None = None
    description: str = ""


class Session:
    """An open store, whose methods carry out the requests of the same name."""

    def __init__(self, client: MlflowClient, place: TrackingPlace) -> None:
        self._client = client
        self._place = place
        self._experiment = ""

    def published(self) -> dict[str, str]:
        """Return the run ids of arms that are logged completely, by the digest of their plan."""
        place = self._place
        self._experiment = store.experiment_id(
            self._client, place.study, storage=place.storage, tags=dict(place.tags)
        )
        return store.published(self._client, self._experiment)

    def write(self, record: ArmRecord) -> None:
        """Write one arm's run."""
        store.write_record(self._client, self._experiment, record)

    def describe(self, note: str, view: str) -> None:
        """Set the note of the study's experiment, and its saved view."""
        self._client.set_experiment_tag(self._experiment, "mlflow.note.content", note)
        self._client.set_experiment_tag(self._experiment, VIEW_TAG, view)

    def log_model(self, model: PackedModel) -> str:
        """Log a model to its run, register it if that is asked, and return its URI."""
        with libraries():
            import mlflow

            from privtune.serving.exported import model_class_of_day

        mlflow.set_tracking_uri(self._place.uri)  # flavours use MLflow's global functions
        info = model_class_of_day().log(
            artifact_path=None,
            name="model",
            flavor=mlflow.pyfunc,
            run_id=model.run,
            registered_model_name=model.registered,
            tags=model.flavour["metadata"],
            **model.flavour,
        )
        forget_times(artifact_root(self._place.storage) / "mlflow", within=True)
        if model.registered is not None:
            number = str(info.registered_model_version)
            for name, value in (model.tags or {}).items():
                self._client.set_model_version_tag(model.registered, number, name, value)
            self._client.update_model_version(
                model.registered, number, description=model.description
            )
        return str(info.model_uri)

    def experiments(self) -> dict[str, list[Any]]:
        """Return each experiment's id, whether it has the saved view, and its owner, by name."""
        rows: dict[str, list[Any]] = {}
        for experiment in self._client.search_experiments():
            if experiment.name == "Default":
                continue
            tags = experiment.tags
            owner = tags.get(store.OWNER_TAG, "")
            rows[experiment.name] = [str(experiment.experiment_id), VIEW_TAG in tags, owner]
        return rows


def main() -> None:
    """Carry out requests from standard input until the process that sends them is gone."""
    requests = _take_stream(0, "rb")
    answers = _take_stream(1, "wb")
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    receiver = threading.Thread(target=_receive, args=(requests, waiting), daemon=True)
    receiver.start()
    # What fails here fails again, with words, at the first request.
    with contextlib.suppress(Exception):
        import mlflow.tracking  # noqa: F401
    gc.enable()  # whoever started this process has stopped it for the imports
    _answer(answers, None)  # until now no tracker was asked for anything
    while True:
        _, (place,) = waiting.get()
        _converse(place, waiting, answers)


def _converse(
    place: TrackingPlace,
    waiting: queue.SimpleQueue[Any],
    answers: IO[bytes],
) -> None:
    """Open a store, and carry out and answer each request until the store is closed."""
    try:
        place.move_here()
        with store.open_client(place.storage, place.uri) as client:
            session = Session(client, place)
            _answer(answers, None)
            while True:
                name, arguments = waiting.get()
                if name == "close":
                    break
                result = getattr(session, name)(*arguments)
                _answer(answers, result)
        _answer(answers, None)
    except store.TrackingUnavailableError as error:
        _answer(answers, str(error), "unavailable")
    except PrivTuneError as error:
        _answer(answers, str(error), "refused")
    except Exception as error:  # whatever MLflow makes of an answer that is none
        _answer(answers, store.explain(place.uri, error), "unavailable")


def _answer(answers: IO[bytes], result: Any, kind: str = "result") -> None:
    """Write an answer as one line of JSON, whose end tells the reader that it is complete."""
    line = json.dumps({kind: result})
    answers.write(line.encode() + b"\n")
    answers.flush()


def _receive(requests: IO[bytes], waiting: queue.SimpleQueue[Any]) -> None:
    """Pass on received requests, and kill this process when their sender has ended."""
    try:
        while True:
            waiting.put(pickle.load(requests))  # noqa: S301  of the process that started this one
    finally:
        # Nobody would stop it any more, and another process may log the same arms by now.
        if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)  # with whatever MLflow has started
        os._exit(0)


def _take_stream(number: int, mode: str) -> IO[bytes]:
    """Return a private copy of a standard stream, and lead what libraries print to the old one elsewhere.

    What one of them prints would else stand among the answers.
    """
    descriptor = os.dup(number)  # which no process that MLflow starts inherits
    if number == 0:
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        os.close(empty)
    else:
        os.dup2(2, number)
    return os.fdopen(descriptor, mode)
