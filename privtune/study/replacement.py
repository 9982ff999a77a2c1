"""Attributes of other libraries' modules and classes, replaced for the length of a block."""

from __future__ import annotations

from contextlib import ExitStack


def replace_attribute(undo: ExitStack, owner: object, name: str, value: object) -> None:
    """Replace an attribute of a module, a class or an object until ``undo`` is closed."""
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
