"""Floating-point operations that a token costs. Knows nothing of jax."""

from grpo_jax.models.config import LoraConfig, ModelConfig, adapter_count, parameter_count


def flops_per_token(config: ModelConfig, lora: LoraConfig) -> float:
    """Forward and backward of one token with a frozen base: 4 N, and 6 for each number of the adapter.

    2 N forward and 2 N backward through the activations: the base has no weight gradient. N counts what a token is
    multiplied with: the head, but not an embedding that is only looked up. Attention's own products, which grow with
    the row, and what remat computes again are not counted.
    """
    matrices = parameter_count(config) - (0 if config.tie_embeddings else config.vocab_size * config.hidden_size)
    return 4.0 * matrices + 6.0 * adapter_count(config, lora)
