"""What a reader must take in stays little: nodes a line, pairs, names, arguments and docstrings of a room.

``python -m tests.house`` prints the figures. A number here may only become stricter.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.house import Figures, is_participle, measure, measure_rooms, names_used_twice


@dataclass(frozen=True)
class Limits:
    """What a room may have at most, and at least of docstrings.

    Attributes:
        density: Nodes of the syntax tree a code line.
        pairs: Statements ``a, b = x, y`` per 1,000 code lines.
        participles: Percent of the names that say what happened to a value.
        arguments: Of one function.
        docstrings: Percent of the lines, at least.
    """

    density: float
    pairs: float
    participles: float
    arguments: int
    docstrings: float


LIMITS = {
    "(top level)": Limits(8.1, 1.0, 0.5, 16, 25.0),
    "accounting": Limits(9.4, 1.0, 1.0, 9, 20.0),
    "audit": Limits(8.6, 1.0, 1.0, 11, 19.5),
    "cli": Limits(7.9, 2.6, 3.2, 13, 12.8),
    "execution": Limits(8.0, 1.0, 1.0, 9, 19.0),
    "ledger": Limits(8.3, 1.0, 0.5, 9, 22.0),
    "plots": Limits(8.1, 1.0, 1.0, 9, 21.0),
    "rehearsal": Limits(8.05, 1.0, 0.5, 9, 19.0),
    "serving": Limits(9.0, 1.0, 0.5, 9, 18.0),
    "stages": Limits(7.8, 1.0, 0.5, 9, 17.0),
    "strategies": Limits(8.05, 1.0, 1.0, 8, 26.0),
    "study": Limits(8.05, 4.8, 3.1, 16, 17.4),
    "tables": Limits(8.35, 1.0, 0.5, 9, 20.0),
    "tasks": Limits(8.2, 1.0, 0.5, 9, 18.0),
    "tracking": Limits(8.0, 1.0, 1.0, 9, 19.0),
    "training": Limits(9.5, 1.0, 1.0, 9, 20.0),
    "training/engine": Limits(9.4, 1.0, 1.0, 9, 27.0),
    "training/mechanism": Limits(9.4, 1.0, 1.0, 9, 22.5),
    "training/methods": Limits(8.9, 1.0, 1.0, 9, 26.0),
    "views": Limits(8.1, 1.0, 1.0, 9, 18.0),
}

UNTYPED = {
    "execution": 11,
    "ledger": 65,
    "strategies": 52,
    "study": 67,
}
"""How often ``Any`` may stand in the signatures of a room.

What is left are objects of users and of libraries without types (Opacus, Ray, fsspec, rows and columns of
SQLAlchemy), documents of JSON that are read field by field, and annotations as values.
"""

MODULES_OF_ONE_NAME = 1
CLASSES_OF_ONE_NAME = 2

WHAT_TO_DO = {
    "density": "give the value of a nested expression a name of its own, on a line of its own",
    "pairs": "write each assignment on a line of its own",
    "participles": "name the value by what it is (metric, release), not by what happened to it",
    "arguments": "gather what belongs together in a frozen dataclass",
    "docstrings": "say why, in which units and of which shapes, and what a line prevents",
}


def breaches(figures: Figures, limits: Limits) -> list[str]:
    """Return what of a room is beyond its limits, with what to do about it."""
    count, function = figures.most_arguments
    excesses = {
        "density": (figures.density > limits.density, f"{figures.density:.2f} nodes a code line"),
        "pairs": (
            figures.pairs_per_thousand > limits.pairs,
            f"{figures.pairs_per_thousand:.1f} pairs of assignments per 1,000 code lines",
        ),
        "participles": (
            figures.participle_share > limits.participles,
            f"{figures.participle_share:.1f}% participles, most {figures.participles.most_common(3)}",
        ),
        "arguments": (count > limits.arguments, f"{count} arguments of {function}"),
        "docstrings": (
            figures.docstring_share < limits.docstrings,
            f"{figures.docstring_share:.1f}% docstrings",
        ),
    }
    return [
        f"{words} (limit {getattr(limits, name)}): {WHAT_TO_DO[name]}"
        for name, (is_beyond, words) in excesses.items()
        if is_beyond
    ]


@pytest.mark.quick
def test_rooms_keep_their_limits() -> None:
    rooms = measure_rooms()
    assert rooms.keys() == LIMITS.keys()
    beyond = {
        room: problems
        for room, figures in rooms.items()
        if figures.code_lines and (problems := breaches(figures, LIMITS[room]))
    }
    assert not beyond


@pytest.mark.quick
@pytest.mark.parametrize("room", UNTYPED)
def test_signatures_say_their_types(room: str) -> None:
    """``Any`` switches the type checker off wherever the value goes."""
    count = measure_rooms()[room].untyped
    assert count <= UNTYPED[room], (
        f"{room} has {count} times Any in its signatures, at most {UNTYPED[room]}: name the type; say object "
        "for what is passed on or looked at by isinstance, and Mapping[str, object] for its mappings"
    )


@pytest.mark.quick
def test_few_names_stand_for_two_things() -> None:
    """Whoever looks for a module or a class finds one: name each by what tells it from the other."""
    modules, classes = names_used_twice()
    assert len(modules) <= MODULES_OF_ONE_NAME, modules
    assert len(classes) <= CLASSES_OF_ONE_NAME, classes


@pytest.mark.quick
def test_the_measure_sees_what_it_counts(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        '"""A module.\n\nOf two lines more.\n"""\n\n'
        "found, metric = 1, 2  # a pair\n\n\n"
        "def look(self, given: dict[str, Any], release: Any = None) -> object:\n"
        '    """Do it."""\n'
        "    return given\n"
    )
    figures = measure(module)
    assert (figures.lines, figures.code_lines, figures.docstring_lines) == (11, 3, 5)
    assert figures.pairs == 1
    assert figures.untyped == 2
    assert figures.most_arguments == (2, "look")
    assert figures.participles == {"found": 1, "given": 1}
    assert is_participle("_kept")
    assert not is_participle("keeper")
    assert len(breaches(figures, Limits(1.0, 1.0, 1.0, 1, 90.0))) == 5
    assert not breaches(figures, Limits(100.0, 500.0, 60.0, 2, 40.0))
