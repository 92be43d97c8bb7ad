"""Scaled rotary embeddings against transformers, in numbers and as whole models, and against the formulas."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from grpo_jax.errors import UsageError
from grpo_jax.models.attention import rope_tables
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.decoder import Decoder
from grpo_jax.models.logprobs import logits
from grpo_jax.models.rope import RopeScaling, frequencies
from grpo_jax.models.source import base_digest
from tests.models.conftest import COMMON, TINY, compiled, plain_rows, some_tokens

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SCALINGS = [
    LLAMA3,
    {**LLAMA3, "factor": 32.0, "low_freq_factor": 2, "high_freq_factor": 16, "original_max_position_embeddings": 512},
    YARN,
    {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    {**YARN, "beta_fast": None, "beta_slow": None, "attention_factor": None},
    {**YARN, "attention_factor": 0.75},
    {**YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
    {**YARN, "factor": 1.0, "mscale": 0.5},
    # A ramp of no width, and one whose ends lie outside the head.
    {**YARN, "beta_fast": 1.001, "original_max_position_embeddings": 6},
    {**YARN, "original_max_position_embeddings": 10**9},
    {"rope_type": "yarn", "factor": 2.0},
]


def read(rope, theta=500_000.0, head_dim=64, **changes):
    sizes = {**COMMON, "hidden_size": 256, "intermediate_size": 8, "num_attention_heads": 256 // head_dim}
    return ModelConfig.from_hf(
        {"model_type": "llama", **sizes, "max_position_embeddings": 131_072, "rope_theta": theta}
        | {"head_dim": head_dim, "rope_scaling": rope, **changes}
    )


@pytest.mark.parametrize("rope", SCALINGS)
@pytest.mark.parametrize(("theta", "head_dim"), [(500_000.0, 64), (10_000.0, 128)])
def test_frequencies_and_factor_are_those_of_transformers(rope, theta, head_dim):
    pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs = LlamaConfig(
        hidden_size=256,
        num_attention_heads=256 // head_dim,
        head_dim=head_dim,
        max_position_embeddings=131_072,
        rope_parameters={**rope, "rope_theta": theta},
    )
    expected, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs)
    scaling = read(rope, theta, head_dim).rope_scaling
    # They compute in float32.
    np.testing.assert_allclose(frequencies(head_dim, theta, scaling), expected.numpy(), rtol=2e-6)
    assert scaling.attention_factor == pytest.approx(factor, rel=1e-12)


def test_llama3_is_its_formula():
    theta, size = 500_000.0, 64
    for i, found in enumerate(frequencies(size, theta, read(LLAMA3).rope_scaling)):
        plain = theta ** (-2 * i / size)
        wavelength = 2 * math.pi / plain
        if wavelength < 8192 / 4:
            expected = plain
        elif wavelength > 8192 / 1:
            expected = plain / 8
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected = (1 - smooth) * plain / 8 + smooth * plain
        assert found == pytest.approx(expected, rel=1e-12)


def test_yarn_is_its_formula():
    """Equations 18 to 22 of the paper, the ramp over the index, with whole ends."""
    theta, size, old, new = 1e6, 128, 32768, 4
    scaling = read(YARN, theta, size).rope_scaling
    ends = [size / 2 * math.log(old / (2 * math.pi * turns)) / math.log(theta) for turns in (32, 1)]
    low, high = math.floor(ends[0]), math.ceil(ends[1])
    for i, found in enumerate(frequencies(size, theta, scaling)):
        plain = theta ** (-2 * i / size)
        ramp = min(max((i - low) / (high - low), 0), 1)
        assert found == pytest.approx((1 - ramp) * plain + ramp * plain / new, rel=1e-12)
    assert scaling.attention_factor == pytest.approx(0.1 * math.log(new) + 1, rel=1e-12)


def test_tables_are_the_angles_and_the_factor(x64):
    scaling = RopeScaling("yarn", 4.0, 64.0, 1.0, 32.0, attention_factor=1.3)
    positions = np.asarray([[0, 3, 70]])
    cos, sin = rope_tables(jnp.asarray(positions), 16, 1e4, jnp.float64, scaling)
    angles = positions[:, :, None, None] * frequencies(16, 1e4, scaling)
    np.testing.assert_allclose(cos, 1.3 * np.cos(angles), rtol=0, atol=1e-12)
    np.testing.assert_allclose(sin, 1.3 * np.sin(angles), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("base", "rope"),
    [
        ("llama-gqa", {**LLAMA3, "rope_theta": 50.0, "original_max_position_embeddings": 32}),
        ("qwen2", {**YARN, "rope_theta": 50.0, "original_max_position_embeddings": 64, "beta_fast": 8}),
    ],
)
def test_logits_of_scaled_models_are_those_of_transformers(base, rope, loaded, monkeypatch):
    torch = pytest.importorskip("torch")

    monkeypatch.setitem(TINY, f"{base} {rope['rope_type']}", {**TINY[base], "rope_parameters": rope})
    config, params, model = loaded(f"{base} {rope['rope_type']}")
    assert config.rope_scaling.kind == rope["rope_type"]
    tokens = some_tokens(config)
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)).logits.numpy()
    hidden = compiled(Decoder(config))({"params": params}, *plain_rows(tokens))
    difference = np.abs(logits(params, hidden, config) - theirs).max()
    assert difference <= 1e-4 * np.abs(theirs).max()
    # All three parts of the ramp are in use, so that a wrong one would show.
    ratio = frequencies(config.head_dim, 50.0, config.rope_scaling) / frequencies(config.head_dim, 50.0, None)
    assert np.isclose(ratio, 1).any()
    assert np.isclose(ratio, 1 / rope["factor"]).any()
    assert ((ratio < 0.99) & (ratio > 1.01 / rope["factor"])).any()


def test_old_and_new_spellings_mean_the_same():
    here = {**YARN, "rope_theta": 1e6}
    old = {"type" if key == "rope_type" else key: value for key, value in YARN.items()}
    assert read(None, rope_parameters=here) == read(old, theta=1e6)
    # The top of the config comes before the object, and the longest context stands in where both are silent.
    assert read(YARN, original_max_position_embeddings=4096).rope_scaling.original_max_positions == 4096
    assert read({"type": "yarn", "factor": 2.0}).rope_scaling.original_max_positions == 131_072
    assert read(YARN, rope_parameters={**LLAMA3, "rope_theta": 7.0}).rope_scaling.kind == "yarn"


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "longrope.*only llama3 and yarn"),
        ({"type": "dynamic", "factor": 2.0}, "dynamic.*only llama3 and yarn"),
        ({**LLAMA3, "factor": None}, "factor should be a positive number"),
        ({**LLAMA3, "low_freq_factor": "1"}, "low_freq_factor should be a positive number"),
        ({**LLAMA3, "high_freq_factor": 1}, "high_freq_factor should be above low_freq_factor"),
        ({**LLAMA3, "beta_fast": 32}, "beta_fast means nothing in llama3 scaling"),
        ({**YARN, "attn_factor": 1.0}, "attn_factor means nothing in yarn scaling"),
        ({**YARN, "attention_factor": 0}, "attention_factor should be a positive number"),
        ({"rope_type": "yarn"}, "factor should be a positive number"),
    ],
)
def test_other_scaling_is_refused_with_the_reason(rope, said):
    with pytest.raises(UsageError, match=f"config.json: rope_scaling is .*{said}"):
        read(rope)


def test_scaling_is_part_of_the_base_digest_and_its_absence_is_not(tmp_path):
    """The digest of a base without scaling is on record in runs older than scaling."""
    save_file({"a": np.arange(4, dtype=np.float32)}, tmp_path / "model.safetensors")

    def digest(**changes):
        (tmp_path / "config.json").write_text(json.dumps({**COMMON, **TINY["qwen2"], **changes}))
        return base_digest(tmp_path)

    plain = digest()
    assert plain == "3e17685620fda9a85d0a43e1fbafcbf9ea31dedce97ea68d09ac5f42e2049f37"
    assert digest(rope_scaling={"rope_type": "default"}) == plain
    assert len({plain, digest(rope_scaling=YARN), digest(rope_scaling={**YARN, "factor": 2.0})}) == 3
