"""Merged weights against the learner's own log-probabilities under the adapter."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from grpo_jax.adapters.export import export, export_merged
from grpo_jax.adapters.manifest import Canary
from grpo_jax.adapters.publisher import AdapterSpec, export_adapter_files, upload_adapter
from grpo_jax.errors import UsageError
from grpo_jax.models.config import LoraConfig, ModelConfig
from grpo_jax.models.decoder import Decoder
from grpo_jax.models.logprobs import logits
from grpo_jax.models.lora import init_lora
from grpo_jax.models.source import base_digest
from grpo_jax.models.weights import load_params
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordReader, RecordWriter
from tests.models.conftest import plain_rows
from tests.observability import synthetic
from tests.tiny_model import write_tiny_model

RANK, ALPHA, TARGETS = 8, 16.0, ("q_proj", "v_proj", "down_proj")
TOKENS = np.array([[3, 77, 12, 250, 9, 40, 41, 200]], np.int32)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("base") / "model")


def shards(base: Path, to: Path) -> Path:
    """The same model in two files with an index."""
    shutil.copytree(base, to)
    tensors = load_file(to / "model.safetensors")
    (to / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{i:05d}-of-00002.safetensors"
        save_file({n: tensors[n] for n in part}, to / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (to / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return to


def published(bucket: Bucket, base: Path) -> tuple[Bucket, Any]:
    """A run on `base` whose last policy is an adapter that changes much. Returns its bucket and the LoRA tree."""
    model, lora = ModelConfig.from_dir(base), LoraConfig(RANK, ALPHA, False, TARGETS)
    tree = jax.tree.map(
        lambda x: np.asarray(0.2 * jax.random.normal(jax.random.key(x.size), x.shape)),
        init_lora(jax.random.key(0), model, lora),
    )
    run = synthetic.write_run(bucket, bucket.local_path(synthetic.RUN), steps=2)
    record = RecordReader(run, layout.RUN).read()
    assert record is not None
    RecordWriter(run, layout.RUN, 2).write({**record, "base": {"source": str(base), "digest": base_digest(base)}})
    spec = AdapterSpec(synthetic.RUN, RANK, ALPHA, False, lora.scale, str(base), base_digest(base))
    canary = Canary(tokens=[1, 2], logprobs=[-1.0])
    manifest, files = export_adapter_files(spec, tree, version=2, step=2, canary=canary)
    upload_adapter(run, manifest, files)
    body = {"run": synthetic.RUN, "current": manifest.name, "window": [manifest.name], "probe": ""}
    RecordWriter(run, layout.POLICY, 2).write(body)
    return run, tree


def logprobs(folder: Path, lora: Any = None) -> np.ndarray:
    """Of the learner's decoder, float32, of every token at all positions; [1, T, V]."""
    model = ModelConfig.from_dir(folder)
    params = load_params(folder, model, jnp.float32)
    variables = {"params": params} | ({} if lora is None else {"lora": lora})
    config = None if lora is None else LoraConfig(RANK, ALPHA, False, TARGETS)
    hidden = jax.jit(Decoder(model, config).apply)(variables, *plain_rows(TOKENS))
    return np.asarray(jax.nn.log_softmax(logits(params, hidden, model)))


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
def test_the_merged_model_has_the_log_probs_of_the_adapter(base: Path, tmp_path: Path, sharded: bool) -> None:
    source = shards(base, tmp_path / "source") if sharded else base
    run, tree = published(Bucket(str(tmp_path / "bucket")), source)
    merged = export_merged(run, tmp_path / "merged")
    expected = logprobs(source, tree)
    assert np.abs(expected - logprobs(source)).max() > 0.3  # the adapter does something
    np.testing.assert_allclose(logprobs(merged), expected, atol=1e-4)
    weights = sorted(f.name for f in merged.glob("*.safetensors*"))
    assert weights == sorted(f.name for f in source.glob("*.safetensors*"))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (merged / name).read_bytes() == (source / name).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["bucket", "merged", *(["source"] if sharded else [])])


def test_transformers_agrees(base: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    run, _ = published(Bucket(str(tmp_path / "bucket")), base)
    merged = AutoModelForCausalLM.from_pretrained(export(run, str(tmp_path / "merged"), merged=True))
    adapter = export(run, str(tmp_path / "adapter"))
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    with torch.no_grad():
        mine, theirs = (m(torch.tensor(TOKENS, dtype=torch.long)).logits for m in (merged, adapted))
    assert (mine - theirs).abs().max() < 1e-4


def test_a_bfloat16_base_stays_one_and_the_card_says_what_that_costs(base: Path, tmp_path: Path) -> None:
    import ml_dtypes

    source = tmp_path / "source"
    shutil.copytree(base, source)
    tensors = {k: v.astype(ml_dtypes.bfloat16) for k, v in load_file(source / "model.safetensors").items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    run, tree = published(Bucket(str(tmp_path / "bucket")), source)
    merged = export_merged(run, tmp_path / "merged")
    with safe_open(merged / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}
        name = "model.layers.1.self_attn.q_proj.weight"
        value = file.get_tensor(name)
        untouched = file.get_tensor("model.layers.1.self_attn.k_proj.weight")
    assert value.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(untouched, tensors["model.layers.1.self_attn.k_proj.weight"])
    q = tree["layers"]["self_attn"]["q_proj"]
    exact = tensors[name].astype(np.float32) + 2.0 * (q["a"][1] @ q["b"][1]).T
    np.testing.assert_allclose(value.astype(np.float32), exact, rtol=2**-8, atol=1e-6)
    card = (merged / "README.md").read_text()
    assert "library_name: transformers" in card
    assert "which has moved the weights by" in card


def test_another_base_is_refused(base: Path, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source")
    run, _ = published(Bucket(str(tmp_path / "bucket")), source)
    write_tiny_model(source, seed=1)
    with pytest.raises(UsageError, match="are not those that toy was trained on"):
        export_merged(run, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_matrix_that_the_base_has_not_is_refused(base: Path, tmp_path: Path) -> None:
    """Both say the same digest, and still do not fit: nothing is written."""
    from grpo_jax.adapters.manifest import AdapterError
    from grpo_jax.adapters.merge import merge

    run, _ = published(Bucket(str(tmp_path / "bucket")), base)
    adapter = Path(export(run, str(tmp_path / "adapter")))
    small = tmp_path / "small"
    shutil.copytree(base, small)
    tensors = load_file(small / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, small / "model.safetensors")
    with pytest.raises(AdapterError, match=r"no tensor 'model\.layers\.1\.mlp\.down_proj\.weight'"):
        merge(small, adapter, 2.0, tmp_path / "merged")
