"""A zoo of traps: objectives of honest users that would release what nobody charged."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from privtune.ledger import Budget
from privtune.spaces import SearchSpace
from privtune.strategies import Everything, Fixed, PapernotSteinke, Plan, Strategy
from privtune.study.objective import ObjectiveFiles, plan_objective, rehearse
from privtune.study.user_training import DPSGD, Validation
from tests.zoo.trap import HELD_OUT, RECORDS, Objective, Toy, Trap
from tests.zoo.trap_harmless import HARMLESS
from tests.zoo.trap_losses import LOSSES
from tests.zoo.trap_numbers import NUMBERS
from tests.zoo.trap_samples import SAMPLES
from tests.zoo.trap_trials import TRIALS
from tests.zoo.trap_unseen import UNSEEN
from tests.zoo.trap_weights import WEIGHTS

if TYPE_CHECKING:
    from privtune.strategies import TrialResult

__all__ = ["TRAPS", "Verdict", "run"]

TRAPS: tuple[Trap, ...] = (*LOSSES, *SAMPLES, *WEIGHTS, *HARMLESS, *UNSEEN, *TRIALS, *NUMBERS)
"""Every trap."""

LOOP = DPSGD(records=RECORDS, epochs=1, expected_batch_size=12)
BUDGET = Budget(6.0, 1e-5, name="traps")

_ARMS: dict[str, tuple[Strategy, Validation | None]] = {
    "fixed": (Fixed(), None),
    "selection": (PapernotSteinke(mean_runs=2), Validation(records=HELD_OUT)),
    "everything": (Everything(trials=2), Validation(records=HELD_OUT, public=True)),
}


@dataclass(frozen=True)
class Verdict:
    """What became of an objective.

    Args:
        error: What it raised, if anything.
        charged: Whether it had passed the rehearsal, after which an arm is charged.
        results: What its trials would release.
    """

    error: Exception | None
    charged: bool
    results: tuple[TrialResult, ...] = ()


@cache
def plan_of(arm: str) -> Plan:
    """Return the plan of an arm of the zoo."""
    strategy, validation = _ARMS[arm]
    return plan_objective(
        strategy, LOOP, validation, budget=BUDGET, epsilon=6.0, sampler=None, pruner=None
    )


class _Kept:
    """Results of a round that need no database."""

    def __init__(self) -> None:
        self._kept: dict[str, bytes] = {}

    def put(self, name: str, content: bytes) -> None:
        self._kept.setdefault(name, content)

    def get(self, name: str) -> bytes | None:
        return self._kept.get(name)


def run(objective: Objective, *, arm: str = "fixed", trials: int = 2) -> Verdict:
    """Run an objective as ``study.optimize`` does: rehearse it, then run trials with fixed seeds.

    Args:
        objective: A function of a trial and of the toy records.
        arm: See :class:`Trap`.
        trials: How many trials of the arm to run; an arm that is ``fixed`` has one.
    """
    plan, data = plan_of(arm), Toy()
    charged = False

    def bound(trial: object) -> float:
        return objective(trial, data)  # type: ignore[arg-type]

    files = ObjectiveFiles(
        plan=plan,
        secret=bytes(range(32)),
        results=cast("Any", _Kept()),  # all that an objective's trials need
        space=SearchSpace({}),
        objective=bound,
        sampler=None,
        deadline=math.inf,
        live={},
    )
    training = plan.training if plan.search is None else plan.search.trainings[0]
    numbers: dict[int, dict[str, float]] = {
        number: {} for number in range(1 if arm == "fixed" else trials)
    }
    try:
        files = replace(files, stack=rehearse(bound, plan, _ARMS[arm][0]).stack)
        charged = True
        secrets = {number: files.streams.key("trial", number) for number in numbers}
        results = list(files.train(training, numbers, secrets=secrets, scored=arm != "fixed"))
    except Exception as error:
        return Verdict(error, charged)
    return Verdict(None, charged, tuple(results))
