"""Logistic regression by noisy gradients, in NumPy alone, as a declared mechanism."""

import numpy as np

import privtune

rng = np.random.default_rng(0)
x = rng.normal(size=(1200, 5))
y = np.sign(x @ [2, -1, 0.5, 0, 0] + 0.3 * rng.normal(size=1200))  # -1 or 1
RECORDS = 1000


def objective(trial):
    rate = trial.suggest_float("rate", 0.05, 10, log=True)
    plan, noise = trial.plan, np.random.default_rng(trial.seed)  # the data is touched from here on
    w = np.zeros(5)
    for _ in range(plan.steps):
        there = noise.random(RECORDS) < plan.sample_rate
        own_x, own_y = x[:RECORDS][there], y[:RECORDS][there]
        gradients = -own_x * (own_y / (1 + np.exp(own_y * (own_x @ w))))[:, None]
        gradients /= np.maximum(1, np.linalg.norm(gradients, axis=1, keepdims=True))
        noisy = gradients.sum(axis=0) + plan.noise_multiplier * noise.normal(size=5)
        w -= rate * noisy / (plan.sample_rate * RECORDS)
    return trial.result({"w": w}, score=trial.score(lambda x: (x @ w > 0).astype(int)))


study = privtune.create_study("descent", budget=privtune.Budget(2.0, 1e-5, name="descent"))
mechanism = privtune.Mechanism.dpsgd(
    records=RECORDS, epochs=10, expected_batch_size=50, declared_by="the author"
)
release = study.optimize_declared(
    objective,
    mechanism=mechanism,
    strategy=privtune.strategies.PapernotSteinke(mean_runs=5),
    validation=(x[RECORDS:], (y[RECORDS:] > 0).astype(int)),
)
print(f"{release.params}: accuracy {release.score:.1%} at {release.guarantee}")
