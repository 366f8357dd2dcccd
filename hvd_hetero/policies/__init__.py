"""The policies, one per file. Each is a choice of what every rank does in a round."""

from typing import TYPE_CHECKING

from hvd_hetero.lazy import lazily

if TYPE_CHECKING:
    from hvd_hetero.policies.bsp import BSP
    from hvd_hetero.policies.elastic_bsp import ElasticBSP
    from hvd_hetero.policies.goodput import Goodput
    from hvd_hetero.policies.lb_bsp import LBBSP
    from hvd_hetero.policies.lb_non_blocking import LBNonBlocking
    from hvd_hetero.policies.non_blocking import NonBlocking
    from hvd_hetero.policies.policy import Policy
    from hvd_hetero.policies.policy_names import resolve_policy
    from hvd_hetero.policies.self_adaptive import SelfAdaptive
    from hvd_hetero.policies.static_allocation import StaticAllocation

__all__ = [
    "BSP",
    "LBBSP",
    "ElasticBSP",
    "Goodput",
    "LBNonBlocking",
    "NonBlocking",
    "Policy",
    "SelfAdaptive",
    "StaticAllocation",
    "resolve_policy",
]

__getattr__ = lazily(__name__)
