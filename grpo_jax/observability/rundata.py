"""All that a run has left in its bucket and its directory, read once; what is not there is said, not raised."""

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_jax.adapters.names import parse_policy
from grpo_jax.observability.metrics import Metrics, numbers, read_metrics
from grpo_jax.rollouts.sample import Group
from grpo_jax.storage import layout
from grpo_jax.storage.batches import read_batch
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import Record, read_record
from grpo_jax.storage.shapes import misfit
from grpo_jax.storage.spool import SpoolReader

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunData:
    """A snapshot. Records are {} where there is none; `missing` has a sentence for each thing that should be there."""

    name: str
    run: Record = field(default_factory=dict)  # run.json
    policy: Record = field(default_factory=dict)  # policy.json
    learner: Record = field(default_factory=dict)  # learner/state.json
    workers: dict[str, Record] = field(default_factory=dict)
    replicas: dict[str, Record] = field(default_factory=dict)
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # by version
    metrics: list[Metrics] = field(default_factory=list)  # by step
    groups: list[Group] = field(default_factory=list)  # by the time at which they were started
    missing: list[str] = field(default_factory=list)

    @property
    def config(self) -> dict[str, Any]:
        return self.run.get("config") or {}

    def config_value(self, path: str, default: Any) -> Any:
        """The value at `section.key` of the recorded config."""
        node: Any = self.config
        for key in path.split("."):
            if not isinstance(node, dict) or key not in node:
                return default
            node = node[key]
        return node

    @property
    def scored_evaluations(self) -> list[dict[str, Any]]:
        """Those on the configured split that have a reward, one for each version, by version."""
        split = self.config_value("evaluation.split", "eval")
        found = {_version(e): e for e in self.evaluations if e.get("split") == split and e["reward"] is not None}
        return [found[version] for version in sorted(found)]

    @property
    def held_out(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """(base, trained): the evaluations of v0 and of the newest later policy, as far as there are any."""
        found = {_version(e): e for e in self.scored_evaluations}
        return found.get(0), found[max(found)] if max(found, default=0) > 0 else None


def load_run(run_dir: Path | None, bucket: Bucket, groups: bool = True) -> RunData:
    """Reads the run whose prefix is `bucket`. `groups=False` leaves the spool alone (it may be large)."""
    missing: list[str] = []
    run = _record(bucket, layout.RUN, missing, "The run's record (run.json)")
    name = run.get("run") or run_name(bucket)
    fleet = ((run.get("config") or {}).get("fleet") or {}).get("name") or name
    read = (read_metrics(run_dir) if run_dir is not None else []) or read_metrics(bucket)
    metrics = [numbers(record) for record in read]
    if not metrics:
        missing.append("No step has been finished: there are no metrics.")
    spool = SpoolReader(bucket).poll() if groups else []
    if groups and not spool:
        missing.append("The spool holds no groups.")
    workers = _records(bucket, layout.WORKERS)
    if not workers:
        missing.append("No rollout worker has left a record.")
    replicas = _records(bucket_root(bucket), layout.replicas(fleet))
    if not replicas:
        missing.append(f"No generator of the fleet {fleet!r} has left a record.")
    evaluations = _evaluations(bucket)
    if not evaluations and ((run.get("config") or {}).get("evaluation") or {}).get("samples"):
        missing.append("No evaluation has been finished.")
    return RunData(
        name=name,
        run=run,
        policy=_record(bucket, layout.POLICY, missing, "The policy record (policy.json)"),
        learner=_record(bucket, layout.LEARNER_STATE, missing, "The learner's heartbeat (learner/state.json)"),
        workers=workers,
        replicas=replicas,
        evaluations=evaluations,
        metrics=metrics,
        groups=sorted(spool, key=lambda group: group.provenance.started_at),
        missing=missing,
    )


def bucket_root(run: Bucket) -> Bucket:
    """The bucket that the run's prefix lies in; the fleets are beside the runs."""
    return Bucket(str(run.local_path().parent) if run.is_local else run.url.rsplit("/", 1)[0])


def run_name(run: Bucket) -> str:
    """The name that a run's prefix ends in."""
    return run.local_path().name if run.is_local else run.url.rsplit("/", 1)[-1]


def batch_ids(bucket: Bucket, step: int) -> list[str]:
    """The ids of the groups that `step` trained, in order; [] if its batch record is not there or not sound."""
    record = read_batch(bucket, step)
    return [] if record is None else record["groups"]


def _record(bucket: Bucket, key: str, missing: list[str], what: str) -> Record:
    record = read_record(bucket, key)
    if record is None:
        missing.append(f"{what} {'is not there' if bucket.read_or_none(key) is None else 'is damaged'}.")
    return record or {}


def _records(bucket: Bucket, folder: str) -> dict[str, Record]:
    found = {}
    for key in bucket.list(folder):
        record = read_record(bucket, key)
        if record is not None:
            found[key.rsplit("/", 1)[-1].removesuffix(".json")] = record
    return found


def _evaluations(bucket: Bucket) -> list[dict[str, Any]]:
    found = []
    for key in bucket.list(layout.EVALUATIONS):
        try:
            evaluation = json.loads(bucket.read_or_none(key) or b"")
            if misfit(key, evaluation) is not None:
                raise ValueError
            _version(evaluation)
        except (ValueError, RecursionError):
            log.warning("%s is no evaluation", key)
            continue
        found.append(evaluation)
    return sorted(found, key=_version)


def _version(evaluation: dict[str, Any]) -> int:
    version = parse_policy(evaluation["policy"]).version
    return -1 if version is None else version
