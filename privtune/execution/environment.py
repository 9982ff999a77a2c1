"""Checks of the libraries and devices that train and place workers: torch, CUDA, MLflow, Ray, SLURM."""

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
    """Yield a check of each library that trainings and launchers use, without starting any of them."""
    import torch

    yield Check("torch", "ok", f"torch {torch.__version__}, {torch.get_num_threads()} threads.")
    yield _cuda()
    yield _mlflow()
    yield _records()
    yield _ray()
    yield _slurm()


def _mlflow() -> Check:
    """Return the check of MLflow: its small distribution logs runs, the large one also shows them."""
    version = _version("mlflow")
    if version:
        return Check("mlflow", "ok", f"MLflow {version}. It gets released results only.")
    skinny_version = _version("mlflow-skinny")
    says = f"mlflow-skinny {skinny_version} logs; privtune ui needs MLflow whole: privtune[ui]."
    return Check("mlflow", "ok", says)


def _records() -> Check:
    """Return the check of scikit-learn, from which built-in tasks read their records."""
    version = _version("scikit-learn")
    if version:
        return Check("records", "ok", f"scikit-learn {version}; built-in tasks read its records.")
    says = (
        "scikit-learn is not installed; most built-in tasks (privtune tasks) need privtune[demo]."
    )
    return Check("records", "ok", says)


def _cuda() -> Check:
    """Return the check of the GPUs that trainings may use."""
    import torch

    from privtune.training.engine.compute import driver

    try:
        check_device("cuda")
    except PrivTuneError as error:
        # A driver without a device that torch can use is a mistake; no driver is a choice.
        state = "warn" if driver() else "ok"
        return Check("cuda", state, f"{error} Trainings run on the CPU.")
    numbers = range(torch.cuda.device_count())
    names = "; ".join(map(torch.cuda.get_device_name, numbers))
    says = f"CUDA {torch.version.cuda}, driver {driver()}: {names}."
    return Check("cuda", "ok", says)


def _ray() -> Check:
    """Return the check of Ray's settings: whether it asks for tokens, and keeps objects off the disk.

    Whoever reaches the ports of a cluster without tokens runs code as its user, on sealed data. And Ray
    writes objects that memory has no room for to disk, in clear, unless it is told not to.
    """
    version = _version("ray")
    if version is None:
        return Check("ray", "ok", "Ray is not installed; executor: ray needs privtune[ray].")
    address = os.environ.get("RAY_ADDRESS", "local")
    usual_mode = "token" if address == "local" else "not set"
    mode = os.environ.get("RAY_AUTH_MODE", usual_mode).lower()
    spilling = os.environ.get("RAY_automatic_object_spilling_enabled", "true")  # noqa: SIM112
    spills = spilling.lower() not in _OFF
    if mode != "token":
        says = (
            f"Ray {version} at {address}: whoever reaches its ports runs code on sealed data "
            f"(RAY_AUTH_MODE is {mode}). Set RAY_AUTH_MODE=token on every node, and give each the token."
        )
        return Check("ray", "fail", says)
    token_path = os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")
    token = Path(token_path).expanduser()
    if token.exists() and token.stat().st_mode & 0o077:
        says = f"Ray's token in {token} can be read by others: ray writes it so. Run: chmod 600 {token}"
        return Check("ray", "fail", says)
    if address == "local":
        says = f"Ray {version} ({address}): its token is asked for, nothing spills."
        return Check("ray", "ok", says)
    answer = _answer_to_strangers(address)
    if answer is None:
        says = (
            f"Ray {version} at {address} answers without a token: whoever reaches its ports runs code on "
            "sealed data. Start every node anew with RAY_AUTH_MODE=token."
        )
        return Check("ray", "fail", says)
    if "Auth" not in answer:
        return Check("ray", "warn", f"Ray {version}: nobody answers at {address}.")
    if spills:
        says = (
            f"Ray {version} at {address} asks for its token, but may write objects to disks in clear: "
            "set RAY_automatic_object_spilling_enabled=false on every node."
        )
        return Check("ray", "warn", says)
    return Check("ray", "ok", f"Ray {version} ({address}): its token is asked for, nothing spills.")


def _answer_to_strangers(address: str) -> str | None:
    """Return the error that a Ray cluster gives a client without a token; None if it answers normally.

    It is asked by a process of its own, whose variables tell Ray to send none.
    """
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    # Without a safe path, -m would import from the working folder, whatever lies there.
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONSAFEPATH": "1"}
    try:
        process = subprocess.run(  # noqa: S603 (this Python, and an address of the environment)
            command, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
    except subprocess.TimeoutExpired:
        return ""
    return process.stderr if process.returncode else None


def _slurm() -> Check:
    """Return the check of SLURM: of submitit, and of the command ``sbatch`` that it calls."""
    version = _version("submitit")
    if version is None:
        return Check(
            "slurm", "ok", "submitit is not installed; executor: slurm needs privtune[slurm]."
        )
    if shutil.which("sbatch") is None:
        return Check("slurm", "ok", f"submitit {version}; there is no sbatch here.")
    return Check("slurm", "ok", f"submitit {version}, and sbatch is here.")


def _version(package: str) -> str | None:
    """Return the version of a distribution; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
