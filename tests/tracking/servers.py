"""Tracking servers on this machine, for a test: MLflow's own, and some that hold up whoever asks them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from tests.tiers import PATIENCE


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A server process with a log file; starts and stops as often as a test likes."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        port: int,
        log: Path,
        cwd: Path,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.backend = ""
        self._command = list(command)
        self._cwd = cwd
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def mlflow(cls, folder: Path, backend: str) -> Server:
        port = free_port()
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", backend]
        command += ["--artifacts-destination", str(folder / "served"), "--host", "127.0.0.1"]
        command += ["--port", str(port), "--workers", "1"]
        server = cls(command, port=port, log=folder / "server.log", cwd=folder)
        server.backend = backend
        return server

    @classmethod
    def ui(
        cls,
        storage: str,
        folder: Path,
        *options: str,
        environment: Mapping[str, str] = os.environ,
    ) -> Server:
        """Return ``privtune ui`` itself, as a user starts it."""
        port = free_port()
        command = [sys.executable, "-m", "privtune", "ui", "--storage", storage, *options]
        command += ["--port", str(port)]
        root = Path(__file__).parents[2]
        log = folder / "ui.log"
        return cls(command, port=port, log=log, cwd=root, environment=environment)

    @property
    def address(self) -> str:
        """The link that ``privtune ui`` printed, with its key."""
        found = re.search(r"MLflow: (\S+)", self.log.read_text())
        assert found is not None
        return found[1]

    @property
    def key(self) -> str:
        return parse_qs(urlsplit(self.address).query)["key"][0]

    def start(self) -> Server:
        environment = {
            **self._environment,
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=environment,
                stdout=log,
                stderr=log,
                cwd=self._cwd,
                start_new_session=True,
            )
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise RuntimeError(self.log.read_text())
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=PATIENCE):
                    return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)
        self.stop()
        raise RuntimeError(f"no answer in {PATIENCE} s: {self.log.read_text()}")

    def stop(self) -> None:
        if self._process is None:
            return
        # The server is a process with children: the whole session that was started here ends.
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(timeout=10)
                break
            except subprocess.TimeoutExpired:
                continue
            except ProcessLookupError:
                break
        self._process = None


Behaviour = Callable[[socket.socket, threading.Event], None]


def _trickle(before: bytes, drop: bytes) -> Behaviour:
    """Answer the start at once, and then a byte a second for ever: no read waits longer than that."""

    def answer(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(65_536)
        connection.sendall(before)
        while not over.wait(0.5):
            connection.sendall(drop)

    return answer


def _be_silent(connection: socket.socket, over: threading.Event) -> None:
    over.wait()


def _fail(connection: socket.socket, over: threading.Event) -> None:
    connection.recv(65_536)
    start = b"HTTP/1.1 500 Internal Server Error\r\nConnection: close\r\n"
    connection.sendall(start + b"Content-Length: 4\r\n\r\nbad!")


def _be_nonsense(connection: socket.socket, over: threading.Event) -> None:
    while connection.recv(65_536):
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n[1,2]")


BEHAVIOURS: dict[str, Behaviour] = {
    "status": _trickle(b"", b"H"),
    "headers": _trickle(b"HTTP/1.1 200 OK\r\n", b"X"),
    "body": _trickle(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n{", b" "),
    "silent": _be_silent,
    "500": _fail,
    "nonsense": _be_nonsense,
}


@contextlib.contextmanager
def behaving(answer: Behaviour) -> Iterator[tuple[str, list[float]]]:
    """Yield the URL of a server that treats each connection in a way, and when connections came."""
    over, came = threading.Event(), list[float]()
    listener = socket.create_server(("127.0.0.1", 0))

    def treat(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            answer(connection, over)

    def listen() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                came.append(time.monotonic())
                threading.Thread(target=treat, args=(connection,), daemon=True).start()

    threading.Thread(target=listen, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", came
    finally:
        over.set()
        listener.close()


def hanging_after(url: str, requests: int) -> Behaviour:
    """Pass requests on to a server, so many in all; those that come later are never answered."""
    host, port = url.removeprefix("http://").split(":")
    seen = [0]

    def answer(connection: socket.socket, over: threading.Event) -> None:
        with socket.create_connection((host, int(port))) as there:

            def back() -> None:
                with contextlib.suppress(OSError):
                    while content := there.recv(65_536):
                        connection.sendall(content)

            threading.Thread(target=back, daemon=True).start()
            while content := connection.recv(65_536):
                seen[0] += content.count(b" HTTP/1.1\r\n")
                if seen[0] > requests:
                    over.wait()
                    return
                there.sendall(content)

    return answer
