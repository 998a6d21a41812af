"""From cluster and jobs files to pools and jobs. A JigsawError for unknown kinds, and for jobs that can never fit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from jigsawrl.cluster.estimate import Phases, Work, phases, resident, tp
from jigsawrl.cluster.jobs import Duration, Job
from jigsawrl.cluster.pools import Cluster, Pair, Pool
from jigsawrl.cluster.shapes import Shapes, widths
from jigsawrl.cluster.simulation import Failure
from jigsawrl.config.cluster import ClusterConfig, FailureConfig, JobConfig, JobsConfig
from jigsawrl.config.messages import require
from jigsawrl.errors import JigsawError
from jigsawrl.graph.cpu import cpu_worker
from jigsawrl.graph.hardware import CPU, HARDWARE, Hardware
from jigsawrl.graph.known_models import model_named
from jigsawrl.graph.memory import memory
from jigsawrl.graph.profile import Profile, load_profile
from jigsawrl.graph.shape import ModelShape

GB = 1e9
CORE_PRICE = 0.05
"""Dollars an hour; what large clouds ask for a core, approximately."""
NAMED = "name a known one or its size, such as Qwen3-8B or mine-8b, or give seconds of rollout and training instead"


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything that a plan or a simulation needs."""

    config: ClusterConfig
    cluster: Cluster
    jobs: tuple[Job, ...]
    failures: tuple[Failure, ...]


def scene_of(config: ClusterConfig, jobs: JobsConfig) -> Scene:
    """The files' contents, checked against each other."""
    cluster = cluster_of(config)
    profile = load_profile(config.profile)
    found = []
    for name, entry in jobs.jobs.items():
        job = job_of(name, entry, cluster, profile)
        if (problem := misfit(job, cluster)) is not None:
            raise JigsawError(f"jobs.{name}: can never fit: {problem}")
        found.append(job)
    for key, failure in jobs.failures.items():
        require(f"failures.{key}.node", failure.node.rpartition("-")[0], list(cluster.pools))
        if not re.fullmatch(r"0|[1-9][0-9]{0,5}", failure.node.rpartition("-")[2]):
            raise JigsawError(
                f"failures.{key}.node: {failure.node!r} is no node; write its pool and number, such as "
                f"{next(iter(cluster.pools))}-0"
            )
        nodes = cluster.pools[failure.node.rpartition("-")[0]].nodes
        if nodes is not None and int(failure.node.rpartition("-")[2]) >= nodes:
            raise JigsawError(
                f"failures.{key}.node: there is no {failure.node}; the pool has {nodes}, from 0 on"
            )
    return Scene(config, cluster, tuple(found), tuple(_apart(jobs.failures.values())))


def _apart(failures: Iterable[FailureConfig]) -> Iterator[Failure]:
    """Those of one node that overlap are one: it works again when the last is over."""
    ends: dict[str, tuple[float, float]] = {}
    for each in sorted(failures, key=lambda failure: failure.at):
        since, until = ends.get(each.node, (each.at, each.at))
        if each.at > until:
            yield Failure(each.node, since, until - since)
            since = each.at
        ends[each.node] = since, max(until, each.at + each.hours)
    for node, (since, until) in ends.items():
        yield Failure(node, since, until - since)


def cluster_of(config: ClusterConfig) -> Cluster:
    """The pools."""
    kinds = {**HARDWARE, **{name: _own_kind(name, config) for name in config.kinds}}
    local = sum(entry.nodes or 0 for entry in config.pools.values() if entry.is_cpu)
    pools = {}
    for name, entry in config.pools.items():
        kind = entry.kind if entry.kind in kinds else entry.kind.lower()
        require(f"pools.{name}.kind", kind, [*kinds, CPU])
        hardware = cpu_worker(entry.size, local) if kind == CPU else kinds[kind]
        gpus = 1 if kind == CPU else entry.size
        host = gpus * hardware.host_bytes / GB if entry.host_memory is None else entry.host_memory
        usual = CORE_PRICE if kind == CPU else hardware.price
        price = usual if entry.price is None else entry.price
        pools[name] = Pool(name, hardware, gpus, entry.nodes, host, entry.size * price, entry.runs)
    for phase in ("rollout", "training"):
        if all(pool.runs not in (phase, "both") for pool in pools.values()):
            raise JigsawError(f"pools: none of them runs {phase}; set one's 'runs' to {phase} or both")
    return Cluster(pools, config.link * 1e9 / 8)


def _own_kind(name: str, config: ClusterConfig) -> Hardware:
    kind = config.kinds[name]
    return Hardware(
        name,
        flops=kind.flops * 1e12,
        memory_bandwidth=kind.memory_bandwidth * 1e12,
        device_bytes=kind.device_memory * GB,
        host_bytes=kind.host_memory * GB,
        link_bandwidth=kind.link * GB,
        host_bandwidth=kind.host_link * GB,
        network_bandwidth=kind.network * GB,
        price=kind.price,
        source="the cluster file",
    )


def job_of(name: str, entry: JobConfig, cluster: Cluster, profile: Profile) -> Job:
    """With durations on every pool: estimated from its model, measured ones carried over by the roofline, or both."""
    model = None if entry.model is None else model_named(entry.model, f"jobs.{name}.model", NAMED)
    estimates = {} if model is None else _estimates(model, entry, cluster, profile)
    keeps = resident(model.parameters if model else 0.0)
    rollout = _durations("rollout", entry, cluster, estimates)
    return Job(
        name,
        rollout,
        _durations("training", entry, cluster, estimates),
        max_slowdown=entry.max_slowdown,
        steps=entry.steps,
        rollout_nodes=entry.rollout_nodes,
        training_nodes=entry.training_nodes,
        rollout_gb=keeps.rollout_gb if entry.rollout_memory is None else entry.rollout_memory,
        training_gb=keeps.training_gb if entry.training_memory is None else entry.training_memory,
        warm_rollout=keeps.warm_rollout,
        warm_training=keeps.warm_training,
        cold_seconds=keeps.cold_seconds,
        arrival=entry.arrival,
        priority=entry.priority,
        tenant=entry.tenant or "",
        deadline=entry.deadline,
        tail=estimates[next(iter(rollout))].tail if estimates and rollout else 0.0,
        drift=entry.drift,
    )


def _estimates(model: ModelShape, entry: JobConfig, cluster: Cluster, profile: Profile) -> dict[str, Phases]:
    """On the pools whose devices hold the model."""
    work = Work(
        model, entry.sequences, entry.max_tokens, entry.prompt_tokens, entry.turns, entry.tool_seconds
    )
    return {
        name: phases(work, pool, entry.rollout_nodes, entry.training_nodes, profile, cluster.link_bandwidth)
        for name, pool in cluster.pools.items()
        if _on_devices(work, pool, entry)
    }


def _on_devices(work: Work, pool: Pool, entry: JobConfig) -> bool:
    needed = memory(
        work.model,
        sequences=max(1, work.sequences // pool.gpus),
        tokens=work.max_tokens,
        tp=tp(work.model, pool),
        workers=entry.training_nodes * pool.gpus,
        device_bytes=pool.kind.device_bytes,
    )
    wanted = {"rollout": needed.rollout, "training": needed.training}
    most = max(wanted.values()) if pool.runs == "both" else wanted[pool.runs]
    return most <= pool.kind.device_bytes


def _durations(
    phase: str, entry: JobConfig, cluster: Cluster, estimates: Mapping[str, Phases]
) -> dict[str, Duration]:
    """Of a phase on every pool that runs it."""
    pools = [pool for pool in cluster.pools.values() if pool.runs in (phase, "both")]
    if entry.model is not None:
        pools = [pool for pool in pools if pool.name in estimates]
    typical: float | None = getattr(entry, phase)
    worst: float | None = getattr(entry, f"{phase}_worst")
    found = {}
    for pool in pools:
        duration: Duration = getattr(estimates[pool.name], phase) if estimates else Duration.fixed(1.0)
        if typical is not None:
            most = typical * duration.worst / duration.typical if worst is None else worst
            slower = _slower(phase, pools[0].kind, pool.kind)
            duration = Duration(typical, most, duration.spread).scaled(slower)
        spread = duration.spread if entry.spread is None else entry.spread
        found[pool.name] = replace(duration, spread=spread)
    return found


def _slower(phase: str, measured: Hardware, target: Hardware) -> float:
    """Rollouts go with memory bandwidth, training with arithmetic."""
    if phase == "rollout":
        return measured.memory_bandwidth / target.memory_bandwidth
    return measured.flops / target.flops


def misfit(job: Job, cluster: Cluster) -> str | None:
    """Why a job could not run even if it had the whole cluster; None where it could."""
    shapes = Shapes(cluster, 1.0, 1)
    reasons = [_misfit(job, shapes, pair) for pair in shapes.pairs(job)]
    if not reasons:
        return (
            "no pool's devices hold its model; give it more training_nodes, or use devices with more memory"
        )
    return None if None in reasons else reasons[0]


def _misfit(job: Job, shapes: Shapes, pair: Pair) -> str | None:
    """Why it could not run there."""
    rollout, training = widths(job, pair)
    pools = shapes.cluster.pools
    for pool, count in {pair[0]: rollout, pair[1]: training}.items():
        if pools[pool].limit < count:
            return f"it needs {count} nodes of {pool}, which has {pools[pool].nodes}"
    if shapes.holds(pair, training, [job], [tuple(range(job.rollout_nodes))]):
        return None
    training_gb = job.training_gb * job.training_nodes / training
    return (
        f"it keeps {job.rollout_gb:,.0f} GB on each rollout node and {training_gb:,.0f} GB on each training node; "
        f"host memory is {pools[pair[0]].host_gb:,.0f} GB on {pair[0]} and {pools[pair[1]].host_gb:,.0f} GB on "
        f"{pair[1]}"
    )
