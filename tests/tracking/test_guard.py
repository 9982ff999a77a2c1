"""Nobody gets to MLflow's server of ``privtune ui`` without its key."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import socket
import stat
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from mlflow import MlflowClient

from privtune.errors import PrivTuneError
from privtune.tracking import guard
from privtune.tracking.guard import REFUSAL, VARIABLE, Guard, add_key, create_app, new_key
from tests.tracked import Tracked
from tests.tracking.servers import Server

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

KEY = "k3yOfThisServer-0123456789_abcdefghijklmnop"  # in the names of tests, so the same everywhere
COOKIE = f"privtune-5000={KEY}"


def ask(path: str = "/", *, method: str = "GET", kind: str = "http", **headers: str) -> Any:
    """What the guard of an app sends; the app behind it would answer with 200 "inside"."""
    sent: list[Any] = []

    async def inside(scope: Any, receive: Any, send: Any) -> None:
        sent.append({"status": 200, "inside": True})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("the guard reads no body")

    path, _, query = path.partition("?")
    named = {name.replace("_", "-").encode(): text.encode() for name, text in headers.items()}
    scope = {
        "type": kind,
        "path": path,
        "query_string": query.encode(),
        "headers": list(named.items()),
        "server": ("127.0.0.1", 5000),
    }
    if kind == "http":
        scope["method"] = method
    asyncio.run(Guard(inside, KEY)(scope, receive, send))
    return sent[0]


def is_inside(answer: Any) -> bool:
    return "inside" in answer


@pytest.mark.quick
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"cookie": "privtune-5000="},
        {"cookie": f"privtune-5000={KEY[:-1]}"},
        {"cookie": f"privtune-5001={KEY}"},
        {"cookie": f"xprivtune-5000={KEY}; ; a"},
        {"authorization": "Bearer"},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": f"Bearer {KEY} {KEY}"},
        {"authorization": f"Basic {KEY}"},
        {"authorization": "Bearer \udcff".encode(errors="replace").decode()},
    ],
)
@pytest.mark.parametrize("path", ["/", "/?key=", "/?key=%ff%00", f"/?key={KEY[1:]}", "/health/"])
def test_a_request_without_the_key_is_refused(headers: dict[str, str], path: str) -> None:
    assert ask(path, **headers)["status"] == 403
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
        assert ask(path, method=method, **headers)["status"] == 403
    closed = ask(path, kind="websocket", **headers)
    assert closed == {"type": "websocket.close", "code": 1008}


@pytest.mark.quick
def test_a_key_lets_in() -> None:
    for headers in ({"authorization": f"bearer {KEY}"}, {"cookie": f"other=1; {COOKIE}"}):
        assert is_inside(ask("/x?y=1", **headers))
        assert is_inside(ask("/x", method="POST", **headers))
        assert is_inside(ask("/x", kind="websocket", **headers))
        assert is_inside(ask("/x?key=another", **headers)), "a parameter of MLflow's own"
    assert ask(f"/?key={KEY}", method="POST")["status"] == 403, "a page is opened, no more"
    assert is_inside(ask("/health"))
    assert ask("/health", method="POST")["status"] == 403
    assert not is_inside(ask("/health", kind="websocket"))
    entry = dict(ask(f"/?key={KEY}")["headers"])
    assert entry[b"set-cookie"] == f"{COOKIE}; Path=/; HttpOnly; SameSite=Strict".encode()
    assert entry[b"cache-control"] == b"no-store"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("headers", "is_let_in"),
    [
        ({"sec_fetch_site": "same-origin"}, True),
        ({"sec_fetch_site": "none"}, True),
        ({"sec_fetch_site": "same-site"}, False),
        ({"sec_fetch_site": "same-site", "sec_fetch_mode": "cors"}, False),
        ({"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors"}, False),
        ({"origin": "http://127.0.0.1:5000", "host": "127.0.0.1:5000"}, True),
        ({"origin": "http://127.0.0.1:6000", "host": "127.0.0.1:5000"}, False),
        ({"origin": "null", "host": "127.0.0.1:5000"}, False),
    ],
)
def test_a_page_of_another_server_cannot_use_the_cookie(
    headers: dict[str, str], is_let_in: bool
) -> None:
    for method in ("GET", "POST"):
        assert is_inside(ask("/api", method=method, cookie=COOKIE, **headers)) is is_let_in
    opened = {"sec_fetch_site": "same-site", "sec_fetch_mode": "navigate"}
    assert is_inside(ask(cookie=COOKIE, sec_fetch_dest="document", **opened)), "a link opens"
    assert not is_inside(ask(cookie=COOKIE, sec_fetch_dest="iframe", **opened))
    assert not is_inside(ask(method="POST", cookie=COOKIE, sec_fetch_dest="document", **opened))


@pytest.mark.quick
def test_mlflow_finds_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """``mlflow server --app-name`` takes a function of the group ``mlflow.app`` as what makes the app."""
    (point,) = set(entry_points(group="mlflow.app", name=guard.APP))
    assert point.load() is create_app
    assert inspect.isfunction(create_app)
    guard.check_app()
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(PrivTuneError, match="started by privtune ui"):
        create_app()
    monkeypatch.setattr(guard, "APP", "nothing")
    with pytest.raises(PrivTuneError, match="Install it again"):
        guard.check_app()


def test_the_app_behind_is_that_which_mlflow_starts_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mlflow import server

    started: list[dict[str, Any]] = []
    monkeypatch.setattr(server, "_build_uvicorn_command", lambda *a: started.append(a) or [])
    monkeypatch.setattr(server, "_exec_cmd", lambda *a, **k: sys.exit())
    with pytest.raises(SystemExit):
        server._run_server(
            file_store_path="sqlite://",
            registry_store_uri=None,
            default_artifact_root=None,
            serve_artifacts=True,
            artifacts_only=True,
            artifacts_destination=None,
            host="127.0.0.1",
            port=5000,
        )
    assert "mlflow.server.fastapi_app:app" in started[0]


BROWSER = """#!/bin/sh
stat -c %a "${1#file://}" > "$SEEN.part"
echo "$1" >> "$SEEN.part"
cat "${1#file://}" >> "$SEEN.part"
mv "$SEEN.part" "$SEEN"
"""


@pytest.fixture(scope="module")
def ui(tracked: Tracked, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("ui")
    browser = folder / "browser"
    browser.write_text(BROWSER)
    browser.chmod(0o700)
    environment = {**os.environ, "BROWSER": str(browser), "SEEN": str(folder / "seen")}
    server = Server.ui(tracked.study.storage, folder, environment=environment).start()
    yield server
    server.stop()


def fetch(
    address: str, *, method: str = "GET", content: bytes | None = None, **headers: str
) -> tuple[int, str, Any]:
    """The status, the text and the headers of an answer."""
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    request = urllib.request.Request(address, content, named, method=method)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


def requests(tracked: Tracked) -> Iterator[tuple[str, str, bytes | None]]:
    """What a co-tenant would ask for."""
    run = next(iter(tracked.runs.values())).info.run_id
    number = tracked.experiment.experiment_id
    made = {"name": "theirs", "artifact_location": "/tmp"}
    yield "GET", "/", None
    yield "GET", "/version", None
    yield "GET", "/static-files/index.html", None
    yield "GET", "/api/3.0/mlflow/server-info", None
    yield "GET", f"/get-artifact?run_id={run}&path=privacy/ledger.json", None
    yield "POST", f"/ajax-api/2.0/mlflow/upload-artifact?run_uuid={run}&path=x", b"x"
    yield "PUT", "/api/2.0/mlflow-artifacts/artifacts/x", b"x"
    yield "GET", "/api/2.0/mlflow-artifacts/artifacts", None
    yield "POST", "/graphql", b'{"query": "{__typename}"}'
    for api in ("api", "ajax-api"):
        yield "GET", f"/{api}/2.0/mlflow/experiments/get?experiment_id={number}", None
        yield "POST", f"/{api}/2.0/mlflow/experiments/create", json.dumps(made).encode()
        yield "POST", f"/{api}/2.0/mlflow/runs/delete", json.dumps({"run_id": run}).encode()


def test_nobody_gets_in_without_the_key(ui: Server, tracked: Tracked) -> None:
    wrong = new_key()
    port = ui.url.rpartition(":")[2]
    for method, path, content in requests(tracked):
        address = ui.url + path
        for headers in (
            {},
            {"Authorization": f"Bearer {wrong}"},
            {"Cookie": f"privtune-{port}={wrong}"},
        ):
            done = fetch(
                address, method=method, content=content, Content_Type="application/json", **headers
            )
            assert done[:2] == (403, f"{REFUSAL}\n"), (method, path, headers)
    assert fetch(add_key(ui.url, wrong))[0] == 403
    assert fetch(f"{ui.url}/health")[:2] == (200, "OK")
    client = MlflowClient(tracking_uri=f"sqlite:///{tracked.folder}/mlflow.db")
    assert client.get_experiment_by_name("theirs") is None
    assert all(run.info.lifecycle_stage == "active" for run in tracked.runs.values())


def test_no_websocket_is_opened_without_the_key(ui: Server) -> None:
    port = int(ui.url.rpartition(":")[2])
    lines = (
        "GET / HTTP/1.1",
        f"Host: 127.0.0.1:{port}",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        "",
        "",
    )
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall("\r\n".join(lines).encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 403 ")


def test_the_printed_address_leads_to_a_page(ui: Server) -> None:
    assert re.search(r"/\?key=[\w-]{43}(#|$)", ui.address)
    status, text, headers = fetch(ui.address)
    assert status == 200
    assert "location.replace" in text
    assert ui.key not in text
    cookie, *rest = headers["Set-Cookie"].split("; ")
    assert set(rest) == {"Path=/", "HttpOnly", "SameSite=Strict"}
    assert cookie.startswith(f"privtune-{ui.url.rpartition(':')[2]}=")
    status, text, _ = fetch(f"{ui.url}/", Cookie=cookie)
    assert (status, "MLflow" in text) == (200, True)
    found = fetch(f"{ui.url}/ajax-api/2.0/mlflow/experiments/search?max_results=9", Cookie=cookie)
    assert found[0] == 200
    # MLflow's own protection against a name of somebody else's that leads here.
    assert fetch(f"{ui.url}/", Cookie=cookie, Host="evil.example")[0] == 403
    assert "Host" in fetch(f"{ui.url}/", Cookie=cookie, Host="evil.example")[1]


def test_a_client_of_mlflow_gets_in(
    ui: Server, tracked: Tracked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    client = MlflowClient(tracking_uri=ui.url)
    with pytest.raises(Exception, match="privtune ui printed"):
        client.search_experiments()
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", ui.key)
    assert client.get_experiment_by_name("toy") is not None
    run = next(iter(tracked.runs.values())).info.run_id
    bearer = {"Authorization": f"Bearer {ui.key}"}
    path = quote("privacy/ledger.json")
    assert fetch(f"{ui.url}/get-artifact?run_id={run}&path={path}", **bearer)[0] == 200


def test_the_key_is_in_no_command_line_and_in_no_log(ui: Server) -> None:
    fetch(ui.address)
    key, port = ui.key.encode(), ui.url.rpartition(":")[2].encode()
    lines = {}
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines[process] = process.read_bytes()
        except OSError:
            continue
    ours = {path: line for path, line in lines.items() if port in line.split(b"\0")}
    assert len(ours) >= 3, "privtune, mlflow and uvicorn"
    assert not any(key in line for line in lines.values())
    for path in ours:
        environment = path.with_name("environ")
        assert stat.S_IMODE(environment.stat().st_mode) == 0o400
    assert ui.log.read_bytes().count(key) == 1, "in the address that privtune ui printed"


def test_a_browser_is_started_with_a_page_that_others_cannot_read(ui: Server) -> None:
    seen = ui.log.with_name("seen")
    for _ in range(100):
        if seen.exists():
            break
        time.sleep(0.3)
    mode, page, text = seen.read_text().split("\n", 2)
    assert mode == "600"
    assert page.startswith("file://")
    assert ui.address.replace("&", "&amp;") in text
    folder = Path(page.removeprefix("file://")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
