"""The learner's life: start, then step after step until the run is done, and its end."""

import logging
import threading
import time
from pathlib import Path

from grpo_jax.config.schema import Config
from grpo_jax.errors import EXIT_DONE, EXIT_RESUMABLE, RunFailed, UsageError
from grpo_jax.learner.batch import is_all_alike
from grpo_jax.learner.diagnostics import group_metrics
from grpo_jax.learner.ending import finish, mark_failed, put_right, save_for_resume, show_evaluations
from grpo_jax.learner.engine import Engine
from grpo_jax.learner.fence import TakenOver
from grpo_jax.learner.life import FLUSH_S, Interrupted, Life, Parts
from grpo_jax.learner.multihost import connect, follow
from grpo_jax.learner.optimizer import learning_rate
from grpo_jax.learner.setup import build_trainer
from grpo_jax.learner.start import prepare
from grpo_jax.learner.step import Applied
from grpo_jax.learner.train import train_groups
from grpo_jax.learner.update_metrics import update_metrics
from grpo_jax.rollouts.sample import Group
from grpo_jax.storage import layout
from grpo_jax.storage.batches import BatchRecord, write_batch
from grpo_jax.storage.bucket import Bucket

log = logging.getLogger(__name__)

_POLL_S = 0.1
_SAY_EVERY_S = 60.0


def run_learner(config: Config, run_dir: Path, stop: threading.Event, *, hold: bool = False) -> int:
    """Trains until `config.steps` are done, resuming whatever the bucket holds of this run.

    Args:
      run_dir: for local files; the run's own folder when the bucket is a directory.
      stop: once set, the learner saves its last finished step and returns 75.
      hold: publish the base and then only wait to be stopped.

    With several processes (see `multihost`) all of them call this; process 0 is the learner, the others follow it.
    """
    if connect() > 0:
        return follow(Engine(build_trainer(config)))
    life, parts = Life(config, run_dir, stop), None
    try:
        parts = prepare(life)
        if hold:
            life.wait_for_the_end()
        Learner(life, parts).train()
        finish(life, parts)
        life.exit_code = EXIT_DONE
    except Interrupted:
        save_for_resume(life, parts)
        life.exit_code = EXIT_RESUMABLE
    except TakenOver:  # what this run is now is another's to say
        life.closing.close()
        _leave_as_it_was(config, life.incarnation)
        raise
    except (RunFailed, UsageError) as error:
        mark_failed(life, str(error))
        raise
    except Exception as error:
        mark_failed(life, repr(error))
        raise
    finally:
        life.closing.close()
    return life.exit_code


def _leave_as_it_was(config: Config, incarnation: int) -> None:
    try:
        put_right(Bucket(config.bucket).child(config.run), incarnation)
    except OSError as error:
        log.warning("whether the records are as the newer learner has left them is not known: %s", error)


class Learner:
    """The steps. Each takes a batch, records it, trains on it, publishes and saves what is due."""

    def __init__(self, life: Life, parts: Parts):
        self._life, self._parts, self._config = life, parts, life.config
        self._rate = learning_rate(life.config.optimizer, life.config.steps)

    @property
    def _over(self) -> bool:
        return self._life.step >= self._config.steps or self._parts.target.reached

    def train(self) -> None:
        while not self._over:
            self._train_step()

    def _train_step(self) -> None:
        life, parts, config, step = self._life, self._parts, self._config, self._life.step
        started = time.time()
        version = step // config.sync_every
        groups, record = self._next_batch(step, version)
        batch_ready = time.time()
        queue = life.ledger.ready(version)

        life.activity.set("training")
        rate = float(self._rate(step))
        trained = train_groups(
            parts.engine, config, groups, step, rate=rate, canary_tokens=parts.tokens, between=life.check_stop
        )
        computed = time.time()

        life.step = step + 1
        of_groups = group_metrics(groups, version=version, now=batch_ready)
        parts.target.add(of_groups.get("reward"))
        stall = self._publish(trained.applied)
        finished = time.time()
        if not all(trained.finite):
            log.warning("step %d: the gradient is not finite; the update is left out", step)
        line = {
            "step": step,
            "learning_rate": rate,
            **of_groups,
            **update_metrics(trained, config, parts.trainer, computed - batch_ready, finished - started),
            "policy/version": float(-(-life.step // config.sync_every)),
            "perf/step_s": finished - started,
            "perf/rollout_wait_s": batch_ready - started,
            "perf/fwd_bwd_s": computed - batch_ready,
            "perf/publish_stall_s": stall,
            "sample/rollout_queue_size": float(queue),
            "sample/dropped_stale_total": float(life.history.dropped(step)["stale"]),
            "sample/dropped_total": float(life.history.dropped(step).total()),
            "sample/quarantined_total": float(record["quarantined"]),
            "policy/skipped_total": float(parts.publisher.skipped),
            **life.surroundings.metrics(parts.publisher, finished),
            "time/started": started,
            "time/batch_ready": batch_ready,
            "time/computed": computed,
            "time/finished": finished,
        }
        life.persist("writing the metrics", lambda: parts.metrics.append(line))
        show_evaluations(life, parts)
        if not self._over:  # the last checkpoint is `finish`'s
            life.activity.set("saving")
            parts.saver.after_step(life.step)
        life.heartbeat.announce()

    def _publish(self, applied: Applied | None) -> float:
        """Publishes the version of this step if it is due; returns the seconds that the loop lost to it."""
        life, publisher, engine = self._life, self._parts.publisher, self._parts.engine
        if life.step % self._config.sync_every and not self._over:
            return 0.0
        started = time.monotonic()
        life.activity.set("publishing", "the previous version to be in the bucket")
        version = -(-life.step // self._config.sync_every)
        self._await_named(version - 1)
        if self._config.staleness is not None and not publisher.flush(FLUSH_S):
            # A version that is skipped would be missing for ever.
            raise RunFailed(f"the bucket {life.run.address} did not take an adapter within {FLUSH_S:.0f} s")
        if applied is None:  # a step without an update: the same weights, under the next version's name
            published = engine.published()
            publisher.submit(version, life.step, published, engine.canary(published, self._parts.tokens))
        else:
            publisher.submit(version, life.step, applied.publish, applied.canary_logprobs)
        return time.monotonic() - started

    def _await_named(self, version: int) -> None:
        """Groups of a life before this one may name a version that is still being published: their policy is known only
        then, and if a newer version took its place in the queue, it never would be."""
        publisher = self._parts.publisher
        if any(v <= version and v not in publisher.lineage for v in self._life.ledger.offered_versions):
            self._life.flush(publisher, "an adapter")

    # ---- batches

    def _next_batch(self, step: int, version: int) -> tuple[list[Group], BatchRecord]:
        """Waits for the groups of a step: those of its batch record if there is one, else the oldest on offer."""
        life, spool = self._life, self._parts.spool
        began = said = time.monotonic()
        while True:
            self._say_what_is_missing(step, version)
            life.ledger.offer(life.persist("reading the spool", spool.poll))
            life.ledger.reject(spool.lost)
            record = life.history.record(step)
            groups = self._take(version) if record is None else self._take_recorded(record)
            if groups is not None:
                return groups, record or self._record_batch(step, groups, version)
            life.check_stop()
            now = time.monotonic()
            if record is not None and now - began > self._config.rollouts.request_timeout_s:
                raise RunFailed(f"the batch record of step {step} names groups that are not in {layout.ROLLOUTS}/")
            life.surroundings.check_alive(now - began)
            if now - said > _SAY_EVERY_S:
                said = now
                log.info("has waited %.0f s for %s", now - began, life.activity.waits_for)
            time.sleep(_POLL_S)

    def _take(self, version: int) -> list[Group] | None:
        life, config = self._life, self._config
        newest = max(version, life.history.steps // config.sync_every)
        self._await_named(version)
        life.ledger.sweep(version, self._parts.publisher.lineage, newest)
        return life.ledger.take(
            config.batch.prompts_per_step,
            version,
            is_replaced=is_all_alike if config.algorithm.zero_variance == "replace" else None,
            max_candidates=config.max_candidates,
        )

    def _take_recorded(self, record: BatchRecord) -> list[Group] | None:
        return self._life.ledger.take_recorded(record["groups"], record["drops"])

    def _record_batch(self, step: int, groups: list[Group], version: int) -> BatchRecord:
        life, spool = self._life, self._parts.spool
        ids = [str(group.id) for group in groups]
        keys = [spool.file(name) or "" for name in ids]
        record = life.persist(
            "recording a batch",
            lambda: write_batch(
                life.run,
                step,
                life.incarnation,
                groups=ids,
                files=[(key, spool.sizes.get(key, 0)) for key in keys],
                version=version,
                drops=life.history.unrecorded(life.ledger.drops),
                quarantined=life.quarantined,
            ),
        )
        life.history.add(record)
        return record

    def _say_what_is_missing(self, step: int, version: int) -> None:
        life, count = self._life, self._config.batch.prompts_per_step
        there = life.ledger.ready(version)
        life.activity.set(
            "waiting for groups", f"{count} groups of step {step}: {there} there, {life.surroundings.workers_say}"
        )
