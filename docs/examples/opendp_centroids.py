"""A nearest-centroid classifier whose sums OpenDP releases, as a declared mechanism."""

import numpy as np
import opendp.prelude as dp
from sklearn.datasets import load_digits

import privtune

dp.enable_features("contrib")
x, y = load_digits(return_X_y=True)
SPACE = dp.vector_domain(dp.atom_domain(T=float, nan=False)), dp.l2_distance(T=float)


def objective(trial):
    power = trial.suggest_float("power", 0.3, 2.0)  # of the grey values
    shrink = trial.suggest_float("shrink", 0.0, 1.0)  # of the sums, towards their mean
    release = dp.m.make_gaussian(*SPACE, scale=trial.plan.noise_multiplier)
    records = (x[:1400] / 16) ** power
    records /= np.maximum(1, np.linalg.norm(records, axis=1, keepdims=True))  # sensitivity 1
    sums = np.stack([records[y[:1400] == digit].sum(axis=0) for digit in range(10)])
    noisy = np.reshape(release(sums.ravel().tolist()), sums.shape)
    noisy /= np.linalg.norm(noisy, axis=1, keepdims=True)
    noisy -= shrink * noisy.mean(axis=0)
    score = trial.score(lambda x: (x / 16) ** power @ noisy.T)
    return trial.result({"centroids": noisy}, score=score)


study = privtune.create_study("centroids", budget=privtune.Budget(1.0, 1e-5, name="digits"))
event = privtune.accounting.Gaussian(1.0)  # its noise is what ε = 1 asks for
release = study.optimize_declared(
    objective,
    mechanism=privtune.Mechanism(event, declared_by="the author", records=1400),
    strategy=privtune.strategies.PapernotSteinke(mean_runs=5),
    validation=(x[1400:], y[1400:]),
)
print(f"{release.params}: accuracy {release.score:.1%} at {release.guarantee}")
