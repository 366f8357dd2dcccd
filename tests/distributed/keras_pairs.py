"""A training of every pair of Keras's options on two ranks, against one process that is given the same samples.

    python tests/distributed/keras_pairs.py --seed 1 --cases 40           # random cases of all options at once
    python tests/distributed/keras_pairs.py --pairs                       # those of the test

A case is exact, or refused by an error that names both options (``docs/combinations.md``). Ranks
(``workers/keras_pairs.py``) take one case after the other; a job whose case hangs is ended, and another one begun.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2])]

from pool import Pool

from hvd_hetero.testing import LaunchError, launch
from tests.support.covering import covering

WORKER = "keras_pairs.py"
REFUSED_SHARE = 0.005  # of the random cases with options that are refused together: they are 26 times as many as others

OPTIONS: dict[str, list[Any]] = {
    "policy": ["bsp", "shifting", "static", "self-adaptive", "non-blocking"],
    "sync": [None, "d-psgd"],
    "local_layers": [False, True],
    "loop": ["fit", "custom"],
    "max_micro_batch": [None, 2, "of each rank"],
    "global_batch": ["constant", "adapts"],
    "data": ["arrays", "stream", "shard"],
    "prefetch": [None, 2],
    "cost_of": [None, "costs", "limited"],
    "loss": ["mean", "sum", "weighted", "own"],
    "weight_of": [False, True],
    "weights": [None, "sample", "class"],
    "masks": [None, "alike", "apart"],
    "outputs": [1, 2],
    "norm": [None, "batch", "sync"],
    "optimizer": ["sgd", "adamw", "two"],
    "clips": [None, "global_clipnorm", "clipvalue"],
    "schedule": [False, True],
    "accumulates": [None, 2],
    "ema": [False, True],
    "scaler": [False, True],
    "eager": [False, True],
    "validation": [None, "cut by rank", "shared"],
    "fits": [1, 2],
    "steps_per_execution": [1, 2],
    "jit_compile": [False, True],
}


# What a loop of one's own has not.
OF_FIT: dict[str, list[Any]] = {
    "loss": ["sum"], "weights": ["class"], "validation": ["cut by rank", "shared"], "fits": [2],
    "steps_per_execution": [2], "jit_compile": [True], "optimizer": ["two"],
}  # fmt: skip


class Refusal(NamedTuple):
    """Options that do not go together. ``this``, ``other``: their names in the page, and in the message."""

    options: dict[str, Any]
    this: str
    other: str
    remedy: str
    word: str = ""  # of the message, where that has not the name of ``other``

    @property
    def line(self) -> str:
        """The line of the page."""
        return f"| {self.this} | {self.other} | {self.remedy} |"

    def is_named(self, message: str) -> bool:
        names = [name.strip("`").replace('"', "'").partition("(")[0] for name in (self.this, self.word or self.other)]
        return all(name in message for name in names)


REFUSED = [
    Refusal({"steps_per_execution": 2}, "`steps_per_execution`", "any policy", "leave it at 1", "plan"),
    Refusal({"jit_compile": True}, "`jit_compile=True`", "any policy", "leave it out", "Horovod"),
    Refusal({"optimizer": "two"}, "`several optimizers`", "any policy", "use one, or `torch_hooks`", "LoadBalance"),
    Refusal(
        {"norm": "sync"}, "`BatchNormalization(synchronized=True)`", "any policy", "use `GroupNormalization`",
        "synchronized=True",
    ),
    *(
        Refusal({"policy": policy, name: value}, f'`"{policy}"`', other, 'use `"lb-bsp"` or `"bsp"`')
        for policy in ("self-adaptive", "non-blocking")
        for name, value, other in (
            ("cost_of", "costs", "`cost_of`"), ("cost_of", "limited", "`cost_of`"),
            ("global_batch", "adapts", "`Goodput(…)`"),
        )
    ),
    Refusal({"policy": "non-blocking", "prefetch": 2}, '`"non-blocking"`', "`prefetch`", "leave it out"),
    Refusal({"global_batch": "adapts", "prefetch": 2}, "`Goodput(…)`", "`prefetch`", "leave it out"),
    *(
        Refusal({"global_batch": "adapts", name: value}, "`Goodput(…)`", other, remedy, word)
        for name, value, other, word, remedy in (
            ("schedule", True, "`LearningRateSchedule`", "schedule", "change the rate by `balance.progress`"),
            ("scaler", True, "`LossScaleOptimizer`", "", "train in `mixed_bfloat16`"),
            ("accumulates", 2, "`gradient_accumulation_steps`", "", "raise `most`"),
        )
    ),
    *(
        Refusal(
            {"data": data, "prefetch": 2}, "`prefetch`", "a stream", "put what is slow into a `map` of the dataset",
            "dataset",
        )
        for data in ("stream", "shard")
    ),
    *(
        Refusal(
            {"masks": "apart", "loss": loss}, "`several losses`", "masks that differ",
            '`reduction="sum"`, or `weight_of`', "masks",
        )
        for loss in ("mean", "weighted")
    ),
    Refusal({"sync": "d-psgd", "global_batch": "adapts"}, '`sync="d-psgd"`', "`Goodput(…)`", 'use `sync="allreduce"`'),
    Refusal(
        {"sync": "d-psgd", "local_layers": True}, "`local_layers`", '`sync="d-psgd"`', 'use `sync="allreduce"`', "sync",
    ),
    Refusal(
        {"local_layers": True, "clips": "global_clipnorm"}, "`local_layers`", "`global_clipnorm`", "use `clipvalue`",
    ),
    Refusal(
        {"local_layers": True, "scaler": True}, "`local_layers`", "`LossScaleOptimizer`", "train in `mixed_bfloat16`",
    ),
    *(
        Refusal({"loop": "custom"} | options, this, "a custom loop", "use `fit`", word)
        for options, this, word in (
            ({"policy": "non-blocking"}, '`"non-blocking"`', "model.fit"),
            ({"sync": "d-psgd"}, '`sync="d-psgd"`', "model.fit"),
            ({"cost_of": "limited"}, "`max_micro_batch_cost`", "custom loop"),
            ({"local_layers": True}, "`local_layers`", "model.fit"),
        )
    ),
    *(
        Refusal({name: value, "cost_of": costs}, this, "`cost_of`", remedy)
        for name, value, this, remedy in (
            ("data", "shard", '`stream="shard"`', 'use `stream="whole"`'),
            ("max_micro_batch", 2, "`max_micro_batch`", "use `max_micro_batch_cost`"),
            ("max_micro_batch", "of each rank", "`max_micro_batch`", "use `max_micro_batch_cost`"),
        )
        for costs in ("costs", "limited")
    ),
]  # fmt: skip


def refusals_of(case: dict[str, Any]) -> list[Refusal]:
    """Return all that a case, or a part of one, may be refused for."""
    return [r for r in REFUSED if all(name in case and case[name] == v for name, v in r.options.items())]


def without_meaning(case: dict[str, Any]) -> bool:
    """Return whether options are together that say the same, or nothing, or that Keras refuses: these are left out."""
    get, loss = case.get, case.get("loss")
    return bool(
        (get("max_micro_batch") and get("policy") in ("self-adaptive", "non-blocking"))
        or (loss == "own" and (get("weight_of") is False or get("weights") or get("masks")))
        or (loss == "sum" and get("weight_of"))
        or (get("local_layers") and (loss == "sum" or get("masks")))  # of which a rank has no mean of its own
        or (get("loop") == "custom" and any(get(name) in values for name, values in OF_FIT.items()))
        or (get("loop") == "custom" and get("weight_of") is False and (loss == "weighted" or get("masks")))
        or (get("weights") == "class" and get("outputs") == 2)
        # Two counts have no one weight.
        or (get("masks") == "apart" and (get("outputs") == 1 or get("weight_of") or get("weights") == "class"))
    )


def judged(case: dict[str, Any], ranks: Pool) -> str:
    """Return the outcome; raise AssertionError if a case is neither exact nor refused as the table says."""
    refusals = refusals_of(case)
    for outcome in ranks.ask(json.dumps(case)):
        if not refusals:
            assert "refused" not in outcome, outcome["refused"].partition("\n")[0]
            assert outcome["once"], "a sample was left out of an epoch, or visited twice"
            compared = outcome["apart"] | {n: apart for n, apart in outcome["figures"].items() if is_exact(n, case)}
            wrong = {name: f"{apart:.1e}" for name, apart in compared.items() if not apart <= 1e-9}
            assert not wrong, f"{wrong} apart"
        else:
            assert "refused" in outcome, "not refused"
            assert any(refusal.is_named(outcome["refused"]) for refusal in refusals), outcome["refused"]
    return "refused" if refusals else "exact"


def is_exact(figure: str, case: dict[str, Any]) -> bool:
    """Return whether a figure is that of one process (``docs/keras.md``)."""
    if case["sync"] or case["local_layers"]:
        return False  # of several models
    plain = case["loss"] == "mean" and not case["masks"]
    if figure == "val_loss":  # Keras joins batches by their samples, and running statistics are each rank's own
        return plain and case["norm"] != "batch" and not case["weights"]
    return plain or not case["eager"]


def cases() -> list[dict[str, Any]]:
    """Return few cases with all pairs that go together, and one for each refusal."""
    found = covering(OPTIONS, 2, lambda case: refusals_of(case) or without_meaning(case), seed=7)
    plain = {name: values[0] for name, values in OPTIONS.items()}
    return found + [plain | {"outputs": 1 + ("masks" in refusal.options)} | refusal.options for refusal in REFUSED]


def launched(worker: str, ranks: int, args: Sequence[object], *, env: dict[str, str], timeout_s: float) -> Any:
    here = Path(__file__).parent
    env = {"PYTHONPATH": str(here), "TF_USE_LEGACY_KERAS": "0", "TF_CPP_MIN_LOG_LEVEL": "2", **env}
    return launch(str(here / "workers" / worker), ranks, args, timeout_s, env)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--pairs", action="store_true", help="all pairs, in place of random cases")
    options = parser.parse_args()
    dice, chosen = random.Random(options.seed), cases() if options.pairs else []
    while not options.pairs and len(chosen) < options.cases:
        case = {name: dice.choice(values) for name, values in OPTIONS.items()}
        if not without_meaning(case) and (not refusals_of(case) or dice.random() < REFUSED_SHARE):
            chosen.append(case)
    counts: Counter[str] = Counter()
    with Pool(launched, WORKER, 2, ()) as ranks:
        for number, case in enumerate(chosen):
            try:
                found = judged(case, ranks)
            except (AssertionError, LaunchError) as error:
                found = "wrong" if isinstance(error, AssertionError) else "hung or died"
                print(f"{number}: {error}\n    {case}", flush=True)
            counts[found] += 1
    print(f"{len(chosen)} cases: {', '.join(f'{count} {name}' for name, count in counts.items())}")
    return 1 if counts["wrong"] or counts["hung or died"] else 0


if __name__ == "__main__":
    sys.exit(main())
