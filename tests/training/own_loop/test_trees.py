"""Loops over records of several tensors: what they guarantee of pairs they guarantee of trees."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification

from privtune.accounting import Gaussian, PoissonSampled, Repeated
from privtune.errors import InvalidInputError
from privtune.study._loop_data import in_memory, to_score
from privtune.study.rehearsal import made_up
from privtune.tasks import Packing
from privtune.training.mechanism.clipping import Flat
from privtune.training.mechanism.data import DatasetData, TensorData
from privtune.training.mechanism.kernel import flatten_params
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import FixedDPSGD
from privtune.training.own_loop.private_training import PrivateTraining
from privtune.training.own_loop.weights import LoopError

TOKENS, LENGTH, RECORDS = 9, 4, 60
IDS = torch.randint(1, TOKENS, (RECORDS, LENGTH), generator=torch.Generator().manual_seed(0))
MASK = torch.arange(LENGTH) < torch.arange(RECORDS).remainder(LENGTH).add(1).unsqueeze(1)
LABELS = (IDS[:, 0] > 4).long()
RAGGED = torch.nested.nested_tensor([IDS[0], IDS[1, :2]], layout=torch.jagged)


class Bag(nn.Module):
    """Means of tokens: by name, in order, or nested."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
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


TREES = {
    "dict": ({"input_ids": IDS, "attention_mask": MASK, "labels": LABELS}, of_dict),
    "labels first": ({"labels": LABELS, "input_ids": IDS, "attention_mask": MASK}, of_dict),
    "encoding": (
        BatchEncoding({"input_ids": IDS, "attention_mask": MASK, "labels": LABELS}),
        of_dict,
    ),
    "tuple": ((IDS, MASK, LABELS), of_tuple),
    "dict and label": (({"input_ids": IDS, "attention_mask": MASK}, LABELS), of_pair),
    "nested": ({"text": {"both": (IDS, MASK)}, "label": LABELS}, of_nested),
}


class Rows(Dataset):
    """One record at a time."""

    def __init__(self, tree):
        self.tree = tree

    def __len__(self):
        return RECORDS

    def __getitem__(self, number):
        return self.of(self.tree, number)

    def of(self, tree, number):
        if isinstance(tree, tuple):
            return tuple(self.of(part, number) for part in tree)
        if isinstance(tree, torch.Tensor):
            return tree[number]
        return {name: self.of(part, number) for name, part in tree.items()}


def start(data, *, steps=3, rate=0.3, noise=1.0, model=None, **options):
    model = model or Bag()
    return PrivateTraining(
        model,
        data,
        schedule=Schedule(RECORDS, rate, steps),
        method=FixedDPSGD(noise),
        optimizer=torch.optim.SGD(model.parameters(), 1.0),
        clipping=Flat(0.5),
        secret=bytes(32),
        **options,
    )


def fitted(data, loss_of, form, **options):
    private = start(data, **options)
    schedule = private.schedule
    for batch in private.batches():
        if form == "record":
            private.step(batch, loss_of)
        elif form == "read":
            private.step(dict(batch) if batch.keys() else tuple(batch), loss_of)
        else:
            whole = [batch] if batch.keys() else list(batch)
            private.step(loss_of(private.model, *whole))
    private.finish(Repeated(schedule.steps, PoissonSampled(schedule.sample_rate, Gaussian(1.0))))
    return flatten_params(private.bare)


def packed(rate=0.3):
    """The same training on records that a user has packed by hand."""
    packing = Packing.of((IDS, MASK))
    data = TensorData(packing.pack((IDS, MASK)), LABELS)

    def loss_of(model, x, y):
        return cross_entropy(model(*packing.unpack(x)), y, reduction="none")

    return fitted(data, loss_of, "record", rate=rate)


@pytest.mark.parametrize("form", ["record", "read", "losses"])
@pytest.mark.parametrize("kind", TREES)
def test_a_tree_trains_what_its_packed_records_train(kind, form):
    tree, loss_of = TREES[kind]
    expected = packed()
    for data in (in_memory(tree), Rows(tree)):
        torch.testing.assert_close(fitted(data, loss_of, form), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [{"one_by_one": True}, {"max_physical_batch_size": 7}])
def test_other_ways_to_compute_give_the_same(options):
    tree, loss_of = TREES["dict"]
    found = fitted(in_memory(tree), loss_of, "record", **options)
    torch.testing.assert_close(found, packed(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", ["record", "read", "losses"])
def test_an_empty_sample_shows_one_record_and_is_noise_alone(form):
    tree, loss_of = TREES["dict"]
    found = fitted(in_memory(tree), loss_of, form, rate=1e-9)
    torch.testing.assert_close(found, packed(rate=1e-9))
    for batch in start(in_memory(tree), rate=1e-9).batches():
        assert (batch["labels"].shape, len(batch)) == ((1,), 3)
        break


def test_a_transformer_is_called_as_its_users_call_it():
    """Its own loss, which it finds by the name of the labels."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(
        vocab_size=TOKENS, intermediate_size=8, max_position_embeddings=LENGTH, **sizes
    )
    private = start(
        in_memory(TREES["encoding"][0]), model=BertForSequenceClassification(config), steps=2
    )
    before = flatten_params(private.bare)
    private.fit(lambda model, batch: model(**batch).loss)
    assert not torch.equal(flatten_params(private.bare), before)
    assert private._oracle.nonfinite.sum() == 0


def test_a_rehearsal_finds_the_tables_and_a_token_of_none_counts_as_nothing():
    tree, loss_of = TREES["dict"]
    wrong = {**tree, "input_ids": IDS.clone()}
    wrong["input_ids"][:10, 2] = TOKENS
    data = in_memory(wrong)
    rehearsal = start(made_up(data, RECORDS), limit=2)
    for batch in rehearsal.batches():
        rehearsal.step(loss_of(rehearsal.model, batch))
    assert rehearsal.facts.inputs[:LENGTH].tolist() == [TOKENS] * LENGTH
    for form, facts in (("losses", {"facts": rehearsal.facts}), ("record", {})):
        private = start(data, steps=1, rate=1.0, noise=0.0, **facts)
        for batch in private.batches():
            private.step(
                *([batch, loss_of] if form == "record" else [loss_of(private.model, batch)])
            )
        assert private._oracle.nonfinite.tolist() == [10]


def test_a_record_of_another_shape_or_other_names_contributes_nothing():
    tree, loss_of = TREES["dict"]

    class Ragged(Rows):
        def __getitem__(self, number):
            record = dict(super().__getitem__(number))
            if number == 3:
                record["input_ids"] = record["input_ids"][:-1]
            if number == 4:
                record["segments"] = record.pop("attention_mask")
            if number == 5:
                record["labels"] = "no number"
            return dict(reversed(record.items())) if number == 6 else record

    x, _, lost = DatasetData(Ragged(tree)).fetch(torch.arange(RECORDS))
    assert torch.equal(x[6], in_memory(tree).x[6])
    assert lost.nonzero().flatten().tolist() == [3, 4, 5]
    private = start(Ragged(tree), steps=1, rate=1.0, noise=0.0)
    private.fit(loss_of)
    assert private._oracle.nonfinite.tolist() == [3]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"input_ids": IDS, "labels": LABELS[1:]}, "as many records in every tensor"),
        ({"input_ids": IDS, "texts": ["a"] * RECORDS, "labels": LABELS}, "leave texts and lists"),
        ({"input_ids": IDS.tolist(), "labels": LABELS}, "leave texts and lists"),
        ({"input_ids": IDS, "labels": torch.tensor(1)}, "records along the first axis"),
        (
            {"ids": RAGGED, "labels": LABELS[:2]},
            "Pad records to one public length",
        ),
        ({"input_ids": IDS, "labels": {"one": LABELS}}, "it is the target"),
        ({"labels": LABELS}, "inputs and a target"),
        ({}, "inputs and a target"),
        ((IDS, MASK.double(), LABELS), "whole numbers alone"),
        ((IDS,), "must be inputs and targets"),
        ((IDS, {"labels": LABELS}), "must be a pair of tensors or arrays"),
        ((IDS, None), "must be a pair of tensors or arrays"),
        ([{"ids": [1, 2], "label": 0}], "readable as pairs of tensors, or as dicts"),
        ([{"ids": [[1, 2], [3]], "label": 0}], "readable as pairs of tensors, or as dicts"),
        (list(IDS), "readable as pairs of tensors, or as dicts"),
        ([np.ones((3, 2))], "readable as pairs of tensors, or as dicts"),
        ([{"text": "words", "label": 0}], "readable as pairs of tensors, or as dicts"),
    ],
)
def test_what_is_no_tree_of_tensors_is_one_sentence(data, why):
    with pytest.raises(InvalidInputError, match=why):
        in_memory(data)


@pytest.mark.parametrize(
    "data",
    [(IDS, MASK, LABELS), {"ids": IDS, "target": LABELS}, {"a": IDS, "b": MASK, "c": LABELS}],
)
def test_a_score_guesses_no_target(data):
    with pytest.raises(InvalidInputError, match="must say which part is the target"):
        to_score(data)
    for said in ((IDS, LABELS), ((IDS, MASK), LABELS), {"label": LABELS, "ids": IDS, "mask": MASK}):
        assert torch.equal(to_score(said).y, LABELS)


def test_arrays_and_numbers_of_a_dataset_are_tensors():
    data = in_memory([{"ids": np.arange(3), "label": n} for n in range(2)])
    assert (data.x.tolist(), data.y.tolist()) == ([[0, 1, 2]] * 2, [0, 1])


def whole(private, step):
    for batch in private.batches():
        step(batch)


def coupled(private, batch):
    share = batch["attention_mask"].double().mean()
    return of_dict(private.model, batch) * share


def foreign(private, batch):
    return of_dict(private.model, batch) + 0.0 * IDS.sum()


@pytest.mark.parametrize(
    ("losses", "why"),
    [(coupled, "changes with the other records"), (foreign, "records that this step does not")],
)
def test_losses_that_look_at_other_records_are_refused(losses, why):
    private = start(in_memory(TREES["dict"][0]))
    with pytest.raises(LoopError, match=why):
        whole(private, lambda batch: private.step(losses(private, batch)))


def test_a_loss_that_reads_the_data_set_is_refused():
    private = start(in_memory(TREES["dict"][0]))
    with pytest.raises(LoopError, match="records that this step does not"):
        private.fit(lambda model, batch: of_dict(model, batch) + 0.0 * IDS.sum())


@pytest.mark.parametrize("spoil", ["other", "changed", "skipped", "records"])
def test_batches_are_stepped_as_they_were_yielded(spoil):
    tree = {name: tensor.clone() for name, tensor in TREES["dict"][0].items()}
    private = start(in_memory(tree))

    def step(batch):
        found = dict(batch.items())
        if spoil == "other":
            found["input_ids"] = found["input_ids"].flip(0)
        elif spoil == "changed":
            found["input_ids"].fill_(1)
        elif spoil == "records":
            tree["labels"].fill_(1)
        if spoil != "skipped":
            private.step(found, of_dict)

    with pytest.raises(LoopError):
        whole(private, step)
