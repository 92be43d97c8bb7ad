"""AdamW with warm-up, clipped by the global norm."""

import optax

from grpo_jax.config.schema import Optimizer


def learning_rate(config: Optimizer, updates: int) -> optax.Schedule:
    """Learning rate of update t = 0, 1, …: (t + 1) / warmup of the peak, then `schedule` down to 0 after `updates`.

    The warm-up does not begin at 0, where the first update would change nothing and v1 would equal v0.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    rest = max(updates - warmup, 1)
    after: optax.Schedule
    if config.schedule == "linear":
        after = optax.linear_schedule(peak, 0.0, rest)
    elif config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, rest)
    else:
        after = optax.constant_schedule(peak)
    if warmup == 0:
        return after
    return optax.join_schedules([optax.linear_schedule(peak / (warmup + 1), peak, warmup), after], [warmup])


def build_optimizer(config: Optimizer, updates: int) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(
            learning_rate(config, updates),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
        ),
    )
