"""A tiny random Llama with a byte-level tokenizer and a chat template: a real model, only small."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo_jax.models.config import ModelConfig
from grpo_jax.models.decoder import init_params
from grpo_jax.models.layout import param_leaves

HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
    "torch_dtype": "float32",
}
_TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


def write_tiny_model(folder: Path, seed: int = 0) -> Path:
    """Writes config, weights and tokenizer into `folder`, and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(HF_CONFIG))
    model = ModelConfig.from_hf(HF_CONFIG)
    params = flatten_dict(init_params(jax.random.key(seed), model, jnp.float32))
    tensors = {}
    for leaf in param_leaves(model):
        stacked = np.asarray(params[leaf.path])
        for layer in range(model.num_layers) if leaf.stacked else (None,):
            value = stacked if layer is None else stacked[layer]
            tensors[leaf.hf_name(layer)] = np.ascontiguousarray(value.T if leaf.transposed else value)
    # Small embeddings: the head is tied to them, and sampling should be neither uniform nor decided.
    tensors["model.embed_tokens.weight"] = 0.3 * tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(alphabet)} | {"<bos>": 256, "<eos>": 257}
    vocab |= {f"<extra{i}>": i for i in range(258, HF_CONFIG["vocab_size"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<eos>")
    fast.chat_template = _TEMPLATE
    return fast
