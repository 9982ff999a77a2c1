"""YAML as specs are written in it: a name stands once, and 1e-3 is a number."""

from __future__ import annotations

import re
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """PyYAML's, which itself takes the last of two values, and 1e-3 for text."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return a mapping as it is written, before ``<<`` adds to it what it may change."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                said = f"{key.value} stands twice in one mapping"
                raise yaml.composer.ComposerError(problem=said, problem_mark=key.start_mark)
            seen.add((key.tag, str(key.value)))
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_yaml(text: str) -> Any:
    """Return what a YAML document says.

    Raises:
        yaml.YAMLError: It is none, or says something twice.

    Example:
        >>> read_yaml("{low: 1e-3, high: 5}")
        {'low': 0.001, 'high': 5}
        >>> read_yaml("{epsilon: 4, epsilon: 40}")
        Traceback (most recent call last):
            ...
        yaml.composer.ComposerError: epsilon stands twice in one mapping
          in "<unicode string>", line 1, column 14:
            {epsilon: 4, epsilon: 40}
                         ^
    """
    return yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)
