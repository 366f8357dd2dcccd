"""A training on disk, as of the same round on all ranks: for jobs that end, and begin again.

    torchrun --nproc-per-node 2 --max-restarts 3 train.py

    balance = LoadBalance(global_batch=512)
    loader = BalancedLoader(dataset, balance, shuffle=True)
    optimizer = DistributedOptimizer(optimizer, balance, model.named_parameters())
    saved = SavedTraining("run.pt", balance, loader, model=model, optimizer=optimizer)
    for epoch in range(loader.epoch_at_hand, epochs):
        for x, y in loader:
            ...                                             # saved in between, on every rank alike
    saved.save()

If the file exists, the training goes on after the round that it was saved at, in the middle of an epoch: rounds
since then are done again, and an epoch visits each sample once. Only rank 0 reads and writes; the file changes
as a whole or not at all, so a job that is ended while it writes leaves the former one. Its last bytes are a checksum of
all others, which is compared before anything in it is used. ``torch.load`` reads it, too.

It holds what also survives a change of ranks in memory (``hvd_hetero.elastic``): plans and the policy's state,
each rank's predictor, the place in the data. A rank on another host or card than before knows nothing about its
speed and memory. With other ranks, another policy or other options of it, shares are negotiated again. Not in it: the
state of random generators, and each rank's own data, such as running statistics of batch norm (rank 0's become all
ranks').

Horovod's elastic mode keeps processes that have survived, and is quicker (``torch_hooks.elastic``). This needs no rank
to survive: neither Horovod nor watched hosts, but a program that starts the job again.
"""

from __future__ import annotations

import fcntl
import glob
import io
import logging
import os
import secrets
import socket
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hvd_hetero.commits import CommitPace, Every, every
from hvd_hetero.elastic import MembershipState
from hvd_hetero.errors import HeteroError, RoundStateError
from torch_hooks.load_balance import LoadBalance
from torch_hooks.loader import BalancedLoader
from torch_hooks.parameters.broadcast import broadcast_state

_VERSION = 2
_MARK = b"hvd-hetero saved\n"  # before the checksum, at the end of the file

logger = logging.getLogger(__name__)


class SavedTraining:
    """Model, optimizer, place in the data, and your own values, in one file; a collective call.

    Make it when everything else is made, before the first round and on every rank.

    Parameters
    ----------
    path
        The file, which rank 0 reads if it is there, and writes.
    balance, loader
        The ``LoadBalance`` and the loader of this training.
    rounds_per_save
        It is saved before the first round that follows so many others, when the loop's body is done with them.
        All ranks wait while rank 0 writes. "auto": as many as keep that within 1 % of the time, as rank 0
        measures it. None: only when you call ``save()`` yourself. If the disk is full, such a save warns, and training
        goes on; ``save()`` raises.
    parts
        Objects to keep, by a name of yours: everything that has ``state_dict`` and ``load_state_dict`` (model,
        optimizer, schedule, ``GradScaler``). Rank 0's is kept, and given to all.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        balance: LoadBalance,
        loader: BalancedLoader,
        *,
        rounds_per_save: Every | None = "auto",
        **parts: Any,
    ) -> None:
        if not isinstance(balance, LoadBalance) or not isinstance(loader, BalancedLoader):
            raise TypeError(
                f"balance and loader must be the LoadBalance and BalancedLoader of this training, got "
                f"{type(balance).__name__} and {type(loader).__name__}"
            )
        if rounds_per_save is not None:
            remedy = "None saves only where you call save() yourself"
            rounds_per_save = every("rounds_per_save", rounds_per_save, remedy=remedy)
        for name, part in parts.items():
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise TypeError(
                    f"{name} must have state_dict() and load_state_dict(), got {type(part).__name__}; keep what else "
                    "you need in an object of yours that has both"
                )
            if _is_sharded(part):
                raise ValueError(
                    f"{name} is sharded over the ranks, and one file holds whole tensors; save model and optimizer by "
                    "torch.distributed.checkpoint, with balance.state_dict() and loader.state_dict() beside them, and "
                    "leave them out here"
                )
        session, batches = balance._session, loader._micro_batches
        session.require_first("SavedTraining")
        if loader._session is not session:
            raise ValueError("loader is of another LoadBalance than balance; give those of one training")
        if session.balancer.rounds:
            raise RoundStateError("SavedTraining was made after rounds were done; make it before the first one")
        if session.mixing is not None:
            raise ValueError(
                "under sync='d-psgd' or 'matcha' each rank has its own model, and the file would hold rank 0's; "
                "save a file for each rank by state_dict()"
            )
        if batches.before_round is not None:
            raise ValueError("loader is saved already, or followed by a TorchState; keep to one of them")
        self.path = Path(path)
        self.rounds_per_save = rounds_per_save
        self._session = session
        self._batches = batches
        self._parts = parts
        self._saved_at = 0
        self._fails = False
        """True: the latest save could not be written, and a warning says so."""
        self._pace = CommitPace()
        self._place = f"{socket.gethostname()} {session.devices[session.balancer.rank]}"
        self._load()
        batches.before_round = self._save_if_due

    def save(self) -> None:
        """Write everything as it is; a collective call, between two iterations over the loader.

        After an epoch that was left by ``break``, the training goes on in that epoch.
        """
        if self._batches.iterating:
            raise RoundStateError(
                "save() was called inside an iteration over the loader, whose body does not run on a rank without "
                "data. Use rounds_per_save, which saves on every rank, or call save() between two iterations"
            )
        self._batches.note_left()
        self._session.discard_round()  # of a batch that was drawn, and left by break at once
        self._save()

    def _save_if_due(self) -> None:
        since = self._session.balancer.rounds - self._saved_at
        if self.rounds_per_save is not None and self._pace.is_due(self.rounds_per_save, since):
            self._save(goes_on=True)

    def _save(self, *, goes_on: bool = False) -> None:
        session, membership = self._session, MembershipState()
        # Also of a save that fails: with a full disk, each round would try again.
        self._saved_at = session.balancer.rounds
        # A device's remaining work on these rounds is no part of saving, which would seem too expensive to repeat.
        session.meter.catch_up()
        with self._pace.commit(session.balancer.rounds):
            membership.capture(session.balancer, self._batches.state_dict())
            with self._pace.together():
                own = session.wire.allgather_object((self._place, membership.own), name=f"{session.prefix}.saved")
            with self._all_or_none():
                if session.wire.rank == 0:
                    try:
                        self._write({**membership.state_dict(), "own": list(own)})
                        self._fails = False
                    except _NotWrittenError as error:
                        if not goes_on:
                            raise
                        if not self._fails:
                            logger.warning("%s. Training goes on, and later saves try again.", error)
                        self._fails = True

    def _write(self, progress: Mapping[str, Any]) -> None:
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        content = {"version": _VERSION, "progress": progress, "parts": parts}
        # Another job on this path writes a file of its own, and the former file stays until this one is complete.
        partial = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}.partial")
        try:
            with open(partial, "x+b") as file:
                # Some file systems have no locks.
                with suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_EX)
                torch.save(content, file)
                file.write(_seal(file, file.tell()))
                file.flush()
                os.fsync(file.fileno())
            self._require_readable(partial, parts)
            partial.replace(self.path)
        except Exception as error:
            with suppress(OSError):
                partial.unlink()
            if isinstance(error, HeteroError):
                raise
            kind = _NotWrittenError if isinstance(error, OSError | RuntimeError) else HeteroError  # PyTorch has either
            raise kind(
                f"{self.path} cannot be written ({type(error).__name__}: {error}); what was saved before is still there"
            ) from error

    def _clear_leftovers(self) -> None:
        """Remove files of processes that were killed while they wrote. One that still writes holds a lock."""
        for partial in self.path.parent.glob(f"{glob.escape(self.path.name)}.*.partial"):
            with suppress(OSError), open(partial, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                partial.unlink()

    def _require_readable(self, partial: Path, parts: Mapping[str, Any]) -> None:
        """Raise if the file cannot be read without unpickling, before it takes the former one's place."""
        try:
            # On "meta" it reads no numbers: 3 ms for 200 MB, which took 410 to write.
            torch.load(partial, map_location="meta", weights_only=True)
        except Exception as error:  # noqa: BLE001 - raised below, without PyTorch's advice to unpickle
            # Some tensors exist on devices with numbers alone, as quantised ones do.
            odd = [name for name, state in parts.items() if not _can_be_read(state)]
            if odd:
                raise HeteroError(
                    f"the state of {' and '.join(odd)} is not of tensors and plain data, and could not be read again "
                    f"({type(error).__name__}); let its state_dict() return numbers, texts, lists, dicts and tensors"
                ) from None

    def _load(self) -> None:
        session, wire = self._session, self._session.wire
        content: dict[str, Any] | None = None
        with self._all_or_none():
            if wire.rank == 0:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._clear_leftovers()
                if self.path.exists():
                    content = self._read()
                    for name, part in self._parts.items():
                        part.load_state_dict(content["parts"][name])
                elif not os.access(self.path.parent, os.W_OK):
                    raise HeteroError(f"{self.path} cannot be written: no right to write in {self.path.parent}")
        progress = wire.broadcast_object(content and content["progress"], root_rank=0, name=f"{session.prefix}.loaded")
        if progress is None:
            return
        own = progress["own"]
        if len(own) != wire.size and not self._batches.cutter.order.survives_resets:
            raise ValueError(
                f"{self.path} has {len(own)} ranks, and this job has {wire.size}. With a shard of each rank's own, "
                "it is not known which samples the others have done. Launch as many, or use stream='whole'"
            )
        for name, part in self._parts.items():
            broadcast_state(wire, part, f"{session.prefix}.loaded.{name}")
        place, mine = own[wire.rank] if wire.rank < len(own) else (None, None)
        membership = MembershipState()
        membership.load_state_dict(progress, mine if place == self._place else None, wire.rank)
        if wire.rank == 0 and membership.rates_for != session.balancer.planner.global_batch:
            logger.warning(
                "the global batch was %s and is %d now; learning rates stay as they are",
                membership.rates_for, session.balancer.planner.global_batch,
            )  # fmt: skip
        membership.resume(session.balancer, wire, session.prefix)
        if membership.cursor is not None:
            self._batches.cutter.load_state_dict(membership.cursor)
        self._saved_at = session.balancer.rounds

    def _read(self) -> dict[str, Any]:
        with open(self.path, "rb") as file:
            length = file.seek(0, os.SEEK_END) - len(_seal(file, 0))
            if length < 0 or _seal(file, length) != file.read():
                raise HeteroError(
                    f"{self.path} is no saved training, or is damaged: its checksum is missing or wrong. Remove it to "
                    "begin again, or give another path"
                )
            file.seek(0)
            content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        version, names = content["version"], set(content["parts"])
        if version != _VERSION or names != set(self._parts):
            raise HeteroError(
                f"{self.path} holds {', '.join(sorted(names))} in version {version}, and this training saves "
                f"{', '.join(sorted(self._parts))} in version {_VERSION}; give the same parts, or another path"
            )
        return content

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Make all ranks raise what rank 0 raises in its own work: else they would wait for it."""
        wire, prefix = self._session.wire, self._session.prefix
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised below
            failure = error
        reason = f"{type(failure).__name__}: {failure}" if failure is not None else ""
        with self._pace.together():
            reason, self._pace.rounds = wire.broadcast_object(
                (reason, self._pace.paid_for), root_rank=0, name=f"{prefix}.file"
            )
        if failure is not None:
            raise failure
        if reason:
            raise HeteroError(f"rank 0 has failed to read or write {self.path}: {reason}")


def _is_sharded(part: Any) -> bool:
    """Whether it is a model, or an optimizer, of parameters that are sharded by ``fully_shard``."""
    groups = getattr(part, "param_groups", ())
    parameters = part.parameters() if isinstance(part, torch.nn.Module) else (p for g in groups for p in g["params"])
    return any(hasattr(parameter, "placements") for parameter in parameters)


def _can_be_read(state: Any) -> bool:
    content = io.BytesIO()
    torch.save(state, content)
    content.seek(0)
    try:
        torch.load(content, map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001 - whatever unpickling refuses
        return False
    return True


class _NotWrittenError(HeteroError):
    """The disk is full, or gone."""


def _seal(file: BinaryIO, length: int) -> bytes:
    """Return the last bytes of a file: the mark, and the checksum of the ``length`` bytes before it."""
    # It must find damage, not forgery: CRC-32 goes through 2.7 GB/s, BLAKE2b through 0.5, while all ranks wait.
    checksum = 0
    file.seek(0)
    while length > 0 and (data := file.read(min(length, io.DEFAULT_BUFFER_SIZE))):
        checksum = zlib.crc32(data, checksum)
        length -= len(data)
    return _MARK + struct.pack(">I", checksum)
