"""Jobs of the Hugging Face Hub by its own client: every call has a deadline, and says whether it may be repeated."""

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

from grpo_jax.jobs.launch_spec import LABEL_LAUNCH, LABEL_ROLE, LABEL_RUN, LABEL_SLOT, MOUNT, Spec
from grpo_jax.observability.logs import mask_secrets
from grpo_jax.storage.deadline import call_within
from grpo_jax.storage.scrub import scrubbed

log = logging.getLogger(__name__)

T = TypeVar("T")

_ENDED = frozenset({"COMPLETED", "CANCELED", "ERROR", "DELETED"})
_PASSING = frozenset({408, 409, 425, 429})
_DENIED = frozenset({401, 403})
_ATTEMPT_S, _PATIENCE_S, _DENIED_S = 60.0, 180.0, 20.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 15.0
_LONGEST_CAUSE = 300
_ASK_AGAIN_S = 15.0


class HubError(Exception):
    """The Hub did not do it. One sentence, without secrets; `passing`: the same call may succeed later."""

    def __init__(self, message: str, status: int | None, passing: bool):
        super().__init__(message)
        self.status, self.passing = status, passing


@dataclass(frozen=True)
class Job:
    """A job as the Hub describes it. Times in seconds since the epoch; `running_s`: for which it is paid."""

    id: str
    role: str
    slot: str
    launch: str
    stage: str
    message: str
    flavor: str
    created_at: float
    running_s: float
    url: str
    run: str = ""
    """Of a learner's job."""

    @property
    def is_live(self) -> bool:
        """Whether it runs or will run."""
        return self.stage not in _ENDED


def patiently(what: str, call: Callable[[], T]) -> T:
    """The result of an idempotent call, which is repeated while its failures may pass. HubError."""
    started, attempts = time.monotonic(), 0
    while True:
        attempts += 1
        try:
            return _once(what, call)
        except HubError as error:
            patience_s = _DENIED_S if error.status in _DENIED else _PATIENCE_S if error.passing else 0.0
            wait_s = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2**attempts) * random.uniform(0.5, 1.0)
            if time.monotonic() - started + wait_s >= patience_s:
                raise
            log.info("%s; it is tried again", error)
        time.sleep(wait_s)


def _once(what: str, call: Callable[[], T]) -> T:
    try:
        return call_within(_ATTEMPT_S, call)
    except LocalTokenNotFoundError:
        raise HubError(f"{what} failed: there is no token (HF_TOKEN, or `hf auth login`)", None, False) from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        passing = status is None or status >= 500 or status in _PASSING
        raise HubError(f"{what} failed: {_told(error, status)}", status, passing) from None
    # The client lets errors of its HTTP library through, which change with it.
    except (OSError, TimeoutError) as error:
        raise HubError(f"{what} failed: {_told(error, None)}", None, True) from None
    except Exception as error:
        if not type(error).__module__.startswith(("httpx", "httpcore", "requests")):
            raise
        raise HubError(f"{what} failed: {_told(error, None)}", None, True) from None


class HubJobs:
    """The jobs of one namespace that carry all of `labels`."""

    def __init__(self, namespace: str, labels: Mapping[str, str]):
        self._api, self._namespace, self._labels = HfApi(), namespace, dict(labels)
        self._asked: dict[str, float] = {}

    def start(self, spec: Spec, secrets: dict[str, str]) -> Job:
        """Asks once: a request that got no answer may have made a job all the same, and `all` tells."""
        from huggingface_hub import Volume  # which an older client lacks, and is told so in one sentence

        volumes = []
        if spec.mount is not None:
            at = spec.mount
            volumes = [Volume(type="bucket", source=at.id, mount_path=MOUNT, path=at.prefix or None)]
        return _job(
            _once(
                f"starting a job for {spec.slot}",
                lambda: self._api.run_job(
                    image=spec.image,
                    command=spec.command,
                    env=dict(spec.env),
                    secrets=secrets,
                    flavor=spec.flavor,
                    timeout=spec.timeout,
                    attempts=spec.attempts,
                    labels=spec.labels,
                    volumes=volumes or None,
                    expose=spec.expose or None,
                    network_group=spec.network_group,
                    network_aliases=spec.network_aliases or None,
                    namespace=self._namespace,
                ),
            )
        )

    def all(self) -> list[Job]:
        """All of them, ended ones too, as far as the Hub remembers them; the oldest first."""
        found = patiently(
            "listing the jobs", lambda: list(self._api.list_jobs(labels=self._labels, namespace=self._namespace))
        )
        # Not every server filters: what is not ours must never be cancelled.
        ours = [info for info in found if self._labels.items() <= (info.labels or {}).items()]
        return sorted((_job(info) for info in ours), key=lambda job: (job.created_at, job.id))

    def cancel(self, job: Job, ask: Callable[[str, Callable[[], Any]], Any] = patiently) -> None:
        """Asks for it, and not again within some seconds of a success. A job that has ended meanwhile is no error."""
        now = time.monotonic()
        if now - self._asked.get(job.id, float("-inf")) < _ASK_AGAIN_S:
            return
        try:
            ask(f"cancelling job {job.id}", lambda: self._api.cancel_job(job_id=job.id, namespace=self._namespace))
        except HubError as error:
            if error.passing or error.status in _DENIED:
                raise
            log.info("%s", error)
        self._asked[job.id] = now

    def cancel_all(self, unlisted: Sequence[Job] = (), timeout_s: float = 120.0) -> list[Job]:
        """Until none of them is live. Returns those that still are after `timeout_s`.

        HubError where the Hub refuses to cancel, or does not answer; one job that resists keeps no other from its end.

        Args:
          unlisted: further jobs, which the Hub may not list yet.
        """
        started = time.monotonic()
        while True:
            listed = self.all()
            ids, refused = {job.id for job in listed}, None
            live = [job for job in listed if job.is_live]
            late = [job for job in unlisted if job.id not in ids and job.id not in self._asked]
            spent_s = time.monotonic() - started
            if not (live or late) or spent_s > timeout_s:
                return [*live, *late]
            for job in (*live, *late):
                try:
                    self.cancel(job, _once)
                except HubError as error:
                    log.info("%s", error)
                    refused = error if error.status in _DENIED else refused
            if refused is not None and spent_s > _DENIED_S:
                raise refused
            time.sleep(0.5)

    def logs(self, job_id: str, follow: bool) -> Iterator[str]:
        """An iterator over the lines of a job's log from its beginning; raises what the client raises."""
        return iter(self._api.fetch_job_logs(job_id=job_id, namespace=self._namespace, follow=follow))


def hub_token() -> str | None:
    """Of HF_TOKEN or of a login."""
    return get_token()


def _told(error: Exception, status: int | None) -> str:
    text = " ".join(mask_secrets(scrubbed(getattr(error, "server_message", None) or str(error))).split())
    text = text if len(text) <= _LONGEST_CAUSE else f"{text[:_LONGEST_CAUSE]}…"
    if status in _DENIED:
        return f"the Hub refuses the token: HTTP {status}: {text}"
    return (f"HTTP {status}: {text}" if status is not None else text) or type(error).__name__


def _job(info: Any) -> Job:
    labels = info.labels or {}
    return Job(
        id=info.id,
        role=labels.get(LABEL_ROLE, ""),
        slot=labels.get(LABEL_SLOT, ""),
        launch=labels.get(LABEL_LAUNCH, ""),
        stage=str(getattr(info.status.stage, "value", info.status.stage)),
        message=info.status.message or "",
        flavor=str(getattr(info.flavor, "value", info.flavor) or ""),
        created_at=info.created_at.timestamp() if info.created_at else 0.0,
        running_s=_running_s(info),
        url=info.url,
        run=labels.get(LABEL_RUN, ""),
    )


def _running_s(info: Any) -> float:
    if info.durations is not None and info.durations.running_secs is not None:
        return float(info.durations.running_secs)
    if info.started_at is None:
        return 0.0
    return max(0.0, ((info.finished_at or datetime.now(UTC)) - info.started_at).total_seconds())
