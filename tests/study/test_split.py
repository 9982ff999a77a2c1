"""One validation split a round, whichever process scores on it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from privtune.study._loop_data import in_memory, records_of, to_score
from privtune.study._results import Results
from privtune.study.split import Split, SplitError
from privtune.training.mechanism.data import DatasetData, TensorData

TRAIN, SPLIT, OTHER = (
    TensorData(torch.full((8, 2), value), torch.zeros(8, dtype=torch.long))
    for value in (0.0, 1.0, 2.0)
)


def test_another_process_may_not_score_on_another_split(results: Results) -> None:
    Split(results).check(SPLIT, TRAIN)
    Split(results).check(SPLIT, TRAIN)
    with pytest.raises(SplitError, match="different validation records"):
        Split(results).check(OTHER, TRAIN)
    assert not results.folder.exists(), "no file is kept beside the rows"


@pytest.mark.parametrize("values", [2, 2**40])  # 2: equal by chance, told by their memory alone
def test_training_records_are_found_whichever_of_them_cannot_be_used(
    results: Results, values: int
) -> None:
    x = torch.randint(values, (300, 4), generator=torch.Generator().manual_seed(0))
    y, lost = torch.zeros(300, dtype=torch.long), torch.zeros(300, dtype=torch.bool)
    lost[::40] = True
    whole, some = TensorData(x, y), TensorData(x[:100], y[:100])
    for train, validation in (
        (whole.marked(lost), some),
        (whole, some.marked(lost[:100])),
        (whole.marked(lost), some.marked(lost[:100])),
    ):
        with pytest.raises(SplitError, match="validation records are training records"):
            Split(results).check(validation, train)


def test_packed_records_of_one_memory_are_found(results: Results) -> None:
    tokens, labels = torch.zeros(40, 3).long(), torch.zeros(40).long()
    train = in_memory({"input_ids": tokens, "labels": labels})
    with pytest.raises(SplitError, match="validation records are training records"):
        Split(results).check(in_memory({"input_ids": tokens[:9], "labels": labels[:9]}), train)
    Split(results).check(
        in_memory({"input_ids": tokens.clone()[:9], "labels": labels[:9] * 1}), train
    )


def test_one_row_of_positions_for_all_records_and_one_memory_of_targets_are_shared_by_right(
    results: Results,
) -> None:
    places, labels = torch.arange(3), torch.zeros(40).long()

    def records(count: int, token: int) -> TensorData:
        tokens = torch.full((count, 3), token)
        data: TensorData = in_memory(
            {"ids": tokens, "places": places.expand(count, 3), "labels": labels[:count]}
        )
        return data

    Split(results).check(records(9, 1), records(40, 2))


def test_another_split_in_the_memory_of_the_one_before_is_found(results: Results) -> None:
    split, x, y = Split(results), torch.zeros(8, 2), torch.zeros(8, dtype=torch.long)
    there = TensorData(x, y)
    split.check(there, TRAIN)
    numbers = x.numpy()
    del there, x
    numbers += 1.0
    with pytest.raises(SplitError, match="different validation records"):
        split.check(TensorData(torch.from_numpy(numbers), y), TRAIN)


class _Halved(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A data set that changes what it holds as it is read, and holds more than it gives."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, size: int) -> None:
        self.tensors, self._size = (x, y), size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return 0.5 * self.tensors[0][index], self.tensors[1][index]


class _HalvedToo(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        return 0.5 * self.tensors[0][index], self.tensors[1][index]


def test_records_are_what_a_data_set_gives_not_the_tensors_that_it_holds() -> None:
    x, y = torch.randn(6, 2), torch.zeros(6, dtype=torch.long)
    assert torch.equal(in_memory(TensorDataset(x, y)).x, x)
    assert torch.equal(in_memory(_HalvedToo(x, y)).x, 0.5 * x)
    for part in ("all", "tuning"):
        data = records_of(_Halved(x, y, 4), part)
        assert len(data) == 4
        assert torch.equal(data.fetch(torch.arange(4))[0], 0.5 * x[:4])
    assert torch.equal(to_score(_Halved(x, y, 4)).x, 0.5 * x[:4])


@pytest.mark.parametrize(("factor", "refused"), [(0.5, True), (1.0, False)])
def test_training_records_that_are_read_one_by_one_are_no_split(
    results: Results, factor: float, refused: bool
) -> None:
    x, y = torch.randn(5000, 2), torch.zeros(5000, dtype=torch.long)
    split, validation = Split(results), TensorData(factor * x[::8], y[::8].clone())
    with pytest.raises(SplitError, match="are training") if refused else nullcontext():
        split.check(validation, DatasetData(_Halved(x, y, 5000)))


@pytest.mark.parametrize(("shared", "refused"), [(2, False), (8, False), (20, True), (80, True)])
def test_more_records_than_by_chance_are_not_shared(
    results: Results, shared: int, refused: bool
) -> None:
    x, y = torch.randn(400, 3), torch.zeros(400, dtype=torch.long)
    validation = torch.cat([x[:shared], torch.randn(100 - shared, 3)])
    with pytest.raises(SplitError) if refused else nullcontext():
        Split(results).check(TensorData(validation, y[:100].clone()), TensorData(x, y))


@pytest.mark.parametrize(("rows", "blank"), [(100, 20), (4, 1)])
def test_blank_records_count_once_and_one_of_a_sample_is_no_share(
    results: Results, rows: int, blank: int
) -> None:
    x, y = torch.randn(12_000, 2), torch.zeros(12_000, dtype=torch.long)
    apart = torch.randn(rows, 2)
    x[0], apart[:blank] = 0.0, 0.0
    validation = TensorData(apart, y[:rows].clone())
    Split(results).check(validation, TensorData(x, y))
    Split(results).check(validation, DatasetData(TensorDataset(x, y)))
