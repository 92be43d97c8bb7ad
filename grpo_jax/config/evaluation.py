"""The section `evaluation` of a config."""

from typing import Annotated

from pydantic import Field, model_validator

from grpo_jax.config.section import Section


class Evaluation(Section):
    """Of the base and of the last policy, and between them now and then, beside the training."""

    samples: int = Field(0, ge=0, description="per held-out prompt; 0: no evaluation")
    every: int = Field(0, ge=0, description="steps between evaluations; 0: of the base and the last policy only")
    temperature: float | None = Field(None, ge=0, description="0: greedy; None: that of sampling")
    top_p: float = Field(1.0, gt=0, le=1)
    pass_at: list[Annotated[int, Field(ge=1)]] = Field(
        [1], description="k of pass@k: the chance that one of k samples passes, estimated from all of them"
    )
    pass_reward: float = Field(1.0, description="a sample with at least this reward passes")
    pass_on: str | None = Field(None, description="name of the reward that decides whether it passes; None: their sum")
    split: str = "eval"
    timeout_s: float = Field(
        900.0, gt=0, description="how long the learner waits for the last evaluation, and keeps a policy for another"
    )

    @model_validator(mode="after")
    def _has_enough_samples(self) -> "Evaluation":
        if self.samples and max(self.pass_at, default=0) > self.samples:
            raise ValueError(f"pass_at: {max(self.pass_at)} of {self.samples} samples; raise 'samples'")
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(f"samples: all {self.samples} of a prompt would be the same at temperature 0; ask for 1")
        return self
