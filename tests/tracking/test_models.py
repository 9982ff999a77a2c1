"""Released models as MLflow models: they take raw rows, and need nothing of this package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from mlflow.models import Model
from safetensors.torch import save_file
from torch import nn

import privtune
from privtune.errors import PrivTuneError
from privtune.numbers import show_epsilon
from privtune.serving.exported import export_model
from privtune.study import Study, StudySpec
from privtune.tasks import get_task
from privtune.tracking.mlflow import log_model
from tests.study.conftest import PARAMETERS
from tests.study.test_stages import staged
from tests.tasks.test_described import images, pictures
from tests.tasks.test_rows import messy
from tests.tasks.test_stages import people
from tests.tasks.test_tables import regression, save, table
from tests.tracked import Tracked
from tests.tracking.servers import Server, free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # MLflow's and torch.export's own
]

ELSEWHERE = """
import json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "privtune":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
import mlflow, numpy, pandas
for folder in sys.argv[1:]:
    given = pandas.read_json(folder + ".json", orient="split", dtype=False, convert_dates=False)
    model = mlflow.pyfunc.load_model(folder)
    print(model.predict(given).to_json(orient="records", double_precision=15))
    example = mlflow.pyfunc.Model.load(folder).load_input_example(folder)
    assert model.predict(example)["prediction"].notna().all(), example
assert not any(name.partition(".")[0] == "privtune" for name in sys.modules)
"""


def test_a_model_is_logged_and_registered_with_the_ledger_s_tags(tracked: Tracked) -> None:
    import mlflow

    uri = log_model(tracked.study, "selection", register="toy-model")
    client = tracked.client
    (version,) = client.search_model_versions("name = 'toy-model'")
    release = tracked.study.release("selection")
    spent = tracked.study.spent()
    assert release.guarantee.epsilon < spent.epsilon
    assert version.tags["privtune.epsilon_of_arm"] == str(release.guarantee.epsilon)
    assert version.tags["privtune.epsilon_of_budget"] == str(spent.epsilon)
    assert f"quote ε = {show_epsilon(spent.epsilon)}: all charges" in version.description
    assert "It takes arrays float32 [n, 6]" in version.description
    assert version.tags["privtune.charge"] == "toy-2"
    assert json.loads(version.tags["privtune.event"])["type"] == "private_selection"
    assert version.description.startswith("Privacy budget toy")
    model = client.get_logged_model(uri.removeprefix("models:/"))
    assert model.tags["privtune.certificate"] == tracked.study.certificate()["digest"]
    entry = client.get_registered_model("toy-model")
    for time in (
        version.creation_timestamp,
        version.last_updated_timestamp,
        model.creation_timestamp,
        model.last_updated_timestamp,
        entry.creation_timestamp,
        entry.last_updated_timestamp,
    ):
        assert time % 86_400_000 == 0, "nothing but the day"
    for path in (tracked.folder / "privtune-artifacts" / "mlflow").rglob("*"):
        assert path.stat().st_mtime % 86_400 == 0, path

    mlflow.set_tracking_uri(client.tracking_uri)
    try:
        folder = Path(mlflow.artifacts.download_artifacts("models:/toy-model/1"))
        loaded = mlflow.pyfunc.load_model("models:/toy-model/1")
    finally:
        mlflow.set_tracking_uri(None)
    example = json.loads((folder / "input_example.json").read_text())
    rows = example if isinstance(example, list) else example.get("inputs", example.get("data"))
    assert np.shape(rows) == (1, 6)
    assert not np.any(rows), "no record is in the example"
    known = Model.load(str(folder))
    assert known.utc_time_created.endswith(" 00:00:00"), "nothing but the day"
    assert known.metadata["privtune.epsilon_of_arm"] == str(release.guarantee.epsilon)
    assert known.metadata["privtune.epsilon_of_budget"] == str(spent.epsilon)
    assert known.metadata["privtune.inputs"] == "arrays float32 [n, 6]"
    assert "torch==" in (folder / "requirements.txt").read_text()
    x = np.random.default_rng(3).normal(size=(5, 6)).astype(np.float32)
    assert release.temperature is not None
    logits = release.model(torch.from_numpy(x)).double().detach()
    shares = (logits / release.temperature).softmax(1).numpy()
    assert np.allclose(loaded.predict(x).iloc[:, 1:].astype(float), shares, atol=1e-6)


def run(task: Any, folder: Path, **changes: Any) -> Study:
    """A study of one arm on a task, that has run."""
    spec = {
        "name": "study",
        "task": task,
        "budget": {"name": "records", "epsilon": 50.0, "delta": 1e-4},
        "arms": [{"name": "arm", "strategy": "fixed", "parameters": PARAMETERS}],
        "epochs": 2,
        "expected_batch_size": 20,
        "device": "cpu",
    }
    folder.mkdir()
    study = Study.create(StudySpec.parse({**spec, **changes}), f"sqlite:///{folder / 'p.db'}")
    study.run(force=True)
    return study


def encoder(folder: Path) -> Path:
    """A small encoder of letters, with random weights."""
    transformers = pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"##{c}" for c in "abcdefghijklmno")]
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=16,
    )
    folder.mkdir()
    vocabulary = [*words, *"abcdefghijklmno"]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def studies(folder: Path) -> dict[str, tuple[Study, pd.DataFrame]]:
    """Studies of every kind of a described task, and raw rows for their models."""
    frame, sizes = messy(), {"train": 40, "validation": 10, "test": 10}
    frame.loc[3, "seen"] = "never"
    path = save(frame, folder)
    x, y = pictures(120)
    np.savez(folder / "p.npz", x=x, y=y)
    texts = pd.DataFrame({"text": ["good", "bad", None] * 40, "label": [0, 1, 1] * 40})
    texts.to_csv(folder / "texts.csv", index=False)
    people().to_csv(folder / "people.csv", index=False)
    of_text = {"type": "text", "path": str(folder / "texts.csv"), "classes": [0, 1], "length": 8}
    of_text |= {"encoder": str(encoder(folder / "encoder")), **sizes}
    mlp = table(path, model="mlp", hidden=[8], **sizes)
    save_file(get_task(mlp).model().state_dict(), folder / "public.safetensors")
    lora = {"type": "fine-tuning", "task": mlp, "trainable": "lora:2"}
    lora |= {"pretrained": str(folder / "public.safetensors")}
    paid = staged(folder / "people.csv").model_dump(mode="json")
    changed = {name: paid[name] for name in ("task", "stages", "expected_batch_size")}
    return {
        "table": (run(table(path, **sizes), folder / "1"), frame),
        "regression": (run(regression(path, **sizes), folder / "2"), frame),
        "lora": (run(lora, folder / "3"), frame),
        "pictures": (
            run(images(folder / "p.npz"), folder / "4"),
            pd.DataFrame({"picture": [*x[:9].tolist(), "none"]}),
        ),
        "text": (run(of_text, folder / "5"), texts[:40]),
        "paid": (run(changed.pop("task"), folder / "6", **changed), people()[:50]),
    }


def test_models_are_used_where_this_package_is_not(tmp_path: Path) -> None:
    wanted = {}
    for name, (study, frame) in studies(tmp_path).items():
        export_model(study, "arm", tmp_path / name)
        frame.to_json(tmp_path / f"{name}.json", orient="split")
        wanted[name] = study.release("arm").predict(frame)
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, *(str(tmp_path / name) for name in wanted)],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    for (name, known), line in zip(wanted.items(), done.stdout.splitlines(), strict=True):
        found = pd.DataFrame(json.loads(line))
        missing = found["prediction"].isna()
        assert missing.tolist() == known["prediction"].isna().tolist(), name
        assert missing.any() == (name != "paid"), name
        numbers = known.columns[known.dtypes == "float64"]
        pd.testing.assert_frame_equal(
            found[numbers].astype(float), known[numbers], atol=1e-6, check_index_type=False
        )
        if "prediction" not in numbers:
            assert found["prediction"][~missing].tolist() == known["prediction"][~missing].tolist()
    assert "transformers==" in (tmp_path / "text" / "requirements.txt").read_text()


def test_a_server_answers_raw_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where MLflow looks for its web server.
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    frame = messy()
    sizes = {"train": 40, "validation": 10, "test": 10}
    study = run(table(save(frame, tmp_path), **sizes), tmp_path / "study")
    export_model(study, "arm", tmp_path / "model")
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "models", "serve", "--env-manager", "local"]
    command += ["--model-uri", str(tmp_path / "model"), "--host", "127.0.0.1", "--port", str(port)]
    server = Server(command, port=port, log=tmp_path / "log", cwd=tmp_path).start()

    def ask(*rows: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{server.url}/invocations",
            json.dumps({"dataframe_records": rows}).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)["predictions"]
        except urllib.error.HTTPError as error:
            return json.load(error)["message"]

    try:
        first, wrong = json.loads(frame.to_json(orient="records"))[5], {"age": "?", "sex": "f"}
        found = ask({**first, "more": 1}, {**first, **wrong})
        said = ask(wrong)
    finally:
        server.stop()
    (known,) = study.release("arm").predict([first]).to_dict("records")
    assert found == [pytest.approx(known), dict.fromkeys(known)]
    assert said.endswith(
        "The rows have no column education, seen: the model takes the columns age, sex, education, "
        "seen, whose cells may be empty."
    )


class Small(nn.Module):
    """A network of one's own, which can be asked to branch by what it sees."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.branches = branches
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x.reshape(len(x), 1, 8, 8))
        return -found if self.branches and not self.training and x.mean() > 9 else found


@pytest.mark.parametrize("branches", [False, True])
def test_a_network_of_one_s_own_is_exported_if_it_is_a_program(
    tmp_path: Path, branches: bool
) -> None:
    import mlflow

    def build(trial: Any) -> Any:
        model = Small(branches)
        rate = trial.suggest_float("rate", 0.1, 1.0)
        return privtune.Candidate(model, torch.optim.SGD(model.parameters(), lr=rate))

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(x), y, reduction="none")

    rng = np.random.default_rng(0)
    x, y = rng.random((90, 1, 8, 8), dtype=np.float32), rng.integers(0, 3, 90)
    study = privtune.create_study(
        "own",
        budget=privtune.Budget(8.0, 1e-5, name="own"),
        storage=f"sqlite:///{tmp_path / 'p.db'}",
    )
    release = study.optimize(
        privtune.make_task(
            build,
            loss=loss,
            data=(x, y),
            split={"train": 60, "validation": 15, "test": 15},
            classes=["cat", "dog", "owl"],
        ),
        strategy=privtune.strategies.Fixed(parameters={"rate": 0.5}),
        epochs=1,
        expected_batch_size=30,
        arm="arm",
    )
    if branches:
        with pytest.raises(
            PrivTuneError, match=r"'arm' cannot be exported.*save release.state_dict"
        ):
            export_model(study, "arm", tmp_path / "model")
        return
    export_model(study, "arm", tmp_path / "model")
    with pytest.raises(PrivTuneError, match="must be a new folder, or an empty one"):
        export_model(study, "arm", tmp_path / "model")
    for path in filter(Path.is_file, (tmp_path / "model").rglob("*")):
        assert str(Path(__file__).parent).encode() not in path.read_bytes(), path
    loaded = mlflow.pyfunc.load_model(str(tmp_path / "model"))
    for part in (x, x[:1]):
        found = loaded.predict(part)
        wanted = release.model(torch.from_numpy(part)).double().softmax(1)
        assert np.allclose(found.iloc[:, 1:], wanted.detach(), atol=1e-6)
        names = [("cat", "dog", "owl")[n] for n in wanted.argmax(1)]
        assert found["prediction"].tolist() == names
