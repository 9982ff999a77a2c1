"""A real MLflow tracking server on this machine, for a test."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from tests.tiers import PATIENCE


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A server process with a log file; starts and stops as often as a test likes."""

    def __init__(self, command: Sequence[str], *, port: int, log: Path, cwd: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.backend = ""
        self._command = list(command)
        self._cwd = cwd
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

    def start(self) -> Server:
        environment = {
            **os.environ,
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
