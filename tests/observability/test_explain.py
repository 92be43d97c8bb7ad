"""`grpo-jax explain`: what is told of a sample, against what was written and what can be reckoned by hand."""

import json
from pathlib import Path

import numpy as np
import pytest

from grpo_jax import cli
from grpo_jax.errors import UsageError
from grpo_jax.observability.explain import Explanation, explain, lines
from grpo_jax.rollouts.sample import Group, GroupId, Sample
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.spool import SpoolWriter
from tests.observability.synthetic import group, policy, publish, write_run

STEPS = 3
SAMPLE = "e000.i000005.a00/1"  # the second group of step 1, of v0


@pytest.fixture
def run(tmp_path: Path) -> Bucket:
    return write_run(Bucket(str(tmp_path)), tmp_path / "toy", STEPS)


def test_where_a_sample_came_from_is_told_as_it_was_written(run: Bucket) -> None:
    publish(run, 0)
    told = explain(run, SAMPLE, lambda tokens: f"tokens {tokens}")
    assert told["prompt"] == "tokens [1, 2, 3, 4, 5]"
    assert told["tokens"] == [0, 1, 2, 3]
    assert told["logprobs"] == [-0.5] * 4
    assert told["policy"]["name"] == policy(0)
    assert told["policy"]["digest"].startswith(policy(0)[-8:])
    assert len(told["policy"]["digest"]) == 64
    assert told["replica"] == {"id": "r1", "engine": "vllm", "engine_version": "0.32.0", "dtype": "float32"}
    assert told["seed"] == 5 + 1
    assert told["sampler"] == {"temperature": 1.0}
    assert told["reward"] == 1.0
    assert told["rewards"][0]["source"] == "experiments.rewards.numbers:last_integer"
    assert told["rewards"][0]["value"] == 1.0


def test_advantage_and_weight_are_those_of_the_step_that_trained_it(run: Bucket) -> None:
    training = explain(run, SAMPLE, None)["training"]
    assert (training["state"], training["step"], training["update"]) == ("trained", 1, 0)
    assert (training["lag_versions"], training["lag_steps"]) == (1, 1)
    # Four groups with rewards 1/3, 1, 0 and one without; lengths 3 to 6. Mean over all tokens, no deviation.
    assert training["advantage"] == pytest.approx(1.0 - (1 / 3 + 1.0 + 0.0) / 3)
    assert training["token_weight"] == pytest.approx(1 / (4 * (3 + 4 + 5)))


def test_a_sample_without_a_gradient_says_why(run: Bucket) -> None:
    training = explain(run, "e000.i000005.a00/3", None)["training"]
    assert training["advantage"] is None
    assert training["note"] == "it has no reward"
    flat = explain(run, "e000.i000000.a00/2", None)["training"]  # step 0: rewards 0, 1, 0
    assert flat["advantage"] == pytest.approx(-1 / 3)


def test_a_dropped_group_says_why_and_one_that_waits_that_it_does(run: Bucket) -> None:
    for index in (90, 92, 95):
        SpoolWriter(run, "w0").write(group(index, 1, 2e9, 2e9 + 1))
    told = explain(run, "e000.i000090.a00/0", None)["training"]
    assert (told["state"], told["reason"], told["step"]) == ("dropped", "stale", None)
    assert explain(run, "e000.i000092.a00/0", None)["training"]["reason"] == "invalid"
    assert explain(run, "e000.i000095.a00/0", None)["training"]["state"] == "not trained"


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ("nonsense", "is no sample"),
        ("e000.i000005.a00", "is no sample"),
        ("e000.i000005.a00/²", "is no sample"),
        ("e000.i000005.a00/4", "has 4 samples, from 0 on"),
        ("e000.i000077.a00/0", "holds no group e000.i000077.a00$"),
        ("e000.i000091.a00/0", "it was dropped: stale"),
    ],
)
def test_what_is_not_there_is_a_sentence(run: Bucket, sample: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        explain(run, sample, None)


def test_a_group_that_was_deleted_still_has_its_step(run: Bucket) -> None:
    run.delete(layout.rollout("w0", "e000.i000005.a00"))
    with pytest.raises(UsageError, match="step 1 trained it"):
        explain(run, SAMPLE, None)
    assert "cannot be computed" in explain(run, "e000.i000004.a00/0", None)["training"]["note"]


def test_what_a_model_wrote_cannot_touch_the_terminal(
    run: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = group(90, 1, 2e9, 2e9 + 1, text="[bold]\x1b[2J\x1b]0;title\x07\u202e")
    SpoolWriter(run, "w0").write(evil)
    folder = str(tmp_path / "toy")
    assert cli.main(["explain", folder, "e000.i000090.a00/0"]) == 0
    out = capsys.readouterr().out
    assert "[bold]" in out
    assert not {"\x1b", "\x07", "\u202e"} & set(out)
    assert cli.main(["explain", folder, "e000.i000090.a00/0", "--json"]) == 0
    out = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\u202e"} & set(out)
    assert json.loads(out)["completion"].startswith("[bold]\x1b")
    assert cli.main(["explain", folder, "x"]) == 2


def test_the_ids_are_those_that_samples_shows(
    run: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["samples", str(tmp_path / "toy"), "--step", "1", "--n", "100"]) == 0
    assert SAMPLE in capsys.readouterr().out


def test_parts_and_values_that_are_no_number_are_told(run: Bucket) -> None:
    made = group(90, 1, 2e9, 2e9 + 1)
    sample = made.samples[0]
    parts = {"last_integer": 0.5, "last_integer/format": None}
    odd = Sample(sample.tokens, np.array([np.nan, -1.0, -1.0], np.float32), 0.5, parts, "x", "stop")
    SpoolWriter(run, "w0").write(Group(GroupId(0, 90), made.prompt_tokens, (odd,), made.provenance))
    told = explain(run, "e000.i000090.a00/0", None)
    assert told["logprobs"] == [None, -1.0, -1.0]
    assert told["rewards"][0]["parts"] == {"format": None}
    assert "format none" in dict(_text(told))["  last_integer"]
    json.dumps(told, allow_nan=False)


def _text(told: Explanation) -> list[tuple[str, str]]:
    return lines(told)
