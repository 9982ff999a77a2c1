"""Looks at what trains, and at what places workers: torch, CUDA, MLflow, Ray, SLURM."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from privtune.errors import PrivTuneError
from privtune.ledger.doctor import Check
from privtune.training.engine.compute import check_device

_OFF = {"0", "false"}


def check_engines() -> Iterator[Check]:
    """Look at the libraries that trainings and launchers use; starts none of them."""
    import torch

    yield Check("torch", "ok", f"torch {torch.__version__}, {torch.get_num_threads()} threads.")
    yield _cuda()
    yield _mlflow()
    yield _ray()
    yield _slurm()


def _mlflow() -> Check:
    if whole := _version("mlflow"):
        return Check("mlflow", "ok", f"MLflow {whole}; it is told releases alone.")
    slim = _version("mlflow-skinny")
    says = f"mlflow-skinny {slim} logs; privtune ui needs MLflow whole: privtune[ui]."
    return Check("mlflow", "ok", says)


def _cuda() -> Check:
    import torch

    from privtune.training.engine.compute import driver

    try:
        check_device("cuda")
    except PrivTuneError as error:
        # A driver without a device that torch can use is a mistake; no driver is a choice.
        state = "warn" if driver() else "ok"
        return Check("cuda", state, f"{error} Trainings run on the CPU.")
    names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return Check("cuda", "ok", f"CUDA {torch.version.cuda}, driver {driver()}: {'; '.join(names)}.")


def _ray() -> Check:
    """Look at Ray's settings as this process, and what it starts, have them."""
    version = _version("ray")
    if version is None:
        return Check("ray", "ok", "Ray is not installed; executor: ray needs privtune[ray].")
    address = os.environ.get("RAY_ADDRESS", "local")
    mode = os.environ.get("RAY_AUTH_MODE", "token" if address == "local" else "not set").lower()
    spills = os.environ.get("RAY_automatic_object_spilling_enabled", "true").lower() not in _OFF  # noqa: SIM112
    if mode != "token":
        says = (
            f"Ray {version} at {address}: whoever reaches its ports runs code on sealed data "
            f"(RAY_AUTH_MODE is {mode}). Set RAY_AUTH_MODE=token on every node, and give each the token."
        )
        return Check("ray", "fail", says)
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
    if token.exists() and token.stat().st_mode & 0o077:
        says = f"Ray's token in {token} can be read by others: ray writes it so. Run: chmod 600 {token}"
        return Check("ray", "fail", says)
    told = "" if address == "local" else _told_to_strangers(address)
    if told is None:
        says = (
            f"Ray {version} at {address} answers without a token: whoever reaches its ports runs code on "
            "sealed data. Start every node anew with RAY_AUTH_MODE=token."
        )
        return Check("ray", "fail", says)
    if address != "local" and "Auth" not in told:
        return Check("ray", "warn", f"Ray {version}: nobody answers at {address}.")
    if address != "local" and spills:
        says = (
            f"Ray {version} at {address} asks for its token, but may write objects to disks in clear: "
            "set RAY_automatic_object_spilling_enabled=false on every node."
        )
        return Check("ray", "warn", says)
    return Check("ray", "ok", f"Ray {version} ({address}): its token is asked for, nothing spills.")


def _told_to_strangers(address: str) -> str | None:
    """Return what a cluster says to who has no token; ``None`` if it answers them."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    try:
        asked = subprocess.run(  # noqa: S603 (this Python, and an address of the environment)
            command, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
    except subprocess.TimeoutExpired:
        return ""
    return asked.stderr if asked.returncode else None


def _slurm() -> Check:
    version = _version("submitit")
    if version is None:
        return Check(
            "slurm", "ok", "submitit is not installed; executor: slurm needs privtune[slurm]."
        )
    if shutil.which("sbatch") is None:
        return Check("slurm", "ok", f"submitit {version}; there is no sbatch here.")
    return Check("slurm", "ok", f"submitit {version}, and sbatch is here.")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
