"""The reward of `pipeline_vs_trl`, in the signature that TRL and jigsawrl both take. Imports nothing."""


def share_of_letters(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """How much of each answer is letters."""
    return [sum(map(str.isalpha, text)) / max(1, len(text)) for text in completions]
