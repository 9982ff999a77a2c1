"""Raw rows: what training reads of them is what a trained model is asked with."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import nn

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.tables.raw_rows import ServedModel
from privtune.tasks import Task, get_task
from privtune.tasks.own import own_task
from privtune.tasks.tabular import tabular
from tests.tasks.test_described import images, pictures
from tests.tasks.test_tables import all_of, patients, regression, save, table


class Seen(nn.Module):
    """Keeps what it was asked, and answers with the first numbers of each."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.outputs, self.x = outputs, torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.x = x
        return x.reshape(len(x), -1)[:, : self.outputs].float()


def messy() -> pd.DataFrame:
    frame = patients(60).astype(object)
    frame.loc[0, ["age", "sex", "education", "seen"]] = [np.nan, "x", None, "2020-07-01"]
    frame.loc[1, ["age", "sex", "education", "seen"]] = [" 200 ", "m ", "n/a", ""]
    frame.loc[2, "age"] = "1e2"
    return frame


def sorted_rows(x: Any) -> np.ndarray[Any, Any]:
    rows = np.asarray(x, dtype=np.float32)
    return rows[np.lexsort(rows.T)]


@pytest.mark.quick
def test_a_model_of_a_table_sees_what_training_saw(tmp_path: Path) -> None:
    frame = messy()
    task = tabular(table(save(frame, tmp_path), train=20, validation=20, test=20))
    network = Seen(2)
    found = task.served(network).predict(frame[frame.columns[::-1]].assign(more=1))
    assert np.array_equal(sorted_rows(network.x), sorted_rows(all_of(task)[0]))
    shares = torch.softmax(network.x[:, :2].double(), 1).numpy()
    assert np.array_equal(found[["probability_no", "probability_yes"]], shares)
    assert found["prediction"].tolist() == [("no", "yes")[n] for n in shares.argmax(1)]
    rows = json.loads(frame.to_json(orient="records"))
    pd.testing.assert_frame_equal(task.served(network).predict(rows), found)
    as_read = pd.read_csv(tmp_path / "patients.csv")
    pd.testing.assert_frame_equal(task.served(network).predict(as_read), found)


@pytest.mark.parametrize(("column", "bad"), [("age", "old"), ("education", "phd"), ("seen", "now")])
def test_a_row_that_training_could_not_use_has_no_prediction(
    tmp_path: Path, column: str, bad: str
) -> None:
    frame = patients(10).astype(object)
    frame.loc[7, column] = bad
    found = tabular(table(save(frame, tmp_path))).served(Seen(2)).predict(frame)
    assert found["prediction"].isna().tolist() == [n == 7 for n in range(10)]
    assert found.isna().all(axis=1).sum() == 1


def test_a_missing_column_is_named_and_no_rows_give_none(tmp_path: Path) -> None:
    served = tabular(table(save(patients(10), tmp_path))).served(Seen(2))
    with pytest.raises(PrivTuneError, match="no column age, seen: the model takes the columns age"):
        served.predict(patients(10)[["sex", "education"]])
    with pytest.raises(InvalidInputError, match=r"sex.* there twice"):
        served.predict(pd.concat([patients(2), patients(2)[["sex"]]], axis=1))
    with pytest.raises(InvalidInputError, match="must be a DataFrame, or a list of dicts"):
        served.predict("age")
    assert served.predict(patients(10)[:0]).shape == (0, 3)
    assert served.predict([]).shape == (0, 3)
    assert served.predict(patients(10)[4:5]).index.tolist() == [4]


def test_numbers_are_in_the_target_s_units_and_range(tmp_path: Path) -> None:
    task = tabular(regression(save(patients(50), tmp_path)))
    model = task.model()
    with torch.no_grad():
        next(model.parameters()).fill_(0.9)
    found = task.served(model).predict(patients(50))
    x = torch.from_numpy(task.raw.read(patients(50))[0]) if task.raw else torch.empty(0)
    wanted = model(x).squeeze(1).detach().clamp(0, 20)
    assert found.columns.tolist() == ["prediction"]
    assert found["prediction"].to_numpy() == pytest.approx(wanted.numpy())
    assert set(found["prediction"]) > {0.0, 20.0}, "some were beyond the range"


def test_a_picture_is_one_in_every_form(tmp_path: Path) -> None:
    x, y = pictures(20)
    np.savez(tmp_path / "p.npz", x=x, y=y)
    task, network = get_task(images(tmp_path / "p.npz")), Seen(3)
    served = task.served(network)

    def png(picture: Any) -> bytes:
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "png")
        return file.getvalue()

    wanted = served.predict(x)
    assert np.array_equal(network.x.numpy(), x.transpose(0, 3, 1, 2).astype(np.float32) / 255)
    files = [png(one) for one in x]
    for given in (files, [base64.b64encode(one).decode() for one in files], x.tolist()):
        pd.testing.assert_frame_equal(served.predict(pd.DataFrame({"picture": given})), wanted)
    found = served.predict([files[0], b"no picture", "***", None, [[1]]])
    assert found["prediction"].isna().tolist() == [False, True, True, True, True]
    with pytest.raises(InvalidInputError, match=r"must be \[n, 8, 6, 3\]"):
        served.predict(x[:, :4])
    with pytest.raises(InvalidInputError, match=r"Divide floats by 255"):
        served.predict(x.astype(np.float32))
    (black,) = served.rows.example()
    assert served.predict([black])["probability_0"].tolist() == pytest.approx([1 / 3])


def linear(trial: Any) -> Any:
    raise NotImplementedError


def own(data: Any, **more: Any) -> Task:
    return own_task(linear, loss=linear, data=data, split={"train": 3}, **more)


def test_arrays_of_one_s_own_are_asked_as_they_were_given() -> None:
    x, y = np.random.default_rng(0).normal(size=(6, 4, 3)), np.arange(6) % 3
    served = own((x, y), classes=["a", "b", "c"]).served(network := Seen(3))
    x[2, 1, 1] = np.nan
    found = served.predict(x)
    assert found["prediction"].isna().tolist() == [n == 2 for n in range(6)]
    assert np.array_equal(network.x[3:], x[3:].astype(np.float32))
    with pytest.raises(InvalidInputError, match=r"numbers of shape \[n, 4, 3\]"):
        served.predict(x[0])
    frame = pd.DataFrame({"b": [1.0, 2.0, 3.0], "a": [4.0, 5.0, 6.0], "y": [0.5, 1.0, 2.0]})
    columns = {"inputs": ["a", "b"], "target": "y"}
    served = own(frame, columns=columns, target_range=(0.0, 5.0)).served(Seen(1))
    assert served.predict(frame)["prediction"].tolist() == [4.0, 5.0, 5.0]
    assert served.predict([{"a": "x", "b": 1}])["prediction"].isna().all()


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 2)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (self.table(ids) * mask.unsqueeze(-1)).sum(dim=1)
        return found


def test_several_arrays_are_asked_by_name_and_a_token_of_no_table_has_no_answer() -> None:
    ids, mask = torch.tensor([[1, 2, 0], [6, 5, 4]]), torch.ones(2, 3).bool()
    task = own({"ids": ids, "mask": mask, "labels": torch.tensor([0, 1])})
    served = task.served(model := Tokens())
    wanted = model(ids, mask).double().softmax(1)
    found = served.predict({"ids": ids.numpy(), "mask": mask.numpy()})
    assert np.allclose(found[["probability_0", "probability_1"]], wanted.detach(), atol=1e-6)
    other = served.predict({"ids": [[1, 2, 0], [1, 9, 0]], "mask": mask.tolist()})
    assert other["prediction"].isna().tolist() == [False, True]
    with pytest.raises(InvalidInputError, match=r"inputs\['mask'\] = None"):
        served.predict({"ids": ids.numpy()})


def test_a_model_answers_the_same_from_its_folder(tmp_path: Path) -> None:
    frame = messy()
    task = tabular(table(save(frame, tmp_path), projection=np.eye(3, 10).tolist()))
    served = task.served(nn.Linear(3, 2))
    served.save(tmp_path)
    program = torch.export.export(
        served.network,
        (torch.zeros(2, 3),),
        dynamic_shapes=({0: torch.export.Dim.DYNAMIC},),
    )
    torch.export.save(program, tmp_path / "network.pt2")
    pd.testing.assert_frame_equal(ServedModel.load(tmp_path).predict(frame), served.predict(frame))
