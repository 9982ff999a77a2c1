"""A candidate's optimizer is made again over the part that is trained, with the same settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from privtune.study.build import _trained_part
from privtune.tasks import Candidate

KINDS = [
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.NAdam,
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", ["head", "biases", "lora:2"])
def test_settings_are_kept(kind: Any, part: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = kind(model.parameters(), 0.25, weight_decay=0.125)
    changed, made = _trained_part(Candidate(model, optimizer, trainable=part))
    assert type(made) is kind
    (group,), (before,) = made.param_groups, optimizer.param_groups
    assert {n: v for n, v in group.items() if n != "params"} == {
        n: v for n, v in before.items() if n != "params"
    }
    trained = [id(p) for p in changed.parameters() if p.requires_grad]
    assert trained == [id(p) for p in group["params"]]
    assert sum(p.numel() for p in group["params"]) < sum(p.numel() for p in changed.parameters())
