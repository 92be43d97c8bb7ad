"""Backends against plain XLA attention. Kernels run in interpret mode: their numbers, not their speed or memory."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models import decoder
from grpo_jax.models.attention import attend, attend_in_blocks, attention_mask, tokens_of
from grpo_jax.models.attention_backends import BACKENDS, attend_rows, choose, reason_against, self_test, shared_mask
from grpo_jax.models.decoder import Decoder
from tests.models.conftest import compiled, random_params, tiny_config

FINE = {"dtype": jnp.bfloat16, "head_dim": 64, "row_tokens": 1024, "shared_prompts": False}


@pytest.mark.parametrize(
    ("request_", "chosen"),
    [
        ({"platform": "cpu"}, "xla"),
        ({"platform": "gpu"}, "flash"),
        ({"platform": "tpu"}, "splash"),
        ({"platform": "gpu", "shared_prompts": True}, "xla"),
        ({"platform": "gpu", "head_dim": 80}, "xla"),
        ({"platform": "tpu", "row_tokens": 1000}, "xla"),
        ({"platform": "tpu", "dtype": jnp.float16}, "xla"),
    ],
)
def test_auto_takes_the_fused_kernel_where_it_can_honour_the_request(request_, chosen):
    assert choose("auto", **FINE | request_) == chosen


@pytest.mark.parametrize(
    ("requested", "request_", "said"),
    [
        ("flash", {"platform": "cpu"}, "gpu, not cpu"),
        ("splash", {"platform": "gpu"}, "tpu, not gpu"),
        ("flash", {"platform": "gpu", "shared_prompts": True}, "cannot share prompts"),
        ("flash", {"platform": "gpu", "head_dim": 80}, "128, not 80"),
        ("flash", {"platform": "gpu", "row_tokens": 1000}, "multiple of 128 tokens, not 1000"),
        ("flash", {"platform": "gpu", "dtype": jnp.float64}, "not float64"),
        ("splash", {"platform": "tpu", "dtype": "float16"}, "float32 or bfloat16, not float16"),
        ("ring", {"platform": "tpu"}, "xla, flash, splash"),
    ],
)
def test_what_was_asked_for_by_name_is_given_or_refused_with_the_reason(requested, request_, said):
    with pytest.raises(ValueError, match=f"attention '{requested}'.*{said}"):
        choose(requested, **FINE | request_)


def test_a_kernel_that_jax_has_dropped_is_refused(monkeypatch):
    monkeypatch.setitem(BACKENDS, "flash", replace(BACKENDS["flash"], module="jax.experimental.gone.attention"))
    assert choose("auto", platform="gpu", **FINE) == "xla"
    with pytest.raises(ValueError, match=f"jax {jax.__version__} has no jax.experimental.gone.attention"):
        choose("flash", platform="gpu", **FINE)


def test_xla_honours_everything_everywhere():
    for platform in ("cpu", "gpu", "tpu"):
        odd = {"dtype": jnp.float64, "head_dim": 10, "row_tokens": 7, "shared_prompts": True}
        assert reason_against("xla", platform=platform, **odd) is None


@pytest.mark.parametrize(("backend", "head_dim"), [("flash", 16), ("splash", 64)])
@pytest.mark.parametrize(
    ("dtype", "row_tokens", "low", "high"), [("float32", 256, 0, 1e-5), ("bfloat16", 128, 1e-5, 2e-2)]
)
def test_kernels_have_the_values_and_gradients_of_xla(backend, head_dim, dtype, row_tokens, low, high):
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": head_dim, "row_tokens": row_tokens}
    assert low < self_test(backend, dtype=dtype, **sizes, interpret=True) < high


def test_a_wrong_kernel_does_not_pass_its_self_test(monkeypatch):
    def blind(q, k, v, segments, *, interpret):
        return attend(q, k, v, attention_mask(jnp.ones_like(segments), jnp.zeros_like(segments)))

    monkeypatch.setitem(BACKENDS, "flash", replace(BACKENDS["flash"], kernel=blind))
    with pytest.raises(RuntimeError, match="'flash' is wrong on this machine"):
        self_test("flash", dtype=jnp.bfloat16, num_heads=2, num_kv_heads=2, head_dim=16, row_tokens=128)


def random_rows(rows, length, heads, kv_heads, size, dtype, seed=0):
    """q, k, v, a cotangent of the output, and ids of several prompts, some of them shared by branches, and padding."""
    rng = np.random.default_rng(seed)
    q, k, v, cotangent = (
        rng.standard_normal((rows, length, count, size)).astype(dtype) for count in (heads, kv_heads, kv_heads, heads)
    )
    prompts, branches = np.zeros((2, rows, length), int)
    for row in range(rows):
        cuts = np.sort(rng.choice(np.arange(1, length), 7, replace=False))
        # Prompt, two branches; prompt, three branches; padding.
        for part, (prompt, branch) in enumerate([(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (2, 3)]):
            here = slice(0 if part == 0 else cuts[part - 1], cuts[part])
            prompts[row, here], branches[row, here] = prompt, branch
    return (q, k, v), cotangent, prompts, branches


def with_gradients(attention, qkv, cotangent):
    out, pullback = jax.vjp(attention, *qkv)
    return out, *pullback(cotangent)


@pytest.mark.parametrize(
    ("length", "block", "spans"),
    # One block; spans of two and one; blocks that do not divide the row, in two spans.
    [(12, 16, 8), (48, 16, 8), (58, 8, 2)],
)
def test_blocks_of_queries_change_nothing(length, block, spans, x64, monkeypatch):
    monkeypatch.setattr("grpo_jax.models.attention._SPANS", spans)
    qkv, cotangent, prompts, branches = random_rows(2, length, 4, 2, 6, np.float64)
    mask = attention_mask(prompts, branches)
    tokens = tokens_of(jnp.asarray(prompts), jnp.asarray(branches))
    plain = jax.jit(partial(with_gradients, lambda *args: attend(*args, mask)))(qkv, cotangent)
    blocks = jax.jit(partial(with_gradients, lambda *args: attend_in_blocks(*args, tokens, block=block)))(
        qkv, cotangent
    )
    for found, expected in zip(blocks, plain, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


def test_blocks_of_queries_save_memory():
    """The compiler's own count, of both passes, over what all scores at once take."""
    qkv, cotangent, prompts, branches = random_rows(1, 1024, 2, 1, 8, np.float32)
    tokens = tokens_of(jnp.asarray(prompts), jnp.asarray(branches))

    def temporary_bytes(attention):
        lowered = jax.jit(partial(with_gradients, attention)).lower(qkv, cotangent)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    plain = temporary_bytes(lambda *args: attend(*args, attention_mask(prompts, branches)))
    assert temporary_bytes(lambda *args: attend_in_blocks(*args, tokens, block=128)) < 0.2 * plain


def test_long_rows_go_block_by_block_and_need_no_mask(monkeypatch):
    monkeypatch.setattr("grpo_jax.models.attention_backends.LONGEST_WHOLE", 8)
    qkv, _, prompts, branches = random_rows(1, 20, 2, 2, 4, np.float32)
    assert shared_mask(prompts, branches, "xla") is None
    assert shared_mask(prompts[:, :8], branches[:, :8], "xla").shape == (1, 8, 8)
    assert shared_mask(prompts[:, :8], branches[:, :8], "flash") is None
    plain = attend(*qkv, attention_mask(prompts, branches))
    np.testing.assert_allclose(attend_rows(*qkv, prompts, branches), plain, atol=1e-6)


@pytest.mark.parametrize("backend", ["flash", "splash"])
def test_a_kernel_runs_on_every_device_of_a_mesh_alone(backend):
    # With eight devices (--xla_force_host_platform_device_count=8) rows and heads are really apart.
    shape = (2, 2, 2) if jax.device_count() >= 8 else (1, 1, 1)
    devices = np.asarray(jax.devices()[: np.prod(shape)]).reshape(shape)
    mesh = jax.sharding.Mesh(devices, ("data", "fsdp", "tensor"))
    qkv, cotangent, prompts, _ = random_rows(4, 128, 4, 2, 64, np.float32)
    # Every sample has a prompt of its own here, so branch ids say nothing.
    ids = (prompts, np.zeros_like(prompts))
    call = {"backend": backend, "interpret": True, "mesh": mesh}
    meshed = jax.jit(partial(with_gradients, lambda *args: attend_rows(*args, *ids, **call)))(qkv, cotangent)
    plain = with_gradients(lambda *args: attend(*args, attention_mask(*ids)), qkv, cotangent)
    for found, expected in zip(meshed, plain, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_mesh_that_does_not_divide_the_heads_is_refused():
    mesh = jax.sharding.AbstractMesh((1, 1, 4), ("data", "fsdp", "tensor"))
    qkv, _, prompts, branches = random_rows(1, 128, 4, 2, 16, np.float32)
    with pytest.raises(
        ValueError, match="1 rows and 2 key heads are not divided by 1 devices for rows and 4 for heads"
    ):
        attend_rows(*qkv, prompts, branches, backend="flash", mesh=mesh)


def test_the_decoder_computes_with_the_backend_it_is_given(monkeypatch):
    config, params = tiny_config("qwen3"), random_params("qwen3")
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, 128))
    prompts = np.repeat([[1, 2, 3, 0]], 32, axis=1)
    rows = (tokens, np.arange(128)[None] % 32, prompts, prompts * 0)
    plain = compiled(Decoder(config))({"params": params}, *rows)
    monkeypatch.setattr(decoder, "attend_rows", partial(attend_rows, interpret=True))
    traced = jax.jit(Decoder(config, attention="flash").apply).trace({"params": params}, *rows)
    assert "pallas_call" in str(traced.jaxpr)
    fused = traced.lower().compile()({"params": params}, *rows)
    np.testing.assert_allclose(fused, plain, atol=1e-4)


def test_arrays_that_a_kernel_cannot_take_are_refused():
    qkv, _, prompts, branches = random_rows(1, 100, 2, 2, 16, np.float32)
    with pytest.raises(ValueError, match="multiple of 128 tokens, not 100"):
        attend_rows(*qkv, prompts, branches, backend="flash", interpret=True)
