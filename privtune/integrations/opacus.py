"""Existing Opacus scripts as declared mechanisms. Importing this module does not import Opacus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from privtune.accounting import Gaussian, PoissonSampled, Repeated
from privtune.accounting._checks import check_integer
from privtune.study.declared import Mechanism

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

__all__ = ["mechanism"]


def mechanism(data_loader: DataLoader, *, epochs: int, declared_by: str) -> Mechanism:
    """Declare what ``PrivacyEngine.make_private`` runs on a loader: its sampling rate and its steps.

    Opacus samples each record with probability 1 / ``len(data_loader)``, once for each of the loader's
    batches. The noise is what the arm's ε asks for: give ``trial.plan.noise_multiplier`` to ``make_private``,
    and hold what ran against it by ``trial.check(engine)``.

    Args:
        data_loader: The loader that is given to ``make_private``; its number of records is declared public.
        epochs: How often the script goes through it.
        declared_by: Who declares it, as certificates name them.

    Returns:
        The mechanism, for ``study.optimize(objective, mechanism=...)``.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> loader = DataLoader(TensorDataset(torch.zeros(100, 2)), batch_size=16)
        >>> mechanism(loader, epochs=2, declared_by="the lab").event.count
        14
    """
    batches, passes = len(data_loader), check_integer("epochs", epochs, at_least=1, at_most=10**6)
    event = Repeated(passes * batches, PoissonSampled(1.0 / batches, Gaussian(1.0)))
    return Mechanism(event, declared_by, records=len(data_loader.dataset))  # type: ignore[arg-type]
