"""The spec that the documentation shows is one that can be read."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from privtune.study import StudySpec

DOCS = Path(__file__).parents[2] / "docs"


def test_the_documented_spec_is_a_spec() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (DOCS / "spec.md").read_text("utf-8"), re.DOTALL)
    spec = StudySpec.parse(yaml.safe_load(block))
    strategies = [arm.to_strategy() for arm in spec.arms]
    assert [s.arm for s in strategies] == [arm.name for arm in spec.arms]
    context = spec.planning_context()
    # Each arm can be planned at a generous target: its options exist and fit together.
    for strategy in strategies:
        assert strategy.plan(context, epsilon=6.0).arm == strategy.arm
