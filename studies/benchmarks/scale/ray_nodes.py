"""Three Ray nodes on one machine, of which one is killed twice: one charge, every row once, nothing told.

    PRIVTUNE_STORAGE=sqlite:///FOLDER/scale.db python studies/benchmarks/scale/ray_nodes.py --rows 200

Rows do no work but to wait a moment; a result is a function of its row's seed. Afterwards everything that
Ray wrote (its session's folder: logs, sockets' names, spilled objects) is searched for what must not be
there: seeds, scores, and the storage's address.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from privtune.accounting import Gaussian, Geometric, PrivateSelection
from privtune.execution.launchers import run_on_ray
from privtune.execution.table import RowResult, make_rounds, work_through
from privtune.ledger import Budget, ChargeRequest, Ledger
from privtune.ledger.rounds import Lease

EVENT = PrivateSelection(Gaussian(50.0), Geometric(10))
LEASE = 5.0
PAGES = (
    "/api/v0/tasks?detail=true&limit=10000",
    "/api/v0/objects?detail=true",
    "/api/v0/workers?detail=true&limit=10000",
    "/api/v0/logs?node_ip=127.0.0.1",
    "/api/jobs/",
    "/nodes?view=summary",
    "/api/cluster_status",
)


def score_of(seed: bytes) -> float:
    """Return a row's score: a function of its seed."""
    return int.from_bytes(seed[:6]) / 2**48


def trained(leases: Sequence[Lease]) -> Iterator[RowResult]:
    """Wait a moment, and hand in."""
    for lease in leases:
        time.sleep(0.2)
        yield RowResult(lease, score_of(lease.seed), {"pid": os.getpid(), "attempt": lease.attempt})


def assist(charge: str, _arm: str) -> int:
    """Work through a round's rows; the storage is in the node's environment."""
    with Ledger(os.environ["PRIVTUNE_STORAGE"]) as ledger:
        rounds = make_rounds(ledger, lease_seconds=LEASE)
        work_through(rounds, charge, trained, stack=1, lease_seconds=LEASE)
    return 0


def asked_of_dashboard(address: str) -> tuple[bytes, list[int]]:
    """Return what the dashboard's API shows to who has the token, and the status for who has none."""
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text().strip()
    shown, refused = b"", []
    for path in PAGES:
        for given in (token, None):
            asked = urllib.request.Request(f"http://{address}{path}")
            if given:
                asked.add_header("Authorization", f"Bearer {given}")
            try:
                with urllib.request.urlopen(asked, timeout=60) as answer:
                    said, status = answer.read(), answer.status
            except urllib.error.HTTPError as error:
                said, status = b"", error.code
            shown += said if given else b""
            if given:
                print(path, status, len(said), file=sys.stderr)
            else:
                refused.append(status)
    return shown, refused


def main() -> None:
    """Run the campaign and print what was found, as JSON."""
    import ray
    from ray.cluster_utils import Cluster

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200)
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rn-"))  # short: sockets lie in it
    Path(tempfile.gettempdir(), "ray").mkdir(
        exist_ok=True
    )  # Ray's cluster_utils takes it for granted
    url = os.environ["PRIVTUNE_STORAGE"]
    begin = time.monotonic()
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "include_dashboard": True, "temp_dir": str(folder)},
    )
    nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    up = time.monotonic() - begin
    with Ledger(url) as ledger:
        ledger.create_budget(Budget(50.0, 1e-5, name="scale"))
        [charge] = ledger.reserve("scale", [ChargeRequest(EVENT)])
        rounds = make_rounds(ledger, lease_seconds=LEASE)
        opened = rounds.open(charge.id, count=asked.rows)
        kills = []

        def kill() -> None:
            for left in (asked.rows * 3 // 4, asked.rows // 3):
                while rounds.open_count(charge.id) > left:
                    time.sleep(0.1)
                cluster.remove_node(nodes.pop(), allow_graceful=False)
                kills.append(rounds.open_count(charge.id))
                nodes.append(cluster.add_node(num_cpus=2))

        # Ray starts nodes from the main thread alone.
        options = {"jobs": 6, "gpus": 0.0, "open_count": partial(rounds.open_count, charge.id)}
        driver = threading.Thread(
            target=run_on_ray, args=(assist, (charge.id, "arm")), kwargs=options
        )
        driver.start()
        kill()
        driver.join()
        results = rounds.results(charge.id)
        charges = len(ledger.charges("scale"))
    took = time.monotonic() - begin - up
    shown, refused = asked_of_dashboard(cluster.head_node.webui_url)
    ray.shutdown()
    written = b"".join(
        path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.is_socket()
    )
    cluster.shutdown()
    sentinels = [url, *(opened.seed(n).hex() for n in range(asked.rows))]
    sentinels += [repr(row.score) for row in results[:100]]
    document = {
        "ray": ray.__version__,
        "charges": charges,
        "results": len(results),
        "functions of their seeds": sum(
            r.score == score_of(opened.seed(r.number)) for r in results
        ),
        "taken over": sum(row.result["attempt"] > 1 for row in results),
        "rows open at the kills": kills,
        "seconds to come up": round(up, 1),
        "seconds of the round": round(took, 1),
        "sentinels": len(sentinels),
        "sentinels found": sum(text.encode() in written for text in sentinels),
        "bytes searched": len(written),
        "bytes of the dashboard's API": len(shown),
        "sentinels found there": sum(text.encode() in shown for text in sentinels),
        "answers without the token": refused,
    }
    print(json.dumps(document, indent=1))
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
