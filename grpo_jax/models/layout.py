"""The base parameters described once: their place in our tree, their shape, their Hugging Face name. Knows no jax.

Loading, initialising, exporting and checking all derive from this table.
"""

from dataclasses import dataclass

from grpo_jax.models.config import ModelConfig, projection_shapes

# Our parameter -> what Hugging Face calls it inside the same module.
_PARAMETERS = {"embedding": "weight", "kernel": "weight", "scale": "weight", "bias": "bias"}
# Our modules outside the layers -> Hugging Face's. Those in the layers have the same names in both.
_MODULES = {"embed": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}

# Logical axes (in, out) of the projections, by path; how they lie on a mesh is the learner's business.
PROJECTION_AXES = {
    "self_attn.q_proj": ("hidden", "heads"),
    "self_attn.k_proj": ("hidden", "heads"),
    "self_attn.v_proj": ("hidden", "heads"),
    "self_attn.o_proj": ("heads", "hidden"),
    "mlp.gate_proj": ("hidden", "ffn"),
    "mlp.up_proj": ("hidden", "ffn"),
    "mlp.down_proj": ("ffn", "hidden"),
}


def hf_module_name(module: str, layer: int | None = None) -> str:
    """Hugging Face's name of a module.

    Args:
        module: path inside a block, such as "self_attn.q_proj"; without a layer "embed", "final_norm" or "head".
        layer: index of the block.
    """
    return _MODULES[module] if layer is None else f"model.layers.{layer}.{module}"


@dataclass(frozen=True)
class Leaf:
    """One array of the base parameter tree."""

    module: str
    """Path of the module, dotted, inside a block if stacked."""
    name: str
    """embedding, kernel, scale or bias."""
    shape: tuple[int, ...]
    """In our tree, of one layer. A kernel is (in, out)."""
    axes: tuple[str | None, ...]
    """Logical name of each dimension of `shape`; None is never sharded."""
    stacked: bool = True
    """Whether every layer has one; they are stacked on axis 0 of the tree's array."""

    @property
    def path(self) -> tuple[str, ...]:
        """Keys from the root of the tree."""
        return (("layers",) if self.stacked else ()) + (*self.module.split("."), self.name)

    @property
    def transposed(self) -> bool:
        """Whether the Hugging Face tensor is (out, in)."""
        return self.name == "kernel"

    def hf_name(self, layer: int | None = None) -> str:
        """The tensor's name in a Hugging Face checkpoint; a stacked leaf needs its layer."""
        return f"{hf_module_name(self.module, layer)}.{_PARAMETERS[self.name]}"

    @property
    def tree_axes(self) -> tuple[str | None, ...]:
        """Logical axes in the tree, layers included."""
        return ("layers", *self.axes) if self.stacked else self.axes

    def tree_shape(self, config: ModelConfig) -> tuple[int, ...]:
        """Shape in the tree, layers included."""
        return (config.num_layers, *self.shape) if self.stacked else self.shape


def param_leaves(config: ModelConfig) -> tuple[Leaf, ...]:
    """Every array of the base of a config."""
    hidden = config.hidden_size
    leaves = [
        Leaf("embed", "embedding", (config.vocab_size, hidden), ("vocab", "hidden"), stacked=False),
        Leaf("final_norm", "scale", (hidden,), (None,), stacked=False),
    ]
    if not config.tie_embeddings:
        leaves.append(Leaf("head", "kernel", (hidden, config.vocab_size), ("hidden", "vocab"), stacked=False))
    shapes = projection_shapes(config)
    leaves += [Leaf(module, "kernel", shape, PROJECTION_AXES[module]) for module, shape in shapes.items()]
    leaves += [Leaf(module, "bias", shapes[module][1:], PROJECTION_AXES[module][1:]) for module in config.biased]
    leaves += [Leaf(norm, "scale", (hidden,), (None,)) for norm in ("input_layernorm", "post_attention_layernorm")]
    if config.qk_norm:
        leaves += [Leaf(f"self_attn.{norm}", "scale", (config.head_dim,), (None,)) for norm in ("q_norm", "k_norm")]
    return tuple(leaves)
