"""Existing Opacus scripts as declared mechanisms. Importing this module does not import Opacus."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privtune.accounting import Gaussian, PoissonSampled, Repeated
from privtune.accounting.checks import check_integer
from privtune.api import create_study
from privtune.errors import InvalidInputError
from privtune.ledger import Budget
from privtune.strategies import PapernotSteinke
from privtune.study.declared_arms import Mechanism
from privtune.study.familiar_names import unknown

if TYPE_CHECKING:
    from opacus import PrivacyEngine
    from torch import nn
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    from privtune.strategies import Release, Strategy
    from privtune.study.declared_arms import DeclaredResult, DeclaredTrial

__all__ = ["make_private", "mechanism", "result", "select"]

if not TYPE_CHECKING:  # a type checker goes on refusing what is not there

    def __getattr__(name: str) -> Any:
        raise unknown(f"module {__name__!r}", name)


def mechanism(data_loader: DataLoader[Any], *, epochs: int, declared_by: str) -> Mechanism:
    """Declare what ``PrivacyEngine.make_private`` runs on a loader: its sampling rate and its steps.

    Opacus samples each record with probability 1 / ``len(data_loader)``, once for each of the loader's
    batches. The noise is what the arm's ε asks for: :func:`make_private` gives it to Opacus, and
    :func:`result` compares what ran with the charge.

    Args:
        data_loader: The loader that is given to ``make_private``; its number of records is declared public.
        epochs: How often the script goes through it.
        declared_by: Who declares it, as certificates name them.

    Returns:
        The mechanism, for ``study.optimize_declared(objective, mechanism=...)``.

    Raises:
        InvalidInputError: If the loader has a generator of its own: its seed is the same in every trial, and
            known samples are no random ones.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> loader = DataLoader(TensorDataset(torch.zeros(100, 2)), batch_size=16)
        >>> mechanism(loader, epochs=2, declared_by="the lab").event.count
        14
    """
    passes = check_integer("epochs", epochs, at_least=1, at_most=10**6)
    if data_loader.generator is not None:
        raise InvalidInputError(
            "data_loader.generator",
            data_loader.generator,
            "must be None: sampling by a seed that somebody may know protects nobody",
            "Leave generator= out; the trial's own secret states draw the samples.",
        )
    # Opacus' sampler has int(1 / rate) batches, one less than a loader's 93: 1 / (1 / 93) < 93.
    batches = int(1.0 / (1.0 / len(data_loader)))
    batch = PoissonSampled(1.0 / batches, Gaussian(1.0))
    event = Repeated(passes * batches, batch)
    data = data_loader.dataset
    return Mechanism(event, declared_by, records=len(data), data=data)  # type: ignore[arg-type]


def make_private(
    trial: DeclaredTrial,
    model: nn.Module,
    optimizer: Optimizer,
    data_loader: DataLoader[Any],
    *,
    max_grad_norm: float = 1.0,
) -> tuple[PrivacyEngine, Any, Any, Any]:
    """Make a training private by Opacus, with the noise that is charged for the trial.

    Args:
        trial: The trial; its suggestions are made.
        model: The model.
        optimizer: Over its trainable parameters.
        data_loader: The loader that :func:`mechanism` was given.
        max_grad_norm: Each record's gradient is clipped to this norm.

    Returns:
        The engine, for :func:`result`; model, optimizer and loader as its ``make_private`` returns them.

    Example:
        >>> def train(trial):
        ...     engine, model, optimizer, loader = make_private(trial, model, optimizer, data)
        ...     run_the_script(model, optimizer, loader)
        ...     return result(trial, engine, model)
    """
    from opacus import PrivacyEngine

    engine = PrivacyEngine()
    private_parts = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=data_loader,
        noise_multiplier=trial.plan.noise_multiplier,
        max_grad_norm=max_grad_norm,
    )
    return (engine, *private_parts)


def result(trial: DeclaredTrial, engine: PrivacyEngine, model: nn.Module) -> DeclaredResult:
    """Compare what Opacus did with the charge, score the model, and return the trial's result.

    Args:
        trial: The trial.
        engine: Opacus' ``PrivacyEngine``, after the training.
        model: The trained model, as ``make_private`` returned it.

    Returns:
        What the objective returns.

    Raises:
        DeclaredError: If the data set, its sampling, the noise or the steps are others than were charged
            (``trial.check`` says what is compared).

    Example:
        >>> def train(trial):
        ...     engine, model, optimizer, loader = make_private(trial, model, optimizer, data)
        ...     run_the_script(model, optimizer, loader)
        ...     return result(trial, engine, model)
    """
    trial.check(engine)
    return trial.result(model, score=trial.score(model))


def select(
    train: Callable[[DeclaredTrial], DeclaredResult],
    data_loader: DataLoader[Any],
    *,
    epochs: int,
    validation: Any,
    epsilon: float,
    delta: float,
    declared_by: str,
    name: str = "opacus",
    strategy: Strategy | None = None,
    storage: str | Path | None = None,
    **options: Any,
) -> Release:
    """Choose the hyperparameters of an Opacus script by private selection, and release the best model alone.

    Called again, as by a script that is run again, it returns what was released.

    Args:
        train: The script as a function of a trial: it suggests hyperparameters, calls :func:`make_private`,
            trains on the loader that this returned, and returns :func:`result`.
        data_loader: The loader that it gives to :func:`make_private`.
        epochs: How often it goes through it.
        validation: Inputs and targets ``(x, y)`` that candidates are scored on, apart from the loader's.
        epsilon: What everything together may cost, above 0.
        delta: Its δ, in (0, 1).
        declared_by: Who declares that the script trains as Opacus' accountant says.
        name: Name of the study and of its budget.
        strategy: How to choose; ``PapernotSteinke(mean_runs=10)`` unless given.
        storage: The database of studies and budgets, as :func:`privtune.create_study` takes it.
        **options: Others of ``study.optimize_declared``, as ``score``.

    Returns:
        The release: ``release.params``, ``release.state_dict()``, ``release.guarantee``.

    Example:
        >>> release = select(train, loader, epochs=10, validation=(x, y), epsilon=3.0, delta=1e-5,
        ...                  declared_by="the imaging group")  # doctest: +SKIP
    """
    budget = Budget(epsilon, delta, name=name)
    study = create_study(name, budget=budget, load_if_exists=True, storage=storage)
    declared = mechanism(data_loader, epochs=epochs, declared_by=declared_by)
    return study.optimize_declared(
        train,
        mechanism=declared,
        strategy=strategy or PapernotSteinke(mean_runs=10),
        validation=validation,
        epsilon=epsilon,
        **options,
    )
