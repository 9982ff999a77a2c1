"""A study: create, load, run, resume, compare."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from privtune.accounting import Guarantee
from privtune.errors import PrivTuneError
from privtune.strategies import Plan, Release
from privtune.study._release import MODEL
from privtune.study.lifecycle import Life
from privtune.study.observer import ArmStatus, NullObserver, Observer, StageStatus
from privtune.study.seal import SealedTrialsError
from privtune.study.spec import StudySpec

if TYPE_CHECKING:
    import optuna
    import pandas

    from privtune.strategies import Strategy
    from privtune.study.declared import Mechanism
    from privtune.study.objective import Objective
    from privtune.study.user_training import DPSGD
    from privtune.tasks._usable import RecordCheck
    from privtune.training.mechanism.noise_options import NoiseOptions

__all__ = ["Study"]


class Study:
    """One task, one budget, several arms; each charged before it touches data.

    Make one with :func:`privtune.create_study` or :func:`privtune.load_study`. A study survives
    interruption: :meth:`run` goes on where it was, without a second charge.

    Args:
        name: Name of a study that is there.
        storage: Database URL of studies and budgets.
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

    def __init__(self, name: str, storage: str, *, curator: bool = False) -> None:
        self._life = Life(name, storage)
        self.name = name
        self.storage = storage
        self.spec: StudySpec = self._life.spec
        self.folder: Path = self._life.folder
        self.observer: Observer = NullObserver()
        self._curator = curator or os.environ.get("PRIVTUNE_CURATOR", "") not in ("", "0")

    @classmethod
    def create(cls, spec: StudySpec, storage: str) -> Study:
        """Plan the study, create its budget if needed, and store it. Touches no data, spends nothing.

        Args:
            spec: The study.
            storage: Database URL of studies and budgets.

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
        from privtune.study._create import store_study

        store_study(spec, storage)
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
        from privtune.study._run import run_study

        return run_study(
            self._life,
            observer or self.observer,
            executor=Executor.of(executor or self.spec.executor, n_jobs),
            device=device,
            stack=stack,
            non_private=non_private,
            anyway=anyway,
            told=(told or (lambda _: None)) if self._curator else None,
        )

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

    def optimize(
        self,
        objective: Objective | str,
        *,
        strategy: Strategy,
        training: DPSGD | None = None,
        mechanism: Mechanism | None = None,
        validation: Any = None,
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
    ) -> Release:
        """Run one arm whose trials are trained by a function of one's own, and release it.

        Of an arm that has been released it returns the release, runs nothing and spends nothing.

        Args:
            objective: Suggests hyperparameters, trains through ``trial.make_private`` (then
                ``private.fit(loss_of)``), returns ``trial.score(model, validation)``. It is called
                once on made-up records before anything is charged. A function, or where one is
                found: ``"package.module:function"``.
            strategy: How to choose, as in ``privtune.strategies``.
            training: Records, epochs and batch size of one training.
            mechanism: In its place: what a training by another library costs, as its author declares. The
                objective is a function of a ``DeclaredTrial`` then, and ``validation`` inputs and targets.
            validation: The split that trials are scored on, where the strategy chooses.
            epsilon: What the arm may cost; the whole budget, if nothing was charged to it yet.
            arm: Name of the arm; the strategy's own unless given.
            sampler: Optuna's sampler for ``everything``, or one of your own that declares that its
                draws are independent.
            pruner: Optuna's pruner, for ``everything`` with a public validation split.
            executor: Who runs the trials of a selection, as in :meth:`run`; ``external`` needs an
                objective that workers can import.
            n_jobs: How many trials at once: the same trials as with one. In spawned processes if
                they can import the objective, else in threads.
            timeout: Seconds above 0 after which no trial begins; the arm stays open and can go on.
            callbacks: Called with the study and the release; never with a sealed trial.
            observer: Hears when the arm begins, fails and is released, as
                ``privtune.tracking.mlflow.MlflowObserver``; the study's own unless given.
            show_progress_bar: Show that the arm runs; of a sealed arm nothing else is shown.
            noise: ``"secure"``, or the fields of :class:`privtune.NoiseOptions`: where noise comes
                from and how it is treated; the study's own unless given.

        Returns:
            The release.

        Raises:
            BudgetExceededError: If it does not fit what is left. Nothing is spent.

        **Guarantee**: what is released is covered by the arm's event, if the objective touches the
        training records through ``make_private`` and the validation records through ``score`` only.

        Example:
            >>> import torch
            >>> from torch.nn.functional import cross_entropy
            >>> import privtune
            >>> x = torch.randn(200, 2)
            >>> y = (x[:, 0] > 0).long()
            >>> def loss_of(model, x, y):  # of one record
            ...     return cross_entropy(model(x), y, reduction="none")

            >>> def objective(trial):
            ...     model = torch.nn.Linear(2, 2)
            ...     optimizer = torch.optim.SGD(model.parameters(), lr=trial.suggest_float("rate", 0.1, 9))
            ...     trial.make_private(model, optimizer, (x[:150], y[:150])).fit(loss_of)
            ...     return trial.score(model, (x[150:], y[150:]))
            >>> study = privtune.create_study("loop", budget=privtune.Budget(8.0, 1e-5, name="loop"))
            >>> release = study.optimize(
            ...     objective,
            ...     strategy=privtune.strategies.Fixed(parameters={"rate": 2.0}),
            ...     training=privtune.DPSGD(records=150, epochs=1, expected_batch_size=75),
            ... )
            >>> release.params, round(release.guarantee.epsilon, 2)
            ({'rate': 2.0}, 8.0)
        """
        from privtune.study._optimize import optimize

        def tell(release: Release) -> None:
            for callback in callbacks:
                callback(self, release)

        if mechanism is not None:
            from privtune.study.declared import optimize_declared

            return optimize_declared(
                self._life,
                objective,  # type: ignore[arg-type]
                mechanism=mechanism,
                strategy=strategy,
                tell=tell,
                observer=observer or self.observer,
                arm=arm,
                validation=validation,
                epsilon=epsilon,
                sampler=sampler,
                timeout=timeout,
            )
        return optimize(
            self._life,
            objective,
            strategy=strategy,
            arm=arm,
            training=training,  # type: ignore[arg-type]
            validation=validation,
            epsilon=epsilon,
            sampler=sampler,
            pruner=pruner,
            executor=executor,
            n_jobs=n_jobs,
            timeout=timeout,
            tell=tell,
            observer=observer or self.observer,
            show_progress_bar=show_progress_bar,
            noise=self.spec.noise if noise is None else noise,
        )

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
        """Every trial of every arm, as Optuna has them. For the curator alone.

        Raises:
            SealedTrialsError: Outside of the trust boundary.
        """
        self._check_curator()
        return [trial for arm in self.arms for trial in self._life.trials.of(arm)]

    def _check_curator(self) -> None:
        if not self._curator:
            raise SealedTrialsError(
                f"The trials of study {self.name!r} are sealed: whoever sees them is inside the "
                "trust boundary. If you are, set PRIVTUNE_CURATOR=1 or load the study with "
                "curator=True; else ask for study.releases()."
            )

    def compare(self) -> pandas.DataFrame:
        """Return one row an arm: what it reached, at what ε, at what cost."""
        from privtune.study._compare import comparison

        return comparison(self.status())

    def export(self) -> dict[str, Any]:
        """Return all that may leave the trust boundary, JSON-ready: plans, releases, certificate."""
        from privtune.study._export import export

        return export(
            self.spec,
            self.status(),
            model=lambda arm: self.model_path(arm).relative_to(self.folder),
            certificate=self.certificate(),
            stages=self.stages,
        )

    def delete(self, *, leave_objects: bool = False) -> list[Path]:
        """Delete the study, its trials and its models. Its charges are the ledger's and stay.

        Only files that the study made are deleted. What stops it (a kill, an object store that cannot
        be reached) leaves the study there, so that another call completes it.

        Args:
            leave_objects: Leave what is in an object store that is gone for good.

        Returns:
            The study's folders that stay, since they hold files of others.

        Raises:
            PrivTuneError: If the study runs at this moment, or something cannot be deleted now.
        """
        return self._life.delete(leave_objects=leave_objects)

    def status(self) -> tuple[ArmStatus, ...]:
        """Return how far every arm is. Reads the storage only."""
        return self._life.statuses()

    def releases(self) -> tuple[Release, ...]:
        """Return the releases there are, in the spec's order."""
        return tuple(s.release for s in self.status() if s.release is not None)

    def release(self, arm: str) -> Release:
        """Return the release of one arm.

        Args:
            arm: Name of the arm.

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
        """Return what stopped an arm: ``time`` and ``traceback``. For the curator alone.

        Args:
            arm: Name of the arm.

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
        """Return where the released model of an arm is, as safetensors.

        Args:
            arm: Name of the arm.
        """
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
