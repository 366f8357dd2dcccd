"""The registry of policies by name, for trainings, records of runs, and the simulator."""

from __future__ import annotations

import difflib
import importlib

from hvd_hetero.policies.policy import Policy

# Names, because a class in place of its name would import every policy with the first one.
_CLASS_NAMES = {
    "bsp": "BSP",
    "lb-bsp": "LBBSP",
    "self-adaptive": "SelfAdaptive",
    "non-blocking": "NonBlocking",
    "lb-non-blocking": "LBNonBlocking",
    "elastic-bsp": "ElasticBSP",
    "static": "StaticAllocation",
}
POLICY_NAMES = tuple(_CLASS_NAMES)
# A static allocation needs its weights: its ratio has no sensible default.
NAMES_WITHOUT_ARGUMENT = tuple(name for name in POLICY_NAMES if name != "static")


def policy_class(name: str) -> type[Policy]:
    """Return the class of the policy of that name; the base class if there is none, as for a user's own policy."""
    named: type[Policy] = getattr(importlib.import_module(__package__), _CLASS_NAMES.get(name, "Policy"))
    return named


def resolve_policy(policy: str | Policy) -> Policy:
    """Return a policy object as it is, and for a name a new policy with its defaults."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, type) and issubclass(policy, Policy):
        raise TypeError(
            f"policy must be an object or a name, got the class {policy.__name__}; write {policy.__name__}(…)"
        )
    if not isinstance(policy, str):
        raise TypeError(f"policy must be a name or a Policy object, got {policy!r}; write policy='lb-bsp'")
    if policy in NAMES_WITHOUT_ARGUMENT:
        return policy_class(policy)()
    if policy == "static":
        raise ValueError("policy 'static' needs its weights; write StaticAllocation([3, 7]) with one number per rank")
    near = difflib.get_close_matches(policy.lower().replace("_", "-"), NAMES_WITHOUT_ARGUMENT, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"policy {policy!r} is not known; {hint}known names: {', '.join(sorted(NAMES_WITHOUT_ARGUMENT))}")
