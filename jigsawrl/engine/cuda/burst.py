"""Some decode steps in a row, each launched before the one before it is read.

    launch 1 | launch 2, read 1 | launch 3, read 2 | ... | read n

So the host works while the device does. What it learns late is that a sample has ended: it is then one step on, and
that step's token is thrown away. The cache takes no harm: the blocks it gives back are taken after the burst.

Between two bursts the device waits for the host, for about as long as a step of a small model takes. So a burst lasts
for a few rounds of steps where whoever asked for it looks after everything else between them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from jigsawrl.engine.scheduler import Scheduler
from jigsawrl.engine.sequence import Owner, Sequence
from jigsawrl.engine.types import Pass
from jigsawrl.telemetry.events import now

if TYPE_CHECKING:
    from jigsawrl.engine.cuda.decoder import Decoder, Launched

ROUND = 16
"""Steps after which it is asked who wants something else, and contexts are cut anew."""
LONGEST = 4 * ROUND
"""Steps until the scheduler is asked again, at most."""


class Burst:
    """One run of steps over the sequences that decode; every one of them has a block for its next token."""

    def __init__(self, decoder: Decoder, scheduler: Scheduler, ended: Callable[[Sequence], None]) -> None:
        self.decoder = decoder
        self.scheduler = scheduler
        self.ended = ended
        """Told of every sample that has come to its end."""
        self.in_flight: deque[Launched] = deque()
        self.any_ended = False
        self.complete = False
        """Whether someone has no more samples, and waits for the last of them."""
        self.read_at = now()

    def run(
        self, sequences: list[Sequence], steps: int, hurried: Callable[[], bool], look: Callable[[], bool]
    ) -> None:
        """Moves the sequences up to `steps` tokens on, until others could start, an owner has all its samples,
        someone is in a hurry, or `look`, which is called between rounds, says so."""
        steps = self._grow(sequences, steps)
        self.decoder.enter(sequences)
        for number in range(steps):
            if number > 0 and (
                hurried() or self.complete or (self.any_ended and self.scheduler.first_waiting())
            ):
                break
            if number > 0 and number % ROUND == 0 and look():
                break
            sequences = [s for s in sequences if self._goes_on(s)]
            if not sequences:
                break
            if number % ROUND == 0:
                cut = self.decoder.cut(sequences, len(self.in_flight))
            self.in_flight.append(self.decoder.launch(sequences, len(self.in_flight), cut))
            if len(self.in_flight) > 1:
                self._read()
        while self.in_flight:
            self._read()

    def _grow(self, sequences: list[Sequence], steps: int) -> int:
        """Gives the sequences blocks for as many steps as there are blocks for, and returns how many.

        More than those of a round are taken only where nobody waits for them, and as many are left.
        """
        manager = self.scheduler.blocks
        if steps > ROUND and self.scheduler.first_waiting() is not None:
            steps = ROUND
        while steps > 1 and sum(self._missing(s, steps) for s in sequences) > (
            len(manager.free) if steps <= ROUND else len(manager.free) // 2
        ):
            steps //= 2
        for sequence in sequences:
            manager.grow(sequence, sequence.computed + self._most(sequence, steps))
        return steps

    def _most(self, sequence: Sequence, steps: int) -> int:
        return min(steps, sequence.params.max_tokens - len(sequence.generated.token_ids))

    def _missing(self, sequence: Sequence, steps: int) -> int:
        needed = self.scheduler.blocks.blocks_for(sequence.computed + self._most(sequence, steps))
        return max(0, needed - len(sequence.blocks))

    def _goes_on(self, sequence: Sequence) -> bool:
        """Every sequence that goes on is in all steps in flight, so their number counts for each."""
        drawn = len(sequence.generated.token_ids) + len(self.in_flight)
        return sequence.finish_reason is None and drawn < sequence.params.max_tokens

    def _read(self) -> None:
        step = self.in_flight.popleft()
        tokens, logprobs = step.read()
        manager = self.scheduler.blocks
        alive: Counter[Owner] = Counter()
        for sequence, token, logprob in zip(step.sequences, tokens, logprobs, strict=True):
            if sequence.finish_reason is not None:
                continue
            owner, before = sequence.owner, sequence.computed
            alive[owner] += 1
            sequence.computed += 1
            if sequence.computed % manager.block_size == 0:
                manager.remember(sequence, before)
            sequence.append(token, logprob, owner.version)
            sequence.check_finished(owner.eos)
            if sequence.finish_reason is not None:
                self.any_ended = True
                self.scheduler.stop(sequence)
                self.ended(sequence)
                self.complete |= not self.scheduler.has_any(owner)
        read_at = now()
        for owner, count in alive.items():
            if owner.on_pass is not None:
                owner.on_pass(Pass(self.read_at, read_at, 0, count))
        self.read_at = read_at
