"""The trials of arms in Optuna's storage, for the curator, and those that are paid for and open.

Each arm is an Optuna study ``NAME/ARM``. Optuna's storage commits at every step of a trial; a study needs
one commit, when the trial is told. What an open trial was given stands in rows until the arm is released:
with another candidate after a crash, the release would tell of the crash, which nobody paid for.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import optuna
from optuna.distributions import CategoricalDistribution, distribution_to_json, json_to_distribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from privtune.imports import quiet_optuna, unsearched
from privtune.ledger.engines import translated
from privtune.ledger.storage import Storage
from privtune.spaces import categorical, inside, with_tuples

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

    from privtune.spaces import SearchSpace
    from privtune.strategies import TrialResult
    from privtune.study.rows import Results


Kept = dict[str, tuple[Any, "BaseDistribution"]]

INDEX = "privtune:index"  # attribute of a trial: its number in its round
_TUPLES = "privtune:tuples"  # likewise, by hyperparameter: the places of choices that are tuples
_OUTSIDE = "params:"
_ASKED, _REPORTED = ".asked", ".reported"
_ENDED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)


class ShownTrial:
    """A trial of Optuna's whose suggestions are stored at once, so that a crash changes none."""

    def __init__(self, trial: optuna.Trial, kept: Kept, keep: Callable[[int, bytes], None]) -> None:
        self._trial, self._keep = trial, keep
        self._kept: Kept = {}
        self.reports: dict[int, float] = {}
        self.take(kept)

    def take(self, kept: Kept) -> None:
        """Take what the trial was suggested in another process."""
        self._kept |= kept
        # As with trials that Optuna's users enqueue: a suggestion of this name returns this value.
        self._trial._fixed_params.update({name: value for name, (value, _) in kept.items()})

    def suggest(self, name: str, distribution: BaseDistribution) -> Any:
        """Suggest a value of a distribution; the value that the trial had, if its process died."""
        value = self._trial._suggest(name, distribution)
        if name not in self._kept:
            line = [name, value, _law_to_json(distribution)]
            self._keep(len(self._kept), f"{json.dumps(line)}\n".encode())
            self._kept[name] = value, distribution
        return value

    def report(self, value: float, step: int) -> None:
        """Report an intermediate score."""
        self.reports[step] = value
        self._trial.report(value, step)

    def should_prune(self) -> bool:
        """Return whether the pruner wants to stop this trial."""
        return self._trial.should_prune()

    def suggest_kept(self) -> None:
        """Suggest again what the trial had been given, if it was trained before its process died."""
        for name, (_, distribution) in self._kept.items():
            if name not in self._trial.params:
                self._trial._suggest(name, distribution)


class _Planned(optuna.Study):
    """A study whose number of trials is planned, so that nothing else ends it."""

    def stop(self) -> None:
        """Go on: samplers that are through with their points ask for an end."""


class ShownTrials:
    """The trials of an arm, in the order of their numbers, each told once."""

    def __init__(
        self,
        study: optuna.Study,
        results: Results,
        lend: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._stored, self._results, self._lend = study, results, lend
        self._before = [name for name in results.names() if _ASKED in name]
        memory = optuna.storages.InMemoryStorage()
        # Of the same name: Hyperband derives a trial's bracket from it.
        with quiet_optuna():
            memory.create_new_study(study.directions, study.study_name)
        self._memory = _Planned(study.study_name, memory)
        ended = study.get_trials(deepcopy=False, states=_ENDED)
        self._memory.add_trials([from_storage(trial) for trial in ended])
        self._ids: dict[int, int] = {
            trial.user_attrs[INDEX]: trial._trial_id
            for trial in self._memory.get_trials(deepcopy=False)
            if INDEX in trial.user_attrs
        }
        self._told = set(self._ids)
        self._open: dict[int, ShownTrial] = {}

    def ask(
        self, number: int, *, sampler: BaseSampler, pruner: BasePruner | None = None
    ) -> ShownTrial:
        """Return trial ``number``, drawn by a sampler that sees the earlier ones; drawn once."""
        # A study of its own over the same trials: several that are open draw by a sampler each.
        memory = _Planned(
            self._memory.study_name,
            self._memory._storage,
            # Some samplers write to a trial when it is opened; one that was told stays as it is.
            optuna.samplers.RandomSampler() if number in self._told else sampler,
            pruner or optuna.pruners.NopPruner(),
        )
        if number not in self._ids:
            template = create_trial(state=TrialState.RUNNING, user_attrs={INDEX: number})
            self._ids[number] = memory._storage.create_new_trial(memory._study_id, template)
        trial = optuna.Trial(memory, self._ids[number])
        start = f"trial-{number}{_ASKED}"
        kept = _read(self._results.get(n) or b"" for n in self._before if n.startswith(start))
        self._open[number] = ShownTrial(
            trial, kept, lambda count, line: self._results.put(f"{start}-{count:06d}", line)
        )
        return self._open[number]

    def take(self, numbers: Iterable[int]) -> None:
        """Take what open trials were suggested and reported in other processes."""
        for number in numbers:
            if (trial := self._open.get(number)) is None:
                continue
            trial.take(suggested(self._results, number))
            reports = json.loads(self._results.get(f"trial-{number}{_REPORTED}") or b"[]")
            trial.suggest_kept()
            for step, value in reports:
                trial.report(value, step)

    def hand_over(self, number: int) -> None:
        """Keep what a trial reported here, for the process that tells how it ended."""
        if reports := self._open[number].reports:
            content = json.dumps(list(reports.items())).encode()
            self._results.put(f"trial-{number}{_REPORTED}", content)

    def tell(self, number: int, *, score: float, pruned: bool) -> None:
        """Store how a trial ended: once, whole, in one transaction."""
        if number in self._told:
            return
        trial = self._open.pop(number)
        trial.suggest_kept()
        # A pruned trial counts with its last report, which pruners and TPE know to read.
        state = TrialState.PRUNED if pruned else TrialState.COMPLETE
        value = None if pruned else -math.inf if math.isnan(score) else score
        ended = self._memory.tell(trial._trial, value, state)
        with self._lend():
            self._stored.add_trial(_to_storage(ended))
        self._told.add(number)


def suggested(results: Results, number: int) -> Kept:
    """Return what a trial was suggested, by whatever process, up to now."""
    names = (f"trial-{number}{_ASKED}-{count:06d}" for count in itertools.count())
    lines = itertools.takewhile(lambda line: line is not None, map(results.get, names))
    return _read(line for line in lines if line is not None)


def _read(kept: Iterable[bytes]) -> Kept:
    """Return the values and laws that were kept; a line that broke off was never used."""
    out: Kept = {}
    lines = (line for content in kept for line in content.splitlines(keepends=True))
    for line in lines:
        if not line.endswith(b"\n"):
            continue
        name, value, law = json.loads(line)
        out[name] = with_tuples(value), _law_from_json(name, law)
    return out


def _law_to_json(law: BaseDistribution) -> str:
    if isinstance(law, CategoricalDistribution):
        return json.dumps({"choices": law.choices})
    return distribution_to_json(law)


def _law_from_json(name: str, text: str) -> BaseDistribution:
    fields = json.loads(text)
    if "choices" in fields:
        return categorical(name, with_tuples(fields["choices"]))
    return json_to_distribution(text)


def _to_storage(trial: FrozenTrial) -> FrozenTrial:
    """Return a trial as Optuna's storage can hold it: with texts for tuples, and a note of which."""
    tuples: dict[str, list[int]] = {}
    params, laws = dict(trial.params), dict(trial.distributions)
    for name, law in trial.distributions.items():
        choices = getattr(law, "choices", ())
        if places := [place for place, choice in enumerate(choices) if isinstance(choice, tuple)]:
            tuples[name] = places
            texts = [
                f"tuple {json.dumps(c)}" if place in places else c
                for place, c in enumerate(choices)
            ]
            laws[name] = categorical(name, texts)
            params[name] = texts[int(law.to_internal_repr(params[name]))]
    return _changed(trial, params, laws, {**trial.user_attrs, _TUPLES: tuples}) if tuples else trial


def from_storage(trial: FrozenTrial) -> FrozenTrial:
    """Restore the tuples of a trial that Optuna's storage holds as texts."""
    params, laws = dict(trial.params), dict(trial.distributions)
    others = {name: value for name, value in trial.user_attrs.items() if name != _TUPLES}
    for name, places in trial.user_attrs.get(_TUPLES, {}).items():
        law: Any = laws[name]
        choices = [
            with_tuples(json.loads(c.removeprefix("tuple "))) if place in places else c
            for place, c in enumerate(law.choices)
        ]
        params[name] = choices[int(law.to_internal_repr(params[name]))]
        laws[name] = categorical(name, choices)
    return _changed(trial, params, laws, others)


def _changed(
    trial: FrozenTrial,
    params: dict[str, Any],
    laws: dict[str, BaseDistribution],
    attributes: dict[str, Any],
) -> FrozenTrial:
    trial = copy.copy(trial)
    trial.params, trial.distributions = params, laws
    trial.user_attrs = attributes
    return trial


class StudyTrials:
    """The trials of one study, in the ledger's storage: what Optuna writes takes its turn like the ledger."""

    def __init__(self, storage: Storage, study: str) -> None:
        self._home, self._study = storage, study

    def record(self, arm: str, *, space: SearchSpace, results: Sequence[TrialResult]) -> None:
        """Record the trials of a finished round, for the curator's tools. A row is written once."""
        with self._home.lend():
            study = self._open(arm)
            there = {t.user_attrs.get(INDEX) for t in study.get_trials(deepcopy=False)}
            study.add_trials([_finished(space, r) for r in results if r.index not in there])

    def shown(self, arm: str, results: Results, *, repetition: int = 0) -> ShownTrials:
        """Return the trials of an arm that pays for all of them, to ask and to tell."""
        with self._home.lend():
            study = self._open(_repeated(arm, repetition))
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

    def delete(self, arms: Sequence[str], *, repeats: int = 1) -> None:
        """Delete the trials of arms."""
        for arm in [_repeated(arm, number) for arm in arms for number in range(repeats)]:
            with self._home.lend(), suppress(KeyError):  # no trial may ever have been kept
                optuna.delete_study(study_name=f"{self._study}/{arm}", storage=self._storage)

    def close(self) -> None:
        """Close the connections."""
        if "_database" in self.__dict__:
            self._database.remove_session()
            self._database.engine.dispose()

    def _open(self, arm: str) -> optuna.Study:
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
        url = self._home.url.render_as_string(hide_password=False)
        with translated(self._home.safe_url), unsearched():
            return optuna.storages.RDBStorage(url, engine_kwargs=self._home.options_for_others)

    @cached_property
    def _storage(self) -> optuna.storages.BaseStorage:
        # Loading a study wraps a bare storage in a new cache each time, which then reads every
        # trial again. This one is kept: what it holds of finished trials never changes.
        return optuna.storages.get_storage(self._database)


def _repeated(arm: str, repetition: int) -> str:
    """Return what Optuna calls a repetition of an arm: no name of an arm has a slash."""
    return f"{arm}/{repetition}" if repetition else arm


def _finished(space: SearchSpace, result: TrialResult) -> optuna.trial.FrozenTrial:
    """Return a round's trial as a finished trial of Optuna's, in the arm's space."""
    # Parameters outside of the space become attributes: Optuna refuses laws that change from trial to trial.
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
