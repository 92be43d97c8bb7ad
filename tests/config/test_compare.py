from grpo_jax.config.compare import differing_keys
from grpo_jax.config.schema import Config


def test_what_only_lays_out_the_work_may_change_and_what_is_learned_may_not():
    old = {
        "steps": 5,
        "bucket": "a",
        "learner": {"mesh": {"data": 1}, "remat": "none", "quantization": "none"},
        "batch": {"row_tokens": 64, "share_prompt": True, "group_size": 8},
        "algorithm": {"loss": "gspo"},
    }
    moved = {
        **old,
        "steps": 9,
        "bucket": "b",
        "learner": {"mesh": {"data": 8, "fsdp": 2}, "remat": "full", "quantization": "none"},
        "batch": {**old["batch"], "share_prompt": False},
    }
    assert differing_keys(old, moved) == []
    other = {**moved, "learner": {**moved["learner"], "quantization": "nf4"}, "algorithm": {"loss": "cispo"}}
    assert differing_keys(old, other) == ["algorithm.loss", "learner.quantization"]
    assert differing_keys(old, {**old, "batch": {**old["batch"], "group_size": 4}}) == ["batch.group_size"]


def test_a_key_that_is_younger_than_a_run_has_its_default_there():
    raw = {"run": "r", "model": {"source": "m"}, "task": {"source": "a:b"}, "rewards": [{"source": "a:b"}]}
    new = Config.model_validate(raw).model_dump(mode="json")
    old = {**new, "task": {key: value for key, value in new["task"].items() if key != "drop_overlong"}}
    assert differing_keys(old, new) == []
    assert differing_keys(old, {**new, "task": {**new["task"], "drop_overlong": True}}) == ["task.drop_overlong"]
