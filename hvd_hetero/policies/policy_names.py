"""From the name of a scheme to the scheme."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from hvd_hetero.policies.bsp import BSP
from hvd_hetero.policies.elastic_bsp import ElasticBSP
from hvd_hetero.policies.lb_bsp import LBBSP
from hvd_hetero.policies.lb_non_blocking import LBNonBlocking
from hvd_hetero.policies.non_blocking import NonBlocking
from hvd_hetero.policies.policy import Policy
from hvd_hetero.policies.self_adaptive import SelfAdaptive
from hvd_hetero.policies.static_allocation import StaticAllocation

__all__ = ["resolve_policy"]

# Schemes that need no argument. Static allocation is not among them: its ratio has no sensible default.
_BY_NAME: dict[str, Callable[[], Policy]] = {
    policy.name: policy for policy in (BSP, LBBSP, SelfAdaptive, NonBlocking, LBNonBlocking, ElasticBSP)
}


def resolve_policy(policy: str | Policy) -> Policy:
    """Return the policy: an object is taken as it is, a name gives that scheme with its defaults."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, type) and issubclass(policy, Policy):
        raise TypeError(
            f"policy must be an object or a name, got the class {policy.__name__}; write {policy.__name__}(…)"
        )
    if not isinstance(policy, str):
        raise TypeError(f"policy must be a name or a Policy object, got {policy!r}")
    if policy in _BY_NAME:
        return _BY_NAME[policy]()
    if policy == StaticAllocation.name:
        raise ValueError("policy 'static' needs its weights; write StaticAllocation([3, 7]) with one number per rank")
    near = difflib.get_close_matches(policy.lower().replace("_", "-"), _BY_NAME, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"policy {policy!r} is not known; {hint}known names: {', '.join(sorted(_BY_NAME))}")
