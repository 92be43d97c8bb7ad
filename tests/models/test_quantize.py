import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import save_file

from grpo_jax.errors import UsageError
from grpo_jax.learner.sharding import check_divisible, make_mesh, param_shardings, place
from grpo_jax.models.config import LoraConfig, ModelConfig
from grpo_jax.models.decoder import Decoder
from grpo_jax.models.layout import Leaf, param_leaves
from grpo_jax.models.logprobs import logits
from grpo_jax.models.lora import LoraDense
from grpo_jax.models.quantize import BLOCK, NF4, dequantize, quantize, quantize_params, stored_dtype, stored_leaves
from grpo_jax.models.quantize_error import quantization_error
from grpo_jax.models.weights import load_params
from tests.models.conftest import compiled, plain_rows, random_lora, some_tokens

# Inputs of 128, 256 and 384: blocks of 64, also in halves.
HF_CONFIG = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
CONFIG = ModelConfig.from_hf(HF_CONFIG)
LORA = LoraConfig(rank=2, alpha=4, targets=("v_proj", "down_proj"))
SCHEMES = ("int8", "nf4")
KERNEL = Leaf("mlp.up_proj", "kernel", (2 * BLOCK, 6), ("hidden", "ffn"))
FOUR_ROWS = plain_rows(np.tile(some_tokens(CONFIG), (2, 1)))


def random_kernel(*lead, seed=0):
    return np.random.default_rng(seed).standard_normal((*lead, *KERNEL.shape)).astype(np.float32)


@cache
def base():
    rng, flat = np.random.default_rng(0), {}
    for leaf in param_leaves(CONFIG):
        noise = rng.standard_normal(leaf.tree_shape(CONFIG)).astype(np.float32)
        scale = leaf.shape[0] ** -0.5 if leaf.name == "kernel" else 0.3
        flat[leaf.path] = noise * np.float32(scale) + (leaf.name == "scale")
    return unflatten_dict(flat)


def dequantized(params, scheme):
    """The same base with whole kernels."""
    flat = flatten_dict(params)
    kernels = {path[:-1] for path in flat if path[-1] == "kernel_scale"}
    whole = {path: array for path, array in flat.items() if path[:-1] not in kernels}
    for module in kernels:
        stored = {path[-1]: jnp.asarray(array) for path, array in flat.items() if path[:-1] == module}
        whole[*module, "kernel"] = dequantize(stored, scheme, jnp.float32)
    return unflatten_dict(whole)


@cache
def gradient(decoder):
    """(adapter, params) to the gradient of the adapter and the hidden states, compiled once for equal decoders."""

    def score(adapter, params):
        hidden = decoder.apply({"params": params, "lora": adapter}, *plain_rows(some_tokens(CONFIG)))
        return jnp.mean(jnp.sin(hidden)), hidden

    return jax.jit(jax.grad(score, has_aux=True))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The base as a Hugging Face directory."""
    folder, flat, tensors = tmp_path_factory.mktemp("quantize"), flatten_dict(base()), {}
    for leaf in param_leaves(CONFIG):
        for layer in range(CONFIG.num_layers) if leaf.stacked else (None,):
            value = flat[leaf.path] if layer is None else flat[leaf.path][layer]
            tensors[leaf.hf_name(layer)] = np.ascontiguousarray(value.T if leaf.transposed else value)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(HF_CONFIG))
    return folder


def test_nf4_levels_are_quantiles_of_the_normal_distribution():
    """As QLoRA's authors compute them: evenly spaced quantiles on either side of 0, the outermost as far in as half a
    step of either side would be, on average."""
    offset = 1 - (1 / 32 + 1 / 30) / 2
    above, below = (np.linspace(offset, 0.5, count)[:-1] for count in (9, 8))
    quantile = np.vectorize(NormalDist().inv_cdf)
    levels = np.sort(np.concatenate([quantile(above), [0.0], -quantile(below)]))
    np.testing.assert_allclose(NF4, np.sort(levels / levels[-1]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_kernel_is_stored_as_described(scheme):
    parts = stored_leaves(KERNEL, scheme)
    arrays = quantize(random_kernel(3), scheme)
    described = {part.name: ((3, *part.shape), np.dtype(stored_dtype(part, np.float64))) for part in parts}
    assert {name: (array.shape, array.dtype) for name, array in arrays.items()} == described
    assert all(len(part.axes) == len(part.shape) for part in parts)


def test_int8_is_off_by_half_a_step_at_most():
    kernel = random_kernel(2)
    stored = quantize(kernel, "int8")
    error = np.abs(dequantize(stored, "int8", jnp.float32) - kernel)
    assert (error <= stored["kernel_scale"][:, None] * (0.5 + 1e-4)).all()
    assert np.abs(stored["kernel_int8"]).max(axis=1).min() == 127


def test_nf4_takes_the_nearest_level():
    kernel = random_kernel(2)
    stored = quantize(kernel, "nf4")
    scale = np.repeat(stored["kernel_scale"], BLOCK, axis=1)
    nearest = np.abs(NF4 * scale[..., None] - kernel[..., None]).min(axis=-1)
    np.testing.assert_allclose(np.abs(dequantize(stored, "nf4", jnp.float32) - kernel), nearest, atol=1e-6)


def test_what_can_be_stored_exactly_is():
    rng, steps = np.random.default_rng(0), np.float32(2.0) ** np.arange(-3, 3)
    codes = rng.integers(-127, 128, KERNEL.shape)
    codes[5] = 127
    stored = quantize(codes * steps, "int8")
    np.testing.assert_array_equal(stored["kernel_int8"], codes)
    np.testing.assert_array_equal(dequantize(stored, "int8", jnp.float32), codes * steps)

    codes = rng.integers(0, 16, KERNEL.shape)
    codes[5], codes[BLOCK + 7] = 15, 0
    stored = quantize(NF4[codes] * steps, "nf4")
    np.testing.assert_array_equal(stored["kernel_nf4"], codes[::2] | codes[1::2] << 4)
    np.testing.assert_array_equal(dequantize(stored, "nf4", jnp.float32), NF4[codes] * steps)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_zeros_stay_zero_and_what_is_not_finite_shows(scheme):
    assert not np.any(dequantize(quantize(np.zeros(KERNEL.shape), scheme), scheme, jnp.float32))
    kernel = random_kernel()
    kernel[0, 0] = np.inf
    with np.errstate(invalid="ignore"):
        found = dequantize(quantize(kernel, scheme), scheme, jnp.float32)
    assert not np.isfinite(found[:BLOCK, 0]).any()
    assert np.isfinite(found[:, 1:]).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantising_is_idempotent_and_blind_to_other_layers_and_shards(scheme):
    kernel = random_kernel(2)
    stored = quantize(kernel, scheme)
    again = quantize(np.asarray(dequantize(stored, scheme, jnp.float32)), scheme)
    # Of one layer, half the outputs, and, where that cuts no scale, half the inputs.
    rows = BLOCK if scheme == "nf4" else 2 * BLOCK
    shard = quantize(kernel[1, :rows, 3:], scheme)
    for name, array in stored.items():
        np.testing.assert_allclose(again[name], array, rtol=1e-6)
        cut = array[1, ..., 3:]
        np.testing.assert_array_equal(shard[name], cut[: len(cut) * rows // (2 * BLOCK)] if cut.ndim > 1 else cut)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_computes_with_the_dequantised_kernel(scheme):
    stored = quantize(random_kernel(), scheme)
    rng = np.random.default_rng(1)
    x, weight = (rng.standard_normal((5, size)).astype(np.float32) for size in KERNEL.shape)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((2 * BLOCK, 2), (2, 6)))

    def run(quantization, params):
        layer = LoraDense(6, False, LORA, jnp.float32, quantization, name="up_proj")

        def score(x, lora):
            return jnp.sum(weight * jnp.sin(layer.apply({"params": params, "lora": lora}, x)))

        return jax.value_and_grad(score, argnums=(0, 1))(x, {"a": a, "b": b})

    expected = run("none", {"kernel": dequantize(stored, scheme, jnp.float32)})
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), run(scheme, stored), expected)


@pytest.mark.parametrize(("scheme", "remat"), [("int8", "none"), ("nf4", "full")])
def test_a_decoder_computes_with_the_dequantised_kernels(scheme, remat):
    params, adapter = quantize_params(base(), scheme), random_lora(CONFIG, LORA)
    found = gradient(Decoder(CONFIG, LORA, remat=remat, quantization=scheme))(adapter, params)
    expected = gradient(Decoder(CONFIG, LORA))(adapter, dequantized(params, scheme))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), found, expected)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_whole_kernels_are_kept_for_the_backward_pass(scheme, remat):
    rows = plain_rows(some_tokens(CONFIG))
    params = quantize_params(base(), scheme)

    def pullback(adapter):
        decoder = Decoder(CONFIG, LORA, remat=remat, quantization=scheme)
        return jax.vjp(lambda lora: decoder.apply({"params": params, "lora": lora}, *rows), adapter)[1]

    kept = jax.tree.leaves(jax.eval_shape(pullback, random_lora(CONFIG, LORA)))
    kernels = {leaf.tree_shape(CONFIG) for leaf in param_leaves(CONFIG) if leaf.stacked and leaf.name == "kernel"}
    assert not [leaf for leaf in kept if leaf.shape in kernels and leaf.dtype == jnp.float32]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_directory_is_quantised_from_the_values_in_its_files(scheme, dtype, directory):
    expected = flatten_dict(quantize_params(base(), scheme))
    shardings = flatten_dict(param_shardings(make_mesh(-1, 1, 1), CONFIG, scheme))

    def put(path, array):
        assert array.flags.c_contiguous
        return place(array, shardings[path])

    found = flatten_dict(load_params(directory, CONFIG, dtype, quantization=scheme, place=put))
    assert found.keys() == expected.keys() == shardings.keys()
    for path, array in found.items():
        quantised = path[-1].startswith("kernel_")
        assert array.dtype == (expected[path].dtype if quantised else dtype)
        if quantised or dtype == jnp.float32:
            np.testing.assert_array_equal(array, expected[path])


@pytest.mark.slow
def test_on_eight_devices():
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "sharded_base"]
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(command, env=environ, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "skipped" not in done.stdout


@pytest.mark.skipif(jax.device_count() < 8, reason="test_on_eight_devices runs it")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_sharded_base_computes_the_same(scheme):
    mesh = make_mesh(2, 2, 2, jax.devices()[:8])
    check_divisible(mesh.shape, CONFIG, scheme)
    params = quantize_params(base(), scheme)
    sharded = jax.tree.map(place, params, param_shardings(mesh, CONFIG, scheme))
    found = compiled(Decoder(CONFIG, mesh=mesh, quantization=scheme))({"params": sharded}, *FOUR_ROWS)
    expected = compiled(Decoder(CONFIG, quantization=scheme))({"params": params}, *FOUR_ROWS)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_the_streamed_error_is_that_of_the_whole_models(directory):
    tokens = some_tokens(CONFIG)[0]
    found = quantization_error(directory, CONFIG, "nf4", tokens)

    def scores(scheme):
        params = quantize_params(base(), scheme)
        hidden = compiled(Decoder(CONFIG, quantization=scheme))({"params": params}, *FOUR_ROWS)
        return jax.nn.log_softmax(logits(params, hidden[0, :-1], CONFIG))

    full, quantised = scores("none"), scores("nf4")
    of_tokens = [np.asarray(which[np.arange(len(tokens) - 1), tokens[1:]]) for which in (full, quantised)]
    np.testing.assert_allclose(found.logprobs_N, of_tokens[0], atol=1e-4)
    np.testing.assert_allclose(found.quantized_logprobs_N, of_tokens[1], atol=1e-4)
    difference = np.abs(of_tokens[0] - of_tokens[1])
    np.testing.assert_allclose([found.mean_abs, found.max_abs], [difference.mean(), difference.max()], atol=1e-4)
    np.testing.assert_allclose(found.mean_kl, np.mean(np.sum(np.exp(full) * (full - quantised), -1)), atol=1e-4)
    assert found.mean_kl > 1e-3


def test_inputs_that_are_no_multiple_of_a_block_are_refused():
    odd = replace(KERNEL, shape=(BLOCK + 2, 6))
    with pytest.raises(UsageError, match=r"^learner\.quantization: nf4 .*64 inputs.*mlp\.up_proj has 66\.$"):
        stored_leaves(odd, "nf4")
    assert stored_leaves(odd, "int8")[0].shape == odd.shape
    with pytest.raises(UsageError, match=r"down_proj has 72"):
        param_shardings(make_mesh(-1, 1, 1), replace(CONFIG, intermediate_size=72), "nf4")
    with pytest.raises(UsageError, match=r"up_proj has 66"):
        LoraDense(6, False, None, jnp.float32, "nf4", name="up_proj").init(jax.random.key(0), np.ones((1, 66)))


@pytest.mark.parametrize(("axis", "size"), [("fsdp", 4), ("tensor", 4)])
def test_a_mesh_that_would_cut_a_block_is_refused(axis, size):
    config = replace(CONFIG, num_kv_heads=4)
    sizes = {"data": 1, "fsdp": 1, "tensor": 1, axis: size}
    check_divisible(sizes, config, "int8")
    with pytest.raises(UsageError, match=rf"^learner\.mesh\.{axis}: 4 would cut blocks of 64"):
        check_divisible(sizes, config, "nf4")


def test_an_unknown_scheme_is_refused():
    with pytest.raises(ValueError, match="none, int8, nf4"):
        stored_leaves(KERNEL, "int4")


@pytest.mark.slow
def test_the_error_on_a_real_model(smollm2_dir):
    from transformers import AutoTokenizer

    config = ModelConfig.from_dir(smollm2_dir)
    text = "The capital of France is Paris. To boil an egg, put it into boiling water and wait for about ten minutes."
    tokens = np.asarray(AutoTokenizer.from_pretrained(smollm2_dir)(text)["input_ids"])
    int8, nf4 = (quantization_error(smollm2_dir, config, scheme, tokens) for scheme in SCHEMES)
    np.testing.assert_array_equal(int8.logprobs_N, nf4.logprobs_N)
    # Measured: 0.07 and 0.0046, 0.46 and 0.27.
    assert int8.mean_abs < 0.2
    assert int8.mean_kl < 0.02
    assert int8.mean_abs < nf4.mean_abs < 1.0
    assert int8.mean_kl < nf4.mean_kl < 0.8
