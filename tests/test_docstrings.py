"""Every public callable says what it takes, gives and refuses, and shows it in an example.

That the examples run is doctest's to say (``--doctest-modules``); that they are there is this test's.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pydantic import BaseModel

PACKAGES = (
    "privtune",
    "privtune.study",
    "privtune.strategies",
    "privtune.accounting",
    "privtune.ledger",
    "privtune.tasks",
    "privtune.plots",
    "privtune.training.methods",
    "privtune.spaces",
    "privtune.sklearn",
)

Named = tuple[str, Any]


def public() -> dict[str, Any]:
    """Every function and class of an ``__all__``, once, by the longest name that it has."""
    found: dict[int, Named] = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value) or inspect.isclass(value):
                found[id(value)] = (f"{package}.{name}", value)
    return dict(sorted(found.values()))


PUBLIC = public()


def is_own(value: Any) -> bool:
    return value.__module__.startswith("privtune.")


def promises(cls: type) -> list[type]:
    """The classes whose docstrings speak of a class: itself, its bases, the protocols it keeps."""
    bases = [base for base in cls.__mro__ if is_own(base)]
    protocols = [p for p in PUBLIC.values() if getattr(p, "_is_protocol", False) and p not in bases]
    for protocol in protocols:
        handed_out = {name for name, _ in methods(protocol)}
        if handed_out and all(hasattr(cls, name) for name in handed_out):
            bases.append(protocol)
    return bases


def methods(cls: type) -> Iterator[Named]:
    """The methods that a class hands out."""
    for base in cls.__mro__:
        if not is_own(base):
            continue
        for name, value in vars(base).items():
            function = getattr(value, "__func__", value)
            # Tests of a contract are called by pytest; a lambda is the default of a field.
            called = inspect.isfunction(function) and function.__name__ == name
            if called and not name.startswith(("_", "test_")):
                yield name, function


def said_of(name: str, cls: type) -> list[str]:
    """What is said of a method, by the class and by those whose promise it keeps."""
    said = [vars(base).get(name) for base in promises(cls)]
    return [inspect.cleandoc(value.__doc__) for value in said if getattr(value, "__doc__", None)]


def section(doc: str, title: str) -> str:
    found = re.search(rf"^{title}:\n((?:[ ]{{4}}.*\n?|\n)+)", doc, re.MULTILINE)
    return textwrap.dedent(found[1]) if found else ""


def named(doc: str) -> set[str]:
    """What first lines name in backticks, and the sections of arguments and attributes."""
    text = section(doc, "Args") + section(doc, "Attributes")
    first = re.findall(r"`(\w+)`", " ".join(re.findall(r"(?:\A|\n\n)(\w.*)", doc)))
    heads = re.findall(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \([^)]*\))?:", text, re.MULTILINE)
    return {name.lstrip("*") for head in heads for name in head.split(", ")} | set(first)


def parameters(value: Any) -> set[str]:
    if inspect.isclass(value):
        if dataclasses.is_dataclass(value):
            return {f.name for f in dataclasses.fields(value) if not f.name.startswith("_")}
        if issubclass(value, BaseModel):
            return set(value.model_fields)
        value = value.__dict__.get("__init__")
        if not inspect.isfunction(value) or not is_own(value):
            return set()
    return set(inspect.signature(value).parameters) - {"self", "cls"}


def raises(function: Callable[..., Any]) -> bool:
    """Whether a body raises by itself, its inner functions left out."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Raise):
            said = ast.unparse(node)
            if "NotImplementedError" not in said:
                return True
        if not isinstance(node, ast.FunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
    return False


def gives(function: Callable[..., Any]) -> bool:
    return inspect.signature(function).return_annotation not in ("None", None, "Never", "NoReturn")


def missing(function: Callable[..., Any], doc: str) -> list[str]:
    """What the docstring of a function, or of a method, owes its reader."""
    owed = []
    lacking = parameters(function) - named(doc)
    if lacking:
        owed.append(f"Args: {', '.join(sorted(lacking))}")
    says = re.search(r"^(Returns|Yields):", doc, re.MULTILINE) or re.match(r"Returns? ", doc)
    if gives(function) and not says:
        owed.append("Returns")
    if raises(function) and not section(doc, "Raises"):
        owed.append("Raises")
    return owed


def examples(doc: str) -> str:
    return "\n".join(re.findall(r"^\s*(?:>>>|\.\.\.) .*$", doc, re.MULTILINE))


def class_debts(name: str, cls: type) -> list[str]:
    doc = inspect.cleandoc(cls.__doc__ or "")
    plain = issubclass(cls, BaseException | enum.Enum)
    docs = [inspect.cleandoc(base.__doc__ or "") for base in promises(cls)]
    lacking = parameters(cls) - set().union(*(named(d) for d in docs))
    init = vars(cls).get("__init__")
    if inspect.isfunction(init) and init.__doc__:
        lacking -= named(inspect.cleandoc(init.__doc__))
    owed = [f"Args: {', '.join(sorted(lacking))}"] if lacking else []
    source = inspect.getsourcefile(cls)
    checks = [vars(cls).get(check) for check in ("__init__", "__post_init__")]
    written = [c for c in checks if inspect.isfunction(c) and c.__code__.co_filename == source]
    if any(map(raises, written)) and not section(doc, "Raises"):
        owed.append("Raises")
    shown = examples(doc)
    # Exceptions are met, not made, and an enumeration is its members.
    if not shown and not plain:
        owed.append("an example")
    handed_out = {m: (f, "\n\n".join(said_of(m, cls))) for m, f in methods(cls)}
    everything = "\n".join(examples(d) for d in (*docs, *(said for _, said in handed_out.values())))
    for method, (function, said) in handed_out.items():
        debts = missing(function, said)
        # What a building block hands down is for whoever builds on it, not for those who call.
        called = any(method in vars(base) for base in promises(cls) if base in PUBLIC.values())
        met = re.search(rf"\b{method}\b", everything)
        if called and not examples(said) and not met:
            debts.append("an example")
        if not said:
            debts.append("a docstring")
        owed += [f"{method}() lacks {debt}" for debt in debts]
    return owed


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_callable_says_what_it_takes_gives_and_refuses(name: str) -> None:
    value = PUBLIC[name]
    doc = inspect.cleandoc(value.__doc__ or "")
    if inspect.isclass(value):
        owed = class_debts(name, value)
    else:
        owed = missing(value, doc)
        if not examples(doc):
            owed.append("an example")
    assert not owed, f"{name} lacks " + "; ".join(sorted(set(owed)))


def test_enough_is_public() -> None:
    assert len(PUBLIC) > 150
