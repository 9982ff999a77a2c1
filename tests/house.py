"""How much a reader must take in, a room of the package: what the tests of the house hold.

A *code line* holds code: no blank line, comment or docstring. A *node* is one of Python's syntax tree: a
line that is folded has many. Run it for the figures of all rooms:

    python -m tests.house
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "privtune"

PARTICIPLES = frozenset(
    (  # noqa: SIM905 - as in prose
        "found given known own made kept told asked held drawn done there said shown seen whole taken "
        "wanted needed noted chosen named stored placed tried counted planned left"
    ).split()
)
"""What says what happened to a value, and not what it is."""

_NO_CODE = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Figures:
    """What was counted in one or several modules.

    Attributes:
        lines: All lines.
        code_lines: Those that hold code.
        docstring_lines: Those of docstrings.
        nodes: Nodes of the syntax tree.
        pairs: Statements ``a, b = x, y``.
        names: How often each name is bound, as a variable or as an argument.
        most_arguments: The most arguments of one function, and its name.
        untyped: How often ``Any`` stands in the arguments and returns of functions.
    """

    lines: int = 0
    code_lines: int = 0
    docstring_lines: int = 0
    nodes: int = 0
    pairs: int = 0
    names: Counter[str] = field(default_factory=Counter)
    most_arguments: tuple[int, str] = (0, "")
    untyped: int = 0

    def __add__(self, other: Figures) -> Figures:
        return Figures(
            self.lines + other.lines,
            self.code_lines + other.code_lines,
            self.docstring_lines + other.docstring_lines,
            self.nodes + other.nodes,
            self.pairs + other.pairs,
            self.names + other.names,
            max(self.most_arguments, other.most_arguments),
            self.untyped + other.untyped,
        )

    @property
    def density(self) -> float:
        """Nodes a code line."""
        return self.nodes / max(self.code_lines, 1)

    @property
    def pairs_per_thousand(self) -> float:
        """Pairs of assignments per 1,000 code lines."""
        return 1000 * self.pairs / max(self.code_lines, 1)

    @property
    def participles(self) -> Counter[str]:
        """Those of the names that are participles."""
        return Counter({name: n for name, n in self.names.items() if is_participle(name)})

    @property
    def participle_share(self) -> float:
        """Participles among the names, in percent."""
        return 100 * self.participles.total() / max(self.names.total(), 1)

    @property
    def docstring_share(self) -> float:
        """Docstrings among the lines, in percent."""
        return 100 * self.docstring_lines / max(self.lines, 1)


def is_participle(name: str) -> bool:
    """Return whether a name says what happened to a value."""
    return name.strip("_") in PARTICIPLES


def measure(path: Path) -> Figures:
    """Return the figures of one module."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    code_lines = _code_lines(text)
    figures = Figures(lines=len(text.splitlines()))
    for node in ast.walk(tree):
        figures.nodes += 1
        docstring = _docstring_lines(node)
        figures.docstring_lines += len(docstring)
        code_lines -= docstring
        figures.pairs += _is_pair(node)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            figures.names[node.id] += 1
        if isinstance(node, _Function):
            arguments = _arguments(node)
            figures.names.update(arguments)
            figures.most_arguments = max(figures.most_arguments, (len(arguments), node.name))
            figures.untyped += _count_untyped(node)
    figures.code_lines = len(code_lines)
    return figures


def room_of(path: Path) -> str:
    """Return the room of a module: its folder, of training the folder below, or the top level."""
    parts = path.relative_to(PACKAGE).parts
    if len(parts) == 1:
        return "(top level)"
    if parts[0] == "training" and len(parts) > 2:
        return "/".join(parts[:2])
    return parts[0]


@cache
def measure_rooms() -> dict[str, Figures]:
    """Return the figures of every room of the package."""
    rooms: dict[str, Figures] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = room_of(path)
        rooms[room] = rooms.get(room, Figures()) + measure(path)
    return rooms


def names_used_twice() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the modules, and the classes, that have one name in two rooms, with their rooms.

    An underscore before a name makes no other name of it.
    """
    rooms_of_modules: dict[str, set[str]] = {}
    rooms_of_classes: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = room_of(path)
        if path.stem not in ("__init__", "__main__"):
            rooms_of_modules.setdefault(path.stem.strip("_"), set()).add(room)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                rooms_of_classes.setdefault(node.name.strip("_"), set()).add(room)
    return _in_two_rooms(rooms_of_modules), _in_two_rooms(rooms_of_classes)


def _in_two_rooms(rooms: dict[str, set[str]]) -> dict[str, list[str]]:
    return {name: sorted(places) for name, places in sorted(rooms.items()) if len(places) > 1}


def _code_lines(text: str) -> set[int]:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines


def _docstring_lines(node: ast.AST) -> set[int]:
    if not isinstance(node, ast.Module | ast.ClassDef | _Function) or not node.body:
        return set()
    first = node.body[0]
    if not isinstance(first, ast.Expr) or not isinstance(first.value, ast.Constant):
        return set()
    if not isinstance(first.value.value, str):
        return set()
    return set(range(first.lineno, (first.end_lineno or first.lineno) + 1))


def _is_pair(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
    )


def _arguments(node: _Function) -> list[str]:
    arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
    return [argument.arg for argument in arguments if argument.arg not in ("self", "cls")]


def _count_untyped(node: _Function) -> int:
    """Return how often ``Any`` stands in a function's signature."""
    arguments = node.args
    parts = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    parts += [each for each in (arguments.vararg, arguments.kwarg) if each is not None]
    annotations = [part.annotation for part in parts]
    count = 0
    for annotation in (*annotations, node.returns):
        if annotation is not None:
            names = [part.id for part in ast.walk(annotation) if isinstance(part, ast.Name)]
            count += names.count("Any")
    return count


def main() -> None:
    """Print the figures of all rooms."""
    rooms = measure_rooms()
    total = sum(rooms.values(), Figures())
    heads = (
        "room",
        "code lines",
        "nodes",
        "a line",
        "pairs",
        "participles %",
        "docstrings %",
        "Any",
    )
    lines = ["{:22}{:>11}{:>9}{:>8}{:>7}{:>15}{:>14}{:>6}  most arguments".format(*heads)]
    for room, figures in [*sorted(rooms.items()), ("all", total)]:
        count, function = figures.most_arguments
        lines.append(
            f"{room:22}{figures.code_lines:>11}{figures.nodes:>9}{figures.density:>8.2f}"
            f"{figures.pairs_per_thousand:>7.1f}{figures.participle_share:>15.1f}"
            f"{figures.docstring_share:>14.1f}{figures.untyped:>6}  {count} ({function})"
        )
    modules, classes = names_used_twice()
    for kind, names in (("modules", modules), ("classes", classes)):
        places = "; ".join(f"{name} ({', '.join(rooms)})" for name, rooms in names.items())
        lines.append(f"{len(names)} {kind} have one name in two rooms: {places}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
