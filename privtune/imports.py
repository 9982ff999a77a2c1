"""Imports by name: the user's own functions, libraries of extras, and names when they are first used."""

from __future__ import annotations

import ast
import gc
import hashlib
import importlib
import importlib.util
import logging
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from privtune.errors import InvalidInputError, PrivTuneError, interruptible

T = TypeVar("T")
_LONGEST = 300  # characters of what a user's code says

_POSTPONING = threading.Lock()
OWN_PROCESS = threading.Event()  # set by the command line: no caller's objects are in this process


def find_function(
    field: str,
    path: str,
    *,
    allowed: str,
    must: str,
) -> Callable[..., Any]:
    """Return the function that a path ``package.module:function`` names.

    Args:
        field: What the path was given as.
        path: The path.
        allowed: What a path must be, for the message.
        must: What the function must be, for the message.
    """
    module, separator, name = path.partition(":")
    parts = (*module.split("."), name)
    if not separator or not all(part.isidentifier() for part in parts):
        raise InvalidInputError(field, path, allowed)
    remedy = "Check the module path and the name."
    with users_code(field, path, "cannot be imported", remedy):
        content = _import_named(module)
        function: Callable[..., Any] = getattr(content, name)
    if not callable(function):
        raise InvalidInputError(field, path, must)
    return function


def path_of(function: object) -> str | None:
    """Return a function's path ``package.module:function``, or None if no other process can import it."""
    module = getattr(function, "__module__", None)
    name = getattr(function, "__name__", "")
    if module in {None, "__main__"} or not name.isidentifier():
        return None
    # A decorated or a nested function may have the name of another one.
    namesake = getattr(sys.modules.get(str(module)), name, None)
    if namesake is not function:
        return None
    return f"{module}:{name}"


def source_digest(module: str) -> str:
    """Return the SHA-256 of a module's source, in hexadecimal digits."""
    file = getattr(_import_named(module), "__file__", None)
    if file is None or not Path(file).is_file():
        raise PrivTuneError(f"Module {module} has no source file that could be compared.")
    source = Path(file).read_bytes()
    return hashlib.sha256(source).hexdigest()


class _WorkingFolder:
    """A finder of modules in the working folder: those that a study names, and those that these import.

    It stands last among the finders, so that it hides nothing that is installed. The folder itself is on no
    path: whatever else lies there would be run as soon as a library tries a module that is not installed.

    Args:
        folders: The folder of each module that may be found, by the module's name.
    """

    def __init__(self, folders: Mapping[str, str]) -> None:
        self._folders = dict(folders)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[dict[str, str]]]:
        return _find_in_folders, (self._folders,)

    def add(self, folders: Mapping[str, str]) -> None:
        """Register the folder of each module that is not imported yet."""
        for name, folder in folders.items():
            if name not in sys.modules:
                self._folders[name] = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that was named, or that the code of such a module imports."""
        if path is not None:  # a module inside of a package, whose own folder is searched
            return None
        folder = self._folders.get(name) or self._folders.get(_importing_module())
        if folder is None:
            return None
        spec = PathFinder.find_spec(name, [folder], target)
        if spec is None:
            return None
        _refuse_strangers(Path(folder), spec)
        self._folders[name] = folder
        # A process that the user's code starts by spawning unpickles this before anything else, and so
        # finds the same modules.
        from multiprocessing.process import current_process

        process = current_process()
        configuration = getattr(process, "_config", {})
        configuration["privtune"] = self
        return spec


_working_folder = _WorkingFolder({})


def _find_in_folders(folders: Mapping[str, str]) -> _WorkingFolder:
    """Register modules with their folders at the finder, put it last in ``sys.meta_path``, and return it."""
    if _working_folder in sys.meta_path:
        sys.meta_path.remove(_working_folder)
    sys.meta_path.append(_working_folder)
    _working_folder.add(folders)
    return _working_folder


_strangers: list[str] = []
"""Databases of other users that this process has opened."""


def distrust_names(database: str) -> None:
    """Forbid from now on to import modules that studies name: the database belongs to another user.

    Args:
        database: What the database is called in messages.
    """
    _strangers.append(database)


def _import_named(module: str) -> ModuleType:
    """Import a module that a study names: one that is installed, or else one of the working folder."""
    # In a program of the user's, what was imported there before is the user's choice.
    if _strangers and (OWN_PROCESS.is_set() or module not in sys.modules):
        raise PrivTuneError(
            f"{_strangers[-1]} belongs to another user, and module {module} is not imported because a study "
            "names it: that would run their code as yours. If you trust it, work with a copy of your own: "
            f"privtune budget backup COPY.db --storage {_strangers[-1]}"
        )
    try:
        folder = os.getcwd()
    except FileNotFoundError:  # it was deleted
        return importlib.import_module(module)
    package = module.partition(".")[0]
    _find_in_folders({package: folder})
    return importlib.import_module(module)


def _importing_module() -> str:
    """Return the name of the outermost package whose code is importing now."""
    frame = sys._getframe(2)
    machinery = {"importlib", "_frozen_importlib", "_frozen_importlib_external"}
    while True:
        module = str(frame.f_globals.get("__name__", ""))
        package = module.partition(".")[0]
        if package not in machinery or frame.f_back is None:
            return package
        frame = frame.f_back


def _refuse_strangers(folder: Path, spec: ModuleSpec) -> None:
    """Refuse a module that another user may have put into a world-writable folder, such as /tmp.

    Elsewhere the folder is its user's choice, and a colleague's file in a shared one is welcome.
    """
    if not folder.stat().st_mode & stat.S_IWOTH:
        return
    user = getattr(os, "geteuid", lambda: 0)()
    trusted_users = {0, user}
    source = folder / spec.name  # a package
    if not source.is_dir():
        source = Path(str(spec.origin))
    for place in (source, folder / "__pycache__"):
        if not os.path.lexists(place):
            continue
        if place.lstat().st_uid not in trusted_users:
            raise PrivTuneError(
                f"Anybody may write in {folder}, and {place.name} there is another user's: module "
                f"{spec.name} is not imported. Work in a folder of your own."
            )


@contextmanager
def users_code(field: str, path: str, failed: str, remedy: str = "") -> Iterator[None]:
    """Run a ``with`` block of user code, and turn any error in it, even ``SystemExit``, into one sentence.

    Args:
        field: What the path of the code was given as.
        path: The path.
        failed: What could not be done, for the message.
        remedy: What to do, for the message.
    """
    try:
        # Standard output may be a JSON document.
        with redirect_stdout(sys.stderr), interruptible():
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
    words = str(error).split()
    text = " ".join(words).rstrip(".")
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}..."
    kind = type(error).__name__
    if not text:
        return kind
    if isinstance(error, ImportError):
        return text
    return f"{kind}: {text}"


def lazily(package: str, file: str) -> Callable[[str], Any]:
    """Return a package's ``__getattr__``, which imports each of its names when it is first used.

    Args:
        package: The package's name.
        file: Its ``__init__.py``, whose imports below ``if TYPE_CHECKING`` say where each name is.
    """
    homes = _find_homes(Path(file))

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


def _find_homes(file: Path) -> dict[str, tuple[str, str]]:
    """Return (module, name) of each import below ``if TYPE_CHECKING`` in a file, by its name there."""
    homes: dict[str, tuple[str, str]] = {}
    tree = ast.parse(file.read_text("utf-8"))
    for block in tree.body:
        if not isinstance(block, ast.If):
            continue
        for statement in block.body:
            if not isinstance(statement, ast.ImportFrom) or not statement.module:
                continue
            for alias in statement.names:
                name = alias.asname or alias.name
                homes[name] = (statement.module, alias.name)
    return homes


class ByName(Mapping[str, T]):
    """A registry of objects by name, each imported when it is looked up.

    Args:
        homes: The path of each, ``package.module:name``, by the name that it is registered under.

    Example:
        >>> functions = ByName({"dumps": "json:dumps"})
        >>> list(functions), "loads" in functions, functions["dumps"]([1])
        (['dumps'], False, '[1]')
    """

    def __init__(self, homes: Mapping[str, str]) -> None:
        self._homes = dict(homes)

    def __getitem__(self, name: str) -> T:
        path, _, attribute = self._homes[name].partition(":")
        with unsearched():
            module = importlib.import_module(path)
            content: T = getattr(module, attribute)
        return content

    def __contains__(self, name: object) -> bool:  # Mapping's own would import it
        return name in self._homes

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)


@contextmanager
def libraries() -> Iterator[None]:
    """Turn the garbage collector off for a ``with`` block that imports large libraries, which saves time."""
    before = len(sys.modules)
    with unsearched():
        try:
            yield
        finally:
            # Once imported, nothing new stays: a model that is alive by chance must not stay for good.
            if len(sys.modules) > before and OWN_PROCESS.is_set():
                gc.freeze()


class _PostponedName:
    """A name of a library that is imported when the name is first called, or one of its attributes used."""

    def __init__(self, library: str, name: str) -> None:
        self._library = library
        self._name = name

    def _import(self) -> Any:
        """Return what the library has under this name."""
        module = importlib.import_module(self._library)
        return getattr(module, self._name)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._import(), attribute)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._import()(*arguments, **keywords)


class PostponedModule:
    """A module of a library that is imported when a name of it is first used.

    Args:
        name: The module's name.

    Example:
        >>> module = PostponedModule("json.tool")
        >>> module.main.__name__
        'main'
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        with unsearched():
            module = importlib.import_module(self._name)
        value = getattr(module, attribute)
        setattr(self, attribute, value)
        return value


def _postponed_name(library: str, name: str) -> _PostponedName:
    """Return a name of a library that is not imported yet; what Python itself asks for is not there."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _PostponedName(library, name)


@contextmanager
def postponed(*names: str) -> Iterator[None]:
    """Import libraries that others take names from only when such a name is first used.

    Inside of the block ``from library import name`` gives a name that forwards to the library's own, so what
    is computed is the same. A library that is there already is taken as it is.

    Args:
        names: Of libraries, such as ``scipy.stats``, whose import takes half a second and which autodp takes
            one name from, for mechanisms other than ours.
    """
    with _POSTPONING:
        absent = [name for name in names if name not in sys.modules]
        for name in absent:
            stand_in = ModuleType(name)
            stand_in.__dict__["__getattr__"] = partial(_postponed_name, name)
            sys.modules[name] = stand_in
        try:
            yield
        finally:
            for name in absent:
                del sys.modules[name]


@contextmanager
def unsearched() -> Iterator[None]:
    """Turn the garbage collector off inside a ``with`` block."""
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
        raise _missing_library(library, extra=extra, what=what) from None


def has(library: str) -> bool:
    """Return whether a library is installed; it is not imported.

    Example:
        >>> has("numpy"), has("no_such_library")
        (True, False)
    """
    return importlib.util.find_spec(library) is not None


def check_extra(library: str, *, extra: str, what: str) -> None:
    """Check that a library is installed; the error names the extra of this package that installs it.

    The library is not imported.

    Example:
        >>> check_extra("no_such_library", extra="demo", what="This example")
        Traceback (most recent call last):
            ...
        privtune.errors.PrivTuneError: This example needs no_such_library, which is not installed: ...
    """
    if not has(library):
        raise _missing_library(library, extra=extra, what=what)


def _missing_library(library: str, *, extra: str, what: str) -> PrivTuneError:
    """Return the error that names the command which installs a missing library."""
    return PrivTuneError(
        f"{what} needs {library}, which is not installed: pip install 'privtune[{extra}]'."
    )


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Silence Optuna's messages below warnings inside a ``with`` block."""
    log = logging.getLogger("optuna")
    before = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(before)
