"""What rounds must be, from plain lists: one round after the other, all ranks at once, nothing ahead of its turn."""

from __future__ import annotations

import itertools


class SharedList:
    """Samples of all ranks. What a round leaves undone comes back ``rounds_ahead`` rounds later, or at the end."""

    def __init__(self, samples, *, rounds_ahead=0, least=1, minimum=1, multiple_of=1):
        self._rest = list(samples)
        self._lead = rounds_ahead
        self._least = least
        self._shares = minimum, multiple_of
        self._number = 0
        self._back = []  # (the round before which they come back, samples)

    def next_round(self, plan):
        """The plan and the samples of each rank; None at the end of the epoch."""
        self._come_back(lambda due: due <= self._number)
        if len(self._rest) < self._least:
            self._come_back(lambda due: True)
        if len(self._rest) < self._least:
            return None
        plan = self._fitted(plan, len(self._rest))
        parts = []
        for count in plan.samples:
            parts.append(self._rest[:count])
            self._rest = self._rest[count:]
        return plan, parts

    def _fitted(self, plan, left):
        """Too few samples after a round, for a share of each rank, belong to it."""
        minimum, multiple_of = self._shares
        share = next(x for x in itertools.count(minimum) if x % multiple_of == 0)
        too_few = range(1, share * len(plan.samples))
        joins = plan.ends == "all" and self._least == 1 and left - plan.total in too_few
        return plan.resize(left, *self._shares) if joins or left <= plan.total else plan

    def finish(self, parts, done):
        """So many of each part are done."""
        undone = [sample for part, count in zip(parts, done, strict=True) for sample in part[count:]]
        self._back.append((self._number + 1 + self._lead, undone))
        self._number += 1

    def _come_back(self, is_due):
        self._rest = [sample for due, samples in self._back if is_due(due) for sample in samples] + self._rest
        self._back = [each for each in self._back if not is_due(each[0])]


class EndingLists:
    """A list for each rank, once; a rank whose list has ended is planned no more."""

    def __init__(self, lists):
        self._rests = [list(samples) for samples in lists]

    def next_round(self, plan):
        if not any(self._rests):
            return None
        plan = plan.without([not rest for rest in self._rests])
        return plan, [rest[:x] for rest, x in zip(self._rests, plan.samples, strict=True)]

    def finish(self, parts, done):
        self._rests = [rest[count:] for rest, count in zip(self._rests, done, strict=True)]
