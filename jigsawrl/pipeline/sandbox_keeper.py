"""The keeper of a user-code process: ends all that user code has started when that process or its driver ends.

    driver -> keeper -+-> init: process 1 of a PID namespace; when it ends, the kernel ends all others in there
                      +-> host: user code, with whatever it starts, `setsid` and daemons included

Where the machine permits no PID namespace there is no init: orphans go to the keeper (it is a subreaper), which kills
until none is left. User code that kills its keeper gets away then; user code that is merely careless does not.
Every user-code process begins here, so little is imported.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

SWITCH = "JIGSAWRL_PID_NAMESPACES"
"""Environment variable. `off`: no PID namespaces, for user code that needs programs with special rights, as sudo."""
LOOK_AGAIN_S = 0.1
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWNS = 0x20000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
MS_NOSUID_NODEV_NOEXEC = 2 | 4 | 8
MS_SLAVE_AND_BELOW = 0x80000 | 0x4000
CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def keep(parent: int) -> str | None:
    """Goes on in the host only, which is a new process: None in a PID namespace, otherwise why it is in none.

    Call it while this process has one thread. `parent` is the process that started this one.
    """
    if sys.platform != "linux":
        if os.getppid() != parent:
            os._exit(1)
        return "only Linux has them"
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        problem = _why_not()
        borrowed, init = (False, None) if problem else _enter()
        # Only now, as a change of credentials clears it.
        _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)
        if init is None:
            _prctl(PR_SET_CHILD_SUBREAPER, 1)
        keeper = os.getpid()
        host = os.fork()
    except OSError as error:
        os.write(1, b'{"refused":"its process cannot be started: %s"}\n' % _told(error).encode())
        os._exit(1)
    if host:
        _watch(host, init)
    os.setsid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if init is None and os.getppid() != keeper:
        os._exit(1)
    if borrowed:
        _drop_capabilities()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return problem


# Into the namespaces


def _why_not() -> str | None:
    """Tries it in a process that ends at once, as nothing leads out of a namespace."""
    if os.environ.get(SWITCH) == "off":
        return f"{SWITCH} is off"

    def attempt(told: int) -> None:
        _, init = _enter()
        os.write(told, b"fine")
        os.kill(init, signal.SIGKILL)
        os.waitpid(init, 0)

    child, answers = _fork(attempt)
    answer = _said(answers)
    os.waitpid(child, 0)
    return None if answer == "fine" else answer


def _enter() -> tuple[bool, int]:
    """Children of this process are in namespaces of their own from now on; the first of them is made, the init.

    Gives whether a user namespace was needed, and the init's process number. OSError where it is not permitted: this
    process is good for nothing then.
    """
    borrowed = _unshare()
    keeper = os.getpid()
    waits, lives = os.pipe()

    def init(told: int) -> None:
        os.close(lives)
        _be_init(keeper, told, waits)

    number, answers = _fork(init)
    answer = _said(answers)
    if answer != "fine":
        os.waitpid(number, 0)
        raise OSError(0, answer)
    os.write(lives, b"!")
    os.close(lives)
    os.close(waits)
    return borrowed, number


def _unshare() -> bool:
    """Whether a user namespace was needed. User, group and the rights to files are the same in it."""
    if not _libc.unshare(CLONE_NEWPID | CLONE_NEWNS):
        _checked(_libc.mount(b"none", b"/", None, MS_SLAVE_AND_BELOW, None), "mount")
        return False
    if _has_capabilities():  # in a user namespace it would lose what they permit
        _checked(-1, "unshare")
    user, group = os.geteuid(), os.getegid()
    _checked(_libc.unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return True


def _be_init(keeper: int, told: int, waits: int) -> None:
    """Process 1 of the namespace: ends with the keeper, and waits for nothing else."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that nothing remains of orphans
    _checked(_libc.mount(b"proc", b"/proc", b"proc", MS_NOSUID_NODEV_NOEXEC, None), "mount of /proc")
    # The host gets its keeper's number. No other host has the same, and user code names files by it.
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(keeper - 1))
    os.write(told, b"fine")
    alive = os.read(waits, 1)
    os.closerange(0, 256)
    while alive:
        signal.pause()


def _has_capabilities() -> bool:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("CapEff:")[2].split()[0], 16) != 0


def _drop_capabilities() -> None:
    """Those that come with a user namespace: files that the user may not read stay so."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    _checked(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


# To the end


def _watch(host: int, init: int | None) -> NoReturn:
    """Waits for the host's end or the driver's, ends all that is left, and ends as the host did."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)  # the pipes are between driver and host
    os.dup2(nothing, 1)
    status = None
    asked = False
    while status is None and not asked:
        asked = signal.sigwait({signal.SIGCHLD, signal.SIGTERM}) == signal.SIGTERM
        status = _reaped().get(host)
    ended = {} if status is None else {host: status}
    while _kill(init):
        signal.sigtimedwait({signal.SIGCHLD}, LOOK_AGAIN_S)
        ended |= _reaped()
    _end_as(ended.get(host, signal.SIGKILL))


def _kill(init: int | None) -> bool:
    """Whether a child was killed that has to be waited for. Call it until none is."""
    descendants = _descendants() if init is None else {init: os.getpid()}
    killed = False
    for each, parent in descendants.items():
        with suppress(OSError):  # of another user, or gone
            os.kill(each, signal.SIGKILL)
            killed |= parent == os.getpid()
    return killed


def _reaped() -> dict[int, int]:
    """How children have ended."""
    found: dict[int, int] = {}
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found[ended[0]] = ended[1]
    return found


def _descendants() -> dict[int, int]:
    """Descendants of this process, those that nobody has waited for as well, and the parent of each."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                stat = Path("/proc", name, "stat").read_bytes()
                parents[int(name)] = int(stat.rpartition(b")")[2].split()[1])
    found = {os.getpid()}
    while more := {each for each, parent in parents.items() if parent in found} - found:
        found |= more
    return {each: parents[each] for each in found - {os.getpid()}}


def _end_as(status: int) -> NoReturn:
    """What the driver sees of the host."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        _libc.prctl(PR_SET_DUMPABLE, 0)  # one core file is enough
        with suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os._exit(os.waitstatus_to_exitcode(status) & 255)


# Calls


def _fork(body: Callable[[int], None]) -> tuple[int, int]:
    """A process that calls `body` with the end of a pipe, and ends; its number and the pipe's other end."""
    answers, told = os.pipe()
    child = os.fork()
    if child:
        os.close(told)
        return child, answers
    try:
        os.close(answers)
        body(told)
    except OSError as error:
        os.write(told, _told(error).encode())
    finally:
        os._exit(0)


def _said(answers: int) -> str:
    """The first thing that is said, or that nothing is."""
    said = os.read(answers, 300).decode()
    os.close(answers)
    return said or "its first process ended"


def _told(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}"


def _prctl(option: int, value: int) -> None:
    _checked(_libc.prctl(option, value, 0, 0, 0), "prctl")


def _checked(result: int, call: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
