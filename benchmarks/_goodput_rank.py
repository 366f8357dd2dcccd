"""One rank of `goodput_ranks.py`: time rounds of each size, then train by one scheme after the other."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from dataclasses import dataclass, field

import horovod.torch as hvd
import torch
from goodput_ranks import DATA, LOOK, MOST, SIZES, START, Scheme, loss_of, network, reached, schemes
from gradient_noise_training import square_of_mean, true_variance

from hvd_hetero.policies import BSP, LBBSP, Goodput
from hvd_hetero.testing import report
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance

FIXED_S, SAMPLE_S = 3e-3, 1e-4  # of a micro-batch, and of each sample on the fastest rank
TIMED, SKIPPED = 60, 25  # rounds of each size
POINTS = 10


class Sleeps(torch.nn.Module):
    """A network whose micro-batches take as long as planned, whatever else runs."""

    def __init__(self, speed: float) -> None:
        super().__init__()
        self.trained = network()
        self._speed = speed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores, later."""
        time.sleep(FIXED_S + SAMPLE_S / self._speed * len(x))
        return self.trained(x)


@dataclass
class Course:
    """What one training has gone through, on rank 0."""

    times_s: list[float] = field(default_factory=list)
    """When each round was over."""
    batches: dict[int, int] = field(default_factory=dict)
    looks: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Parameters after some rounds."""

    def reached(self) -> int | None:
        """Return the round after which the target is reached."""
        losses: list[float] = []
        for round in self.looks:
            losses.append(loss_of(self.model_after(round)))
            if reached(losses):
                return round
        return None

    def model_after(self, round: int) -> torch.nn.Module:
        """Return the network as it was after a round."""
        model = network()
        with torch.no_grad():
            for parameter, then in zip(model.parameters(), self.looks[round], strict=True):
                parameter.copy_(then)
        return model

    @property
    def accuracy(self) -> float:
        """The accuracy of the latest look, on data held back."""
        right = self.model_after([*self.looks][-1])(DATA.x_held).argmax(1) == DATA.y_held
        return float(right.float().mean())


def trained(scheme: Scheme, speed: float, seed: int, rate: float, steps: float) -> Course:
    """Train for so many steps of the scheme's first batch."""
    torch.manual_seed(seed)
    model, course = Sleeps(speed), Course()
    batch = Goodput(start=START, least=SIZES[0], most=MOST) if scheme.batch is None else scheme.batch
    balance = LoadBalance(BSP() if scheme.equal else LBBSP(), global_batch=batch)
    balance.on_round(lambda record: course.batches.__setitem__(record["round"], sum(record["samples"])))
    loader = BalancedLoader(range(len(DATA.x)), balance, shuffle=True, seed=seed, drop_last=True)
    inner = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    optimizer = DistributedOptimizer(inner, balance, model.named_parameters())
    course.times_s.append(time.perf_counter())
    while balance.progress < steps:
        for index in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(DATA.x[index]), DATA.y[index]).backward()
            optimizer.step()
            course.times_s.append(time.perf_counter())
            batch = next(reversed(course.batches.values()), START)
            if hvd.rank() == 0 and balance.rounds % max(LOOK // batch, 1) == 0:
                course.looks[balance.rounds] = [p.detach().clone() for p in model.trained.parameters()]
            if balance.progress >= steps:
                break
    balance.close()
    return course


def chosen(course: Course, until: int) -> list[tuple[int, float]]:
    """Return the batch, and φ of all samples, at some points of the way to the target."""
    looked = [round for round in course.looks if round <= until and round in course.batches]
    points = [looked[len(looked) * (2 * k + 1) // (2 * POINTS)] for k in range(POINTS)]
    found = []
    for round in points:
        model = course.model_after(round)
        scale = true_variance(model, DATA.x, DATA.y) / square_of_mean(model, DATA.x, DATA.y)
        found.append((course.batches[round], scale))
    return found


def seconds_of_a_round(batch: int, speed: float) -> float:
    """Return the median of rounds of this size by LB-BSP, once it knows the ranks."""
    times_s = trained(Scheme("", batch), speed, 0, 0.0, TIMED).times_s
    return statistics.median(after - before for before, after in itertools.pairwise(times_s[SKIPPED:]))


def main() -> None:
    speeds, seeds, tuned = json.loads(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    hvd.init()
    torch.set_num_threads(1)
    speed = speeds[hvd.rank()]
    round_s = {batch: seconds_of_a_round(batch, speed) for batch in SIZES}
    runs = []
    for seed in range(seeds):
        for scheme in schemes():
            rate, steps = tuned[str(scheme.batch or START)]
            course = trained(scheme, speed, seed, rate, 1.5 * steps)
            if hvd.rank():
                continue
            last, until = [*course.looks][-1], course.reached()
            runs.append({
                "scheme": scheme.name,
                "seed": seed,
                "seconds": None if until is None else course.times_s[until] - course.times_s[0],
                "rounds": until,
                "accuracy": course.accuracy,
                "chosen": chosen(course, until or last) if scheme.batch is None else [],
            })  # fmt: skip
            print(scheme.name, flush=True)
    report({"round_s": round_s, "runs": runs})


if __name__ == "__main__":
    main()
