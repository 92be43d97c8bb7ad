"""A run as its roles would have left it, by the real writers: steps of 4 s, two replicas, one version a step."""

from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.adapters.manifest import Canary, Manifest, file_entry, manifest_bytes
from grpo_jax.adapters.names import PolicyName, adapter_digest
from grpo_jax.observability.metrics import MetricsLog
from grpo_jax.rollouts.sample import Group, GroupId, Provenance, Sample
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordWriter, canonical_json
from grpo_jax.storage.spool import SpoolWriter

T0 = 1_800_000_000.0
STEP_S = 4.0
PROMPTS, SAMPLES = 4, 4
RUN = "toy"
CONFIG: dict[str, Any] = {
    "run": RUN,
    "steps": 10,
    "sync_every": 1,
    "max_staleness": 1,
    "model": {"source": "org/tiny"},
    "lora": {"rank": 8},
    "task": {"source": "experiments.tasks.addition:one_digit"},
    "rewards": [{"source": "experiments.rewards.numbers:last_integer"}],
    "batch": {"prompts_per_step": PROMPTS, "group_size": SAMPLES},
    "fleet": {"name": None},
    "evaluation": {"samples": 4, "split": "eval"},
    "generator": {"env": {"HF_TOKEN": "hf_abcdefgh", "OMP_NUM_THREADS": "2"}},
}


def files(version: int | None) -> dict[str, bytes]:
    """The two files of an adapter. Their content only has to differ by version."""
    return {layout.ADAPTER_CONFIG: b'{"r":8}', layout.ADAPTER_WEIGHTS: f"weights of {version}".encode()}


def policy(version: int | None) -> str:
    content = files(version)
    digest = adapter_digest(content[layout.ADAPTER_CONFIG], content[layout.ADAPTER_WEIGHTS])
    return str(PolicyName(RUN, version, digest[:8]))


def publish(run: Bucket, version: int | None) -> str:
    content, name = files(version), policy(version)
    for file, data in content.items():
        run.put(layout.adapter(name, file), data)
    manifest = Manifest(
        name=name,
        version=version,
        step=version or 0,
        rank=8,
        alpha=16.0,
        scale=2.0,
        targets=["q_proj", "v_proj"],
        base_digest="ab" * 32,
        norm=0.5,
        digest=adapter_digest(content[layout.ADAPTER_CONFIG], content[layout.ADAPTER_WEIGHTS]),
        files={file: file_entry(data) for file, data in content.items()},
        canary=Canary(tokens=[1, 2, 3], logprobs=[-1.0, -2.0]),
    )
    run.put(layout.adapter(name, layout.MANIFEST), manifest_bytes(manifest))
    return name


def group(
    index: int, version: int, started: float, finished: float, replica: str = "r0", text: str = "4", reward: float = 0.0
) -> Group:
    rewards = [reward, 1.0, 0.0, None][:SAMPLES]
    samples = tuple(
        Sample(
            tokens=np.arange(3 + i, dtype=np.int32),
            logprobs=np.full(3 + i, -0.5, np.float32),
            reward=r,
            reward_parts={"last_integer": r},
            text=text,
            finish_reason="stop",
        )
        for i, r in enumerate(rewards)
    )
    provenance = Provenance(
        policy=policy(version),
        replica=replica,
        problem_id=f"problem-{index}",
        seed=index,
        sampler={"temperature": 1.0},
        started_at=started,
        finished_at=finished,
        answer=4,
    )
    return Group(GroupId(0, index), np.arange(1, 6, dtype=np.int32), samples, provenance)


def record(step: int, total: int = 10) -> dict[str, Any]:
    """Step t waits 1 s, computes until 3.5 s and ends at 4 s; the reward goes from 0.2 to 0.9."""
    start = T0 + 2 + STEP_S * step
    return {
        "step": step,
        "reward": 0.2 + 0.7 * step / max(total - 1, 1),
        "reward_std": 0.4 - 0.02 * step,
        "rewards/last_integer": 0.15 + 0.5 * step / max(total - 1, 1),
        "rewards/short": 0.05 + 0.2 * step / max(total - 1, 1),
        "entropy": 1.2 - 0.05 * step,
        "grad_norm": 0.3 + 0.01 * step,
        "completions/mean_length": 14.0 - 0.3 * step,
        "completions/max_length": 16.0,
        "completions/clipped_frac": 0.1,
        "mismatch/lag0/mean": 2e-5,
        **({"mismatch/lag1/mean": 4e-4} if step else {}),
        "fleet/slots": 128.0,
        "fleet/running": 3.5,
        "fleet/waiting": 0.0,
        "policy/publish_s": 0.2,
        "perf/step_s": STEP_S,
        "perf/rollout_wait_s": 1.0,
        "perf/fwd_bwd_s": 2.5,
        "perf/publish_stall_s": 0.002 * (1 + step),
        "policy/time_to_serve_s": 0.5,
        "mismatch/p50": 1e-5,
        "mismatch/p99": 2e-4,
        "mismatch/max": 1e-3 * (1 + step),
        "sample/staleness_mean": min(step, 1) * 0.75,
        "sample/staleness_max": float(min(step, 1)),
        "rollout/generated_tok_s": 250.6,
        "time/started": start,
        "time/batch_ready": start + 1.0,
        "time/computed": start + 3.5,
        "time/finished": start + STEP_S,
    }


def write_metrics(run: Bucket, run_dir: Path, steps: int) -> None:
    log = MetricsLog(run_dir, run)
    for step in range(steps):
        log.append(record(step, steps))
    log.close()


def write_groups(run: Bucket, steps: int) -> None:
    """The groups of step t are sampled in the 2 s before its batch is complete, on two replicas in turn."""
    writer = SpoolWriter(run, "w0")
    for step in range(steps):
        ready = T0 + 3 + STEP_S * step
        ids = []
        for k in range(PROMPTS):
            text = "<script>alert(1)</script> & 4" if k == 0 else "so 4"
            made = group(step * PROMPTS + k, max(step - 1, 0), ready - 2, ready, f"r{k % 2}", text, step / steps)
            writer.write(made)
            ids.append(str(made.id))
        run.put(layout.batch(step), canonical_json({"step": step, "groups": ids, "version": step, "drops": {}}))


def write_records(root: Bucket, steps: int, status: str = "finished", error: str | None = None) -> None:
    run = root.child(RUN)
    body = {
        "run": RUN,
        "status": status,
        "error": error,
        "config": {**CONFIG, "steps": steps},
        "versions": {"python": "3.11.7", "jax": "0.10.2"},
        "base": {"source": "org/tiny", "digest": "ab" * 32},
        "created_at": T0,
        "finished_at": T0 + 2 + STEP_S * steps,
    }
    RecordWriter(run, layout.RUN, 1).write(body)
    names = [policy(v) for v in range(steps + 1)][::-1]
    RecordWriter(run, layout.POLICY, 1).write(
        {"run": RUN, "current": names[0], "window": names[:3], "probe": policy(None)}
    )
    drops = [["e000.i000090.a00", "stale"], ["e000.i000091.a00", "stale"], ["e000.i000092.a00", "invalid"]]
    RecordWriter(run, layout.LEARNER_STATE, 1).write(
        {"run": RUN, "step": steps, "version": steps, "total_steps": steps, "phase": "done", "drops": drops}
    )
    RecordWriter(run, layout.worker_state("w0"), 1).write(
        {
            "phase": "done",
            "started_at": T0,
            "inflight_groups": 0,
            "inflight_samples": 0,
            "live": 0,
            "generated_tokens": 12_345,
            "wasted_tokens": 1_234,
            "request_failures": 2,
            "reward_failures": 0,
            "redraws": 1,
            "skipped": [[0, 93, "no two scorable samples"]],
            "backpressure_s": 0.5,
            "first_served": dict.fromkeys(names, T0 + 3),
        }
    )
    for i in range(2):
        replica = {
            "id": f"r{i}",
            "url": f"http://127.0.0.1:{8000 + i}",
            "state": "ready",
            "runs": [RUN],
            "base_digest": "ab" * 32,
            "engine": "vllm",
            "engine_version": "0.32.0",
            "dtype": "float32",
            "proved": names[:2],
            "quarantined": {policy(3): "canary differs by 0.8"} if i else {},
            "loaded": names[:2],
            "proofs": 20 + i,
            "refused_total": 3 * i,
            "running": 0,
            "waiting": 0,
            "restarts": i,
            "started_at": T0,
            "error": None,
        }
        RecordWriter(root, layout.replica(RUN, f"r{i}"), 1).write(replica)
    for version, reward in ((0, 0.171875), (steps, 0.9375)):
        evaluation = {
            "policy": policy(version),
            "split": "eval",
            "problems": 16,
            "samples": 64,
            "reward": reward,
            "rewards": {"last_integer": reward},
            "pass_at": {"1": reward, "4": (1 + reward) / 2},
            "pass_reward": 1.0,
            "unscorable": 0,
            "finished_at": T0 + 60,
        }
        run.put(layout.evaluation(policy(version), "eval"), canonical_json(evaluation))


def write_run(root: Bucket, run_dir: Path, steps: int = 10, **records: Any) -> Bucket:
    """All of it. Returns the run's prefix."""
    run = root.child(RUN)
    write_records(root, steps, **records)
    write_metrics(run, run_dir, steps)
    write_groups(run, steps)
    return run
