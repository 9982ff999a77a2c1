"""PUR schedules against constant noise: Table 3 of the paper, logistic regression with λ = 0.1.

Features are scaled to zero mean and unit variance as in the paper: that looks at the data, so these
runs are reproductions and not private. The columns with public bounds scale by public constants.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import torch
from sklearn.datasets import load_breast_cancer, load_iris
from torch.nn import functional as F

from privtune.accounting.rdp import gaussian_epsilon
from privtune.errors import InvalidInputError
from privtune.plots import plot_lines
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.transcript import Transcript
from privtune.training.methods import PUR, PURConstant
from studies.harness import mnist
from studies.sheet import Again, Options, Row, Sheet, by, markdown

DECAY, SEED = 0.1, 1
EPSILONS, CONSTANTS = (0.1, 20.0), (0.001, 0.01, 0.1, 1.0)
PAPERS, PUBLIC = "normalised as in the paper", "public bounds"
ZCDP, EXACT, STATED = "schedule, zCDP", "schedule, exact account", "schedule, stated horizon"
BEST = "best constant"
PUBLIC_SCALE = {"synthetic": 5.0, "iris": 10.0, "mnist": 28.0}  # bounds known without the data


class FullBatch:
    """The oracle of all records for logistic regression without bias, repetitions in a stack.

    A record's gradient is no longer than its features, so clipping to the bound changes nothing.
    """

    def __init__(self, x: torch.Tensor, y: torch.Tensor, steps: int, repetitions: int, seed: int):
        self.x, self.y = x, y
        self.schedule = Schedule(records=len(y), sample_rate=1.0, steps=steps)
        self.candidates, self.pace = repetitions, 1.0
        self._generator = torch.Generator().manual_seed(seed)
        self._transcripts = [Transcript() for _ in range(repetitions)]

    def everything(self) -> int:
        return {t.open_sample(1.0) for t in self._transcripts}.pop()

    def gradient(
        self, sample: int, params: torch.Tensor, *, clipping: Any, noise_multiplier: float
    ) -> torch.Tensor:
        for transcript in self._transcripts:
            transcript.record(sample, "gaussian", float(noise_multiplier))
        margins = self.y * (params @ self.x.T)
        total = (-self.y * torch.sigmoid(-margins)) @ self.x
        bound = clipping.sensitivity(self.candidates)[:, None].to(params)
        noise = torch.randn(params.shape, generator=self._generator, dtype=params.dtype)
        return (total + noise_multiplier * bound * noise) / len(self.y)

    def transcripts(self) -> list[Transcript]:
        return self._transcripts


def dataset(name: str, data: Path | None) -> tuple[np.ndarray, np.ndarray]:
    if name == "synthetic":
        rng = np.random.default_rng(0)
        x = rng.multivariate_normal([0, 0], [[2, 1], [1, 2]], size=10_000)
        flip = rng.random(len(x)) < 0.1
        y = np.where((x.sum(axis=1) > 0) ^ flip, 1.0, -1.0)
        return x, y
    if name == "iris":
        x, y = load_iris(return_X_y=True)
        return x, np.where(y == 0, 1.0, -1.0)
    if name == "breast-cancer":
        x, y = load_breast_cancer(return_X_y=True)
        return x, np.where(y == 0, 1.0, -1.0)  # scikit-learn's 0 is malignant
    split = mnist(data, smoke=False)
    return split.x.numpy().astype(float), np.where(split.y.numpy() == 0, 1.0, -1.0)


def standardised(x: np.ndarray) -> np.ndarray:
    deviation = x.std(axis=0)
    return (x - x.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)


def public(name: str, x: np.ndarray) -> np.ndarray:
    """Scale by a public constant and enforce norm 1: nothing looks at the data as a whole."""
    scaled = x / PUBLIC_SCALE[name]
    return scaled / np.maximum(1.0, np.linalg.norm(scaled, axis=1, keepdims=True))


def zcdp_budget(eps: float, delta: float) -> float:
    """Return ρ with ``ρ + 2 sqrt(ρ log 1/δ) = ε``, the conversion that the paper reports."""
    log = math.log(1.0 / delta)
    return (math.sqrt(log + eps) - math.sqrt(log)) ** 2


def zcdp_horizon(method: PUR, records: int, rho: float, largest: int) -> int:
    """Return how many steps of the schedule fit into ρ: the paper's composition, summed exactly."""
    sensitivity, spent = 2.0 * method.lipschitz / records, 0.0
    for step in range(largest):
        spent += sensitivity**2 / (2.0 * method.deviation(step) ** 2)
        if spent > rho:
            return step
    return largest


def stated_horizon(method: PUR, gap: float, records: int, rho: float) -> int:
    """Return T as Proposition 4 (c) states it, without the κ = M/μ that its proof drops."""
    mu, ratio = method.regularisation, 2.0 * method.smoothness / method.regularisation
    inside = rho * mu * gap * records**2 / (2.0 * method.dimension * method.lipschitz**2)
    if inside <= 1.0:
        return 0
    return int(math.log(inside) / math.log(ratio / (ratio - 1.0)))


def risk(
    method: Any, x: torch.Tensor, y: torch.Tensor, steps: int, reps: int, seed: int = SEED
) -> tuple[float, float]:
    """Return the mean regularised risk after some steps from 0, and its standard error."""
    theta = torch.zeros(reps, x.shape[1], dtype=x.dtype)
    if steps > 0:
        oracle = FullBatch(x, y, steps, reps, seed)
        state = method.init(theta, [{}] * reps)
        for _ in range(steps):
            state = method.update(state, oracle)
        oracle.transcripts()[0].check_within(method.event(oracle.schedule))
        theta = state.params
    loss = F.softplus(-y * (theta @ x.T)).mean(dim=1)
    risks = loss + method.regularisation / 2 * theta.square().sum(dim=1)
    return float(risks.mean()), float(risks.std() / math.sqrt(reps))


def cells(options: Options) -> Iterator[dict[str, Any]]:
    """Yield every data set, ε, and way to scale features; MNIST last, whose steps are dear."""
    names = (
        ("synthetic", "iris") if options.smoke else ("iris", "synthetic", "breast-cancer", "mnist")
    )
    for name in names:
        for epsilon in EPSILONS:
            for features in (PAPERS, PUBLIC) if name in PUBLIC_SCALE else (PAPERS,):
                yield {"data": name, "epsilon": epsilon, "features": features}


def fill(of: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Run one cell: the paper's account, the exact account, the stated horizon, constant noise."""
    name, eps = of["data"], of["epsilon"]
    largest, reps = (30, 3) if options.smoke else (150, 2) if name == "mnist" else (3000, 20)
    raw, labels = dataset(name, options.data)
    scaled = standardised(raw) if of["features"] == PAPERS else public(name, raw)
    kind = torch.float32 if raw.size > 1e6 else torch.float64
    x, y = torch.tensor(scaled, dtype=kind), torch.tensor(labels, dtype=kind)
    bound, delta = float(np.linalg.norm(scaled, axis=1).max()), 1.0 / len(y)
    # The loss at 0 is log 2 and none is below 0, so λ/2 |θ*|² <= log 2: the paper's R. Its L counts
    # the regulariser, λ R + Z; that one moves no difference of sums, so Z is enough (`exact`).
    gap = math.log(2.0)
    lipschitz = DECAY * math.sqrt(2.0 * gap / DECAY) + bound
    shared = {
        "smoothness": DECAY + bound**2 / 4.0,
        "dimension": x.shape[1],
        "regularisation": DECAY,
    }
    own = {**shared, "strong_convexity": DECAY, "gap": gap}
    paper = PUR(lipschitz=lipschitz, **own)
    rho, sensitivity = zcdp_budget(eps, delta), 2.0 * lipschitz / len(y)
    try:
        whole = Schedule(len(y), 1.0, largest)
        own_noise = {**own, "noise_multiplier": 1.0}  # the paper's
        exact = PUR.for_budget(whole, epsilon=eps, delta=delta, lipschitz=bound, **own_noise)
    except InvalidInputError:
        exact = None
    # By account: the method, its steps, the seed, and the ε that it really spends.
    runs: dict[str, tuple[Any, int, int, float]] = {
        ZCDP: (paper, zcdp_horizon(paper, len(y), rho, largest), SEED, eps),
        EXACT: (exact or paper, exact.horizon or 0 if exact else 0, SEED, eps),
    }
    if steps := stated_horizon(paper, gap, len(y), rho):
        mu = math.sqrt(sum((sensitivity / paper.deviation(t)) ** 2 for t in range(steps)))
        spent = gaussian_epsilon(mu, delta) if mu < 1e3 else mu * mu / 2.0
        runs[STATED] = paper, steps, 2, spent
    for sigma in CONSTANTS:
        method = PURConstant(lipschitz=lipschitz, **shared, noise_multiplier=sigma / sensitivity)
        steps = min(largest, int(rho / (sensitivity**2 / (2.0 * sigma**2))))
        runs[f"σ = {sigma:g}"] = method, steps, SEED, eps
    lines = []
    for account, (method, steps, seed, spent) in runs.items():
        dear = account == STATED and steps * x.numel() >= 2e8
        value, error = (math.nan, math.nan) if dear else risk(method, x, y, steps, reps, seed)
        lines.append(
            {
                "account": account,
                "steps": steps,
                "risk": f"{value:.6g}",
                "error": f"{error:.3g}",
                "spent": f"{spent:.6g}",
            }
        )
    return lines


def accounts(rows: Sequence[Row]) -> dict[str, Row]:
    """Return a cell's lines by account, the best constant among them."""
    best = min((r for r in rows if r["account"].startswith("σ")), key=lambda r: float(r["risk"]))
    return {**{row["account"]: row for row in rows}, BEST: best}


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return the risk of every account, and what the stated horizon spends."""
    found = {}
    for (name, epsilon, features), lines in by(rows, *SHEET.key).items():
        where = f"{name}, ε = {float(epsilon):g}, {features}"
        of = accounts(lines)
        found |= {f"{a}: {where}": float(of[a]["risk"]) for a in (ZCDP, EXACT, BEST)}
        if STATED in of:
            found[f"ε of the stated horizon: {where}"] = float(of[STATED]["spent"])
    return found


def tables(rows: Sequence[Row]) -> list[str]:
    """Return the risks by account, one table for each way to scale, and what (c) really spends."""
    found, spent = [], []
    for (features,), group in by(rows, "features").items():
        lines = []
        for (name, epsilon), lines_of in by(group, "data", "epsilon").items():
            of = accounts(lines_of)
            shown = (f"{float(of[a]['risk']):.4f} ({of[a]['steps']})" for a in (ZCDP, EXACT))
            best = f"{float(of[BEST]['risk']):.4f} ({of[BEST]['account']})"
            lines.append((name, f"{float(epsilon):g}", *shown, best))
            if STATED in of and features == PAPERS:
                row = of[STATED]
                reached = "not run" if row["risk"] == "nan" else f"{float(row['risk']):.4f}"
                counts = row["steps"], of[ZCDP]["steps"]
                spent.append((*lines[-1][:2], *counts, reached, f"{float(row['spent']):.3g}"))
        head = ("ε", f"{ZCDP} (steps)", f"{EXACT} (steps)", BEST)
        found.append(markdown((f"risk, {features}", *head), lines))
    head = ("steps stated", "steps that fit", "risk at the stated steps", "ε really spent")
    return [*found, markdown(("data", "ε", *head), spent)]


def charts(rows: Sequence[Row]) -> dict[str, go.Figure]:
    """Return the risk of every account against ε."""
    drawn = [
        {"ε": row["epsilon"], "risk": row["risk"], "account": row["account"], "data": row["data"]}
        for row in rows
        if row["features"] == PAPERS and row["risk"] != "nan"
    ]
    return {"chart": plot_lines(drawn, x="ε", y="risk", line="account", panel="data", log="x")}


SHEET = Sheet(
    name="pur",
    key=("data", "epsilon", "features"),
    values=("account", "steps", "risk", "error", "spent"),
    cells=cells,
    fill=fill,
    figures=figures,
    tables=tables,
    charts=charts,
    again=Again(
        {"data": "iris", "epsilon": "20.0", "features": PAPERS, "account": ZCDP},
        "risk",
        error=lambda row: float(row["error"]),
    ),
)

if __name__ == "__main__":
    sys.exit(SHEET.main())
