"""A PostgreSQL server of a test's own, which it may restart and whose sessions it may kill."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

__all__ = ["Cluster"]


class Cluster:
    """A server in a folder of its own; a test that asks for one is skipped where none can be made."""

    def __init__(self) -> None:
        found = shutil.which("initdb") or next(
            (str(p) for p in sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))), None
        )
        if found is None:
            pytest.skip("no initdb is found here")
        self._bin = Path(found).parent
        self._user = None
        if os.geteuid() == 0:  # PostgreSQL does not run as root
            try:
                self._user = pwd.getpwnam("postgres").pw_name
            except KeyError:
                pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
        self._folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
        if self._user is not None:
            shutil.chown(self._folder, self._user)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._run("initdb", "-U", "postgres", "-A", "trust", "--no-sync")
        self._start()

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self._port}/postgres"

    def restart(self) -> None:
        """Restart it as after a crash: no session is asked, the log is recovered."""
        self._run("pg_ctl", "stop", "-m", "immediate")
        self._start()

    def kill(self, pid: int) -> None:
        """Kill a session's process with SIGKILL: the server ends all sessions and recovers."""
        os.kill(pid, 9)

    def remove(self) -> None:
        self._run("pg_ctl", "stop", "-m", "immediate")
        shutil.rmtree(self._folder)

    def _start(self) -> None:
        options = f"-p {self._port} -k {self._folder} -c listen_addresses=127.0.0.1"
        self._run("pg_ctl", "start", "-w", "-l", str(self._folder / "log"), "-o", options)

    def _run(self, name: str, *args: str) -> None:
        command = [str(self._bin / name), "-D", str(self._folder / "data"), *args]
        subprocess.run(command, check=True, user=self._user, cwd="/", stdout=subprocess.DEVNULL)
