"""An existing PEFT adapter as the start: what fits is read exactly, what does not is refused in one sentence."""

import json
import uuid
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from grpo_jax.adapters.initial import initial_adapter
from grpo_jax.adapters.peft import adapter_files
from grpo_jax.errors import UsageError
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket

LAYERS, RANK, ALPHA = 3, 4, 8.0


def tree(seed: int = 0, targets: tuple[str, ...] = ("q_proj", "v_proj"), rank: int = RANK) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    factors = {
        name: {"a": rng.normal(size=(LAYERS, 6, rank)).astype(np.float32),
               "b": rng.normal(size=(LAYERS, rank, 5)).astype(np.float32)} for name in targets
    }  # fmt: skip
    return {"layers": {"self_attn": factors}}


def write(folder: Path, lora: dict[str, Any], rank: int = RANK, alpha: float = ALPHA, rslora: bool = False) -> str:
    folder.mkdir()
    for name, data in adapter_files(lora, rank=rank, alpha=alpha, rslora=rslora, base_model="x").items():
        (folder / name).write_bytes(data)
    return str(folder)


def reconfigure(folder: Path, **changes: Any) -> None:
    file = folder / layout.ADAPTER_CONFIG
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def read(source: str, like: dict[str, Any] | None = None, rank: int = RANK, scale: float = ALPHA / RANK) -> Any:
    return initial_adapter(source, like or tree(1), rank=rank, scale=scale)


def assert_equal(a: Any, b: Any) -> None:
    assert a["layers"]["self_attn"].keys() == b["layers"]["self_attn"].keys()
    for name, factors in a["layers"]["self_attn"].items():
        for part, value in factors.items():
            np.testing.assert_array_equal(value, b["layers"]["self_attn"][name][part])


def test_a_directory_and_a_bucket(tmp_path: Path) -> None:
    source = write(tmp_path / "adapter", tree())
    assert_equal(read(source), tree())
    bucket = Bucket(f"memory://{uuid.uuid4().hex}/a")
    for name in (layout.ADAPTER_CONFIG, layout.ADAPTER_WEIGHTS):
        bucket.put(name, (tmp_path / "adapter" / name).read_bytes())
    assert_equal(read(bucket.url), tree())


def test_of_bfloat16(tmp_path: Path) -> None:
    source = write(tmp_path / "adapter", tree())
    file = tmp_path / "adapter" / layout.ADAPTER_WEIGHTS
    save_file({k: v.astype(ml_dtypes.bfloat16) for k, v in load_file(file).items()}, file)
    found = read(source)["layers"]["self_attn"]["q_proj"]["a"]
    assert found.dtype == np.float32
    expected = tree()["layers"]["self_attn"]["q_proj"]["a"].astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(found, expected)


def test_the_scale_counts_and_not_how_it_is_written(tmp_path: Path) -> None:
    assert_equal(read(write(tmp_path / "adapter", tree(), alpha=4.0, rslora=True)), tree())  # 4 / sqrt(4) = 8 / 4


def test_what_peft_itself_saves(tmp_path: Path) -> None:
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=6, intermediate_size=8, num_hidden_layers=LAYERS, num_attention_heads=1,
        num_key_value_heads=1, head_dim=6,
    )  # fmt: skip
    lora = peft.LoraConfig(r=RANK, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(LlamaForCausalLM(config), lora)
    model.save_pretrained(tmp_path / "adapter")
    like = {"layers": {"self_attn": {"q_proj": {"a": np.zeros((LAYERS, 6, RANK)), "b": np.zeros((LAYERS, RANK, 6))}}}}
    found = read(str(tmp_path / "adapter"), like)["layers"]["self_attn"]["q_proj"]
    for i in range(LAYERS):
        theirs = model.base_model.model.model.layers[i].self_attn.q_proj
        np.testing.assert_array_equal(found["a"][i], theirs.lora_A["default"].weight.detach().numpy().T)
        np.testing.assert_array_equal(found["b"][i], theirs.lora_B["default"].weight.detach().numpy().T)
    assert isinstance(theirs, torch.nn.Module)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"r": 8}, "has rank 8, lora.rank is 4"),
        ({"lora_alpha": 16}, "has scale 4, lora.alpha, lora.rank and lora.rslora make it 2"),
        ({"use_dora": True}, "has use_dora set"),
        ({"rank_pattern": {"q_proj": 2}}, "has rank_pattern set"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save set"),
        ({"bias": "all"}, "has bias set"),
        ({"peft_type": "LOHA"}, "is of the kind 'LOHA'"),
    ],
)
def test_settings_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    source = write(tmp_path / "adapter", tree())
    reconfigure(tmp_path / "adapter", **changes)
    with pytest.raises(UsageError, match=reason) as raised:
        read(source)
    assert str(raised.value).startswith("lora.init_from: ")
    assert "\n" not in str(raised.value)


def test_other_targets(tmp_path: Path) -> None:
    source = write(tmp_path / "adapter", tree(targets=("q_proj", "o_proj")))
    with pytest.raises(
        UsageError, match=r"lacks self_attn\.v_proj and has self_attn\.o_proj, other than lora\.targets"
    ):
        read(source)


def test_another_model(tmp_path: Path) -> None:
    wide = {"layers": {"self_attn": {k: {"a": np.zeros((LAYERS, 7, RANK)), "b": v["b"]}
                                     for k, v in tree()["layers"]["self_attn"].items()}}}  # fmt: skip
    with pytest.raises(UsageError, match=r"q_proj\.a has shape \(3, 6, 4\), this model needs \(3, 7, 4\)"):
        read(write(tmp_path / "adapter", tree()), wide)
    shallow = {
        "layers": {"self_attn": {k: {p: x[:2] for p, x in v.items()} for k, v in tree()["layers"]["self_attn"].items()}}
    }
    with pytest.raises(UsageError, match="which matches no module"):
        read(str(tmp_path / "adapter"), shallow)


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    lora = tree()
    lora["layers"]["self_attn"]["v_proj"]["b"][1, 2, 3] = np.nan
    with pytest.raises(UsageError, match=r"self_attn\.v_proj\.b is not finite"):
        read(write(tmp_path / "adapter", lora))


def test_what_is_not_there_or_broken(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no adapter_config\.json"):
        read(str(tmp_path / "nothing"))
    source = write(tmp_path / "adapter", tree())
    (tmp_path / "adapter" / layout.ADAPTER_WEIGHTS).write_bytes(b"torn")
    with pytest.raises(UsageError, match="is no PEFT adapter"):
        read(source)
