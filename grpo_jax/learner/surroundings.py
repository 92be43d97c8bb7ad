"""What the learner sees of the others: the worker's record and the replicas' heartbeats. It reads, it never asks."""

import logging
import threading
import time

from grpo_jax.adapters.publisher import Publisher
from grpo_jax.config.schema import Config
from grpo_jax.errors import EXIT_ALONE, RunFailed
from grpo_jax.observability.load import FleetLoad
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import Record, RecordReader

log = logging.getLogger(__name__)

_LOCAL_PERIOD_S, _REMOTE_PERIOD_S = 0.2, 2.0


class Alone(RunFailed):
    """Nobody samples for this learner."""

    exit_code = EXIT_ALONE


class Surroundings:
    """A thread reads, so that the loop never waits for the bucket to tell it what is only news."""

    def __init__(self, config: Config):
        self._config = config
        self._root = Bucket(config.bucket)
        self._run = self._root.child(config.run)
        self._readers: dict[str, RecordReader] = {}
        self._records: dict[str, Record] = {}
        self._silent_s: dict[str, float] = {}  # at the last reading: a bucket out of reach is not the writer's silence
        self._load = FleetLoad(config.generator.max_num_seqs)
        self._heard_at = time.monotonic()  # when a replica was last known to live, or the bucket was out of reach
        self._last: tuple[float, float, float, float] | None = None
        self._period_s = _LOCAL_PERIOD_S if self._root.is_local else _REMOTE_PERIOD_S
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="surroundings", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)

    def check_alive(self, waited_s: float) -> None:
        """RunFailed when nothing will come: all workers have been silent for `fleet.idle_exit_s`, or none has come.

        Alone when no replica has shown a sign of life for `fleet.alone_exit_s`: it may be that nobody starts any.

        Args:
          waited_s: how long the learner has waited for groups.
        """
        silent_s = [s for key, s in dict(self._silent_s).items() if key.startswith(f"{layout.WORKERS}/")]
        limit = self._config.fleet.idle_exit_s
        if min(silent_s, default=waited_s) > limit:
            raise RunFailed(
                f"no rollout worker has written its state for {limit:.0f} s, and no group is left to train on"
            )
        limit = self._config.fleet.alone_exit_s
        if min(waited_s, time.monotonic() - self._heard_at) > limit:
            raise Alone(
                f"no replica of the fleet {self._config.fleet_name} has shown a sign of life for fleet.alone_exit_s = "
                f"{limit:g} s; the same command goes on once there is one"
            )

    @property
    def workers_say(self) -> str:
        """What the workers are at, as far as it is known, in one clause."""
        workers = self._workers()
        if not workers:
            return "no worker has written its state"
        running = sum(int(w.get("inflight_groups", 0)) for w in workers)
        return f"{running} are in flight at {len(workers)} worker{'s' if len(workers) > 1 else ''}"

    def metrics(self, publisher: Publisher | None, now: float) -> dict[str, float]:
        """Rollout, fleet and publish metrics; what is not known yet is left out."""
        workers, replicas = self._workers(), self._replicas()
        found = self._load.take()
        if workers:
            generated = float(sum(w.get("generated_tokens", 0) for w in workers))
            backpressure = float(sum(w.get("backpressure_s", 0) for w in workers))
            found["rollout/inflight"] = float(sum(w.get("inflight_samples", 0) for w in workers))
            found["cost/generated_tokens"] = generated
            found["cost/wasted_tokens"] = float(sum(w.get("wasted_tokens", 0) for w in workers))
            found["rollout/request_failures"] = float(sum(w.get("request_failures", 0) for w in workers))
            found["rollout/reward_failures"] = float(sum(w.get("reward_failures", 0) for w in workers))
            scoring_s = float(sum(w.get("scoring_s", 0.0) for w in workers))
            slots = float(sum(w.get("scoring_slots", 0) for w in workers))
            if self._last is not None and now > self._last[0]:
                before, generated_before, backpressure_before, scoring_before = self._last
                found["rollout/generated_tok_s"] = max(generated - generated_before, 0.0) / (now - before)
                found["rollout/backpressure_s"] = max(backpressure - backpressure_before, 0.0)
                found["rollout/scoring"] = min(max(scoring_s - scoring_before, 0.0) / (now - before), slots)
                found["rollout/scoring_slots"] = slots
            self._last = (now, generated, backpressure, scoring_s)
        newest = publisher.newest if publisher else None
        if newest is not None:
            found["policy/publish_s"] = newest.publish_s
            found["fleet/replicas_proved"] = float(sum(newest.name in r.get("proved", ()) for r in replicas))
        for key, metric in (("first_named", "policy/time_to_name_s"), ("first_served", "policy/time_to_serve_s")):
            seen = {name: t for w in workers for name, t in w.get(key, {}).items()}
            for published in reversed(publisher.published if publisher else []):
                if published.name in seen:
                    found[metric] = max(seen[published.name] - published.submitted_at, 0.0)
                    break
        return found

    def _workers(self) -> list[Record]:
        return self._known(layout.WORKERS)

    def _replicas(self) -> list[Record]:
        return self._known(layout.replicas(self._config.fleet_name))

    def _known(self, prefix: str) -> list[Record]:
        return [record for key, record in dict(self._records).items() if key.startswith(f"{prefix}/")]

    def _watch(self) -> None:
        while True:
            try:
                self._read(self._run, layout.WORKERS)
                self._read(self._root, layout.replicas(self._config.fleet_name))
                self._load.see(self._replicas())
                self._hear()
            except Exception as error:  # every kind of bucket raises errors of its own; what is known stays
                log.warning("records of the worker and the replicas cannot be read: %s", error)
                self._heard_at = time.monotonic()
            if self._stop.wait(self._period_s):
                return

    def _hear(self) -> None:
        prefix = layout.replicas(self._config.fleet_name)
        there = [key for key in self._records if key.startswith(f"{prefix}/")]
        if any(self._silent_s[key] < self._config.fleet.silent_s for key in there):
            self._heard_at = time.monotonic()

    def _read(self, bucket: Bucket, prefix: str) -> None:
        listed = bucket.list(prefix)
        for key in listed:
            reader = self._readers.setdefault(key, RecordReader(bucket, key))
            if (record := reader.read()) is not None:
                self._records[key] = record
            self._silent_s[key] = reader.silent_s()
        for key in [key for key in self._records if key.startswith(f"{prefix}/") and key not in listed]:
            del self._records[key]
