"""One RL pipeline, from prompts to a trained model.

for each step:
    rollout     prompts -> trajectories, rewarded
    log-probs   of the old policy, of the reference, values of the critic, where the algorithm wants them
    advantages
    update      gradients of minibatches, optimizer
    sync        the engine takes the new weights
"""

from __future__ import annotations

import math
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from jigsawrl import durable
from jigsawrl.config.runfolder import gone_if_refused
from jigsawrl.config.started import RESOLVED, as_started
from jigsawrl.errors import JigsawError
from jigsawrl.model.spec import read_spec
from jigsawrl.model.tokenizer import load_tokenizer
from jigsawrl.pipeline.actor import choose_device
from jigsawrl.pipeline.advantages import (
    AdvantageInputs,
    compute_advantages,
    overlong_penalty,
    zero_variance_groups,
)
from jigsawrl.pipeline.execution_env import ExecutionEnv, StandaloneEnv, Stopped
from jigsawrl.pipeline.journal import Journal
from jigsawrl.pipeline.losses import aggregation_weights, kl_estimate, mean_metrics
from jigsawrl.pipeline.minibatches import minibatches
from jigsawrl.pipeline.no_signal import NoSignal
from jigsawrl.pipeline.prompts import PromptSource
from jigsawrl.pipeline.rollout import Rollout, rollout_of
from jigsawrl.pipeline.tasks.data import ignored_columns, names
from jigsawrl.pipeline.trajectory import (
    Trajectory,
    groups_of,
    make_batch,
    of_first_prompts,
    rewarded,
    rewards_of,
    rollout_metrics,
)
from jigsawrl.pipeline.warmup import prepare_base
from jigsawrl.pipeline.workers import Workers, set_up_torch
from jigsawrl.surface import option
from jigsawrl.telemetry.events import EVENTS_FILE
from jigsawrl.telemetry.figures import Summary
from jigsawrl.telemetry.logreader import read_run
from jigsawrl.telemetry.metrics import METRICS_FILE
from jigsawrl.trainer.batch import Batch
from jigsawrl.trainer.checkpoint import Checkpoint, CheckpointStore

if TYPE_CHECKING:
    from jigsawrl.config import RunConfig
    from jigsawrl.telemetry.progress import Shown


UNREWARDED_PROMPTS = 256
"""A run ends after this many prompts in a row without a reward for any sample: a reward function that forgets its
`return` gives None for all, one that applies to few answers hardly ever does."""


@dataclass(frozen=True)
class Result:
    """Where a finished run is, and how it ended. `metrics` are those of its last step."""

    out: Path
    model: Path
    steps: int
    metrics: dict[str, float]

    @cached_property
    def summary(self) -> Summary:
        """The figures of the whole run, from its folder."""
        return next(iter(read_run(self.out).summaries.values()))


def run(
    config: RunConfig, out: Path, resume: bool, progress: Shown, env: ExecutionEnv | None = None
) -> Result:
    """Trains from the start or, with `resume`, from the newest good checkpoint; ends with the model exported."""
    with ExitStack() as stack:
        # Of one among several the folder stays, and says what it was.
        alone = env is None
        accepted = stack.enter_context(gone_if_refused(out)) if alone else lambda: None
        env = env or StandaloneEnv()
        config = as_started(config, out, out / EVENTS_FILE, resume, progress.message)
        if alone and config.gang != config.workers:
            config = on_its_workers(config, progress)
        out.mkdir(parents=True, exist_ok=True)
        durable.replace(out / RESOLVED, config.to_yaml().encode())
        device = choose_device(config)
        # The caller may go on computing, with as many threads as before.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        set_up_torch(config, device)
        if config.threads not in (None, config.thread_limit):
            progress.message(
                f"deterministic: true computes with one CPU thread; threads: {config.threads} is not used"
            )
        base = prepare_base(config, out, progress.message)
        workers = stack.enter_context(closing(env.workers(config, base, device)))
        store = CheckpointStore(out / "checkpoints", config.checkpoint.keep, fingerprint(config, base))
        on_disk = store.load_latest(progress.message) if resume else None
        checkpoint = newest(env.recall(), on_disk) if resume else None
        tokenizer = load_tokenizer(base, config.model.trust_remote_code)
        rollouts = stack.enter_context(
            closing(rollout_of(config, tokenizer, workers.engine, workers.first("longest_sequence")))
        )
        rollouts.check()
        prompts = usable_prompts(config, rollouts, progress)
        pipeline = Pipeline(config, workers, rollouts, prompts, env)
        checkpoint = pipeline.load(checkpoint, on_disk)
        if checkpoint is not None:
            progress.message(f"resuming after step {checkpoint.step}")
        elif resume and (out / METRICS_FILE).exists():
            progress.message("nothing is left of what it had learned: it begins again")
        accepted()
        journal = Journal(config, out, env.events(out), pipeline.done, resume, progress)
        ended = "failed"
        if (decoding := workers.first("decoding")) is not None:
            journal.say_once(decoding, "decoding")
        if (reason := rollouts.uncontained()) is not None:
            journal.say_once(
                f"rewards and environments run without PID namespaces ({reason}): processes that they start end "
                "with the run, unless they evade that on purpose",
                "uncontained",
            )
        at_start = pipeline.done == 0
        if at_start and config.task.kind == "data" and (ignored := ignored_columns(rollouts.task)):
            journal.say_once(ignored)
        try:
            with env.stopping() as interrupted:
                while pipeline.done < config.steps and not interrupted():
                    journal.begin(pipeline.done + 1)
                    try:
                        values = pipeline.step(journal)
                    except Stopped:
                        break
                    journal.end(values)
                    saved = env.remember(pipeline.done, workers, pipeline.state())
                    last = pipeline.done == config.steps or interrupted()
                    if last or pipeline.done % config.checkpoint.every == 0:
                        with journal.stage("checkpoint"):
                            store.save(pipeline.done, saved(), pipeline.state())
                if pipeline.done < config.steps:
                    if store.newest() != pipeline.done:
                        store.save(pipeline.done, workers.first("save_state"), pipeline.state())
                    raise KeyboardInterrupt(
                        f"stopped after step {pipeline.done}; go on with {option('resume')}"
                    )
                progress.doing(config.name, pipeline.done, "export")
                workers.first("export", out)
            ended = "finished"
        except KeyboardInterrupt:
            ended = "interrupted"
            raise
        finally:
            journal.close(ended)
    return Result(out, out / "model", pipeline.done, journal.last)


def on_its_workers(config: RunConfig, progress: Shown) -> RunConfig:
    """With as many workers as it has a use for, which is told where its ranks are not as many."""
    ranks, workers = config.gang, config.workers
    use = "ranks on one worker take turns" if ranks > workers else f"{workers - ranks} of them are not used"
    progress.message(f"ranks: {ranks}, on {workers} {'worker' if workers == 1 else 'workers'}: {use}")
    return config.model_copy(update={"workers": min(workers, ranks)})


class Pipeline:
    """The loop's body and the little state it has: steps done, and the cursor of the prompts."""

    def __init__(
        self,
        config: RunConfig,
        workers: Workers,
        rollouts: Rollout,
        prompts: list[int],
        env: ExecutionEnv,
    ) -> None:
        self.env = env
        self.config = config
        self.algorithm = config.algorithm
        self.workers = workers
        self.rollouts = rollouts
        self.source = PromptSource(prompts, config.seed)
        self.no_signal = NoSignal(config)
        self.done = 0
        self.unrewarded = 0
        """Prompts in a row, up to the last one, no sample of which had a reward."""
        self.workers.all("sync_weights", 0)

    def state(self) -> dict[str, int]:
        return {"cursor": self.source.cursor}

    def load(self, newest: Checkpoint | None, on_disk: Checkpoint | None) -> Checkpoint | None:
        """Goes on from the newest, or from the one on the disk where what was remembered is none of this model."""
        for each in filter(None, (newest, on_disk)):
            cursor = each.state.get("cursor")
            if type(cursor) is int and cursor >= 0 and self.workers.all("load_state", each.tensors):
                self.restore(each.step, each.state)
                return each
        if on_disk is not None:
            raise JigsawError(f"{on_disk.path}: is no checkpoint of this model; start anew in another folder")
        return None

    def restore(self, step: int, state: dict[str, int]) -> None:
        self.done = step
        self.source.cursor = state["cursor"]
        self.workers.all("sync_weights", step)

    def step(self, journal: Journal) -> dict[str, float]:
        """One step; returns its figures."""
        with self.env.phase("rollout", self.done + 1), journal.stage("gen"):
            trajectories, values = self.rollout(journal)
        batch = make_batch([t for t in trajectories if t.trained])
        with self.env.phase("training", self.done + 1):
            if len(batch):
                values |= self.train(trajectories, batch, journal)
            with journal.stage("update_weights", "sync"):
                self.workers.all("sync_weights", self.done + 1)
        self.done += 1
        return values

    def train(self, trajectories: list[Trajectory], batch: Batch, journal: Journal) -> dict[str, float]:
        """From rewarded trajectories to new weights."""
        self.evaluate(batch, journal)
        with journal.stage("adv"):
            self.advantages(trajectories, batch)
        return self.update(batch, journal)

    def rollout(self, journal: Journal) -> tuple[list[Trajectory], dict[str, float]]:
        """Trajectories to train on: those that have a reward. With dynamic sampling, groups without variance make
        room for fresh prompts."""
        wanted, sampling = self.config.rollout.prompts_per_step, self.algorithm.dynamic_sampling
        everything: list[Trajectory] = []
        kept: list[Trajectory] = []
        rounds = 0
        while True:
            seen = {t.prompt for t in everything}
            missing = wanted - len({t.prompt for t in kept})
            self.rollouts.on_wait, self.rollouts.on_ended = journal.waited, journal.samples
            fresh = self.rollouts.run(self.source.take(missing, exclude=seen), self.done)
            journal.passes(self.workers.every("end_rollout"))
            everything += fresh
            rounds += 1
            usable = rewarded(fresh)
            if sampling is None:
                kept = usable
                break
            flat = zero_variance_groups(rewards_of(usable), groups_of(usable))
            kept += [t for t, is_flat in zip(usable, flat, strict=True) if not is_flat]
            if len({t.prompt for t in kept}) >= wanted or rounds == sampling.max_rounds or not fresh:
                break
        kept = kept or of_first_prompts(rewarded(everything), wanted)
        kept.sort(key=lambda t: (t.prompt, t.sample))
        self.judge(everything, journal)
        if said := self.no_signal.look(self.done + 1, everything):
            journal.say_once(said)
        values = rollout_metrics(everything)
        if sampling is not None:
            values["rollout/rounds"] = rounds
            values["rollout/groups_kept"] = len({t.prompt for t in kept})
        return kept, values

    def judge(self, trajectories: list[Trajectory], journal: Journal) -> None:
        """Warns of rewards that failed, or of a step without any; JigsawError where nothing can be learned."""
        step, applies = self.done + 1, len(rewarded(trajectories))
        errors = [t.error for t in trajectories if t.error]
        for error in dict.fromkeys(errors):
            journal.warn(f"step {step}: {error}")
        if errors and len(errors) == len(trajectories):
            raise JigsawError(
                f"step {step}: there is nothing to learn from, as every one of its {len(errors)} samples "
                f"failed to be rewarded: {errors[0]}"
            )
        if applies > len(errors):
            self.unrewarded = 0
            return
        self.unrewarded += len({t.prompt for t in trajectories})
        failed = " or could not be had" if errors else ""
        journal.warn(
            f"step {step}: nothing is learned from it, as the reward of all its samples is None{failed}"
        )
        if self.unrewarded >= UNREWARDED_PROMPTS:
            raise JigsawError(
                f"step {step}: there is nothing to learn from, as the reward of all samples of {self.unrewarded} "
                f"prompts in a row is None, which says that it does not apply to them{failed and ', or failed'}\n"
                "Let the reward return a number for answers that are to be learned from."
            )

    def evaluate(self, batch: Batch, journal: Journal) -> None:
        """What the algorithm wants to know of the batch before the policy changes."""
        algorithm, values = self.algorithm, batch.values
        if algorithm.old_logprobs == "engine":
            values["old_logprobs"] = values["engine_logprobs"]
        elif algorithm.evaluates_old_policy:
            with journal.stage("old_log_prob", "logprob"):
                values["old_logprobs"] = self.workers.evaluate("logprobs", batch)
        if algorithm.kl_coef > 0:
            with journal.stage("ref", "logprob"):
                values["ref_logprobs"] = self.workers.evaluate("reference_logprobs", batch)
        if algorithm.advantage == "gae":
            with journal.stage("values", "logprob"):
                values["old_values"] = self.workers.evaluate("values", batch)

    def advantages(self, trajectories: list[Trajectory], batch: Batch) -> None:
        algorithm, values = self.algorithm, batch.values
        lengths = torch.tensor([len(t.trained) for t in trajectories])
        rewards = rewards_of(trajectories)
        if algorithm.overlong is not None:
            limit, overlong = self.config.rollout.max_tokens, algorithm.overlong
            rewards = rewards + overlong_penalty(lengths, limit, overlong.buffer, overlong.penalty)
        token_rewards = None
        if algorithm.kl_coef > 0 and algorithm.kl_in == "reward":
            kl = kl_estimate(algorithm.kl_estimator, values["old_logprobs"], values["ref_logprobs"])
            token_rewards = -algorithm.kl_coef * kl
        inputs = AdvantageInputs(
            rewards=rewards,
            groups=groups_of(trajectories),
            lengths=lengths,
            token_rewards=token_rewards,
            values=values.get("old_values"),
            gamma=algorithm.gamma,
            lam=algorithm.lam,
        )
        result = compute_advantages(algorithm.advantage, inputs)
        values["advantages"] = result.advantages
        if result.returns is not None:
            values["returns"] = result.returns

    def update(self, batch: Batch, journal: Journal) -> dict[str, float]:
        """Epochs over minibatches; every minibatch is one exact gradient, however it is cut."""
        figures: list[dict[str, float]] = []
        count = min(self.algorithm.minibatches, len(batch))
        for epoch in range(self.algorithm.epochs):
            for part in minibatches(len(batch), count, self.config.seed, self.done, epoch):
                mini = batch.select(part)
                limit = self.config.rollout.max_tokens
                weights = aggregation_weights(self.algorithm.aggregation, mini.lengths, limit)
                mini.values["weights"] = weights.float()
                with journal.stage("update_actor"):
                    figures.append(self.optimise(mini, journal, "actor", ""))
                if self.algorithm.advantage == "gae":
                    mini.values["weights"] = aggregation_weights("token_mean", mini.lengths, limit).float()
                    with journal.stage("update_critic"):
                        figures[-1] |= self.optimise(mini, journal, "critic", "critic_")
        return {name: math.fsum(f[name] for f in figures) / len(figures) for name in figures[0]}

    def optimise(self, mini: Batch, journal: Journal, name: str, prefix: str) -> dict[str, float]:
        with journal.substage("grad"):
            sums = self.workers.forward_backward(f"{prefix}forward_backward", mini)
        with journal.substage("optim"):
            figures = self.workers.all(f"{prefix}optim_step")
        figures["loss"] = sums.pop("loss")
        if "weight" in sums:
            figures |= mean_metrics(sums)
        return {f"{name}/{key}": value for key, value in figures.items()}


def newest(remembered: Checkpoint | None, saved: Checkpoint | None) -> Checkpoint | None:
    if remembered is None or (saved is not None and saved.step >= remembered.step):
        return saved
    return remembered


def usable_prompts(config: RunConfig, rollouts: Rollout, progress: Shown) -> list[int]:
    """Prompts that are short enough; too few of them for a step is an error."""
    if config.task.kind == "data" and rollouts.task[0].ground_truth is None:
        known = names(rollouts.task[0].extra)
        progress.message(
            f"no ground truth: the reward gets None for it; if it needs one, name its column with task.ground_truth "
            f"(columns beside the prompt: {known})"
        )
    lengths = rollouts.prompt_lengths()
    size = len(rollouts.task)
    limit = config.rollout.max_prompt_tokens
    usable = [i for i in range(size) if not lengths or lengths[i] <= limit]
    if len(usable) < size:
        progress.message(
            f"{size - len(usable)} of {size} prompts are longer than {limit} tokens and are left out"
        )
    if len(usable) < config.rollout.prompts_per_step:
        raise JigsawError(
            f"rollout.prompts_per_step is {config.rollout.prompts_per_step}, but the task has only {len(usable)} "
            f"prompts of at most {limit} tokens (rollout.max_prompt_tokens)"
        )
    return usable


def fingerprint(config: RunConfig, base: Path) -> dict[str, object]:
    """What must be the same for a checkpoint to be of this run."""
    spec = read_spec(base)
    lora = config.model.lora
    return {
        "name": config.name,
        "seed": config.seed,
        "family": spec.family,
        "shape": [
            spec.vocab_size,
            spec.hidden_size,
            spec.layers,
            spec.heads,
            spec.kv_heads,
            spec.intermediate_size,
        ],
        "lora": None if lora is None else [lora.rank, *sorted(lora.targets)],
        "critic": config.algorithm.advantage == "gae",
        "dtype": config.model.dtype,
    }
