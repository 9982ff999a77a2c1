"""The trials of arms: shown ones in Optuna's storage, sealed ones for the curator in one row a round.

Each arm is an Optuna study ``NAME/ARM``. Optuna's storage commits at every step of a trial; a study needs
one commit, when the trial is told. What an open trial was given stands in rows until the arm is released:
with another candidate after a crash, the release would tell of the crash, which nobody paid for.

Sealed trials are written to Optuna's tables when the curator looks at them: to open Optuna's storage and to
write a trial there takes longer than all else that a short trial costs.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.distributions import CategoricalDistribution, distribution_to_json, json_to_distribution
from optuna.exceptions import StorageInternalError
from optuna.trial import FrozenTrial, TrialState, create_trial

from privtune.imports import quiet_optuna, unsearched
from privtune.ledger.engines import DatabaseError, database_cause, translated
from privtune.ledger.errors import SENSELESS, Place
from privtune.ledger.places import checked_url
from privtune.ledger.reading import parsing
from privtune.ledger.storage import Storage
from privtune.spaces import categorical, inside, with_tuples

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

    from privtune.spaces import SearchSpace
    from privtune.strategies import TrialResult
    from privtune.study.rows import Results


Suggestions = dict[str, tuple[Any, "BaseDistribution"]]
"""What a trial was suggested, by hyperparameter: the value, and the law that it was drawn from."""

INDEX = "privtune:index"  # attribute of a trial: its number in its round
_TUPLES = "privtune:tuples"  # likewise, by hyperparameter: the places of choices that are tuples
_OUTSIDE = "params:"
_ASKED = ".asked"
_REPORTED = ".reported"
_STORED = Place("privtune_blobs", "data")
_TRIALS = "trials"  # a table of Optuna's
_ENDED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)


class ShownTrial:
    """A trial of Optuna's whose suggestions are stored at once, so that a crash changes none.

    Args:
        trial: Optuna's trial, in memory.
        suggestions: What the trial was suggested before, in this process or another.
        keep: Stores a suggestion, of which it gets the number in its trial and the line.
    """

    def __init__(
        self,
        trial: optuna.Trial,
        suggestions: Suggestions,
        keep: Callable[[int, bytes], None],
    ) -> None:
        self._trial = trial
        self._keep = keep
        self._suggestions: Suggestions = {}
        self.reports: dict[int, float] = {}
        self.take(suggestions)

    def take(self, suggestions: Suggestions) -> None:
        """Add the suggestions that the trial got in another process."""
        self._suggestions |= suggestions
        values = {name: value for name, (value, _) in suggestions.items()}
        # As with trials that Optuna's users enqueue: a suggestion of this name returns this value.
        self._trial._fixed_params.update(values)

    def suggest(self, name: str, distribution: BaseDistribution) -> Any:
        """Return a value of a distribution, the same as before a crash, and store it."""
        value = self._trial._suggest(name, distribution)
        if name not in self._suggestions:
            entry = [name, value, _law_to_json(distribution)]
            # The end of the line tells a line that broke off, as in a crash, from one that is complete.
            line = f"{json.dumps(entry)}\n"
            self._keep(len(self._suggestions), line.encode())
            self._suggestions[name] = value, distribution
        return value

    def report(self, value: float, step: int) -> None:
        """Report an intermediate score at a step to Optuna."""
        self.reports[step] = value
        self._trial.report(value, step)

    def should_prune(self) -> bool:
        """Return whether the pruner wants to stop this trial."""
        return self._trial.should_prune()

    def suggest_kept(self) -> None:
        """Suggest to Optuna's trial all stored values that it was not asked for in this process."""
        for name, (_, distribution) in self._suggestions.items():
            if name not in self._trial.params:
                self._trial._suggest(name, distribution)


class _Planned(optuna.Study):
    """An Optuna study whose number of trials is fixed by the plan."""

    def stop(self) -> None:
        """Ignore a sampler's request to end the study."""


class ShownTrials:
    """The shown trials of an arm by number, each drawn and told to Optuna once.

    Args:
        study: Optuna's study of the arm, in the ledger's storage.
        results: The arm's sealed results, where what open trials were suggested is kept.
        lend: Has the database for what Optuna writes.
    """

    def __init__(
        self,
        study: optuna.Study,
        results: Results,
        lend: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._study = study  # in the ledger's storage
        self._results = results
        self._lend = lend
        # Suggestions that were stored before: by name, a few letters each, and read when asked for.
        self._before = [name for name in results.names() if _ASKED in name]
        memory = optuna.storages.InMemoryStorage()
        # Of the same name: Hyperband derives a trial's bracket from it.
        with quiet_optuna():
            memory.create_new_study(study.directions, study.study_name)
        self._memory = _Planned(study.study_name, memory)
        ended = study.get_trials(deepcopy=False, states=_ENDED)
        self._memory.add_trials([from_storage(trial) for trial in ended])
        # By the number in the round: Optuna's id of the trial in memory.
        self._ids: dict[int, int] = {}
        for trial in self._memory.get_trials(deepcopy=False):
            if INDEX in trial.user_attrs:
                self._ids[trial.user_attrs[INDEX]] = trial._trial_id
        self._told = set(self._ids)
        self._open: dict[int, ShownTrial] = {}

    def ask(
        self, number: int, *, sampler: BaseSampler, pruner: BasePruner | None = None
    ) -> ShownTrial:
        """Return trial ``number``, drawn once by a sampler that sees the earlier trials.

        Args:
            number: The trial's number among those of all repetitions.
            sampler: Optuna's; it draws when the trial is suggested something.
            pruner: Optuna's; none unless it is given.
        """
        if number in self._told:
            # Some samplers write to a trial when it is opened; one that was told stays as it is.
            sampler = optuna.samplers.RandomSampler()
        if pruner is None:
            pruner = optuna.pruners.NopPruner()
        # A study of its own over the same trials: several that are open draw by a sampler each.
        memory = _Planned(self._memory.study_name, self._memory._storage, sampler, pruner)
        trial_id = self._ids.get(number)
        if trial_id is None:
            template = create_trial(state=TrialState.RUNNING, user_attrs={INDEX: number})
            trial_id = memory._storage.create_new_trial(memory._study_id, template)
            self._ids[number] = trial_id
        trial = optuna.Trial(memory, trial_id)
        start = f"trial-{number}{_ASKED}"
        contents: list[bytes] = []
        for name in self._before:
            if name.startswith(start):
                contents.append(self._results.get(name) or b"")
        suggestions = _read_suggestions(contents)

        def keep(count: int, line: bytes) -> None:
            name = f"{start}-{count:06d}"
            self._results.put(name, line)

        shown_trial = ShownTrial(trial, suggestions, keep)
        self._open[number] = shown_trial
        return shown_trial

    def take(self, numbers: Iterable[int]) -> None:
        """Add the suggestions and reports that open trials got in other processes.

        Args:
            numbers: Of trials whose rows are done; one that is not open here is left out.
        """
        for number in numbers:
            trial = self._open.get(number)
            if trial is None:
                continue
            trial.take(suggested(self._results, number))
            name = f"trial-{number}{_REPORTED}"
            reports = json.loads(self._results.get(name) or b"[]")
            trial.suggest_kept()
            for step, value in reports:
                trial.report(value, step)

    def hand_over(self, number: int) -> None:
        """Store a trial's intermediate reports for the process that tells its end."""
        reports = self._open[number].reports
        if reports:
            text = json.dumps(list(reports.items()))
            name = f"trial-{number}{_REPORTED}"
            self._results.put(name, text.encode())

    def tell(self, number: int, *, score: float, pruned: bool) -> None:
        """Store how a trial ended, once and in one transaction.

        Args:
            number: The trial's number among those of all repetitions.
            score: Its score; NaN counts as the worst one.
            pruned: Whether the pruner ended it.
        """
        if number in self._told:
            return
        trial = self._open.pop(number)
        trial.suggest_kept()
        # A pruned trial counts with its last report, which pruners and TPE know to read.
        if pruned:
            ended = self._memory.tell(trial._trial, None, TrialState.PRUNED)
        else:
            value = _value_of(score)
            ended = self._memory.tell(trial._trial, value, TrialState.COMPLETE)
        with self._lend():
            self._study.add_trial(_to_storage(ended))
        self._told.add(number)


def _value_of(score: float) -> float:
    """Return a score as Optuna accepts it, with −∞ for NaN."""
    return -math.inf if math.isnan(score) else score


def suggested(results: Results, number: int) -> Suggestions:
    """Return the stored suggestions of a trial, made in any process so far.

    Args:
        results: The arm's sealed results.
        number: The trial's number among those of all repetitions.
    """
    contents: list[bytes] = []
    for count in itertools.count():
        name = f"trial-{number}{_ASKED}-{count:06d}"
        content = results.get(name)
        if content is None:
            break
        contents.append(content)
    return _read_suggestions(contents)


def _read_suggestions(contents: Iterable[bytes]) -> Suggestions:
    """Return the values and laws in stored lines by name, without lines cut off by a crash."""
    suggestions: Suggestions = {}
    for content in contents:
        for line in content.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                continue
            with parsing(_STORED):
                name, value, law = json.loads(line)
                suggestions[name] = with_tuples(value), _law_from_json(name, law)
    return suggestions


def _law_to_json(law: BaseDistribution) -> str:
    """Return a distribution as JSON text, in which tuples become lists."""
    if isinstance(law, CategoricalDistribution):
        return json.dumps({"choices": law.choices})
    return distribution_to_json(law)


def _law_from_json(name: str, text: str) -> BaseDistribution:
    """Return the distribution of a JSON text of ``_law_to_json``, with tuples for lists."""
    fields = json.loads(text)
    if "choices" in fields:
        choices = with_tuples(fields["choices"])
        return categorical(name, choices)
    return json_to_distribution(text)


def _to_storage(trial: FrozenTrial) -> FrozenTrial:
    """Return a trial with texts for tuples, which Optuna's storage cannot hold, and a note of them.

    Optuna's tables hold choices as JSON, which would make lists of tuples: other choices than were drawn.
    """
    tuples: dict[str, list[int]] = {}
    params = dict(trial.params)
    laws = dict(trial.distributions)
    for name, law in trial.distributions.items():
        choices = list(getattr(law, "choices", ()))
        places = [place for place, choice in enumerate(choices) if isinstance(choice, tuple)]
        if not places:
            continue
        tuples[name] = places
        for place in places:
            text = json.dumps(choices[place])
            choices[place] = f"tuple {text}"
        laws[name] = categorical(name, choices)
        index = int(law.to_internal_repr(params[name]))
        params[name] = choices[index]
    if not tuples:
        return trial
    attributes = {**trial.user_attrs, _TUPLES: tuples}
    return _changed(trial, params, laws, attributes)


def from_storage(trial: FrozenTrial) -> FrozenTrial:
    """Return a trial of Optuna's storage with its tuples restored from texts."""
    params = dict(trial.params)
    laws = dict(trial.distributions)
    attributes = dict(trial.user_attrs)
    tuples = attributes.pop(_TUPLES, {})
    for name, places in tuples.items():
        law: Any = laws[name]
        choices = list(law.choices)
        for place in places:
            text = choices[place].removeprefix("tuple ")
            choices[place] = with_tuples(json.loads(text))
        index = int(law.to_internal_repr(params[name]))
        params[name] = choices[index]
        laws[name] = categorical(name, choices)
    return _changed(trial, params, laws, attributes)


def _changed(
    trial: FrozenTrial,
    params: dict[str, Any],
    laws: dict[str, BaseDistribution],
    attributes: dict[str, Any],
) -> FrozenTrial:
    """Return a copy of a trial with other parameters, distributions and attributes."""
    trial = copy.copy(trial)
    trial.params = params
    trial.distributions = laws
    trial.user_attrs = attributes
    return trial


class StudyTrials:
    """All trials of one study: shown ones in Optuna's tables in the ledger's database, sealed ones in rows.

    Args:
        storage: The ledger's database.
        study: The study's name, with which the names of Optuna's studies begin.
        rounds: The study's results that hold the trials of sealed rounds, of all arms.
    """

    def __init__(self, storage: Storage, study: str, rounds: Results) -> None:
        self._home = storage
        self._study = study
        self._rounds = rounds

    def record(
        self,
        arm: str,
        *,
        space: SearchSpace,
        results: Sequence[TrialResult],
        repetition: int = 0,
    ) -> None:
        """Store the trials of a finished round for the curator, once.

        Args:
            arm: The arm's name.
            space: What the trials were drawn from: a law is kept beside each value.
            results: The round's results, all of them.
            repetition: Which of the arm's repetitions the round belongs to.
        """
        content = _pack_round(space, results)
        # One row however long, so that a copy of the database has all of them.
        self._rounds.put(_round_name(arm, repetition), content, in_row=True)

    def lay_out(self, arm: str) -> None:
        """Write the sealed trials of an arm to Optuna's tables, unless they are there: for its dashboard."""
        trials = self._recorded(arm)
        if not trials:
            return
        with self._lent(), self._reading(arm):
            _add_missing(self._open(arm), trials)

    def _recorded(self, arm: str) -> list[FrozenTrial]:
        """Return the trials of an arm's sealed rounds, numbered over all repetitions; none of a shown arm.

        Raises:
            DamagedResultError: If a row is not what was stored.
        """
        contents: list[bytes] = []
        for repetition in itertools.count():
            content = self._rounds.get(_round_name(arm, repetition))
            if content is None:
                break
            contents.append(content)
        return _unpack_rounds(contents)

    def shown(self, arm: str, results: Results, *, repetition: int = 0) -> ShownTrials:
        """Return the trials of one repetition of an arm that pays for all of its trials.

        Args:
            arm: The arm's name.
            results: Its sealed results.
            repetition: Which of its repetitions; each has trials of its own.
        """
        with self._lent(), self._reading(arm):
            study = self._open(_repeated(arm, repetition))
        with self._reading(arm):
            return ShownTrials(study, results, self._lent)

    def of(self, arm: str) -> list[optuna.trial.FrozenTrial]:
        """Return the stored trials of an arm, which may be sealed, for the curator alone.

        Raises:
            StudyCorruptedError: If Optuna's tables, or the rows of sealed rounds, cannot be read.
        """
        sealed_trials = self._recorded(arm)
        if sealed_trials:
            return sealed_trials
        with self._reading(arm):
            if not self._home.has_table(_TRIALS):
                return []
            try:
                # Not those that this process remembers: they are compared with what was noted of them.
                name = f"{self._study}/{arm}"
                study = optuna.load_study(study_name=name, storage=self._reader)
            except KeyError:
                return []
            return [from_storage(trial) for trial in study.get_trials()]

    def delete(self, arms: Sequence[str], *, repeats: int = 1) -> None:
        """Delete the trials of arms from Optuna's tables, in each of their repetitions."""
        if not self._home.has_table(_TRIALS):
            return
        for arm in arms:
            for number in range(repeats):
                self._delete(_repeated(arm, number))

    def _delete(self, arm: str) -> None:
        """Delete the trials of one repetition of an arm, if it has any."""
        name = f"{self._study}/{arm}"
        with self._lent(), self._reading(arm), suppress(KeyError):
            optuna.delete_study(study_name=name, storage=self._storage)

    def close(self) -> None:
        """Close Optuna's connections to the database."""
        for name in ("_database", "_reader"):
            if name in self.__dict__:
                storage: optuna.storages.RDBStorage = getattr(self, name)
                storage.remove_session()
                storage.engine.dispose()

    @contextmanager
    def _lent(self) -> Iterator[None]:
        """Lend the database to Optuna for a ``with`` block, since SQLite allows one writer at a time."""
        with self._home.lend():
            try:
                yield
            except StorageInternalError as error:
                # What the database said: a connection that was lost is no error of the arm's.
                raise database_cause(error) or error.__cause__ or error from None

    @contextmanager
    def _reading(self, arm: str) -> Iterator[None]:
        """Turn errors of Optuna on damaged rows into one error that names study and arm."""
        try:
            yield
        except (optuna.exceptions.OptunaError, DatabaseError, *SENSELESS) as error:
            cause = database_cause(error)
            if cause is not None:
                with translated(self._home.safe_url):
                    raise cause from None
            place = Place("trials", "trial_id", f"study {self._study!r}, arm {arm!r}")
            raise place.error("or another of Optuna's tables cannot be read") from error

    def _open(self, arm: str) -> optuna.Study:
        """Return Optuna's study of an arm, created silently if it is missing."""
        with quiet_optuna():
            return optuna.create_study(
                study_name=f"{self._study}/{arm}",
                storage=self._storage,
                direction="maximize",
                load_if_exists=True,
            )

    @cached_property
    def _database(self) -> optuna.storages.RDBStorage:
        # Opened when trials are read or kept: a study that is only looked at needs none of it.
        return self._open_database()

    @cached_property
    def _reader(self) -> optuna.storages.RDBStorage:
        # Writes nothing, so that a copy of a store can be read.
        return self._open_database(skip_compatibility_check=True, skip_table_creation=True)

    def _open_database(self, **options: Any) -> optuna.storages.RDBStorage:
        """Return Optuna's storage in the ledger's database, with the ledger's connection options."""
        from alembic.util import CommandError

        url = self._home.url.render_as_string(hide_password=False)
        try:
            with translated(self._home.safe_url), unsearched():
                return optuna.storages.RDBStorage(
                    url, engine_kwargs=self._home.options_for_others, **options
                )
        except CommandError as error:
            place = Place("alembic_version", "version_num")
            raise place.error("names no version of Optuna's tables") from error

    @cached_property
    def _storage(self) -> optuna.storages.BaseStorage:
        # Loading a study wraps a bare storage in a new cache each time, which then reads every
        # trial again. This one is kept: what it holds of finished trials never changes.
        return optuna.storages.get_storage(self._database)


def records_of(trials: Sequence[FrozenTrial]) -> list[dict[str, Any]]:
    """Return number, state, parameters and score of each trial, JSON-ready."""
    records = []
    for trial in trials:
        record = {
            "number": trial.number,
            "state": trial.state.name,
            "params": _all_params(trial),
            "score": trial.value,
        }
        records.append(record)
    return records


def digest_of_trials(trials: Sequence[FrozenTrial]) -> str:
    """Return the SHA-256 of all that trials show, except for times.

    The charge notes it: a trial that is changed in Optuna's tables later is found by it.
    """
    parts = []
    for trial in trials:
        steps = {str(step): value for step, value in trial.intermediate_values.items()}
        part = [
            trial.number,
            trial.state.name,
            repr(trial.value),
            _as_texts(trial.params),
            _as_texts(trial.distributions),
            _as_texts(trial.user_attrs),
            _as_texts(steps),
        ]
        parts.append(part)
    # A number that is none, as in a damaged row, has a digest that is not the right one.
    text = json.dumps(parts, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def _as_texts(values: Mapping[str, object]) -> dict[str, str]:
    """Return the ``repr`` of each value by name, which tells tuples from lists."""
    return {name: repr(value) for name, value in values.items()}


def _repeated(arm: str, repetition: int) -> str:
    """Return the name of an arm's repetition in Optuna's tables: ``ARM``, then ``ARM/1`` and so on."""
    return f"{arm}/{repetition}" if repetition else arm


def _round_name(arm: str, repetition: int) -> str:
    """Return the name of the row that holds the trials of an arm's sealed round."""
    return f"{arm}/round-{repetition:06d}.json"


def _pack_round(space: SearchSpace, results: Sequence[TrialResult]) -> bytes:
    """Return the trials of a sealed round as JSON, with the laws that they were drawn from."""
    trials: list[dict[str, Any]] = []
    for result in results:
        score = result.score
        if score is not None and (math.isnan(score) or score == -math.inf):
            score = None  # no JSON has it
        trial = {
            "index": result.index,
            "ended": str(result.ended),
            "unusable": result.unusable,
            "score": score,
            "values": dict(result.params),
        }
        trials.append(trial)
    laws = {name: _law_to_json(law) for name, law in space.items()}
    document = {"time": time.time(), "laws": laws, "trials": trials}
    return json.dumps(document).encode()


def _unpack_rounds(contents: Iterable[bytes]) -> list[FrozenTrial]:
    """Return the trials of an arm's sealed rounds as finished trials of Optuna's, numbered in order."""
    trials: list[FrozenTrial] = []
    for content in contents:
        with parsing(_STORED):
            document = json.loads(content)
            moment = datetime.fromtimestamp(document["time"])
            laws = {name: _law_from_json(name, law) for name, law in document["laws"].items()}
            for row in document["trials"]:
                trial = _finished(laws, **row)
                trial.number = len(trials)
                trial.datetime_start = moment
                trial.datetime_complete = moment
                trials.append(trial)
    return trials


def _finished(
    laws: Mapping[str, BaseDistribution],
    *,
    index: int,
    ended: str,
    unusable: int,
    score: float | None,
    values: Mapping[str, object],
) -> FrozenTrial:
    """Return a round's trial as a finished trial of Optuna's.

    Args:
        laws: What the hyperparameters of the arm's space were drawn from.
        index: The trial's number in its round.
        ended: How it ended.
        unusable: How often it met an unusable record.
        score: Its score; None counts as −∞.
        values: Its hyperparameters as JSON has them.
    """
    # Parameters outside of the space become attributes: Optuna refuses laws that change from trial to trial.
    params = {}
    for name, law in laws.items():
        if name not in values:
            continue
        value = with_tuples(values[name])
        if inside(law, value):
            params[name] = value
    attributes: dict[str, Any] = {INDEX: index, "ended": ended, "unusable": unusable}
    for name, value in values.items():
        if name not in params:
            attributes[f"{_OUTSIDE}{name}"] = value
    return create_trial(
        params=params,
        distributions={name: laws[name] for name in params},
        value=-math.inf if score is None else score,
        user_attrs=attributes,
    )


def _add_missing(study: optuna.Study, trials: Sequence[FrozenTrial]) -> None:
    """Add to one of Optuna's studies those of an arm's trials, in order, that it lacks."""
    count = len(study.get_trials(deepcopy=False))
    study.add_trials([_to_storage(trial) for trial in trials[count:]])


def lay_out_copy(path: Path) -> None:
    """Write all sealed trials that the copy of a store holds to Optuna's tables there, for its dashboard.

    A row that is damaged is left out: whoever reads its trials is told.

    Args:
        path: The SQLite file, which nobody else has open.
    """
    query = (
        "SELECT study, name, data, digest FROM privtune_blobs "
        "WHERE substr(name, 1, 7) = 'trials/' ORDER BY study, name"
    )
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute(query).fetchall()
    contents: dict[str, list[bytes]] = {}
    for study, name, content, digest in rows:
        if hashlib.sha256(content).hexdigest() == digest:
            arm = name.split("/")[1]
            contents.setdefault(f"{study}/{arm}", []).append(content)
    if not contents:
        return
    url = checked_url(path).render_as_string(hide_password=False)
    storage = optuna.storages.RDBStorage(url)
    try:
        for name, rounds in contents.items():
            with quiet_optuna():
                study = optuna.create_study(
                    study_name=name,
                    storage=storage,
                    direction="maximize",
                    load_if_exists=True,
                )
            _add_missing(study, _unpack_rounds(rounds))
    finally:
        storage.remove_session()
        storage.engine.dispose()


def _all_params(trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
    """Return a recorded trial's parameters, those outside of the space included."""
    params = dict(trial.params)
    for attribute, value in trial.user_attrs.items():
        if attribute.startswith(_OUTSIDE):
            name = attribute.removeprefix(_OUTSIDE)
            params[name] = with_tuples(value)
    return params
