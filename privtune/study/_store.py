"""Where studies live: Optuna's storage, in the curator's database.

The study ``NAME`` carries the spec and the plans; each arm is an Optuna study ``NAME/ARM`` whose
trials are the sealed trials of that arm, so that Optuna's own tools work on them inside the trust
boundary. Everything is stored as JSON with a schema version.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import TrialState
from sqlalchemy.engine import make_url

from privtune.errors import PrivTuneError
from privtune.spaces import independent_sampler
from privtune.training.streams import Streams

__all__ = ["StudyExistsError", "StudyNotFoundError", "StudyStore", "artifact_root"]

_SCHEMA = 1
_PREFIX = "privtune:"
_INDEX = "privtune:index"


class StudyExistsError(PrivTuneError):
    """A study of this name exists already."""


class StudyNotFoundError(PrivTuneError):
    """There is no study of this name."""


class StudyStore:
    """Studies and their arms in one storage.

    Args:
        url: SQLAlchemy URL; the ledger may share it.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._storage = optuna.storages.RDBStorage(
            url,
            engine_kwargs={"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {},
        )

    def create(self, name: str, arms: Iterable[str], document: Mapping[str, Any]) -> None:
        """Store a new study and its arms.

        Raises:
            StudyExistsError: If the name is taken.
        """
        try:
            study = optuna.create_study(study_name=name, storage=self._storage)
        except optuna.exceptions.DuplicatedStudyError:
            raise StudyExistsError(
                f"A study named {name!r} exists already in this storage. Choose another name, or "
                f"go on with it: privtune study run {name}."
            ) from None
        for arm in arms:
            optuna.create_study(
                study_name=_arm_name(name, arm),
                storage=self._storage,
                direction="maximize",
                load_if_exists=True,
            )
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

    def draw(
        self,
        name: str,
        arm: str,
        *,
        space: Mapping[str, BaseDistribution],
        streams: Streams,
        indices: Iterable[int],
    ) -> dict[int, dict[str, Any]]:
        """Draw the candidates of a round with Optuna's random sampler, one trial row each.

        Args:
            name: The study.
            arm: The arm.
            space: Distributions by hyperparameter.
            streams: The round's streams; a candidate depends on them and its index alone.
            indices: Which candidates. A row that exists is used again.

        Returns:
            Hyperparameters by index.
        """
        study = self._load(_arm_name(name, arm))
        rows = {t.user_attrs.get(_INDEX): t for t in study.get_trials(deepcopy=False)}
        drawn: dict[int, dict[str, Any]] = {}
        for index in indices:
            if index in rows:
                drawn[index] = dict(rows[index].params)
                continue
            study.sampler = independent_sampler(streams, index)
            trial = study.ask(dict(space))
            trial.set_user_attr(_INDEX, index)
            drawn[index] = dict(trial.params)
        return drawn

    def finish(self, name: str, arm: str, scores: Mapping[int, float]) -> None:
        """Tell Optuna the scores of trials that are done. A row is told once."""
        study = self._load(_arm_name(name, arm))
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            index = trial.user_attrs.get(_INDEX)
            if isinstance(index, int) and index in scores:
                study.tell(trial.number, scores[index])

    def trials(self, name: str, arm: str) -> list[optuna.trial.FrozenTrial]:
        """Return the sealed trials of an arm. For the curator alone."""
        return self._load(_arm_name(name, arm)).get_trials()

    def delete(self, name: str, arms: Iterable[str]) -> None:
        """Delete a study and its trials. Its charges are the ledger's and stay."""
        for study in (*(_arm_name(name, arm) for arm in arms), name):
            optuna.delete_study(study_name=study, storage=self._storage)

    def close(self) -> None:
        """Close the connections."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    def _load(self, name: str) -> optuna.Study:
        try:
            return optuna.load_study(study_name=name, storage=self._storage)
        except KeyError:
            known = ", ".join(self.names()) or "none"
            raise StudyNotFoundError(
                f"There is no study named {name!r} in this storage; it holds: {known}."
            ) from None


def artifact_root(url: str) -> Path:
    """Return the folder for models and trackers' files: beside an SQLite file, else here.

    Args:
        url: The storage's URL.

    Returns:
        ``<stem>-artifacts`` beside the database; the folder need not exist.
    """
    database = make_url(url).database
    if url.startswith("sqlite") and database not in (None, "", ":memory:"):
        path = Path(str(database)).absolute()
        return path.with_name(f"{path.stem}-artifacts")
    return Path("privtune-artifacts").absolute()


def _arm_name(name: str, arm: str) -> str:
    return f"{name}/{arm}"
