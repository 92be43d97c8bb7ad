"""The inside of `sandbox.py`: a program of its own, run as `python -I sandbox_child.py <settings>`, stdlib only.

It takes away from itself what the operating system lets it take away, runs the untrusted program below a small init
that ends it when its time is over, kills all that is left of it, and prints JSON: `applied`, then `ended`.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_BIND, _REC, _PRIVATE, _READ_ONLY = 0x1000, 0x4000, 0x40000, 0x1
_PDEATHSIG, _CHILD_SUBREAPER, _NO_NEW_PRIVS = 1, 36, 38
_NOBODY, _FIRST_USER = 65534, 1 << 20
_POLL_S = 0.005

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    settings = json.loads(sys.argv[1])
    _prctl(_PDEATHSIG, signal.SIGKILL)
    _prctl(_NO_NEW_PRIVS, 1)
    # A user that nobody else is: the limit of processes counts all that a user has.
    user = _FIRST_USER + os.getpid() if os.getuid() == 0 else os.getuid()
    tasks = settings["processes"] + _tasks_of(user)
    in_namespaces = _unshare()
    init = os.fork()  # the first process of the new PID namespace: when it ends, so do all others in there
    if init:
        os.waitpid(init, 0)
        return
    _prctl(_PDEATHSIG, signal.SIGKILL)
    _prctl(_CHILD_SUBREAPER, 1)
    # Opened here: below, the program's user could not.
    streams = [os.open(settings["stdin"], os.O_RDONLY)]
    streams += [os.open(settings[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600) for name in ("stdout", "stderr")]
    files = in_namespaces and _hide_files(settings["keep"], settings["hide"])
    is_root = os.getuid() == 0
    changes_user = is_root and all(map(_is_open_to_all, settings["keep"]))
    applied = {"network": in_namespaces, "files": files, "processes": changes_user or not is_root}
    print(json.dumps({"applied": applied}), flush=True)
    program = os.fork()
    if program == 0:
        _become(settings, streams, user if changes_user else None, tasks)
    ended = _wait(program, settings["wall_s"])
    if not in_namespaces:
        _kill_descendants()
    print(json.dumps({"ended": ended}), flush=True)


def _become(settings: dict[str, Any], streams: list[int], user: int | None, tasks: int) -> None:
    """The untrusted program; does not return."""
    try:
        for target, stream in enumerate(streams):
            os.dup2(stream, target)
        if user is not None:
            _change_user(user)
        _prctl(_PDEATHSIG, signal.SIGKILL)  # a change of user forgets it
        if os.getuid() != 0:
            _limit(resource.RLIMIT_NPROC, tasks)
        _limit(resource.RLIMIT_CPU, settings["cpu_s"])
        _limit(resource.RLIMIT_AS, settings["memory_mb"] << 20)
        _limit(resource.RLIMIT_FSIZE, settings["file_mb"] << 20)
        _limit(resource.RLIMIT_CORE, 0)
        os.execve(settings["argv"][0], settings["argv"], settings["env"])
    finally:
        os._exit(126)


def _change_user(user: int) -> None:
    os.setgroups([])
    try:
        os.setgid(user)
        os.setuid(user)
    except OSError:  # in a container, there may be only so many
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _unshare() -> bool:
    """Namespaces without a network and without other processes; False if the system does not allow them."""
    uid, gid = os.getuid(), os.getgid()
    wanted = _NEWNS | _NEWIPC | _NEWPID | _NEWNET
    if libc.unshare(wanted if uid == 0 else wanted | _NEWUSER) != 0:
        return False
    if uid != 0:
        for name, content in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            Path(f"/proc/self/{name}").write_text(content)
    return True


def _hide_files(keep: list[str], hide: list[str]) -> bool:
    """Empty directories in the place of those in `hide`, but for what of `keep` lies in them; and an empty /proc."""
    if libc.mount(b"none", b"/", None, _REC | _PRIVATE, None) != 0:
        return False
    opened = {path: os.open(path, os.O_PATH | os.O_DIRECTORY) for path in keep}
    for folder in hide:
        if not os.path.isdir(folder) or any(Path(folder).is_relative_to(path) for path in keep):
            continue
        if libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, b"mode=755") != 0:
            return False
        for path in (path for path in keep if Path(path).is_relative_to(folder)):
            os.makedirs(path, exist_ok=True)
            if libc.mount(f"/proc/self/fd/{opened[path]}".encode(), path.encode(), None, _BIND | _REC, None) != 0:
                return False
    for descriptor in opened.values():
        os.close(descriptor)
    return libc.mount(b"tmpfs", b"/proc", b"tmpfs", _READ_ONLY, None) == 0


def _is_open_to_all(path: str) -> bool:
    """Whether any user can go into the directory."""
    return all(folder.stat().st_mode & 0o001 for folder in (Path(path), *Path(path).parents))


def _wait(program: int, wall_s: float) -> str:
    deadline = time.monotonic() + wall_s
    while time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)  # orphans, too
        if pid == program:
            code = os.waitstatus_to_exitcode(status)
            return f"exit {code}" if code >= 0 else signal.Signals(-code).name
        if not pid:
            time.sleep(_POLL_S)
    os.kill(program, signal.SIGKILL)
    return "timeout"


def _kill_descendants() -> None:
    """Orphans become children of this process; they are killed until there is none left."""
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except OSError:
                pass
        time.sleep(_POLL_S)


def _tasks_of(user: int) -> int:
    count = 0
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and entry.stat().st_uid == user:
                count += len(os.listdir(entry / "task"))
        except OSError:
            continue
    return count


def _prctl(option: int, value: int) -> None:
    libc.prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
