"""Candidates over records of several tensors: what is guaranteed of pairs is guaranteed of trees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification

from privtune.tasks import Packing
from privtune.training.engine.train import (
    TrainableCandidate,
    TrainedCandidate,
    Training,
    initialisation,
)
from privtune.training.mechanism.data import RecordTree, TensorData
from privtune.training.mechanism.kernel import flatten_params
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.streams import Streams
from privtune.training.methods import FixedDPSGD

TOKENS, LENGTH, RECORDS = 9, 4, 60
IDS = torch.randint(1, TOKENS, (RECORDS, LENGTH), generator=torch.Generator().manual_seed(0))
MASK = torch.arange(LENGTH) < torch.arange(RECORDS).remainder(LENGTH).add(1).unsqueeze(1)
LABELS = (IDS[:, 0] > 4).long()


class Bag(nn.Module):
    """Means of tokens: by name, in order, or nested."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(TOKENS, 5), nn.Linear(5, 2)

    def forward(self, input_ids, attention_mask, labels=None):
        there = attention_mask.to(self.head.weight.dtype).unsqueeze(-1)
        return self.head((self.words(input_ids) * there).sum(1) / there.sum(1))


def of_pair(model, x, y):
    return cross_entropy(model(**x), y, reduction="none")


def of_dict(model, batch):
    assert batch["attention_mask"].dtype == torch.bool
    return cross_entropy(model(**batch), batch["labels"], reduction="none")


def of_tuple(model, ids, mask, labels):
    return cross_entropy(model(ids, mask), labels, reduction="none")


def of_nested(model, batch):
    return cross_entropy(model(*batch["text"]["both"]), batch["label"], reduction="none")


DICT = {"input_ids": IDS, "attention_mask": MASK, "labels": LABELS}
TREES = {
    "dict": (DICT, of_dict),
    "encoding": (BatchEncoding(DICT), of_dict),
    "tuple": ((IDS, MASK, LABELS), of_tuple),
    "dict and label": (({"input_ids": IDS, "attention_mask": MASK}, LABELS), of_pair),
    "nested": ({"text": {"both": (IDS, MASK)}, "label": LABELS}, of_nested),
}


def fitted(
    data, loss_of, *, steps=3, rate=0.3, noise=1.0, count=1, build=Bag
) -> list[TrainedCandidate]:
    made = []
    for k in range(count):
        with initialisation(Streams(bytes([k]) * 32)):
            model = build()
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        made.append(TrainableCandidate(model, bytes([k]) * 32, {"max_grad_norm": 0.5}, optimizer))
    schedule = Schedule(RECORDS, rate, steps)
    tree = data.tree
    own = loss_of if tree is None else tree.loss_of(loss_of)
    return list(Training(FixedDPSGD(noise), schedule, own, data, device="cpu").of(made))


def in_memory(records) -> TensorData:
    tree, x, y = RecordTree.split(records)
    return TensorData(x, y, tree=tree)


def packed(**options: Any) -> list[TrainedCandidate]:
    """The same training on records that a user has packed by hand."""
    packing = Packing.of((IDS, MASK))

    def loss_of(model, x, y):
        return cross_entropy(model(*packing.unpack(x)), y, reduction="none")

    return fitted(TensorData(packing.pack((IDS, MASK)), LABELS), loss_of, **options)


@pytest.mark.parametrize("kind", TREES)
def test_a_tree_trains_what_its_packed_records_train(kind):
    tree, loss_of = TREES[kind]
    expected = packed(count=2)
    for one, other in zip(fitted(in_memory(tree), loss_of, count=2), expected, strict=True):
        torch.testing.assert_close(one.params, other.params, rtol=1e-4, atol=1e-6)


def test_a_transformer_is_called_as_its_users_call_it():
    """Its own loss, which it finds by the name of the labels; several of them share a stack."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(
        vocab_size=TOKENS, intermediate_size=8, max_position_embeddings=LENGTH, **sizes
    )

    def build():
        return BertForSequenceClassification(config)

    def own(model, batch):
        return model(**batch).loss

    data = in_memory(BatchEncoding(DICT))
    together = fitted(data, own, steps=2, count=2, build=build)
    (alone,) = fitted(data, own, steps=2, build=build)
    torch.testing.assert_close(together[0].params, alone.params, rtol=1e-4, atol=1e-5)
    with initialisation(Streams(bytes(32))):
        before = flatten_params(build())
    assert not torch.equal(alone.params, before)
    assert alone.unusable == 0
