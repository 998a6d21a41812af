"""What those on a worker count as when it is divided."""

from __future__ import annotations

from graph.planning import WORKER

from jigsawrl.graph.interference import H200
from jigsawrl.graph.lanes import Lane, Lanes, Segment
from jigsawrl.policies.shares import best, lasting, shared
from jigsawrl.policies.state import Action, State


def test_prompts_that_are_read_in_no_time_count_as_the_decode_that_follows():
    prompts, decode, tail = Segment("prefill", 0.01), Segment("decode", 3.0), Segment("tail", 2.0)
    assert lasting([prompts, decode, tail]) == "bulk"
    assert lasting([Segment("prefill", 1.0), decode]) == "prefill"
    assert lasting([Segment("decode", 0.1), tail]) == "tail"
    assert lasting([Segment("tail", 0.1), Segment("tool", 5.0), decode]) == "bulk"
    assert lasting([Segment("grad", 0.1), Segment("optim", 0.01), Segment("sync", 1.0)]) == "compute"
    assert lasting([Segment("reward", 1.0)]) == "compute"


def test_a_training_has_the_same_share_while_somebody_beside_it_reads_prompts():
    """It would have half of it for a moment, and move twice."""

    def divided(*, reading: bool) -> list[Action]:
        lanes = Lanes(H200, 1)
        rollout = Segment("prefill", 0.01), Segment("decode", 3.0), Segment("tail", 2.0)
        lanes.add(Lane(1, "a", 1, "training", (0,), 1.0, (Segment("grad", 5.0),)))
        lanes.add(Lane(2, "b", 1, "rollout", (0,), 1.0, rollout[1:]))
        lanes.add(Lane(3, "c", 1, "rollout", (0,), 1.0, rollout if reading else rollout[1:]))
        state = State(0.0, lanes, {}, WORKER.device_bytes, [0.0], [True], {})
        return shared(state, [], best(state))

    assert divided(reading=True) == divided(reading=False)
    assert len(divided(reading=True)) == 3
