"""Suggestions for mistyped commands and options.

Whoever comes from another tool types its words: ``best`` for a comparison, or ``--epsilon`` behind a
command that takes it from a file. Each question here ends in a command that exists.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from privtune.names import did_you_mean

_OTHER_TOOLS = {  # commands of other tools, by what they are here
    "best": "study compare",
    "check": "study plan",
    "deploy": "model export",
    "fit": "study run",
    "init": "study draft",
    "log": "study sync",
    "new": "study create",
    "optimize": "study run",
    "report": "study compare",
    "serve": "model export",
    "start": "study run",
    "status": "study show",
    "trials": "study show",
    "tune": "study run",
}
_OF_THE_SPEC = (
    "adjacency", "arms", "budget", "delta", "epochs", "epsilon", "expected_batch_size", "metric", "noise",
    "report", "scoring", "seed", "space", "task", "unit",
)  # fmt: skip
"""Fields of a study's spec that are tried as options of ``privtune study``."""


def hint(error: Any, commands: Callable[[], Sequence[str]]) -> str:
    """Return a suggestion that follows a usage error, or an empty text where none is known.

    Args:
        error: The error: an unknown command or option.
        commands: Returns every command as it is typed, without the program's name; takes long.

    Returns:
        One sentence, or an empty text.

    Example:
        >>> hint(ValueError("No such command 'run'."), lambda: ["budget list", "study run"])
        'Did you mean privtune study run?'
    """
    if option := getattr(error, "option_name", ""):
        return _hint_of_option(error, str(option), commands)
    message = str(getattr(error, "message", error))
    # Typer may have added a suggestion of its own, by letters alone: budget for best.
    match = re.fullmatch(r"(No such command '(.*?)'\.)( Did you mean .*)?", message)
    if match is None:
        return ""
    suggestion = _hint_of_command(error, match[2], commands())
    if suggestion and match[3]:
        error.message = match[1]
    return suggestion


def _hint_of_command(error: Any, word: str, paths: Sequence[str]) -> str:
    """Return a question that suggests a command for an unknown word, or an empty text.

    Args:
        error: The error of Typer's, which knows the group in which the word stands.
        word: What was typed.
        paths: Every command as it is typed.

    Returns:
        A command of this name in another group, or one that other tools call so, or the name most alike
        in the group; an empty text where none is alike.
    """
    namesakes = [path for path in paths if path.split()[-1] == word]
    if namesakes:
        return f"Did you mean privtune {namesakes[0]}?"
    if word in _OTHER_TOOLS:
        return f"Did you mean privtune {_OTHER_TOOLS[word]}?"
    group = " ".join(_command_words(getattr(error, "ctx", None)))
    if group:
        return did_you_mean(
            word, [path.split()[-1] for path in paths if path.startswith(f"{group} ")]
        )
    return did_you_mean(word, {path.split()[0] for path in paths})


def _command_words(context: Any) -> list[str]:
    """Return the words of a command behind the program's name, which depends on how it was started.

    Args:
        context: Of Typer's; None for the program itself.
    """
    words: list[str] = []
    while context is not None and context.parent is not None:
        words.insert(0, context.info_name)
        context = context.parent
    return words


def _hint_of_option(error: Any, option: str, commands: Callable[[], Sequence[str]]) -> str:
    """Return a suggestion for an unknown option, or an empty text.

    Args:
        error: The error of Typer's. Its own suggestions are removed from it.
        option: What was typed, with its hyphens.
        commands: As :func:`hint` takes it.
    """
    if not str(error.message).startswith("No such option"):
        return ""
    # Typer suggests by Python's own measure, which takes --json for --epsilon.
    error.possibilities = None
    context = error.ctx
    if context is None or context.parent is None:
        first_words = {path.split()[0] for path in commands()}
        command = next((word for word in sys.argv[1:] if word in first_words), "study list")
        return f"Options stand after the command: privtune {command} ... {option}."
    field = option.lstrip("-").replace("-", "_")
    if field in _OF_THE_SPEC and _command_words(context)[0] == "study":
        return f"{field} stands in the study's spec, which is a YAML file."
    names = []
    for parameter in context.command.params:
        names += [name.lstrip("-") for name in parameter.opts if name.startswith("--")]
    question = did_you_mean(option.lstrip("-"), names)
    return question.replace("mean ", "mean --")
