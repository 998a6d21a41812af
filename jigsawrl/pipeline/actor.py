"""A pipeline's engine and trainer on one worker.

An actor knows its share of the work and nothing of the other workers, except that gradients are summed over all of
them where there are several. Its methods are the sub-stages of a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from jigsawrl.errors import JigsawError
from jigsawrl.graph.hardware import DEVICE_PART
from jigsawrl.graph.memory import tokens_at_once
from jigsawrl.model.folder import export_adapter, export_model, load_adapter, load_model
from jigsawrl.model.lora import without_lora
from jigsawrl.model.transformer import Transformer
from jigsawrl.pipeline import kept
from jigsawrl.pipeline.generating import Generating, awake
from jigsawrl.pipeline.losses import LossInputs, LossSettings, policy_loss, value_loss
from jigsawrl.pipeline.residency import Residency, Swapped
from jigsawrl.store.memory import spare_others
from jigsawrl.store.store import Store
from jigsawrl.trainer.batch import Batch, onto
from jigsawrl.trainer.critic import Critic
from jigsawrl.trainer.logprobs import token_logprobs
from jigsawrl.trainer.optimizer import OptimizerSettings
from jigsawrl.trainer.trainer import Metrics, Trainer, evaluate, policy_logprobs, trained_tokens

if TYPE_CHECKING:
    from jigsawrl.config import RunConfig


class Actor(Generating):
    """`base` is the model folder that training starts from (and that a reference stays at)."""

    def __init__(self, config: RunConfig, base: Path, device: str, worker: int = 0) -> None:
        super().__init__(config, base, device, worker)
        self.model.gradient_checkpointing = config.model.gradient_checkpointing
        self.reference = self._reference()
        updates = config.steps * config.algorithm.epochs * config.algorithm.minibatches
        settings = optimizer_settings(config, config.trainer.lr, updates)
        self.micro_batch_tokens = config.trainer.micro_batch_tokens or self._tokens_at_once()
        self.trainer = Trainer(self.model, settings, self.micro_batch_tokens)
        self.critic, self.critic_trainer = self._critic(updates)
        self.engine, self.room = self._engine()
        self.residency = self._residency()

    # What is set up once

    def _tokens_at_once(self) -> int:
        spec, gpu = self.model.spec, None
        if self.device.type == "cuda":
            gpu = DEVICE_PART * torch.cuda.get_device_properties(self.device).total_memory
        kept = not self.config.model.gradient_checkpointing
        return tokens_at_once(spec.layers, spec.hidden_size, kept, gpu)

    def _reference(self) -> Transformer | None:
        """A frozen copy of the start; with adapters the base without them is one already."""
        config = self.config
        if config.algorithm.kl_coef == 0 or (config.model.lora and config.model.lora.path is None):
            return None
        reference = load_model(self.base, self.dtype, self.device)
        if config.model.lora and config.model.lora.path:
            load_adapter(reference, Path(config.model.lora.path))
        return reference.requires_grad_(False)

    def _critic(self, updates: int) -> tuple[Critic | None, Trainer | None]:
        if self.config.algorithm.advantage != "gae":
            return None, None
        critic = Critic(load_model(self.base, self.dtype, self.device))
        critic.transformer.gradient_checkpointing = self.config.model.gradient_checkpointing
        settings = optimizer_settings(self.config, self.config.algorithm.critic_lr, updates)
        return critic, Trainer(critic.transformer, settings, self.micro_batch_tokens, critic)

    def _residency(self) -> Residency:
        modules: dict[str, nn.Module] = {"policy": self.model}
        optimizers = {"policy": self.trainer.optimizer}
        if self.critic is not None and self.critic_trainer is not None:
            modules["critic"], optimizers["critic"] = self.critic, self.critic_trainer.optimizer
        if self.reference is not None:
            modules["reference"] = self.reference
        return Residency(modules, optimizers, self.device, first=self.worker == 0)

    # Log-probs and values of a batch

    @awake
    def logprobs(self, batch: Batch) -> Tensor:
        return self._evaluate(self.model, batch, policy_logprobs(self.model, self._temperature))

    @awake
    def reference_logprobs(self, batch: Batch) -> Tensor:
        if self.reference is not None:
            read = policy_logprobs(self.reference, self._temperature)
            return self._evaluate(self.reference, batch, read)
        with without_lora(self.model):
            return self.logprobs(batch)

    @awake
    def values(self, batch: Batch) -> Tensor:
        assert self.critic is not None
        return self._evaluate(self.critic.transformer, batch, self.critic.read)

    def _evaluate(self, model: Transformer, batch: Batch, read: Callable[[Batch, Tensor], Tensor]) -> Tensor:
        return evaluate(model, batch, self.micro_batch_tokens, read, self.between)

    @property
    def _temperature(self) -> float:
        return self.config.rollout.temperature

    # Update

    @awake
    def forward_backward(self, batch: Batch) -> dict[str, float]:
        """Gradients of the policy; `batch.values` holds the weights, the advantages and what the loss needs."""
        algorithm = self.config.algorithm
        in_loss = algorithm.kl_in == "loss"
        settings = LossSettings(
            loss=algorithm.loss,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            kl_coef=algorithm.kl_coef if in_loss else 0.0,
            kl_estimator=algorithm.kl_estimator,
            entropy_coef=algorithm.entropy_coef,
            tis_clip=algorithm.tis_clip,
            old_logprobs=algorithm.old_logprobs,
        )

        def objective(micro: Batch, hidden: Tensor) -> tuple[Tensor, Metrics]:
            values = {name: onto(hidden.device, value) for name, value in micro.values.items()}
            logprobs, entropy = token_logprobs(
                hidden,
                self.model.head,
                onto(hidden.device, trained_tokens(micro)),
                self._temperature,
                entropy_gradient=algorithm.entropy_coef > 0,
            )
            inputs = LossInputs(
                logprobs=logprobs,
                # With one update a step the old policy is the current one.
                old_logprobs=values.get("old_logprobs", logprobs.detach()),
                advantages=values["advantages"],
                weights=values["weights"],
                sequence=onto(hidden.device, micro.sequence),
                ref_logprobs=values.get("ref_logprobs"),
                entropy=entropy,
                engine_logprobs=values["engine_logprobs"],
            )
            return policy_loss(inputs, settings)

        return self.trainer.forward_backward(batch, objective, self.between)

    @awake
    def critic_forward_backward(self, batch: Batch) -> dict[str, float]:
        assert self.critic is not None
        assert self.critic_trainer is not None
        critic, algorithm = self.critic, self.config.algorithm

        def objective(micro: Batch, hidden: Tensor) -> tuple[Tensor, Metrics]:
            values = {name: onto(hidden.device, value) for name, value in micro.values.items()}
            loss = value_loss(
                critic.read(micro, hidden),
                values["old_values"],
                values["returns"],
                values["weights"],
                algorithm.value_clip,
            )
            return algorithm.value_coef * loss, {}

        return self.critic_trainer.forward_backward(batch, objective, self.between)

    @awake
    def optim_step(self) -> dict[str, float]:
        return self.trainer.optim_step()

    @awake
    def critic_optim_step(self) -> dict[str, float]:
        assert self.critic_trainer is not None
        return self.critic_trainer.optim_step()

    @awake
    def sync_weights(self, version: int) -> None:
        """The engine samples from the trained weights; its own engine shares them, so nothing is copied."""
        self.engine.update_weights(None, weight_version=version)
        spare_others(self.model.device)

    # State

    @awake
    def save_state(self) -> dict[str, dict[str, Tensor]]:
        state = {"policy": self.trainer.save_state()}
        if self.critic_trainer is not None:
            state["critic"] = self.critic_trainer.save_state()
        return state

    @awake
    def publish(self, store: Path, name: str, step: int, state: dict[str, Any]) -> None:
        """Makes this step the one that `kept.recall` finds in the node's store, where it outlives this process."""
        place = Store.attach(store)
        weights = {key: tensor.detach() for key, tensor in self.trainer.optimizer.parameters.items()}
        kept.publish(place, name, step, weights, self.save_state(), state)
        self.residency.note_published(place, name)

    @awake
    def load_state(self, state: dict[str, dict[str, Tensor]]) -> bool:
        """False, and nothing is changed, where it is not the state of such models."""
        trainers = {"policy": self.trainer}
        if self.critic_trainer is not None:
            trainers["critic"] = self.critic_trainer
        if not all(trainer.optimizer.takes(state.get(part, {})) for part, trainer in trainers.items()):
            return False
        self.residency.forget()
        for part, trainer in trainers.items():
            trainer.load_state(state[part])
        return True

    @awake
    def sleep(self, store: Path, name: str) -> Swapped:
        """Between phases: all state goes to the node's store and its memory, and the cache's, to others."""
        if self.engine.has_unfinished():
            raise RuntimeError("an actor whose engine has samples to finish cannot sleep: abort them first")
        if any(optimizer.has_gradients() for optimizer in self.residency.optimizers.values()):
            raise RuntimeError("an actor with gradients cannot sleep: optim_step first")
        began = time.perf_counter()
        written = self.residency.leave(Store.attach(store), name)
        self.engine.sleep(level=2)
        self.residency.free()
        self.asleep = True
        return Swapped(written, time.perf_counter() - began)

    def wake_up(self, store: Path, name: str) -> Swapped:
        """Undoes `sleep`, bit for bit."""
        if not self.asleep:
            raise RuntimeError("the actor does not sleep")
        began = time.perf_counter()
        read = self.residency.come_back(Store.attach(store), name)
        self.engine.wake_up(["weights"])
        self.engine.update_weights(None, self.engine.version)
        self.engine.wake_up(["kv_cache"])
        self.asleep = False
        return Swapped(read, time.perf_counter() - began)

    @awake
    def export(self, out: Path) -> None:
        """The final model as a Hugging Face folder, and the adapter beside it where there is one."""
        export_model(self.model, self.base, out / "model")
        if self.lora is not None:
            export_adapter(self.model, self.base, *self.lora, out / "adapter")


def optimizer_settings(config: RunConfig, lr: float, updates: int) -> OptimizerSettings:
    trainer = config.trainer
    per_step = config.algorithm.epochs * config.algorithm.minibatches
    return OptimizerSettings(
        lr=lr,
        betas=trainer.betas,
        eps=trainer.eps,
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.max_grad_norm,
        schedule=trainer.schedule,
        warmup_steps=trainer.warmup_steps * per_step,
        total_steps=updates,
    )


def choose_device(config: RunConfig) -> str:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise JigsawError("device: cuda is asked for, but torch sees no GPU; set device: cpu or auto")
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device
