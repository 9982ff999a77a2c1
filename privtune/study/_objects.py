"""Large results in an object store, encrypted with AES-256-GCM under keys kept in the database alone.

With its row a key is gone, whatever a store keeps. How many objects there are, how large and when they were
written tells a sealed round's number of runs: whoever may list a store is inside the trust boundary.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from privtune.errors import InvalidInputError, PrivTuneError, UnreachableFileError
from privtune.files import private_folder
from privtune.ledger.errors import Place, StudyCorruptedError
from privtune.ledger.reading import parsing, read_object

_OURS = re.compile(r"/([0-9a-f]{16}|check)/[0-9a-f]{32}\Z")  # names of objects below the study's id
_CHUNK = 2**30  # bytes; one call of AES-GCM takes less than 2³¹
_TAG = 16  # bytes that AES-GCM adds to a chunk
_KEY = 32  # bytes of an AES-256 key
# What fsspec opens, and one process alone sees, or is a view of another store.
_NO_STORES = frozenset({
    "async_wrapper", "asyncwrapper", "blockcache", "cached", "data", "dir", "filecache", "generic",
    "libarchive", "memory", "reference", "simplecache", "tar", "zip",
})  # fmt: skip

_RUN = "run the study again: it goes on where it was."
_AGAIN = {
    "cleared": "delete the study again: it goes on where it was. A store that is gone for good: "
    "privtune study delete NAME --leave-objects (without the keys, which go, they are noise)."
}
_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (FileNotFoundError, "there is no such bucket or folder"),
    (
        PermissionError,
        "access is denied: its keys, from the environment, are wrong or may not do that",
    ),
)


class DamagedResultError(StudyCorruptedError):
    """A stored result is missing, damaged, or replaced by another one."""


def check_address(url: str) -> str:
    """Check the URL of an object store, which must be absolute and hold no secrets; return it."""
    scheme, separator, rest = url.partition("://")
    is_relative = scheme in {"file", "local"} and not rest.startswith("/")
    if not separator or not rest or is_relative:
        raise InvalidInputError(
            "artifacts", url, "must be an absolute URL", "As s3://bucket/folder or file:///folder."
        )
    host, _, _ = rest.partition("/")
    if "@" in host or "?" in rest:
        raise InvalidInputError(
            "artifacts",
            f"{scheme}://...",
            "must hold no name, password or option: it is recorded",
            "Keys of stores belong into the environment of whoever trains.",
        )
    if scheme in _NO_STORES:
        raise InvalidInputError(
            "artifacts",
            url,
            f"{scheme} is no store of its own that other processes reach",
            "As s3://bucket/folder or file:///folder; large results are files beside the study unless given.",
        )
    _opener(url, scheme)
    return url.rstrip("/")


def _opener(url: str, scheme: str) -> type[Any]:
    """Return fsspec's filesystem class for a URL scheme; refuse one that is unknown or not installed."""
    import fsspec

    try:
        return cast("type[Any]", fsspec.get_filesystem_class(scheme))
    except ValueError:
        raise InvalidInputError("artifacts", url, f"{scheme} is no store that is known") from None
    except ImportError as error:
        says = (
            f"needs a package that is not installed here, wherever something is trained ({error})"
        )
        raise InvalidInputError("artifacts", url, says) from None


@dataclass(frozen=True)
class ObjectStore:
    """The objects of one study in one object store, below a folder named by the owner's id.

    Attributes:
        address: The object store's URL.
        uid: The study's id, which every object is bound to.
        owner: The id of the study in its store: a restored copy of the store has objects of its own.
    """

    address: str
    uid: str
    owner: str

    def put(self, content: bytes, *, identity: str, folder: str) -> str:
        """Encrypt and store a result; return the object's name and key as JSON, for its row.

        Args:
            content: The result.
            identity: The result's name, which is authenticated with it: no other name opens it.
            folder: Where below the study's id the object is written, under a random name.

        Returns:
            ``{"name": ..., "key": ...}`` as JSON.
        """
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        name = f"{folder}/{uuid.uuid4().hex}"
        key = secrets.token_bytes(_KEY)
        cipher = AESGCM(key)
        count = _chunk_count(content, _CHUNK)
        parts = []
        for number, chunk in enumerate(_chunks(content, _CHUNK)):
            about = self._about(identity, number, count)
            parts.append(cipher.encrypt(_nonce(number), chunk, about))
        self._write(name, b"".join(parts))
        return json.dumps({"name": name, "key": key.hex()})

    def _write(self, name: str, sealed: bytes) -> None:
        """Write an encrypted object; remove what a failed write leaves behind."""
        with self._speaking("written to"):
            path = self._path(name)
            if self._is_local:
                folder, _, _ = path.rpartition("/")
                private_folder(self._local_path(folder))
            try:
                self._files.pipe_file(path, sealed)
            except Exception:
                self._remove_object(name)  # what a full disk left of it
                raise

    def holds(self, place: str) -> bool:
        """Return whether the object that a row's place names exists."""
        with self._speaking("read"):
            document = json.loads(place)
            path = self._path(document["name"])
            return bool(self._files.exists(path))

    def copy_from(self, other: ObjectStore, place: str) -> None:
        """Copy an encrypted object from another owner's folder under the same name, with the same key."""
        name = json.loads(place)["name"]
        with other._speaking("read"):
            sealed = other._files.cat_file(other._path(name))
        self._write(name, sealed)

    def get(self, place: str, *, identity: str) -> bytes:
        """Return the decrypted result at a place; refuse one that was stored under another name.

        Args:
            place: What :meth:`put` returned.
            identity: The result's name.

        Raises:
            DamagedResultError: If the object is missing, or is another one or of another name.
            UnreachableFileError: If the store cannot be read from here.
        """
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        column = Place("privtune_blobs", "place")
        with parsing(column):
            document = read_object(place, column)
            cipher = AESGCM(bytes.fromhex(document["key"]))
            path = self._path(document["name"])
        try:
            with self._speaking("read", but=(FileNotFoundError,)):
                sealed = self._files.cat_file(path)
            size = _CHUNK + _TAG
            count = _chunk_count(sealed, size)
            parts = []
            for number, chunk in enumerate(_chunks(sealed, size)):
                about = self._about(identity, number, count)
                parts.append(cipher.decrypt(_nonce(number), chunk, about))
            return b"".join(parts)
        except (FileNotFoundError, InvalidTag):
            raise DamagedResultError(
                f"A result in {self.address} is missing, damaged, or not the one that was stored "
                "there: it is not used. What is not released yet is trained anew from the same seeds, "
                "without another charge, when the study is run again."
            ) from None

    def remove(self, place: str) -> None:
        """Delete one object and ignore errors, since an object without its key is unreadable."""
        with contextlib.suppress(Exception):
            document = json.loads(place)
            self._remove_object(document["name"])

    def _remove_object(self, name: str) -> None:
        """Delete an object by its name and ignore errors, so that none hides the caller's own."""
        with contextlib.suppress(Exception):
            path = self._path(name)
            self._files.rm_file(path)

    def remove_all(self, folder: str = "", *, expected: bool = False) -> None:
        """Delete the study's objects in a folder; ``expected`` refuses a local store that is not mounted."""
        path = self._path(folder)
        is_local = self._is_local
        with self._speaking("cleared"):
            if expected and is_local and not self._files.exists(self.address):
                raise FileNotFoundError
            with contextlib.suppress(FileNotFoundError):
                for name in self._files.find(path):
                    if _OURS.search(name):
                        self._files.rm_file(name)
            if is_local:
                self._remove_empty(self._local_path(path))

    @staticmethod
    def _remove_empty(path: Path) -> None:
        """Delete a folder and its direct subfolders where they are empty."""
        for part in (*path.glob("*"), path):
            with contextlib.suppress(OSError):  # it holds files of others, or is none
                part.rmdir()

    def check(self) -> None:
        """Write, read and delete an object, before anything is charged."""
        place = self.put(b"privtune", identity="check", folder="check")
        self.get(place, identity="check")
        self.remove(place)

    def _path(self, name: str) -> str:
        return f"{self.address}/{self.owner}/{name}"

    def _about(self, identity: str, number: int, count: int) -> bytes:
        """Return the data that authenticates a chunk: study id, result name, chunk number and chunk count."""
        parts = [self.uid, identity, number, count]
        return json.dumps(parts).encode()

    @property
    def _is_local(self) -> bool:
        return "file" in self._files.protocol

    def _local_path(self, path: str) -> Path:
        return Path(self._files._strip_protocol(path))

    @cached_property
    def _files(self) -> Any:
        scheme, _, _ = self.address.partition("://")
        opener = _opener(self.address, scheme)
        # No cache of listings: others write here at the same time.
        return opener(use_listings_cache=False)

    @contextlib.contextmanager
    def _speaking(self, doing: str, *, but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Replace errors of the store by one sentence, since their texts may show secret keys."""
        try:
            yield
        except Exception as error:
            if isinstance(error, (PrivTuneError, *but)):
                raise
            reason = type(error).__name__
            for kind, words in _REASONS:
                if isinstance(error, kind):
                    reason = words
                    break
            remedy = _AGAIN.get(doing, _RUN)
            raise UnreachableFileError(
                f"{self.address} cannot be {doing} from here ({reason}). What was "
                f"charged stays charged; mend that and {remedy}"
            ) from None


def _chunk_count(content: bytes, size: int) -> int:
    """Return the number of chunks of ``size`` bytes in a content, at least 1."""
    return max(1, -(-len(content) // size))


def _chunks(content: bytes, size: int) -> Iterator[bytes]:
    """Yield a content in chunks of ``size`` bytes, the last of which may be shorter."""
    for number in range(_chunk_count(content, size)):
        start = number * size
        yield content[start : start + size]


def _nonce(number: int) -> bytes:
    """Return the 12-byte nonce of a chunk, which is its number, since each key encrypts one object."""
    return number.to_bytes(12, "big")
