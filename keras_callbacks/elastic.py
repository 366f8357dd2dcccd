"""Elastic state for Keras: the commit to which a training returns when ranks are lost, and which new ranks receive.

    import horovod.tensorflow as hvd
    from keras_callbacks.elastic import CommitStateCallback, KerasState

    @hvd.elastic.run
    def train(state):
        balance = LoadBalance(global_batch=512)             # made again after every reset
        model.fit(
            resize_batches((x, y), balance, shuffle=True), initial_epoch=state.epoch, epochs=20,
            callbacks=[balance, CommitStateCallback(state)],
        )

    train(KerasState(model))

A commit keeps variables, the place in the data, predictors, plans and the policy's state as of the same
round. Horovod's ``KerasState`` asks the optimizer for its variables in a way that Keras 3 has given up, and ignores
the order of the samples.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from horovod.common.elastic import ObjectState
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow import shutdown

from hvd_hetero.commits import Every, every
from hvd_hetero.elastic import Member
from keras_callbacks.keras_versions import (
    build_optimizer,
    follows_schedule,
    is_built,
    is_keras_3,
    optimizer_variables,
    trained_variables,
    weights_of,
)
from keras_callbacks.load_balance import LoadBalance
from keras_callbacks.session import FitSession
from keras_callbacks.start import average, start_from_rank_0
from keras_callbacks.tensorflow_wire import TensorFlowWire, translated_failures

logger = logging.getLogger(__name__)

_SHARDS = (
    "with stream='shard' each rank has read part of its own shard, which the ranks that follow cannot resume. Give "
    "resize_batches arrays, or a dataset that all ranks read whole"
)


class KerasState(Member, ObjectState):  # type: ignore[misc]
    """Weights, the optimizer's state, the place in the data, and your own values; for ``hvd.elastic.run``.

    ``commit()`` keeps them in the memory of this process, and checks whether hosts have come or gone. ``restore()``
    goes back to the last commit, ``sync()`` gives all ranks rank 0's state. ``epoch`` and ``batch`` show where training
    stands: the current epoch, and the number of its batches that are done.

    Parameters
    ----------
    model
        Built and compiled.
    optimizer
        None: the one of ``model.compile``.
    scale_learning_rate
        If the ranks of a new membership have another global batch than the commit (``global_batch=64 *
        hvd.size()``), multiply the learning rate by as much: constant batches per rank, and the linear rule. Without it
        the rate stays as it is. Under a constant global batch, the default, nothing has to change.
    values
        Further objects to keep, which become attributes.
    """

    epoch: int
    batch: int
    _failure = HorovodInternalError
    _hang_up = staticmethod(shutdown)

    def __init__(self, model: Any, optimizer: Any = None, *, scale_learning_rate: bool = False, **values: Any) -> None:
        is_keras_3(model)  # or of tf_keras, where that is what tf.keras is
        if not is_built(model):
            raise ValueError(
                f"model must be built, so that there are weights to keep, and {model.name!r} is not; give it an Input, "
                "or call model.build(input_shape) before KerasState(model)"
            )
        self.model = model
        self.optimizer: Any = getattr(model, "optimizer", None) if optimizer is None else optimizer
        if self.optimizer is None:
            raise ValueError(
                "optimizer must be given where the model is not compiled, got None; call model.compile(optimizer, "
                "loss) before KerasState(model)"
            )
        if scale_learning_rate and follows_schedule(self.optimizer):
            raise ValueError(
                "scale_learning_rate=True needs an optimizer whose learning rate is a number, and this one's is a "
                "schedule; compile with a number, and change it by a callback that multiplies it"
            )
        self._check_names(values)
        self.scale_learning_rate = scale_learning_rate
        build_optimizer(self.optimizer, model.trainable_variables)
        self._wire = TensorFlowWire()
        self._own: list[tf.Variable] = []
        self._saved: list[npt.NDArray[Any]] = []
        self._save_parts()
        broadcast = functools.partial(self._wire.broadcast_object, root_rank=0, name="elastic_state")
        super().__init__(broadcast, lambda: self._wire.rank, **{"epoch": 0, "batch": 0, **values})

    def sync(self) -> None:
        """Give all ranks rank 0's state; a collective call, and the first of a membership."""
        # Names of collectives are those of nodes in the train function's graph. They contain rank 0's count of
        # trainings, which is shared here, before anything is traced: so survivors and new ranks use the same names.
        own = [(variable, variable.numpy()) for variable in self._own] if self._membership.has_taken_part else []
        with translated_failures():
            shared = self._receive_state(self._wire)
            if shared.mixes:
                counts = self._membership.has_taken_part
                average(trained_variables(self.model), self._wire, "elastic", counts=counts)
            weights, state = weights_of(self.model), optimizer_variables(self.optimizer)
            start_from_rank_0(weights, state, self._wire, "elastic")
            super().sync()
        for variable, value in own:
            variable.assign(value)
        self._accept_state(shared)

    def follow(self, balance: LoadBalance) -> None:
        """Resume from the state with a new ``LoadBalance`` and its data, and keep their state with each commit.

        A collective call, before any round; ``CommitStateCallback`` makes it when a fit begins.
        """
        self._follow(balance._session)

    def _follow(self, session: FitSession) -> None:
        if session is self._session:
            return
        same_ranks = self._follow_session(session)
        session.elastic = True
        cursor, queue = self._membership.cursor, session.course.queue
        if cursor is not None:
            if not same_ranks and queue is not None and not queue.survives_resets:
                raise ValueError(f"ranks have changed in the middle of epoch {self.epoch}, and {_SHARDS}")
            session.course.go_on(cursor, self.batch)
            self.batch = session.course.skipped
        elif queue is not None and not queue.survives_resets and self._wire.rank == 0:
            logger.warning("ranks must not change in the middle of an epoch: %s", _SHARDS)
        self._own = [v for layer in session.common_start.local_layers for v in weights_of(layer)]

    def _cursor(self) -> Mapping[str, Any] | None:
        queue = self._session.course.queue
        return None if queue is None else queue.cursor()

    def _let_go(self, session: FitSession) -> None:
        session.release()

    def _scale_rates(self, factor: float) -> None:
        if factor != 1.0:
            self.optimizer.learning_rate = factor * float(tf.convert_to_tensor(self.optimizer.learning_rate))

    def _variables(self) -> list[tf.Variable]:
        return [*weights_of(self.model), *optimizer_variables(self.optimizer)]

    def _load_parts(self) -> None:
        for variable, value in zip(self._variables(), self._saved, strict=True):
            variable.assign(value)

    def _save_parts(self) -> None:
        self._saved = copied(self._variables(), self._saved)


def copied(variables: Sequence[tf.Variable], former: Sequence[npt.NDArray[Any]] = ()) -> list[npt.NDArray[Any]]:
    """Return copies of the values, which overwrite the former copies if they have the same shapes and types."""
    # A copy into new memory takes several times as long, because the system must provide its pages first.
    same = [(value.shape, value.dtype) for value in former] == [
        (tuple(variable.shape), variable.dtype.as_numpy_dtype) for variable in variables
    ]
    if not same:
        return [np.array(variable.numpy()) for variable in variables]  # a scalar is no array
    for value, variable in zip(former, variables, strict=True):
        np.copyto(value, _seen(variable))
    return list(former)


def _seen(variable: tf.Variable) -> npt.NDArray[Any]:
    """Return the value without a copy, if it is in the memory of the host and NumPy has its type (not bfloat16)."""
    try:
        return np.asarray(memoryview(variable.read_value()))
    except (ValueError, TypeError, BufferError):
        return np.asarray(variable.numpy())


class CommitStateCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Notes the epoch and the batch in the state, and commits it every few batches and after every epoch.

    It does what Horovod's ``UpdateEpochStateCallback``, ``UpdateBatchStateCallback`` and ``CommitStateCallback`` do
    together, in any place among the callbacks. Epochs are counted as ``fit`` does with ``initial_epoch``. A fit
    that goes on in the middle of an epoch does the rest of it, and its figures of that epoch cover this rest.

    Parameters
    ----------
    state
        The state of the model that is trained.
    batches_per_commit
        A commit copies all variables and is a collective; batches since the last one are lost in a failure, and
        done again. "auto": as many as keep commits within an epoch to 1 % of the time, as rank 0 measures it.
    """

    def __init__(self, state: KerasState, batches_per_commit: Every = "auto") -> None:
        super().__init__()
        if not isinstance(state, KerasState):
            raise TypeError(
                f"state must be a KerasState of keras_callbacks.elastic, got {type(state).__name__}: Horovod's own "
                "does not keep the place in the data"
            )
        self.state = state
        remedy = "to commit after epochs only, give one that is larger than an epoch"
        self.batches_per_commit = every("batches_per_commit", batches_per_commit, remedy=remedy)
        self._before = 0
        self._session: FitSession | None = None

    def set_model(self, model: Any) -> None:
        """Check that the state keeps the model that is trained."""
        super().set_model(model)
        if model is not self.state.model or model.optimizer is not self.state.optimizer:
            raise ValueError(
                "state is of another model or another optimizer than this fit trains; make KerasState(model) after the "
                "last model.compile(…)"
            )

    def on_train_begin(self, logs: Any = None) -> None:
        """Check that the fit has a ``LoadBalance``, and resume it from the state."""
        session = getattr(self.model.train_step, "wrapped_by", None)
        if not isinstance(session, FitSession):
            raise ValueError(
                "CommitStateCallback keeps the place in the data of a LoadBalance in the same fit, and there is "
                "none; write callbacks=[balance, CommitStateCallback(state)]"
            )
        self._session = session
        self.state._follow(session)
        self._before = self.state.batch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Check that fit begins the state's epoch."""
        if epoch != self.state.epoch:
            raise ValueError(
                f"fit begins epoch {epoch}, but the state is at epoch {self.state.epoch}; write "
                "model.fit(…, initial_epoch=state.epoch)"
            )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit, if it is due and the epoch goes on."""
        self.state.batch = self._before + batch + 1
        assert self._session is not None, "on_train_begin has found it"
        # After an epoch's last batch on_epoch_end commits, since no fit can begin at an epoch's end.
        if self._is_due() and not self._session.epoch_is_over:
            self.state.commit()

    def _is_due(self) -> bool:
        if self.batches_per_commit == "auto":
            return self.state._commit_is_due("auto")
        return self.state.batch % self.batches_per_commit == 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit at the beginning of the next epoch."""
        self.state.epoch, self.state.batch, self._before = epoch + 1, 0, 0
        self.state.commit()
