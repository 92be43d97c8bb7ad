"""AdamW clipped by the global norm, and the learning rate of a step."""

import optax

from grpo_jax.config.schema import Optimizer


def learning_rate(config: Optimizer, steps: int) -> optax.Schedule:
    """Learning rate of step t = 0, 1, …: (t + 1) / (warmup + 1) of the peak, then `schedule` down to 0 after `steps`.

    It counts steps, not optimiser updates: all updates of a step have one rate, and an update that was left out does
    not hold it back. The warm-up does not begin at 0, where the first update would change nothing and v1 equal v0.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    rest = max(steps - warmup, 1)
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


def build_optimizer(config: Optimizer) -> optax.GradientTransformation:
    """AdamW (arXiv 1711.05101) up to the factor −learning rate, which is an argument of the step."""
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.eps),
        optax.add_decayed_weights(config.weight_decay),
    )
