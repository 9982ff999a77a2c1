"""What a crowd of workers does to PostgreSQL, without the CPU of the workers: sessions of pgbench.

    python studies/benchmarks/scale/sessions.py --out sessions.json        # needs PostgreSQL's programs

A server of its own is started. The statements are those that a worker sends: they are taken down from one.
Every session leases a row, sleeps for as long as a training, renews its lease every five seconds, hands in.
So a thousand workers need no thousand machines, and the loss of their time is measured, not concluded.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import psycopg
import sqlalchemy as sa

from privtune.execution.table import LEASE_SECONDS, make_rounds
from privtune.ledger import Ledger
from privtune.ledger.rounds import Submission
from studies.benchmarks.scale.leases import open_round
from tests.execution.cluster import Cluster

CROWDS = ((1, 0.0), (4, 0.0), (16, 0.0), (64, 0.0), (64, 1.0), (1000, 10.0))
SPREAD = 0.4  # of trainings: no two take as long


class Server(Cluster):
    """A server for more sessions than is usual."""

    def open(self, sessions: int) -> None:
        """Start it anew for so many."""
        with (self._folder / "data" / "postgresql.conf").open("a") as file:
            file.write(f"max_connections = {sessions + 20}\nshared_buffers = 256MB\n")
        self.restart()

    def programs(self) -> Path:
        """Return the folder of PostgreSQL's programs."""
        return (
            self._bin
            if (self._bin / "pgbench").exists()
            else next(
                path.parent for path in sorted(Path("/usr/lib/postgresql").glob("*/bin/pgbench"))
            )
        )


def statements(url: str) -> list[str]:
    """Return what a worker sends to lease one row, renew it, and hand in."""
    charge, seen = open_round(url, 5), list[str]()
    with Ledger(url) as ledger:
        engine = ledger.log.storage.engine
        rounds = make_rounds(ledger)
        rounds.lease_some(charge, "sentinel", most=1, workers=1)  # finds the round

        def note(connection: Any, _cursor: Any, text: str, values: Any, *_: Any) -> None:
            driver = connection.connection.dbapi_connection
            seen.append(psycopg.ClientCursor(driver).mogrify(text, values))

        sa.event.listen(engine, "before_cursor_execute", note)
        leases = rounds.lease_some(charge, "sentinel", most=1, workers=1)
        rounds.renew_some(leases)
        rounds.complete_some([Submission(leases[0], 0.5, {})])
    lease, renew, hand_in = seen
    row = leases[0].number

    def general(text: str) -> str:
        text = re.sub(r"\s+", " ", text).replace("'sentinel'", "('worker-' || :client_id)")
        text = text.replace("charge = 1::", "charge = :charge::")
        text = re.sub(rf"number( =| IN \() ?{row}::", r"number\1 :number::", text)
        return re.sub(r"number >= \d+::", "number >= :since::", text)

    return [general(text) for text in (lease, renew, hand_in)]


def script(asked: list[str], charge: int, training: float, spread: float) -> str:
    """Return what one worker does with one row, for pgbench."""
    lease, renew, hand_in = asked
    # A worker knows before which row none is open; so far apart at most are those at work.
    lines = [
        rf"\set charge {charge}",
        rf"\set since greatest(:number - {LAG}, 0)",
        rf"{lease} \gset",
    ]
    left = training
    while left > LEASE_SECONDS / 3:
        lines += [rf"\sleep {int(1e6 * LEASE_SECONDS / 3)} us", f"{renew};"]
        left -= LEASE_SECONDS / 3
    if left:
        span = int(1e6 * spread * left)
        lines += [rf"\set last {int(1e6 * left)} + random(-{span}, {span})", r"\sleep :last us"]
    return "\n".join([*lines, "BEGIN;", f"{hand_in};", "COMMIT;", ""])


LAG = 3000


def crowd(
    server: Server,
    asked: list[str],
    *,
    sessions: int,
    training: float,
    spread: float,
    rounds: int,
    folder: Path,
) -> dict[str, float]:
    """Have so many sessions work on rows; return what a row took, and cost the server."""
    rows = rounds * sessions
    charge = open_round(server.url, rows + LAG)
    file = folder / "script.sql"
    file.write_text(script(asked, int(charge.rpartition("-")[2]), training, spread))
    threads = str(min(sessions, 2))
    command = [str(server.programs() / "pgbench"), "-n", "-f", str(file), "-c", str(sessions)]
    command += ["-j", threads, "-t", str(rounds), "-l", "-D", "number=0", server.url]
    before = os.times()
    (logs := folder / f"{sessions}-{training}").mkdir()
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=logs).stdout
    after = os.times()
    pgbench = after.children_user + after.children_system
    pgbench -= before.children_user + before.children_system
    with Ledger(server.url) as ledger:
        left = make_rounds(ledger).open_count(charge)
    assert left == LAG, (left, said)
    lines = [line.split() for log in logs.iterdir() for line in log.read_text().splitlines()]
    # A session's first row fills its caches; workers stay for many.
    first = [int(line[2]) / 1e3 for line in lines if int(line[1]) == 1]
    took = sorted(int(line[2]) / 1e3 for line in lines if int(line[1]) > 1)
    rate = re.search(r"tps = ([\d.]+)", said)
    assert rate is not None, said
    return {
        "sessions": sessions,
        "training_s": training,
        "spread": spread,
        "rows": rows,
        "first_row_ms": statistics.mean(first),
        "row_ms": statistics.mean(took),
        "row_p99_ms": took[int(0.99 * (len(took) - 1))],
        "rows_per_second": float(rate[1]),
        "clients_cpu_ms_per_row": 1e3 * pgbench / rows,
    }


def main() -> None:
    """Measure, simulate, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--spread", type=float, default=SPREAD, help="0: all trainings take as long"
    )
    parser.add_argument("--largest", action="store_true", help="the largest crowd alone")
    asked = parser.parse_args()
    crowds = CROWDS[-1:] if asked.largest else CROWDS
    server, found = Server(), []
    try:
        server.open(max(sessions for sessions, _ in CROWDS))
        sent = statements(server.url)
        with tempfile.TemporaryDirectory() as folder:
            for sessions, training in crowds:
                rounds = 7 if training else max(20, 2000 // sessions)
                begun = server_cpu(server)
                one = crowd(
                    server,
                    sent,
                    sessions=sessions,
                    training=training,
                    spread=asked.spread,
                    rounds=rounds,
                    folder=Path(folder),
                )
                one["server_cpu_ms_per_row"] = 1e3 * (server_cpu(server) - begun) / one["rows"]
                if training:
                    one["overhead"] = one["row_ms"] / 1e3 / training - 1
                    whole = (one["first_row_ms"] + (rounds - 1) * one["row_ms"]) / rounds
                    one["overhead_with_first_row"] = whole / 1e3 / training - 1
                found.append(one)
                print(json.dumps(one), flush=True)
    finally:
        server.remove()
    asked.out.write_text(json.dumps({"statements": sent, "crowds": found}, indent=1))


def server_cpu(server: Server) -> float:
    """Return the CPU seconds of all that the server ever ran, ended sessions included."""
    with psycopg.connect(server.url) as own:
        folder = own.execute("SHOW data_directory").fetchone()
    assert folder is not None
    pid = int(Path(str(folder[0]), "postmaster.pid").read_text().splitlines()[0])
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
