"""A way to PostgreSQL that is cut at chosen moments, as by a server that is restarted."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Self

import sqlalchemy as sa


class Proxy:
    """Passes connections on to a server; at some of the messages it ends all of them, and refuses new ones.

    Args:
        url: The server's URL.
        cuts: At the how-manieth message of clients, in all, connections are cut.
        away: Seconds for which new ones are refused.
        seed: Draws whether a message still reaches the server, whose answer is lost then.
    """

    def __init__(
        self, url: str, *, cuts: tuple[int, ...] = (), away: float = 0.3, seed: int = 0
    ) -> None:
        self._there = sa.make_url(url)
        self._cuts = set(cuts)
        self._away = away
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._back = 0.0
        self.messages = 0
        self.times_cut = 0

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.cut(0.0)

    @property
    def url(self) -> str:
        """The URL of the server by this way."""
        port = self._listener.getsockname()[1]
        here = self._there.set(host="127.0.0.1", port=port)
        return here.render_as_string(hide_password=False)

    def cut(self, away: float) -> None:
        """End all connections, and refuse new ones for a while."""
        with self._lock:
            self._back = time.monotonic() + away
            ended, self._open = self._open, set()
        for connection in ended:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._treat, args=(connection,), daemon=True).start()

    def _treat(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            if time.monotonic() < self._back:
                return
            with socket.create_connection((self._there.host, self._there.port or 5432)) as server:
                with self._lock:
                    self._open |= {client, server}
                back = threading.Thread(target=_pass_on, args=(server, client), daemon=True)
                back.start()
                for content in _chunks(client):
                    with self._lock:
                        self.messages += 1
                        is_cut = self.messages in self._cuts
                        reaches = self._random.random() < 0.5
                    if not is_cut or reaches:
                        server.sendall(content)
                    if is_cut:
                        time.sleep(0.05 if reaches else 0.0)  # the server does what it was asked to
                        self.times_cut += 1
                        self.cut(self._away)
                with contextlib.suppress(OSError):
                    server.shutdown(socket.SHUT_RDWR)
                back.join()


def _chunks(source: socket.socket) -> Iterator[bytes]:
    while content := source.recv(65_536):
        yield content


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        for content in _chunks(source):
            target.sendall(content)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)
