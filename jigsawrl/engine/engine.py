"""The engine of one pipeline: requests in, samples out; its verbs are vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from jigsawrl.engine.shared import Member, SharedEngine
from jigsawrl.engine.types import Pass, Request, SampleKey, SampleOutput, Tokenizer
from jigsawrl.model.folder import load_weights
from jigsawrl.model.transformer import Transformer


class Engine(Member):
    """The only member of a shared engine: the base is its own, and its weights may change and sleep."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        deterministic: bool = False,
        on_pass: Callable[[Pass], None] | None = None,
    ) -> None:
        shared = SharedEngine(
            model,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            deterministic=deterministic,
        )
        super().__init__(shared, "", model, tokenizer, on_pass)
        self.blocks, self.scheduler, self.runner = shared.blocks, shared.scheduler, shared.runner

    def generate(self, requests: Iterable[Request]) -> list[SampleOutput]:
        """Runs requests to their end; outputs in the order of the requests and their keys."""
        order: dict[tuple[str, SampleKey], int] = {}
        for request in requests:
            self.add_request(request)
            for key in request.keys:
                order[request.request_id, key] = len(order)
        outputs: list[SampleOutput] = []
        while self.has_unfinished():
            outputs += self.step()
        return sorted(outputs, key=lambda output: order[output.request_id, output.key])

    def _load(self, weights: Iterable[tuple[str, Tensor]], weight_version: int) -> None:
        """The whole model under Hugging Face's names."""
        load_weights(self.model, weights, f"weight version {weight_version}")

    def _own_modules(self) -> list[nn.Module]:
        return [self.model]
