"""Jobs of the fake Hub: each one is a process of this machine, in a directory and an environment of its own."""

import asyncio
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tests.fakes.hub_exposed import ExposedPorts
from tests.fakes.hub_images import processes_of
from tests.fakes.hub_job import ENDED, Job

if TYPE_CHECKING:
    from tests.fakes.hub import FakeHub

_LABEL = re.compile(r"[A-Za-z0-9._-]{1,100}")
_KEEP_ALIVE_S = 30.0
Spec = dict[str, Any]


class Jobs:
    """The jobs of the user `user`, whose token may do what `access` says.

    Settings, to be changed by tests at any time:
      image_env: the environment that every image brings. Nothing of this process's own environment reaches a job.
      access: `write`, `read`, or the permissions of a fine-grained token in the user's namespace.
      hardware: what `list_jobs_hardware` answers; a job of another flavour is refused.
      group_ports: ports that jobs of a network group listen on, beside those that are exposed.
      never_starts: a job whose spec it accepts stays in SCHEDULING.
      grace_s: how long a job that is cancelled may take to end by itself.
      broken_streams: so many log streams to come are cut off after their next line.
    """

    user = "someone"

    def __init__(self, hub: "FakeHub", folder: Path, page_size: int):
        self._hub, self._folder, self._page_size = hub, folder, page_size
        self.image_env: dict[str, str] = {}
        self.access: str | list[str] = "write"
        self.hardware: list[dict[str, Any]] = [_cpu("cpu-basic", "2 vCPU", "16 GB", 167), _gpu("a10g-small", 24, 16667)]
        self.group_ports: tuple[int, ...] = (8000,)
        self.never_starts: Callable[[Spec], bool] = lambda spec: False
        self.grace_s = 5.0
        self.broken_streams = 0
        self.all: dict[str, Job] = {}
        self.exposed = ExposedPorts(folder / "exposed", lambda: hub.token, self._own_port)
        self._running: set[asyncio.Task] = set()

    def routes(self) -> Iterable[web.RouteDef]:
        job = "/api/jobs/{namespace}/{job}"
        return [
            web.get("/api/whoami-v2", self._whoami),
            web.get("/api/jobs/hardware", self._hardware),
            web.post("/api/jobs/{namespace}", self._run),
            web.get("/api/jobs/{namespace}", self._list),
            web.get(job, self._inspect),
            web.post(f"{job}/cancel", self._cancel),
            web.get(f"{job}/logs", self._logs),
        ]

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        # Mounts wait in threads for answers of this Hub, which decodes files in threads, too.
        self._loop.set_default_executor(ThreadPoolExecutor(64))
        await self.exposed.start()

    async def close(self) -> None:
        """Ends all jobs and what they have started."""
        for job in self.all.values():
            job.cancel(grace_s=0)
        await asyncio.gather(*self._running)
        await self.exposed.close()

    def preempt(self, job_id: str) -> None:
        """The machine of a job is taken away: its processes are killed, and what its mounts had not sent is lost."""
        self._loop.call_soon_threadsafe(self.all[job_id].preempt)

    def billing(self) -> list[Job]:
        """Jobs that cost money: those that have not ended."""
        return [job for job in self.all.values() if job.stage not in ENDED]

    def leftovers(self) -> dict[int, str]:
        """pid → command line of everything alive that a job has started."""
        return {pid: line for job in self.all for pid, line in processes_of(job).items()}

    def texts(self) -> Iterator[tuple[str, str]]:
        """(where, text) of all that somebody who may see a job can read: its description and its log."""
        for job in self.all.values():
            yield f"description of {job.id}", json.dumps(job.public())
            yield f"log of {job.id}", job.log_text()

    def _own_port(self, job_id: str, port: int) -> int | None:
        job = self.all.get(job_id)
        if job is None or job.stage in ENDED or port not in {*job.exposed, *(job.ports[p] for p in job.exposed)}:
            return None
        return job.ports.get(port, port)

    async def _whoami(self, request: web.Request) -> web.Response:
        access: dict[str, Any] = {"displayName": "test", "role": self.access}
        if not isinstance(self.access, str):
            scope = {"entity": {"_id": "u1", "type": "user", "name": self.user}, "permissions": self.access}
            access |= {"role": "fineGrained", "fineGrained": {"global": [], "scoped": [scope]}}
        who = {"type": "user", "id": "u1", "name": self.user, "fullname": "Some One", "canPay": True, "orgs": []}
        return web.json_response({**who, "auth": {"type": "access_token", "accessToken": access}})

    async def _hardware(self, request: web.Request) -> web.Response:
        return web.json_response(self.hardware)

    async def _run(self, request: web.Request) -> web.Response:
        spec = await request.json()
        self._require_write(request)
        if spec["flavor"] not in {hardware["name"] for hardware in self.hardware}:
            return _error(400, f"Invalid flavor: {spec['flavor']}")
        for key, value in (spec.get("labels") or {}).items():
            if not _LABEL.fullmatch(key) or not _LABEL.fullmatch(value):
                return _error(400, f"Invalid label: {key}={value}")
        for volume in spec.get("volumes") or []:
            if volume["type"] != "bucket" or not self._hub.buckets.exists(volume["source"]):
                return _error(404, f"Volume not found: {volume['source']}")
        job_id = secrets.token_hex(12)
        job = Job(self._hub, job_id, request.match_info["namespace"], spec, self._folder / job_id)
        self.all[job_id] = job
        task = asyncio.create_task(job.run())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return web.json_response(job.public())

    async def _list(self, request: web.Request) -> web.Response:
        stages = request.query.getall("stage", [])
        labels = dict(label.split("=", 1) for label in request.query.getall("label", []))
        found = [
            job.public()
            for job in reversed(self.all.values())
            if job.namespace == request.match_info["namespace"]
            and (not stages or job.stage in stages)
            and labels.items() <= (job.spec.get("labels") or {}).items()
        ]
        first = int(request.query.get("cursor", "0"))
        headers = {}
        if first + self._page_size < len(found):
            following = request.url.update_query(cursor=str(first + self._page_size))
            headers["Link"] = f'<{following}>; rel="next"'
        return web.json_response(found[first : first + self._page_size], headers=headers)

    async def _inspect(self, request: web.Request) -> web.Response:
        return web.json_response(self._job(request).public())

    async def _cancel(self, request: web.Request) -> web.Response:
        self._require_write(request)
        job = self._job(request)
        job.cancel(self.grace_s)
        return web.json_response(job.public())

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: the log so far (`tail`: its last lines), then what comes, until the job has ended."""
        job = self._job(request)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        at = max(0, len(job.log) - int(request.query["tail"])) if "tail" in request.query else 0
        while True:
            while at < len(job.log):
                time, text = job.log[at]
                at += 1
                event = json.dumps({"timestamp": time, "data": text})
                await stream.write(f"data: {event}\n\n".encode())
                if self.broken_streams > 0:
                    self.broken_streams -= 1
                    assert request.transport is not None
                    request.transport.abort()
                    return stream
            if job.stage in ENDED:
                return stream
            try:
                await asyncio.wait_for(job.changed(), _KEEP_ALIVE_S)
            except TimeoutError:
                await stream.write(b": keep-alive\n\n")

    def _job(self, request: web.Request) -> Job:
        job = self.all.get(request.match_info["job"])
        if job is None or job.namespace != request.match_info["namespace"]:
            raise web.HTTPNotFound(text=json.dumps({"error": "Job not found"}), content_type="application/json")
        return job

    def _require_write(self, request: web.Request) -> None:
        allowed = "job.write" in self.access if not isinstance(self.access, str) else self.access == "write"
        if not allowed or request.match_info["namespace"] != self.user:
            error = {"error": "This authentication method does not have sufficient permissions to call this method"}
            raise web.HTTPForbidden(text=json.dumps(error), content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status, headers={"X-Error-Message": message})


def _cpu(name: str, cpu: str, ram: str, micro_usd: int) -> dict[str, Any]:
    return {
        "name": name,
        "prettyName": name.replace("-", " ").title(),
        "cpu": cpu,
        "ram": ram,
        "ephemeralStorage": "50 GB",
        "accelerator": None,
        "unitCostMicroUSD": micro_usd,
        "unitCostUSD": micro_usd / 1e6,
        "unitLabel": "minute",
    }


def _gpu(name: str, vram_gb: int, micro_usd: int) -> dict[str, Any]:
    model = name.split("-")[0].upper()
    gpu = {"type": "gpu", "model": model, "quantity": "1", "vram": f"{vram_gb} GB", "manufacturer": "Nvidia"}
    return {**_cpu(name, "4 vCPU", "15 GB", micro_usd), "prettyName": f"Nvidia {model}", "accelerator": gpu}
