"""The section `algorithm`: which names and numbers make an objective, and which do not go together. Knows no jax."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from grpo_jax.algorithms import registry
from grpo_jax.config.section import Section, import_path

Advantages = Literal["dr_grpo", "grpo", "rloo", "batch_std", "maxrl"]
Aggregation = Literal["token_mean", "sequence_mean", "constant", "token_sum", "prompt_mean"]
KlEstimator = Literal["k1", "k2", "k3", "k3_value_k2_gradient"]


class Algorithm(Section):
    """The objective. Names and numbers of losses, weights, masks and presets: `grpo_jax/algorithms/registry.py`.

    The default is dual-clip GRPO against the sampler's log-probabilities, token mean over the whole batch.
    """

    preset: str | None = Field(None, description="a published recipe; what is said beside it overrides it")
    advantages: Advantages = "dr_grpo"
    advantage_eps: float = Field(1e-4, ge=0, description="added to the standard deviation")
    advantage_ddof: Literal[0, 1] = Field(1, description="of the standard deviation")
    aggregation: Aggregation = "token_mean"
    loss: str = Field("dual_clip", description="a policy loss by name, or 'package.module:function'")
    loss_args: dict[str, float] = Field({}, description="its numbers; what is left out has the registry's default")
    anchor: Literal["sampler", "recomputed"] = Field(
        "sampler", description="what ratios are against: the sampler's log-probs, or one more forward pass at arrival"
    )
    weight: str | None = Field(None, description="off-policy weight, with anchor recomputed")
    weight_args: dict[str, float] = Field({})
    masks: dict[str, dict[str, float]] = Field({}, description="off-policy masks by name, each with its numbers")
    kl_coef: float = Field(0.0, ge=0, description="of the KL to the base as a loss term; 0: never computed")
    kl_estimator: KlEstimator = "k3"
    entropy_coef: float = Field(0.0, ge=0, description="of the entropy bonus")
    zero_variance: Literal["keep", "drop", "replace"] = Field(
        "keep", description="groups of equal rewards: train with advantage 0, leave out, or leave out and take another"
    )
    max_candidates: int | None = Field(
        None, ge=1, description="groups that one step looks at, at most, under replace; None: 4 * prompts_per_step"
    )
    overlong: Literal["keep", "filter"] = Field("keep", description="filter: no loss on completions cut at max_tokens")
    overlong_cache: int = Field(
        0, ge=0, description="tokens before max_tokens over which a penalty falls to -overlong_penalty; 0: none"
    )
    overlong_penalty: float = Field(1.0, ge=0)
    num_iterations: int = Field(1, ge=1, description="passes over the batch of a step")
    minibatches: int = Field(1, ge=1, description="optimiser updates per pass")

    @model_validator(mode="before")
    @classmethod
    def _recipe(cls, given: Any) -> Any:
        """Puts a preset under what the config says itself."""
        if not isinstance(given, dict) or given.get("preset") is None:
            return given
        recipe = registry.PRESETS.get(given["preset"]) if isinstance(given["preset"], str) else None
        if recipe is None:
            raise ValueError(f"preset {given['preset']!r} is unknown; there are {', '.join(registry.PRESETS)}")
        merged = {**recipe, **given}
        for name, args in (("loss", "loss_args"), ("weight", "weight_args")):
            merged[args] = said = given.get(args) or {}
            # Of another function than the recipe's, the recipe has no numbers; what is no mapping is refused later.
            if merged.get(name) == recipe.get(name) and isinstance(said, dict):
                merged[args] = {**recipe.get(args, {}), **said}
        return merged

    @model_validator(mode="after")
    def _is_defined(self) -> "Algorithm":
        if self.loss not in registry.LOSSES:
            try:
                import_path(self.loss)
            except ValueError:
                raise ValueError(
                    f"loss {self.loss!r} is neither one of {', '.join(registry.LOSSES)} nor 'package.module:function'"
                ) from None
        else:
            _check_args("loss_args", self.loss, self.loss_args, registry.LOSSES[self.loss].defaults)
        if self.weight is None:
            _check_args("weight_args", "no weight", self.weight_args, {})
        else:
            _check_name("weight", self.weight, registry.WEIGHTS)
            _check_args("weight_args", self.weight, self.weight_args, registry.WEIGHTS[self.weight])
        for name, args in self.masks.items():
            _check_name("masks", name, registry.MASKS)
            _check_args(f"masks.{name}", name, args, registry.MASKS[name])
        loss = registry.loss_of(self.loss)
        if self.anchor == "sampler" and loss.needs_recomputed:
            raise ValueError(f"loss {self.loss} needs anchor: recomputed")
        if self.anchor == "sampler" and self.weight:
            raise ValueError(
                f"weight {self.weight} needs anchor: recomputed; against the sampler the loss holds that ratio already"
            )
        if self.weight and not loss.weightable:
            raise ValueError(f"loss {self.loss} has an importance weight of its own and takes no weight")
        if loss.needs and self.aggregation != loss.needs:
            raise ValueError(f"loss {self.loss} is defined with aggregation: {loss.needs}, not {self.aggregation}")
        return self

    @property
    def loss_numbers(self) -> dict[str, float]:
        """All parameters of the loss: the config's, and the registry's for the rest."""
        return {**registry.loss_of(self.loss).defaults, **self.loss_args}

    @property
    def factors(self) -> dict[str, dict[str, float]]:
        """The off-policy weight and masks, each with all its parameters."""
        weight = {self.weight: {**registry.WEIGHTS[self.weight], **self.weight_args}} if self.weight else {}
        return weight | {name: {**registry.MASKS[name], **args} for name, args in self.masks.items()}

    @property
    def updates_per_step(self) -> int:
        return self.num_iterations * self.minibatches

    @property
    def zero_advantage_is_neutral(self) -> bool:
        """Whether a token with advantage 0 has no loss and no gradient, so that it need not be forwarded."""
        return not (self.kl_coef or self.entropy_coef) and registry.loss_of(self.loss).zero_without_advantage

    @property
    def inert_clip(self) -> bool:
        """Whether the ratio is exactly 1 in every update, so that no clip of it can ever do anything."""
        return self.anchor == "recomputed" and self.updates_per_step == 1


def _check_name(key: str, name: str, known: Mapping[str, Any]) -> None:
    if name not in known:
        raise ValueError(f"{key}: {name!r} is unknown; there are {', '.join(known)}")


def _check_args(key: str, owner: str, given: Mapping[str, float], known: Mapping[str, float]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"{key}: {owner} has no {name!r}; it has {', '.join(known) or 'no parameters'}")
