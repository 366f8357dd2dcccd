"""Train a language model on texts of unequal length, on ranks of unequal speed.

    torchrun --nproc-per-node 2 examples/torch_text.py

The texts are made here: in most places, a word is followed by one that depends on it alone. Two arguments of the loader
are for such data. ``weight_of`` says what a batch's mean loss is over, its words, so that each word of all ranks counts
alike. ``cost_of`` says how long each text is; what that costs is learnt, and each rank gets texts that it can read in
time, similar ones together. ``--slow RANK`` slows one rank down, to see the batches follow.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import torch
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence

from torch_hooks import BalancedLoader, LoadBalance

WORDS, PADDING, WIDTH, LONGEST = 40, -100, 32, 200


class Model(torch.nn.Module):
    """A small transformer that guesses the next word; ``seconds`` is what it takes more for each word."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.words, self.places = torch.nn.Embedding(WORDS, WIDTH), torch.nn.Embedding(LONGEST, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.guess = torch.nn.Linear(WIDTH, WORDS)
        self.seconds = seconds

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds * words.numel() if self.training else 0.0)
        length = words.shape[1]
        # Padding stands at the end, where no word looks at it.
        mask = torch.nn.Transformer.generate_square_subsequent_mask(length)
        x = self.words(words) + self.places(torch.arange(length))
        return self.guess(self.layers(x, mask=mask, is_causal=True))


def texts(count: int, seed: int) -> list[torch.Tensor]:
    """Return texts whose lengths scatter widely. In four of five places, word w is followed by 7w + 3."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for length in torch.empty(count).log_normal_(2.8, 0.8, generator=generator).long().clamp(2, LONGEST).tolist():
        words = torch.randint(WORDS, (length + 1,), generator=generator)
        follows = torch.rand(length, generator=generator) < 0.8
        for i in follows.nonzero()[:, 0].tolist():
            words[i + 1] = (7 * words[i] + 3) % WORDS
        made.append(words)
    return made


def padded(batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the words of a batch, and those to guess."""
    words = pad_sequence([text[:-1] for text in batch], batch_first=True)
    return words, pad_sequence([text[1:] for text in batch], batch_first=True, padding_value=PADDING)


def tokens(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return how many words a mean over this batch is of."""
    return (batch[1] != PADDING).sum()


def guessed(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the share of a batch's words that are guessed."""
    words, following = batch
    return {"right": (model(words).argmax(2) == following)[following != PADDING].double().mean()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--slow", type=int, help="a rank that takes 0.1 ms more per word")
    options = parser.parse_args()

    torch.distributed.init_process_group()  # on GPUs: init_process_group("cpu:gloo,cuda:nccl")
    rank = torch.distributed.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    training, test = texts(1500, seed=1), texts(200, seed=2)
    model = DistributedDataParallel(Model(1e-4 if rank == options.slow else 0.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    balance = LoadBalance("lb-bsp", global_batch=64)
    loader = BalancedLoader(
        training, balance, shuffle=True, seed=0, collate_fn=padded,
        weight_of=tokens,
        cost_of=[len(text) for text in training],
    )  # fmt: skip

    for epoch in range(options.epochs):
        model.train()
        for words, following in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(words).flatten(0, 1), following.flatten(), ignore_index=PADDING)
            balance.scale(loss).backward()
            optimizer.step()

        model.eval()
        found = balance.evaluate(test, partial(guessed, model), collate_fn=padded, weight_of=tokens)
        if rank == 0:
            batches = " + ".join(map(str, balance.plan))
            print(f"epoch {epoch + 1}: accuracy {found['right']:.3f}, batches {batches}", flush=True)

    balance.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
