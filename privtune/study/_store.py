"""Where studies live: Optuna's storage, in the curator's database.

The study ``NAME`` carries the spec and the plans; each arm is an Optuna study ``NAME/ARM`` whose
trials are the sealed trials of that arm, so that Optuna's own tools work on them inside the trust
boundary. Everything is stored as JSON with a schema version.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna

from privtune.errors import PrivTuneError
from privtune.ledger.failures import translated
from privtune.ledger.storage import NO_DRIVER, SecureConnection, checked_url, create_database
from privtune.ledger.urls import masked_url
from privtune.names import check_text
from privtune.study._shown import INDEX, ShownTrials

if TYPE_CHECKING:
    from privtune.spaces import SearchSpace
    from privtune.strategies import TrialResult

__all__ = ["StudyExistsError", "StudyNotFoundError", "StudyStore", "all_params", "artifact_root"]

_SCHEMA = 1
_PREFIX = "privtune:"
_OUTSIDE = "params:"
_CONNECT = {"timeout": 60, "factory": SecureConnection}


class StudyExistsError(PrivTuneError):
    """A study of this name exists already."""


class StudyNotFoundError(PrivTuneError):
    """There is no study of this name."""


class StudyStore:
    """Studies and their arms in one storage.

    Args:
        url: SQLAlchemy URL; the ledger may share it.

    Raises:
        PrivTuneError: If there is no such database, or it cannot be reached.
    """

    def __init__(self, url: str) -> None:
        checked = checked_url(url)
        self.url = url
        sqlite = checked.get_backend_name() == "sqlite"
        create_database(checked)
        try:
            with translated(masked_url(checked.render_as_string(hide_password=False))):
                self._database = optuna.storages.RDBStorage(
                    checked.render_as_string(hide_password=False),
                    engine_kwargs={"connect_args": _CONNECT} if sqlite else {},
                )
        except ImportError as error:
            raise PrivTuneError(NO_DRIVER) from error
        # Loading a study wraps a bare storage in a new cache each time, which then reads every
        # trial again. This one is kept: what it holds of finished trials never changes.
        self._storage = optuna.storages.get_storage(self._database)

    def create(
        self, name: str, arms: Mapping[str, Mapping[str, Any]], document: Mapping[str, Any]
    ) -> None:
        """Store a new study, its arms, and the first values of each.

        Raises:
            StudyExistsError: If the name is taken.
        """
        try:
            with _quiet():
                study = optuna.create_study(study_name=name, storage=self._storage)
        except optuna.exceptions.DuplicatedStudyError:
            raise StudyExistsError(
                f"A study named {name!r} exists already in this storage. Choose another name, or "
                f"go on with it: privtune study run {name}."
            ) from None
        for arm, values in arms.items():
            self.add_arm(name, arm)
            for key, value in values.items():
                self.set(name, arm, key, value)
        # The document goes last: a study without one was never completely created.
        study.set_user_attr(f"{_PREFIX}schema", _SCHEMA)
        study.set_user_attr(f"{_PREFIX}document", dict(document))

    def document(self, name: str) -> dict[str, Any]:
        """Return what :meth:`create` stored.

        Raises:
            StudyNotFoundError: If there is no such study, or it was never completely created.
        """
        attributes = self._load(name).user_attrs
        document = attributes.get(f"{_PREFIX}document")
        if document is None:
            raise StudyNotFoundError(
                f"Study {name!r} was not completely created; delete it with "
                f"'privtune study delete {name}' and create it again. Nothing was spent."
            )
        if attributes.get(f"{_PREFIX}schema") != _SCHEMA:
            raise PrivTuneError(
                f"Study {name!r} has schema {attributes.get(f'{_PREFIX}schema')}, but this version "
                f"of PrivTune reads schema {_SCHEMA}. Install the version that wrote it."
            )
        return dict(document)

    def names(self) -> list[str]:
        """Return the names of all studies."""
        return sorted(
            summary.study_name
            for summary in optuna.get_all_study_summaries(self._storage)
            if f"{_PREFIX}document" in summary.user_attrs
        )

    def get(self, name: str, arm: str, key: str) -> Any:
        """Return a value stored for an arm, or ``None``."""
        return self._load(_arm_name(name, arm)).user_attrs.get(_PREFIX + key)

    def set(self, name: str, arm: str, key: str, value: Any) -> None:
        """Store a JSON value for an arm."""
        # Through JSON once, so that what is read back is what was written.
        self._load(_arm_name(name, arm)).set_user_attr(_PREFIX + key, json.loads(json.dumps(value)))

    def record(
        self, name: str, arm: str, *, space: SearchSpace, results: Sequence[TrialResult]
    ) -> None:
        """Record the trials of a finished round, for the curator's tools. A row is written once.

        Parameters outside of the space, as an objective suggests them, become user attributes: their
        distributions may differ from trial to trial, which Optuna refuses.
        """
        study = self._load(_arm_name(name, arm))
        there = {t.user_attrs.get(INDEX) for t in study.get_trials(deepcopy=False)}
        for result in results:
            if result.index in there:
                continue
            params = {key: result.params[key] for key in space if key in result.params}
            score = -math.inf if result.score is None else result.score
            study.add_trial(
                optuna.trial.create_trial(
                    params=params,
                    distributions={key: space[key] for key in params},
                    value=-math.inf if math.isnan(score) else score,
                    user_attrs={
                        INDEX: result.index,
                        "failed": result.failed,
                        "unusable": result.unusable,
                        **{
                            f"{_OUTSIDE}{k}": v for k, v in result.params.items() if k not in params
                        },
                    },
                )
            )

    def shown(self, name: str, arm: str, folder: Path) -> ShownTrials:
        """Return the trials of an arm that pays for all of them, to ask and to tell.

        Args:
            name: The study.
            arm: The arm.
            folder: Keeps what running trials were given; inside the trust boundary.
        """
        with _quiet():
            return ShownTrials(self._load(_arm_name(name, arm)), folder)

    def add_arm(self, name: str, arm: str) -> None:
        """Make room for an arm's trials and values."""
        with _quiet():
            optuna.create_study(
                study_name=_arm_name(name, arm),
                storage=self._storage,
                direction="maximize",
                load_if_exists=True,
            )

    def update(self, name: str, document: Mapping[str, Any]) -> None:
        """Replace a study's document."""
        self._load(name).set_user_attr(f"{_PREFIX}document", dict(document))

    def trials(self, name: str, arm: str) -> list[optuna.trial.FrozenTrial]:
        """Return the sealed trials of an arm. For the curator alone."""
        return self._load(_arm_name(name, arm)).get_trials()

    def delete(self, name: str, arms: Iterable[str]) -> None:
        """Delete a study and its trials. Its charges are the ledger's and stay.

        Raises:
            StudyNotFoundError: If there is no such study here: Optuna's own are not ours to delete.
        """
        there = {s.study_name: s for s in optuna.get_all_study_summaries(self._storage)}
        found = there.get(name)
        unfinished = found is not None and not (found.user_attrs or found.n_trials or "/" in name)
        if found is None or not (unfinished or f"{_PREFIX}document" in found.user_attrs):
            raise self._not_found(name)
        for study in (*(_arm_name(name, arm) for arm in arms), name):
            if study in there:
                optuna.delete_study(study_name=study, storage=self._storage)

    def arms(self, name: str) -> list[str]:
        """Return the arms that have a study of their own, whether or not it was completed."""
        summaries = optuna.get_all_study_summaries(self._storage)
        prefix = f"{name}/"
        return [s.study_name[len(prefix) :] for s in summaries if s.study_name.startswith(prefix)]

    def close(self) -> None:
        """Close the connections."""
        self._database.remove_session()
        self._database.engine.dispose()

    def _load(self, name: str) -> optuna.Study:
        try:
            return optuna.load_study(study_name=check_text(name, "study"), storage=self._storage)
        except KeyError:
            raise self._not_found(name) from None

    def _not_found(self, name: str) -> StudyNotFoundError:
        known = ", ".join(self.names()) or "none"
        return StudyNotFoundError(
            f"There is no study named {name!r} in this storage; it holds: {known}."
        )


def all_params(trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
    """Return a recorded trial's parameters, those outside of the space included."""
    outside = {
        key.removeprefix(_OUTSIDE): value
        for key, value in trial.user_attrs.items()
        if key.startswith(_OUTSIDE)
    }
    return {**trial.params, **outside}


def artifact_root(url: str) -> Path:
    """Return the folder for models and trackers' files.

    Args:
        url: The storage's URL.

    Returns:
        What ``PRIVTUNE_ARTIFACTS`` says; else ``<stem>-artifacts`` beside an SQLite file, or
        ``<database>-artifacts`` in the working directory. The folder need not exist.
    """
    if given := os.environ.get("PRIVTUNE_ARTIFACTS"):
        return Path(given).absolute()
    checked = checked_url(url)
    if checked.get_backend_name() == "sqlite":
        path = Path(str(checked.database)).absolute()
        return path.with_name(f"{path.stem}-artifacts")
    return Path(f"{checked.database or 'postgres'}-artifacts").absolute()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Optuna from announcing studies of its own: one for each arm is ours to know."""
    log = logging.getLogger("optuna.storages")
    before = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(before)


def _arm_name(name: str, arm: str) -> str:
    return f"{name}/{arm}"
