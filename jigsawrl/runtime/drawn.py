"""What the engines have drawn in a step, in the node's store: whoever dies, it need not be drawn again.

    NAME/drawn     samples that ended, some in each version
    NAME/paused    those under way, with the tokens that they had a moment ago

A pipeline that comes back asks for the same samples again. What ended is answered from here and what was under way
goes on from where it was; environments see the same actions again. A sample is known by its key and its prompt, so
where an environment answers differently this time, its episode is simply drawn anew. So is whatever cannot be read.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from jigsawrl.engine.types import Generated, Request, SampleKey, SampleOutput
from jigsawrl.runtime.samples import DIGEST_BYTES, Piece, packed, unpacked
from jigsawrl.store.store import Store
from jigsawrl.telemetry.events import now

SOONEST_S = 0.25
"""Between two times that something is put: what is lost with less is quickly drawn again."""
PART = 0.02
"""Of a rollout's time so far, likewise: so there are few versions, however long it takes."""
MOST_VERSIONS = 10_000


class Drawn:
    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self.ended = f"{name}/drawn"
        self.paused = f"{name}/paused"
        self.waiting: list[Piece] = []
        """Ended, and not in the store yet."""
        self.known: dict[tuple[SampleKey, bytes], Piece] = {}
        versions = store.versions(self.ended)
        for version in versions:
            self._take(self.ended, version)
        self._take(self.paused, None)
        self.version = max(versions, default=-1) + 1
        self.began = self.put = now()
        self.is_used = bool(self.known)
        self.vocabulary: int | None = None
        """How many tokens the model has, once it is known."""

    def _take(self, name: str, version: int | None) -> None:
        entry = self.store.get(name, version)
        for piece in unpacked(entry.tensors, entry.meta) if entry is not None else ():
            self.known.setdefault((piece.key, piece.prompt), piece)

    def begin(self) -> None:
        """Of a rollout."""
        self.began = self.put = now()

    def answered(self, request: Request) -> tuple[list[SampleOutput], list[Request]]:
        """What is known of its samples already, and what is still to be asked for."""
        if not self.known:
            return [], [request]
        prompt = digest(request.prompt_token_ids)
        outputs: list[SampleOutput] = []
        requests: list[Request] = []
        unknown: list[SampleKey] = []
        for key in request.keys:
            piece = self.known.pop((key, prompt), None)
            if piece is None or not self._may_be(piece.generated, request):
                unknown.append(key)
            elif piece.finish_reason == "abort":
                requests.append(
                    Request(
                        request.request_id, request.prompt_token_ids, request.params, [key], piece.generated
                    )
                )
            else:
                outputs.append(SampleOutput(request.request_id, key, piece.generated, piece.finish_reason))
        if unknown:
            requests.append(
                Request(
                    request.request_id, request.prompt_token_ids, request.params, unknown, request.partial
                )
            )
        return outputs, requests

    def _may_be(self, generated: Generated, request: Request) -> bool:
        """Whether an engine could have drawn that."""
        tokens = generated.token_ids
        known = self.vocabulary is None or max(tokens, default=0) < self.vocabulary
        return known and 0 < len(tokens) <= request.params.max_tokens

    def note(self, request: Request, output: SampleOutput) -> None:
        """A sample has ended."""
        self.waiting.append(piece_of(request, output))

    def is_due(self) -> bool:
        return now() - self.put > max(SOONEST_S, PART * (now() - self.began))

    def keep(self, running: Sequence[tuple[Request, SampleOutput]]) -> None:
        """Puts what ended, and in the place of what was under way what is so now.

        Engines speak from time to time, and their last word may be about an episode's turn before the one that is
        asked for now.
        """
        running = [each for each in running if each[0].request_id == each[1].request_id]
        if self.waiting:
            self._put(self.ended, self.waiting, keep=MOST_VERSIONS)
            self.version += 1
            self.waiting = []
            self.is_used = True
        if running:
            pieces = [piece_of(*each) for each in sorted(running, key=drawn_tokens)]
            furthest = {piece.key: piece for piece in pieces}  # who moved is known to two engines
            self._put(self.paused, list(furthest.values()))
            self.is_used = True
        self.put = now()

    def _put(self, name: str, pieces: Sequence[Piece], keep: int = 1) -> None:
        self.store.put(name, self.version, *packed(pieces), keep=keep, checked=True)

    def forget(self) -> None:
        """The step is over, and what came of it is kept elsewhere."""
        self.waiting = []
        self.known.clear()
        if self.is_used:
            self.store.drop(self.ended)
            self.store.drop(self.paused)
            self.is_used = False


def drawn_tokens(sample: tuple[Request, SampleOutput]) -> int:
    return len(sample[1].generated.token_ids)


def piece_of(request: Request, output: SampleOutput) -> Piece:
    return Piece(output.key, digest(request.prompt_token_ids), output.generated, output.finish_reason)


def digest(tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("q", tokens).tobytes(), digest_size=DIGEST_BYTES).digest()
