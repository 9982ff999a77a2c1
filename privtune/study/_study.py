"""A study: create, load, run, resume, compare, export, delete."""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
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
from privtune.numbers import json_ready
from privtune.strategies import Plan, Release
from privtune.strategies.spread import Spread, values_of
from privtune.study._familiar import answer, answers
from privtune.study.lifecycle import Life, new_arm
from privtune.study.observer import ArmStatus, Observer, StageStatus
from privtune.study.planning import plan_study
from privtune.study.release import MODEL
from privtune.study.rows import AnyPlan, StudyRow, StudyStore
from privtune.study.seal import SealedTrialsError
from privtune.study.spec import StudySpec

if TYPE_CHECKING:
    import optuna
    import pandas
    import torch

    from privtune.strategies import Strategy
    from privtune.study.declared import DeclaredTrial, Mechanism
    from privtune.tasks import Score, Task
    from privtune.tasks._task import Build, RecordLoss
    from privtune.tasks._usable import RecordCheck
    from privtune.training.mechanism.schedule import NoiseOptions


class Study:
    """One task, one budget, several arms; each charged before it touches data.

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
        ['strategy', 'state', 'epsilon', 'delta']
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
        self._curator = curator or os.environ.get("PRIVTUNE_CURATOR", "") not in ("", "0")

    if not TYPE_CHECKING:  # a type checker goes on refusing what is not there
        __getattr__ = answer

    def __repr__(self) -> str:
        budget, arms = self.spec.budget, ", ".join(self.arms) or "no arm yet"
        return (
            f"<Study {self.name!r} of {self.spec.task_name}: {arms}; budget "
            f"{budget.name!r} (ε = {budget.epsilon:g}, δ = {budget.delta:g}), "
            f"{self._life.storage.safe_url}>"
        )

    @classmethod
    def create(cls, spec: StudySpec, storage: str | Path, *, anyway: bool = False) -> Study:
        """Plan the study, create its budget if needed, and store it. Touches no data, spends nothing.

        Args:
            spec: The study.
            storage: The database of studies and budgets: its URL, or the path of a SQLite file.
            anyway: Whether to plan although δ is above one over the number of protected records.

        Returns:
            The study, planned.

        Raises:
            PrivTuneError: If the name is taken, the budget exists with other terms, or an arm
                cannot be planned.

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
            planned = plan_study(spec, anyway=anyway) if spec.arms else None
            plans: list[AnyPlan] = [] if planned is None else [*planned.stages, *planned.plans]
            if spec.budget.name in {budget.name for budget in ledger.budgets()}:
                _check_terms(ledger, spec)
            else:
                ledger.create_budget(spec.budget.to_budget())
            document = spec.model_dump(mode="json")
            row = StudyRow(spec.name, uuid.uuid4().hex, document, artifact_root(storage))
            store.create(row, [new_arm(spec, row.uid, plan) for plan in plans])
        return cls(spec.name, storage)

    def run(
        self,
        observer: Observer | None = None,
        *,
        executor: str | Mapping[str, Any] | None = None,
        n_jobs: int = 1,
        device: str | None = None,
        stack: int | Literal["auto"] | None = None,
        non_private: bool = False,
        anyway: bool = False,
        told: Callable[[RecordCheck], None] | None = None,
    ) -> tuple[Release, ...]:
        """Run every arm that has not been released, and return all releases.

        Of a study that is :attr:`finished` it returns the releases, runs nothing and spends nothing.
        All arms are charged in one transaction before the first of them is trained. Before that, the
        records are held against what is declared of them, for the curator alone: see ``anyway``.

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
            anyway: Whether to charge and run although most records cannot be used, or are far fewer than
                declared.
            told: Hears how many records cannot be used, and why; called for the curator alone.

        Returns:
            One release an arm, in the spec's order.

        Raises:
            BudgetExceededError: If the arms do not fit what is left. Nothing is spent.
            NonPrivateError: If an arm has no guarantee and ``non_private`` does not allow that.
            UnusableRecordsError: If more than half of a split cannot be used, or half of the declared
                records are not there. Nothing is spent.
        """
        from privtune.execution.executor import Executor
        from privtune.study.run import run_study

        chosen = Executor.of(executor or self.spec.executor, n_jobs)
        if self.finished:
            return self.releases()
        releases = run_study(
            self._life,
            observer or self.observer,
            executor=chosen,
            compute=self.spec.compute.given(device, stack),
            non_private=non_private,
            anyway=anyway,
            told=(told or (lambda _: None)) if self._curator else None,
        )
        return tuple(map(self._with_model, releases))

    def check_records(self) -> RecordCheck:
        """Read the records, and return how many cannot be used, and why. For the curator alone.

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
        build: Build | Task | str | Callable[[DeclaredTrial], Any],
        *,
        strategy: Strategy,
        loss: RecordLoss | str | None = None,
        score: str | Score | None = None,
        data: Any = None,
        split: Mapping[str, int] | None = None,
        train: Any = None,
        validation: Any = None,
        test: Any = None,
        public: Mapping[str, Any] | None = None,
        benchmark: bool | None = None,
        classes: int | None = None,
        target_range: tuple[float, float] | None = None,
        rarest_share: float | None = None,
        pad_to: int | None = None,
        columns: Mapping[str, Any] | None = None,
        precision: str = "float32",
        epochs: float | None = None,
        expected_batch_size: int | None = None,
        space: Mapping[str, Mapping[str, Any]] | None = None,
        mechanism: Mechanism | None = None,
        epsilon: float | None = None,
        arm: str | None = None,
        sampler: object | None = None,
        pruner: object | None = None,
        executor: str | Mapping[str, Any] | None = None,
        n_jobs: int = 1,
        timeout: float | None = None,
        callbacks: Sequence[Callable[[Study, Release], None]] = (),
        observer: Observer | None = None,
        show_progress_bar: bool = False,
        noise: NoiseOptions | str | Mapping[str, Any] | None = None,
        anyway: bool = False,
    ) -> Release:
        """Run one arm: ``build`` declares the candidates, the engine trains them; release the result.

        Of an arm that has been released it returns the release, runs nothing and spends nothing. Before
        anything is charged, ``build`` is called several times, a candidate is trained for two steps on
        made-up records and scored, and the records are held against what is declared of them.

        Args:
            build: Takes a :class:`privtune.Trial`, suggests hyperparameters, and returns a
                :class:`privtune.Candidate`. It receives no data. Or a ``privtune.Task`` with a ``build``,
                which says all about loss, score and data; or, with ``mechanism``, an objective that
                trains by another library.
            strategy: How to choose, as in ``privtune.strategies``.
            loss: ``(model, *record) -> [1]``: the loss of one record, whose tensors have a leading axis
                of 1. A dict is passed whole: ``(model, record)``.
            score: Name of a metric, or a :class:`privtune.Score` of one or of a function like ``loss``;
                ``accuracy`` unless given. For strategies that choose.
            data: The private records: tensors or arrays with records along the first axis, as a pair,
                tuple or dict of them; a map-style ``Dataset``; a ``DataFrame`` with ``columns``; a data
                set of Hugging Face's.
            split: Expected sizes of ``train``, ``validation`` and ``test``: the split of a record is a keyed
                hash of its content, so that a record more or less moves no other.
            train: With fixed splits, the training records, in place of ``data`` and ``split``.
            validation: Likewise, the validation records.
            test: Likewise, the test records.
            public: Records that everybody may see, by split: ``{"test": (x, y)}``. Their scores are
                exact and free.
            benchmark: Whether all records are public, as of a benchmark or a generator: repetitions of the
                arm are not charged then.
            classes: How many classes there are; as many as the model tells apart unless given.
            target_range: Of a regression, the public range of its targets.
            pad_to: Length that ragged records are padded or cut to.
            columns: Of a ``DataFrame``: ``{"inputs": [...], "target": ...}``.
            precision: Numbers of the forward and the backward pass: ``float32`` or ``bfloat16``.
            epochs: Expected passes over the training records.
            expected_batch_size: Expected records in one Poisson sample.
            space: What is searched beside the suggestions of ``build``, by name, as in a spec:
                ``{"expected_batch_size": {"type": "categorical", "choices": [64, 256]}}``, ``epochs`` or
                ``noise_multiplier``, with the strategy's ``guarantee="common"``. Values of other names
                are those that ``build`` gets when it asks for them.
            mechanism: What the objective's training releases, declared: see
                :class:`privtune.Mechanism`.
            epsilon: What the arm may cost; the whole budget, if nothing was charged to it yet.
            arm: Name of the arm; the strategy's own unless given.
            sampler: Optuna's sampler for ``everything``, or one of your own that declares that its
                draws are independent.
            pruner: Optuna's pruner, for ``everything`` with a public validation split.
            executor: Who runs the trials of a selection, as in :meth:`run`; other machines need functions
                and data given as ``"package.module:function"``.
            n_jobs: How many workers at once: the same trials as with one. In spawned processes if
                they can import functions and data, else in threads.
            timeout: Seconds above 0 after which no trial begins; the arm stays open and can go on.
            callbacks: Called with the study and the release; never with a sealed trial.
            observer: Hears when the arm begins, fails and is released, as
                ``privtune.tracking.mlflow.MlflowObserver``; the study's own unless given.
            show_progress_bar: Show that the arm runs; of a sealed arm nothing else is shown.
            noise: ``"secure"``, or the fields of :class:`privtune.NoiseOptions`: where noise comes
                from and how it is treated; the study's own unless given.
            rarest_share: Share of the rarest class, as far as it is known without the records: by it the
                widths of intervals are foretold.
            anyway: Whether to charge and run although most records cannot be used, a score will say
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
            >>> x = torch.randn(200, 2)
            >>> y = (x[:, 0] > 0).long()
            >>> def build(trial):
            ...     model = torch.nn.Linear(2, 2)
            ...     rate = trial.suggest_float("rate", 0.1, 9)
            ...     return privtune.Candidate(model, torch.optim.SGD(model.parameters(), lr=rate))
            >>> def loss(model, x, y):  # of one record
            ...     return cross_entropy(model(x), y, reduction="none")
            >>> study = privtune.create_study("own", budget=privtune.Budget(8.0, 1e-5, name="own"))
            >>> release = study.optimize(
            ...     build,
            ...     loss=loss,
            ...     data=(x, y),
            ...     split={"train": 150, "validation": 50},
            ...     strategy=privtune.strategies.Fixed(parameters={"rate": 2.0}),
            ...     epochs=1,
            ...     expected_batch_size=75,
            ... )
            >>> release.params, round(release.guarantee.epsilon, 2), release.model(x).shape
            ({'rate': 2.0}, 8.0, torch.Size([200, 2]))
        """
        given = dict(locals())
        from privtune.study.run import optimize

        if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
            raise InvalidInputError(
                "callbacks", callbacks, "must be a list of functions of the study and the release"
            )

        def tell(release: Release) -> None:
            for callback in callbacks:
                callback(self, release)

        for name in ("self", "build", "callbacks"):
            del given[name]
        given["observer"] = observer or self.observer
        told = (lambda _: None) if self._curator else None
        release, task = optimize(self._life, build, tell=tell, told=told, **given)
        if task is not None:
            self._tasks[release.arm] = task
            release = self._with_model(release)
        return release

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Plans of the arms, in order."""
        return tuple(self._life.plans().values())

    @property
    def stages(self) -> tuple[StageStatus, ...]:
        """How far the stages before the arms are, in order, and what they released."""
        return self._life.stage_statuses()

    @property
    def arms(self) -> tuple[str, ...]:
        """Names of the arms, in order."""
        return tuple(self._life.plans())

    @property
    def finished(self) -> bool:
        """Whether every arm that the spec declares has been released; of an open study never."""
        return self._life.finished()

    @property
    def trials(self) -> list[optuna.trial.FrozenTrial]:
        """Every trial of every arm, as Optuna has them: for the curator alone if an arm is sealed.

        Of arms that pay for all of their trials, those that are released; nothing is sealed there.

        Raises:
            SealedTrialsError: If an arm is sealed, outside of the trust boundary.
        """
        if any(plan.is_sealed for plan in self.plans):
            self._check_curator()
        if self._curator:
            return [trial for arm in self.arms for trial in self._life.trials.of(arm)]
        paid = (release for release in self.releases() if release.trials)
        return [trial for release in paid for trial in release.to_optuna().trials]

    @property
    def best_params(self) -> dict[str, Any]:
        """Hyperparameters of the release, where exactly one arm has been released.

        Raises:
            PrivTuneError: If there is no release, or several.
        """
        return dict(self._only_release().params)

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
        """Return the release where there is exactly one."""
        there = self.releases()
        if len(there) == 1:
            return there[0]
        arms = ", ".join(release.arm for release in there) or "none"
        raise PrivTuneError(
            f"Study {self.name!r} has the arms {', '.join(self.arms) or '(none)'}, of which {arms} are "
            "released, and the best of several is not known: study.compare() shows them side by side, "
            "study.release(arm) has the parameters and the score of one."
        )

    def _check_curator(self) -> None:
        if not self._curator:
            raise SealedTrialsError(
                f"The trials of study {self.name!r} are sealed: whoever sees them is inside the "
                "trust boundary. If you are, set PRIVTUNE_CURATOR=1 or load the study with "
                "curator=True; else ask for study.releases()."
            )

    def compare(self) -> pandas.DataFrame:
        """Return one row an arm: public facts and releases only.

        Returns:
            Columns: ``strategy``, ``state``, ``epsilon``, ``delta``, ``bound``, ``sealed``, ``score``
            (higher is better; a loss is negated), ``gradient_evaluations`` (expected), ``wall_seconds``
            (expected), ``validation_accuracy`` or ``validation_loss`` and each utility, with the ends of
            their 95% intervals as ``NAME_low`` and ``NAME_high``, each released hyperparameter as
            ``params.NAME``, ``draws``, and of repeated arms each metric's ``NAME_mean`` with its standard
            error ``NAME_error``; the index is the arm.
        """
        rows: list[dict[str, Any]] = []
        for status in self.status():
            plan, release = status.plan, status.release
            row: dict[str, Any] = {
                "arm": plan.arm,
                "strategy": plan.strategy,
                "state": status.state,
                "epsilon": status.guarantee.epsilon,
                "delta": status.guarantee.delta,
                "bound": status.guarantee.method,
                "sealed": plan.is_sealed,
                "score": None if release is None else release.score,
                "gradient_evaluations": plan.expected_gradient_evaluations,
                "wall_seconds": None if release is None else release.cost.wall_seconds,
            }
            if release is not None:
                row |= release.values
                for name, score in release.scores.items():
                    row |= {f"{name}_low": score.low, f"{name}_high": score.high}
                row["draws"] = len(release.repetitions) or 1
                for name, values in values_of(release).items() if release.repetitions else ():
                    spread = Spread.of(values)
                    row[f"{name}_mean"] = None if spread is None else spread.mean
                    row[f"{name}_error"] = None if spread is None else spread.error
                row |= {f"params.{name}": value for name, value in release.params.items()}
            rows.append(row)
        frames = find_extra("pandas", extra="ui", what="A study's table")
        columns = None if rows else ["arm"]
        table: pandas.DataFrame = frames.DataFrame(rows, columns=columns).set_index("arm")
        return table

    def export(self) -> dict[str, Any]:
        """Return all that may leave the trust boundary, JSON-ready: plans, releases, certificate."""
        stages = self.stages
        return {
            "format": "privtune-study",
            "version": 1,
            "spec": self.spec.model_dump(mode="json"),
            "arms": [self._exported(status) for status in self.status()],
            **({"stages": [stage.to_dict() for stage in stages]} if stages else {}),
            "certificate": self.certificate(),
        }

    def _exported(self, status: ArmStatus) -> dict[str, Any]:
        release, exported = status.release, None
        if release is not None:
            model = None
            if not release.is_nothing:
                model = self.model_path(release.arm).relative_to(self.folder).as_posix()
            finite = release.score is not None and math.isfinite(release.score)
            exported = {
                "params": json_ready(release.params),
                "score": release.score if finite else None,
                "estimates": {name: score.to_shown() for name, score in release.scores.items()},
                "repetitions": json_ready([asdict(run) for run in release.repetitions]),
                "note": release.note,
                "model": model,
            }
        return {
            "plan": status.plan.to_dict(),
            "state": status.state,
            "guarantee": status.guarantee.to_dict(),
            "release": exported,
        }

    def delete(self, *, leave_objects: bool = False) -> list[Path]:
        """Delete the study, as :func:`delete_study` does, which also explains ``leave_objects``.

        Returns:
            The study's folders that stay, since they hold files of others.
        """
        return self._life.delete(leave_objects=leave_objects)

    def status(self) -> tuple[ArmStatus, ...]:
        """Return how far every arm is. Reads the storage only."""
        return self._life.statuses()

    def releases(self) -> tuple[Release, ...]:
        """Return the releases there are, in the spec's order."""
        return tuple(self._with_model(s.release) for s in self.status() if s.release is not None)

    def _with_model(self, release: Release) -> Release:
        """Return a release that can make its model."""

        def known() -> Task:
            task = self._tasks.get(release.arm)
            if task is None and self.spec.task is None:
                raise PrivTuneError(
                    f"Only the program that ran arm {release.arm!r} can make its model: run it again, and "
                    "study.optimize returns the release, at no charge (create_study(load_if_exists=True)). "
                    "A model that an objective trained takes load_state_dict(release.state_dict())."
                )
            return self._life.task() if task is None else task

        def make() -> torch.nn.Module:
            from privtune.study.build import model_for

            plan = self._life.plans()[release.arm]
            return model_for(known(), plan.training_of(release.params), release.params)

        return replace(release, make=make, serve=lambda model: known().served(model))

    def release(self, arm: str) -> Release:
        """Return the release of the arm of the name ``arm``.

        Raises:
            PrivTuneError: If there is no such arm, or it has not been released.
        """
        there = {release.arm: release for release in self.releases()}
        if arm in there:
            return there[arm]
        raise PrivTuneError(
            f"Study {self.name!r} has no release of an arm {arm!r}; its arms are "
            f"{', '.join(self.arms)}, and {', '.join(there) or 'none'} of them are released."
        )

    def sealed_trials(self, arm: str) -> Sequence[Mapping[str, Any]]:
        """Return the trials of an arm with their scores. For the curator alone, never to be shown.

        Args:
            arm: Name of the arm.

        Returns:
            For each trial its ``number``, ``state``, ``params`` and ``score``.

        Raises:
            SealedTrialsError: Outside of the trust boundary.
        """
        self._check_curator()
        return self._life.trials.records(arm)

    def failures(self, arm: str) -> Sequence[Mapping[str, Any]]:
        """Return the errors that stopped ``arm``, with time and traceback. For the curator alone.

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
        """Return the safetensors file of the model that ``arm`` released."""
        return self._life.write(arm, MODEL)

    def spent(self) -> Guarantee:
        """Return what the whole budget has spent, every study of it included."""
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
        """Close the connections."""
        self._life.close()


def delete_study(name: str, storage: str | Path, *, leave_objects: bool = False) -> list[Path]:
    """Delete a study, its trials and its models, and only files that it made.

    Its charges are the ledger's and stay: what was released cannot be taken back. What stops a deletion (a
    kill, an object store that cannot be reached) leaves the study there, so that another call completes it.

    Args:
        name: Name of the study.
        storage: The database of studies and budgets: its URL, or the path of a SQLite file.
        leave_objects: Leave what is in an object store that is gone for good.

    Returns:
        The study's folders that stay, since they hold files of others.

    Raises:
        StudyNotFoundError: If there is no such study.
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
        return life.delete(leave_objects=leave_objects)


def check_studies(storage: str) -> Iterator[Check]:
    """Report deletions that were stopped half way, and folders of no study."""
    path = database_path(checked_url(storage))
    if path is not None and not path.exists():
        return
    with closing(Storage(storage, patience=5)) as opened:
        with opened.read() as connection:
            if schema_version(connection) != HEAD:
                return
        store = StudyStore(opened)
        rows, half = [store.study(name) for name in store.uids()], store.deleting()
    for name in half:
        says = f"The deletion of study {name!r} is not complete. Run: privtune study delete {name}"
        yield Check("deletion", "warn", says)
    known = {row.uid for row in rows}
    roots = dict.fromkeys([artifact_root(storage), *(row.root for row in rows)])
    lists = [found for root in roots for found in sorted(root.glob(f"*/{OwnFolder.LIST}"))]
    for folder in (found.parent for found in lists):
        if not known & {owner for owner, _ in OwnFolder.listed(folder)}:
            says = f"{folder} is of a study that this storage does not have: remove it by hand, unless "
            yield Check("deletion", "warn", f"{says}another storage keeps its files there, too.")
    if not half:
        yield Check("deletion", "ok", "No deletion of a study was stopped half way.")


def _check_terms(ledger: Ledger, spec: StudySpec) -> None:
    budget = ledger.budget(spec.budget.name)
    asked = (spec.budget.epsilon, spec.budget.delta, spec.budget.adjacency, spec.budget.unit)
    if (budget.epsilon, budget.delta, budget.adjacency, budget.unit) != asked:
        raise PrivTuneError(
            f"Budget {budget.name!r} exists with epsilon = {budget.epsilon}, delta = "
            f"{budget.delta}, {budget.adjacency} adjacency, unit {budget.unit}, and cannot be changed; "
            f"the spec of study {spec.name!r} says epsilon = {asked[0]}, delta = {asked[1]}, {asked[2]}, "
            f"unit {asked[3]}. Write the budget's own terms, and the study's share as 'epsilon' of the study."
        )
