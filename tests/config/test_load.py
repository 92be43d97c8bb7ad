from pathlib import Path
from typing import Any

import pytest

from grpo_jax.config.load import load_config
from grpo_jax.errors import UsageError

BASE = """
run: base
steps: 10
model: {source: m, dtype: float32}
task: {source: "a:b", args: {size: 3}}
rewards:
  - {source: "a:one", weight: 2.0}
  - {source: "a:two"}
sampling: {stop: [x, y]}
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    write("base.yaml", BASE)
    return write


def complaint(path: Path, *overrides: str) -> str:
    with pytest.raises(UsageError) as error:
        load_config(path, overrides)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_mappings_of_a_parent_are_merged_and_anything_else_is_replaced(write: Any) -> None:
    path = write(
        "child.yaml", "extends: base.yaml\nrun: child\ntask: {args: {size: 4, more: 1}}\nsampling: {stop: [z]}"
    )
    config = load_config(path)
    assert (config.run, config.steps, config.model.dtype) == ("child", 10, "float32")
    assert (config.task.source, config.task.args) == ("a:b", {"size": 4, "more": 1})
    assert config.sampling.stop == ["z"]
    assert len(config.rewards) == 2


def test_a_chain_is_read_from_its_far_end_each_relative_to_the_file_that_names_it(write: Any) -> None:
    write("sub/middle.yaml", "extends: ../base.yaml\nsteps: 20\nseed: 1")
    config = load_config(write("top.yaml", "extends: sub/middle.yaml\nsteps: 30"))
    assert (config.run, config.steps, config.seed) == ("base", 30, 1)


def test_a_chain_that_comes_back_to_itself_is_refused(write: Any) -> None:
    own = write("own.yaml", "extends: own.yaml")
    assert complaint(own) == f"{own}: extends itself"
    write("a.yaml", "extends: b.yaml")
    write("b.yaml", "extends: ./c.yaml")
    write("c.yaml", "extends: sub/../a.yaml")
    write("sub/x.yaml", "")
    assert "extends itself" in complaint(write("a.yaml", "extends: b.yaml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b", "expected a mapping of keys, found list"),
        ("", "expected a mapping of keys, found NoneType"),
        ("a: [1", "not valid YAML"),
        ("a: b: c", "not valid YAML"),
        ("extends: 3", "extends: expected a file name"),
        ("extends: gone.yaml", "gone.yaml: no such config file"),
        ("a: !!python/object/apply:os.getcwd []", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_config_is_named(write: Any, text: str, message: str) -> None:
    path = write("bad.yaml", text)
    found = complaint(path)
    assert message in found
    assert str(path.parent) in found


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    assert complaint(tmp_path / "gone.yaml") == f"{tmp_path}/gone.yaml: no such config file"
    assert complaint(tmp_path).startswith(f"{tmp_path}: cannot be read")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert str(binary) in complaint(binary)


def test_overrides_are_read_as_yaml_and_come_last(write: Any) -> None:
    config = load_config(
        write("base.yaml", BASE),
        [
            "steps=7",
            "optimizer.learning_rate=1e-3",  # a string to YAML 1.1, a number to everybody else
            "task.args.size=null",
            "task.args.deep.er=[1, a]",
            "rewards.1.weight=0.5",
            "sampling.stop.0=z",
            "lora.targets=[q_proj]",
            "task.system_prompt=a = b, c",
        ],
    )
    assert (config.steps, config.optimizer.learning_rate) == (7, 1e-3)
    assert config.task.args == {"size": None, "deep": {"er": [1, "a"]}}
    assert [reward.weight for reward in config.rewards] == [2.0, 0.5]
    assert config.sampling.stop == ["z", "y"]
    assert config.lora.targets == ["q_proj"]
    assert config.task.system_prompt == "a = b, c"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "override 'steps': expected key=value"),
        ("=3", "override '=3': expected key=value"),
        ("a..b=3", "override 'a..b=3': expected key=value"),
        ("steps=[1", "override 'steps=[1': the value is not valid YAML"),
        ("rewards.2.weight=1", "override 'rewards.2.weight=1': rewards has no item '2'"),
        ("rewards.last.weight=1", "override 'rewards.last.weight=1': rewards has no item 'last'"),
        ("steps.more=1", "override 'steps.more=1': steps is no section"),
    ],
)
def test_an_override_that_cannot_be_applied_is_named(write: Any, override: str, message: str) -> None:
    assert complaint(write("base.yaml", BASE), override) == message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stepz=3", "stepz: unknown key"),
        ("batch.size.x=3", "batch.size: unknown key"),
        ("rewards.0.wieght=1", "rewards.0.wieght: unknown key"),
        ("steps=-1", "steps: Input should be greater than or equal to 1 (found -1)"),
    ],
)
def test_an_override_of_what_is_no_key_names_file_and_key(write: Any, override: str, message: str) -> None:
    path = write("base.yaml", BASE)
    assert complaint(path, override) == f"{path}: {message}"


def test_every_config_in_the_repository_is_valid() -> None:
    configs = sorted(Path(__file__).parents[2].glob("configs/*.yaml"))
    assert configs
    for path in configs:
        load_config(path)
