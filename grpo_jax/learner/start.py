"""Everything before a learner's first step: run record, model, restored state, probe and current policy."""

import logging
import time
from collections.abc import Callable

import jax

from grpo_jax.adapters.publisher import Publisher
from grpo_jax.errors import RunFailed, UsageError
from grpo_jax.learner.checkpoint import Meta
from grpo_jax.learner.door import Door
from grpo_jax.learner.engine import Engine
from grpo_jax.learner.group_retention import GroupRetention
from grpo_jax.learner.history import History
from grpo_jax.learner.life import Life, Parts
from grpo_jax.learner.multihost import Leader, make_engine
from grpo_jax.learner.probe import canary_tokens, probe_lora
from grpo_jax.learner.retention import AdapterRetention, Needed, RetentionThread
from grpo_jax.learner.saving import Saver
from grpo_jax.learner.setup import Trainer, adapter_spec, build_trainer
from grpo_jax.learner.step import LearnerState
from grpo_jax.learner.target import RewardTarget
from grpo_jax.observability.metrics import MetricsLog, read_metrics
from grpo_jax.observability.sinks import open_sinks
from grpo_jax.rollouts.pinning import Pin
from grpo_jax.rollouts.sample import Group
from grpo_jax.storage import layout
from grpo_jax.storage.batches import Recorded, read_batches, recorded_steps
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordReader
from grpo_jax.storage.spool import SpoolReader
from grpo_jax.versions import versions

log = logging.getLogger(__name__)

# How long a checkpoint waits for the publish of its step, whose name belongs into it; and at most after a signal.
_SETTLE_S, _LAST_SETTLE_S = 60.0, 0.5


def prepare(life: Life) -> Parts:
    """Builds all parts, resuming whatever the bucket holds of the run, and makes its current policy known."""
    config, run = life.config, life.run
    life.activity.set("loading", "the model")
    trainer = build_trainer(config)
    _write_run_record(life, trainer)
    life.check_stop()
    engine, tokens = make_engine(trainer), canary_tokens(trainer.model)
    if isinstance(engine, Leader):
        life.closing.callback(lambda: engine.dismiss(life.exit_code))
    life.activity.set("restoring", "the newest checkpoint")
    lineage, is_restored = _restore(life, engine)
    metrics = life.persist("reading the metrics", lambda: _resume_metrics(life))
    life.closing.callback(_close_metrics, metrics)
    metrics.attach(open_sinks(life.run_body, life.run_dir, life.step))
    target = RewardTarget(config.optimizer.stop_at_reward, read_metrics(life.run_dir))
    life.spool = spool = _open_spool(life, trainer)
    pin = Pin(config, run) if config.evaluation.samples else None
    life.publisher = publisher = Publisher(
        run,
        adapter_spec(config, trainer),
        life.incarnation,
        window=config.window,
        canary_tokens=tokens,
        to_host=jax.device_get,
        lineage=lineage,
        pin=None if pin is None else pin.choose,
    )
    life.closing.callback(publisher.close)
    saver = Saver(
        life.checkpointer,
        config.checkpoints.every,
        lambda: _snapshot(life, engine, publisher),
        metrics.sync,
        saved_step=life.step if is_restored else -1,
    )
    parts = Parts(trainer, engine, tokens, publisher, metrics, saver, spool, target, pin)
    life.activity.set("publishing", "the current policy to be in the bucket")
    probe = trainer.published_form(probe_lora(jax.random.key(config.seed + 1), trainer.model, trainer.lora))
    logprobs = engine.canary(probe, tokens)
    life.persist("publishing the probe", lambda: publisher.publish_probe(probe, logprobs))
    _publish_current(life, parts)
    _start_retention(life, publisher)
    life.phase = "training"
    life.persist("writing the learner's state", life.heartbeat.write)
    life.check_stop()
    return parts


def _write_run_record(life: Life, trainer: Trainer) -> None:
    config, digest, created_at = life.config, trainer.base_digest, time.time()
    old = life.persist("reading the run's record", RecordReader(life.run, layout.RUN).read)
    if old is not None:
        created_at = old.get("created_at", created_at)
        known = str((old.get("base") or {}).get("digest") or digest)
        if known != digest:  # nothing is written then: the record has to go on saying what the run was started with
            raise UsageError(
                f"model.source: the weights of {config.model.source} are not those that the run {config.run} was "
                f"started with (digest {digest[:12]} instead of {known[:12]})"
            )
    life.run_body = {
        "run": config.run,
        "config": config.model_dump(mode="json"),
        "versions": versions(),
        "base": {"source": config.model.source, "digest": digest},
        "created_at": created_at,
        "error": None,
    }
    life.write_run_record(status="running")
    life.heartbeat.confirm(life.run_record)


def _restore(life: Life, engine: Engine) -> tuple[dict[int, str], bool]:
    """State, step and history as they are in the bucket; (lineage, whether there was a checkpoint)."""
    recorded = life.persist("listing the batch records", lambda: recorded_steps(life.run))
    restored = life.persist(
        "reading the checkpoint",
        lambda: life.checkpointer.restore_newest(
            engine.state_shape(), lambda step, incarnation: _counts(recorded, step, incarnation)
        ),
    )
    lineage: dict[int, str] = {}
    if restored is not None:
        state, meta = restored
        engine.restore(state)
        life.step = int(meta["step"])
        lineage = {int(version): str(name) for version, name in meta["lineage"].items()}
        log.info("resuming after step %d", life.step)
    else:
        engine.start_from(life.persist("reading lora.init_from", engine.trainer.given_lora))
    life.history = History(life.persist("reading the batch records", lambda: read_batches(life.run)))
    life.ledger.trained.update(life.history.trained_before(life.step))
    life.ledger.drops.update(life.history.drops_before(life.step))
    return lineage, restored is not None


def _counts(recorded: dict[int, Recorded], step: int, incarnation: int) -> bool:
    """Whether the state after `step` steps, saved by a life of the learner, is one that the run has gone on from.

    It is not if a later life has recorded another batch for one of those steps.
    """
    return all(batch.incarnation <= incarnation for t, batch in recorded.items() if t < step)


def _resume_metrics(life: Life) -> MetricsLog:
    life.run.check()  # the local file is rewritten, and no fence is before that
    return MetricsLog.resume(life.run_dir, life.run, life.step, life.incarnation)


def _open_spool(life: Life, trainer: Trainer) -> SpoolReader:
    door, history, ledger = Door(life.config, trainer.model.vocab_size), life.history, life.ledger
    trained = history.groups

    def check(group: Group) -> str | None:
        # What is on record has passed; a resume trains on just these groups.
        return None if str(group.id) in trained else door.problem(group)

    done = ledger.trained | {key for key, reason in ledger.drops.items() if reason != "invalid"}
    return SpoolReader(life.run, skip=done, check=check, files=history.files, max_bytes=door.max_bytes)


def _snapshot(life: Life, engine: Engine, publisher: Publisher) -> tuple[LearnerState, Callable[[], Meta]]:
    """Buffers of the state are donated to the next step, so the copy to the host is made here."""
    due, newest = life.step // life.config.sync_every, -(-life.step // life.config.sync_every)

    def meta() -> Meta:
        # Without the version that is being published now, a resume would take its groups for those of another lineage.
        publisher.settle(due, _LAST_SETTLE_S if life.is_interrupted else _SETTLE_S)
        lineage = {str(version): name for version, name in publisher.lineage.items() if version <= newest}
        return {"lineage": lineage, "incarnation": life.incarnation}

    return engine.host_state(), meta


def _publish_current(life: Life, parts: Parts) -> None:
    """Makes the policy of this step current (v0, or what was restored) and waits until the bucket has it."""
    publisher, engine, sync_every = parts.publisher, parts.engine, life.config.sync_every
    version, late = divmod(life.step, sync_every)
    if late and (life.step >= life.config.steps or parts.target.reached):
        version, late = version + 1, 0  # a run ends with a publish, wherever it ends
    known = [v for v in publisher.lineage if v <= version]
    if late and known:
        # Restored between two publishes: the current policy is an older one, which is in the bucket already.
        life.persist("writing the pointer", lambda: publisher.point_to(max(known)))
        return
    published = engine.published()
    publisher.submit(version, life.step, published, engine.canary(published, parts.tokens))
    life.flush(publisher, "the first adapter")


def _start_retention(life: Life, publisher: Publisher) -> None:
    config, root = life.config, Bucket(life.config.bucket)
    if config.retention.adapters == "needed":
        adapters = AdapterRetention(root, life.run, config.fleet_name, config.fleet.silent_s)
        thread = RetentionThread("adapters", lambda: adapters.collect(_needed(life, publisher)), root.is_local)
        life.closing.callback(thread.close)
    keep_gb = config.rollouts.keep_gb
    if keep_gb is not None:
        groups = GroupRetention(life.run, life.incarnation, keep_gb, lambda: _sizes(life))

        done = -1

        def collect() -> list[str]:
            nonlocal done
            oldest = next(iter(life.checkpointer.kept), done)
            if oldest == done:  # nothing more can be deleted
                return []
            gone = groups.collect(life.history.settled_before(oldest))
            done = oldest
            return gone

        thread = RetentionThread("groups", collect, root.is_local)
        life.closing.callback(thread.close)


def _needed(life: Life, publisher: Publisher) -> Needed:
    """The pointer's names, and those that it would have after a restart from each kept checkpoint."""
    lineage, names = publisher.lineage, set(publisher.named)
    oldest = min((v for v, name in lineage.items() if name in publisher.paced), default=0)
    for step in life.checkpointer.kept:
        versions_then = sorted(v for v in lineage if v <= step // life.config.sync_every)
        names.update(lineage[v] for v in versions_then[-life.config.window :])
    return Needed(names, oldest)


def _sizes(life: Life) -> dict[str, int]:
    return {**life.history.sizes, **(life.spool.sizes if life.spool is not None else {})}


def _close_metrics(metrics: MetricsLog) -> None:
    try:
        metrics.close()
    except (OSError, RunFailed) as trouble:
        log.warning("the last metrics are not in the bucket, but in the local file: %s", trouble)
