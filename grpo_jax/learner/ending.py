"""How a learner's life ends: the run is done, interrupted, or failed."""

import json
import logging
import time
from typing import Any

from grpo_jax.learner.fence import TakenOver, incarnations
from grpo_jax.learner.life import FLUSH_S, Life, Parts
from grpo_jax.observability.evaluations import dashboard_record
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import read_record

log = logging.getLogger(__name__)

_POLL_S = 0.1
_LATE_WRITE_S = 2.0
_RECORDS = (layout.RUN, layout.POLICY, layout.LEARNER_STATE)


def show_evaluations(life: Life, parts: Parts) -> None:
    """Hands the evaluations that have been finished since the last call to the dashboards."""
    for evaluation in [] if parts.pin is None else parts.pin.take_finished():
        parts.metrics.show(dashboard_record(evaluation, life.config.sync_every))


def finish(life: Life, parts: Parts) -> None:
    """Waits for the last publish and for its evaluation, if there is to be one; marks the run finished.

    RunFailed if the bucket does not take the last adapter or the last checkpoint.
    """
    life.activity.set("publishing", "the last version to be in the bucket")
    life.flush(parts.publisher, "the last adapter")
    life.activity.set("saving", "the last checkpoint to be in the bucket")
    parts.saver.save_for_good(life.step, FLUSH_S)
    life.phase = "draining"
    life.heartbeat.announce()
    _wait_for_evaluation(life, parts)
    life.phase = "done"
    life.activity.set("ending")
    life.heartbeat.announce()
    life.write_run_record(status="finished", finished_at=time.time())
    if not life.run.is_local:  # an earlier write that was given up may land yet, and nobody is there to correct it
        time.sleep(_LATE_WRITE_S)
        life.persist("marking the run finished", life.run_record.confirm)
    keep_last_words(life)


def keep_last_words(life: Life) -> None:
    """Copies of the records as they are now; for `put_right`."""

    def keep() -> None:
        for key in _RECORDS:
            life.run.put(layout.last_word(life.incarnation, key), life.run.read(key))

    life.persist("keeping the last records", keep)


def put_right(run: Bucket, mine: int) -> None:
    """By a learner that was taken over, when it leaves.

    What it was about to write when it was stopped (SIGSTOP, a frozen machine) may have landed in a record after the
    newer learner had finished the run, so that nobody else is there to correct it.
    """
    time.sleep(_LATE_WRITE_S)
    newest = max(incarnations(run), default=mine)
    for key in _RECORDS:
        kept, shown = run.read_or_none(layout.last_word(newest, key)), read_record(run, key)
        if kept is not None and shown is not None and shown["incarnation"] < newest:
            log.info("%s is written again as the learner that finished the run has left it", key)
            run.replace(key, kept)


def save_for_resume(life: Life, parts: Parts | None) -> None:
    """After an interruption: the last finished step, unless it is saved already."""
    if parts is not None:
        life.activity.set("saving", "the last checkpoint to be in the bucket")
        parts.saver.save_for_good(life.step, FLUSH_S)
    log.info("interrupted after step %d; the same command goes on", life.step)


def mark_failed(life: Life, error: str) -> None:
    if life.run_body and life.heartbeat.lost is None:
        try:
            life.run_record.write({**life.run_body, "status": "failed", "error": error})
        except (OSError, TakenOver) as trouble:  # what ended the run is to be told, not this
            log.warning("the run cannot be marked failed: %s", trouble)


def _wait_for_evaluation(life: Life, parts: Parts) -> None:
    show_evaluations(life, parts)
    evaluation, policy = life.config.evaluation, parts.publisher.current
    if not evaluation.samples or policy is None:
        return
    life.activity.set("waiting for the evaluation", f"the evaluation of {policy}")
    key = layout.evaluation(policy, evaluation.split)
    deadline = time.monotonic() + evaluation.timeout_s
    while True:
        found = _evaluation(life.persist("looking for the evaluation", lambda: life.run.read_or_none(key)))
        if found is not None:
            parts.metrics.show(dashboard_record(found, life.config.sync_every))
            return
        if time.monotonic() > deadline:
            log.warning("no evaluation of %s within %.0f s", policy, evaluation.timeout_s)
            return
        life.check_stop()
        time.sleep(_POLL_S)


def _evaluation(data: bytes | None) -> dict[str, Any] | None:
    """None if it is not there, or not whole yet."""
    try:
        return None if data is None else json.loads(data)
    except ValueError:
        return None
