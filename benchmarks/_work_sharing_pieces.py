"""How a round whose work is shared is cut into micro-batches."""

from __future__ import annotations

from hvd_hetero.rounds import RoundPlan


def equal_pieces(plan: RoundPlan, number: int) -> tuple[list[int], list[list[int]]]:
    """Return the sizes that are claimed, and those of each rank's own: half of its share by number, all of one size."""
    n = plan.workers
    size = max(plan.total // (n * number), 1)
    own = [[size] * max(int(0.5 * x / size), 1) for x in plan.samples]
    left = plan.total - sum(map(sum, own))
    whole, rest = divmod(left, size)
    return [size] * whole + [rest] * (rest > 0), own


def shrinking_pieces(plan: RoundPlan, number: int) -> tuple[list[int], list[list[int]]]:
    """Return the same with pieces that shrink: what is left, over 2n, down to a fourth of a usual one."""
    n = plan.workers
    usual = max(plan.total // (n * number), 1)
    least = max(usual // 4, 1)
    count = max(number // 2, 1)
    own = []
    for x in plan.samples:
        base, larger = divmod(max(x // 2, 1), min(count, max(x // 2, 1)))
        own.append([base + 1] * larger + [base] * (min(count, max(x // 2, 1)) - larger))
    left, claimed = plan.total - sum(map(sum, own)), []
    while left:
        claimed.append(min(max(min(left // (2 * n), usual), least), left))
        left -= claimed[-1]
    return claimed, own


PIECES = {"equal": equal_pieces, "shrinking": shrinking_pieces}
