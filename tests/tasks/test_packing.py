"""Records of several tensors: packed and back, and trained as they are elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from privtune.errors import InvalidInputError
from privtune.tasks import Packing
from privtune.training.engine.kernels import BatchedKernel
from privtune.training.mechanism.clipping import Flat
from privtune.training.mechanism.data import Leaves, RecordTree, TensorData, find_facts
from privtune.training.mechanism.kernel import LossOfOutputs, Rows, flatten_params
from tests.training.simple import clipped_sum, cross_entropy, per_sample_gradients


def batch(records=6):
    generator = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.randint(1, 9, (records, 4), generator=generator),
        "attention_mask": torch.randint(2, (records, 4), generator=generator, dtype=torch.int32),
        "pairs": torch.randint(2, (records, 2, 2), generator=generator).bool(),
    }


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(9, 5), nn.Linear(5, 3)

    def forward(self, input_ids, attention_mask, pairs):
        assert attention_mask.dtype == torch.int64
        assert pairs.dtype == torch.bool
        seen = self.words(input_ids) * (attention_mask * pairs.flatten(1)).unsqueeze(-1)
        outputs = type("Outputs", (), {})()
        outputs.logits = self.head(seen.sum(1).tanh())
        return outputs


def test_one_walk_gives_the_order_names_and_target_of_parts():
    leaves = Leaves.of({"label": 1, "text": {"ids": 2, "both": (3, [4, 5])}}, lists_are_leaves=True)
    assert leaves.names == ["label", "text.ids", "text.both.0", "text.both.1"]
    assert leaves.values == [1, 2, 3, [4, 5]]
    assert leaves.is_target == [True, False, False, False]
    assert leaves.rebuild("abcd") == {"label": "a", "text": {"ids": "b", "both": ("c", "d")}}
    assert Leaves.of((1, (2, 3))).is_target == [False, True, True]
    assert Leaves.of({"label": 1}).is_target == [False]


def test_what_is_packed_comes_back():
    given = batch()
    packing = Packing.of(given)
    back = packing.unpack(packing.pack(given))
    assert list(back) == list(given)
    for name, tensor in given.items():
        assert back[name].dtype == (torch.bool if name == "pairs" else torch.int64)
        assert torch.equal(back[name], tensor)
    ordered = Packing.of(tuple(given.values()))
    assert all(map(torch.equal, ordered.unpack(packing.pack(given)), given.values()))
    half = {"a": torch.rand(3, 2), "b": torch.rand(3)}
    assert torch.equal(Packing.of(half).unpack(Packing.of(half).pack(half))["b"], half["b"])


@pytest.mark.parametrize(
    "mixed",
    [
        {"ids": torch.ones(2, 3, dtype=torch.int64), "mask": torch.ones(2, 3)},
        {"a": torch.ones(2, 3), "b": torch.ones(2, 3, dtype=torch.float64)},
        {},
    ],
)
def test_tensors_of_two_kinds_are_refused(mixed):
    with pytest.raises(InvalidInputError, match="whole numbers alone, or floating"):
        Packing.of(mixed)


def test_other_records_than_it_was_made_for_are_refused():
    packing = Packing.of(batch())
    for other in ({**batch(), "pairs": batch(5)["pairs"]}, {"input_ids": batch()["input_ids"]}):
        with pytest.raises(InvalidInputError, match="as many records"):
            packing.pack(other)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_whole_numbers_of_any_type_are_held_to_their_table(dtype):
    ids, labels = torch.tensor([[1, 8], [9, 2]]).to(dtype), torch.zeros(2).long()
    words = nn.Embedding(9, 5)
    tree, x, y = RecordTree.split({"ids": ids, "mask": ids > 0, "labels": labels})
    packed = tree.loss_of(lambda model, batch: model(batch["ids"]).sum())
    facts = find_facts(lambda x, y: packed(words, x, y), x[:0], y[:0])
    assert facts.inputs[:2].tolist() == [9, 9]
    assert TensorData(x, y).held_to(facts).unusable.tolist() == [False, True]


def test_a_wrapped_model_is_trained_in_stacks_and_its_tokens_are_held_to_their_table():
    packing = Packing.of(batch())
    torch.manual_seed(1)
    model = packing.wrap(Reader())
    x, y = packing.pack(batch()), torch.tensor([0, 1, 2, 0, 1, 2])
    kernel = BatchedKernel(
        lambda: model, LossOfOutputs(cross_entropy), x=x, y=y, device=torch.device("cpu")
    )
    params = torch.stack([flatten_params(model), 2.0 * flatten_params(model)])
    rows = Rows(x.expand(2, -1, -1), y.expand(2, -1), [6, 6], torch.ones(2, 6), [])
    rows = Rows(rows.x, rows.y, rows.sizes, rows.mask, [torch.Generator()] * 2)
    out = torch.zeros_like(params)
    kernel.accumulate(params, rows, Flat(0.3), out=out)
    for k in range(2):
        own = per_sample_gradients(model, params[k], x, y, cross_entropy)
        torch.testing.assert_close(out[k], clipped_sum(own, 0.3), rtol=1e-5, atol=1e-6)
    beyond = x.clone()
    beyond[2, 1] = 9  # a token that is in no row of the table
    facts = find_facts(lambda x, _: model(x), x, y)
    held = TensorData(beyond, y).held_to(facts)
    assert held.unusable.tolist() == [False, False, True, False, False, False]
