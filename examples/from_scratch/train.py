"""Your rows, your reward, a model that learns, in about a minute on a CPU: python examples/from_scratch/train.py"""

import jigsawrl


def reward(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.strip() == ground_truth)


if __name__ == "__main__":
    result = jigsawrl.train(
        model={"path": "tiny", "tiny": {"hidden": 64, "warmup_steps": 0}},  # random weights
        task="examples/from_scratch/sums.jsonl",  # rows such as {"prompt": "3+4=", "answer": "7"}
        reward=reward,
        rollout={"prompts_per_step": 55, "samples": 16, "max_tokens": 2, "stop": list("0123456789")},
        algorithm={"entropy_coef": 0.01},
        trainer={"lr": 2e-3},
        steps=100,
        threads=1,
    )
    print(f"reward {result.summary.reward_first:.2f} -> {result.summary.reward_last:.2f}: {result.model}")
