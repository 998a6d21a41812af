"""The Python API: your data, your reward, a trained model. Run: python examples/own_data/train.py"""

import jigsawrl


def reward(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.strip() == ground_truth)


if __name__ == "__main__":
    result = jigsawrl.train(model="runs/arithmetic/model", task="products.jsonl", reward=reward, steps=50)
    print(result.model)
