"""What is imported by name: functions of the user's own, extras, names when they are first used."""

from __future__ import annotations

import ast
import gc
import hashlib
import importlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, TypeVar

from privtune.errors import InvalidInputError, PrivTuneError

T = TypeVar("T")
_LONGEST = 300  # characters of what a user's code says

OWN_PROCESS = threading.Event()  # set by the command line: no caller's objects are in this process


def find_function(field: str, path: str, *, allowed: str, must: str) -> Callable[..., Any]:
    """Return the function that a path ``package.module:function`` names.

    Args:
        field: What the path was given as.
        path: The path.
        allowed: What a path must be, for the message.
        must: What the function must be, for the message.
    """
    module, separator, name = path.partition(":")
    if not separator or not all(part.isidentifier() for part in (*module.split("."), name)):
        raise InvalidInputError(field, path, allowed)
    remedy = "Check the module path and the name."
    with users_code(field, path, "cannot be imported", remedy):
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    if not callable(found):
        raise InvalidInputError(field, path, must)
    return found


def path_of(function: object) -> str | None:
    """Return ``package.module:function`` of a function; None where no other process can import it."""
    module, name = getattr(function, "__module__", None), getattr(function, "__name__", "")
    if module in {None, "__main__"} or not name.isidentifier():
        return None
    same = getattr(sys.modules.get(str(module)), name, None) is function
    return f"{module}:{name}" if same else None


def source_digest(module: str) -> str:
    """Return the SHA-256 of a module's source, in hexadecimal digits."""
    file = getattr(importlib.import_module(module), "__file__", None)
    if file is None or not Path(file).is_file():
        raise PrivTuneError(f"Module {module} has no source file that could be compared.")
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


@contextmanager
def users_code(field: str, path: str, failed: str, remedy: str = "") -> Iterator[None]:
    """Run a user's code within, and turn what it raises, ``SystemExit`` included, into one sentence.

    Args:
        field: What the path of the code was given as.
        path: The path.
        failed: What could not be done, for the message.
        remedy: What to do, for the message.
    """
    try:
        with redirect_stdout(sys.stderr):  # standard output may be a JSON document
            yield
    except (PrivTuneError, KeyboardInterrupt):
        raise
    except BaseException as error:
        why = f"{failed} ({described(error)})"
        raise InvalidInputError(field, path, why, remedy) from error


def described(error: BaseException) -> str:
    """Return an error of a user's code in one line of bounded length."""
    if isinstance(error, SystemExit):
        return f"it ends the program: exit {error.code!r}"
    text = " ".join(str(error).split()).rstrip(".")
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    if isinstance(error, ImportError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def lazily(package: str, file: str) -> Callable[[str], Any]:
    """Return a package's ``__getattr__``, which imports each of its names when it is first used.

    Args:
        package: The package's name.
        file: Its ``__init__.py``, whose imports below ``if TYPE_CHECKING`` say where each name is.
    """
    homes: dict[str, tuple[str, str]] = {}
    for block in ast.parse(Path(file).read_text("utf-8")).body:
        for line in block.body if isinstance(block, ast.If) else ():
            if isinstance(line, ast.ImportFrom) and line.module:
                homes |= {a.asname or a.name: (line.module, a.name) for a in line.names}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, attribute = homes[name]
        if module == package:  # a package inside of it
            return importlib.import_module(f"{package}.{name}")
        with unsearched():
            value = getattr(importlib.import_module(module), attribute)
        setattr(sys.modules[package], name, value)  # Python asks here once
        return value

    return get


class ByName(Mapping[str, T]):
    """A registry that imports what it holds when it is asked for it.

    Args:
        homes: The path of each, ``package.module:name``, by the name that it is registered under.

    Example:
        >>> known = ByName({"dumps": "json:dumps"})
        >>> list(known), "loads" in known, known["dumps"]([1])
        (['dumps'], False, '[1]')
    """

    def __init__(self, homes: Mapping[str, str]) -> None:
        self._homes = dict(homes)

    def __getitem__(self, name: str) -> T:
        module, _, attribute = self._homes[name].partition(":")
        with unsearched():
            found: T = getattr(importlib.import_module(module), attribute)
        return found

    def __contains__(self, name: object) -> bool:  # Mapping's own would import it
        return name in self._homes

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)


@contextmanager
def libraries() -> Iterator[None]:
    """Import large libraries within, without searches for garbage: a tenth of the time of ``study run``."""
    before = len(sys.modules)
    with unsearched():
        try:
            yield
        finally:
            # Once imported, nothing new stays: a model that is alive by chance must not stay for good.
            if len(sys.modules) > before and OWN_PROCESS.is_set():
                gc.freeze()


@contextmanager
def unsearched() -> Iterator[None]:
    """Stop the garbage collector within."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def find_extra(module: str, *, extra: str, what: str) -> Any:
    """Import a module of a library that only an extra of this package installs.

    Args:
        module: The module's name.
        extra: The extra.
        what: What needs it, to begin the refusal with.

    Example:
        >>> find_extra("no_such_library", extra="demo", what="This example")
        Traceback (most recent call last):
            ...
        privtune.errors.PrivTuneError: This example needs no_such_library, which is not installed: ...
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        library = module.partition(".")[0]
        if str(error.name).partition(".")[0] != library:
            raise  # it is installed, and lacks a library of its own
        raise PrivTuneError(
            f"{what} needs {library}, which is not installed: pip install 'privtune[{extra}]'."
        ) from None


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Silence Optuna's line about each study that it makes: none of them is the user's own."""
    log = logging.getLogger("optuna")
    before = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(before)
