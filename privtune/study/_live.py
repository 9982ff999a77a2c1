"""Rows whose candidates a function of the user's suggests, and Optuna's trials where all are paid for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from privtune.errors import InvalidInputError
from privtune.numbers import is_number
from privtune.spaces import IndependentSampler
from privtune.strategies.everything import sampler_of
from privtune.study._round import Files, StudyRound, work_on_rows
from privtune.study._shown import suggested
from privtune.study.failures import StudyInterruptedError

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

    from privtune.execution.table import Handed
    from privtune.ledger import Lease, Rounds
    from privtune.spaces import SearchSpace
    from privtune.study._shown import ShownTrial, ShownTrials


@dataclass(frozen=True, kw_only=True)
class LiveFiles(Files):
    """Trains candidates whose hyperparameters are suggested while a function of the user's runs.

    Args:
        sampler: A sampler of the user's own for sealed trials.
        deadline: When to stop beginning trials, on the monotonic clock.
        live: Optuna's trials, where every trial is paid for, by number.
        shown: Opens Optuna's trials in a process of a worker, which draws by the plan's sampler.
    """

    sampler: IndependentSampler | None = None
    deadline: float = math.inf
    live: dict[int, ShownTrial] = field(default_factory=dict)
    shown: Callable[[], ShownTrials] | None = None

    def check_deadline(self) -> None:
        """Stop before a trial begins that the time is over for.

        Raises:
            StudyInterruptedError: If it is.
        """
        if time.monotonic() > self.deadline:
            raise StudyInterruptedError(
                "The time is over before every trial was run. Nothing was released and the charge "
                "stays; call optimize again with the same arm to go on."
            )

    def run_rows(self, leases: Sequence[Lease]) -> Iterator[Handed]:
        """Train leased rows; trials that are shown are opened here, unless whoever asked did so."""
        if self.shown is None or self.plan.is_sealed:
            yield from super().run_rows(leases)
            return
        shown = self.shown()
        numbers = [lease.number for lease in leases]
        for number in numbers:
            sampler = sampler_of(self.plan, self.streams, number, self.space)
            trial = self.live[number] = shown.ask(number, sampler=sampler)
            trial.take(suggested(self.results, number))  # by a worker that died at it
        for handed, number in zip(super().run_rows(leases), numbers, strict=True):
            shown.hand_over(number)
            yield handed
            del self.live[number]


@dataclass(frozen=True, kw_only=True)
class LiveRound(StudyRound):
    """The round of an arm whose candidates a function of the user's suggests.

    Args:
        sampler: Optuna's sampler, where every trial is paid for.
        pruner: Optuna's pruner, likewise.
        files: Trains and keeps results; ``ask`` hands it Optuna's trials.
    """

    files: LiveFiles
    sampler: BaseSampler | None = None
    pruner: BasePruner | None = None

    def ask(self, number: int, make: Callable[[SearchSpace], BaseSampler]) -> Mapping[str, Any]:
        """Open Optuna's trial; where no space is declared, the function's suggestions define it."""
        if self.space:
            return super().ask(number, make)
        self._check_kind(sealed=False)
        sampler = make(self.space) if self.sampler is None else self.sampler
        trial = self.shown.ask(number, sampler=sampler, pruner=self.pruner)
        self.files.live[number] = trial
        return {}


def own_sampler(sampler: Any) -> Any:
    """Return a sampler of the user's own; None for one of Optuna's."""
    import optuna

    return None if isinstance(sampler, optuna.samplers.BaseSampler) else sampler


def in_threads(files: LiveFiles, charge_id: str, jobs: int) -> Callable[[Rounds], None]:
    """Return what works through a round in threads: for a function that only this process knows."""

    def give(rounds: Rounds) -> None:
        with ThreadPoolExecutor(jobs) as pool:
            done = [pool.submit(work_on_rows, rounds, charge_id, files) for _ in range(jobs)]
            for job in done:
                job.result()

    return give


def deadline_of(timeout: float | None) -> float:
    """Return when a timeout is over, on the monotonic clock."""
    if timeout is None:
        return math.inf
    if not is_number(timeout) or timeout <= 0.0:
        allowed = "must be finite seconds above 0, or None for no end"
        raise InvalidInputError("timeout", timeout, allowed)
    return time.monotonic() + timeout
