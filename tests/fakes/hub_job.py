"""One job of the fake Hub, from its scheduling to its end."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.fakes.hub_images import in_container, kill_container, make_environment
from tests.fakes.hub_mounts import Mount

if TYPE_CHECKING:
    from tests.fakes.hub import FakeHub

SCHEDULING, RUNNING, COMPLETED, ERROR, CANCELED = "SCHEDULING", "RUNNING", "COMPLETED", "ERROR", "CANCELED"
ENDED = (COMPLETED, ERROR, CANCELED)
_DEFAULT_TIMEOUT_S = 1800


class Job:
    """`stage`, `message`, `log` and `ports` (of the container → of this machine) are for tests to look at."""

    def __init__(self, hub: "FakeHub", job_id: str, namespace: str, spec: dict[str, Any], folder: Path):
        self.id, self.namespace, self.spec, self.folder, self._hub = job_id, namespace, spec, folder, hub
        self.stage = SCHEDULING
        self.message: str | None = None
        self.log: list[tuple[str, str]] = []
        """(time, line)."""
        self.exposed: list[int] = (spec.get("expose") or {}).get("ports", [])
        grouped = hub.jobs.group_ports if spec.get("network") else ()
        self.ports = {port: _free_port() for port in dict.fromkeys((*self.exposed, *grouped))}
        self.attempts = 0
        """Times that it was started."""
        self._created = _now()
        self._started: str | None = None
        self._finished: str | None = None
        self._preempted = False
        self._changed = asyncio.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def public(self) -> dict[str, Any]:
        """What the API shows of it: no value of a secret."""
        spec = self.spec
        urls = [f"{self._hub.jobs.exposed.url}/{self.id}/{port}" for port in self.exposed]
        return {
            "id": self.id,
            "createdAt": self._created,
            "startedAt": self._started,
            "finishedAt": self._finished,
            "dockerImage": spec.get("dockerImage"),
            "spaceId": spec.get("spaceId"),
            "command": spec["command"],
            "arguments": spec["arguments"],
            "environment": spec["environment"],
            "secrets": dict.fromkeys(spec.get("secrets") or {}, ""),
            "flavor": spec["flavor"],
            "labels": spec.get("labels"),
            "volumes": spec.get("volumes"),
            "status": {"stage": self.stage, "message": self.message, "exposeUrls": urls or None},
            "owner": {"id": "u1", "name": self.namespace, "type": "user"},
            "initiator": {"type": "user", "id": "u1", "name": self.namespace},
            "network": spec.get("network"),
            "retry": spec.get("attempts", 1) - 1,
            "expose": spec.get("expose"),
        }

    def log_text(self) -> str:
        return "\n".join(text for _, text in self.log)

    async def changed(self) -> None:
        """Until there is a new line of the log or a new stage."""
        await self._changed.wait()

    def cancel(self, grace_s: float) -> None:
        """The command gets a SIGTERM and, if it does not heed it, is killed."""
        if self.stage in ENDED:
            return
        self._become(CANCELED)
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            asyncio.get_running_loop().call_later(grace_s, self._kill)

    def preempt(self) -> None:
        self._preempted = True
        self._kill()

    async def run(self) -> None:
        """All attempts, each on a new machine. Nothing that it has started is left on return."""
        while self._hub.jobs.never_starts(self.spec) and self.stage == SCHEDULING:
            await asyncio.sleep(0.1)
        for left in reversed(range(self.spec.get("attempts", 1))):
            if self.stage != SCHEDULING:
                return
            try:
                stage, message = await self._attempt()
            except Exception as error:  # of a mount, as a rule
                stage, message = ERROR, f"Job could not be started: {error!r}"
            if self.stage == CANCELED:
                return
            self._become(SCHEDULING if stage == ERROR and left else stage, message)

    async def _attempt(self) -> tuple[str, str | None]:
        """The stage and message that it ends with, unless it is cancelled."""
        self.attempts += 1
        self._preempted = False
        home = self.folder / str(self.attempts)
        home.mkdir(parents=True)
        folders = {volume["mountPath"]: self._mount(home, volume) for volume in self.spec.get("volumes") or []}
        mounts = folders.values()
        for mount in mounts:
            await asyncio.to_thread(mount.start)
        await asyncio.to_thread(make_environment, home / "image")
        is_wanted = self.stage == SCHEDULING and not self._preempted
        code = await self._execute(home, {path: mount.folder for path, mount in folders.items()}) if is_wanted else None
        for mount in mounts:
            await asyncio.to_thread(mount.stop, flush=not self._preempted)
        if self._preempted:
            return ERROR, "Job was preempted"
        if code is None:
            return ERROR, "Job timeout"
        return (COMPLETED, None) if code == 0 else (ERROR, f"Job failed with exit code: {code}. Reason: Error")

    async def _execute(self, home: Path, folders: dict[str, Path]) -> int | None:
        """The exit code of the command; None after the job's timeout."""
        aliases = (self.spec.get("network") or {}).get("aliases", [])

        def here(text: Any) -> str:
            return in_container(str(text), folders, self.ports, aliases, self._hub.jobs.exposed.url)

        (home / "tmp").mkdir()
        env = {**self._platform(home), **{key: here(value) for key, value in self.spec["environment"].items()}}
        env |= self.spec.get("secrets") or {}
        argv = [here(word) for word in (*self.spec["command"], *self.spec["arguments"])]
        self._write(f"===== Job started at {_now()} =====")
        try:
            self._process = process = subprocess.Popen(
                argv,
                cwd=home,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self._write(f"exec failed: {error}")
            return 127
        self._started = self._started or _now()
        self._become(RUNNING)
        loop = asyncio.get_running_loop()
        reading = loop.run_in_executor(None, self._read, process, loop)
        try:
            # In a thread: asyncio's own processes count as running until their last child has closed the pipe.
            timeout_s = self.spec.get("timeoutSeconds", _DEFAULT_TIMEOUT_S)
            return await loop.run_in_executor(None, process.wait, timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            await loop.run_in_executor(None, kill_container, self.id)
            await reading
            await loop.run_in_executor(None, process.wait)

    def _platform(self, home: Path) -> dict[str, str]:
        """What the Hub puts into every container, and what stands for its network on this machine."""
        jobs, flavor = self._hub.jobs, self.spec["flavor"]
        return {
            "PATH": f"{home / 'image' / 'bin'}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(home),
            "TMPDIR": str(home / "tmp"),
            "LANG": "C.UTF-8",
            "JOB_ID": self.id,
            "ACCELERATOR": "none" if flavor.startswith("cpu") else flavor,
            "CPU_CORES": "2",
            "MEMORY": "16Gi",
            "HF_ENDPOINT": self._hub.url,
            "SSL_CERT_FILE": str(jobs.exposed.certificate),
            "PIP_NO_INDEX": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            **jobs.image_env,
        }

    def _mount(self, home: Path, volume: dict[str, Any]) -> Mount:
        folder = home / "mounts" / volume["mountPath"].strip("/").replace("/", "-")
        return Mount(
            self._hub.url,
            self._hub.token,
            volume["source"],
            folder,
            volume.get("path") or "",
            read_only=bool(volume.get("readOnly")),
        )

    def _read(self, process: "subprocess.Popen[bytes]", loop: asyncio.AbstractEventLoop) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            loop.call_soon_threadsafe(self._write, line.decode(errors="replace").rstrip("\n"))
        process.stdout.close()

    def _write(self, text: str) -> None:
        self.log.append((_now(), text))
        with (self.folder / "log.txt").open("a") as file:  # for whoever looks into the directory of a failed test
            file.write(f"{text}\n")
        self._notify()

    def _become(self, stage: str, message: str | None = None) -> None:
        self.stage, self.message = stage, message
        if stage in ENDED:
            self._finished = _now()
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
