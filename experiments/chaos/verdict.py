"""What became of one run, told from what lies in its store after its end."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from experiments.chaos.settings import PROMPTS, SAMPLES
from experiments.chaos.sightings import Committed
from grpo_jax.errors import RunFailed
from grpo_jax.jobs.watchdog import WORKER
from grpo_jax.observability.metrics import read_metrics
from grpo_jax.rollouts.sample import GroupId
from grpo_jax.storage import layout
from grpo_jax.storage.batches import read_batches
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.deleted import deleted_ids
from grpo_jax.storage.records import RecordReader


@dataclass(frozen=True)
class Verdict:
    """Of one run. Samples are completions; tokens are those of all lives of the worker."""

    final_step_ok: bool
    why: str
    """What is not right with the end, empty if all is."""
    steps: int
    trained_twice: int
    """Groups that two steps of the lineage that counts have trained, and steps that the metrics have twice."""
    lost_groups: int
    """Committed, and neither trained nor dropped with a reason nor there any more."""
    lost_samples: int
    """Of the groups in the batches, those that the metrics do not count."""
    rewritten: int
    """Groups and batch records whose bytes changed after they had been committed."""
    on_offer: int
    drops: Counter[str]
    same_prompt: int
    """Prompts (data indices) that were trained by more than one attempt."""
    generated: int
    trained: int
    tokens_generated: int
    tokens_wasted: int
    files: int
    """Left in the store and the run's directory beside what a run is meant to leave: temporary ones."""


def judge(store: Path, run_dir: Path, name: str, steps: int, exit_code: int, committed: Committed) -> Verdict:
    """`run_dir`: where the run has its metrics; `committed`: all that was seen of it while it went on."""
    run = Bucket(str(store)).child(name)
    try:
        records, unreadable = read_batches(run), ""
    except RunFailed as error:
        records, unreadable = {}, str(error)
    trained_by = Counter(group for record in records.values() for group in record["groups"])
    metrics = [record["step"] for record in read_metrics(run_dir)]
    dropped, there = committed.drops, committed.still_there() | set(deleted_ids(run))
    lost = {group for group in committed.digests if group not in trained_by and group not in dropped} - there
    counted = sum(int(r["batch/samples"] + r["batch/unscorable"]) for r in read_metrics(run_dir))
    attempts = Counter(GroupId.parse(group).index for group in trained_by)
    trained = sum(count * committed.samples.get(group, SAMPLES) for group, count in trained_by.items())
    worker = RecordReader(run, layout.worker_state(WORKER)).read() or {}
    why = unreadable or _wrong_end(run, steps, exit_code, sorted(records), metrics, trained_by.total())
    return Verdict(
        final_step_ok=not why,
        why=why,
        steps=len(metrics),
        trained_twice=sum(count - 1 for count in trained_by.values()) + len(metrics) - len(set(metrics)),
        lost_groups=len(lost),
        lost_samples=max(0, trained - counted),
        rewritten=len(committed.rewritten) + len(committed.changed_batches),
        on_offer=len(committed.digests.keys() - trained_by.keys() - dropped.keys() - lost),
        drops=Counter(reason for group, reason in dropped.items() if group not in trained_by),
        same_prompt=sum(count > 1 for count in attempts.values()),
        generated=sum(committed.samples.values()),
        trained=trained,
        tokens_generated=int(worker.get("generated_tokens", 0)),
        tokens_wasted=int(worker.get("wasted_tokens", 0)),
        files=sum(1 for path in (*store.rglob(".*.tmp"), *run_dir.rglob(".*.tmp"))),
    )


def _wrong_end(run: Bucket, steps: int, exit_code: int, recorded: list[int], metrics: list[int], groups: int) -> str:
    record = RecordReader(run, layout.RUN).read() or {}
    state = RecordReader(run, layout.LEARNER_STATE).read() or {}
    wrong = {
        f"the exit code is {exit_code}": exit_code != 0,
        f"the run is {record.get('status')}: {record.get('error')}": record.get("status") != "finished",
        f"the learner says step {state.get('step')} of {steps}, {state.get('phase')}": (
            (state.get("step"), state.get("phase")) != (steps, "done")
        ),
        f"the batches recorded are not those of steps 0 to {steps - 1}": recorded != list(range(steps)),
        f"the metrics are not those of steps 0 to {steps - 1}": metrics != list(range(steps)),
        f"{groups} groups were trained": groups != steps * PROMPTS,
    }
    return "; ".join(text for text, is_wrong in wrong.items() if is_wrong)
