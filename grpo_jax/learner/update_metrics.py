"""Metrics of the updates of a step, and of the work that they were."""

import jax
import numpy as np

from grpo_jax.config.schema import Config
from grpo_jax.learner.diagnostics import token_metrics
from grpo_jax.learner.flops import peak_flops
from grpo_jax.learner.setup import Trainer
from grpo_jax.learner.train import Trained
from grpo_jax.models.flops import flops_per_token


def update_metrics(
    trained: Trained, config: Config, trainer: Trainer, fwd_bwd_s: float, step_s: float
) -> dict[str, float]:
    """Of the updates of a step and of what they computed; MFU only where the device's peak is known."""
    algorithm, batches = config.algorithm, trained.batches
    assert trained.record is not None
    slots = sum(b.tokens_BxT.size for b in batches)
    tokens = sum(int((b.prompt_ids_BxT > 0).sum()) for b in batches)
    metrics = {
        "loss": float(np.mean(trained.losses)) if trained.losses else np.nan,
        "grad_norm": float(np.mean(trained.norms)) if trained.norms else np.nan,
        "batch/skipped_update": float(algorithm.updates_per_step - sum(trained.finite)),
        "batch/tokens": float(tokens),
        "batch/fill": tokens / slots if slots else np.nan,
        "batch/trained_tokens": float(sum(b.count for b in batches)),
        **token_metrics(trained.record, weighted=algorithm.weight is not None),
    }
    passes = algorithm.num_iterations * tokens
    flops = flops_per_token(trainer.model, trainer.lora) * passes
    metrics["perf/model_tflop_s"] = flops / max(fwd_bwd_s, 1e-9) / 1e12
    if peak := peak_flops(jax.devices()[0].device_kind, trainer.dtype):
        total = peak * trainer.step.mesh.size
        metrics["perf/mfu_fwd_bwd"] = flops / max(fwd_bwd_s, 1e-9) / total
        metrics["perf/mfu_wall_clock"] = flops / max(step_s, 1e-9) / total
    return metrics
