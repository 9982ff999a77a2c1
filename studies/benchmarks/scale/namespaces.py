"""A study on three nodes: network namespaces, users and folders of their own; links that are cut.

    python studies/benchmarks/scale/namespaces.py     # as root, with iproute2 and PostgreSQL's programs

One node drives, two work; the database is outside of all three, behind a password. While the round runs,
the first worker's link is cut for 100 s (longer than its sessions) and for 40 s (longer than its lease), and
the driver's for 60 s. Printed is what became of it, when server and client gave up the connections of who was
cut off, and whether the release is that of the same study in one process, bit for bit.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import sqlalchemy as sa
import torch

from privtune.ledger import Ledger
from privtune.strategies import Release
from privtune.study import Study
from tests.execution.cluster import Cluster

NODES = ("driver", "first", "second")
FIRST_UID = 5101
SPEC = """
name: nodes
task: digits-mlp
budget: {name: nodes, epsilon: 8.0, delta: 1.0e-5}
space:
  learning_rate: {type: float, low: 0.05, high: 5.0, log: true}
  max_grad_norm: {type: float, low: 0.1, high: 10.0, log: true}
arms:
  - {name: selection, strategy: papernot-steinke, law: poisson, mean_runs: 80}
epochs: 6
expected_batch_size: 64
device: cpu
stack: 1
seed: 11
"""
CUTS = (("first", 100), ("driver", 60), ("first", 40))


def ip(*words: str) -> None:
    """Change the machine's network, for which this must be root."""
    subprocess.run(["ip", *words], check=True)


class Node:
    """A namespace with a link to the database, a user, and a folder that only this user may enter."""

    def __init__(self, number: int, name: str, root: Path, port: int, password: str) -> None:
        self.name, self._uid, self._outer = name, FIRST_UID + number, f"pt-{name}"
        self.folder, address = root / name, f"10.77.{number}"
        self._port, self._address = port, f"{address}.1"
        ip("netns", "add", self._outer)
        ip(
            "link",
            "add",
            self._outer,
            "type",
            "veth",
            "peer",
            "name",
            "inner",
            "netns",
            self._outer,
        )
        ip("address", "add", f"{address}.1/24", "dev", self._outer)
        ip("link", "set", self._outer, "up")
        ip("-n", self._outer, "address", "add", f"{address}.2/24", "dev", "inner")
        ip("-n", self._outer, "link", "set", "inner", "up")
        self.folder.mkdir(mode=0o700)
        (self.folder / ".pgpass").write_text(f"*:*:*:privtune:{password}\n")
        (self.folder / ".pgpass").chmod(0o600)
        (self.folder / "spec.yaml").write_text(SPEC)
        for path in (self.folder, *self.folder.iterdir()):
            os.chown(path, self._uid, self._uid)

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start a command of PrivTune there, as that user, in that folder."""
        user = ["--reuid", str(self._uid), "--regid", str(self._uid), "--clear-groups"]
        command = ["ip", "netns", "exec", self._outer, "setpriv", *user, sys.executable]
        environment = {
            "HOME": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "PATH": os.environ["PATH"],
            "PRIVTUNE_STORAGE": f"postgresql://privtune@{self._address}:{self._port}/postgres",
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        }
        return subprocess.Popen(
            [*command, "-m", "privtune", *words],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def cut(self, seconds: float, server: Server) -> dict[str, float | None]:
        """Take its link away for a while; nobody is told. Say when each side gave up what was open."""
        ask = f"SELECT pid FROM pg_stat_activity WHERE client_addr = '{self._address[:-1]}2'"
        looks = {
            "server": lambda: {row[0] for row in server.ask(ask)},
            "client": lambda: set(self._connections()),
        }
        open_then = {side: look() for side, look in looks.items()}
        gone: dict[str, float | None] = dict.fromkeys(looks)
        ip("link", "set", self._outer, "down")
        begun = time.monotonic()
        while (passed := time.monotonic() - begun) < seconds:
            for side, look in looks.items():
                if gone[side] is None and not open_then[side] & look():
                    gone[side] = round(passed, 1)
            time.sleep(0.5)
        ip("link", "set", self._outer, "up")
        return gone

    def _connections(self) -> list[str]:
        """Return the connections to the database that its own side takes for alive."""
        words = ["ip", "netns", "exec", self._outer, "ss", "-Htn", "state", "established"]
        return [line.split()[2] for line in subprocess.check_output(words, text=True).splitlines()]

    def remove(self) -> None:
        """Remove the namespace, and the link with it."""
        ip("netns", "delete", self._outer)


class Server(Cluster):
    """A server that nodes reach by a password."""

    def open_to(self, password: str) -> None:
        """Listen to the nodes, and make their role."""
        with (self._folder / "data" / "pg_hba.conf").open("a") as file:
            file.write("host all all 10.77.0.0/16 scram-sha-256\n")
        with (self._folder / "data" / "postgresql.conf").open("a") as file:
            file.write("max_connections = 50\n")
        self._run("pg_ctl", "stop", "-m", "fast")
        options = f"-p {self._port} -k {self._folder} -c listen_addresses=*"
        self._run("pg_ctl", "start", "-w", "-l", str(self._folder / "log"), "-o", options)
        for line in (
            f"CREATE ROLE privtune LOGIN PASSWORD '{password}'",
            "GRANT CREATE ON SCHEMA public TO privtune",
        ):
            self.ask(line)

    def ask(self, question: str) -> list[sa.Row[tuple[object, ...]]]:
        """Ask as its administrator."""
        engine = sa.create_engine(self.url.replace("://", "+psycopg://"))
        with engine.begin() as connection:
            found = connection.execute(sa.text(question))
            rows = list(found.all()) if found.returns_rows else []
        engine.dispose()
        return rows


def alone(folder: Path) -> Release:
    """Run the study in this process; return what is released."""
    from privtune.study import StudySpec

    (folder / "alone.yaml").write_text(SPEC)
    url = f"sqlite:///{folder / 'alone.db'}"
    study = Study.create(StudySpec.from_file(folder / "alone.yaml"), url)
    (release,) = study.run()
    return release


def main() -> None:
    """Run it, and print what was found as JSON."""
    torch.set_num_threads(1)  # as the nodes
    root = Path(tempfile.mkdtemp(prefix="nodes-"))
    root.chmod(0o711)
    password, server = secrets.token_hex(8), Server()
    nodes: dict[str, Node] = {}
    running: list[subprocess.Popen[str]] = []
    try:
        server.open_to(password)
        for number, name in enumerate(NODES):
            nodes[name] = Node(number, name, root, server._port, password)
        doctor = nodes["first"].start("doctor")
        said = doctor.communicate()[0].splitlines()
        made = nodes["driver"].start("study", "create", "spec.yaml")
        told = made.communicate()[0]
        assert made.returncode == 0, told
        workers = {n: nodes[n].start("worker", "--idle-exit", "300") for n in ("first", "second")}
        driver = nodes["driver"].start(
            "study", "run", "nodes", "--executor", "external", "--no-mlflow"
        )
        running += [driver, *workers.values()]
        done = "SELECT count(*) FROM privtune_tasks WHERE done = 1"

        def cut() -> None:
            while driver.poll() is None and server.ask(done)[0][0] == 0:
                time.sleep(0.2)
            for name, seconds in CUTS:
                if driver.poll() is not None:
                    return
                before = server.ask(done)[0][0]
                gave_up = nodes[name].cut(seconds, server)
                after = server.ask(done)[0][0]
                cuts.append(f"{name} {seconds} s: rows {before} to {after}; gave up: {gave_up}")
                time.sleep(5)

        cuts: list[str] = []
        begin = time.monotonic()
        cutter = threading.Thread(target=cut)
        cutter.start()
        out = driver.communicate()[0]
        took = time.monotonic() - begin
        cutter.join()
        if driver.returncode:
            print(Study("nodes", server.url, curator=True).failures("selection"), out)
        rows = server.ask("SELECT worker, attempts, done FROM privtune_tasks ORDER BY number")
        names = {process.pid: name for name, process in workers.items()}
        by = [names.get(int(str(row[0]).partition("-")[0] or 0), "nobody") for row in rows]
        with Ledger(server.url) as ledger:
            charges = [str(charge.state) for charge in ledger.charges("nodes")]
        study = Study("nodes", server.url)
        (released,), expected = study.releases(), alone(root)
        same = released.params == expected.params and torch.equal(
            released.weights, expected.weights
        )
        print(
            json.dumps(
                {
                    "doctor": said,
                    "driver": [driver.returncode, out.splitlines()[-9:]],
                    "workers alive": {n: p.poll() is None for n, p in workers.items()},
                    "charges": charges,
                    "rows": len(rows),
                    "done": sum(int(str(row[2])) for row in rows),
                    "last held by": {name: by.count(name) for name in sorted(set(by))},
                    "taken over": sum(int(str(row[1])) > 1 for row in rows),
                    "cuts": cuts,
                    "seconds": round(took, 1),
                    "the release of one process, bit for bit": same,
                },
                indent=1,
                default=str,
            ),
            flush=True,
        )
    finally:
        for process in running:
            process.kill()
        for node in nodes.values():
            node.remove()
        server.remove()
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
