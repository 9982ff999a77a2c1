"""The trials of arms in Optuna's storage, so that its tools work on them inside the trust boundary.

Each arm is an Optuna study ``NAME/ARM``. Nothing else of a study is there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import optuna

from privtune.imports import unsearched
from privtune.ledger.engines import translated
from privtune.ledger.storage import Storage
from privtune.spaces import inside, with_tuples
from privtune.study._shown import INDEX, ShownTrials, from_storage

if TYPE_CHECKING:
    from privtune.spaces import SearchSpace
    from privtune.strategies import TrialResult
    from privtune.study.rows import Results

_OUTSIDE = "params:"


class StudyTrials:
    """The trials of one study, in the ledger's storage: what Optuna writes takes its turn like the ledger."""

    def __init__(self, storage: Storage, study: str) -> None:
        self._home, self._study = storage, study

    def record(self, arm: str, *, space: SearchSpace, results: Sequence[TrialResult]) -> None:
        """Record the trials of a finished round, for the curator's tools, each once."""
        with self._home.lend():
            study = self._open(arm)
            there = {t.user_attrs.get(INDEX) for t in study.get_trials(deepcopy=False)}
            study.add_trials([_finished(space, r) for r in results if r.index not in there])

    def shown(self, arm: str, results: Results) -> ShownTrials:
        """Return the trials of an arm that pays for all of them, to ask and to tell."""
        with self._home.lend():
            study = self._open(arm)
        return ShownTrials(study, results, self._home.lend)

    def of(self, arm: str) -> list[optuna.trial.FrozenTrial]:
        """Return the sealed trials of an arm. For the curator alone."""
        with self._home.lend():
            study = self._open(arm)
        return [from_storage(trial) for trial in study.get_trials()]

    def records(self, arm: str) -> list[dict[str, Any]]:
        """Return number, state, parameters and score of the sealed trials of an arm."""
        return [
            {"number": t.number, "state": t.state.name, "params": _all_params(t), "score": t.value}
            for t in self.of(arm)
        ]

    def delete(self, arms: Sequence[str]) -> None:
        """Delete the trials of arms."""
        for arm in arms:
            with self._home.lend(), suppress(KeyError):  # no trial may ever have been kept
                optuna.delete_study(study_name=f"{self._study}/{arm}", storage=self._storage)

    def close(self) -> None:
        """Close the connections."""
        if "_database" in self.__dict__:
            self._database.remove_session()
            self._database.engine.dispose()

    def _open(self, arm: str) -> optuna.Study:
        with _quiet():
            return optuna.create_study(
                study_name=f"{self._study}/{arm}",
                storage=self._storage,
                direction="maximize",
                load_if_exists=True,
            )

    @cached_property
    def _database(self) -> optuna.storages.RDBStorage:
        # Opened when trials are read or kept: a study that is only looked at needs none of it.
        url = self._home.url.render_as_string(hide_password=False)
        with translated(self._home.safe_url), unsearched():
            return optuna.storages.RDBStorage(url, engine_kwargs=self._home.options_for_others)

    @cached_property
    def _storage(self) -> optuna.storages.BaseStorage:
        # Loading a study wraps a bare storage in a new cache each time, which then reads every
        # trial again. This one is kept: what it holds of finished trials never changes.
        return optuna.storages.get_storage(self._database)


def _finished(space: SearchSpace, result: TrialResult) -> optuna.trial.FrozenTrial:
    """Return a trial of a round as Optuna has trials that are over."""
    params = {
        key: result.params[key]
        for key in space
        if key in result.params and inside(space[key], result.params[key])
    }
    score = -math.inf if result.score is None else result.score
    return optuna.trial.create_trial(
        params=params,
        distributions={key: space[key] for key in params},
        value=-math.inf if math.isnan(score) else score,
        user_attrs={
            INDEX: result.index,
            "ended": str(result.ended),
            "unusable": result.unusable,
            **{f"{_OUTSIDE}{k}": v for k, v in result.params.items() if k not in params},
        },
    )


def _all_params(trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
    """Return a recorded trial's parameters, those outside of the space included."""
    outside = {
        key.removeprefix(_OUTSIDE): with_tuples(value)
        for key, value in trial.user_attrs.items()
        if key.startswith(_OUTSIDE)
    }
    return {**trial.params, **outside}


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Optuna from announcing studies of its own: one for each arm is ours to know."""
    log = logging.getLogger("optuna")
    before = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(before)
