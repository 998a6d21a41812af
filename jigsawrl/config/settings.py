"""The settings of a run. What `RunConfig` accepts can be run, as far as values alone can tell."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator

from jigsawrl.config import text
from jigsawrl.config.combinations import problems
from jigsawrl.config.defaults import MAX_TOKENS, default_max_tokens
from jigsawrl.config.fields import (
    Count,
    Date,
    Distinct,
    Flag,
    Fraction,
    Name,
    NotNegative,
    Place,
    Positive,
    Settings,
    Text,
    Whole,
    at_least,
    at_most,
    refuse,
)
from jigsawrl.config.tasks import TaskConfig
from jigsawrl.pipeline.algorithms import (
    Advantage,
    Aggregation,
    KLEstimator,
    Loss,
    OldLogprobs,
    default_aggregation,
    default_clip,
)

Beta = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, lt=1)]
LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class TinyConfig(Settings):
    """Shape of the character-level model that is built on the spot, and its supervised warm-up."""

    layers: Annotated[Count, at_most(256)] = 2
    """Decoder layers."""
    hidden: Annotated[Count, at_most(16_384)] = 128
    """Width of the residual stream."""
    heads: Annotated[Count, at_most(1024)] = 4
    """Attention heads."""
    kv_heads: Annotated[Count, at_most(1024)] = 2
    """Key-value heads, shared by the attention heads."""
    warmup_steps: Whole = 300
    """Supervised steps on the task's demonstrations before RL starts."""
    warmup_noise: Fraction = 0.6
    """Share of the demonstrations that are wrong, so that RL has something to learn."""


class LoraConfig(Settings):
    """Low-rank adapters, trained instead of the whole model."""

    rank: Annotated[Count, at_most(65_536)] = 8
    """Rank of every adapter."""
    alpha: Positive = 16.0
    """Adapters are scaled by alpha / rank."""
    targets: Annotated[tuple[LoraTarget, ...], Field(min_length=1), Distinct] = get_args(LoraTarget)
    """Matrices that get an adapter."""
    path: Place | None = None
    """Folder of a PEFT adapter to start from; null: a fresh one."""


class ModelConfig(Settings):
    """The model to train."""

    path: Place = "tiny"
    """A Hugging Face folder, or `tiny`: a small model built on the spot."""
    tiny: Annotated[TinyConfig | None, Field(validate_default=True)] = None
    """Settings of the tiny model; only with path: tiny."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights; auto: float32 on a CPU, bfloat16 on a GPU."""
    lora: LoraConfig | None = None
    """Train adapters; null: train all weights."""
    gradient_checkpointing: Flag = False
    """Recompute activations in the backward pass: less memory, more time."""
    trust_remote_code: Flag = False
    """Allow code from the model folder to run."""

    @field_validator("tiny")
    @classmethod
    def _tiny_only_when_tiny(cls, tiny: TinyConfig | None, info: ValidationInfo) -> TinyConfig | None:
        path = info.data.get("path")
        if path == "tiny":
            return tiny or TinyConfig()
        if path is not None and tiny is not None:
            raise refuse(f"goes only with model.path tiny, and that is {path!r}; remove model.tiny")
        return tiny


class RolloutConfig(Settings):
    """How trajectories are generated."""

    backend: Literal["jigsaw", "vllm"] = "jigsaw"
    """Engine: the package's own, or vLLM (an extra)."""
    prompts_per_step: Count = 16
    """Prompts of one step."""
    samples: Count = 8
    """Trajectories per prompt."""
    max_tokens: Count = MAX_TOKENS
    """Generated tokens, all turns together; null: 512, or what the context has room for; for short tasks 64."""
    max_prompt_tokens: Count = 512
    """Longer prompts are dropped at the start, and counted."""
    date: Date | None = None
    """The date that a chat template writes as today's; null: the day on which the run started, local time."""
    temperature: Annotated[Positive, at_least(1e-6)] = 1.0
    """Softmax temperature of the sampling."""
    top_p: Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0, le=1)] = 1.0
    """Sample from the smallest set of tokens with this probability; 1: off."""
    top_k: Whole = 0
    """Sample from this many best tokens; 0: off."""
    min_p: Fraction = 0.0
    """Drop tokens less probable than this share of the best one; 0: off."""
    stop: tuple[Text, ...] = ()
    """Strings that end a generation."""
    stop_token_ids: tuple[Whole, ...] = ()
    """Tokens that end a generation, besides the model's own."""
    ignore_eos: Flag = False
    """Go on past the model's own ends, up to max_tokens: for measuring, where lengths must not differ."""
    block_size: Annotated[int, Field(strict=True, ge=1, le=1024)] = 16
    """Tokens in one block of the KV cache."""
    max_num_seqs: Annotated[Count, at_most(65_536)] = 256
    """Sequences decoded at the same time."""
    max_num_batched_tokens: Annotated[Count, at_most(1 << 24)] = 2048
    """Tokens of one forward pass; longer prefills are cut into chunks."""
    kv_cache_tokens: Count | None = None
    """Tokens that the KV cache holds; null: from the batch and the memory there is."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("max_tokens", 0) is None:
            return {key: value for key, value in data.items() if key != "max_tokens"}
        return data


class OverlongConfig(Settings):
    """A growing penalty for trajectories that come close to the limit (DAPO)."""

    buffer: Count = 16
    """Tokens before rollout.max_tokens at which the penalty begins."""
    penalty: Positive = 1.0
    """Penalty at the limit."""


class DynamicSamplingConfig(Settings):
    """Prompts whose samples all got the same reward are replaced by fresh ones (DAPO)."""

    max_rounds: Count = 4
    """Rollouts of one step at most."""


class AlgorithmConfig(Settings):
    """How rewards become gradients: advantage and loss are chosen apart."""

    advantage: Advantage = "grpo"
    """How good each token was."""
    loss: Loss = "ppo"
    """What is minimised."""
    aggregation: Aggregation = Field(default=None, validate_default=True)
    """How tokens are averaged; null: by loss and advantage."""
    clip_low: Fraction = Field(default=None, validate_default=True)
    """The ratio is clipped below 1 - clip_low; null: as usual for the loss."""
    clip_high: Positive = Field(default=None, validate_default=True)
    """The ratio is clipped above 1 + clip_high; null: as usual for the loss."""
    kl_coef: NotNegative = 0.0
    """Weight of the divergence from the starting model; more than 0 keeps a frozen copy of it."""
    kl_estimator: KLEstimator = "k3"
    """How the divergence is estimated."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where it is subtracted."""
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus."""
    gamma: Fraction = 1.0
    """Discount per token."""
    lam: Fraction = 0.95
    """GAE's lambda; gae only."""
    critic_lr: NotNegative = 1.0e-5
    """Learning rate of the critic; gae only."""
    value_clip: Positive | None = 0.2
    """Values move at most this far in one step; null: freely; gae only."""
    value_coef: Positive = 0.5
    """Weight of the critic's loss; gae only."""
    overlong: OverlongConfig | None = None
    """Soft penalty for overlong trajectories; null: off."""
    dynamic_sampling: DynamicSamplingConfig | None = None
    """Replace prompts without a signal; null: off."""
    old_logprobs: OldLogprobs = "recompute"
    """Old log-probs: from the trainer, or those that the engine sampled with."""
    tis_clip: Annotated[float, Field(strict=True, allow_inf_nan=False, ge=1)] | None = None
    """Bound of the importance weight between engine and trainer; null: no correction."""
    epochs: Count = 1
    """Passes over the trajectories of one step."""
    minibatches: Count = 1
    """Optimizer steps of one pass."""

    @property
    def evaluates_old_policy(self) -> bool:
        """Whether old log-probs take a pass of their own: with one update a step, that update's gives them."""
        in_reward = self.kl_coef > 0 and self.kl_in == "reward"
        return self.old_logprobs == "recompute" and (self.epochs * self.minibatches > 1 or in_reward)

    @field_validator("aggregation", "clip_low", "clip_high", mode="before")
    @classmethod
    def _as_usual(cls, value: Any, info: ValidationInfo) -> Any:
        """Null becomes what the algorithm's authors use (where that is itself wrong, any algorithm's)."""
        if value is not None:
            return value
        loss, advantage = info.data.get("loss", "ppo"), info.data.get("advantage", "grpo")
        if info.field_name == "aggregation":
            return default_aggregation(loss, advantage)
        return default_clip(loss)[0 if info.field_name == "clip_low" else 1]


class TrainerConfig(Settings):
    """The optimizer (AdamW) and how a batch is cut."""

    lr: Fraction = 1.0e-6
    """Learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of the two moments."""
    eps: Positive = 1.0e-8
    """Added to the denominator."""
    weight_decay: NotNegative = 0.0
    """Decay of the weights."""
    max_grad_norm: Positive | None = 1.0
    """Gradients are scaled down to this norm; null: never."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up, down to zero at the last step."""
    warmup_steps: Whole = 0
    """Steps in which the learning rate rises from zero."""
    micro_batch_tokens: Count | None = None
    """Tokens of one forward-backward pass, on which the gradient does not depend; null: 4096, on large GPUs more."""


class CheckpointConfig(Settings):
    """When the state of the run is saved."""

    every: Count = 10
    """Steps between checkpoints."""
    keep: Count = 2
    """Newest checkpoints that are kept."""


class WandbConfig(Settings):
    """Where Weights & Biases puts the metrics."""

    project: Text
    """Name of the project."""


class TelemetryConfig(Settings):
    """Where metrics go besides metrics.jsonl."""

    tensorboard: Flag = True
    """Write TensorBoard files."""
    wandb: WandbConfig | None = None
    """Send metrics to Weights & Biases; null: off."""


class RunConfig(Settings):
    """One run: a model, a task, an algorithm, a budget."""

    name: Name = "run"
    """Name of the pipeline; keys the sampling. By default the name of the run file."""
    seed: Annotated[int, Field(strict=True, ge=0, le=2**32 - 1)] = 0
    """Everything random follows from it."""
    steps: Count = 100
    """Steps to train."""
    deterministic: Flag = False
    """Batch-invariant kernels, one CPU thread: the same tokens and losses with the same number of ranks."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto: on a GPU where there is one."""
    workers: Annotated[Count, at_most(4096)] = 1
    """Cores or GPUs to use, with a data-parallel process on each."""
    ranks: Annotated[Count, at_most(4096)] | None = None
    """Data-parallel ranks, on which results depend; null: as many as workers when the run begins, and so for good."""
    threads: Annotated[int, Field(strict=True, ge=1, le=1024)] | None = None
    """CPU threads per worker; null: cores / workers, fewer on a busy machine; with deterministic: true always one."""
    model: ModelConfig = ModelConfig()
    """The model to train."""
    task: TaskConfig
    """What it learns."""
    rollout: RolloutConfig = RolloutConfig()
    """How trajectories are generated."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """How rewards become gradients."""
    trainer: TrainerConfig = TrainerConfig()
    """The optimizer."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When the state is saved."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """Where metrics go."""

    @model_validator(mode="after")
    def _max_tokens_by_default(self) -> RunConfig:
        """Filled in where the run file has none; `model_fields_set` goes on to say that it has none."""
        rollout = self.rollout
        if "max_tokens" not in rollout.model_fields_set:
            values = {**dict(rollout), "max_tokens": default_max_tokens(self)}
            filled = RolloutConfig.model_construct(rollout.model_fields_set, **values)
            object.__setattr__(self, "rollout", filled)
        return self

    @model_validator(mode="after")
    def _possible(self) -> RunConfig:
        if found := problems(self):
            raise refuse("\n".join(found))
        return self

    @property
    def gang(self) -> int:
        """Ranks that sum their gradients; on fewer workers they take turns."""
        return self.ranks or self.workers

    @property
    def thread_limit(self) -> int | None:
        """CPU threads of a worker, if their number is fixed. Sums cut for more threads round differently."""
        return 1 if self.deterministic else self.threads

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, mappings and scalars, all defaults filled in."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """A run file that gives an equal config when it is loaded."""
        return text.dump(self.to_dict())
