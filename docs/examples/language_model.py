"""A small GPT-2 with random weights, tuned by a private selection on its clipped token loss.

Nothing is downloaded: the model is made from its configuration, the texts by a made-up grammar.
"""

import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

import privtune

VOCABULARY, LENGTH = 24, 12


def walks(seed: int, count: int) -> torch.Tensor:
    """Return texts [count, LENGTH] in which each token has two followers, one of them more often."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(VOCABULARY, (count, 1), generator=generator)
    while text.shape[1] < LENGTH:
        rare = torch.rand(count, 1, generator=generator) < 0.2
        text = torch.cat([text, (3 * text[:, -1:] + 1 + rare.long()) % VOCABULARY], dim=1)
    return text


def build(trial: privtune.Trial) -> privtune.Candidate:
    width = trial.suggest_categorical("width", [32, 64])
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=width, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    rate = trial.suggest_float("learning_rate", 1e-3, 1e-1, log=True)
    return privtune.Candidate(model, torch.optim.AdamW(model.parameters(), rate), max_grad_norm=1.0)


def loss(model: torch.nn.Module, text: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of a text's tokens, [1]; ``text`` is one record, [1, LENGTH]."""
    logits = model(text).logits[:, :-1]
    return cross_entropy(logits.transpose(1, 2), text[:, 1:], reduction="none").mean(dim=1)


def main(storage: str = "sqlite:///privtune.db", epochs: float = 8) -> privtune.Study:
    study = privtune.create_study(
        "gpt2", budget=privtune.Budget(8.0, 1e-4, name="texts"), storage=storage
    )
    task = privtune.make_task(
        build,
        loss=loss,
        score=privtune.Score("loss", bound=4.0),
        data=walks(1, 2000),
        split={"train": 1500, "validation": 500},
    )
    release = study.optimize(
        task,
        strategy=privtune.strategies.PapernotSteinke(mean_runs=3),
        epochs=epochs,
        expected_batch_size=150,
    )
    print(f"{release.params}: {-release.score:.2f} nats a token at {release.guarantee}")
    return study


if __name__ == "__main__":
    main()
