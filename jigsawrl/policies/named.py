"""Policies by name."""

from __future__ import annotations

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
