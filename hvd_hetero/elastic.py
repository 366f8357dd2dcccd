"""What a training takes from one membership to the next, when ranks were lost or have joined.

Three kinds of knowledge, and each lives where it can survive:

    common    plans, what the policy keeps, the count of rounds: the same on every rank, so any survivor's will do
    own       a rank's predictor, and what fits its memory: bound to the process and its machine, whatever its rank
    cursor    in the data; only the data side reads it (``state_dict`` of the order)

If the very same ranks have come back, all goes on as it was committed. Otherwise the samples are divided anew, before
the first round. Each rank sends the speed that it expects, and the policy divides by the speeds that are known
(``Policy.renegotiate``). A rank that joins knows nothing about itself yet, and begins with a new predictor.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from hvd_hetero.balancer import Balancer
from hvd_hetero.commits import CommitPace, Every
from hvd_hetero.communication.wire import Wire
from hvd_hetero.session import Session

logger = logging.getLogger(__name__)


class SharedState(NamedTuple):
    """What is the same on every rank of a membership."""

    common: dict[str, Any] | None
    cursor: Mapping[str, Any] | None
    mixes: bool
    resets: int
    rates_for: int | None


class MembershipState:
    """One rank's memory of its training, as of the last commit."""

    def __init__(self) -> None:
        self.common: dict[str, Any] | None = None
        """The part of the commit that is the same on all ranks; None before the first commit."""
        self.cursor: Mapping[str, Any] | None = None
        """The place in the data."""
        self.mixes = False
        """Whether each rank has its own model (D-PSGD, MATCHA). Their mean is the result of the training."""
        self.resets = 0
        """How often the membership has changed."""
        self.rates_for: int | None = None
        """The global batch that the committed learning rates are for; None before the first round."""
        self._rank: int | None = None
        self.own: Mapping[str, Any] | None = None
        """What this rank has learned about itself, as of the last commit; None: nothing yet."""

    @property
    def rounds(self) -> int:
        """Rounds of the last commit."""
        return 0 if self.common is None else int(self.common["rounds"])

    @property
    def has_taken_part(self) -> bool:
        """True if this rank has committed anything; one that has just joined has not."""
        return self.own is not None

    def capture(self, balancer: Balancer, cursor: Mapping[str, Any] | None = None, *, mixes: bool = False) -> None:
        """Keep the state of this moment, between two rounds. Nothing is sent."""
        self.common = balancer.state_dict()
        self.own = self.common.pop("pace")
        self._rank = balancer.rank
        self.cursor = cursor
        self.mixes = mixes
        self.rates_for = balancer.planner.global_batch

    def state_dict(self) -> dict[str, Any]:
        """Return what is the same on every rank, as plain data."""
        return {"common": self.common, "place": self.cursor, "rates_for": self.rates_for}

    def load_state_dict(self, state: Mapping[str, Any], own: Mapping[str, Any] | None, rank: int) -> None:
        """Load a commit as if this process had made it as ``rank``."""
        self.common, self.cursor, self.rates_for = state["common"], state["place"], state["rates_for"]
        self.own, self._rank = own, None if own is None else rank

    def broadcast(self, wire: Wire) -> SharedState:
        """Return rank 0's state, for all to ``accept``; the first collective call of a membership."""
        mine = (self.common, self.cursor, self.mixes, self.resets, self.rates_for)
        return SharedState(*wire.broadcast_object(mine, root_rank=0, name="elastic.common"))

    def accept(self, shared: SharedState) -> None:
        """Take rank 0's state, once all else has arrived."""
        # Not earlier: a rank that fails before goes back to its own commit.
        self.common, self.cursor, self.mixes, self.resets, self.rates_for = shared

    def rate_factor(self, global_batch: int, *, scales: bool) -> float:
        """Return the factor of the learning rate for this global batch: by the linear rule, or 1."""
        if self.rates_for is None:
            self.rates_for = global_batch
        before = self.rates_for
        if before == global_batch:
            return 1.0
        logger.warning(
            "the global batch was %d and is %d now; learning rates %s", before, global_batch,
            "were scaled alike" if scales else "stay as they are (scale_learning_rate=True would scale them, too)",
        )  # fmt: skip
        return global_batch / before if scales else 1.0

    def resume(self, balancer: Balancer, wire: Wire, prefix: str) -> bool:
        """Continue from the last commit; return whether the ranks are the very same as then, or there was none.

        A collective call, before the first round of a membership and after ``broadcast``.
        """
        common = self.common
        if common is None:
            return True
        if self.own is not None:
            self._load_own(balancer)
        prospect = balancer.meter.learner.expected(), balancer.meter.limit
        ranks = wire.allgather_object((self._rank, prospect), name=f"{prefix}.survivors")
        came_from, prospects = zip(*ranks, strict=True)
        # The number of ranks is the commit's: its first few ranks alone are another membership.
        same = list(came_from) == list(range(common["workers"]))
        if balancer.resume(common, prospects, same_ranks=same):
            return True
        if balancer.rank == 0:
            logger.warning(
                "%d ranks go on after round %d; %d of them are new; speeds known: %s; samples of the next round: %s",
                balancer.workers, common["rounds"], came_from.count(None),
                ", ".join("-" if math.isnan(speed) else f"{speed:.4g}" for speed, _ in prospects),
                balancer.plan().samples,
            )  # fmt: skip
        return same

    def _load_own(self, balancer: Balancer) -> None:
        assert self.own is not None, "the caller has looked"
        try:
            balancer.meter.load_state_dict(self.own)
        except (ValueError, KeyError, TypeError) as error:  # the policy is another one, or the state is damaged
            logger.warning("rank %d begins to measure its speed again: %s", balancer.rank, error)


class Member:
    """What the elastic states of all frameworks have in common; the base before Horovod's ``ObjectState``."""

    _host_messages: Any
    _saved_state: dict[str, Any]
    scale_learning_rate: bool
    # An adapter's part: keep and load model and optimizer, scale the learning rates, and return the place in the data.
    # It unwraps what the session of a former membership has wrapped.
    _save_parts: Callable[[], None]
    _load_parts: Callable[[], None]
    _scale_rates: Callable[[float], None]
    _cursor: Callable[[], Mapping[str, Any] | None]
    _let_go: Callable[[Any], None]
    # The error of a collective that has lost ranks, and a way to close this process's connections.
    _failure: type[Exception]
    _hang_up: Callable[[], None]

    def __init__(self, broadcast: Callable[[Any], Any], rank: Callable[[], int], **values: Any) -> None:
        self._membership = MembershipState()
        self._pace = CommitPace()
        self._session: Any = None
        """The adapter's session of the training that is followed."""
        self._former: Callable[[], Any] = lambda: None
        """A function that returns the former session, while it exists."""
        self._noticed_at: float | None = None
        """When this rank noticed a change of ranks, until the first round after it is over; monotonic seconds."""
        super().__init__(functools.partial(self._from_rank_0, broadcast), rank, **values)  # type: ignore[call-arg]
        self._save_values()

    @property
    def resets(self) -> int:
        """How often the membership has changed, the same on every rank: for names of files, such as telemetry."""
        return self._membership.resets

    @property
    def hosts_have_changed(self) -> bool:
        """True if Horovod has notified this rank of hosts that came or went; the next commit raises on all ranks."""
        return not self._host_messages.empty()

    def commit(self) -> None:
        """Keep everything as it is, and ask whether hosts have come or gone; on every rank, between two rounds."""
        with contextlib.nullcontext() if self._session is None else self._pace.commit(self._session.balancer.rounds):
            self.save()
            with self._pace.together():
                self.check_host_updates()

    def save(self) -> None:
        """Keep everything as it is now; ``commit()`` calls this."""
        if (session := self._session) is not None:
            self._membership.capture(session.balancer, self._cursor(), mixes=session.mixing is not None)
        self._save_parts()
        super().save()  # type: ignore[misc]
        self._save_values()

    def restore(self) -> None:
        """Go back to the last commit; after a failure, as soon as Horovod is up again (``reset``)."""
        if isinstance(sys.exception(), self._failure):
            self._notice()
            self._leave()
            # Before values are restored, because others may wait for this rank, and values may ask Horovod.
            self._hang_up()
        else:
            self._leave()
            self._go_back()

    def reset(self) -> None:
        """Go back to the last commit: the membership has changed (Horovod calls this on survivors)."""
        self._notice()
        # Even if nothing has failed: hosts may have been checked without a commit. The cursor is the commit's, so all
        # rounds since then are done again.
        self._leave()
        self._go_back()
        self._membership.resets += 1
        Session.resumes = True

    def check_host_updates(self) -> None:
        """Raise if hosts have come or gone, so that the ranks meet again."""
        try:
            super().check_host_updates()  # type: ignore[misc]
        except Exception as interrupt:
            if hasattr(interrupt, "skip_sync"):  # HostsUpdatedInterrupt, of a package that is not imported here
                # Unlike Horovod, always with a sync(): ranks may have read different numbers of rounds of the data, or
                # hold different models (D-PSGD).
                interrupt.skip_sync = False
                self._notice()
            raise

    def _from_rank_0(self, broadcast: Callable[[Any], Any], value: Any) -> Any:
        """Return rank 0's value; take its number of rounds until the next commit, too."""
        received, self._pace.rounds = broadcast((value, self._pace.paid_for))
        return received

    def _commit_is_due(self, every: Every) -> bool:
        if self._session is None:  # let go of by the user's own restore()
            return False
        return self._pace.is_due(every, self._session.balancer.rounds - self._membership.rounds)

    def _notice(self) -> None:
        if self._noticed_at is None:  # else another rank was lost before the first round: the recovery goes on
            self._noticed_at = time.monotonic()

    def _recovered(self, session: Any) -> None:
        """Say how long it took from noticing the change of ranks until the end of the round that is over now."""
        assert self._noticed_at is not None, "the caller has looked"
        took_s, self._noticed_at = time.monotonic() - self._noticed_at, None
        balancer = session.balancer
        logger.info(
            "rank %d of %d recovered in %.2f s: round %d is over", balancer.rank, balancer.workers, took_s,
            balancer.finished.round,
        )  # fmt: skip
        session.note_recovery(took_s)

    def _go_back(self) -> None:
        self._load_parts()
        super().restore()  # type: ignore[misc]
        self._save_values()

    def _receive_state(self, wire: Wire) -> SharedState:
        """Return rank 0's state; the first collective call of a membership."""
        self._leave()
        self._pace.begin()
        return self._membership.broadcast(wire)

    def _accept_state(self, shared: SharedState) -> None:
        """Accept rank 0's state, which is complete now."""
        self._membership.accept(shared)
        self._save_parts()
        self._save_values()

    def _leave(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            self._let_go(session)
            session.close()
            self._former = weakref.ref(session)

    def _follow_session(self, session: Any) -> bool:
        """Follow the session of a new membership; return whether its ranks are the last commit's."""
        numbered = (session.balancer.rank, session.balancer.workers)
        if session is self._former() or numbered != (session.wire.rank, session.wire.size):
            raise ValueError(
                "balance is of a former membership, whose ranks and signals are gone; make LoadBalance, and what takes "
                "it, again inside the function that hvd.elastic.run calls after every reset"
            )
        self._leave()
        # First, so that `_leave` closes the session whatever fails below.
        self._session = session
        batch = session.balancer.planner.global_batch
        self._scale_rates(self._membership.rate_factor(batch, scales=self.scale_learning_rate))
        if self._noticed_at is not None:
            session.balancer.next_round_over = functools.partial(self._recovered, session)
        return self._membership.resume(session.balancer, session.wire, session.prefix)

    def _save_values(self) -> None:
        # Unlike Horovod's, a copy: what changes in place must not change in the commit.
        self._saved_state = copy.deepcopy(self._saved_state)

    def _check_names(self, values: Iterable[str]) -> None:
        if taken := [name for name in values if hasattr(type(self), name)]:
            raise ValueError(
                f"values must not be named {', '.join(taken)}, which are attributes of the state; rename them"
            )
