"""From the name of a scheme to the scheme."""

from __future__ import annotations

import difflib
import importlib

from hvd_hetero.policies.policy import Policy

# The class of each scheme that needs no argument. Static allocation has none: its ratio has no sensible default.
_BY_NAME = {
    "bsp": "BSP",
    "lb-bsp": "LBBSP",
    "self-adaptive": "SelfAdaptive",
    "non-blocking": "NonBlocking",
    "lb-non-blocking": "LBNonBlocking",
    "elastic-bsp": "ElasticBSP",
}


def policy_class(name: str) -> type[Policy]:
    """Return the class of the scheme of that name, or of any policy."""
    named: type[Policy] = getattr(importlib.import_module(__package__), _BY_NAME.get(name, "Policy"))
    return named


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
        return policy_class(policy)()
    if policy == "static":
        raise ValueError("policy 'static' needs its weights; write StaticAllocation([3, 7]) with one number per rank")
    near = difflib.get_close_matches(policy.lower().replace("_", "-"), _BY_NAME, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"policy {policy!r} is not known; {hint}known names: {', '.join(sorted(_BY_NAME))}")
