"""What vLLM computes with an adapter of ours is what the learner computes, for each target module on its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.adapters.peft import adapter_files
from grpo_jax.algorithms.objective import Objective
from grpo_jax.algorithms.policy_losses import importance_sampling
from grpo_jax.config.schema import Optimizer
from grpo_jax.learner.optimizer import build_optimizer
from grpo_jax.learner.probe import probe_lora
from grpo_jax.learner.step import build_step
from grpo_jax.models.config import TARGETS, LoraConfig, ModelConfig
from grpo_jax.models.weights import load_params
from tests.generator.calls import call

pytestmark = pytest.mark.slow

TOKENS = np.random.default_rng(3).integers(300, 8000, 20).astype(np.int32)


@pytest.fixture(scope="module")
def base(smollm2_dir):
    return load_params(smollm2_dir, ModelConfig.from_dir(smollm2_dir), jnp.float32)


@pytest.mark.parametrize("targets", [TARGETS, *((t,) for t in TARGETS)], ids=["all", *TARGETS])
def test_vllm_computes_our_log_probs(vllm_server, base, tmp_path, targets):
    model, lora = ModelConfig.from_dir(vllm_server.model_dir), LoraConfig(8, 16.0, targets=targets)
    objective, float32 = Objective(importance_sampling), jnp.dtype("float32")
    step = build_step(model, lora, build_optimizer(Optimizer()), objective, dtype=float32, temperature=1.0)
    tree = probe_lora(jax.random.key(7), model, lora)
    ours = np.asarray(step.canary(base, tree, TOKENS))
    without = np.asarray(step.canary(base, jax.tree.map(jnp.zeros_like, tree), TOKENS))

    name = f"export-{'-'.join(targets)}"
    for file, data in adapter_files(jax.device_get(tree), rank=8, alpha=16.0, rslora=False, base_model="x").items():
        (tmp_path / file).write_bytes(data)
    assert (
        call(f"{vllm_server.url}/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(tmp_path)}).status == 200
    )
    try:
        body = {"model": name, "prompt": TOKENS.tolist(), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        answer = call(f"{vllm_server.url}/v1/completions", body)
        assert answer.status == 200, answer.text
        entries = answer.json()["choices"][0]["prompt_logprobs"][1:]
        theirs = np.array([entry[str(token)]["logprob"] for entry, token in zip(entries, TOKENS[1:], strict=True)])
    finally:
        call(f"{vllm_server.url}/v1/unload_lora_adapter", {"lora_name": name})
    assert np.abs(ours - theirs).max() < 1e-3
    assert np.abs(ours - without).mean() > 0.05
