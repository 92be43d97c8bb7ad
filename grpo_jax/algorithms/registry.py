"""The names that a config may use, with their numbers, and the published recipes made of them. Knows no jax.

An objective is one function in `policy_losses` (or anywhere: a config may name it by import path) and one line here.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from grpo_jax.errors import UsageError


@dataclass(frozen=True)
class Loss:
    """What a config has to know of a policy loss.

    Attributes:
      defaults: its parameters.
      weightable: whether an off-policy weight may be put on top; False for those that hold one already.
      needs_recomputed: whether it is defined only against π_old.
      needs: the aggregation that it is defined with, if any.
      zero_without_advantage: whether the term of a token with A = 0 and its gradient are 0, so that it may be left out.
    """

    defaults: Mapping[str, float]
    weightable: bool = True
    needs_recomputed: bool = False
    needs: str | None = None
    zero_without_advantage: bool = True


LOSSES = {
    "ppo_clip": Loss({"clip_low": 0.2, "clip_high": 0.2}),
    "dual_clip": Loss({"clip_low": 0.2, "clip_high": 0.28, "cap": 3.0}),
    "cispo": Loss({"low": 0.0, "high": 5.0}),
    "reinforce_clip": Loss({"clip_high": 1.0}),
    "gspo": Loss({"clip_low": 3e-4, "clip_high": 4e-4}, needs="sequence_mean"),
    "sapo": Loss({"tau_positive": 1.0, "tau_negative": 1.05}),
    "decoupled_ppo": Loss({"clip_low": 0.2, "clip_high": 0.2, "cap": 5.0}, weightable=False, needs_recomputed=True),
    "a3po": Loss({"clip_low": 0.2, "clip_high": 0.2, "cap": 5.0}, weightable=False),
    "dppo_tv": Loss({"delta": 0.2, "tau": 1e-3}, zero_without_advantage=False),
    "importance_sampling": Loss({}, weightable=False),
}

WEIGHTS: dict[str, dict[str, float]] = {
    "token_tis": {"cap": 2.0},
    "sequence_tis": {"cap": 2.0},
    "token_mis": {"low": 0.5, "high": 5.0},
    "sequence_mis": {"cap": 3.0},
}

MASKS: dict[str, dict[str, float]] = {
    "geometric_mask": {"low": 0.99, "high": 1.01},
    "outlier_veto": {"low": 1e-4, "high": 100.0},
}

# What each recipe says beside the defaults of the config. Numbers that a paper tunes per run (learning rate, batch) are
# not part of it.
PRESETS: dict[str, dict[str, Any]] = {
    # arXiv 2402.03300
    "grpo": {
        "advantages": "grpo",
        "aggregation": "sequence_mean",
        "loss": "ppo_clip",
        "loss_args": {"clip_low": 0.2, "clip_high": 0.2},
        "kl_coef": 0.04,
        "kl_estimator": "k3",
    },
    # arXiv 2503.20783
    "dr_grpo": {
        "advantages": "dr_grpo",
        "aggregation": "constant",
        "loss": "ppo_clip",
        "loss_args": {"clip_low": 0.2, "clip_high": 0.2},
    },
    # arXiv 2503.14476; its overlong penalty counts from `overlong_cache` tokens before the limit and needs that number
    "dapo": {
        "advantages": "grpo",
        "aggregation": "token_mean",
        "loss": "ppo_clip",
        "loss_args": {"clip_low": 0.2, "clip_high": 0.28},
        "zero_variance": "replace",
        "overlong": "filter",
    },
    # arXiv 2507.18071
    "gspo": {
        "advantages": "grpo",
        "aggregation": "sequence_mean",
        "loss": "gspo",
        "loss_args": {"clip_low": 3e-4, "clip_high": 4e-4},
    },
    # arXiv 2506.13585
    "cispo": {
        "advantages": "grpo",
        "aggregation": "token_mean",
        "loss": "cispo",
        "loss_args": {"low": 0.0, "high": 5.0},
    },
    # arXiv 2402.14740: REINFORCE with the leave-one-out baseline; the importance weight is 1 on-policy
    "rloo": {"advantages": "rloo", "aggregation": "token_sum", "loss": "importance_sampling"},
    # arXiv 2505.24298
    "decoupled_ppo": {
        "advantages": "grpo",
        "aggregation": "token_mean",
        "loss": "decoupled_ppo",
        "loss_args": {"clip_low": 0.2, "clip_high": 0.2, "cap": 5.0},
        "anchor": "recomputed",
        "minibatches": 2,
    },
    # Token-level truncated importance sampling against the difference of precision between sampler and learner
    "precision_rl": {
        "advantages": "dr_grpo",
        "aggregation": "constant",
        "loss": "ppo_clip",
        "loss_args": {"clip_low": 0.2, "clip_high": 0.28},
        "anchor": "recomputed",
        "weight": "token_tis",
        "weight_args": {"cap": 2.0},
    },
}


def loss_of(name: str) -> Loss:
    """What is known of a loss; of one that is named by import path nothing is assumed, and its defaults are its own."""
    return LOSSES.get(name) or Loss({}, zero_without_advantage=False)


def loss_function(name: str) -> Callable[..., Any]:
    """The function of a registered name, or the one at an import path `package.module:function`."""
    if name in LOSSES:
        return getattr(importlib.import_module("grpo_jax.algorithms.policy_losses"), name)
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def bound_loss(name: str, numbers: Mapping[str, float]) -> Callable[..., Any]:
    """The policy loss with its numbers bound: what is left to give it is the tokens.

    Raises:
      UsageError: a loss of the user's own cannot be imported, is no function, or does not take these numbers.
    """
    try:
        loss = loss_function(name)
    # A module of the user's may fail in any way while it is imported.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"algorithm.loss: {name} cannot be imported: {reason}") from None
    if not callable(loss):
        raise UsageError(f"algorithm.loss: {name} is no function")
    try:
        inspect.signature(loss).bind(None, **numbers)
    except TypeError as error:
        raise UsageError(f"algorithm.loss_args: {name} cannot be called so: {error}") from None
    except ValueError:  # written in C, without a signature to look at
        pass
    return partial(loss, **numbers)


def factor_function(name: str) -> Callable[..., Any]:
    """The off-policy weight or mask of a name."""
    return getattr(importlib.import_module("grpo_jax.algorithms.off_policy"), name)
