"""What a base model and its LoRA are: sizes and names, read from a Hugging Face config. Knows nothing of jax."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_jax.errors import UsageError
from grpo_jax.models.rope import RopeScaling

FAMILIES = ("llama", "qwen2", "qwen3")

# The seven linear layers of a block, by their path in it. A LoRA target is named by the last part.
PROJECTIONS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
TARGETS = tuple(path.rpartition(".")[2] for path in PROJECTIONS)


@dataclass(frozen=True)
class ModelConfig:
    """Everything that shapes a decoder's function beside its weights."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float
    tie_embeddings: bool
    attention_bias: bool
    qk_norm: bool
    max_positions: int
    rope_scaling: RopeScaling | None = None

    @property
    def biased(self) -> tuple[str, ...]:
        """The projections with a bias. Qwen2's attention has none on its output; a biased Llama or Qwen3 does."""
        if not self.attention_bias:
            return ()
        return PROJECTIONS[:3] if self.family == "qwen2" else PROJECTIONS[:4]

    @classmethod
    def from_dir(cls, path: str | Path) -> "ModelConfig":
        """Reads `config.json` of a Hugging Face model directory; see `from_hf`."""
        file = Path(path) / "config.json"
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"{file} cannot be read ({error.strerror}); is this a Hugging Face model?") from error
        except ValueError as error:
            raise UsageError(f"{file} is not valid JSON ({error}).") from error
        if not isinstance(config, dict):
            raise UsageError(f"{file} holds no JSON object.")
        return cls.from_hf(config, origin=str(file))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], origin: str = "config.json") -> "ModelConfig":
        """Reads the content of a Hugging Face `config.json`, of transformers 4 or 5.

        Absent keys mean what transformers' own classes make of them.

        Args:
            config: the parsed file.
            origin: what messages call it.

        Raises:
            UsageError: a key is missing, or asks for what the decoder does not compute.
        """
        family = config.get("model_type")
        if family not in FAMILIES:
            raise UsageError(f"{origin}: model_type {family!r} is not supported; supported are {', '.join(FAMILIES)}.")
        _refuse_unsupported(config, family, origin)
        rope_theta, rope_scaling = _rope(config, origin)
        hidden, heads = (_size(config, key, origin) for key in ("hidden_size", "num_attention_heads"))
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or (128 if family == "qwen3" else hidden // heads)
        if heads % kv_heads:
            raise UsageError(f"{origin}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}.")
        if head_dim % 2:
            raise UsageError(f"{origin}: head_dim {head_dim} is odd, which rotary embeddings cannot split.")
        return cls(
            family=family,
            vocab_size=_size(config, "vocab_size", origin),
            hidden_size=hidden,
            intermediate_size=_size(config, "intermediate_size", origin),
            num_layers=_size(config, "num_hidden_layers", origin),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rope_theta=rope_theta,
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=family == "qwen2" or bool(config.get("attention_bias", False)),
            qk_norm=family == "qwen3",
            max_positions=_size(config, "max_position_embeddings", origin),
            rope_scaling=rope_scaling,
        )


@dataclass(frozen=True)
class LoraConfig:
    """A LoRA's shape and strength; `targets` may be given as `resolve_targets` takes them."""

    rank: int
    alpha: float
    rslora: bool = False
    targets: tuple[str, ...] = TARGETS

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UsageError(f"lora rank {self.rank} is not positive.")
        object.__setattr__(self, "targets", resolve_targets(self.targets))

    @property
    def scale(self) -> float:
        """alpha / rank, or alpha / sqrt(rank) for rank-stabilised LoRA (Kalajdzievski 2023, arXiv:2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def adapts(self, module: str) -> bool:
        """Whether a projection, named by its path such as "self_attn.q_proj", is a target."""
        return module.rpartition(".")[2] in self.targets


def resolve_targets(targets: str | Sequence[str]) -> tuple[str, ...]:
    """The targeted modules' short names, each once, in the order of the block.

    Args:
        targets: "all-linear" for all seven, or a list out of them.

    Raises:
        UsageError: another string (never read letter by letter), an empty list, or an unknown name.
    """
    if targets == "all-linear":
        return TARGETS
    valid = f'"all-linear" or a list out of {", ".join(TARGETS)}'
    if not isinstance(targets, (list, tuple)) or not targets:
        raise UsageError(f"lora targets {targets!r} should be {valid}.")
    for name in targets:
        if name not in TARGETS:
            raise UsageError(f"lora target {name!r} is unknown; targets are {valid}.")
    return tuple(name for name in TARGETS if name in targets)


def projection_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(in, out) of each of the seven linear layers of a block, by path, in the order of the block."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = ((hidden, q), (hidden, kv), (hidden, kv), (q, hidden), (hidden, ffn), (hidden, ffn), (ffn, hidden))
    return dict(zip(PROJECTIONS, shapes, strict=True))


def parameter_count(config: ModelConfig) -> int:
    """How many numbers the base has; tied embeddings count once."""
    shapes = projection_shapes(config)
    layer = sum(rows * columns for rows, columns in shapes.values())
    layer += sum(shapes[module][1] for module in config.biased)
    layer += 2 * config.hidden_size + (2 * config.head_dim if config.qk_norm else 0)
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
    return embeddings + config.num_layers * layer + config.hidden_size


def adapter_count(config: ModelConfig, lora: LoraConfig) -> int:
    """How many numbers the A and B of an adapter have, all layers together."""
    shapes = projection_shapes(config).items()
    return config.num_layers * sum(lora.rank * sum(shape) for module, shape in shapes if lora.adapts(module))


def _size(config: Mapping[str, Any], key: str, origin: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise UsageError(f"{origin}: {key} should be a positive integer, but is {value!r}.")
    return value


def _refuse_unsupported(config: Mapping[str, Any], family: str, origin: str) -> None:
    """Raises for the features that would change the function the weights are meant for."""
    reasons = {
        "quantization_config": (config.get("quantization_config"), "quantised weights are not supported"),
        "mlp_bias": (config.get("mlp_bias"), "biases in the MLP are not supported"),
        "use_sliding_window": (config.get("use_sliding_window"), "sliding-window attention is not supported"),
        # Qwen configs carry a window even where `use_sliding_window: false` turns it off; elsewhere it is in use.
        "sliding_window": (
            None if family.startswith("qwen") else config.get("sliding_window"),
            "sliding-window attention is not supported",
        ),
        "layer_types": (
            sorted(set(config.get("layer_types") or ()) - {"full_attention"}),
            "only full attention is supported",
        ),
    }
    for key, (value, reason) in reasons.items():
        if value:
            raise UsageError(f"{origin}: {key} is {value!r}, and {reason}.")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UsageError(f"{origin}: hidden_act is {activation!r}, and only 'silu' is supported.")


def _rope(config: Mapping[str, Any], origin: str) -> tuple[float, RopeScaling | None]:
    """The rotary base and its scaling: in `rope_parameters` since transformers 5, at the top level before."""
    # Where both are there, transformers lets the older one win.
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(key) or {}
    if rope.get("partial_rotary_factor", 1) != 1 or any(isinstance(value, dict) for value in rope.values()):
        raise UsageError(f"{origin}: {key} is {rope!r}, and only whole heads, all layers alike, are supported.")
    scaling = RopeScaling.from_hf(
        rope,
        original=config.get("original_max_position_embeddings"),
        max_positions=_size(config, "max_position_embeddings", origin),
        named=f"{origin}: {key}",
    )
    return float(rope.get("rope_theta", config.get("rope_theta", 10_000.0))), scaling
