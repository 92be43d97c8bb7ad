"""A run trained again from its recorded batches: the learner's steps without anybody who samples.

Ratios are against the log-probabilities that the sampler recorded, lags are those of the record, and the result is a
run of its own: record, metrics, adapters, checkpoints. Its metrics leave out what it does not have: queue, workers and
replicas.
"""

import logging
import threading
import time
from pathlib import Path
from typing import Any

import jax

from grpo_jax.adapters.publisher import Publisher
from grpo_jax.config.schema import Config
from grpo_jax.errors import EXIT_DONE, EXIT_RESUMABLE, RunFailed, UsageError
from grpo_jax.learner.checkpoint import Checkpointer
from grpo_jax.learner.diagnostics import group_metrics
from grpo_jax.learner.engine import Engine
from grpo_jax.learner.fence import FencedBucket, claim_incarnation
from grpo_jax.learner.optimizer import learning_rate
from grpo_jax.learner.probe import canary_tokens
from grpo_jax.learner.records import Heartbeat
from grpo_jax.learner.replay_source import Source
from grpo_jax.learner.saving import Saver
from grpo_jax.learner.setup import Trainer, adapter_spec, build_trainer
from grpo_jax.learner.step import LearnerState
from grpo_jax.learner.target import RewardTarget
from grpo_jax.learner.train import train_groups
from grpo_jax.learner.update_metrics import update_metrics
from grpo_jax.observability.metrics import MetricsLog, read_metrics
from grpo_jax.observability.sinks import open_sinks
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordReader, RecordWriter
from grpo_jax.versions import versions

log = logging.getLogger(__name__)

_FLUSH_S = 600.0
_SAY_EVERY_S = 10.0


class _Stopped(Exception):
    """The stop was set: what is finished is saved."""


def replay(config: Config, source: Source, run_dir: Path, stop: threading.Event) -> int:
    """Trains the batches of `source` into the run that `config` names, from where an earlier replay was interrupted.

    Returns:
      0, or 75 when `stop` was set.

    Raises:
      UsageError: the base is another one, or the config asks for what this machine cannot do.
      RunFailed: another replay has taken over this run.
    """
    trainer = build_trainer(config)
    base = source.record["base"]["digest"]
    if trainer.base_digest != base:
        raise UsageError(
            f"model.source: the weights of {config.model.source} are not those that {source.record['run']} was trained "
            f"on (digest {trainer.base_digest[:12]} instead of {base[:12]})"
        )
    player = _Player(config, source, run_dir, trainer, stop)
    try:
        player.play()
        player.finish()
        return EXIT_DONE
    except _Stopped:
        player.save()
        return EXIT_RESUMABLE
    except Exception as error:
        player.fail(str(error) if isinstance(error, RunFailed) else repr(error))
        raise
    finally:
        player.close()


class _Player:
    def __init__(self, config: Config, source: Source, run_dir: Path, trainer: Trainer, stop: threading.Event):
        self._config, self._source, self._trainer, self._stop = config, source, trainer, stop
        plain = Bucket(config.bucket).child(config.run)
        self._incarnation = incarnation = claim_incarnation(plain)
        self._run = run = FencedBucket(plain, incarnation)
        self._step, self._steps = 0, min(config.steps, source.steps)
        self._engine = Engine(trainer)
        self._tokens = canary_tokens(trainer.model)
        self._checkpointer = Checkpointer(run, config.checkpoints.keep, config.checkpoints.keep_every, incarnation)
        lineage, self._phase = self._restore(), "training"
        self._body = self._record()
        self._run_record = RecordWriter(run, layout.RUN, incarnation)
        self._run_record.write({**self._body, "status": "running"})
        self._metrics = MetricsLog.resume(run_dir, run, self._step)
        self._metrics.attach(open_sinks(self._body, run_dir, self._step))
        self._target = RewardTarget(config.optimizer.stop_at_reward, read_metrics(run_dir))
        self._rate = learning_rate(config.optimizer, config.steps)
        self._saver = Saver(
            self._checkpointer, config.checkpoints.every, self._snapshot, self._metrics.sync, self._step or -1
        )
        self._publisher = Publisher(
            run,
            adapter_spec(config, trainer),
            incarnation,
            window=config.window,
            canary_tokens=self._tokens,
            to_host=jax.device_get,
            lineage=lineage,
        )
        self._heartbeat = Heartbeat(run, incarnation, self._state)

    def play(self) -> None:
        if not self._step:
            self._publish(0, None)
        said = time.monotonic()
        while not self._over:
            self._check_stop()
            metrics = self._train()
            if time.monotonic() - said > _SAY_EVERY_S or self._over:
                said = time.monotonic()
                log.info("step %d of %d: loss %.4g", self._step, self._steps, metrics["loss"])

    def finish(self) -> None:
        self.save()
        self._phase = "done"
        self._heartbeat.write()
        self._run_record.write({**self._body, "status": "finished", "finished_at": time.time()})

    def save(self) -> None:
        self._publisher.flush(_FLUSH_S)
        if self._step:
            self._saver.save_for_good(self._step, _FLUSH_S)

    def fail(self, error: str) -> None:
        try:
            self._run_record.write({**self._body, "status": "failed", "error": error})
        except (OSError, RunFailed) as trouble:  # what ended the replay is to be told, not this
            log.warning("the replay cannot be marked failed: %s", trouble)

    def close(self) -> None:
        self._heartbeat.close()
        self._metrics.close()
        self._publisher.close()

    @property
    def _over(self) -> bool:
        return self._step >= self._steps or self._target.reached

    def _train(self) -> dict[str, Any]:
        config, step = self._config, self._step
        record, groups = self._source.batch(step), self._source.groups(step)
        started = time.time()
        rate = float(self._rate(step))
        trained = train_groups(
            self._engine, config, groups, step, rate=rate, canary_tokens=self._tokens, between=self._check_stop
        )
        computed = time.time()
        self._step = step + 1
        of_groups = group_metrics(groups, version=step // config.sync_every, now=computed)
        of_groups.pop("sample/time_in_queue_s", None)  # by the clock of the original
        self._target.add(of_groups.get("reward"))
        version = -(-self._step // config.sync_every)
        is_kept = self._over or (self._step % config.sync_every == 0 and config.retention.adapters == "all")
        if is_kept:
            self._publish(version, trained.applied)
        if not self._over:
            self._saver.after_step(self._step)
        self._heartbeat.announce()
        finished = time.time()
        metrics = {
            "step": step,
            "learning_rate": rate,
            **of_groups,
            **update_metrics(trained, config, self._trainer, computed - started, finished - started),
            "policy/version": float(version),
            "perf/step_s": finished - started,
            "perf/fwd_bwd_s": computed - started,
            "sample/dropped_stale_total": float(self._source.dropped(step)["stale"]),
            "sample/dropped_total": float(self._source.dropped(step).total()),
            "sample/quarantined_total": float(record["quarantined"]),
            "time/started": started,
            "time/computed": computed,
            "time/finished": finished,
        }
        self._metrics.append(metrics)
        return metrics

    def _publish(self, version: int, applied: Any) -> None:
        """In the background; none is skipped, so each waits for the one before it."""
        self._publisher.flush(_FLUSH_S)
        if applied is None:
            published = self._engine.published()
            logprobs: Any = self._engine.canary(published, self._tokens)
        else:
            published, logprobs = applied.publish, applied.canary_logprobs
        self._publisher.submit(version, self._step, published, logprobs)

    def _restore(self) -> dict[int, str]:
        """Goes on after the newest checkpoint, if there is one; returns its lineage."""
        restored = self._checkpointer.restore_newest(self._engine.state_shape())
        if restored is None:
            self._engine.start_from(self._trainer.given_lora())
            return {}
        state, meta = restored
        self._engine.restore(state)
        self._step = int(meta["step"])
        log.info("the replay goes on after step %d", self._step)
        return {int(version): name for version, name in meta["lineage"].items()}

    def _record(self) -> dict[str, Any]:
        old = RecordReader(self._run, layout.RUN).read()
        return {
            "run": self._config.run,
            "replay_of": self._source.label,
            "config": self._config.model_dump(mode="json"),
            "versions": versions(),
            "base": {"source": self._config.model.source, "digest": self._trainer.base_digest},
            "created_at": time.time() if old is None else old["created_at"],
            "error": None,
        }

    def _snapshot(self) -> tuple[LearnerState, dict[str, Any]]:
        lineage = {str(version): name for version, name in self._publisher.lineage.items()}
        return self._engine.host_state(), {"lineage": lineage, "incarnation": self._incarnation}

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise _Stopped
        if self._heartbeat.lost is not None:
            raise self._heartbeat.lost

    def _state(self) -> dict[str, Any]:
        return {
            "run": self._config.run,
            "step": self._step,
            "version": self._step // self._config.sync_every,
            "total_steps": self._config.steps,
            "phase": self._phase,
            "drops": [],
        }
