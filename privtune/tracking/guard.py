"""The guard of MLflow's server: an ASGI layer around its app that asks every client for a key.

Every user of a machine reaches its ports, and MLflow's server reads and writes files for whoever asks. So
``privtune ui`` makes a key, and hands it to the server in its environment, which other users cannot read (a
command line they can). MLflow starts the app itself: ``mlflow server --app-name privtune`` finds
:func:`create_app` by an entry point of the group ``mlflow.app``.
"""

from __future__ import annotations

import hmac
import html
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from privtune.errors import PrivTuneError
from privtune.files import write_whole

APP = "privtune"
"""The name of :func:`create_app` among the entry points ``mlflow.app``."""

VARIABLE = "PRIVTUNE_UI_KEY"
"""The environment variable that holds the key: for the server alone."""

REFUSAL = "Use the address that privtune ui printed: it has the key of this server."

_PARAMETER = "key"
_NOT_SENT_ON = [
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
]
# No redirect of HTTP: a browser that comes from the page of `write_door`, another site, would follow it
# without the strict cookie that it has just got. What this page opens comes from the server itself.
_ENTRY = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>MLflow</title><script>'
    "const here = new URL(location.href);"
    f"here.searchParams.delete({_PARAMETER!r});"
    "location.replace(here.href);"
    "</script><noscript>MLflow needs JavaScript.</noscript>"
)
_DOOR = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>MLflow</title>'
    '<meta name="referrer" content="no-referrer"><meta http-equiv="refresh" content="0; url={address}">'
    '<a href="{address}">MLflow</a>'
)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def new_key() -> str:
    """Return a new key: 32 random bytes, as text that an address can hold."""
    return secrets.token_urlsafe(32)


def add_key(address: str, key: str) -> str:
    """Return a URL with a key as its query, before the fragment.

    Example:
        >>> add_key("http://127.0.0.1:5000/#/experiments/1?a=b", "KEY")
        'http://127.0.0.1:5000/?key=KEY#/experiments/1?a=b'
    """
    parts = urlsplit(address)
    return parts._replace(path=parts.path or "/", query=f"{_PARAMETER}={key}").geturl()


def write_door(folder: Path, address: str) -> Path:
    """Write a private page that opens an address in a browser, and return the page's path.

    A browser is started with it in place of the address, because other users see command lines.
    """
    path = folder / "open.html"
    write_whole(path, _DOOR.format(address=html.escape(address)))
    return path


def check_app() -> None:
    """Check that MLflow would find the guard among the installed entry points.

    Raises:
        PrivTuneError: If it will not: what is installed of this package is from before there was a guard.
    """
    from importlib.metadata import entry_points

    values = {point.value for point in entry_points(group="mlflow.app", name=APP)}
    if values != {f"{__name__}:{create_app.__name__}"}:
        raise PrivTuneError(
            "MLflow would not find what guards its server: PrivTune's installation does not fit its code. "
            "Install it again: pip install 'privtune[ui]', or pip install --editable . in its folder."
        )


def create_app() -> App:
    """Return MLflow's app behind the guard, for MLflow to start.

    Raises:
        PrivTuneError: If there is no key.
    """
    key = os.environ.pop(VARIABLE, "")  # nothing that the server starts needs it
    if not key:
        raise PrivTuneError(
            "This app of MLflow's server is started by privtune ui, which makes its key."
        )
    from mlflow.server.fastapi_app import app

    return Guard(app, key)


class Guard:
    """An ASGI app that passes requests on to another app if they bring the key.

    A browser brings the key in the address, once, and gets a cookie. Everybody else sends it as a bearer
    token, as MLflow's clients do with ``MLFLOW_TRACKING_TOKEN``. ``/health`` is open and says "OK".

    Args:
        app: The app behind it.
        key: The key.
    """

    def __init__(self, app: App, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the guarded app if it may enter, and answer it here otherwise."""
        kind = scope["type"]
        if kind == "lifespan" or (kind == "http" and _asks_for_health(scope)):
            await self._app(scope, receive, send)
        elif kind == "http" and self._brings_key(scope):
            await _answer(send, 200, "text/html", _ENTRY, self._cookie(scope))
        elif self._is_known(scope):
            await self._app(scope, receive, send)
        elif kind == "http":
            await _answer(send, 403, "text/plain", REFUSAL + "\n")
        else:
            await send({"type": "websocket.close", "code": 1008})  # before it is accepted: 403

    def _brings_key(self, scope: Scope) -> bool:
        """Return whether the query of a GET address holds the server's key; ``privtune ui`` puts it there."""
        if scope["method"] != "GET":
            return False
        pairs = parse_qsl(scope["query_string"].decode("latin-1"))
        return any(name == _PARAMETER and self._is_key(value) for name, value in pairs)

    def _is_known(self, scope: Scope) -> bool:
        """Return whether a request has the key as a bearer token, or as a cookie from this server's pages."""
        headers = dict(scope["headers"])
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and self._is_key(token.strip()):
            return True
        return self._has_cookie(scope, headers) and _is_of_this_server(scope, headers)

    def _has_cookie(self, scope: Scope, headers: Mapping[bytes, bytes]) -> bool:
        """Return whether a request has this server's cookie with the right key."""
        cookie_name = _cookie_name(scope)
        for cookie in headers.get(b"cookie", b"").split(b";"):
            name, _, value = cookie.strip().partition(b"=")
            if name == cookie_name and self._is_key(value):
                return True
        return False

    def _is_key(self, text: str | bytes) -> bool:
        """Return whether a text is the key, compared in constant time."""
        if isinstance(text, str):
            text = text.encode(errors="replace")
        return hmac.compare_digest(text, self._key)

    def _cookie(self, scope: Scope) -> tuple[bytes, bytes]:
        """Return the header that sets the key's cookie, hidden from scripts and other sites' requests."""
        value = b"=".join((_cookie_name(scope), self._key))
        return b"set-cookie", value + b"; Path=/; HttpOnly; SameSite=Strict"


def _asks_for_health(scope: Scope) -> bool:
    """Return whether a request asks if the server is up, which anybody may."""
    return scope["path"] == "/health" and scope["method"] in {"GET", "HEAD"}


def _cookie_name(scope: Scope) -> bytes:
    """Return the name of this server's cookie, with its port: a cookie goes to all ports of a machine."""
    _, port = scope.get("server") or ("", 0)
    return f"privtune-{port}".encode()


def _is_of_this_server(scope: Scope, headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a browser's request comes from a page of this server, or opens one directly.

    For a browser all ports of a machine are one site: it sends the cookie with what a page of another
    user's server asks for, and MLflow itself accepts that.
    """
    site = headers.get(b"sec-fetch-site")
    if site is None:
        origin = headers.get(b"origin")
        return origin is None or origin.partition(b"://")[2] == headers.get(b"host")
    if site in {b"same-origin", b"none"}:
        return True
    mode = headers.get(b"sec-fetch-mode")
    destination = headers.get(b"sec-fetch-dest")
    opens_page = mode == b"navigate" and destination == b"document"
    return scope.get("method") == "GET" and opens_page


async def _answer(
    send: Send, status: int, kind: str, text: str, *headers: tuple[bytes, bytes]
) -> None:
    """Send an answer with headers that forbid caches and hide the address from other sites."""
    content = text.encode()
    content_type = f"{kind}; charset=utf-8"
    content_length = str(len(content))
    all_headers = [
        (b"content-type", content_type.encode()),
        (b"content-length", content_length.encode()),
        *_NOT_SENT_ON,
        *headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": content})
