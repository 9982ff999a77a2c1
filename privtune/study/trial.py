"""A trial as an objective sees it: Optuna's calls, and two of ours: make_private and score."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from privtune.errors import InvalidInputError
from privtune.ledger import RECORD
from privtune.priors import IndependentSampler
from privtune.strategies import Plan, StrategyError, TrainingPlan, TrialResult
from privtune.study._loop_data import (
    SealedTrialError,
    clipping_of,
    records_of,
    refuse_used,
    to_score,
)
from privtune.study._suggestions import Suggestions
from privtune.study.rehearsal import REHEARSED_STEPS, MadeAnew, Rehearsal, made_up
from privtune.training.mechanism.streams import Streams
from privtune.training.methods._rate_schedule import SEARCHED

if TYPE_CHECKING:
    import torch

    from privtune.study._shown import ShownTrial
    from privtune.study.split import Split
    from privtune.training.mechanism.kernel import Loss
    from privtune.training.mechanism.records import RecordFacts
    from privtune.training.methods import Method
    from privtune.training.own_loop.private_training import PrivateTraining

__all__ = ["Trial"]

_NUMBERS = 2**31  # a divisor of the 2**63 seeds of a stream: each number is as likely


class Trial(Suggestions):
    """One trial of a study, handed to the objective.

    Args:
        plan: The arm's plan.
        training: What this trial may run.
        number: Position in its round, or Optuna's number: see :attr:`number`.
        streams: The trial's random streams.
        subset: The arm's streams, which the tuning subset is drawn from.
        given: Hyperparameters that are fixed for this trial: suggestions return them.
        sampler: A sampler of the user's own that declares independence.
        live: Optuna's trial, where every trial is paid for.
        split: What the round knows of its validation split.
        initialised: Told when the model is made.
        rehearsal: What of a rehearsal this is, before the charge, on made-up records.
        facts: Public ranges of whole numbers, as the rehearsal found them.

    Example:
        >>> import torch
        >>> from torch.nn.functional import cross_entropy
        >>> import privtune
        >>> x = torch.randn(200, 2)
        >>> y = (x[:, 0] > 0).long()
        >>> def loss_of(model, x, y):  # of one record
        ...     return cross_entropy(model(x), y, reduction="none")

        >>> def objective(trial):
        ...     width = trial.suggest_int("width", 2, 4)
        ...     rate = trial.suggest_float("rate", 0.1, 10.0, log=True)
        ...     decay = trial.suggest("decay", privtune.LogNormal(median=1e-3, sigma=1.0))
        ...     heavy = 0.9 if trial.suggest_categorical("heavy", [True, False]) else 0.0
        ...     model = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.Linear(width, 2))
        ...     optimizer = torch.optim.SGD(model.parameters(), rate, heavy, weight_decay=decay)
        ...     private = trial.make_private(model, optimizer, (x[:150], y[:150]), max_grad_norm=1.0)
        ...     private.fit(loss_of)
        ...     score = trial.score(model, (x[150:], y[150:]))
        ...     trial.set_user_attr("weights", sum(p.numel() for p in model.parameters()))
        ...     trial.report(score, step=1)
        ...     return score if not trial.should_prune() else 0.0
        >>> study = privtune.create_study("one-loop", budget=privtune.Budget(8.0, 1e-5, name="clinic"))
        >>> release = study.optimize(
        ...     objective,
        ...     strategy=privtune.strategies.Everything(trials=1),
        ...     training=privtune.DPSGD(records=150, epochs=1, expected_batch_size=75),
        ...     validation=privtune.Validation(records=50, public=True),
        ... )
        >>> sorted(release.params)
        ['decay', 'heavy', 'rate', 'width']
    """

    def __init__(
        self,
        plan: Plan,
        training: TrainingPlan,
        *,
        number: int,
        streams: Streams,
        subset: Streams,
        given: Mapping[str, Any],
        sampler: IndependentSampler | None = None,
        live: ShownTrial | None = None,
        split: Split | None = None,
        initialised: Callable[[], None] = lambda: None,
        rehearsal: Rehearsal | Literal[""] = "",
        facts: RecordFacts | None = None,
    ) -> None:
        super().__init__(streams, given, sampler, live, training.as_trained)
        # The position of a sealed trial is kept from its function: see the property.
        self._number = streams.seed("number") % _NUMBERS if plan.is_sealed else number
        self.user_attrs: dict[str, Any] = {}
        self._plan, self._training = plan, training
        self._subset = subset
        self._private: PrivateTraining | None = None
        self._model: torch.nn.Module | None = None
        self._train: Any = None
        self._scores: list[float] = []
        self._split, self._initialised, self._rehearsal = split, initialised, rehearsal
        self.pruned = False
        self._facts = facts
        self._taken: set[str] = set()

    @property
    def number(self) -> int:
        """Optuna's number under ``everything``; in a sealed selection a random one below 2**31.

        Private selection covers candidates that are drawn independently. With positions, a function that
        computes ``GRID[trial.number % len(GRID)]`` would walk through its grid: how many of it are tried
        would then be the secret number of runs. With a number from the trial's own stream it draws from the
        grid. The number is no suggestion: it is not released, and a final training on what was suggested
        has another one. What a release shall name is suggested: ``trial.suggest_categorical``.
        """
        return self._number

    def make_private(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        dataset: Any,
        *,
        max_grad_norm: float = 1.0,
        parameters: Mapping[str, float] | None = None,
        max_physical_batch_size: int | None = None,
        one_by_one: bool = False,
    ) -> PrivateTraining:
        """Make a training private, in Opacus' manner: method, noise, rate and steps are the plan's.

        Args:
            model: The model.
            optimizer: Over its trainable parameters; regularisers belong here, as weight decay. None
                where the arm's method steps by itself (``hyfreedp``, ``adadp``, ``prodigy``, ...).
            dataset: ``TensorData``, a pair of tensors, a dict or tuple of tensors as collators make
                them, or a map-style dataset of such records, of exactly the number of records that the
                plan declares; those of another shape than the first contribute nothing. Of a dict the
                target is ``labels``, else ``label``, else the last entry. On a budget of another unit
                than the record,
                what :func:`privtune.tasks.unit_records` makes of the rows; ``loss_of`` stays the loss of
                a row, and a unit's loss is the sum of its rows'.
            max_grad_norm: With an optimizer: each record's gradient is clipped to this norm.
            parameters: Without one: hyperparameters that the method leaves open. Those that the
                trial was suggested under their own names, or the arm fixes, need not be given.
            max_physical_batch_size: Most records that are computed at once: memory and time alone.
            one_by_one: Whether each record is computed in a pass of its own: slow, and right for
                models that ``torch.vmap`` cannot take.

        Returns:
            ``fit(loss_of)`` runs every planned step; or ``batches()`` yields the planned samples,
            and ``step(batch, loss_of)`` follows each. See :class:`PrivateTraining`.

        Raises:
            SealedTrialError: If the trial has made one already: a second was not charged.
            InvalidInputError: If the data, the optimizer or a hyperparameter does not fit the plan.
        """
        from privtune.execution.training import part_of
        from privtune.training.mechanism.records import NO_FACTS
        from privtune.training.own_loop.private_training import PrivateTraining

        if self._private is not None:
            raise SealedTrialError(
                "make_private was called twice in one trial, but a trial is charged for one "
                "training. Run the second as a trial or an arm of its own."
            )
        data = records_of(dataset, self._training.part)
        self._check_unit(data, "dataset")
        declared = int(self._plan.details["records"])  # of the dataset as a whole
        if len(data) != declared and not data.sealed_size:
            raise InvalidInputError(
                "dataset", f"another size than {declared}", "must hold the declared records"
            )
        refuse_used(model)
        if self._rehearsal == "model":
            raise MadeAnew(getattr(model, "_orig_mod", model))
        method = self._training.method
        own = optimizer is None
        if self._rehearsal:
            seed = int(self._rehearsal == "others")
            data = made_up(data, self._training.schedule.records, seed=seed)
        else:
            data = part_of(data, self._training.part, self._plan.rate, self._subset)
            self._train = data
        self._initialised()
        self._private = PrivateTraining(
            model,
            data,
            schedule=self._training.schedule,
            method=method,
            candidate=self._hyperparameters(method, parameters or {}, own=own),
            optimizer=optimizer,
            clipping=None if own else clipping_of(method, max_grad_norm),
            secret=self._streams.key("training"),
            noise=self._training.noise,
            max_physical_batch_size=max_physical_batch_size,
            one_by_one=one_by_one,
            limit=REHEARSED_STEPS if self._rehearsal else None,
            facts=NO_FACTS if self._facts is None else self._facts,
        )
        self._model = model
        return self._private

    def score(self, model: torch.nn.Module, validation: Any) -> float:
        """Score the trial's model on the declared split: exactly if that is public, else noised.

        Args:
            model: The model that was trained: the one that ``make_private`` was given.
            validation: Records as ``make_private`` takes them: outputs ``[C]`` a record are held
                against targets that are whole numbers, shape ``[N]``: ``labels`` or ``label`` of dicts. All
                else in them are the model's arguments; of several outputs its ``logits`` count.

        Returns:
            The score, higher is better. NaN where the strategy chooses nothing: then the split is
            not touched, and nothing is charged for it.

        Raises:
            SealedTrialError: If it is called a second time on a private split, for another model, or
                on another split than before, or on training records.
        """
        plan = self._plan.score
        if self._private is None or not self._is_own(model):
            raise SealedTrialError(
                "trial.score takes the model that make_private was given, and no other: what was "
                "charged is a score of the model that is released."
            )
        self._private.check()
        if plan is None:
            self._scores.append(math.nan)
            return math.nan
        if self._scores and plan.event is not None:
            raise SealedTrialError(
                "trial.score was called twice, but a trial is charged for one look at the private "
                "validation split. Score once, at the end."
            )
        from privtune.training.mechanism.scoring import OfRecords, cross_entropy, score

        data = to_score(validation)
        tree = data.tree
        self._check_unit(data, "validation")
        if len(data) != plan.records and not data.sealed_size:
            raise InvalidInputError(
                "validation", f"another size than {plan.records}", "must hold the declared records"
            )
        if self._rehearsal:
            data = made_up(data, 2).head(2)
        elif self._split is not None:
            self._split.check(data, self._train)
        rng = self._streams.numpy("score")
        scored = self._private.bare
        loss: Loss | OfRecords = cross_entropy
        if plan.metric == "loss":
            loss = OfRecords(self._private.loss_to_score(tree))
        elif tree is not None:
            scored = tree.inputs.wrap(scored)
        if data.unit and plan.metric != "loss":
            from privtune.training.mechanism.units import OfUnits

            scored = OfUnits(scored, data.x.dim() - 2)
        self._scores.append(score(plan, scored, data, rng=rng, loss=loss))
        return self._scores[-1]

    def _check_unit(self, data: Any, what: str) -> None:
        """Refuse records that are not of the unit that was charged."""
        unit, found = self._plan.unit, getattr(data, "unit", "") or RECORD
        if found != unit:
            raise InvalidInputError(
                what,
                f"records of one {'row' if found == RECORD else found} each",
                f"must be records of one {'row' if unit == RECORD else unit} each, as the budget's unit "
                "is what it protects",
                "privtune.tasks.unit_records(rows, groups, most=..., unit=...) makes them, for a budget "
                "of that unit.",
            )

    def report(self, value: float, step: int) -> None:
        """Report an intermediate score to the pruner; only what ``score`` gave, on a public split.

        Args:
            value: What ``score`` gave.
            step: How far the training is, a whole number; the pruner compares trials at equal steps.

        Raises:
            InvalidInputError: If the step is no whole number of at least 0.
            StrategyError: If the split is private, or the number is not one that ``score`` gave.
        """
        if self._plan.score is not None and self._plan.score.event is not None:
            raise StrategyError(
                "trial.report was called with a private validation split: each intermediate score "
                "would be a release of its own, and none was charged. Declare the split public, or "
                "score once, at the end."
            )
        try:
            at = operator.index(step)
        except TypeError:
            at = -1
        if at < 0:
            raise InvalidInputError("step", step, "must be a whole number of at least 0")
        if not any(value == known or math.isnan(known) for known in self._scores):
            raise StrategyError(
                "trial.report was given a number that trial.score did not give, so nothing says "
                "that it is public. Report trial.score(model, validation)."
            )
        if self._live is not None:
            self._live.report(float(value), at)

    def should_prune(self) -> bool:
        """Return whether the pruner wants to stop this trial; False where trials are sealed."""
        self.pruned = self._live is not None and self._live.should_prune()
        return self.pruned

    @property
    def asked(self) -> set[str]:
        """Names of the hyperparameters that the function suggested, or its method took."""
        return {*self.params, *self._taken}

    @property
    def loop(self) -> PrivateTraining | None:
        """What ``make_private`` has returned."""
        return self._private

    def close(self) -> None:
        """Stop watching the objective's loop: it has returned, or raised."""
        if self._private is not None:
            self._private.close()

    def set_user_attr(self, name: str, value: Any) -> None:
        """Keep a value with the trial, inside the trust boundary, until the trial ends.

        Args:
            name: Its name.
            value: Anything.
        """
        self.user_attrs[name] = value

    def finish(self, value: object, index: int) -> TrialResult:
        """Check what the objective did and returned, and return the trial's result.

        Args:
            value: What the objective returned.
            index: The trial's place among the arm's results.

        Returns:
            Parameters, weights, score, curves, and the digest of what was released.

        Raises:
            SealedTrialError: If nothing was trained privately, or the value is not the score's.
            LoopError: If a sample was skipped, steps are missing, or weights changed elsewhere.
            TranscriptMismatchError: If something else was released than was charged.
        """
        if self._private is None or self._model is None:
            raise SealedTrialError(
                "The objective returned without trial.make_private, so what it trained was never "
                "clipped, noised or charged. Train through make_private."
            )
        self._private.finish(self._training.event)
        score: float | None = None
        if self._plan.score is not None:
            known = self._scores[-1] if self._scores else None
            if known is None or (value != known and not math.isnan(known)):
                raise SealedTrialError(
                    "The objective returned a number that trial.score did not give last, so nothing "
                    "says that it is public or noised. Return trial.score(model, validation)."
                )
            score = -math.inf if math.isnan(known) else known
        layout = self._private.layout
        named = {n: p.detach() for n, p in self._private.bare.named_parameters()}
        weights = layout.flatten(named).cpu().clone()
        if score is not None and not bool(weights.isfinite().all()):
            score = -math.inf
        return TrialResult(
            index=index,
            params=self.params,
            weights=weights,
            score=score,
            curves=self._private.curves,
            transcript_digest=self._private.transcript.digest(),
            shapes={name: tuple(shape) for name, shape in layout.shapes.items()},
        )

    def _is_own(self, model: object) -> bool:
        """Say whether this is the trial's model, bare or with hooks on it."""
        bare = None if self._private is None else self._private.bare
        return model is self._model or (
            bare is not None and getattr(model, "_module", model) is bare
        )

    def _hyperparameters(
        self, method: Method[Any], given: Mapping[str, Any], *, own: bool
    ) -> dict[str, Any]:
        """Collect what a method leaves open: given, fixed by the arm, or suggested.

        A schedule is not suggested under its name alone: a loop may mean something else by it.
        """
        fixed = {**self._plan.params, **given}
        schedule = {name: fixed[name] for name in SEARCHED if name in fixed}
        self._taken |= {*schedule, *(method.parameters if own else ())}
        if not own:
            return schedule
        of_trial = {**self.params, **self._plan.params, **self._given}
        known = {**self._training.as_trained(of_trial), **given}
        if extra := sorted(set(given) - {*method.parameters, *SEARCHED}):
            raise InvalidInputError(
                "parameters",
                extra,
                f"method {method.name!r} takes {', '.join(method.parameters) or 'none'} and no others",
            )
        if missing := [name for name in method.parameters if name not in known]:
            raise InvalidInputError(
                "parameters",
                sorted(given),
                f"method {method.name!r} also needs {', '.join(missing)}",
                "Suggest them under these names, or give parameters={...}; for dpsgd, an optimizer "
                "of your own sets them.",
            )
        return {**{name: known[name] for name in method.parameters}, **schedule}
