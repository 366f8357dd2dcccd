"""What cannot work is refused by name with what to write instead: one table for each thing that users call."""

from __future__ import annotations

import copy
import re

import pytest

hvd = pytest.importorskip("horovod.torch")
import torch  # noqa: E402 - imported by Horovod if it is there
from jobs_on_threads import DATA, Job, X, Y, linear, told  # noqa: E402
from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler, TensorDataset  # noqa: E402

from hvd_hetero.errors import RoundStateError  # noqa: E402
from hvd_hetero.policies import (  # noqa: E402
    BSP,
    LBBSP,
    ElasticBSP,
    NonBlocking,
    SelfAdaptive,
    StaticAllocation,
)
from hvd_hetero.testing import run_on_threads  # noqa: E402
from torch_hooks import (  # noqa: E402
    BalancedLoader,
    DistributedOptimizer,
    GradScaler,
    LoadBalance,
    SyncBatchNorm,
    average_by_samples,
)

FP16 = hvd.Compression.fp16


@pytest.fixture(scope="module", autouse=True)
def horovod():
    hvd.init()
    yield
    hvd.shutdown()


def balance(policy="bsp", **options):
    return LoadBalance(policy, global_batch=12, **options)


def sgd(model=None):
    return torch.optim.SGD((model or linear()).parameters(), lr=0.1)


class Stream(IterableDataset):
    def __init__(self, samples=9):
        self._samples = samples

    def __iter__(self):
        return iter(range(self._samples))


class SizedStream(Stream):
    def __len__(self):
        return self._samples


@pytest.mark.parametrize(
    ("arguments", "error", "instead"),
    [
        ({}, TypeError, r"global_batch.*global_batch=batch_size \* hvd\.size\(\)"),
        ({"global_batch": 12, "policy": "lbbsp"}, ValueError, "policy 'lbbsp' is not known; did you mean 'lb-bsp'"),
        ({"global_batch": 12, "reducer": "average"}, ValueError, "reducer.* 'average'"),
    ],
)
def test_of_load_balance(arguments, error, instead):
    with pytest.raises(error, match=instead):
        LoadBalance(**{"policy": "bsp"} | arguments)


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (DATA, {"batch_size": 3}, r"BalancedLoader does not take batch_size.*global_batch"),
        (DATA, {"in_order": False}, "BalancedLoader does not take in_order"),
        (DATA, {"balance": "lb-bsp"}, "balance must be a LoadBalance, got 'lb-bsp'"),
        (DATA, {"stream": "whole"}, "stream and rounds_per_epoch are for an IterableDataset.*leave them out"),
        (DATA, {"weight_of": len, "policy": NonBlocking(2)}, "weight_of .*'non-blocking'.*use policy='lb-bsp'"),
        (TensorDataset(X[:0], Y[:0]), {}, "the dataset must hold at least one sample"),
        (TensorDataset(X[:5]), {"drop_last": True}, "drop_last leaves no round at all: an epoch has 5 samples.* 12"),
        ((x for x in X), {}, r"dataset must have __len__ and __getitem__.*generator is neither.*balance.batch\("),
        (Stream(), {}, "stream must be 'whole' or 'shard', got None: .*rounds_per_epoch=…"),
        (SizedStream(), {}, "stream must be 'whole' or 'shard', got None"),
        (Stream(), {"stream": "whole", "rounds_per_epoch": 3}, "rounds_per_epoch is for stream='shard'.*leave it out"),
        (
            Stream(),
            {"stream": "whole", "shuffle": True},
            "shuffle needs.*shuffle inside the stream, with the same seed",
        ),
        (Stream(), {"stream": "whole", "prefetch_factor": 3}, "prefetch_factor"),
        (DATA, {"sampler": DistributedSampler(DATA, 2, 0)}, r"DistributedSampler.*shuffle=True"),
        (DATA, {"sampler": RandomSampler(DATA), "shuffle": True}, "shuffle and sampler"),
        (DATA, {"sampler": [1], "batch_sampler": [[1]]}, "sampler and batch_sampler"),
        (DATA, {"sampler": [[1, 2], [3]]}, r"sampler.* list\b.*batch_sampler"),
        (DATA, {"sampler": ["a"]}, r"sampler.* str$"),
    ],
)
def test_of_a_loader(dataset, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        BalancedLoader(dataset, **{"balance": balance(options.pop("policy", "bsp"))} | options)


def test_of_a_loader_of_an_optimizer_s_own_balance():
    with pytest.raises(ValueError, match=r"BalancedLoader\(dataset, balance\) needs the LoadBalance of the loader"):
        BalancedLoader(DATA, balance().also())


def test_a_stream_may_be_a_chain_whose_length_is_not_known():
    with pytest.raises(TypeError, match="the length of this loader is not known"):
        len(BalancedLoader(Stream() + Stream(), balance(), stream="whole"))


@pytest.mark.parametrize(
    ("samples", "options", "message"),
    [
        (0, {}, r"epoch 0 has 0 samples, fewer than a round needs \(1\)"),
        (5, {"drop_last": True}, r"epoch 0 has 5 samples, fewer than a round needs \(12\).*drop_last"),
    ],
)
def test_of_a_stream_that_is_too_short(samples, options, message):
    with pytest.raises(ValueError, match=message):
        list(BalancedLoader(Stream(samples), balance(), stream="whole", **options))


MODEL = linear()
NAMED = list(MODEL.named_parameters())


def wrapped_twice():
    serves = balance()
    for _ in range(2):
        DistributedOptimizer(sgd(), serves)


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda: DistributedOptimizer(sgd(), balance(), compression="fp16"), "compression must be a type, .*compress"),
        (
            lambda: DistributedOptimizer(sgd(), MODEL.named_parameters()),
            r"balance.*generator.*DistributedOptimizer\(optimizer, balance, named_",
        ),
        (lambda: DistributedOptimizer(sgd(), "lb-bsp"), "balance must be the LoadBalance of this training, got str"),
        (lambda: DistributedOptimizer(MODEL, balance()), "optimizer must be a torch.optim.Optimizer, got Linear"),
        (lambda: DistributedOptimizer(Job().optimizer, balance()), "optimizer is a DistributedOptimizer already"),
        (
            lambda: DistributedOptimizer(hvd.DistributedOptimizer(sgd(MODEL), NAMED), balance()),
            "optimizer is a DistributedOptimizer already, of this package or of Horovod",
        ),
        (
            lambda: DistributedOptimizer(torch.optim.LBFGS(MODEL.parameters()), balance()),
            "LBFGS may evaluate its closure a different number of times.*SGD or Adam",
        ),
        (lambda: Job(model=linear().bfloat16()), "parameter 'weight' is bfloat16.*autocast"),
        (lambda: copy.deepcopy(Job().optimizer), r"a DistributedOptimizer cannot be copied or pickled.*state_dict\(\)"),
        (
            lambda: DistributedOptimizer(sgd(MODEL), balance(), NAMED[:1]),
            "named_parameters must name every parameter.*1 are not named",
        ),
        (
            lambda: DistributedOptimizer(sgd(MODEL), balance(), [NAMED[0], (NAMED[0][0], NAMED[1][1])]),
            "names in named_parameters must be unique, repeated: weight",
        ),
        (
            lambda: DistributedOptimizer(sgd(MODEL), balance(), [p for _, p in NAMED]),
            "named_parameters must be pairs",
        ),
        (wrapped_twice, r"balance is used by another optimizer already; give this one balance\.also\(\)"),
        (lambda: balance().also().also(), r"this LoadBalance was made by also\(\)"),
        (lambda: balance(NonBlocking(4)).also(), r"also\(\) needs .*'non-blocking' does not have; use sync="),
    ],
)
def test_of_an_optimizer(wrap, message):
    with pytest.raises((ValueError, TypeError), match=message):
        wrap()


def begun(**options):
    """A job whose first batch is at hand, and its loss."""
    job = Job(**options)
    x, y = next(iter(job.loader))
    job.optimizer.zero_grad()
    return job, job.loss(x, y)


def stepped_without_a_batch():
    Job().optimizer.step()


def cleared_after_backward():
    job, loss = begun()
    loss.backward()
    try:
        job.optimizer.zero_grad()
    finally:
        job.optimizer.step()


def not_stepped():
    job = Job()
    for x, y in job.loader:
        job.loss(x, y).backward()


def with_two_optimizers(policy, order):
    """The second one's loss goes through the first one's model."""

    def train():
        models, serves = [linear(), linear()], balance(policy)
        optimizers = [DistributedOptimizer(sgd(models[0]), serves), DistributedOptimizer(sgd(models[1]), serves.also())]
        for x, _ in BalancedLoader(DATA, serves):
            for which in order:
                sum(model(x).mean() for model in models[: which + 1]).backward()
                optimizers[which].step()

    return train


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        (
            lambda: list(BalancedLoader(DATA, balance())),
            "the loss of the last batch was not scaled.*wrap the optimizer before the loop",
        ),
        (stepped_without_a_batch, r"step\(\) was called without a batch.*balance.batch\(samples\)"),
        (cleared_after_backward, r"the gradient .* changed between backward\(\) and step"),
        (not_stepped, r"the next batch was asked for before .* Call optimizer.step\(\) once for every"),
        (lambda: balance().batch(-1), "samples must be at least 0, got -1; give the number of samples"),
        (
            with_two_optimizers("bsp", [1, 0]),
            r"step\(\) was called before that of an optimizer whose LoadBalance was made e",
        ),
        (with_two_optimizers("bsp", [0]), "the next batch was asked for before the last one was used"),
    ],
)
def test_of_a_loop(loop, message):
    with pytest.raises((ValueError, RoundStateError), match=message):
        loop()


def scaled_by_pytorchs_own():
    """Without synchronize() before it."""
    job = Job()
    for x, y in job.loader:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scaler.scale(job.loss(x, y)).backward()
        with job.optimizer.skip_synchronize():
            scaler.step(job.optimizer)


def of_another_optimizer():
    GradScaler("cpu", optimizer=Job().optimizer).unscale_(Job().optimizer)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (scaled_by_pytorchs_own, r"torch.amp.GradScaler would look for infinities.*torch_hooks.GradScaler\("),
        (of_another_optimizer, "this scaler was made for another optimizer.*optimizer=optimizer"),
        (
            lambda: GradScaler("cpu", optimizer=Job(ElasticBSP(lookahead=2, updates="local")).optimizer),
            "where gradients stay on their rank.*bfloat16",
        ),
        (lambda: GradScaler("cpu", optimizer=sgd()), "optimizer must be a torch_hooks.DistributedOptimizer, got SGD"),
    ],
)
def test_of_a_scaler(scale, message):
    with pytest.raises((ValueError, TypeError, RoundStateError), match=message):
        scale()


def layer(policy="bsp"):
    return SyncBatchNorm(3, balance=balance(policy), name="norm")


@pytest.mark.parametrize(
    ("normalise", "message"),
    [
        (
            lambda: SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm1d(3)),
            r"balance must be .*got None; write SyncBatchNorm.convert_sync_batchnorm\(model, bal",
        ),
        (lambda: layer()(torch.randn(4)), "input must have at least 2 dimensions"),
        *(
            (lambda policy=policy: layer(policy), f"policy '{policy.name}' does not go with SyncBatchNorm: .*'lb-bsp'")
            for policy in (NonBlocking(2), ElasticBSP(), SelfAdaptive(total=4), LBBSP(may_rest=True))
        ),
    ],
)
def test_of_a_batch_norm(normalise, message):
    with pytest.raises((ValueError, TypeError, RoundStateError), match=message):
        normalise()
    assert layer().eval()(torch.randn(4, 3)).shape == (4, 3), "in evaluation it waits for nobody"


def scales_differ(rank):
    job = Job()
    scaler = GradScaler("cpu", optimizer=job.optimizer)
    scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0 ** (10 + rank)})
    for x, y in job.loader:
        scaler.scale(job.loss(x, y)).backward()
        scaler.step(job.optimizer)
        scaler.update()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (lambda rank: LoadBalance("bsp", global_batch=1), "global_batch must be at least the number of ranks"),
        (
            lambda rank: Job(balance={"sync": "d-psgd"}, wraps={"compression": FP16}),
            "compression and sparse_as_dense are for gradients",
        ),
        (
            lambda rank: GradScaler("cpu", optimizer=Job(balance={"sync": "d-psgd"}).optimizer),
            "where gradients stay on their rank.*bfloat16",
        ),
        (scales_differ, r"round 0: ranks \[1\] have other hyper-parameters"),
        (
            lambda rank: with_two_optimizers(BSP(max_micro_batch=2), [0, 1])(),
            "Optimizers that step in turn need rounds of one micro-batch",
        ),
        (lambda rank: layer(StaticAllocation([0, 1])), "policy 'static' does not go with SyncBatchNorm"),
        (lambda rank: layer()(torch.randn(4, 3)), r"SyncBatchNorm ran in training mode outside of a batch.*\.eval\(\)"),
        (lambda rank: average_by_samples({f"of {rank}": 1.0}, 1), "the ranks average values of different names"),
        (lambda rank: average_by_samples(1.0, 0), "samples is 0 on every rank"),
        (lambda rank: average_by_samples(1.0, -1), "samples must be.* -1"),
    ],
)
def test_of_several_ranks(case, message):
    for said in told(case):
        assert re.search(message, said)


def test_averages_are_by_samples_and_leave_out_the_nan_of_a_rank_without():
    def case(rank):
        means = average_by_samples({"y": torch.tensor(float(rank)), "y2": float(rank)}, samples=rank)
        nothing = torch.full((2,), torch.nan) if rank == 0 else torch.tensor([3.0, 5.0])
        return (
            [type(each).__name__ for each in means.values()],
            [*map(float, means.values())],
            list(average_by_samples(nothing, 7 * (rank == 1)).tolist()),
        )

    for kinds, means, nothing in run_on_threads(case, 3):
        assert kinds == ["Tensor", "float"]
        assert means == pytest.approx([5 / 3] * 2)
        assert nothing == [3.0, 5.0]
