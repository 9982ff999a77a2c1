"""Fine-tune an encoder on labelled texts, by its head, biases or adapters, by every strategy.

    python -m studies.fine_tuning_text.run --texts reviews.csv --classes neg pos \\
        --sizes 20000 2000 2000 --encoder FOLDER --out results.csv
    python -m studies.fine_tuning_text.run --smoke      # 4,000 generated sentences, a tiny encoder

Each arm has a budget of its own: the question is what one epsilon buys.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import privtune
from studies.fine_tuning_text.task import SETTINGS, generate, public_weights, tiny_encoder

NORM = {"max_grad_norm": 0.1}  # Adam does not see the scale of its gradients
SPACE = {"learning_rate": {"type": "float", "low": 1e-4, "high": 3e-2, "log": True}}
PARTS = ("head", "biases", "lora:4")
SEARCH = {"strategy": "papernot-steinke", "method": "dp-adam", "parameters": NORM}
ARMS: dict[str, dict[str, Any]] = {
    "defaults": {
        "strategy": "fixed",
        "method": "dp-adam",
        "parameters": {"learning_rate": 1e-3, **NORM},
    },
    "hyfreedp": {"strategy": "hyfreedp"},
    "papernot-steinke": {**SEARCH, "mean_runs": 5},
    "papernot-steinke, parts": {**SEARCH, "mean_runs": 5},
}
"""The last searches the part, too, and stands in the lines of ``any``."""
FIELDS = ["trainable", "epsilon", "seed", "arm", "accuracy", "spent", "seconds"]


def run_arm(
    name: str, trainable: str, epsilon: float, seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Run one arm in a study of its own and return its line."""
    search = {**SPACE} if "mean_runs" in ARMS[name] else {}
    if trainable == "any":
        search["trainable"] = {"type": "categorical", "choices": list(options.trainable)}
    task: dict[str, Any] = {
        "type": "fine-tuning",
        "task": "studies.fine_tuning_text.task:texts",
        "pretrained": str(options.weights),
        "trainable": "all" if trainable == "any" else trainable,
    }
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        study = privtune.create_study(
            "texts",
            budget=privtune.Budget(epsilon, 1e-5, name="texts"),
            task=task,
            arms=[{"name": "arm", **ARMS[name]}],
            space=search,
            epochs=options.epochs,
            expected_batch_size=options.batch,
            seed=seed,
            storage=f"sqlite:///{folder}/study.db",
        )
        (release,) = study.run()
        study.close()
    return {
        "trainable": trainable,
        "epsilon": epsilon,
        "seed": seed,
        "arm": name,
        "accuracy": round(release.utility.get("test_accuracy", float("nan")), 4),
        "spent": round(release.guarantee.epsilon, 4),
        "seconds": round(time.perf_counter() - began, 1),
    }


def table(path: Path) -> str:
    """Return a results file as a table: the mean test accuracy over its seeds."""
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = list(dict.fromkeys((r["trainable"], r["epsilon"]) for r in rows))
    lines = ["| arm | " + " | ".join(f"{part}, ε = {eps}" for part, eps in columns) + " |"]
    lines.append("| --- |" + " --- |" * len(columns))
    for arm in dict.fromkeys(r["arm"] for r in rows):
        cells = []
        for column in columns:
            own = [r for r in rows if (r["trainable"], r["epsilon"], r["arm"]) == (*column, arm)]
            mean = sum(float(r["accuracy"]) for r in own) / len(own) if own else None
            cells.append("–" if mean is None else f"{100 * mean:.1f} ({len(own)})")
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all arms and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, prog="python -m studies.fine_tuning_text.run"
    )
    parser.add_argument("--texts", type=Path, help="a CSV file, or JSON lines")
    parser.add_argument("--text", default="text", help="column of the texts")
    parser.add_argument("--label", default="label", help="column of the labels")
    parser.add_argument("--classes", nargs="+", help="all labels there are; public")
    parser.add_argument("--sizes", type=int, nargs=3, help="training, validation, test; public")
    parser.add_argument("--public-test", action="store_true", help="the test texts are public")
    parser.add_argument("--encoder", type=Path, help="a folder as Hugging Face keeps it")
    parser.add_argument("--length", type=int, default=64, help="most tokens of a text")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 3.0])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--trainable", nargs="+", default=list(PARTS))
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("results.csv"))
    parser.add_argument("--smoke", action="store_true", help="generated texts, a tiny encoder")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        if options.smoke:
            _smoke(options, Path(folder))
        elif not (options.texts and options.classes and options.sizes and options.encoder):
            parser.error("--texts, --classes, --sizes and --encoder are needed, or --smoke")
        options.weights = Path(folder) / "encoder.safetensors"
        public_weights(options.encoder, options.weights)
        os.environ[SETTINGS] = json.dumps(
            {
                "path": str(options.texts.absolute()),
                "text": options.text,
                "label": options.label,
                "classes": options.classes,
                "sizes": options.sizes,
                "public_test": options.public_test,
                "encoder": str(options.encoder.absolute()),
                "length": options.length,
            }
        )
        _run(options)
    print(table(options.out))
    return 0


def _smoke(options: argparse.Namespace, folder: Path) -> None:
    options.texts, options.encoder = folder / "texts.jsonl", folder / "encoder"
    options.classes, options.sizes, options.public_test = ["bad", "good"], [3000, 500, 500], True
    options.length, options.seeds, options.epochs, options.batch = 12, 1, 0.5, 128
    generate(options.texts)
    tiny_encoder(options.encoder)


def _run(options: argparse.Namespace) -> None:
    with options.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for seed in range(options.seeds):
            for epsilon in options.epsilons:
                for arm in options.arms:
                    for part in ["any"] if arm.endswith("parts") else options.trainable:
                        writer.writerow(run_arm(arm, part, epsilon, seed, options))
                        file.flush()


if __name__ == "__main__":
    sys.exit(main())
