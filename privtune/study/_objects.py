"""Large results in an object store: encrypted there (AES-256-GCM), under keys that are in the database alone.

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

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.files import private_folder

_OURS = re.compile(r"/([0-9a-f]{16}|check)/[0-9a-f]{32}\Z")  # names of objects below the study's id
_CHUNK = 2**30  # bytes; one call of AES-GCM takes less than 2³¹
_TAG = 16
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


class DamagedResultError(PrivTuneError):
    """A stored result is missing, damaged, or another one than was stored there."""


def check_address(url: str) -> str:
    """Return the address of an object store as fsspec takes it, absolute and without secrets."""
    scheme, separator, rest = url.partition("://")
    if not separator or not rest or (scheme in {"file", "local"} and not rest.startswith("/")):
        raise InvalidInputError(
            "artifacts", url, "must be an absolute URL", "As s3://bucket/folder or file:///folder."
        )
    if "@" in rest.partition("/")[0] or "?" in rest:
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
    """The objects of one study, whose uid names their folder."""

    address: str
    uid: str

    def put(self, content: bytes, *, identity: str, folder: str) -> str:
        """Encrypt and store a result under its name (``identity``); return its place and key, for its row."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        name, key = f"{folder}/{uuid.uuid4().hex}", secrets.token_bytes(32)
        count = max(1, -(-len(content) // _CHUNK))
        parts = (content[n * _CHUNK : (n + 1) * _CHUNK] for n in range(count))
        sealed = b"".join(
            # The key is this object's alone, so that counting makes nonces that never repeat.
            AESGCM(key).encrypt(n.to_bytes(12, "big"), part, self._about(identity, n, count))
            for n, part in enumerate(parts)
        )
        with self._speaking("written to"):
            if "file" in self._files.protocol:
                private_folder(Path(self._files._strip_protocol(self._path(folder))))
            self._files.pipe_file(self._path(name), sealed)
        return json.dumps({"name": name, "key": key.hex()})

    def get(self, place: str, *, identity: str) -> bytes:
        """Return the result at a place, if it is the one that was stored under this name (``identity``)."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        where = json.loads(place)
        key = AESGCM(bytes.fromhex(where["key"]))
        try:
            with self._speaking("read", but=(FileNotFoundError,)):
                sealed = self._files.cat_file(self._path(where["name"]))
            size = _CHUNK + _TAG
            count = max(1, -(-len(sealed) // size))
            parts = [sealed[n * size : (n + 1) * size] for n in range(count)]
            return b"".join(
                key.decrypt(n.to_bytes(12, "big"), part, self._about(identity, n, count))
                for n, part in enumerate(parts)
            )
        except (FileNotFoundError, InvalidTag):
            raise DamagedResultError(
                f"A result in {self.address} is missing, damaged, or not the one that was stored "
                "there: it is not used. What is not released yet is trained anew from the same seeds, "
                "without another charge, when the study is run again."
            ) from None

    def remove(self, place: str) -> None:
        """Delete one object; without its key it is noise, so one that stays tells nothing."""
        with contextlib.suppress(Exception):
            self._files.rm_file(self._path(json.loads(place)["name"]))

    def remove_all(self, folder: str = "", *, expected: bool = False) -> None:
        """Delete a study's objects in a folder; ``expected``: there must be a store, mounted."""
        local = "file" in self._files.protocol
        with self._speaking("cleared"):
            if local and expected and not self._files.exists(self.address):
                raise FileNotFoundError
            with contextlib.suppress(FileNotFoundError):
                for name in self._files.find(self._path(folder)):
                    if _OURS.search(name):
                        self._files.rm_file(name)
            if local:
                self._remove_empty(Path(self._files._strip_protocol(self._path(folder))))

    @staticmethod
    def _remove_empty(path: Path) -> None:
        for part in (*path.glob("*"), path):
            with contextlib.suppress(OSError):  # it holds files of others, or is none
                part.rmdir()

    def check(self) -> None:
        """Write, read and delete an object, before anything is charged."""
        place = self.put(b"privtune", identity="check", folder="check")
        self.get(place, identity="check")
        self.remove(place)

    def _path(self, name: str) -> str:
        return f"{self.address}/{self.uid}/{name}"

    def _about(self, identity: str, number: int, count: int) -> bytes:
        return json.dumps([self.uid, identity, number, count]).encode()

    @cached_property
    def _files(self) -> Any:
        # No cache of listings: others write here at the same time.
        return _opener(self.address, self.address.partition("://")[0])(use_listings_cache=False)

    @contextlib.contextmanager
    def _speaking(self, doing: str, *, but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Turn what stores raise into one sentence: theirs may show requests with their keys."""
        try:
            yield
        except Exception as error:
            if isinstance(error, (PrivTuneError, *but)):
                raise
            why = next((why for kind, why in _REASONS if isinstance(error, kind)), "")
            raise PrivTuneError(
                f"{self.address} cannot be {doing} from here ({why or type(error).__name__}). What was "
                f"charged stays charged; mend that and {_AGAIN.get(doing, _RUN)}"
            ) from None
