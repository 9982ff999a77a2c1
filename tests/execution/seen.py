"""A process that notes which GPUs it may see: module level, to be spawned; imports nothing heavy."""

from __future__ import annotations

import os
import time
from pathlib import Path


def note(folder: str) -> None:
    """Note it; the one that sees GPU 1 dies once, the others stay at work."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    first = not Path(folder, f"{seen}-1").exists()
    Path(folder, f"{seen}-{1 if first else 2}").write_text(os.environ["OMP_NUM_THREADS"])
    if seen == "1" and first:
        os._exit(3)
    time.sleep(60)
