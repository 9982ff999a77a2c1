"""Answers that were computed before, for who only shows them: they are not computed again.

What is given is believed, so nothing that decides may be asked within: whether a charge fits is always
computed. Whoever gives answers must know that they are of this very account.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TypeVar

__all__ = ["Answers", "given", "looked_up"]

Answers = MutableMapping[str, str]
"""An answer as JSON, by the digest of what was asked."""

_Answer = TypeVar("_Answer")
_WORTH = 0.02  # seconds; what takes less is not kept

_answers: ContextVar[Answers | None] = ContextVar("answers", default=None)


@contextmanager
def given(answers: Answers) -> Iterator[None]:
    """Look answers up here within, and leave in it what took long to compute."""
    token = _answers.set(answers)
    try:
        yield
    finally:
        _answers.reset(token)


def looked_up(
    asked: Callable[[], Sequence[object]],
    compute: Callable[[], _Answer],
    fields: Callable[[_Answer], Sequence[object]],
    make: Callable[..., _Answer],
) -> _Answer:
    """Return an answer that was given, or compute it.

    Args:
        asked: All that the answer hangs on; JSON can write it.
        compute: Computes it.
        fields: What it is made of; JSON can write it.
        make: Makes it of that.
    """
    if (answers := _answers.get()) is None:
        return compute()
    key = hashlib.sha256(json.dumps(asked()).encode()).hexdigest()
    if (text := answers.get(key)) is not None:
        with suppress(ValueError, TypeError):
            found: list[Any] = json.loads(text)
            return make(*found)
    began = time.process_time()
    answer = compute()
    if time.process_time() - began > _WORTH:
        answers[key] = json.dumps(fields(answer))
    return answer
