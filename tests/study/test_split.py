"""One validation split a round, whichever process scores on it."""

from __future__ import annotations

import hashlib

import pytest
import torch

from privtune.study._loop_data import in_memory
from privtune.study._results import Results
from privtune.study.split import Split, SplitError
from privtune.training.mechanism.data import TensorData

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


def test_nor_than_that_in_a_file_of_the_version_before(results: Results) -> None:
    content = SPLIT.x.numpy().tobytes() + SPLIT.y.numpy().tobytes()
    results.folder.mkdir(parents=True)
    file = results.folder / "validation.sha256"
    file.write_text(hashlib.sha256(content).hexdigest())
    with pytest.raises(SplitError, match="different validation records"):
        Split(results).check(OTHER, TRAIN)
    assert not file.exists()
    Split(results).check(SPLIT, TRAIN)


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
