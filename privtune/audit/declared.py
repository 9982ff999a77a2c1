"""Runs of a declared mechanism with and without a canary: what its release tells of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from privtune.audit.canaries import secrets_of
from privtune.strategies import Plan, TrainingPlan
from privtune.study.declared import DeclaredTrial, own_generators
from privtune.training.mechanism.streams import Streams

Canary = Callable[[DeclaredTrial, bool], float]
"""Trains as the objective does, on made-up records with a canary (True) or without it (False), and returns a
number of what would be released that tells the two apart."""


def run_declared(
    plan: Plan,
    training: TrainingPlan,
    canary: Canary,
    *,
    runs: int,
    seed: int,
    inside: bool,
    progress: Callable[[int], None] = lambda _: None,
) -> npt.NDArray[np.float64]:
    """Run a declared mechanism many times; return what each release says of the canary.

    Args:
        plan: The arm's plan, whose fixed hyperparameters each run is given; the others it draws.
        training: What one training may do.
        canary: Trains, with the canary or without it.
        runs: How often.
        seed: The audit's seed.
        inside: Whether the canary is among the records.
        progress: Told of every run that is done.
    """
    found = np.empty(runs)
    for number, secret in enumerate(secrets_of(seed, f"declared/{inside}", runs)):
        streams = Streams(secret)
        trial = DeclaredTrial(
            replace(plan, score=None), training, number=number, streams=streams, given=plan.params
        )
        with own_generators(streams):
            found[number] = float(canary(trial, inside))
        progress(1)
    return found
