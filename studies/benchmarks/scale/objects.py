"""Models of 17 MB in an S3, trained by two workers; the S3 stops in mid-round, lacks a bucket, wants keys.

    python -m studies.benchmarks.scale.objects        # needs PostgreSQL's programs, s3fs and moto[server]

The S3 is moto's, the database a server of its own. Printed is what the bucket held in mid-round and at the
end, what everybody said, and whether the release is that of one process without any store, bit for bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import psycopg
import yaml
from moto import settings
from moto.server import ThreadedMotoServer
from torch import nn

from privtune.ledger import Ledger
from privtune.study import Study, StudySpec
from privtune.tasks import Task
from tests.execution.cluster import Cluster
from tests.toy import blobs

SPEC: dict[str, Any] = {
    "name": "s3",
    "task": "studies.benchmarks.scale.objects:task",
    "budget": {"name": "s3", "epsilon": 8.0, "delta": 1e-5},
    "space": {
        "learning_rate": {"type": "float", "low": 0.01, "high": 1.0, "log": True},
        "max_grad_norm": {"type": "float", "low": 0.1, "high": 10.0, "log": True},
    },
    "arms": [
        {"name": "selection", "strategy": "papernot-steinke", "law": "poisson", "mean_runs": 12}
    ],
    "epochs": 1,
    "expected_batch_size": 24,
    "device": "cpu",
    "stack": 1,
    "seed": 4,
}
KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}


def _model() -> nn.Module:
    width = 2080
    return nn.Sequential(
        nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)
    )


def task() -> Task:
    """Return three blobs, and a model of 4.3 million parameters."""
    return replace(blobs(), name="wide-blobs", model=_model)


def serve(port: int = 0) -> tuple[ThreadedMotoServer, int]:
    """Start the S3; what it held before it stopped it holds again."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    return server, server.get_host_and_port()[1]


def start(folder: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    """Start a command of PrivTune in a folder of its own."""
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "privtune", *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def objects() -> dict[str, bytes]:
    """Return what the bucket holds."""
    files = fsspec.filesystem("s3", use_listings_cache=False)
    names = files.find("s3://bucket")
    return dict(files.cat(names, on_error="omit")) if names else {}  # some are deleted meanwhile


def found(url: str, held: dict[str, bytes]) -> dict[str, int]:
    """Look for keys and for what a result is in what the bucket holds."""
    with psycopg.connect(url) as own:
        rows = own.execute("SELECT place FROM privtune_blobs WHERE place IS NOT NULL").fetchall()
    keys = [json.loads(row[0])["key"] for row in rows]
    words = [b"transcript_digest", b"learning_rate", b"trial-", b"weights"]
    words += [key.encode() for key in keys] + [bytes.fromhex(key) for key in keys]
    everything = [content + name.encode() for name, content in held.items()]
    hits = sum(word in one for word in words for one in everything)
    return {
        "objects": len(held),
        "bytes": sum(map(len, held.values())),
        "keys": len(keys),
        "words looked for": len(words),
        "found": hits,
    }


def last(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for a command, and return what it said last."""
    said = process.communicate(timeout=600)[0].strip()
    lines = (
        said[said.rfind("Error:") :].splitlines() if "Error:" in said else said.splitlines()[-3:]
    )
    return {"exit": process.returncode, "says": lines, "traceback": "Traceback" in said}


def round_on_s3(folder: Path, url: str, server: ThreadedMotoServer, port: int) -> dict[str, Any]:
    """Run the study on two workers; stop the S3 in mid-round."""
    (folder / "spec.yaml").write_text(yaml.safe_dump({**SPEC, "artifacts": "s3://bucket/privtune"}))
    told: dict[str, Any] = {"create": last(start(folder, "study", "create", "spec.yaml"))}
    names = ("first", "second")
    workers = [start(folder / name, "worker", "--idle-exit", "300") for name in names]
    run = ("study", "run", "s3", "--executor", "external", "--no-mlflow")
    driver = start(folder / "driver", *run)
    while len(held := objects()) < 3:
        for process in (driver, *workers):
            assert process.poll() is None, process.communicate()
        time.sleep(0.5)
    told["in mid-round"] = found(url, held)
    server.stop()
    begun = time.monotonic()
    told["workers while it is gone"] = [last(worker) for worker in workers]
    told["s until both had left"] = round(time.monotonic() - begun, 1)
    told["driver waits"] = driver.poll() is None
    serve(port)
    workers = [start(folder / name, "worker", "--idle-exit", "20") for name in names]
    told["driver"] = last(driver)
    told["at the end"] = found(url, objects())
    told["workers"] = [last(worker) for worker in workers]
    return told


def main() -> None:
    """Run all of it, and print what was found."""
    cluster, (server, port) = Cluster(), serve()
    os.environ |= {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    fsspec.filesystem("s3").makedirs("s3://bucket")
    try:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            os.environ["PRIVTUNE_STORAGE"] = cluster.url
            told = round_on_s3(folder, cluster.url, server, port)
            alone = f"sqlite:///{folder / 'alone.db'}"
            with closing(Study.create(StudySpec.parse(SPEC), alone)) as study:
                (expected,) = study.run()
            with closing(Study("s3", cluster.url)) as study, Ledger(cluster.url) as ledger:
                (release,) = study.releases()
                told["charges"] = [str(charge.state) for charge in ledger.charges("s3")]
            same = release.weights.numpy().tobytes() == expected.weights.numpy().tobytes()
            told["the same release"] = same and release.params == expected.params
            print(json.dumps(told, indent=1), flush=True)
            told = {}
            wrong = {
                "no such bucket": ("s3://none/privtune", {}),
                "no keys": ("s3://bucket/x", dict.fromkeys(KEYS, "")),
                "no server": ("s3://bucket/x", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}),
                "wrong keys": ("s3://bucket/x", {"AWS_ACCESS_KEY_ID": "AKIAWRONG"}),
            }
            for name, (address, environment) in wrong.items():
                url = f"sqlite:///{folder / name.replace(' ', '-')}.db"
                spec = StudySpec.parse({**SPEC, "artifacts": address})
                Study.create(spec, url).close()
                command = ("study", "run", "s3", "--no-mlflow", "--storage", url)
                settings.INITIAL_NO_AUTH_ACTION_COUNT = 0 if name == "wrong keys" else float("inf")
                told[name] = last(start(folder, *command, **environment))
                with Ledger(url) as ledger:
                    told[name]["charges"] = len(ledger.charges("s3"))
            print(json.dumps(told, indent=1))
    finally:
        cluster.remove()


if __name__ == "__main__":
    main()
