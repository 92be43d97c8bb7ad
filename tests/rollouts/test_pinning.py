"""Which policy stays loaded for its evaluation, as versions are published one after the other."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_jax.config.schema import Config
from grpo_jax.rollouts import pinning
from grpo_jax.rollouts.pinning import Pin
from grpo_jax.storage.bucket import Bucket, BucketError
from tests.rollouts.scripted import policy_name
from tests.rollouts.simulated import put_evaluation

MakeConfig = Callable[..., Config]


class Publishes:
    """A run that publishes version after version; `evaluate` puts the result of one."""

    def __init__(self, make_config: MakeConfig, every: int = 0, **changes: Any):
        config = make_config(evaluation={"samples": 1, "every": every, "split": "test", "timeout_s": 100.0}, **changes)
        self.config, self.run = config, Bucket(config.bucket).child(config.run)
        self.pin = Pin(config, self.run)

    def at(self, version: int) -> int | None:
        """The version that is pinned once this one is published."""
        lineage = {v: policy_name(v) for v in range(version + 1)}
        named = self.pin.choose(version, lineage)
        return next((v for v, name in lineage.items() if name == named), None)

    def evaluate(self, version: int) -> None:
        put_evaluation(self.run, policy_name(version), "test")


def test_the_base_is_kept_until_it_has_been_evaluated_and_nothing_else(make_config: MakeConfig) -> None:
    run = Publishes(make_config)
    assert [run.at(v) for v in range(7)] == [0] * 7
    run.evaluate(0)
    assert [run.at(v) for v in range(7, 20)] == [None] * 13


def test_a_turn_begins_every_so_many_steps(make_config: MakeConfig) -> None:
    run = Publishes(make_config, every=6, sync_every=2)
    pinned = []
    for version in range(11):
        pinned.append(run.at(version))
        run.evaluate(version)
    assert pinned == [0, None, None, 3, None, None, 6, None, None, 9, None]


def test_one_at_a_time_and_the_next_is_the_newest(make_config: MakeConfig) -> None:
    run = Publishes(make_config, every=2)
    assert [run.at(v) for v in range(6)] == [0] * 6
    run.evaluate(0)
    assert [run.at(v) for v in (6, 7, 8, 9)] == [6] * 4
    run.evaluate(6)
    assert [run.at(v) for v in (10, 11)] == [10] * 2
    assert [e["policy"] for e in run.pin.take_finished()] == [policy_name(0), policy_name(6)]
    assert run.pin.take_finished() == []


def test_what_is_not_evaluated_in_time_is_let_go(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr(pinning, "time", SimpleNamespace(monotonic=lambda: now[0]))
    run = Publishes(make_config, every=3)
    assert [run.at(v) for v in (0, 1)] == [0, 0]
    now[0] = 99.0
    assert run.at(2) == 0
    now[0] = 101.0
    assert run.at(3) == 3
    assert f"no evaluation of {policy_name(0)} within 100 s" in caplog.text
    now[0] = 202.0
    assert run.at(4) is None  # and the base is not tried again


def test_a_restart_takes_no_turn_twice(make_config: MakeConfig) -> None:
    run = Publishes(make_config, every=5)
    run.evaluate(0)
    run.evaluate(5)
    run.pin = Pin(run.config, run.run)
    assert [run.at(v) for v in (8, 9, 10, 11)] == [None, None, 10, 10]
    run.pin = Pin(run.config, run.run)
    assert run.at(12) == 12  # v10 had its turn, but not its evaluation


def test_a_restart_makes_up_for_the_base(make_config: MakeConfig) -> None:
    run = Publishes(make_config, every=5)
    assert run.at(12) == 0


def test_a_bucket_that_fails_changes_nothing(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Publishes(make_config, every=2)
    fail = [True]

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            if fail[0]:
                raise BucketError("it is away")
            return call(*args)

        return wrapped

    monkeypatch.setattr(run.run, "list", failing(run.run.list))
    monkeypatch.setattr(run.run, "read_or_none", failing(run.run.read_or_none))
    assert run.at(0) is None
    fail[0] = False
    assert run.at(1) == 0
    run.evaluate(0)
    fail[0] = True
    assert run.at(2) == 0
    fail[0] = False
    assert run.at(3) == 3
