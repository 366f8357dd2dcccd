"""A mixture that follows whichever predictor is best now: the default where no driver is known.

The members' forecasts and the measurement are taken as logarithms of speeds (so errors are relative, and a mixture of
positive speeds is positive) and weighed by `ExpertWeights`, which states the bound.

Members: memoryless, EMA 0.5, EMA 0.2 and `Reverting`: a grid over how much of the last change is believed, and one
that learns it. With ``drivers``, the last one reads the CPU, and learns how far to follow it.

The prior π is uniform; but where the CPU is known from the start, the member that uses it has 0.95: a change of the CPU
is the one thing that hurts the others much, and comes before anything could be learnt about it.

Rejected, since rates on simulated clusters came within one per cent without them (``benchmarks/results/ablation.md``):
NARX as a member, which is led far away by what it has seldom seen and trains in the background; a forecast that is
carried along by jumps of the CPU alone, told from its scatter, which is better where the CPU jumps every hundred
rounds and worse where it moves often; weights of their own for rounds in which the CPU jumps.

On independent noise the forecast scatters more than that of EMA 0.2 at first, since a random walk is as possible
then, and less from about 50 rounds on (`benchmarks/prediction_synthetic.py` prints by how much). A prior that starts
from EMA 0.2 was tried: on series that do move it forecasts up to a quarter worse, which 240 rounds do not make up for.
A slower member (EMA 0.05) makes noise quieter and costs 3 % where levels change.

Cost: the members' (each predicts once more inside ``update``), and O(K).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import mul
from typing import Any, ClassVar

from hvd_hetero.prediction.base import Predictor
from hvd_hetero.prediction.ema import EMA
from hvd_hetero.prediction.memoryless import Memoryless
from hvd_hetero.prediction.mixture.expert_weights import SHARE, ExpertWeights
from hvd_hetero.prediction.mixture.reverting import Reverting

_TRUST = 0.95  # what members that use drivers share


class Mixture(Predictor):
    """Predicts by the weighted geometric mean of its members.

    ``drivers`` lets `Reverting` read the CPU; ``members`` replaces them all; ``share`` is α, 0 for the best of all.
    """

    name = "mixture"
    version: ClassVar[int] = 5

    def __init__(
        self,
        members: Sequence[Predictor] | None = None,
        *,
        drivers: bool = False,
        share: float = SHARE,
    ) -> None:
        super().__init__()
        if not 0.0 <= share < 1.0:
            raise ValueError(f"share: must be in [0, 1), 0 for the best member of all time, got {share!r}")
        if members is not None and drivers:
            raise ValueError("drivers: chooses among the default members, so it cannot be given together with members")
        if members is None:
            members = (Memoryless(), EMA(0.5), Reverting(drivers=drivers), EMA(0.2))
        self.members = tuple(members)
        if not self.members or any(not isinstance(m, Predictor) for m in self.members):
            raise ValueError(f"members: must be one predictor or more, got {members!r}")
        if len({id(m) for m in self.members}) < len(self.members):
            raise ValueError("members: must be different objects, since each holds its own history")
        self.uses_drivers = any(m.uses_drivers for m in self.members)
        self.experts = ExpertWeights(_prior(self.members, 0.0), float(share))
        self._said: list[float] | None = None

    @property
    def weights(self) -> tuple[float, ...]:
        """What each member counts for in the next forecast; they sum to 1."""
        return self.experts.weights

    def _observe(self, speed: float, cpu: float, memory: float) -> None:
        if self.rounds == 0:
            trust = 0.0 if math.isnan(cpu) else _TRUST
            self.experts = ExpertWeights(_prior(self.members, trust), self.experts.share)
        else:
            self.experts.learn(self._logs(cpu, memory), math.log(speed))
        for member in self.members:
            member.update(speed, cpu, memory)
        self._said = None

    def _forecast(self, cpu: float, memory: float) -> float:
        return math.exp(sum(map(mul, self.weights, self._logs(cpu, memory))))

    def _logs(self, cpu: float, memory: float) -> list[float]:
        """Logarithms of the members' forecasts: asked for twice a round, and the same where drivers do not matter."""
        if self._said is None or self.uses_drivers:
            self._said = [math.log(m.predict(cpu, memory)) for m in self.members]
        return self._said

    def _state(self) -> dict[str, Any]:
        return {
            "members": [member.state_dict() for member in self.members],
            "experts": self.experts.state(),
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        saved = [member["predictor"] for member in state["members"]]
        mine = [member.name for member in self.members]
        if saved != mine:
            raise ValueError(
                f"state: members must be {mine}, got {saved}; build the mixture with the members it was saved with"
            )
        experts = ExpertWeights(state["experts"]["prior"], self.experts.share)
        experts.restore(state["experts"])
        kept = [member.state_dict() for member in self.members]
        try:
            for member, one in zip(self.members, state["members"], strict=True):
                member.load_state_dict(one)
        except Exception:
            for member, one in zip(self.members, kept, strict=True):
                member.load_state_dict(one)
            raise
        self.experts, self._said = experts, None


def _prior(members: Sequence[Predictor], trust: float) -> tuple[float, ...]:
    """Uniform, but for a share that goes to members that use drivers, if there are such and others."""
    users = sum(m.uses_drivers for m in members)
    others = len(members) - users
    if trust == 0.0 or 0 in (users, others):
        return (1.0 / len(members),) * len(members)
    return tuple(trust / users if m.uses_drivers else (1.0 - trust) / others for m in members)
