"""Aggregation: one weight per token, computed on the host over the whole optimiser batch, so that the device only sums.

The choice decides how much a long completion counts, and is where systems silently differ. A mean of micro-batch means
would be another objective; a weight that spans the batch cannot become one.
"""

import numpy as np

KINDS = ("sequence_mean", "token_mean", "constant", "token_sum", "prompt_mean")


def token_weights(lengths_PxG: np.ndarray, valid_PxG: np.ndarray, *, kind: str, max_length: int) -> np.ndarray:
    """The weight of each trained token of a sample in the sum that is minimised.

    N is the number of valid samples, L a sample's trained tokens:

    | kind | weight | used by |
    |---|---|---|
    | `sequence_mean` | 1 / (N · L) | GRPO (arXiv 2402.03300), GSPO (2507.18071) |
    | `token_mean` | 1 / Σ L over the batch | DAPO (2503.14476) |
    | `constant` | 1 / (N · max_length) | Dr. GRPO (2503.20783) |
    | `token_sum` | 1 / N | PipelineRL (2509.19128) |
    | `prompt_mean` | 1 / (prompts · Σ L within the prompt) | ScaleRL (2510.13786) |

    Args:
      lengths_PxG: int, trained tokens per sample; one row per prompt.
      valid_PxG: bool, False for what is not scorable or padding of the array: weight 0, and in no denominator. A valid
        sample without a token counts in N.
      max_length: `sampling.max_tokens`, the constant of `constant`.

    Returns:
      float64, P×G; all 0 when no valid sample has a token.
    """
    lengths = np.where(valid_PxG, lengths_PxG, 0).astype(np.float64)
    samples = max(int(valid_PxG.sum()), 1)
    if kind == "sequence_mean":
        denominator = samples * lengths
    elif kind == "token_mean":
        denominator = np.full_like(lengths, lengths.sum())
    elif kind == "constant":
        denominator = np.full_like(lengths, samples * max_length)
    elif kind == "token_sum":
        denominator = np.full_like(lengths, samples)
    elif kind == "prompt_mean":
        tokens_Px1 = lengths.sum(axis=1, keepdims=True)
        denominator = np.broadcast_to((tokens_Px1 > 0).sum() * tokens_Px1, lengths.shape)
    else:
        raise ValueError(f"unknown aggregation {kind!r}")
    return np.divide(1.0, denominator, out=np.zeros_like(lengths), where=(lengths > 0) & (denominator > 0))
