"""HyFreeDP's Table 3 as far as it goes here: heads on an encoder that stays as it is, all at one ε.

What a frozen encoder says of a text is computed once: a function of that text alone.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from privtune.accounting import epsilon as account
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import DAdaptation, DPAdam, HyFreeDP, Prodigy, PublicRate
from studies.fine_tuning_text.task import Classifier, settings, texts
from studies.harness import Split, accuracies, fit, secrets_for

GRID = "un-paid grid"
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    GRID: (DPAdam, {}),
    "hyfreedp": (HyFreeDP, HyFreeDP.complete({}, part="head")),
    "hyfreedp, Algorithm 1": (HyFreeDP, {"fit": "paper"}),
    "public-rate": (PublicRate, {}),
    "prodigy": (Prodigy, {}),
    "d-adaptation": (DAdaptation, {}),
}
SEEDS, BATCH, EPOCHS, DELTA = 5, 256, 3, 1e-5
_WIDTH = 8  # texts of as many tokens, up to this, are read together


@functools.cache
def width() -> int:
    """Return how many numbers the encoder says of a text."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(settings()["encoder"], local_files_only=True)
    return int(config.hidden_size)


def head() -> nn.Module:
    """Return what is trained."""
    return nn.Linear(width(), len(settings()["classes"]))


@functools.cache
def features() -> Split:
    """Return what the encoder says of the training texts and of those of the test."""
    from transformers import AutoModel

    encoder = AutoModel.from_pretrained(settings()["encoder"], local_files_only=True)
    model, data = Classifier(encoder, width(), 1).eval(), texts().load()
    model.head = nn.Identity()

    @torch.no_grad()
    def said(x: torch.Tensor) -> torch.Tensor:
        lengths = (-(-(x != 0).sum(dim=1) // _WIDTH) * _WIDTH).clamp(min=_WIDTH)
        found = torch.empty(len(x), width())
        for length in lengths.unique().tolist():
            for rows in (lengths == length).nonzero().squeeze(1).split(256):
                found[rows] = model(x[rows, :length])
        return found

    train, test = data.train, data.test
    return Split(said(train.x), train.y, said(test.x), test.y)


def train_heads(arm: str, epsilon: float) -> list[dict[str, Any]]:
    """Train heads with every seed, as one stack; of the grid count those of its best rate by the test."""
    split, records = features(), texts().train_records
    schedule = Schedule.from_epochs(records=records, expected_batch_size=BATCH, epochs=EPOCHS)
    kind, options = METHODS[arm]
    method = kind.for_budget(schedule, epsilon=epsilon, delta=DELTA, **options)
    given: Sequence[Mapping[str, float]] = [{}]
    if arm == GRID:
        given = [{"learning_rate": rate, "max_grad_norm": 0.1} for rate in RATES]
    found = fit(
        method,
        replace(schedule, records=len(split)),  # a keyed hash splits: about as many as declared
        model=head,
        split=split,
        candidates=[*given] * SEEDS,
        secrets=[s for s in secrets_for("heads", 0, SEEDS) for _ in given],
    )
    right = accuracies(head, found.params, split)
    ways = [right[k :: len(given)] for k in range(len(given))]
    best = max(ways, key=sum)
    spent = round(account(method.event(schedule), DELTA).epsilon, 4)
    return [
        {"seed": seed, "accuracy": round(value / 100.0, 4), "claimed": spent}
        | {"spent": "" if arm == GRID else spent, "gradient_evaluations": records * EPOCHS}
        | {"rate": RATES[ways.index(best)] if arm == GRID else ""}
        for seed, value in enumerate(best)
    ]
