"""Runs the pipelines of a run file together: checks, folders, the store, the scheduler, and what comes of it."""

from __future__ import annotations

import gc
import os
import platform
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, astuple, dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path

from jigsawrl import durable, limits, temporary
from jigsawrl.config import files, text
from jigsawrl.config.messages import joined
from jigsawrl.config.pipelines import Homes, Mix, PipelinesConfig, checked_mix, is_profile_file, run_of
from jigsawrl.config.runfile import described
from jigsawrl.config.runfolder import check_mix_folder, gone_if_refused, mix_as_started, mix_in
from jigsawrl.config.settings import RunConfig
from jigsawrl.config.shapes import model_shape, shared_base
from jigsawrl.config.started import RESOLVED, as_started, kept_in
from jigsawrl.errors import JigsawError
from jigsawrl.graph.fits import refuse_what_cannot_fit
from jigsawrl.graph.hardware import CPU, Hardware
from jigsawrl.graph.interference import table_of
from jigsawrl.graph.memory import tokens_at_once
from jigsawrl.graph.profile import Profile, Workload, load_profile, table_on, write_profile
from jigsawrl.liveness import Heartbeat, silent_s
from jigsawrl.model.cpu import make_bfloat16_safe
from jigsawrl.pipeline.base import base_folder
from jigsawrl.policies.named import policy_of
from jigsawrl.policies.starts import refuse_what_cannot_fit_apart
from jigsawrl.runtime.commands import Commands
from jigsawrl.runtime.control import Control
from jigsawrl.runtime.family import prepare_for
from jigsawrl.runtime.first_outlook import first_outlook
from jigsawrl.runtime.member import Member
from jigsawrl.runtime.requests import Entry, Requests
from jigsawrl.runtime.scheduler import Scheduler, Work
from jigsawrl.runtime.shares import Device, shares_here
from jigsawrl.scheduler.core import SchedulerCore
from jigsawrl.scheduler.layout import Layout, layout_in_pools, layout_of
from jigsawrl.store import folders, heirs
from jigsawrl.telemetry.events import EVENTS_FILE, EventLog
from jigsawrl.telemetry.figures import Summary
from jigsawrl.telemetry.progress import Progress
from jigsawrl.telemetry.runreport import RunReport, run_report
from jigsawrl.telemetry.text import counted
from jigsawrl.underway import refuse_if_under_way, refuse_inside_another, under_way, wait_until_gone

PROFILE = "profile.json"
MOST_DESCRIBED = 8
"""Pipelines that the line at the start describes."""
STORE_PART = 0.25
"""Of the machine's memory that states of pipelines may take in the store."""
_identity = attrgetter("name", "seed", "model", "algorithm.advantage")
"""What of a run makes the states that it leaves behind."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How one pipeline came out. Its figures are those of the report."""

    name: str
    how: str
    reason: str
    steps: int
    out: Path
    seconds: float
    """Its time."""
    summary: Summary | None
    """None where it has not begun."""


@dataclass(frozen=True, slots=True)
class Outcome:
    made: RunReport
    pipelines: tuple[Ended, ...]
    work: Work

    @property
    def seconds(self) -> float:
        """The time of the run."""
        return self.made.report.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.made.report.tokens_per_second or 0.0


def run_mix(mix: Mix, out: Path, resume: bool, progress: Progress, bases: Path | None = None) -> Outcome:
    """Runs all pipelines under the file's policy. What is wrong with any of them shows before one is started.

    `bases` is the folder of another run of theirs, whose tiny models are taken.
    """
    refuse_inside_another(out)
    limits.watch_memory()
    with limits.explained(out), under_way(out), ExitStack() as stack:
        asked, mix = mix, with_submitted(mix, Requests(out)) if resume else mix
        check_all(mix)
        silent_s()  # or what is wrong with it
        temporary.folder(out)  # while there may be room for one
        if check_mix_folder(asked.config, out, resume):
            refuse_if_under_way(out / name for name in mix.config.pipelines)
            wait_until_gone(out)
        prepare_for(run.model.path for run in mix.runs.values())
        return _run(asked, mix, out, resume, progress, bases, stack)


def _run(
    asked: Mix, mix: Mix, out: Path, resume: bool, progress: Progress, bases: Path | None, stack: ExitStack
) -> Outcome:
    before = mix_in(out) if resume else None
    asked, mix = (Mix(mix_as_started(each.config, before), each.runs) for each in (asked, mix))
    shares = stack.enter_context(shares_here(mix.config.workers, wanted_device(mix)))
    device: Device = "cpu" if shares.device(0) == "cpu" else "cuda"
    count = len(shares.workers)
    worker = shares.hardware().limited(mix.config.memory)

    def started(name: str, config: RunConfig) -> RunConfig:
        return as_started(config, out / name, out / EVENTS_FILE, resume, progress.message, mix.config.gang)

    configs = {name: started(name, own_config(mix, name, device)) for name in mix.config.pipelines}
    layouts = Layouts(mix.config.workers)
    known = known_before(mix.config.profile)
    members = {
        name: member_of(mix, name, config, out, worker, known.workloads.get(name) if known else None, layouts)
        for name, config in configs.items()
    }
    refuse(members.values(), worker, mix.config)
    accepted = stack.enter_context(gone_if_refused(out))
    if bases is not None:
        take_bases(members.values(), bases)
    durable.replace(out / RESOLVED, text.dump(asked.config.model_dump(mode="json")).encode())

    admit = partial(submitted, mix, out, worker, device, started, layouts)
    commands = Commands(Requests(out), members, mix.runs, admit)
    stack.enter_context(Control(out, commands.answer))
    if device == "cpu" and any(config.model.dtype == "bfloat16" for config in configs.values()):
        make_bfloat16_safe()  # once, for all processes
    policy = policy_of(mix.config.policy, mix.config.order)
    progress.message(f"{len(members)} pipelines on {count} workers under {policy.name}; {shares.describe()}")
    # Of bases that another run made, that run has said it.
    said = remarks(configs.values()) if bases in (None, out) else []
    for line in [*said, *dict.fromkeys(filter(None, map(turns_of, members.values())))]:
        progress.message(line)
    progress.opening(f"into {out}: {described_together(list(configs.values()))}")
    left = left_of(members.values()) if resume else []
    folders.remove_abandoned()
    spill = out / "store"
    store = folders.make(None, spill, store_budget(worker.host_bytes * count), heirs.spilled_to(spill, left))
    stack.callback(folders.remove, store)  # also where the run ends before its first phase
    folders.read(store)  # as long as this process lives, the store is in use
    stack.callback(Heartbeat(store / folders.BEAT).stop)
    heirs.take_over(store, left)
    accepted()
    pools = mix.config.pools
    rollout_workers = pools.rollout if pools else None
    log = EventLog(out / EVENTS_FILE)
    log.emit(
        "resume" if resume else "start",
        policy=policy.name,
        workers=count,
        pipelines=list(members),
        hardware=asdict(worker),
        units=len(shares.workers[0]),
        rollout_workers=rollout_workers,
        layouts={name: astuple(member.layout) for name, member in members.items()},
        python=platform.python_version(),
    )
    for member in members.values():
        write_config(member)

    def welcome(member: Member) -> None:
        if resume:
            heirs.take_over(store, left_of([member]))
        write_config(member)
        for line in remarks([member.config]):
            progress.message(line)

    core = SchedulerCore(
        policy,
        table_on(worker, known),
        count,
        worker.device_bytes,
        units=len(shares.workers[0]),
        rollout_workers=rollout_workers,
    )
    scheduler = Scheduler(members, core, shares, store, log, progress, resume, commands, welcome)
    gc.freeze()  # what is there by now stays, and need not be looked through again and again
    try:
        scheduler.run()
    finally:
        gc.unfreeze()
        log.emit("end", work=scheduler.work.seconds, messages=scheduler.work.messages)
        log.close()
        folders.remove(store)
    made = run_report(out)
    try:
        save_what_was_learned(core, worker, out)
        made.write()
    except (
        OSError,
        JigsawError,
    ) as error:  # a full disk: what the pipelines have saved counts, and how they ended
        progress.message(f"the report is not written ({error}); 'jigsaw report {out}' makes it")
    return outcome_of(scheduler, made)


def described_together(configs: Sequence[RunConfig]) -> str:
    """Pipelines in a few words each, not more of them than one reads."""
    told = [f"{config.name} ({described(config)})" for config in configs[:MOST_DESCRIBED]]
    more = len(configs) - len(told)
    return ", ".join(told) + (f", and {more} more" if more else "")


def take_bases(members: Iterable[Member], run: Path) -> None:
    """Tiny models are not made anew where another run has made them: they would be the same."""
    for member in members:
        made = base_folder(member.config, run / member.name)
        own = base_folder(member.config, member.out)
        if (made / "config.json").is_file() and not own.exists():
            shutil.copytree(made, own)


def left_of(members: Iterable[Member]) -> list[heirs.Left]:
    """What dead runs remember of these, from where they go on."""
    return heirs.left_behind({member.name: member.out for member in members if goes_on(member)})


def goes_on(member: Member) -> bool:
    """Whether it is the pipeline that its folder holds, so that what a dead run remembered of that is of use to it.

    The same is asked of checkpoints, whose fingerprints say it.
    """
    before = kept_in(member.out)
    return before is not None and bool(_identity(before) == _identity(member.config))


def store_budget(memory: float) -> int:
    """Bytes of states in memory; the rest goes to the disk. Containers often have little shared memory."""
    place = folders.place_for_stores()
    room = shutil.disk_usage(place).free / 2 if place.is_dir() else memory
    return int(min(STORE_PART * memory, room))


def wanted_device(mix: Mix) -> Device:
    """Of all pipelines: they share their workers."""
    wanted = {run.device for run in mix.runs.values()}
    if {"cpu", "cuda"} <= wanted:
        raise JigsawError(
            "device: some pipelines ask for cpu and some for cuda; they share workers, so choose one"
        )
    return "cuda" if "cuda" in wanted else "cpu" if wanted == {"cpu"} else "auto"


def own_config(mix: Mix, name: str, device: Device) -> RunConfig:
    """A pipeline's run file, as one among others."""
    entry = mix.config.pipelines[name]
    if entry.run is None:
        raise JigsawError(
            f"pipelines.{name}: a workload of a profile can only be simulated; give it a run file (run: FILE),\n"
            f"or try 'jigsaw simulate'"
        )
    run = mix.runs[name]
    cores = len(os.sched_getaffinity(0))
    return run.model_copy(
        update={
            "name": name,
            "workers": mix.config.workers,
            "threads": 1 if run.deterministic else max(1, cores // max(mix.config.workers, mix.config.gang)),
            "steps": entry.steps or run.steps,
            "device": device,
        }
    )


def check_all(mix: Mix) -> dict[str, RunConfig]:
    """The pipelines' configs; a JigsawError that names the first one that cannot be run."""
    device = wanted_device(mix)
    configs = {name: own_config(mix, name, device) for name in mix.config.pipelines}
    for config in configs.values():
        check(config if config.ranks else config.model_copy(update={"ranks": mix.config.ranks}))
    return configs


def remarks(configs: Iterable[RunConfig]) -> list[str]:
    """Lines about their files, each once."""
    return list(dict.fromkeys(line for config in configs for line in files.remarks(config)))


def check(config: RunConfig) -> None:
    """A JigsawError that names the pipeline, where its files, packages or data are at fault."""
    from jigsawrl.api import check_task

    prompts = config.rollout.prompts_per_step
    try:
        if config.gang > max(prompts, config.workers):
            raise JigsawError(
                f"ranks: {config.gang} is more than rollout.prompts_per_step {prompts}; "
                f"set it to at most {prompts}"
            )
        if found := files.problems(config):
            raise JigsawError(joined(found))
        check_task(config)
    except JigsawError as error:
        raise JigsawError(f"pipelines.{config.name}: {error}") from None


def write_config(member: Member) -> None:
    """A pipeline's folder says what it is before its processes are there, for it may be cancelled before.

    Where that is not possible, the pipeline will fail, and no other.
    """
    with suppress(OSError):
        if not (member.out / RESOLVED).exists():
            member.out.mkdir(parents=True, exist_ok=True)
            durable.replace(member.out / RESOLVED, member.config.to_yaml().encode())


def with_submitted(mix: Mix, requests: Requests) -> Mix:
    """The pipelines of the run file, and those that came while it ran."""
    more = {name: entry for name, entry in requests.submitted.items() if name not in mix.config.pipelines}
    return with_entries(mix, more) if more else mix


def with_entries(mix: Mix, entries: Mapping[str, Entry]) -> Mix:
    """Some pipelines and others, whose entries and run files are read; a JigsawError if they cannot be."""
    data = mix.config.model_dump(mode="json")
    for name, entry in entries.items():
        data["pipelines"][name] = {key: value for key, value in entry.items() if value is not None}
    config = checked_mix(data)
    runs = {name: run_of(Path(config.pipelines[name].run or "")) for name in entries}
    return Mix(config, {**mix.runs, **runs})


def submitted(
    mix: Mix,
    out: Path,
    worker: Hardware,
    device: Device,
    started: Callable[[str, RunConfig], RunConfig],
    layouts: Layouts,
    name: str,
    entry: Entry,
) -> tuple[Member, RunConfig]:
    """A pipeline that comes while others run, and its run file; a JigsawError if it cannot be run."""
    nothing = Mix(mix.config.model_copy(update={"pipelines": {}}), {})
    more = with_entries(nothing, {name: entry})
    if (asked := more.runs[name].device) not in ("auto", device):
        are = "cores" if device == "cpu" else "GPUs"
        raise JigsawError(
            f"{name}: device is {asked}, and the workers of {out} are {are}; set device: {device} or auto"
        )
    own = started(name, own_config(more, name, device))
    check(own)
    member = member_of(more, name, own, out, worker, None, layouts)
    refuse([member], worker, more.config)
    return member, more.runs[name]


def refuse(members: Collection[Member], worker: Hardware, config: PipelinesConfig) -> None:
    """A JigsawError where the memory cannot hold them."""
    pools = config.pools
    if pools is None:
        refuse_what_cannot_fit([member.outlook for member in members], worker, config.workers)
    else:
        for member in members:
            engines = len(member.layout.rollout)
            refuse_what_cannot_fit_apart(member.outlook, worker, engines, pools.training)


def known_before(profile: str) -> Profile | None:
    """What an earlier run learned, where the run file names its profile."""
    return load_profile(profile) if is_profile_file(profile) else None


def member_of(
    mix: Mix,
    name: str,
    config: RunConfig,
    out: Path,
    worker: Hardware,
    known: Workload | None,
    layouts: Layouts | None = None,
) -> Member:
    entry, config = mix.config.pipelines[name], with_tokens_at_once(config, worker)
    pools = mix.config.pools
    homes = pools.homes(entry, config.ranks or pools.training) if pools else None
    layout = (layouts or Layouts(mix.config.workers)).layout(config, homes)
    outlook = first_outlook(name, config, entry, worker, mix.config.workers, known, layout.ranks_on_each)
    return Member(name, config, out / name, outlook, entry.arrival, layout, homes)


@dataclass(slots=True)
class Layouts:
    """Deals pipelines that have fewer ranks than there are workers out to all of the workers."""

    workers: int
    firsts: dict[str, int] = field(default_factory=dict)
    """The worker of the first rank, by pipeline; by model of those that share their actors."""
    next: int = 0

    def layout(self, config: RunConfig, homes: Homes | None) -> Layout:
        if homes is not None:
            return layout_in_pools(homes, self.workers)
        key = shared_base(config) or config.name
        if key not in self.firsts:
            self.firsts[key] = self.next
            self.next = (self.next + config.gang) % self.workers if config.gang < self.workers else self.next
        first = self.firsts[key] if config.gang < self.workers else 0
        return layout_of(config.gang, self.workers, first)


def turns_of(member: Member) -> str:
    """A line for people where ranks share a worker; else nothing."""
    if member.layout.ranks_on_each == 1:
        return ""
    workers = counted(len(member.layout.training), "worker")
    return (
        f"ranks: {len(member.layout.gang)} of a pipeline train on {workers}: those on one worker take turns"
    )


def with_tokens_at_once(config: RunConfig, worker: Hardware) -> RunConfig:
    """As many to train on as suit the worker, where the run file names none: actors do what was planned."""
    if config.trainer.micro_batch_tokens is not None:
        return config
    model = model_shape(config.model)
    kept, gpu = not config.model.gradient_checkpointing, None if worker.name == CPU else worker.device_bytes
    tokens = tokens_at_once(model.layers, model.hidden, kept, gpu)
    return config.model_copy(
        update={"trainer": config.trainer.model_copy(update={"micro_batch_tokens": tokens})}
    )


def save_what_was_learned(core: SchedulerCore, worker: Hardware, out: Path) -> None:
    """A profile for the next run, and for simulations of this one."""
    learned = {
        name: workload
        for name, belief in core.beliefs.items()
        if (workload := belief.learned.workload()) is not None
    }
    if learned:
        source = "measured while these pipelines ran, alone and beside each other"
        table = core.followed_table()
        own = table if table.learned != table_of(worker.name).learned else None
        write_profile(Profile(out.name, source, worker, learned, interference=own), out / PROFILE)


def outcome_of(scheduler: Scheduler, made: RunReport) -> Outcome:
    log = made.log
    ended = tuple(
        Ended(
            member.name,
            member.ended or "interrupted",
            member.reason,
            member.done if member.began or summary is None else summary.steps,
            member.out,
            log.life(member.name).seconds,
            summary,
        )
        for member in scheduler.members.values()
        for summary in [log.summaries.get(member.name)]
    )
    return Outcome(made, ended, scheduler.work)
