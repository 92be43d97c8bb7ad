import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from grpo_jax.models import smollm2
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.decoder import Decoder
from grpo_jax.models.logprobs import logits, token_logprobs
from grpo_jax.models.weights import load_params
from tests.models.conftest import plain_rows

NAMES = {theirs: ours for ours, theirs in smollm2._BLOCK_MODULES.items()}
TOKENS = ["<unk>", "<s>", "</s>", *"0123456789", "Ġ", "a", "b", "ab", "ĠĠ"]


def permuted(weight, heads):
    """llama.cpp's order of query and key rows, as its converter from Hugging Face writes it."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture
def tiny_gguf(checkpoint, tmp_path):
    """The llama-tied checkpoint as GGUF, with a small byte-level vocabulary: (GGUF file, Hugging Face directory)."""
    gguf = pytest.importorskip("gguf")
    directory, model = checkpoint("llama-tied")
    config = model.config
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b", "Ġ Ġ"])
    for add, index in ((writer.add_unk_token_id, 0), (writer.add_bos_token_id, 1), (writer.add_eos_token_id, 2)):
        add(index)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    for name, tensor in load_file(directory / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            layer, module = stem.removeprefix("model.layers.").split(".", 1)
            stem = f"blk.{layer}.{NAMES[module]}"
            if module in ("self_attn.q_proj", "self_attn.k_proj"):
                tensor = permuted(tensor, config.num_attention_heads)
        else:
            stem = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}[stem]
        writer.add_tensor(f"{stem}.weight", np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "tiny.gguf", directory


def test_the_conversion_undoes_what_llama_cpp_does(tiny_gguf, tmp_path):
    file, original = tiny_gguf
    converted = tmp_path / "converted"
    converted.mkdir()
    smollm2.convert(file, converted)
    expected, found = (load_file(directory / "model.safetensors") for directory in (original, converted))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)
    assert ModelConfig.from_dir(converted) == ModelConfig.from_dir(original)


def test_the_converted_tokenizer_splits_digits_and_knows_its_special_tokens(tiny_gguf, tmp_path):
    from transformers import AutoTokenizer

    converted = tmp_path / "converted"
    converted.mkdir()
    smollm2.convert(tiny_gguf[0], converted)
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer.tokenize("ab  12</s>") == ["ab", "ĠĠ", "1", "2", "</s>"]
    assert tokenizer.decode(tokenizer.encode("ab  12")) == "ab  12"
    assert (tokenizer.bos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == ("<s>", 2, 2)
    messages = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "ab"
    assert json.loads((converted / "config.json").read_text())["eos_token_id"] == 2


@pytest.mark.slow
def test_smollm2_has_the_logits_of_transformers_and_knows_english(smollm2_dir):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = ModelConfig.from_dir(smollm2_dir)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    tokens = np.asarray([tokenizer("The capital of France is Paris, and the capital of Italy is Rome.").input_ids])
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)).logits.numpy()
    params = load_params(smollm2_dir, config, jnp.float32)
    hidden = jax.jit(Decoder(config).apply)({"params": params}, *plain_rows(tokens))
    assert np.abs(logits(params, hidden, config) - theirs).max() <= 1e-4 * np.abs(theirs).max()
    scores, _ = token_logprobs(params, hidden[0, :-1], tokens[0, 1:], config=config, temperature=1.0, chunk=8)
    # A model whose weights were dequantised or permuted wrongly is near log(49152) = 10.8 nats a token.
    assert -scores.mean() < 3
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == 2
