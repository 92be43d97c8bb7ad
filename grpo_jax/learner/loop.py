"""The learner's life: claim, restore, publish, then step after step until the run is done."""

import logging
import threading
import time
from pathlib import Path
from typing import Any

import jax

from grpo_jax.adapters.publisher import AdapterSpec, Publisher
from grpo_jax.config.schema import Config
from grpo_jax.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, RunFailed, UsageError
from grpo_jax.learner.batch import is_zero_variance, train_minibatches
from grpo_jax.learner.checkpoint import Checkpointer
from grpo_jax.learner.diagnostics import group_metrics
from grpo_jax.learner.engine import Engine
from grpo_jax.learner.ledger import Ledger
from grpo_jax.learner.multihost import Leader, connect, follow, make_engine
from grpo_jax.learner.optimizer import learning_rate
from grpo_jax.learner.probe import canary_tokens, probe_lora
from grpo_jax.learner.records import (
    Heartbeat,
    check_incarnation,
    claim_incarnation,
    persist,
    read_batches,
    write_batch,
)
from grpo_jax.learner.retention import AdapterRetention, Needed, RetentionThread
from grpo_jax.learner.saving import Saver
from grpo_jax.learner.setup import Trainer, build_trainer
from grpo_jax.learner.step import Applied, LearnerState
from grpo_jax.learner.surroundings import Surroundings
from grpo_jax.learner.target import RewardTarget
from grpo_jax.learner.train import train_batch
from grpo_jax.learner.update_metrics import update_metrics
from grpo_jax.observability.metrics import MetricsLog, read_metrics
from grpo_jax.observability.sinks import open_sinks
from grpo_jax.rollouts.sample import Group
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordReader, RecordWriter
from grpo_jax.storage.spool import SpoolReader
from grpo_jax.versions import versions

log = logging.getLogger(__name__)

_POLL_S = 0.1
_FLUSH_S = 600.0
_LATE_WRITE_S = 2.0


class Interrupted(Exception):
    """SIGTERM or SIGINT: what is finished is saved, the same command goes on."""


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
    learner, code = Learner(config, run_dir, stop), EXIT_FAILED
    try:
        learner.prepare()
        if hold:
            stop.wait()
            raise Interrupted
        learner.train()
        learner.finish()
        code = EXIT_DONE
    except Interrupted:
        learner.save_for_resume()
        code = EXIT_RESUMABLE
    except (RunFailed, UsageError) as error:
        learner.fail(str(error))
        raise
    except Exception as error:
        learner.fail(repr(error))
        raise
    finally:
        learner.close(code)
    return code


class Learner:
    def __init__(self, config: Config, run_dir: Path, stop: threading.Event):
        self.config, self._stop = config, stop
        self._run = Bucket(config.bucket).child(config.run)
        self._incarnation = claim_incarnation(self._run)
        self._phase, self._step = "starting", 0
        self._ledger = Ledger(config.max_staleness, exactly=config.staleness is not None)
        self._heartbeat = Heartbeat(self._run, self._incarnation, self._state_body)
        self._run_record = RecordWriter(self._run, layout.RUN, self._incarnation)
        self._run_dir = run_dir
        self._metrics: MetricsLog | None = None
        self._checkpointer = Checkpointer(self._run, config.checkpoints.keep)
        self._surroundings = Surroundings(config)
        self._retention: RetentionThread | None = None
        self._saver: Saver | None = None
        self._run_body: dict[str, Any] = {}
        self._publisher: Publisher | None = None
        self._engine: Engine | None = None
        self._target = RewardTarget(None)
        self._rate = learning_rate(config.optimizer, config.steps)

    # ---- start

    def prepare(self) -> None:
        """Everything before the first step: run record, model, restored state, probe and current policy."""
        config = self.config
        trainer = self._trainer = build_trainer(config)
        self._write_run_record(trainer)
        self._tokens = canary_tokens(trainer.model)
        self._check_stop()

        engine = self._engine = make_engine(trainer)
        restored = self._checkpointer.restore_newest(engine.state_shape())
        lineage: dict[int, str] = {}
        if restored is not None:
            state, meta = restored
            engine.restore(state)
            self._step = int(meta["step"])
            lineage = {int(version): name for version, name in meta["lineage"].items()}
            log.info("resuming after step %d", self._step)
        self._records = read_batches(self._run)
        for step, record in self._records.items():
            self._ledger.drops.update(record["drops"])
            if step < self._step:
                self._ledger.trained.update(record["groups"])
        self._metrics = MetricsLog.resume(self._run_dir, self._run, self._step)
        self._metrics.attach(open_sinks(self._run_body, self._run_dir, self._step))
        self._target = RewardTarget(config.optimizer.stop_at_reward, read_metrics(self._run_dir))
        self._saver = Saver(
            self._checkpointer,
            config.checkpoints.every,
            self._snapshot,
            self._metrics.sync,
            saved_step=-1 if restored is None else self._step,
        )
        self._spool = SpoolReader(self._run, skip=self._ledger.trained | set(self._ledger.drops))

        self._publisher = Publisher(
            self._run,
            AdapterSpec(
                run=config.run,
                rank=trainer.lora.rank,
                alpha=trainer.lora.alpha,
                rslora=trainer.lora.rslora,
                scale=trainer.lora.scale,
                base_model=config.model.source,
                base_digest=trainer.base_digest,
            ),
            self._incarnation,
            window=config.window,
            canary_tokens=self._tokens,
            to_host=jax.device_get,
            lineage=lineage,
        )
        probe = trainer.published_form(probe_lora(jax.random.key(config.seed + 1), trainer.model, trainer.lora))
        self._publisher.publish_probe(probe, engine.canary(probe, self._tokens))
        self._publish_current(self._step)
        if config.retention.adapters == "needed":
            root = Bucket(config.bucket)
            retention = AdapterRetention(root, config.run, config.fleet_name, config.fleet.silent_s)
            self._retention = RetentionThread(retention, self._needed_adapters, root.is_local)
        self._phase = "training"
        self._heartbeat.write()
        self._check_stop()

    def _write_run_record(self, trainer: Trainer) -> None:
        self._run_body = {
            "run": self.config.run,
            "config": self.config.model_dump(mode="json"),
            "versions": versions(),
            "base": {"source": self.config.model.source, "digest": trainer.base_digest},
            "created_at": time.time(),
            "error": None,
        }
        old = RecordReader(self._run, layout.RUN).read()
        if old is not None:
            self._run_body["created_at"] = old["created_at"]
            if old["base"]["digest"] != trainer.base_digest:
                raise UsageError(
                    f"model.source: the weights of {self.config.model.source} are not those that the run "
                    f"{self.config.run} was started with (digest {trainer.base_digest[:12]} instead of "
                    f"{old['base']['digest'][:12]})"
                )
        self._run_record.write({**self._run_body, "status": "running"})

    # ---- steps

    @property
    def _over(self) -> bool:
        return self._step >= self.config.steps or self._target.reached

    def train(self) -> None:
        while not self._over:
            self._train_step()

    def _train_step(self) -> None:
        config, step = self.config, self._step
        started = time.time()
        version = step // config.sync_every
        groups = self._next_groups(step, version)
        batch_ready = time.time()
        queue = self._ledger.ready(version)

        assert self._engine is not None
        lags = [step - group.version * config.sync_every for group in groups]
        minibatches = train_minibatches(
            groups,
            config.algorithm,
            max_tokens=config.sampling.max_tokens,
            step_lags=lags,
            skip_zero_advantage=config.batch.skip_zero_advantage,
        )
        rate = float(self._rate(step))
        trained = train_batch(
            self._engine,
            minibatches,
            lags,
            iterations=config.algorithm.num_iterations,
            rate=rate,
            canary_tokens=self._tokens,
            between=self._check_stop,
        )
        jax.block_until_ready(trained.applied)
        computed = time.time()

        self._step = step + 1
        of_groups = group_metrics(groups, version=version, now=batch_ready)
        self._target.add(of_groups.get("reward"))
        stall = self._after_step(trained.applied)
        finished = time.time()
        if not all(trained.finite):
            log.warning("step %d: the gradient is not finite; the update is left out", step)
        assert self._metrics is not None
        self._metrics.append(
            {
                "step": step,
                "learning_rate": rate,
                **of_groups,
                **update_metrics(trained, config, self._trainer, computed - batch_ready, finished - started),
                "policy/version": float(-(-self._step // config.sync_every)),
                "perf/step_s": finished - started,
                "perf/rollout_wait_s": batch_ready - started,
                "perf/fwd_bwd_s": computed - batch_ready,
                "perf/publish_stall_s": stall,
                "sample/rollout_queue_size": float(queue),
                "sample/dropped_stale_total": float(sum(r == "stale" for r in self._ledger.drops.values())),
                "sample/dropped_total": float(len(self._ledger.drops)),
                "policy/skipped_total": float(self._publisher.skipped) if self._publisher else 0.0,
                **self._surroundings.metrics(self._publisher, finished),
                "time/started": started,
                "time/batch_ready": batch_ready,
                "time/computed": computed,
                "time/finished": finished,
            }
        )

    def _after_step(self, applied: Applied | None) -> float:
        """Publishes and checkpoints what is due; returns the seconds that the loop lost to publishing."""
        config, stall = self.config, 0.0
        if self._step % config.sync_every == 0 or self._over:
            started = time.monotonic()
            assert self._publisher is not None
            assert self._engine is not None
            version = -(-self._step // config.sync_every)
            if config.staleness is not None:
                self._publisher.flush(_FLUSH_S)  # a version that is skipped would be missing for ever
            if applied is None:  # a step without an update: the same weights, under the next version's name
                published = self._engine.published()
                self._publisher.submit(version, self._step, published, self._engine.canary(published, self._tokens))
            else:
                self._publisher.submit(version, self._step, applied.publish, applied.canary_logprobs)
            stall = time.monotonic() - started
        if not self._over:  # the last checkpoint is `finish`'s
            assert self._saver is not None
            self._saver.after_step(self._step)
        self._heartbeat.announce()
        return stall

    def _next_groups(self, step: int, version: int) -> list[Group]:
        """Waits for the groups of a step: those of its batch record if there is one, else the oldest on offer."""
        recorded = self._records.get(step)
        deadline = time.monotonic() + self.config.rollouts.request_timeout_s
        while True:
            self._ledger.offer(persist("reading the spool", self._spool.poll, self._check_stop))
            self._ledger.reject(self._spool.rejected)
            if recorded is not None:
                groups = self._ledger.take_recorded(recorded["groups"])
                if groups is None and time.monotonic() > deadline:
                    raise RunFailed(f"{layout.batch(step)} names groups that are not in {layout.ROLLOUTS}/")
            else:
                self._ledger.sweep(version, self._lineage())
                groups = self._ledger.take(
                    self.config.batch.prompts_per_step,
                    version,
                    is_replaced=self._is_replaced if self.config.algorithm.zero_variance == "replace" else None,
                    max_candidates=self.config.max_candidates,
                )
            if groups is not None:
                break
            self._check_stop()
            self._surroundings.check_alive()
            time.sleep(_POLL_S)
        if recorded is None:
            persist("recording a batch", lambda: self._record_batch(step, groups, version), self._check_stop)
        return groups

    def _record_batch(self, step: int, groups: list[Group], version: int) -> None:
        check_incarnation(self._run, self._incarnation)
        write_batch(self._run, step, [str(group.id) for group in groups], version, self._ledger.drops)

    def _is_replaced(self, group: Group) -> bool:
        return is_zero_variance(group, self.config.algorithm, self.config.sampling.max_tokens)

    def _lineage(self) -> dict[int, str]:
        assert self._publisher is not None
        return self._publisher.lineage

    def _publish_current(self, step: int) -> None:
        """Makes the policy of `step` current (v0, or what was restored) and waits until the bucket has it."""
        assert self._publisher is not None
        assert self._engine is not None
        version, late = divmod(step, self.config.sync_every)
        if late and self._lineage():
            # Restored between two publishes: the current policy is an older one, which is in the bucket already.
            self._publisher.point_to(max(v for v in self._lineage() if v <= version))
            return
        published = self._engine.published()
        logprobs = self._engine.canary(published, self._tokens)
        self._publisher.submit(version, step, published, logprobs)
        if not self._publisher.flush(_FLUSH_S):
            raise RunFailed(f"the bucket {self._run.address} did not take the first adapter within {_FLUSH_S:.0f} s")

    # ---- end

    def finish(self) -> None:
        """Waits for the last publish and for its evaluation, if there is to be one; marks the run finished."""
        assert self._publisher is not None
        self._publisher.flush(_FLUSH_S)
        assert self._saver is not None
        self._saver.save_for_good(self._step, _FLUSH_S)
        newest = self._publisher.newest
        self._phase = "draining"
        self._heartbeat.announce()
        evaluation = self.config.evaluation
        if evaluation.samples and newest is not None:
            key = layout.evaluation(newest.name, evaluation.split)
            deadline = time.monotonic() + evaluation.timeout_s
            while persist("looking for the evaluation", lambda: self._run.read_or_none(key), self._check_stop) is None:
                if time.monotonic() > deadline:
                    log.warning("no evaluation of %s within %.0f s", newest.name, evaluation.timeout_s)
                    break
                self._check_stop()
                time.sleep(_POLL_S)
        self._phase = "done"
        self._heartbeat.announce()
        over = {**self._run_body, "status": "finished", "finished_at": time.time()}
        persist("marking the run finished", lambda: self._run_record.write(over), self._check_stop)
        if not self._run.is_local:  # an earlier write that was given up may land yet, and nobody is there to correct it
            time.sleep(_LATE_WRITE_S)
            persist("marking the run finished", self._run_record.confirm, self._check_stop)

    def save_for_resume(self) -> None:
        """After an interruption: the last finished step, unless it is saved already."""
        if self._saver is not None and self._phase != "starting":
            self._saver.save_for_good(self._step, _FLUSH_S)
        log.info("interrupted after step %d; the same command goes on", self._step)

    def fail(self, error: str) -> None:
        if self._run_body and self._heartbeat.lost is None:
            try:
                self._run_record.write({**self._run_body, "status": "failed", "error": error})
            except OSError as trouble:  # what ended the run is to be told, not this
                log.warning("the run cannot be marked failed: %s", trouble)

    def close(self, exit_code: int) -> None:
        self._heartbeat.close()
        self._surroundings.close()
        if self._retention is not None:
            self._retention.close()
        if self._metrics is not None:
            try:
                self._metrics.close()
            except OSError as trouble:  # the local file has them
                log.warning("the last metrics are not in the bucket: %s", trouble)
        if self._publisher is not None:
            self._publisher.close()
        if isinstance(self._engine, Leader):
            self._engine.dismiss(exit_code)

    # ---- parts

    def _snapshot(self) -> tuple[LearnerState, dict[str, Any]]:
        """Buffers of the state are donated to the next step, so the copy to the host is made here."""
        assert self._engine is not None
        lineage = {str(version): name for version, name in self._lineage().items()}
        return self._engine.host_state(), {"lineage": lineage, "incarnation": self._incarnation}

    def _needed_adapters(self) -> Needed | None:
        """The pointer's names, and those that it would have after a restart from each kept checkpoint."""
        if self._publisher is None:
            return None
        lineage, names = self._lineage(), set(self._publisher.named)
        oldest = min((v for v, name in lineage.items() if name in names), default=0)
        for step in self._checkpointer.kept:
            versions = sorted(v for v in lineage if v <= step // self.config.sync_every)
            names.update(lineage[v] for v in versions[-self.config.window :])
        return Needed(names, oldest)

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise Interrupted
        if self._heartbeat.lost is not None:
            raise self._heartbeat.lost

    def _state_body(self) -> dict[str, Any]:
        newest = self._publisher.newest if self._publisher else None
        return {
            "run": self.config.run,
            "step": self._step,
            "version": newest.version if newest else 0,
            "total_steps": self.config.steps,
            "phase": self._phase,
            "drops": sorted(dict(self._ledger.drops).items()),  # a copy: the loop goes on while this thread sorts
        }
