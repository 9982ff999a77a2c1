"""Reads ``Example:`` as the section of examples that it is, so that doctests are shown as code."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Gives the section of a docstring the name that the parser knows."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename it, before the docstring is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"(?m)^Example:$", "Examples:", obj.docstring.value)
