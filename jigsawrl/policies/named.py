"""Policies by name."""

from __future__ import annotations

from dataclasses import replace

from jigsawrl.phases.turns import OrderName
from jigsawrl.policies.concurrent import Concurrent
from jigsawrl.policies.greedy import Greedy
from jigsawrl.policies.jigsaw import Jigsaw
from jigsawrl.policies.rlix import Rlix
from jigsawrl.policies.rollmux import RollMux
from jigsawrl.policies.rollout_mux import RolloutMux
from jigsawrl.policies.serial import Serial
from jigsawrl.policies.state import Policy

POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (Serial(), Concurrent(), RolloutMux(), RollMux(), Rlix(), Greedy(), Jigsaw())
}


def reordered(policy: Policy, order: OrderName) -> Policy:
    """The policy when pipelines take turns in another order; the same one where it has no such order."""
    return replace(policy, order=order) if isinstance(policy, RollMux) else policy


def policy_of(name: str, order: OrderName | None) -> Policy:
    """The policy of a run file; its order is that in which pipelines take turns under rollmux."""
    return RollMux(order) if name == "rollmux" and order else POLICIES[name]
