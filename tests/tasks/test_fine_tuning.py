"""Public weights from a file, the part that is trained, features of a frozen part."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.execution.fine_tuned import reduce_task
from privtune.execution.trained_weights import NothingTrainedError
from privtune.execution.trial_training import TrialWork, train_trials
from privtune.spaces import SearchSpace
from privtune.strategies import TrainingPlan, make_strategy
from privtune.strategies.arms import plan_arm
from privtune.study.rehearsal import rehearse
from privtune.study.spec import StudySpec
from privtune.tasks import TaskDataError, fine_tuned, get_task
from privtune.training.engine.compute import Compute
from privtune.training.engine.fine_tuning import set_trainable
from privtune.training.engine.kernels import BatchedKernel
from privtune.training.engine.train import choose_kernel
from privtune.training.mechanism.clipping import Flat
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import LossOfOutputs, flatten_params
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import FixedDPSGD
from studies.harness import train
from tests.training.simple import per_sample_gradients, rows_of, summed

CPU = torch.device("cpu")
DIGITS = TensorData(
    torch.rand(9, 64, generator=torch.Generator().manual_seed(1)), torch.arange(9) % 7
)
SIZES = {"all": 4810, "head": 650, "biases": 64 + 650, "lora:3": 3 * 128 + 650}


@pytest.fixture
def weights(tmp_path):
    torch.manual_seed(3)
    path = tmp_path / "digits.safetensors"
    body = {n: p.detach() for n, p in get_task("digits-mlp").model().named_parameters()}
    safetensors.torch.save_file({n: p for n, p in body.items() if n.startswith("0.")}, path)
    return path


def tuned(weights, trainable, **options):
    return fine_tuned(
        get_task("digits-mlp"), pretrained=str(weights), trainable=trainable, **options
    )


def trained_in(model):
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("trainable", SIZES)
def test_a_part_is_trained_and_starts_from_the_public_weights(weights, trainable):
    task = tuned(weights, trainable)
    one, two = task.model(), task.model()
    assert trained_in(one) == SIZES[trainable]
    public = safetensors.torch.load_file(weights)
    named = {n.replace("base.", ""): p for n, p in one.named_parameters()}
    for name, tensor in public.items():
        assert torch.equal(named[name], tensor)
    # The adapter starts as nothing: outputs are those of the public body under the same head.
    x = torch.rand(5, 64)
    plain = get_task("digits-mlp").model()
    plain.load_state_dict({**public, "2.weight": named["2.weight"], "2.bias": named["2.bias"]})
    torch.testing.assert_close(one(x), plain(x))
    shared = {
        name
        for (name, a), b in zip(one.named_parameters(), two.parameters(), strict=True)
        if a.data_ptr() == b.data_ptr()
    }
    assert shared == {n for n, p in one.named_parameters() if not p.requires_grad}


def test_weights_that_changed_since_the_plan_are_not_used(weights):
    task = tuned(weights, "head")
    assert tuned(weights, "lora:2", target_modules=["0"]).trainable == "lora:2 in 0"
    weights.write_bytes(safetensors.torch.save({"0.bias": torch.zeros(64)}))
    with pytest.raises(TaskDataError, match="has changed since it was planned"):
        task.model()


class Runs:
    """Unpickled, it would run a program."""

    def __reduce__(self):
        return print, ("run",)


def test_a_state_dict_of_torch_is_read_and_no_other_pickle_is_run(tmp_path, weights, capsys):
    saved = tmp_path / "model.pt"
    torch.save(safetensors.torch.load_file(weights), saved)
    one, other = tuned(weights, "head").model(), tuned(saved, "head").model()
    assert torch.equal(one[0].weight, other[0].weight)
    for content in (Runs(), {"0.bias": Runs()}, nn.Linear(2, 2), {"epoch": 3}):
        torch.save(content, saved)
        with pytest.raises(TaskDataError, match="holds more than a state dict"):
            tuned(saved, "head").model()
    assert "run" not in capsys.readouterr().out


def test_what_is_no_safetensors_is_refused(tmp_path, weights):
    with pytest.raises(InvalidInputError, match="holds no"):
        tuned(tmp_path / "..", "head")
    (tmp_path / "text.safetensors").write_text("no tensors")
    with pytest.raises(TaskDataError, match="cannot be read as safetensors"):
        tuned(tmp_path / "text.safetensors", "head").model()
    safetensors.torch.save_file({"0.bias": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(
        InvalidInputError, match=r"holds no 0\.bias, 0\.weight of the model's shape"
    ):
        tuned(tmp_path / "other.safetensors", "head").model()
    with pytest.raises(
        InvalidInputError,
        match="names no linear layer and no convolution beside the head; there are 0",
    ):
        tuned(weights, "lora:2", target_modules=["7"]).model()


def test_a_folder_of_shards_is_one_set_of_weights(tmp_path, weights):
    whole = safetensors.torch.load_file(weights)
    folder = tmp_path / "hugging"
    folder.mkdir()
    for number, (name, tensor) in enumerate(whole.items()):
        safetensors.torch.save_file({name: tensor}, folder / f"model-{number}.safetensors")
    model = tuned(folder, "head").model()
    assert torch.equal(model[0].weight, whole["0.weight"])


class Placed(nn.Module):
    """Holds what it makes anew every time, and no file does: Hugging Face's positions."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(7, 4), nn.Linear(4, 3)
        self.register_buffer("places", torch.arange(5), persistent=False)

    def forward(self, x):
        return self.head((self.words(x) * torch.cos(self.places).unsqueeze(-1)).sum(1))


def of_tokens(tmp_path, **changes):
    torch.manual_seed(0)
    file = tmp_path / "placed.safetensors"
    safetensors.torch.save_file({"words.weight": torch.randn(7, 4)}, file)
    base = dataclasses.replace(
        get_task("digits-mlp"), model=Placed, input_shape=(5,), tokens=7, classes=3, **changes
    )
    return fine_tuned(base, pretrained=str(file), trainable="head")


def test_tokens_train_a_head_on_features_and_one_of_no_table_counts_as_nothing(tmp_path):
    task = of_tokens(tmp_path)
    x, y = torch.randint(7, (60, 5)), torch.randint(3, (60,))
    x[3, 2], x[9, 0] = 7, -1
    data = TensorData(x, y)
    model, reduce = reduce_task(task, data)
    assert reduce(data).x.shape == (60, 4)
    options = {
        "loss": task.loss,
        "candidates": [{"learning_rate": 0.5, "max_grad_norm": 1.0}],
        "secrets": [bytes(32)],
        "device": "cpu",
    }
    schedule = Schedule(60, 0.3, 8)
    whole = train(FixedDPSGD(1.0), schedule, model=task.model, data=data, **options)
    part = train(FixedDPSGD(1.0), schedule, model=model, data=reduce(data), **options)
    torch.testing.assert_close(part.params, whole.params, rtol=1e-4, atol=1e-5)
    assert part.unusable == whole.unusable != (0,)
    assert rehearsed(task) > 0.0


def test_features_of_a_frozen_part_train_the_same_head(weights):
    """Once a record, and the head alone: the weights that the whole model would get."""
    task = tuned(weights, "head")
    torch.manual_seed(0)
    data = TensorData(torch.rand(200, 64), torch.randint(10, (200,)))
    schedule = Schedule(200, 0.2, 12)
    options = {
        "loss": task.loss,
        "candidates": [{"learning_rate": 0.5, "max_grad_norm": 1.0}] * 2,
        "secrets": [bytes([k] * 32) for k in range(2)],
        "device": "cpu",
    }
    whole = train(FixedDPSGD(1.0), schedule, model=task.model, data=data, **options)
    model, reduce = reduce_task(task, data)
    part = train(FixedDPSGD(1.0), schedule, model=model, data=reduce(data), **options)
    torch.testing.assert_close(part.params, whole.params, rtol=1e-4, atol=1e-5)
    assert reduce(data) is reduce(data)  # computed once
    assert reduce(data).x.shape == (200, 64)
    kernel = choose_kernel(model(), LossOfOutputs(task.loss), reduce(data), torch.device("cpu"))
    assert trained_in(kernel.module) == sum(p.numel() for p in kernel.module.parameters()) == 650
    assert reduce_task(tuned(weights, "biases"), data)[0] is not model


class Centred(nn.Module):
    """Its features look at the other records of the batch."""

    def forward(self, x):
        return x - x.mean(dim=0)


class Late(nn.Module):
    """Its last layer with parameters is not what its outputs come from."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        return self.layer(x).relu()


def frozen_but_last(model):
    layers = list(model.parameters())
    for parameter in layers[:-2]:
        parameter.requires_grad_(False)
    return model


def with_model(make):
    return dataclasses.replace(get_task("digits-mlp"), model=make, trainable="head")


def test_a_frozen_part_that_couples_records_is_refused():
    def make():
        torch.manual_seed(0)
        return frozen_but_last(nn.Sequential(nn.Linear(64, 8), Centred(), nn.Linear(8, 10)))

    data = TensorData(torch.rand(20, 64), torch.randint(10, (20,)))
    with pytest.raises(InvalidInputError, match="each record by itself"):
        reduce_task(with_model(make), data)


def test_what_cannot_be_split_is_trained_whole():
    data = TensorData(torch.rand(20, 64), torch.randint(10, (20,)))
    task = with_model(Late)
    assert reduce_task(task, data)[0] is task.model
    whole = TensorData(torch.randint(5, (20, 64)), torch.randint(10, (20,)))
    task = with_model(lambda: nn.Linear(64, 10))
    assert reduce_task(task, whole)[0] is task.model


def plan_of(task):
    spec = StudySpec(
        name="s",
        task="digits-mlp",
        budget={"name": "b", "epsilon": 4.0, "delta": 1e-5},
        arms=[{"name": "a", "strategy": "dog"}],
        epochs=1,
        expected_batch_size=64,
    )
    context = dataclasses.replace(spec.planning_context(), task=task)
    return plan_arm(make_strategy("dog", arm="a", options={}), context, epsilon=4.0)


def rehearsed(task):
    strategy = make_strategy("dog", arm="a", options={})
    compute = Compute(device="cpu")
    return rehearse(plan_of(task), task, strategy, space=SearchSpace({}), compute=compute)


@pytest.mark.parametrize("trainable", ["head", "lora:3"])
def test_a_rehearsal_saves_and_loads_what_it_trained(weights, trainable):
    assert rehearsed(tuned(weights, trainable)) > 0.0


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.down = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )

    def forward(self, x):
        h = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (h + self.down(x)).relu()


class ResNet(nn.Module):
    """A residual network as torchvision has it, in its training mode."""

    def __init__(self, classes=10, *, flips=False):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4)
        self.layer1, self.layer2 = Block(4, 4, 1), Block(4, 8, 2)
        self.fc, self.flips = nn.Linear(8, classes), flips

    def forward(self, x):
        if self.flips:
            self.train()
        h = self.layer2(self.layer1(self.bn1(self.conv1(x.view(-1, 1, 8, 8))).relu()))
        return self.fc(h.mean(dim=(2, 3)))


@pytest.fixture(scope="module")
def resnet(tmp_path_factory):
    """Weights of a network whose running statistics are those of other pictures, and of other classes."""
    torch.manual_seed(5)
    model = ResNet(classes=7)
    with torch.no_grad():
        for _ in range(20):
            model(3.0 * torch.rand(32, 64) - 1.0)
    path = tmp_path_factory.mktemp("weights") / "resnet.pt"
    torch.save(model.state_dict(), path)
    return path


def of_resnet(resnet, trainable, model=ResNet):
    task = dataclasses.replace(get_task("digits-mlp"), model=model)
    return fine_tuned(task, pretrained=str(resnet), trainable=trainable)


def buffers_of(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_a_frozen_batchnorm_is_an_affine_map_and_stays_one(resnet):
    """Its head gets the weights that it gets on features of a network in evaluation mode."""
    task = of_resnet(resnet, "head")
    torch.manual_seed(0)
    data = TensorData(torch.rand(120, 64), torch.randint(10, (120,)))
    options = {
        "loss": task.loss,
        "candidates": [{"learning_rate": 0.5, "max_grad_norm": 1.0}],
        "secrets": [bytes(32)],
        "device": "cpu",
    }
    body = task.model()
    saved = torch.load(resnet)
    assert all(torch.equal(b, saved[name]) for name, b in body.named_buffers())
    body.eval().fc = nn.Identity()
    with torch.no_grad():
        features = TensorData(body(data.x), data.y)
    made = []

    def model():
        made.append(task.model())
        return made[-1]

    schedule = Schedule(120, 0.3, 10)
    whole = train(FixedDPSGD(1.0), schedule, model=model, data=data, **options)
    head = train(FixedDPSGD(1.0), schedule, model=lambda: task.model().fc, data=features, **options)
    torch.testing.assert_close(whole.params, head.params, rtol=1e-4, atol=1e-5)
    for each in made:
        assert all(torch.equal(b, saved[name]) for name, b in each.named_buffers())
        assert not any(part.training for part in each.modules() if isinstance(part, nn.BatchNorm2d))


@pytest.mark.parametrize("trainable", ["biases", "lora:2", "all"])
def test_weights_of_a_batchnorm_train_by_fixed_statistics(resnet, trainable):
    """Against records one by one; of a network that is trained whole, evaluation mode is the user's word."""
    make = of_resnet(resnet, trainable).model
    model = make()
    if trainable == "all":
        with pytest.raises(InvalidInputError, match="must treat each record by itself"):
            choose_kernel(model, LossOfOutputs(nn.CrossEntropyLoss(reduction="none")), DIGITS, CPU)
        model.eval()
    before = buffers_of(model)
    loss = LossOfOutputs(nn.CrossEntropyLoss(reduction="none"))
    kernel = choose_kernel(model, loss, DIGITS, CPU)
    assert isinstance(kernel, BatchedKernel)
    params = flatten_params(model)
    found = summed(kernel, params[None], rows_of(DIGITS.x[None], DIGITS.y[None]), Flat(0.5))[0]
    own = per_sample_gradients(model, params, DIGITS.x, DIGITS.y, loss.loss)
    expected = ((0.5 / own.norm(dim=1)).clamp(max=1.0).unsqueeze(1) * own).sum(dim=0)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    for each in (model, kernel.module):
        assert all(torch.equal(b, before[name]) for name, b in each.named_buffers())


def picture_net(shape, classes):
    return ResNet(classes)


@pytest.mark.parametrize("trainable", ["head", "lora:2"])
def test_pictures_train_a_part_of_a_network_from_a_file(resnet, tmp_path, trainable):
    import privtune

    generator = np.random.default_rng(0)
    pictures = generator.integers(256, size=(90, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "pictures.npz", x=pictures, y=generator.integers(3, size=90))
    task = {
        "type": "images",
        "path": str(tmp_path / "pictures.npz"),
        "classes": [0, 1, 2],
        "shape": [1, 8, 8],
        "model": "tests.tasks.test_fine_tuning:picture_net",
        "train": 60,
        "validation": 15,
        "test": 15,
    }
    tuning = {"type": "fine-tuning", "task": task, "pretrained": str(resnet)}
    study = privtune.create_study(
        "pictures",
        budget=privtune.Budget(4.0, 1e-3, name="pictures"),
        task={**tuning, "trainable": trainable},
        arms=[{"name": "a", "strategy": "dog"}],
        epochs=1,
        expected_batch_size=15,
        storage=f"sqlite:///{tmp_path}/study.db",
    )
    (release,) = study.run()
    trained = {name.partition(".")[0] for name in release.shapes}
    assert trained == {"fc"} | ({"conv1", "layer1", "layer2"} if trainable == "lora:2" else set())
    assert study.spec.task_name == f"{task['path']}, {trainable}"
    assert hashlib.sha256(resnet.read_bytes()).hexdigest() in json.dumps(study.certificate())
    study.close()


def test_a_batchnorm_that_goes_back_to_training_mode_is_refused(resnet):
    task = of_resnet(resnet, "head", lambda: ResNet(flips=True))
    loss = LossOfOutputs(task.loss)
    with pytest.raises(InvalidInputError, match="must not change its buffers in a pass"):
        choose_kernel(task.model(), loss, DIGITS, CPU)


def test_adapters_of_convolutions_and_of_gpt2_start_as_the_public_model(resnet):
    plain, adapted = of_resnet(resnet, "head").model(), of_resnet(resnet, "lora:3").model()
    adapted.fc.load_state_dict(plain.fc.state_dict())
    torch.testing.assert_close(adapted(DIGITS.x), plain(DIGITS.x))
    assert adapted.layer2.conv1.down.weight.shape == (3, 4, 3, 3)
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=9, n_positions=5, n_embd=8, n_layer=1, n_head=2)
    torch.manual_seed(0)
    body = transformers.GPT2LMHeadModel(config).eval()
    x = torch.randint(9, (4, 5))
    before = body(x).logits
    named = set_trainable(body, "lora", rank=2, targets=["c_attn"])
    torch.testing.assert_close(named(x).logits, before)
    trained = {n: tuple(p.shape) for n, p in named.named_parameters() if p.requires_grad}
    place = "transformer.h.0.attn.c_attn"  # of a tied head, the table stays frozen
    assert trained == {f"{place}.down.weight": (2, 8), f"{place}.up.weight": (24, 2)}


def test_attention_whose_weights_are_read_by_itself_has_no_adapter():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model = set_trainable(nn.Sequential(layer, nn.Linear(4, 3)), "lora", rank=2)
    assert model(torch.rand(2, 5, 4)).shape == (2, 5, 3)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert {n.split(".")[1] for n in trained if n.startswith("0")} == {"linear1", "linear2"}


class Idle(nn.Module):
    """An adapter that nothing listens to."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(64, 10).requires_grad_(False)
        self.up = nn.Linear(64, 10)

    def forward(self, x):
        return self.base(x) + 0.0 * self.up(x)


def test_an_adapter_that_does_nothing_is_refused_before_anything_is_charged():
    def idle():
        torch.manual_seed(1)
        return Idle()

    task = dataclasses.replace(get_task("digits-mlp"), model=idle)
    with pytest.raises(NothingTrainedError, match="does not reach its loss"):
        rehearsed(task)


def test_a_model_that_is_another_when_loaded_is_refused():
    calls = []

    def drifting():
        calls.append(0)
        torch.manual_seed(len(calls))
        return frozen_but_last(nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 10)))

    task = dataclasses.replace(get_task("digits-mlp"), model=drifting)
    with pytest.raises(PrivTuneError, match="another model than the one that was trained"):
        rehearsed(task)


def test_trials_are_scored_by_the_model_that_was_trained(weights):
    """On features of the validation records, as on these themselves."""
    task = dataclasses.replace(tuned(weights, "head"), public_validation=True)
    torch.manual_seed(0)
    data = task.load()
    schedule = Schedule(len(data.train), 0.1, 5)
    from privtune.strategies.score_plan import Scoring

    score = Scoring().plan(
        records=len(data.validation), public=True, epsilon=1.0, delta=1e-5, adjacency="add-remove"
    )
    (result,) = train_trials(
        TrialWork(
            training=TrainingPlan(schedule, FixedDPSGD(1.0)),
            task=task,
            data=data,
            records=data.train,
            score=score,
        ),
        trials={0: {"learning_rate": 1.0, "max_grad_norm": 1.0, "schedule": "linear"}},
        secrets={0: bytes(32)},
    )
    from privtune.execution.trial_training import accuracy, model_of

    assert result.score == pytest.approx(accuracy(model_of(task, result.weights), data.validation))


def test_statement_certificate_and_tracker_name_the_public_weights(weights, tmp_path):
    import privtune
    from privtune.views.record import arm_record, budget_view
    from privtune.views.report import render_study

    study = privtune.create_study(
        "tuned",
        budget=privtune.Budget(4.0, 1e-5, name="digits"),
        task={
            "type": "fine-tuning",
            "task": "digits-mlp",
            "pretrained": str(weights),
            "trainable": "head",
        },
        arms=[{"name": "a", "strategy": "dog"}],
        epochs=1,
        expected_batch_size=256,
        seed=1,
        storage=f"sqlite:///{tmp_path}/study.db",
    )
    (release,) = study.run()
    assert len(release.weights) == SIZES["head"]
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    view = budget_view(study)
    assert digest in json.dumps(view.certificate)
    assert (
        digest in arm_record(study, study.plans[0], release, view=view).tags["privtune.pretrained"]
    )
    page = render_study(study)
    assert f"Training started from public weights: digits.safetensors, SHA-256 {digest}" in page
    assert "assumed public" in page
    study.close()


def test_candidates_that_train_other_parts_go_through_one_round(weights):
    """Each gets what it would get alone; those of one part share a stack."""
    task = dataclasses.replace(tuned(weights, "all"), public_validation=True)
    data = task.load()
    parts = ["head", "lora:3", "head", "biases"]
    options = {
        "data": data,
        "records": data.train,
        "score": None,
    }
    secrets = {n: bytes([n] * 32) for n in range(4)}
    training = TrainingPlan(Schedule(len(data.train), 0.1, 4), FixedDPSGD(1.0))
    trials = {
        n: {"learning_rate": 1.0, "max_grad_norm": 1.0, "trainable": part}
        for n, part in enumerate(parts)
    }
    results = train_trials(
        TrialWork(training=training, task=task, **options), trials=trials, secrets=secrets
    )
    assert [r.index for r in results] == [0, 1, 2, 3]
    assert [len(r.weights) for r in results] == [SIZES[part] for part in parts]
    for n, part in enumerate(parts):
        plain = {k: v for k, v in trials[n].items() if k != "trainable"}
        (alone,) = train_trials(
            TrialWork(training=training, task=tuned(weights, part), **options),
            trials={n: plain},
            secrets=secrets,
        )
        torch.testing.assert_close(results[n].weights, alone.weights, rtol=1e-4, atol=1e-5)


def searching(weights, parts, **changes):
    space = {"learning_rate": {"type": "float", "low": 0.1, "high": 1.0}}
    if parts is not None:
        space["trainable"] = {"type": "categorical", "choices": parts}
    arms = [
        {
            "name": "selection",
            "strategy": "papernot-steinke",
            "law": "poisson",
            "mean_runs": 4,
            "parameters": {"max_grad_norm": 1.0},
        },
        {
            "name": "adapters",
            "strategy": "fixed",
            "parameters": {"learning_rate": 0.5, "max_grad_norm": 1.0, "trainable": "lora:2"},
        },
    ]
    return {
        "task": {"type": "fine-tuning", "task": "digits-mlp", "pretrained": str(weights)},
        "space": space,
        "arms": arms,
        "epochs": 1,
        "expected_batch_size": 128,
        **changes,
    }


def test_a_selection_over_parts_costs_what_it_costs_without(weights, tmp_path):
    import privtune

    def create(name, parts):
        return privtune.create_study(
            name,
            budget=privtune.Budget(4.0, 1e-5, name=name),
            seed=1,
            storage=f"sqlite:///{tmp_path}/{name}.db",
            **searching(weights, parts),
        )

    parts = ["head", "lora:3", "biases"]
    study, without = create("with", parts), create("without", None)
    for one, other in zip(study.plans, without.plans, strict=True):
        assert one.event == other.event
    assert [p.public_facts["trained part"] for p in study.plans] == [
        "head or lora:3 or biases",
        "lora:2",
    ]
    selection, adapters = study.run()
    assert len(selection.weights) == SIZES[selection.params["trainable"]]
    assert len(adapters.weights) == 2 * 128 + 650
    for release, part in ((selection, selection.params["trainable"]), (adapters, "lora:2")):
        model = tuned(weights, part).model()
        named = {n: list(p.shape) for n, p in model.named_parameters() if p.requires_grad}
        assert dict(release.shapes) == named
