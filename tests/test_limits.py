"""What is said where a machine or a container has too little: of memory, of processes, of room on the disk."""

from __future__ import annotations

import errno
import resource
import signal
from pathlib import Path

import pytest

from jigsawrl import limits
from jigsawrl.limits import Limit, Machine, MemoryKills, cause_of, explained, how_a_process_ended

MIB = 1 << 20


def machine(folder: Path, cgroup: str, files: dict[str, str], total_mib: int = 24_576) -> Machine:
    """A machine with these files in its cgroups; `cgroup` is what a process there reads of itself."""
    proc = {"self/cgroup": cgroup, "meminfo": f"MemTotal:  {total_mib * 1024} kB\n", "vmstat": "oom_kill 5\n"}
    for path, text in {
        **{f"proc/{name}": text for name, text in proc.items()},
        **{f"cgroup/{name}": text for name, text in files.items()},
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return Machine(folder / "cgroup", folder / "proc")


def second_version(folder: Path, limit: str = str(512 * MIB), kills: int = 0) -> Machine:
    return machine(
        folder,
        "0::/pod/run\n",
        {
            "cgroup.controllers": "memory pids\n",
            "pod/memory.max": limit,
            "pod/run/memory.max": "max\n",
            "pod/run/memory.events": f"low 0\noom 1\noom_kill {kills}\n",
            "pod/run/pids.max": "20\n",
        },
    )


def first_version(folder: Path) -> Machine:
    """As in a container: its own cgroup is all that can be seen, under a path that is not there."""
    return machine(
        folder,
        "9:name=systemd:/\n5:cpu,memory:/docker/abc\n4:pids:/docker/abc\n0::/\n",
        {
            "memory/memory.limit_in_bytes": f"{256 * MIB}\n",
            "memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n",
            "pids/pids.max": "33\n",
        },
    )


def test_memory_is_the_least_of_what_cgroups_and_the_machine_give(tmp_path: Path) -> None:
    container = "the memory limit of the container (its cgroup)"
    assert second_version(tmp_path / "2").memory() == Limit(512 * MIB, container)
    unlimited = second_version(tmp_path / "max", limit="max\n")
    assert unlimited.memory() == Limit(24_576 * MIB, "the memory of this machine")
    bare = machine(tmp_path / "bare", "", {})
    assert bare.memory() == unlimited.memory()
    assert Machine(tmp_path / "no", tmp_path / "no").memory() is None


def test_the_first_version_of_cgroups_is_read_as_well(tmp_path: Path) -> None:
    here = machine(
        tmp_path,
        "5:cpu,memory:/docker/abc\n4:pids:/\n0::/\n",
        {
            "memory/docker/abc/memory.limit_in_bytes": f"{256 * MIB}\n",
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/docker/abc/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n",
            "pids/pids.max": "33\n",
        },
    )
    assert here.memory() == Limit(256 * MIB, "the memory limit of the container (its cgroup)")
    assert here.memory_kills() == 7
    inside = first_version(tmp_path / "inside")
    assert inside.memory() == here.memory()
    assert inside.memory_kills() == 7
    assert inside.processes() == here.processes()


def test_a_kill_is_put_down_to_memory_only_where_the_kernel_has_just_killed_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = second_version(tmp_path, kills=3)
    monkeypatch.setattr(limits, "_kills", [])
    limits.watch_memory(here)
    assert how_a_process_ended("a/actor/0", -signal.SIGKILL) == "a/actor/0 was ended by SIGKILL"
    second_version(tmp_path, kills=4)
    for code, how in (
        (-signal.SIGKILL, "was ended by SIGKILL"),
        (limits.FORK_SERVER_GONE, "ended with the process from which all are forked, which was killed"),
    ):
        first, *rest = how_a_process_ended("a/actor/0", code).splitlines()
        there = "there are 512 MiB, the memory limit of the container (its cgroup)"
        assert first == f"a/actor/0 {how}: memory ran out; {there}"
        assert "rollout.max_num_seqs" in rest[0]
    assert "memory" not in how_a_process_ended("a/actor/0", -signal.SIGSEGV)
    limits.watch_memory(here)  # another run
    assert how_a_process_ended("a/actor/0", -signal.SIGKILL) == "a/actor/0 was ended by SIGKILL"


def test_without_a_cgroup_the_machine_says_what_was_killed(tmp_path: Path) -> None:
    bare = machine(tmp_path, "", {})
    kills = MemoryKills(bare)
    assert not kills.recent()
    (tmp_path / "proc" / "vmstat").write_text("pgfault 1\noom_kill 6\n")
    assert kills.recent()


def test_the_settings_that_are_named_exist() -> None:
    from jigsawrl.config.settings import RunConfig

    for name in ("rollout.max_num_seqs", "rollout.kv_cache_tokens", "trainer.micro_batch_tokens"):
        assert name in limits.LESS_MEMORY
        section, key = name.split(".")
        (model,) = [RunConfig.model_fields[section].annotation]
        assert key in model.model_fields  # type: ignore[union-attr]


def test_errors_of_a_machine_that_has_too_little_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Machine, "processes", lambda self: Limit(20, "of this user; raise it with `ulimit -u`")
    )
    full = OSError(errno.ENOSPC, "No space left on device")
    wrapped = RuntimeError(
        "worker 0 failed: SafetensorError: I/O error: No space left on device (os error 28)"
    )
    for error, said in (
        (full, f"the disk is full: {tmp_path} cannot be written"),
        (wrapped, f"the disk is full: {tmp_path} cannot be written"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "the disk is full"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "there may be 20, of this user"),
        (
            RuntimeError("can't start new thread"),
            "another process or thread cannot be started: there may be 20",
        ),
        (OSError(errno.EMFILE, "Too many open files"), "too many files are open"),
        (MemoryError(), "memory ran out"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9"), "memory ran out"),
    ):
        told = cause_of(error, tmp_path)
        assert told is not None
        assert told.startswith(said) or said in told.splitlines()[0]
        assert len(told.splitlines()) <= 3
    assert cause_of(ValueError("a bug")) is None
    with pytest.raises(limits.JigsawError, match="the disk is full"), explained(tmp_path):
        raise full
    with pytest.raises(ValueError, match="a bug"), explained(tmp_path):
        raise ValueError("a bug")


def test_a_limit_on_processes_counts_for_ordinary_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = machine(tmp_path, "", {})
    monkeypatch.setattr(resource, "getrlimit", lambda which: (20, 20))
    monkeypatch.setattr("os.getuid", lambda: 0)
    assert bare.processes() is None
    monkeypatch.setattr("os.getuid", lambda: 1000)
    assert bare.processes() == Limit(20, "of this user, threads included; raise it with `ulimit -u`")


def test_memory_that_ran_out_before_the_first_process_is_named(tmp_path: Path) -> None:
    here = second_version(tmp_path)
    limits.watch_memory(here)
    assert "pids.max" in limits.cannot_start(EOFError())
    (tmp_path / "cgroup" / "pod" / "run" / "memory.events").write_text("oom_kill 1\n")
    said = limits.cannot_start(EOFError())
    assert "memory ran out; there are 512 MiB, the memory limit of the container (its cgroup)" in said
    assert "pids.max" not in said
    assert len(said.splitlines()) <= 3
