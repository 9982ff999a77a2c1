"""Other users of the machine, for tests that run as root."""

from __future__ import annotations

import os
from collections.abc import Callable


def error_as_user(uid: int, group: int, act: Callable[[], object]) -> str:
    """Do something as another user, in a process of its own; return what it raised, or nothing.

    Args:
        uid: The user's id, and that of its own group.
        group: Another group that it is a member of.
        act: What is done.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        message = ""
        try:
            os.setgroups([group])
            os.setgid(uid)
            os.setuid(uid)
            act()
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
        os.write(writing, message.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        message = answer.read()
    os.waitpid(child, 0)
    return message
