"""The work with Tunix's learner: `python -m experiments.benchmarks.peers.tunix_grpo WORK.json`, in its environment.

Its learner, its own sampler, the whole batch in one forward pass. Two things of Tunix 0.1.7 are put right here, since
otherwise it would be another model and would hardly explore: its Llama takes no notice of the model's rope_theta, and
its sampler draws with the same key in every step. One is left: it cuts EOS off, so stopping is never trained.
"""

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from flax import nnx
from transformers import AutoTokenizer
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params
from tunix.rl import reshard, rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

from experiments.benchmarks.peers.work import Rewards, Work, read_work, say_step, say_versions


@dataclasses.dataclass(kw_only=True)
class Objective(GRPOConfig):
    """Centred advantages, dual clip, token mean: fields that Tunix's loss reads if they are there."""

    epsilon_high: float
    epsilon_c: float


class Learner(GRPOLearner):
    """Says each step when its update is done. `rewards` are those of the step's samples."""

    def begin(self, rewards: list[float]) -> None:
        self.rewards, self.finished = rewards, 0

    def _run_global_step(self, *args: Any, **kwargs: Any) -> None:
        super()._run_global_step(*args, **kwargs)
        cluster = self.rl_cluster
        jax.block_until_ready(nnx.state(cluster.actor_trainer.model, nnx.LoRAParam))
        say_step(self.finished, fmean(self.rewards))
        self.rewards.clear()
        self.finished += 1
        cluster.cluster_config.rollout_config.seed += 1


def adapted_model(work: Work, mesh: Any) -> Any:
    shape = json.loads((Path(work.model) / "config.json").read_text())
    rope = shape.get("rope_parameters") or shape
    llama.apply_rope = functools.partial(llama.apply_rope, rope_theta=rope["rope_theta"])
    heads = shape["num_attention_heads"]
    config = llama.ModelConfig(
        num_layers=shape["num_hidden_layers"],
        vocab_size=shape["vocab_size"],
        embed_dim=shape["hidden_size"],
        hidden_dim=shape["intermediate_size"],
        num_heads=heads,
        head_dim=shape.get("head_dim") or shape["hidden_size"] // heads,
        num_kv_heads=shape["num_key_value_heads"],
        rope_theta=rope["rope_theta"],
        norm_eps=shape["rms_norm_eps"],
        weight_tying=shape.get("tie_word_embeddings", False),
    )
    base = params.create_model_from_safe_tensors(work.model, config, mesh, jnp.dtype(work.dtype))
    alpha = work.alpha * (work.rank**0.5 if work.rslora else 1.0)
    provider = qwix.LoraProvider(module_path=f".*({'|'.join(work.targets)})", rank=work.rank, alpha=alpha)
    model = qwix.apply_lora_to_model(base, provider, **base.get_model_input(), rngs=nnx.Rngs(work.seed))
    return reshard.reshard_model_to_mesh(model, mesh)


def cluster_config(work: Work, mesh: Any, longest_prompt: int) -> Any:
    rates = jnp.asarray(work.learning_rates)
    optimizer = optax.chain(
        optax.clip_by_global_norm(work.max_grad_norm),
        optax.adamw(
            lambda count: rates[count], b1=work.beta1, b2=work.beta2, eps=work.eps, weight_decay=work.weight_decay
        ),
    )
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    return rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optimizer,
            eval_every_n_steps=work.steps + 1,
            max_steps=work.steps,
            mini_batch_size=work.prompts_per_step,
            train_micro_batch_size=work.prompts_per_step,
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=work.max_tokens,
            max_prompt_length=longest_prompt,
            kv_cache_size=longest_prompt + work.max_tokens + 1,
            temperature=work.temperature,
            top_p=1.0,
            seed=work.seed * 10_000,
        ),
    )


def main() -> None:
    work = read_work()
    say_versions("google-tunix", "jax", "flax", "qwix", "optax")
    tokenizer, rewards, seen = AutoTokenizer.from_pretrained(work.model), Rewards(work), list[float]()
    texts = [
        tokenizer.apply_chat_template(problem["messages"], tokenize=False, add_generation_prompt=True)
        for problem in work.problems
    ]

    def reward(prompts: list[str], completions: list[str], problem: list[int], **_: Any) -> list[float]:
        scores: list[float] = []
        for start in range(0, len(completions), work.group_size):
            group = completions[start : start + work.group_size]
            # The tokens are not handed over; without EOS they would not be those that were sampled anyway.
            tokens = [tokenizer.encode(text, add_special_tokens=False) for text in group]
            scores += rewards.score(int(problem[start]), group, tokens, tokenizer.eos_token_id)
        seen.extend(scores)
        return scores

    def batches() -> Iterator[dict[str, Any]]:
        for start in range(0, len(texts), work.prompts_per_step):
            stop = start + work.prompts_per_step
            yield {"prompts": np.array(texts[start:stop]), "problem": np.arange(start, stop)}

    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    longest = max(len(tokenizer.encode(text)) for text in set(texts))
    objective = Objective(
        advantage_estimator="drgrpo",
        loss_agg_mode="token-mean",
        num_generations=work.group_size,
        beta=0.0,
        epsilon=work.clip_low,
        epsilon_high=work.clip_high,
        epsilon_c=work.dual_clip,
    )
    with mesh:
        actor = adapted_model(work, mesh)
        config = cluster_config(work, mesh, longest)
        cluster = rl_cluster.RLCluster(actor=actor, tokenizer=tokenizer, cluster_config=config)
        learner = Learner(rl_cluster=cluster, algo_config=objective, reward_fns=reward)
        learner.begin(seen)
        learner.train(batches())


if __name__ == "__main__":
    main()
