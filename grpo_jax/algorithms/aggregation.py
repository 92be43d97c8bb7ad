"""Aggregation: one weight per token, computed on the host over the whole batch, so that the device only ever sums."""

import numpy as np


def token_mean_weights(lengths_S: np.ndarray, valid_S: np.ndarray) -> np.ndarray:
    """Weight of each token of a sample under `token_mean`: 1 / Σ L over the valid samples of the whole batch (DAPO).

    Args:
      lengths_S: int, trained tokens per sample.
      valid_S: bool, False for samples that are not scorable: they have weight 0 and do not count in Σ L.

    Returns:
      float64, S. All 0 when no valid sample has a token.
    """
    total = int(np.sum(lengths_S, where=valid_S))
    return np.where(valid_S, 1.0 / max(total, 1), 0.0)
