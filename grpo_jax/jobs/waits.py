"""Which part of a run waits for which, told from its records alone. Pure: no clock, no I/O."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from grpo_jax.config.schema import Config
from grpo_jax.storage import layout
from grpo_jax.storage.records import Record


@dataclass
class View:
    """What is known of a run now. Records are empty or missing as long as nothing of this life has been read."""

    config: Config
    learner: Record = field(default_factory=dict)
    policy: Record = field(default_factory=dict)
    workers: dict[str, Record] = field(default_factory=dict)
    replicas: dict[str, Record] = field(default_factory=dict)
    silent_s: dict[str, float] = field(default_factory=dict)
    """Key of a record → seconds without a change."""
    proxy_error: str | None = None
    """Why the proxy does not answer."""

    def loads(self) -> bool:
        """Whether the first compilation, or the first model of a generator, is still under way, and alive."""
        limit_s = self.config.local.stuck_s
        if self.learner.get("phase", "starting") == "starting":
            return self.silent_s.get(layout.LEARNER_STATE, 0.0) < limit_s
        if self.learner.get("step", 0):
            return False
        replicas = self.replicas.values()
        starting = [r for r in replicas if r.get("state") == "starting" and not r.get("restarts")]
        return bool(starting) and not any(r.get("state") == "ready" for r in replicas)


def waits(view: View) -> list[str]:
    """A phrase for each part, from the learner on; the last ones are nearest to the cause."""
    return [_learner(view), _worker(view), *_proxy(view), *_generators(view)]


def state_of(phrases: Iterable[str]) -> str:
    """The same for phrases that differ in numbers only."""
    return re.sub(r"[0-9]+", "0", "; ".join(phrases))


def _learner(view: View) -> str:
    record = view.learner
    if not record:
        return "the learner has not written its state"
    if (silent := _silence(view, layout.LEARNER_STATE)) is not None:
        return f"the learner {silent}"
    if isinstance(said := record.get("waits_for"), str) and said:
        return f"the learner waits for {said}"
    doing = str(record.get("doing") or record.get("phase"))
    return f"the learner is {doing}, step {record.get('step', 0) + 1} of {view.config.steps}"


def _worker(view: View) -> str:
    if not view.workers:
        return "no worker has written its state"
    for name, record in view.workers.items():
        if (silent := _silence(view, f"{layout.WORKERS}/{name}")) is not None:
            return f"the worker {silent}"
        if record.get("inflight_samples"):
            return f"the worker waits for {record['inflight_samples']} completions"
        if record.get("inflight_groups"):
            return f"the worker waits for rewards, or for the bucket to take {record['inflight_groups']} groups"
        live, config = record.get("live", 0), view.config
        if live >= config.steps * config.batch.prompts_per_step:
            return "the worker has sampled all groups"
        if live >= (config.max_staleness + 1 + view.learner.get("version", 0)) * config.groups_per_version:
            return "the worker waits for the learner's next policy"
    return "the worker waits for a policy"


def _proxy(view: View) -> Iterator[str]:
    if view.proxy_error is not None:
        yield f"the proxy does not answer: {view.proxy_error}"
        return
    current = view.policy.get("current")
    names = {name for record in view.replicas.values() for name in record.get("proved", ())}
    if current is None:
        yield "no policy has been published"
    elif not names.intersection(view.policy.get("window", ())):
        yield f"the proxy has no replica that has proved {current}"


def _generators(view: View) -> Iterator[str]:
    if not view.replicas:
        yield "no generator has written its heartbeat"
    current = view.policy.get("current")
    for name, record in sorted(view.replicas.items()):
        who = f"generator {name.removesuffix('.json')}"
        error = f": {record['error']}" if record.get("error") else ""
        refused = record.get("quarantined") or {}
        if (silent := _silence(view, f"{layout.replicas(view.config.fleet_name)}/{name}")) is not None:
            yield f"{who} {silent}"
        elif record.get("state") != "ready":
            engine = "vLLM" if record.get("engine") == "vllm" else "its server"
            yield f"{who} waits for {engine} to answer{error}"
        elif current in record.get("proved", ()):
            yield f"{who} serves{error}"
        elif current in refused:
            yield f"{who} refuses {current}: {refused[current]}"
        elif view.policy.get("probe") in refused:
            yield f"{who} refuses the probe: {refused[view.policy['probe']]}"
        else:
            yield f"{who} has not proved {current}{error}"


def _silence(view: View, key: str) -> str | None:
    silent_s = view.silent_s.get(key, 0.0)
    return f"has been silent for {silent_s:.0f} s" if silent_s >= min(view.config.local.stuck_s, 30.0) else None
