"""What is behind an error: causes, interruptions, and chains that lead back to themselves."""

from __future__ import annotations

import pytest

from privtune.errors import errors_behind, interruptible, was_interrupted


def in_a_circle() -> tuple[Exception, Exception]:
    """Two errors, each of which stands behind the other, as where one is raised again from the other."""
    first = ConnectionError("the server went away")
    second = RuntimeError("the session could not be closed")
    second.__cause__ = first
    first.__context__ = second
    return first, second


@pytest.mark.timeout(30)
def test_errors_in_a_circle_are_walked_once() -> None:
    first, second = in_a_circle()
    assert list(errors_behind(second)) == [second, first]
    assert list(errors_behind(first)) == [first, second]
    assert not was_interrupted(second)


@pytest.mark.timeout(30)
def test_an_error_in_a_circle_leaves_a_block_as_it_is() -> None:
    _, second = in_a_circle()
    with pytest.raises(RuntimeError, match="could not be closed"), interruptible():
        raise second


@pytest.mark.timeout(30)
def test_an_interruption_is_found_beside_a_cause() -> None:
    first, second = in_a_circle()
    first.__cause__ = ValueError("an inner cause")
    first.__context__ = KeyboardInterrupt()
    assert was_interrupted(second)
    with pytest.raises(KeyboardInterrupt), interruptible():
        raise second


def test_nothing_is_behind_no_error() -> None:
    assert list(errors_behind(None)) == []
    assert not was_interrupted(None)
