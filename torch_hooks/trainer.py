r"""transformers' ``Trainer`` with unequal batches.

    from torch_hooks.trainer import BalancedTrainer as Trainer      # the one line that changes

The global batch is what it was, ``per_device_train_batch_size`` times accumulation steps times ranks. Accumulation
steps become micro-batches of a round, so a step of the Trainer is a round.

**The weight.** A Trainer whose model takes ``num_items_in_batch`` divides the sum s_ij over the tokens of rank i's
micro-batch j by T, the tokens of all ranks and micro-batches, and multiplies by the number of ranks. Their mean is

    (1 / n) sum_ij n s_ij / T = (1 / T) sum_ij s_ij,

whatever the split: such a loss is only timed. Others are means over samples, which ``LoadBalance.scale`` weighs. Some
models take the number and ignore it, which shows if it is doubled in a first batch.

**Memory.** ``per_device_train_batch_size`` bounds the micro-batches of every rank, as it does without this package,
but for those that ``max_micro_batch`` of the policy names. Beside DDP, what runs out of memory in its forward pass is
done again in parts (``docs/memory.md``).

**The costs** of samples come from ``cost_of``, or are the lengths by which the Trainer itself would arrange samples:
"group_by_length" of ``train_sampling_strategy`` keeps its order, "batch_rebalance" takes a random one.

**Evaluation.** ``evaluate`` and ``predict`` divide their dataset by the speeds of the ranks; the figures are the same
bits on all of them, so early stopping and the best checkpoint are decided alike.

**Resuming.** All rounds hold as many samples, so the number of steps says which are done. Of a stream, the checkpoint
holds the loader's state, in a file of its own.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Iterator
from functools import reduce
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset, RandomSampler
from transformers import EvalPrediction, Trainer, TrainerCallback
from transformers.trainer_pt_utils import find_batch_size, nested_concat
from transformers.trainer_utils import EvalLoopOutput, denumpify_detensorize, has_length

from hvd_hetero.bounds import NO_BOUND, Said
from hvd_hetero.session import balancer_of
from torch_hooks.evaluation import EvaluationLoader
from torch_hooks.load_balance import LoadBalance
from torch_hooks.loader import BalancedLoader

_NO_BATCH = object()
_STREAM = "stream.pt"  # in a checkpoint

logger = logging.getLogger(__name__)


class Balanced:
    """A mixin for a ``Trainer`` and its subclasses: ``class MyTrainer(Balanced, SFTTrainer)``.

    ``balance``: the ``LoadBalance`` of this training, whose ``global_batch`` is then decisive; None: LB-BSP.
    ``stream``: as in ``BalancedLoader``, for an ``IterableDataset``, which needs ``max_steps``.
    ``cost_of``: as in ``BalancedLoader``; None: the lengths by which ``train_sampling_strategy`` arranges samples, if
    any. ``max_micro_batch_cost``: as in ``BalancedLoader``; None: ``per_device_train_batch_size`` of the longest
    samples. For trainers whose loss comes from ``Trainer.compute_loss``.
    """

    def __init__(
        self, *args: Any, balance: LoadBalance | None = None, cost_of: Any = None, max_micro_batch_cost: Said = None,
        stream: Literal["whole", "shard"] = "whole", **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **options)
        trainer: Any = self
        self.balance: Any = balance
        self._cost_of, self._max_micro_batch_cost = cost_of, max_micro_batch_cost
        self._stream = stream if isinstance(trainer.train_dataset, IterableDataset) else None
        self._loader: BalancedLoader | None = None
        self._normalised: bool | None = None
        self._losses: list[tuple[Any, int]] = []
        if balance is None and trainer.args.world_size == 1:
            return  # one process trains as with the Trainer underneath
        if not hasattr(Trainer, "loss_is_scaled_for_ga"):
            raise ImportError("this Trainer divides losses by itself; install transformers 5.24 or newer")
        if trainer.args.world_size > 1 and not trainer.args.average_tokens_across_devices:
            raise ValueError(
                "average_tokens_across_devices must be True, since ranks hold unequal numbers of tokens; leave it out"
            )
        if trainer.args.auto_find_batch_size:
            raise ValueError("auto_find_batch_size would change the global batch; leave it out, and set the size")
        if balance is None:
            balance = LoadBalance(global_batch=trainer.get_total_train_batch_size(trainer.args))
        if balancer_of(balance).planner.goodput is not None:
            raise ValueError(
                "global_batch=Goodput(…) changes the steps of an epoch, whose number a Trainer fixes when it begins; "
                "give a global_batch that stays"
            )
        self.balance = balance
        self.loss_is_scaled_for_ga = True  # the Trainer shall not divide by the accumulation steps
        trainer.add_callback(_Place(trainer))

    def _bounded(self, cost_of: Any) -> Any:
        """Bound micro-batches by ``per_device_train_batch_size``; return the bound by cost, if samples have one."""
        args: Any = self.args  # type: ignore[attr-defined]
        balancer, allowed = balancer_of(self.balance), args.per_device_train_batch_size
        if cost_of is not None:
            most = self._max_micro_batch_cost
            if most is None and not callable(cost_of):
                most = allowed * float(np.max(cost_of))
            elif most is None:
                logger.warning(
                    "per_device_train_batch_size=%d bounds no batch, since the longest sample is not known before all "
                    "are read; give max_micro_batch_cost, that many samples times the greatest cost_of", allowed,
                )  # fmt: skip
            return most
        bounds = balancer.planner.room.user_bounds
        balancer.bound(np.where(bounds < NO_BOUND, bounds, allowed))
        room = args.gradient_accumulation_steps * int(balancer.planner.room.user_bounds.sum())
        if room == balancer.planner.global_batch and balancer.workers > 1 and not balancer.rank:
            logger.warning(
                "per_device_train_batch_size=%d bounds every rank, so all shares stay equal; allow faster ranks more: "
                "balance=LoadBalance(LBBSP(max_micro_batch={device: samples}), global_batch=%d)", allowed, room,
            )  # fmt: skip
        return None

    def get_train_dataloader(self) -> Any:
        """Return the loader, which reads what the Trainer's own would read."""
        trainer: Any = self
        args, stock = trainer.args, super().get_train_dataloader()  # type: ignore[misc]
        if self.balance is None:
            return stock
        if self._loader is None:
            self._skips = not args.ignore_data_skip
            # Of a stream the Trainer's own loader gives each rank a part, and so does one of Hugging Face's in it.
            dataset = stock.dataset if self._stream is None else trainer.train_dataset
            sampler = None if self._stream else trainer._get_train_sampler(dataset)
            cost_of = getattr(sampler, "lengths", None) if self._cost_of is None else self._cost_of
            most = self._bounded(cost_of)
            if args.train_sampling_strategy == "batch_rebalance":  # a sampler of this rank's part
                sampler = RandomSampler(dataset)
            self._loader = BalancedLoader(
                dataset, self.balance, sampler=sampler, stream=self._stream, cost_of=cost_of, max_micro_batch_cost=most,
                seed=args.seed if args.data_seed is None else args.data_seed, drop_last=args.dataloader_drop_last,
                micro_batches=args.gradient_accumulation_steps, collate_fn=stock.collate_fn,
                num_workers=stock.num_workers, prefetch_factor=stock.prefetch_factor, pin_memory=stock.pin_memory,
                persistent_workers=stock.persistent_workers, worker_init_fn=stock.worker_init_fn,
            )  # fmt: skip
            self._loader._micro_batches.reads_rounds = True
            if (costs := self._loader._cutter.order.costs) is not None:
                costs.exactly = True
        args.ignore_data_skip = True  # `_Place` skips
        return self._loader if self._stream is None else _Epochs(self._loader)

    def _inner_training_loop(self, *args: Any, resume_from_checkpoint: str | None = None, **options: Any) -> Any:
        self._resumes_from = resume_from_checkpoint
        return super()._inner_training_loop(  # type: ignore[misc]
            *args, resume_from_checkpoint=resume_from_checkpoint, **options
        )

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Return the micro-batches of a round, each of which begins when it is taken, and the number of tokens."""
        if self.balance is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc,no-any-return]
        first = next(epoch_iterator, _NO_BATCH)
        if first is _NO_BATCH:
            return [], None
        assert self._loader is not None, "its iterator is here"
        batches = self._loader._micro_batches.round
        with self.balance._session.meter.waiting_for_others():  # ranks sum their tokens
            _, items = super().get_batch_samples(iter(batches), len(batches), device)  # type: ignore[misc]
        self._batches = chain([first], epoch_iterator)  # `first` may be a part of the first one
        return _InTurn(batches, self._batches), items

    def training_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """Do a micro-batch, and return its loss; beside DDP again in parts, if it does not fit in memory."""
        step = super().training_step  # type: ignore[misc]
        if self.balance is None or not isinstance(model, DistributedDataParallel):
            return step(model, inputs, *args, **options)
        shortage, earlier = self.balance._session.shortage, 0.0
        self.balance._session.beside.redone.copies = False  # a set of gradients more may be what does not fit
        while True:
            with self.balance.surviving_out_of_memory():
                return earlier + step(model, inputs, *args, **options)
            if not shortage.failed:
                earlier = earlier + self._counted  # of a part whose gradient is not reduced
            inputs = next(self._batches)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """Return loss, outputs and labels of a batch to evaluate, and note how many samples the loss is a mean over."""
        found = super().prediction_step(model, inputs, *args, **options)  # type: ignore[misc]
        if found[0] is not None:
            self._losses.append((found[0], find_batch_size(inputs)))  # type: ignore[no-untyped-call]
        return found

    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval",
    ) -> Any:  # fmt: skip
        """Evaluate this rank's part by the Trainer's own loop, and return what all ranks found, in the data's order.

        What the Trainer gathers in each step travels once, at the end. The loss is the mean over samples.
        """
        trainer: Any = self
        args, compute_metrics, accelerator = trainer.args, trainer.compute_metrics, trainer.accelerator
        evaluate, options = super().evaluation_loop, (prediction_loss_only, ignore_keys, metric_key_prefix)  # type: ignore[misc]
        divides = self.balance is not None and args.world_size > 1 and has_length(dataloader.dataset)
        if not divides or args.batch_eval_metrics:  # which computes metrics in each step, over all ranks
            return evaluate(dataloader, description, *options)
        session, pad = self.balance._session, accelerator.pad_across_processes
        inputs: list[Any] = []
        loader = EvaluationLoader(
            dataloader.dataset, self.balance, args.per_device_eval_batch_size, collate_fn=dataloader.collate_fn,
            num_workers=dataloader.num_workers, pin_memory=dataloader.pin_memory,
        )  # fmt: skip

        def part() -> Any:
            self._losses = []
            output = evaluate(loader, description, *options)
            losses = [(float(loss), size) for loss, size in self._losses]
            return output.predictions, output.label_ids, inputs[0] if inputs else None, losses

        args.average_tokens_across_devices = False  # a sum in each step, which this rank's loss does not need
        trainer.gather_function = accelerator.pad_across_processes = lambda tensor, **_: tensor
        if compute_metrics is not None:
            trainer.compute_metrics = lambda found: inputs.append(found.inputs) or {}  # type: ignore[func-returns-value]
        try:
            parts = loader.on_all_ranks(part)
        finally:
            accelerator.pad_across_processes, trainer.compute_metrics = pad, compute_metrics
            trainer.gather_function = accelerator.gather_for_metrics
            args.average_tokens_across_devices = True
        parts = parts[:1] if loader.repeats else parts
        *columns, losses = zip(*parts, strict=True)
        predictions, labels, seen = (_end_to_end(column, args.eval_do_concat_batches) for column in columns)
        values, sizes = np.array([pair for of_rank in losses for pair in of_rank], dtype=np.float64).reshape(-1, 2).T
        metrics: dict[str, Any] = {}
        if compute_metrics is not None and predictions is not None and labels is not None:
            each = np.repeat(values, sizes.astype(int)) if "loss" in args.include_for_metrics else None
            metrics = denumpify_detensorize(compute_metrics(EvalPrediction(predictions, labels, seen, each)))  # type: ignore[no-untyped-call]
        if (finite := np.isfinite(values)).any() and args.logging_nan_inf_filter:
            values, sizes = values[finite], sizes[finite]
        if len(values):
            metrics["loss"] = float((values * sizes).sum() / sizes.sum())
        # Rank 0's, since other processors may round otherwise, and ranks must stop early together.
        metrics = session.wire.broadcast_object(metrics, root_rank=0, name=f"{session.prefix}.metrics")
        begins = f"{metric_key_prefix}_"
        metrics = {key if key.startswith(begins) else begins + key: value for key, value in metrics.items()}
        return EvalLoopOutput(predictions, labels, metrics, len(dataloader.dataset))

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **more: Any
    ) -> Any:
        """Return the loss; in training, as it counts in the mean over the ranks."""
        compute, trains = super().compute_loss, model.training and self.balance is not None  # type: ignore[misc]
        if trains and num_items_in_batch is not None and not self._is_normalised(model, inputs, num_items_in_batch):
            num_items_in_batch = None
        loss, outputs = compute(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch, **more)
        if trains:
            loss = self.balance.scale(loss, normalised=num_items_in_batch is not None)
            self._counted = loss.detach()
        return (loss, outputs) if return_outputs else loss

    def _is_normalised(self, model: Any, inputs: Any, items: Any) -> bool:
        """Return whether a loss is divided by the number of tokens that it is given: alike on all ranks."""
        if self._normalised is None:
            compute = super().compute_loss  # type: ignore[misc]
            # No dropout, which would differ between the two losses, and no running statistics.
            model.eval()
            with torch.no_grad():
                once, half = (float(compute(model, dict(inputs), num_items_in_batch=n)) for n in (items, 2 * items))
            model.train()
            session = self.balance._session
            both = torch.tensor([once, half], dtype=torch.float64, device="cpu")
            with session.meter.waiting_for_others():
                once, half = session.wire.result(session.wire.start_sum(both, f"{session.prefix}.losses")).tolist()
            # A batch without tokens shows nothing, and weighs nothing.
            if once == 0.0:
                return True
            self._normalised = abs(half) < 0.75 * abs(once)
        return self._normalised


class BalancedTrainer(Balanced, Trainer):  # type: ignore[misc]
    """A ``Trainer`` whose ranks do what each can finish in time."""


def _end_to_end(parts: Iterable[Any], one_array: bool) -> Any:
    """Return the arrays of all ranks as one, filled up to the widest, or the lists of their batches as one."""
    there = [part for part in parts if part is not None]
    return reduce(nested_concat if one_array else operator.add, there) if there else None


class _InTurn(list[Any]):
    """Batches of a round, which the loader hands out when they are asked for."""

    def __init__(self, batches: list[Any], handed_out: Iterator[Any]) -> None:
        super().__init__(batches)
        self._handed_out = handed_out

    def __iter__(self) -> Iterator[Any]:
        return islice(self._handed_out, len(self))


class _Epochs:
    """Epochs of a stream, counted by its loader: to a Trainer without a length all steps are one epoch."""

    def __init__(self, loader: BalancedLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


class _Place(TrainerCallback):
    """Goes on in the middle of an epoch, and counts epochs by steps."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def _rounds(self, state: Any) -> int:
        """Return the steps of an epoch; of a stream, all."""
        if self._trainer._stream is not None:
            return int(state.max_steps)
        return len(self._trainer._loader) // int(self._trainer.args.gradient_accumulation_steps)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self._trainer
        args.ignore_data_skip = not trainer._skips
        epoch, done = divmod(state.global_step, self._rounds(state))
        if not (done and trainer._skips):
            return
        if trainer._stream is None:
            trainer._loader.set_epoch(epoch)
            trainer._loader.skip(done)
            return
        path = Path(trainer._resumes_from or "", _STREAM)
        saved = torch.load(path, weights_only=True) if args.process_index == 0 and path.exists() else None
        saved = trainer.balance._session.wire.broadcast_object(saved, root_rank=0, name="trainer.stream")
        if saved is None:
            raise ValueError(
                f"{path} is missing, the place in the stream, which BalancedTrainer saves; resume from another "
                "checkpoint, or begin the stream at its front (ignore_data_skip=True)"
            )
        trainer._loader.load_state_dict(saved)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._trainer._stream is not None:
            place = self._trainer._loader.state_dict()
            if args.process_index == 0:
                torch.save(place, Path(args.output_dir, f"checkpoint-{state.global_step}", _STREAM))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.epoch = state.global_step / self._rounds(state)
