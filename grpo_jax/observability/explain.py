"""Where one sample came from and what it did: `grpo-jax explain`."""

import math
from collections.abc import Mapping
from typing import Any

from grpo_jax.adapters.manifest import AdapterError, read_manifest
from grpo_jax.adapters.names import parse_policy
from grpo_jax.config.load import parse_config
from grpo_jax.config.schema import Config
from grpo_jax.errors import UsageError
from grpo_jax.observability import format as f
from grpo_jax.observability.printable import printable
from grpo_jax.observability.rundata import bucket_root
from grpo_jax.observability.samples import Decode
from grpo_jax.rollouts.sample import Group, GroupError, GroupId
from grpo_jax.storage import layout
from grpo_jax.storage.batches import BatchRecord, read_batches
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.dropped import dropped_in
from grpo_jax.storage.records import Record, read_record

_LONGEST_TEXT = 4000

Explanation = dict[str, Any]
Batches = Mapping[int, BatchRecord]


def explain(run: Bucket, sample_id: str, decode: Decode | None) -> Explanation:
    """All that is on record of a sample, as plain JSON values; of a replay, with what it weighed there.

    Args:
      run: the run's prefix.
      sample_id: as `grpo-jax samples` shows it, e.g. `e000.i000012.a00/3`.
      decode: token ids → text, if a tokenizer is at hand.

    Raises:
      UsageError: there is no such run or sample; says what became of it, where that is known.
    """
    group_id, index = _parse(sample_id)
    record = read_record(run, layout.RUN)
    if record is None:
        raise UsageError(f"{run.address}: there is no run (no sound {layout.RUN})")
    config = parse_config(record.get("config") or {}, f"{run.address}/{layout.RUN}")
    of = record.get("replay_of")
    sampled_by = Bucket(str(of["address"])) if of else run
    batches = read_batches(sampled_by)  # a replay has those of the original
    step, drop = _trained_by(batches, group_id), _drop_reason(sampled_by, batches, group_id)
    group = _group(sampled_by, group_id, step, drop, _files(batches, step).get(group_id, ""))
    if index >= len(group.samples):
        raise UsageError(f"{sample_id}: the group {group_id} has {len(group.samples)} samples, from 0 on")
    sample, provenance = group.samples[index], group.provenance
    return {
        "sample": sample_id,
        "run": record.get("run"),
        "replay_of": of["run"] if of else None,
        "problem": provenance.problem_id,
        "answer": provenance.answer,
        "prompt": None if decode is None else decode(group.prompt_tokens.tolist()),
        "prompt_tokens": group.prompt_tokens.tolist(),
        "completion": sample.text,
        "tokens": sample.tokens.tolist(),
        "logprobs": [float(x) if math.isfinite(x) else None for x in sample.logprobs],
        "finish_reason": sample.finish_reason,
        "policy": _policy(sampled_by, provenance.policy),
        "replica": _replica(sampled_by, config, provenance.replica),
        "seed": provenance.seed + index,
        "sampler": provenance.sampler,
        "started_at": provenance.started_at,
        "finished_at": provenance.finished_at,
        "reward": sample.reward,
        "rewards": _rewards(config, sample.reward_parts, provenance.verifiers),
        "failures": [text for text in provenance.failures if text.startswith(f"sample {index}:")],
        "training": _training(sampled_by, config, group, index, batches, step, drop),
    }


def lines(told: Explanation) -> list[tuple[str, str]]:
    """(what, value) for people; values may have several lines, and no control characters."""
    policy, training, replica = told["policy"], told["training"], told["replica"]
    rows = [
        (
            "sample",
            f"{told['sample']} of {told['run']}" + (f", sampled by {told['replay_of']}" * bool(told["replay_of"])),
        ),
        ("problem", f"{told['problem']}, answer {told['answer']!r}"),
        ("prompt", f"{len(told['prompt_tokens'])} tokens" + (f"\n{told['prompt']}" if told["prompt"] else "")),
        ("completion", f"{len(told['tokens'])} tokens, {told['finish_reason']}\n{told['completion']}"),
        ("policy", f"{policy['name']}, digest {policy['digest']}: of each of its tokens, one policy samples a group"),
        ("replica", ", ".join(str(value) for value in replica.values() if value is not None)),
        ("sampler", f"seed {told['seed']}, " + ", ".join(f"{key} {value}" for key, value in told["sampler"].items())),
        ("reward", "unscorable" if told["reward"] is None else f"{told['reward']:g}"),
        *((f"  {part['name']}", _part_line(part)) for part in told["rewards"]),
        *(("  failed", text) for text in told["failures"]),
        ("training", _training_line(training)),
    ]
    if training["advantage"] is not None:
        rows.append(("advantage", f"{training['advantage']:.6g}"))
        rows.append(
            ("weight", f"{training['token_weight']:.6g} for each of its tokens, in update {training['update']}")
        )
    return [(name, printable(value, _LONGEST_TEXT)) for name, value in rows]


def _parse(sample_id: str) -> tuple[str, int]:
    group, slash, index = sample_id.rpartition("/")
    try:
        if not (slash and index.isdecimal() and index.isascii()):
            raise ValueError
        return str(GroupId.parse(group)), int(index)
    except ValueError:
        raise UsageError(
            f"{sample_id!r} is no sample; `grpo-jax samples` shows which there are (e000.i000012.a00/3)"
        ) from None


def _trained_by(batches: Batches, group_id: str) -> int | None:
    """The step whose batch has the group."""
    return next((step for step, batch in batches.items() if group_id in batch["groups"]), None)


def _files(batches: Batches, step: int | None) -> dict[str, str]:
    """Group id → key of its file, of what a step trained; older records name none."""
    if step is None:
        return {}
    return {group: key for group, (key, _) in zip(batches[step]["groups"], batches[step]["files"], strict=False)}


def _drop_reason(run: Bucket, batches: Batches, group_id: str) -> str | None:
    """Why the learner will never train it: from its last word, or from its batch records."""
    state = read_record(run, layout.LEARNER_STATE) or {}
    drops = {group: reason for batch in batches.values() for group, reason in batch["drops"].items()}
    drops.update((str(group), reason) for group, reason in dropped_in(state))
    return drops.get(group_id)


def _group(run: Bucket, group_id: str, step: int | None, drop: str | None, recorded: str) -> Group:
    """From the file that was trained, where that is on record: two lives of a worker may have drawn it."""
    keys = [key for key in run.list(layout.ROLLOUTS) if key.endswith(f"/{group_id}.safetensors")]
    if not keys:
        known = f"; step {step} trained it" if step is not None else f"; it was dropped: {drop}" if drop else ""
        raise UsageError(f"{run.address}: the spool holds no group {group_id}{known}")
    key = recorded if recorded in keys else keys[0]
    try:
        return Group.from_bytes(run.read(key))
    except GroupError as error:
        raise UsageError(f"{key} in {run.address} cannot be read: {error}") from None


def _policy(run: Bucket, name: str) -> dict[str, Any]:
    """The whole digest where the manifest is still there, else what the name holds of it."""
    parsed = parse_policy(name)
    try:
        manifest = read_manifest(run, name)
    except AdapterError:
        return {"name": name, "version": parsed.version, "step": None, "digest": f"{parsed.hex}…"}
    return {"name": name, "version": parsed.version, "step": manifest.step, "digest": manifest.digest}


def _replica(run: Bucket, config: Config, replica: str) -> dict[str, Any]:
    """Its id, and what its last heartbeat said of its engine."""
    heartbeat: Record = {}
    if "/" not in replica and replica not in ("", ".", ".."):
        heartbeat = read_record(bucket_root(run), layout.replica(config.fleet_name, replica)) or {}
    return {"id": replica, **{key: heartbeat.get(key) for key in ("engine", "engine_version", "dtype")}}


def _rewards(config: Config, parts: Mapping[str, float | None], verifiers: Mapping[str, str]) -> list[dict[str, Any]]:
    """Each configured reward with its value, its parts, and the digest of the file that its function stood in."""
    return [
        {
            "name": reward.label,
            "source": reward.source,
            "args": reward.args,
            "weight": reward.weight,
            "value": parts.get(reward.label),
            "parts": {
                key.removeprefix(f"{reward.label}/"): value
                for key, value in parts.items()
                if key.startswith(f"{reward.label}/")
            },
            "sha256": verifiers.get(reward.label),
        }
        for reward in config.rewards
    ]


def _training(
    spool: Bucket, config: Config, group: Group, index: int, batches: Batches, step: int | None, drop: str | None
) -> dict[str, Any]:
    told: dict[str, Any] = {
        "state": "trained" if step is not None else "dropped" if drop else "not trained",
        "step": step,
        "reason": drop if step is None else None,
        "lag_versions": None,
        "lag_steps": None,
        "advantage": None,
        "token_weight": None,
        "update": None,
        "note": None,
    }
    if step is None:
        return told
    told["lag_versions"] = step // config.sync_every - group.version
    told["lag_steps"] = step - group.version * config.sync_every
    from grpo_jax.learner.credit import credit  # with jax: only where a step is to be computed again

    ids, files = batches[step]["groups"], _files(batches, step)
    try:
        groups = [group if i == str(group.id) else _group(spool, i, step, None, files.get(i, "")) for i in ids]
    except UsageError as error:
        return {**told, "note": f"its advantage cannot be computed: {error}"}
    found = credit(config, groups, step, ids.index(str(group.id)), index)
    return {**told, **found.__dict__}


def _part_line(part: dict[str, Any]) -> str:
    value = "unscorable" if part["value"] is None else f.reward(part["value"])
    parts = "".join(f", {name} {'none' if v is None else f.reward(v)}" for name, v in part["parts"].items())
    version = f"file sha256 {part['sha256'][:16]}" if part["sha256"] else "no version on record"
    return f"{value}{parts}; weight {part['weight']:g}, {part['source']}, {version}"


def _training_line(training: dict[str, Any]) -> str:
    if training["state"] != "trained":
        return training["state"] + (f": {training['reason']}" if training["reason"] else "")
    note = f"; {training['note']}" if training["note"] else ""
    return (
        f"by step {training['step']}, {training['lag_versions']} versions and {training['lag_steps']} steps after its "
        f"policy{note}"
    )
