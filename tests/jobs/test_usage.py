"""A wrong command or config: exit code 2, one sentence with the key's path, nothing started."""

import pytest
import yaml

from grpo_jax import cli
from grpo_jax.storage.bucket import Limits
from tests.jobs.harness import tiny_config


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("lora__ranc", 8, "lora.ranc: unknown key"),
        ("lora__rank", "many", "lora.rank: "),
        ("lora__rank", 1024, "lora.rank: 1024 is above what vLLM serves"),
        ("lora__targets", ["q_proj", "qq_proj"], "qq_proj"),
        ("lora__targets", "q_proj", "lora.targets: "),
        ("sampling__top_p", 0.9, "sampling.top_p: must be 1"),
        ("batch__row_tokens", 12, "batch.row_tokens"),
        ("steps", 0, "steps: "),
        ("model__source", "/no/such/model", "model.source: "),
        ("rewards", [{"source": "tests.plugins:nothing"}], "rewards.0.source"),
        ("rewards", [], "rewards: "),
        ("task__source", "no_such_module:task", "task.source: cannot import no_such_module"),
        ("task__args", {"colour": "red"}, "task.args: "),
        ("evaluation__split", "test", "evaluation.split: "),
        ("run", "Not A Name", "run: a name is made of"),
        ("bucket", "nosuch://bucket", "bucket"),
    ],
)
@pytest.mark.parametrize("command", ["run", "check"])
def test_one_sentence_names_the_key(tiny_model, tmp_path, capsys, command, key, value, message):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tiny_config(tiny_model, tmp_path / "bucket", **{key: value})))
    assert cli.main([command, str(path)]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert not (tmp_path / "bucket").exists()


def test_an_adapter_to_start_from_that_is_not_there_is_named_before_anything_starts(tiny_model, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    config = tiny_config(tiny_model, tmp_path / "bucket")
    path.write_text(yaml.safe_dump({**config, "lora": {**config.get("lora", {}), "init_from": str(tmp_path / "none")}}))
    assert cli.main(["run", str(path)]) == 2
    assert capsys.readouterr().err.startswith("grpo-jax: lora.init_from: ")
    assert not (tmp_path / "bucket").exists()


def test_a_bucket_in_which_nothing_can_be_made_is_named(tiny_model, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tiny_config(tiny_model, tmp_path / "file" / "bucket")))
    assert cli.main(["run", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("grpo-jax: bucket, or --dir: ")
    assert err.count("\n") == 1


def test_a_bucket_that_fails_is_one_sentence_and_not_the_configs_fault(tiny_model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("grpo_jax.storage.bucket.DEFAULT_LIMITS", Limits(total_s=0.2))
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tiny_config(tiny_model, f"faulty:error=1:{tmp_path}/bucket")))
    assert cli.main(["run", str(path)]) == 1
    err = capsys.readouterr().err
    assert "503 Service Unavailable" in err
    assert err.count("\n") == 1


def test_check_prints_what_a_config_means(tiny_model, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tiny_config(tiny_model, tmp_path / "bucket")))
    assert cli.main(["check", str(path), "steps=7"]) == 0
    out = capsys.readouterr().out
    assert "7 of 2 prompts × 4 samples" in out
    assert "77 train, 4 eval" in out
    assert not (tmp_path / "bucket").exists()


def test_a_missing_config_file_is_named(tmp_path, capsys):
    assert cli.main(["run", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml: no such config file" in capsys.readouterr().err


def test_wrong_arguments_exit_with_two():
    with pytest.raises(SystemExit) as error:
        cli.main(["run"])
    assert error.value.code == 2
