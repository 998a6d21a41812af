"""vLLM's side of `engine_vs_transformers`, run by the Python of a venv that has vLLM.

The first line of stdin says what to generate; for it and for each further line it is generated once, and a line of
JSON on stdout tells how many seconds that took.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to stdout
    work = json.loads(sys.stdin.readline())
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"

    import vllm

    engine = vllm.LLM(
        work["model"],
        dtype="float32",
        max_model_len=work["max_model_len"],
        max_num_seqs=256,
        enable_prefix_caching=False,
        enforce_eager=True,
    )
    params = [
        vllm.SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False)
        for length in work["lengths"]
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in work["prompts"]]

    def run() -> dict[str, float]:
        started = time.perf_counter()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "tokens": sum(len(o.outputs[0].token_ids) for o in outputs)}

    print(json.dumps(run()), file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps(run()), file=answers, flush=True)


if __name__ == "__main__":
    main()
