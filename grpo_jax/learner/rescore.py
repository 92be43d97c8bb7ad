"""Are the sampler's log-probabilities those of the policy that a sample names? Recomputed from the adapter."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_jax.adapters.manifest import download_adapter, read_manifest
from grpo_jax.adapters.peft import read_adapter
from grpo_jax.config.schema import Config
from grpo_jax.learner.packing import TrainSample
from grpo_jax.learner.setup import build_trainer
from grpo_jax.rollouts.sample import Group
from grpo_jax.scratch import scratch
from grpo_jax.storage.bucket import Bucket


@dataclass(frozen=True)
class Rescored:
    """|log π − log μ| of every sampled token under one policy, and the norm of that policy's update."""

    policy: str
    norm: float
    delta: np.ndarray  # float64


def rescore(config: Config, groups: Sequence[Group]) -> list[Rescored]:
    """Scores groups with the learner's model, in the config's dtype, under the adapter that each group names.

    The adapters are read back from the bucket, so this checks the whole way: learner, export, load, sampling, spool.
    """
    run = Bucket(config.bucket).child(config.run)
    trainer = build_trainer(config)
    by_policy: dict[str, list[Group]] = {}
    for group in groups:
        by_policy.setdefault(group.provenance.policy, []).append(group)
    found = []
    with scratch() as folder:
        for policy, members in sorted(by_policy.items()):
            manifest = read_manifest(run, policy)
            lora, _ = read_adapter(download_adapter(run, manifest, folder), trainer.model.num_layers)
            delta = []
            placed = trainer.step.place_lora(lora)
            for batch in trainer.layout.pack(_samples(members)):
                logprob_SxN, _ = trainer.step.score(trainer.base, placed, trainer.step.arrays(batch))
                used = batch.mask_SxN
                delta.append(np.abs(np.asarray(logprob_SxN, np.float64)[used] - batch.sampler_logprob_SxN[used]))
            found.append(Rescored(policy, manifest.norm, np.concatenate(delta)))
    return found


def _samples(groups: Sequence[Group]) -> list[TrainSample]:
    return [
        TrainSample(g, s, group.prompt_tokens, sample.tokens, sample.logprobs, 0.0, 0.0)
        for g, group in enumerate(groups)
        for s, sample in enumerate(group.samples)
        if len(sample.tokens)
    ]
