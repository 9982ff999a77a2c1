"""A study: create, load, run, resume, compare, export, delete."""

from __future__ import annotations

import logging
import math
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from privtune.accounting import Guarantee
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.files import OwnFolder
from privtune.imports import find_extra
from privtune.ledger import Ledger
from privtune.ledger.doctor import Check
from privtune.ledger.places import artifact_root, checked_url, database_path
from privtune.ledger.schema import HEAD
from privtune.ledger.storage import Storage, schema_version
from privtune.names import did_you_mean
from privtune.numbers import json_ready
from privtune.strategies import Plan, Release
from privtune.study.arm_row import ArmRow, answer_first
from privtune.study.familiar_names import answer, answers
from privtune.study.lifecycle import Life, new_arm
from privtune.study.observer import ArmStatus, Observer, StageStatus
from privtune.study.planning import StudyPlan, plan_study, twins_words
from privtune.study.rows import AnyPlan, StudyRow, StudyStore
from privtune.study.schedules import with_chosen_numbers
from privtune.study.seal import SealedTrialsError
from privtune.study.spec import StudySpec
from privtune.study.stored_results import MODEL
from privtune.study.trials import records_of

if TYPE_CHECKING:
    import optuna
    import pandas
    import torch

    from privtune.strategies import Strategy
    from privtune.study.declared_arms import DeclaredTrial, Mechanism
    from privtune.study.run import Audience
    from privtune.tables.raw_rows import ServedModel
    from privtune.tables.unusable import RecordCheck
    from privtune.tasks import Score, Task


_log = logging.getLogger(__name__)


class Study:
    """A study of one task under one budget; each arm is charged before it touches data.

    Make one with :func:`privtune.create_study` or :func:`privtune.load_study`. A study survives
    interruption: :meth:`run` goes on where it was, without a second charge.

    Args:
        name: Name of a study that is there.
        storage: The database of studies and budgets: its URL, or the path of a SQLite file.
        curator: Whether you are inside of the trust boundary and may see sealed trials.

    Example:
        A study of two arms that have run; ``selection`` is a sealed one:

        >>> study.arms, [status.state for status in study.status()]
        (('defaults', 'selection'), ['settled', 'settled'])
        >>> study.spent().epsilon <= 6.0, study.spent().epsilon + study.remaining()
        (True, 6.0)
        >>> study.release("defaults").params, len(study.releases())
        ({'learning_rate': 0.5, 'max_grad_norm': 1.0}, 2)
        >>> list(study.compare().columns)[:4]
        ['epsilon', 'test_accuracy', 'test_accuracy_low', 'test_accuracy_high']
        >>> sorted(study.export()), study.model_path("defaults").name
        (['arms', 'certificate', 'format', 'spec', 'version'], 'model.safetensors')
        >>> len(study.certificate()["charges"])
        2
        >>> study.sealed_trials("selection")
        Traceback (most recent call last):
            ...
        privtune.study.seal.SealedTrialsError: The trials of study 'shown' are sealed: ...
        >>> study.finished, [release.arm for release in study.run()]  # again: nothing runs or is spent
        (True, ['defaults', 'selection'])
    """

    def __init__(self, name: str, storage: str | Path, *, curator: bool = False) -> None:
        self.name = name
        self.storage = str(storage)
        self._life = Life(name, self.storage)
        self.spec: StudySpec = self._life.spec
        self.folder: Path = self._life.folder
        self.observer: Observer = Observer()
        self._tasks: dict[str, Task] = {}
        in_environment = os.environ.get("PRIVTUNE_CURATOR", "") not in ("", "0")
        self._curator = curator or in_environment

    if not TYPE_CHECKING:  # a type checker goes on refusing what is not there
        __getattr__ = answer

    def __repr__(self) -> str:
        budget = self.spec.budget
        arms = ", ".join(self.arms) or "no arm yet"
        return (
            f"<Study {self.name!r} of {self.spec.task_name}: {arms}; budget "
            f"{budget.name!r} (ε = {budget.epsilon:g}, δ = {budget.delta:g}), "
            f"{self._life.storage.safe_url}>"
        )

    @classmethod
    def create(cls, spec: StudySpec, storage: str | Path, *, force: bool = False) -> Study:
        """Plan a study and store it, with its budget if that is new; neither data nor budget is used up.

        Args:
            spec: The study.
            storage: The database of studies and budgets: its URL, or the path of a SQLite file.
            force: Whether to plan although δ is above one over the number of protected records.

        Returns:
            The study, planned.

        Raises:
            PrivTuneError: If the name is taken, the budget exists with other terms, or an arm
                cannot be planned.
            DatasetMismatchError: If the budget protects another dataset.

        Example:
            >>> spec = StudySpec.parse(
            ...     {"name": "open", "budget": {"name": "clinic", "epsilon": 4.0, "delta": 1e-5}}
            ... )
            >>> study = Study.create(spec, "sqlite:///privtune.db")
            >>> study.remaining()
            4.0
            >>> study.delete()
            []
            >>> study.close()
        """
        with Ledger(storage) as ledger:
            store = StudyStore(ledger.log.storage)
            store.check_new(spec.name)  # here too: the planning takes seconds
            study_plan = plan_study(spec, force=force) if spec.arms else None
            _warn_of_dataset(ledger, spec, study_plan)
            plans: list[AnyPlan] = []
            if study_plan is not None:
                plans = [*study_plan.stages, *study_plan.plans]
                for sentence in twins_words(study_plan.plans):
                    _log.warning(sentence)
                spec = with_chosen_numbers(spec, study_plan.plans)
            if spec.budget.name in {budget.name for budget in ledger.budgets()}:
                _check_terms(ledger, spec)
            else:
                ledger.create_budget(spec.budget.to_budget())
            row = StudyRow(
                spec.name,
                uuid.uuid4().hex,
                spec.model_dump(mode="json"),
                artifact_root(storage),
                ledger.log.storage.identity().uid,
            )
            arms = [new_arm(spec, row, plan) for plan in plans]
            store.create(row, arms)
        return cls(spec.name, storage)

    def run(
        self,
        observer: Observer | None = None,
        *,
        executor: str | Mapping[str, object] | None = None,
        n_jobs: int = 1,
        device: str | None = None,
        stack: int | Literal["auto"] | None = None,
        non_private: bool = False,
        force: bool = False,
        on_check: Callable[[RecordCheck], None] | None = None,
    ) -> tuple[Release, ...]:
        """Run every arm that has not been released, and return all releases.

        Of a study that is :attr:`finished` it returns the releases, runs nothing and spends nothing.
        All arms are charged in one transaction before the first of them is trained. Before that, the
        records are held against what is declared of them, for the curator alone: see ``force``.

        Args:
            observer: Hears of the progress; the study's own :attr:`observer` unless given.
            executor: Who trains the rounds of selections: ``inline`` (this process), ``processes``
                (spawned here), ``external`` (``privtune worker``, on any machine that reaches the
                storage), ``ray`` or ``slurm`` (with options: ``{"type": "ray", "gpus": 0.5}``); what
                the spec or ``n_jobs`` says unless given. It changes no result.
            n_jobs: Worker processes for the rounds of selections; 1 trains whole stacks here.
            device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``; what the spec says unless given.
                Processes on CUDA take the GPUs in turn, one each, unless ``gpus`` of the executor
                says more or a fraction.
            stack: How many candidates to train in one pass, or ``"auto"``; what the spec says
                unless given. It changes no result.
            non_private: Whether arms without any guarantee may run.
            force: Whether to charge and run although most records cannot be used, or are far fewer than
                declared.
            on_check: Hears how many records cannot be used, and why; called for the curator alone.

        Returns:
            One release an arm, in the spec's order.

        Raises:
            BudgetExceededError: If the arms do not fit what is left. Nothing is spent.
            NonPrivateError: If an arm has no guarantee and ``non_private`` does not allow that.
            UnusableRecordsError: If more than half of a split cannot be used, or half of the declared
                records are not there. Nothing is spent.
        """
        from privtune.execution.executor import Executor
        from privtune.study.program import check_finished
        from privtune.study.run import run_study

        workers = Executor.of(executor or self.spec.executor, n_jobs)
        listener = on_check or _tell_nobody
        if self._life.outlast(lambda: self.finished):
            self._life.outlast(partial(check_finished, self._life))
            return self._life.outlast(self.releases)
        releases = run_study(
            self._life,
            observer or self.observer,
            executor=workers,
            compute=self.spec.placement.given(device, stack),
            non_private=non_private,
            force=force,
            show_check=listener if self._curator else None,
        )
        return self._life.outlast(lambda: tuple(map(self._with_model, releases)))

    def place(self, fields: Mapping[str, object]) -> None:
        """Set the device, stack or executor of an open study's next arms, for this object alone.

        Args:
            fields: Of a spec: ``device``, ``stack``, ``executor``. They change no result.

        Example:
            >>> study.place({"stack": 4})
        """
        self._life.spec = self._life.spec.model_copy(update=fields)

    def check_records(self) -> RecordCheck:
        """Return how many records of each split cannot be used, and why, for the curator alone.

        Returns:
            What was found, by split and column.

        Raises:
            SealedTrialsError: Outside of the trust boundary.

        Example:
            >>> from privtune import load_study
            >>> curated = load_study(study.name, storage=study.storage, curator=True)
            >>> curated.check_records().reason
            ''
        """
        self._check_curator()
        return self._life.spec.load_task().check_records()

    @answers
    def optimize(
        self,
        task: Task,
        *,
        strategy: Strategy,
        epochs: float | Literal["auto"] | None = None,
        expected_batch_size: int | Literal["auto"] | None = None,
        report: Mapping[str, object] | str | None = "auto",
        space: Mapping[str, Mapping[str, object]] | None = None,
        epsilon: float | None = None,
        arm: str | None = None,
        sampler: object | None = None,
        pruner: object | None = None,
        n_jobs: int = 1,
        timeout: float | None = None,
        callbacks: Sequence[Callable[[Study, Release], None]] = (),
        observer: Observer | None = None,
        show_progress_bar: bool = False,
        force: bool = False,
    ) -> Release:
        """Run one arm whose candidates ``build`` declares and the engine trains; return its release.

        Of an arm that has been released it returns the release, runs nothing and spends nothing. Before
        anything is charged, ``build`` is called several times, a candidate is trained for two steps on
        made-up records and scored, and the records are held against what is declared of them.

        Where trials are trained, and where noise comes from, is the study's: ``executor`` and ``noise`` of
        :func:`privtune.create_study`.

        Args:
            task: What is trained and scored, on which records: see :func:`privtune.make_task`.
            strategy: How to choose, as in ``privtune.strategies``.
            epochs: Expected passes over the training records; ``auto``: planning chooses them, for what
                ``compute`` of :func:`privtune.create_study` says that one training may spend.
            expected_batch_size: Expected records in one Poisson sample; ``auto``: planning chooses it.
            report: One score of the released model on the test split: a metric's name, or ``metric``,
                ``epsilon_share``, .... ``auto`` is what the study says; unless it says anything, planning
                takes the task's score or a metric that suits the target, and leaves the score out, with a
                warning, where its interval would be too wide. It costs a private split's records alone,
                and the training at most 0.1% of ε (2% under replace-one). None for no score.
            space: What is searched beside the suggestions of ``build``, by name, as in a spec:
                ``{"expected_batch_size": {"type": "categorical", "choices": [64, 256]}}``, ``epochs`` or
                ``noise_multiplier``, with the strategy's ``guarantee="common"``. Values of other names
                are those that ``build`` gets when it asks for them.
            epsilon: What the arm may cost; the whole budget, if nothing was charged to it yet.
            arm: Name of the arm; the strategy's own unless given.
            sampler: Optuna's sampler for ``everything``, or one of your own that declares that its
                draws are independent.
            pruner: Optuna's pruner, for ``everything`` and ``subset-search`` with a public validation split.
            n_jobs: How many workers at once: the same trials as with one. In spawned processes if
                they can import functions and data, else in threads.
            timeout: Seconds above 0 after which no trial begins; the arm stays open and can go on.
            callbacks: Called with the study and the release; never with a sealed trial.
            observer: Hears when the arm begins, fails and is released, as
                ``privtune.tracking.mlflow.MlflowObserver``; the study's own unless given.
            show_progress_bar: Show that the arm runs; of a sealed arm nothing else is shown.
            force: Whether to charge and run although most records cannot be used, a score will say
                nothing, or δ is above one over the number of protected records.

        Returns:
            The release: ``model``, ``params``, ``score``, ``guarantee``.

        Raises:
            BudgetExceededError: If it does not fit what is left. Nothing is spent.
            DependentTrialsError: If ``build`` makes a trial of a sealed selection depend on others.
            UnusableRecordsError: If most records cannot be used. Nothing is spent.

        **Guarantee**: what is released is covered by the arm's event: the engine samples, clips and adds
        noise, and ``build`` sees no data.

        Example:
            >>> import torch
            >>> from torch.nn.functional import cross_entropy
            >>> import privtune
            >>> def build(trial):
            ...     model = torch.nn.Linear(2, 2)
            ...     rate = trial.suggest_float("rate", 0.1, 9)
            ...     return privtune.Candidate(model, torch.optim.SGD(model.parameters(), lr=rate))
            >>> def loss(model, x, y):  # of one record
            ...     return cross_entropy(model(x), y, reduction="none")
            >>> x = torch.randn(200, 2)
            >>> y = (x[:, 0] > 0).long()
            >>> split = {"train": 150, "validation": 50}
            >>> task = privtune.make_task(build, loss=loss, data=(x, y), split=split)
            >>> study = privtune.create_study("own", budget=privtune.Budget(8.0, 1e-5, name="own"))
            >>> release = study.optimize(
            ...     task,
            ...     strategy=privtune.strategies.Fixed(parameters={"rate": 2.0}),
            ...     epochs=1,
            ...     expected_batch_size=75,
            ... )
            >>> release.params, round(release.guarantee.epsilon, 2), release.model(x).shape
            ({'rate': 2.0}, 8.0, torch.Size([200, 2]))
        """
        from privtune.study.run import EngineOptions, optimize

        options = EngineOptions(
            strategy=strategy,
            epochs=epochs,
            expected_batch_size=expected_batch_size,
            report=report,
            space=space,
            epsilon=epsilon,
            arm=arm,
            sampler=sampler,
            pruner=pruner,
            n_jobs=n_jobs,
            timeout=timeout,
            force=force,
        )
        audience = self._audience(callbacks, observer, show_progress_bar=show_progress_bar)
        release = optimize(self._life, task, options, audience)
        self._tasks[release.arm] = task
        return self._life.outlast(partial(self._with_model, release))

    @answers
    def optimize_declared(
        self,
        objective: Callable[[DeclaredTrial], object],
        *,
        mechanism: Mechanism,
        strategy: Strategy,
        score: str | Score | None = None,
        split: Mapping[str, int] | None = None,
        validation: object = None,
        public: Mapping[str, object] | None = None,
        epsilon: float | None = None,
        arm: str | None = None,
        sampler: object | None = None,
        timeout: float | None = None,
        callbacks: Sequence[Callable[[Study, Release], None]] = (),
        observer: Observer | None = None,
        show_progress_bar: bool = False,
        force: bool = False,
    ) -> Release:
        """Run one arm whose candidates another library trains, under a mechanism that you declare.

        Of an arm that has been released it returns the release, runs nothing and spends nothing.

        Args:
            objective: Takes a :class:`privtune.study.DeclaredTrial`, trains by the other library, and
                returns ``trial.result(model, score=...)``.
            mechanism: What its training releases, and who declares that: see :class:`privtune.Mechanism`.
            strategy: How to choose, as in ``privtune.strategies``.
            score: Name of a metric, or a :class:`privtune.Score`; ``accuracy`` unless given. It is what
                ``trial.score`` computes.
            split: The expected number of validation records, ``{"validation": 200}``; as many as there are
                unless given.
            validation: The private records that candidates are scored on, as in :func:`privtune.make_task`.
            public: In their place records that everybody may see, ``{"validation": (x, y)}``.
            epsilon: What the arm may cost; the whole budget, if nothing was charged to it yet.
            arm: Name of the arm; the strategy's own unless given.
            sampler: Optuna's sampler for ``everything``, or one of your own that declares that its
                draws are independent.
            timeout: Seconds above 0 after which no trial begins; the arm stays open and can go on.
            callbacks: Called with the study and the release; never with a sealed trial.
            observer: Hears when the arm begins, fails and is released; the study's own unless given.
            show_progress_bar: Show that the arm runs; of a sealed arm nothing else is shown.
            force: Whether to charge although δ is above one over the number of protected records.

        Returns:
            The release: ``params``, ``score``, ``guarantee``; ``state_dict()`` has the weights.

        Raises:
            BudgetExceededError: If it does not fit what is left. Nothing is spent.
            DeclaredError: If a rehearsal finds that the objective departs from what is declared.
            ArmStoppedError: If it fails or departs after the charge, which stays: the same call goes on
                once it is mended.

        **Guarantee**: that of the declared event, if it is true of the training; certificates name who
        declares it.

        Example:
            >>> import privtune
            >>> event = privtune.accounting.Gaussian(1.1)
            >>> mechanism = privtune.Mechanism(event, declared_by="the clinic", records=1000)
            >>> def objective(trial):  # one release of a noised mean
            ...     return trial.result({"mean": train(trial.plan.noise_multiplier)})
            >>> release = study.optimize_declared(
            ...     objective, mechanism=mechanism, strategy=privtune.strategies.Fixed()
            ... )  # doctest: +SKIP
        """
        from privtune.study.run import DeclaredOptions, optimize_declared

        options = DeclaredOptions(
            mechanism=mechanism,
            strategy=strategy,
            score=score,
            split=split,
            validation=validation,
            public=public,
            epsilon=epsilon,
            arm=arm,
            sampler=sampler,
            timeout=timeout,
            force=force,
        )
        audience = self._audience(callbacks, observer, show_progress_bar=show_progress_bar)
        return optimize_declared(self._life, objective, options, audience)

    def _audience(
        self,
        callbacks: Sequence[Callable[[Study, Release], None]],
        observer: Observer | None,
        *,
        show_progress_bar: bool,
    ) -> Audience:
        """Return the observer, callbacks and progress bar of an arm; refuse uncallable callbacks."""
        from privtune.study.run import Audience

        if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
            raise InvalidInputError(
                "callbacks", callbacks, "must be a list of functions of the study and the release"
            )

        def announce(release: Release) -> None:
            for callback in callbacks:
                callback(self, release)

        return Audience(
            observer=observer or self.observer,
            announce=announce,
            show_progress_bar=show_progress_bar,
            show_check=_tell_nobody if self._curator else None,
        )

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Plans of the arms, in order."""
        return tuple(self._life.plans().values())

    @property
    def stages(self) -> tuple[StageStatus, ...]:
        """The state and release of each stage that runs before the arms, in order."""
        return self._life.stage_statuses()

    @property
    def arms(self) -> tuple[str, ...]:
        """Names of the arms, in order."""
        return tuple(self._life.plans())

    @property
    def finished(self) -> bool:
        """Whether every arm that the spec declares has been released; always False for an open study."""
        return self._life.finished()

    @property
    def trials(self) -> list[optuna.trial.FrozenTrial]:
        """The Optuna trials of all arms, which only the curator may read if an arm is sealed.

        Of arms that pay for all of their trials, those that are released; nothing is sealed there.

        Raises:
            SealedTrialsError: If an arm is sealed, outside of the trust boundary.
        """
        if any(plan.is_sealed for plan in self.plans):
            self._check_curator()
        trials: list[optuna.trial.FrozenTrial] = []
        if self._curator:
            for plan in self.plans:
                trials += self._life.kept_trials(plan)
            return trials
        for release in self.releases():
            if release.trials:
                trials += release.to_optuna().trials
        return trials

    @property
    def best_params(self) -> dict[str, Any]:
        """Hyperparameters of the release, where exactly one arm has been released.

        Raises:
            PrivTuneError: If there is no release, or several.
        """
        release = self._only_release()
        return dict(release.params)

    @property
    def best_value(self) -> float:
        """Score of the release, noised or public, where exactly one arm has been released."""
        release = self._only_release()
        if release.score is None:
            raise PrivTuneError(
                f"Arm {release.arm!r} of study {self.name!r} chose by no score, so it has no best value; "
                "release.utility has what its model reaches on the test split."
            )
        return release.score

    def _only_release(self) -> Release:
        """Return the study's single release; refuse a study with none or with several."""
        releases = self.releases()
        if len(releases) == 1:
            return releases[0]
        if not self.arms:
            raise PrivTuneError(
                f"Study {self.name!r} has no arm yet, and so no best one: study.optimize runs one."
            )
        released_arms = ", ".join(release.arm for release in releases) or "none"
        raise PrivTuneError(
            f"Study {self.name!r} has the arms {', '.join(self.arms)}, of which {released_arms} are "
            "released, and the best of several is not known: study.compare() shows them side by side, "
            "study.release(arm) has the parameters and the score of one."
        )

    def _check_curator(self) -> None:
        """Refuse sealed trials to a caller who is not marked as the curator."""
        if not self._curator:
            raise SealedTrialsError(
                f"The trials of study {self.name!r} are sealed: whoever sees them is inside the "
                "trust boundary. If you are, set PRIVTUNE_CURATOR=1 or load the study with "
                "curator=True; else ask for study.releases()."
            )

    def compare(self) -> pandas.DataFrame:
        """Return a data frame with one row for each arm, made of public facts and releases.

        Returns:
            The index is the arm. The first columns are ``epsilon`` and what was reached, with the ends
            of its interval: pandas leaves out the middle of what a screen is too narrow for. The others
            are the facts of :data:`privtune.study.arm_row.COLUMNS` (``score`` is higher for better
            ones: a loss is negated; gradient evaluations and the seconds of private arms are
            expectations), each score such as ``test_accuracy`` with the ends of its 95% interval as
            ``NAME_low`` and ``NAME_high``, of repeated arms ``NAME_mean`` with its standard error
            ``NAME_error`` and the number of values ``NAME_n``, and each released hyperparameter as
            ``params.NAME``.
        """
        arms = [ArmRow.of(status) for status in self.status()]
        rows = [arm.to_flat() for arm in arms]
        frames = find_extra("pandas", extra="ui", what="A study's table")
        columns = answer_first(arms) if arms else ["arm"]
        table: pandas.DataFrame = frames.DataFrame(rows, columns=columns).set_index("arm")
        return table

    def export(self) -> dict[str, Any]:
        """Return all that may leave the trust boundary, JSON-ready: plans, releases, certificate."""
        document: dict[str, Any] = {
            "format": "privtune-study",
            "version": 1,
            "spec": self.spec.model_dump(mode="json"),
            "arms": [self._exported_arm(status) for status in self.status()],
        }
        stages = [stage.to_dict() for stage in self.stages]
        if stages:
            document["stages"] = stages
        document["certificate"] = self.certificate()
        return document

    def _exported_arm(self, status: ArmStatus) -> dict[str, Any]:
        """Return the entry of an arm in an export: plan, state, guarantee, and release if there is one."""
        release = status.release
        return {
            "plan": status.plan.to_dict(),
            "state": status.state,
            "guarantee": status.guarantee.to_dict(),
            "release": None if release is None else self._exported_release(release),
        }

    def _exported_release(self, release: Release) -> dict[str, Any]:
        """Return a release, JSON-ready, with its model's path within the study's folder."""
        model = None
        if not release.is_nothing:
            path = self.model_path(release.arm)
            model = path.relative_to(self.folder).as_posix()
        score = release.score
        if score is not None and not math.isfinite(score):
            score = None  # JSON knows no infinity
        return {
            "params": json_ready(release.params),
            "score": score,
            "estimates": {name: estimate.to_shown() for name, estimate in release.scores.items()},
            "repetitions": json_ready([asdict(run) for run in release.repetitions]),
            "note": release.note,
            "model": model,
        }

    def delete(self, *, leave_objects: bool = False, leave_files: bool = False) -> list[Path]:
        """Delete the study, as :func:`delete_study` does.

        Args:
            leave_objects: Leave what is in an object store that is gone for good.
            leave_files: Forget folders of files that are gone for good.

        Returns:
            The study's folders that stay, since they hold files of others.
        """
        return self._life.delete(leave_objects=leave_objects, leave_files=leave_files)

    def status(self) -> tuple[ArmStatus, ...]:
        """Return the state of every arm, read from the storage alone."""
        return self._life.statuses()

    def releases(self) -> tuple[Release, ...]:
        """Return the releases there are, in the spec's order."""
        releases = [status.release for status in self.status()]
        return tuple(self._with_model(release) for release in releases if release is not None)

    def _with_model(self, release: Release) -> Release:
        """Return a copy of a release that can build its model and serve it on raw records."""

        def task() -> Task:
            task = self._tasks.get(release.arm)
            if task is not None:
                return task
            if self.spec.task is None:
                raise PrivTuneError(
                    f"Only the program that ran arm {release.arm!r} can make its model: run it again, and "
                    "study.optimize returns the release, at no charge (create_study(load_if_exists=True)). "
                    "A model that an objective trained takes load_state_dict(release.state_dict())."
                )
            return self._life.task()

        def make() -> torch.nn.Module:
            from privtune.study.build import model_for

            plan = self._life.plans()[release.arm]
            training = plan.training_of(release.params)
            return model_for(task(), training, release.params)

        def serve(model: torch.nn.Module) -> ServedModel:
            return task().served(model, temperature=release.temperature)

        return replace(release, make=make, serve=serve)

    def release(self, arm: str) -> Release:
        """Return the release of the arm of the name ``arm``.

        Raises:
            PrivTuneError: If there is no such arm, or it has not been released.
        """
        releases = {release.arm: release for release in self.releases()}
        if arm in releases:
            return releases[arm]
        if arm in self.arms:
            command = f"privtune study run {self.name}"
            if self.spec.task is None:
                command = "study.optimize in Python"
            raise PrivTuneError(
                f"Arm {arm!r} of study {self.name!r} is not released yet: {command} trains and releases it."
            )
        if not self.arms:
            raise PrivTuneError(
                f"Study {self.name!r} has no arm {arm!r}, and no other: study.optimize runs one."
            )
        states = []
        for name in self.arms:
            state = "released" if name in releases else "not released"
            states.append(f"{name} ({state})")
        raise PrivTuneError(
            f"Study {self.name!r} has no arm {arm!r}; its arms are {', '.join(states)}. "
            f"{did_you_mean(arm, self.arms)}".rstrip()
        )

    def sealed_trials(self, arm: str) -> Sequence[Mapping[str, Any]]:
        """Return all trials of an arm with their scores, for the curator alone.

        Args:
            arm: Name of the arm.

        Returns:
            For each trial its ``number``, ``state``, ``params`` and ``score``.

        Raises:
            SealedTrialsError: Outside of the trust boundary.
        """
        self._check_curator()
        plan = self._life.plans().get(arm)
        if plan is None:
            return []
        trials = self._life.kept_trials(plan)
        return records_of(trials)

    def failures(self, arm: str) -> Sequence[Mapping[str, Any]]:
        """Return the errors that stopped ``arm``, with time and traceback, for the curator alone.

        Raises:
            SealedTrialsError: Outside of the trust boundary.

        Example:
            >>> from privtune import load_study
            >>> load_study(study.name, storage=study.storage, curator=True).failures("selection")
            []
        """
        self._check_curator()
        return self._life.failures(arm)

    def model_path(self, arm: str) -> Path:
        """Return the path of the safetensors file of the model that ``arm`` released."""
        return self._life.write(arm, MODEL)

    @property
    def dataset(self) -> str:
        """The name of the dataset that the budget protects; empty until a spec or a charge names it."""
        return self._life.ledger.dataset(self.spec.budget.name)

    def spent(self) -> Guarantee:
        """Return the guarantee that all charges of the budget add up to, those of other studies included."""
        return self._life.ledger.spent(self.spec.budget.name)

    def remaining(self) -> float:
        """Return the ε that is left of the budget."""
        return self._life.ledger.remaining(self.spec.budget.name)

    def certificate(self) -> dict[str, Any]:
        """Return the certificate of the budget, JSON-ready.

        Raises:
            LedgerCorruptedError: If its log does not verify.
        """
        return self._life.certificate()

    def close(self) -> None:
        """Close the study's connections to its database."""
        self._life.close()


def _tell_nobody(_: RecordCheck) -> None:
    """Ignore a report on the records; passed to a curator's run, which then names why it stops."""


def delete_study(
    name: str, storage: str | Path, *, leave_objects: bool = False, leave_files: bool = False
) -> list[Path]:
    """Delete a study, its trials and its models, and only files that it made.

    Its charges are the ledger's and stay: what was released cannot be taken back. What stops a deletion (a
    kill, an object store that cannot be reached) leaves the study there, so that another call completes it.

    Args:
        name: Name of the study.
        storage: The database of studies and budgets: its URL, or the path of a SQLite file.
        leave_objects: Leave what is in an object store that is gone for good.
        leave_files: Forget folders of files that are gone for good.

    Returns:
        The study's folders that stay, since they hold files of others.

    Raises:
        StudyNotFoundError: If there is no such study.
        StoreCopyError: If the database is a copy: the files are the original's.
        FilesMissingError: If a folder that the study put files in is not found from here; the study
            stays, and what was found is deleted.
        PrivTuneError: If it runs at this moment, or something cannot be deleted now.

    Example:
        >>> import privtune
        >>> study = privtune.create_study("old", budget=privtune.Budget(4.0, 1e-5, name="clinic"))
        >>> delete_study("old", study.storage)
        []
        >>> from privtune.study import study_names
        >>> study_names(study.storage)
        []
    """
    with closing(Life(name, str(storage))) as life:
        return life.delete(leave_objects=leave_objects, leave_files=leave_files)


def check_studies(storage: str) -> Iterator[Check]:
    """Yield checks on deletions that stopped half way and on folders that belong to no study."""
    path = database_path(checked_url(storage))
    if path is not None and not path.exists():
        return
    with closing(Storage(storage, patience=5)) as database:
        with database.read() as connection:
            version = schema_version(connection)
        if version != HEAD:
            return
        store = StudyStore(database)
        rows = [store.study(name) for name in store.uids()]
        half_deleted = store.deleting()
    for name in half_deleted:
        says = f"The deletion of study {name!r} is not complete. Run: privtune study delete {name}"
        yield Check("deletion", "warn", says)
    for folder in _folders_of_nobody(storage, rows):
        says = f"{folder} is of a study that this storage does not have: remove it by hand, unless "
        yield Check("deletion", "warn", f"{says}another storage keeps its files there, too.")
    if not half_deleted:
        yield Check("deletion", "ok", "No deletion of a study was stopped half way.")


def _folders_of_nobody(storage: str, rows: Sequence[StudyRow]) -> Iterator[Path]:
    """Yield study folders on disk whose lists name no study of this storage."""
    owners = {row.owner.id for row in rows}
    roots = dict.fromkeys([artifact_root(storage), *(row.root for row in rows)])
    for root in roots:
        for path in sorted(root.glob(f"*/{OwnFolder.LIST}")):
            folder = path.parent
            folder_owners = {owner for owner, _ in OwnFolder.listed(folder)}
            if not owners & folder_owners:
                yield folder


def _warn_of_dataset(ledger: Ledger, spec: StudySpec, study_plan: StudyPlan | None) -> None:
    """Warn where another budget protects the same dataset, since their guarantees add up.

    Raises:
        DatasetMismatchError: If the budget protects another dataset.
    """
    if study_plan is not None:
        dataset = spec.dataset_of(study_plan.plans[-1].dataset)
    elif spec.budget.dataset:
        dataset = spec.dataset_of(None)
    else:
        return  # an open study: its arms say what their data is
    warning = ledger.check_dataset(spec.budget.name, dataset)
    if not warning:
        return
    is_public = study_plan is not None and spec.load_task().benchmark
    if not is_public:
        _log.warning(warning)


def _check_terms(ledger: Ledger, spec: StudySpec) -> None:
    """Refuse a spec whose budget exists with another ε, δ, adjacency or unit."""
    budget = ledger.budget(spec.budget.name)
    terms = spec.budget
    is_same = (
        budget.epsilon == terms.epsilon
        and budget.delta == terms.delta
        and budget.adjacency == terms.adjacency
        and budget.unit == terms.unit
    )
    if is_same:
        return
    raise PrivTuneError(
        f"Budget {budget.name!r} exists with epsilon = {budget.epsilon}, delta = "
        f"{budget.delta}, {budget.adjacency} adjacency, unit {budget.unit}, and cannot be changed; "
        f"the spec of study {spec.name!r} says epsilon = {terms.epsilon}, delta = {terms.delta}, "
        f"{terms.adjacency}, unit {terms.unit}. Write the budget's own terms, and the study's share as "
        "'epsilon' of the study."
    )
