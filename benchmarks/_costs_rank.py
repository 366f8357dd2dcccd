"""One rank of ``costs.py``: a small transformer reads texts of unequal length, which several rules divide in turns."""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _alternating import forget_training, in_turns
from _cost_rules import WIDTH, Ints, Rule, log_normal, rules
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence

from hvd_hetero.data.permutation import SharedPermutation
from hvd_hetero.rounds import RoundPlan
from hvd_hetero.testing import pin_to_core, report, slow_down
from torch_hooks import BalancedLoader, LoadBalance

LAYERS, HEADS, WORDS, CLASSES = 2, 4, 1000, 10
GLOBAL_BATCH = 64
TURN, FIRST = 4, 30  # rounds of a turn; those in which speeds and costs are learnt
TICK = "done"  # what rank 0 prints after each cycle

Batch = tuple[torch.Tensor, list[int], torch.Tensor]
"""Words, padded (samples x longest) or packed (all behind one another); the lengths; the classes."""


class Block(torch.nn.Module):
    """A transformer's layer. In a packed batch attention runs by the sample, so nothing is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.to_heads, self.out = (
            torch.nn.LayerNorm(WIDTH),
            torch.nn.Linear(WIDTH, 3 * WIDTH),
            torch.nn.Linear(WIDTH, WIDTH),
        )
        self.dense = torch.nn.Sequential(
            torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(),
            torch.nn.Linear(4 * WIDTH, WIDTH),
        )  # fmt: skip

    def forward(self, x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """Return the states of the next layer."""
        heads = self.to_heads(self.norm(x))
        if x.dim() == 2:
            seen = torch.cat([attention(part[None])[0] for part in heads.split(lengths)])
        else:
            seen = attention(heads, held(lengths)[:, None, None])
        x = x + self.out(seen)
        return x + self.dense(x)


def attention(heads: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return what each place of a sample sees of the others: samples x places x width."""
    query, key, value = heads.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    return functional.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).flatten(-2)


def held(lengths: list[int]) -> torch.Tensor:
    """Return which places of a padded batch hold a word."""
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


class Reader(torch.nn.Module):
    """Reads texts and tells their class."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, words: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """Return a number for each class."""
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x, lengths)
        if words.dim() == 1:
            return self.head(torch.stack([part.mean(0) for part in x.split(lengths)]))
        return self.head((x * held(lengths)[..., None]).sum(1) / torch.tensor(lengths)[:, None])


def collated(samples: list[torch.Tensor], *, padded: bool) -> Batch:
    """Return one batch."""
    words = pad_sequence(samples, batch_first=True) if padded else torch.cat(samples)
    return words, [len(sample) for sample in samples], torch.stack([sample[0] % CLASSES for sample in samples])


class Job:
    """What the ways to divide have in common: the texts, and how a rank trains on its batches."""

    def __init__(
        self, *, padded: bool, global_batch: int = GLOBAL_BATCH, model: Callable[[], torch.nn.Module] = Reader
    ) -> None:
        self.rank, self.ranks, self.global_batch = dist.get_rank(), dist.get_world_size(), global_batch
        self._model = model
        self.lengths = log_normal(40 * global_batch, seed=1)
        generator = torch.Generator().manual_seed(2)
        self.texts = [torch.randint(WORDS, (length,), generator=generator) for length in self.lengths.tolist()]
        self.collate = partial(collated, padded=padded)
        self.balances: dict[str, LoadBalance] = {}
        self._computed_at = 0.0

    def balanced(self, name: str, busy_s: list[float], **options: Any) -> Iterator[None]:
        """Return LB-BSP's rounds without end."""
        balance = self.balances[name] = LoadBalance("lb-bsp", global_batch=self.global_batch)
        loader = BalancedLoader(
            self.texts, balance, shuffle=True, seed=0, drop_last=True, collate_fn=self.collate, **options
        )  # fmt: skip

        def batches() -> Iterator[Batch]:
            for epoch in itertools.count():
                loader.set_epoch(epoch)
                yield from loader

        return self._rounds(batches(), lambda loss, samples: balance.scale(loss), busy_s)

    def ruled(self, rule: Rule, busy_s: list[float]) -> Iterator[None]:
        """Return rounds of the same samples, which a rule divides."""

        def batches() -> Iterator[Batch]:
            for mine in ruled_parts(self.lengths, rule, self.ranks, self.rank):
                yield self.collate([self.texts[sample] for sample in mine])

        def scale(loss: torch.Tensor, samples: int) -> torch.Tensor:
            return loss * (samples * self.ranks / self.global_batch)

        return self._rounds(batches(), scale, busy_s)

    def _rounds(
        self, batches: Iterator[Batch], scale: Callable[[torch.Tensor, int], torch.Tensor], busy_s: list[float]
    ) -> Iterator[None]:
        """Train a model; keep this rank's seconds of work: its data, forward, backward and update."""
        model = DistributedDataParallel(self._model())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        while True:
            began = time.perf_counter()
            words, lengths, classes = next(batches)
            optimizer.zero_grad()
            loss = scale(functional.cross_entropy(model(words, lengths), classes), len(lengths))
            loss.register_hook(self._backward_begins)
            loss.backward()
            updates = time.perf_counter()
            optimizer.step()
            busy_s.append(self._computed_at - began + time.perf_counter() - updates)
            yield

    def _backward_begins(self, gradient: torch.Tensor) -> None:
        # Queued before the reducer's own callback, which waits for the other ranks.
        torch.autograd.Variable._execution_engine.queue_callback(self._note)

    def _note(self) -> None:
        self._computed_at = time.perf_counter()


def ruled_parts(lengths: Ints, rule: Rule, ranks: int, rank: int) -> Iterator[list[int]]:
    """Yield a rank's samples of round after round: of those that a ``BalancedLoader`` with seed 0 takes, too."""
    order, whole = SharedPermutation(len(lengths), shuffle=True, seed=0), RoundPlan.of([GLOBAL_BATCH])
    for epoch in itertools.count():
        order.start(epoch)
        while order.holds(GLOBAL_BATCH):
            samples = order.take(whole, 0).part
            order.finish(())
            yield [int(samples[i]) for i in rule(lengths[samples], ranks)[rank]]


def join_job() -> None:
    """Give this rank a core of its own, and a thread, and make it one of the job."""
    pin_to_core(int(os.environ["RANK"]))  # before there are threads of Gloo's, which inherit it
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def arguments() -> argparse.Namespace:
    """Return what ``costs.py`` gives to each rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", choices=("padded", "packed"), required=True)
    parser.add_argument("--factors", type=float, nargs="+", required=True)
    parser.add_argument("--cycles", type=int, required=True)
    return parser.parse_args()


def compared(schemes: dict[str, Iterator[None]], busy_s: dict[str, list[float]], cycles: int) -> dict[str, Any]:
    """Return the seconds of rounds that take turns, and this rank's of work, after rounds that do not count."""
    for rounds in schemes.values():
        for _ in range(FIRST):  # of all alike, so that all stay at the same samples
            next(rounds)
        forget_training()

    def between() -> None:
        forget_training()
        dist.barrier()

    def tick() -> None:
        if dist.get_rank() == 0:
            print(TICK, flush=True)

    seconds = in_turns(schemes, cycles, TURN, between, tick)
    return {"seconds": seconds, "busy_s": {name: each[-cycles * TURN :] for name, each in busy_s.items()}}


def main() -> None:
    options = arguments()
    padded = options.batches == "padded"
    join_job()
    factor = options.factors[dist.get_rank()]
    busy_s: dict[str, list[float]] = {}
    with slow_down(factor, "quota" if factor > 1 else "auto") as slowness:
        job = Job(padded=padded)
        schemes = {
            "number": job.balanced("number", busy_s.setdefault("number", [])),
            "cost_of": job.balanced("cost_of", busy_s.setdefault("cost_of", []), cost_of=job.lengths),
        }
        for name, rule in rules(padded=padded).items():
            schemes[name] = job.ruled(rule, busy_s.setdefault(name, []))
        figures = compared(schemes, busy_s, options.cycles)
        learnt = list(job.balances["cost_of"]._session.balancer.planner.rule())
        report(figures | {"slowness": slowness.describe(), "learnt": learnt})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
