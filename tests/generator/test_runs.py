"""One replica for several runs: the next takes the place of one that is over, and none of them sees another's."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_jax.config.schema import Config
from grpo_jax.errors import UsageError
from grpo_jax.generator.runs import disagreement, require_agreement
from grpo_jax.generator.vllm import Limits
from grpo_jax.storage import layout
from tests.generator.agents import AgentProcess
from tests.generator.calls import prompt_logprobs
from tests.generator.settings import LORA, make_config
from tests.generator.stand_in import StandIn

RUNS = ("one", "two", "three")
Start = Callable[..., AgentProcess]


def _config(folder: Path, model_dir: Path, run: str, **sections: Any) -> Config:
    return make_config(folder, model_dir, run, **{**sections, "fleet": {"name": "shared", **sections.get("fleet", {})}})


@pytest.fixture
def learners(tmp_path: Path, tiny_dir: Path) -> list[StandIn]:
    return [StandIn(str(tmp_path / "bucket"), run, tiny_dir, LORA) for run in RUNS]


@pytest.fixture
def start(tmp_path: Path, tiny_dir: Path) -> Iterator[Start]:
    agents: list[AgentProcess] = []

    def start(runs: int, **fleet: Any) -> AgentProcess:
        configs = [_config(tmp_path / "bucket", tiny_dir, run, fleet=fleet) for run in RUNS[:runs]]
        agents.append(AgentProcess(configs[0], "r0", tmp_path / "r0", *configs[1:]))
        return agents[-1]

    yield start
    for agent in agents:
        agent.end()


@pytest.mark.slow
def test_the_next_run_takes_the_place_of_one_that_is_over(learners: list[StandIn], start: Start) -> None:
    one, two, _ = learners
    agent = start(2)
    first = one.start()
    agent.proved(first)
    server, second = agent.server_pids(), two.start()
    learned = one.publish(1, one.version(1))
    one.point(learned, first)
    record = agent.proved(first, learned)
    assert not _of(two, record), "there is one place, and it is taken"
    one.begin(status="finished")
    record = agent.proved(second)
    assert not _of(one, record)
    assert agent.server_pids() == server, "the same server goes on"
    two.begin(status="finished")
    assert agent.exit_code() == 0
    assert not agent.heartbeat_exists()


@pytest.mark.slow
def test_runs_at_one_time_are_told_apart(learners: list[StandIn], start: Start) -> None:
    one, two, _ = learners
    agent = start(2, runs_at_once=2)
    published = []
    for i, learner in enumerate((one, two)):
        v0, tree = learner.start(), learner.version(i)
        name = learner.publish(1, tree)
        learner.point(name, v0)
        published.append((learner, name, tree))
    record = agent.proved(*(name for _, name, _ in published))
    assert record["runs"] == ["one", "two"]
    assert record["quarantined"] == {}
    for learner, name, tree in published:
        scored = prompt_logprobs(record["url"], name, learner.tokens.tolist())
        assert scored == pytest.approx(learner.logprobs(tree), abs=1e-4)


@pytest.mark.slow
def test_a_run_that_has_fallen_silent_gives_up_its_place_and_comes_back(learners: list[StandIn], start: Start) -> None:
    one, two, _ = learners
    agent = start(2, silent_s=3.0)
    first = one.start()
    agent.proved(first)
    second = two.start()
    _beating(two, lambda: agent.heartbeat().get("proved") == [second])
    _beating(one, lambda: agent.heartbeat().get("proved") == [first])


def test_a_silent_run_is_served_where_nobody_else_wants_its_place(learners: list[StandIn], start: Start) -> None:
    one, two, _ = learners
    first, second = one.start(), two.start()
    agent = start(2, silent_s=0.5)  # by the time that the server is ready both have been silent for longer
    agent.proved(first)
    _beating(two, lambda: agent.heartbeat().get("proved") == [second])


@pytest.mark.slow
def test_a_run_that_cannot_be_served_keeps_no_other_from_its_place(learners: list[StandIn], start: Start) -> None:
    one, two, _ = learners
    one.digest = "0" * 64
    agent = start(2, runs_at_once=2)
    one.start()
    name = two.start()
    record = agent.proved(name)
    assert "the base model here has the digest" in agent.quarantined(one.window[0])
    assert "the base model here has the digest" in record["error"]


@pytest.mark.slow
def test_nobody_at_all_is_silence_and_the_end_of_one_run_is_not(learners: list[StandIn], start: Start) -> None:
    one, two, three = learners
    agent = start(3, idle_exit_s=12.0)

    def serves(learner: StandIn) -> bool:
        return learner.window[0] in agent.heartbeat().get("proved", ())

    one.start()
    _beating(one, lambda: serves(one))
    one.begin(status="finished")
    two.start()
    _beating(two, lambda: serves(two))
    assert three.bucket.read_or_none(layout.RUN) is None, "of the third nothing has ever been heard"
    assert agent.exit_code(60) == 0


def test_limits_are_those_that_hold_all_of_them(tmp_path: Path) -> None:
    small = _config(tmp_path, tmp_path, "small", lora={"rank": 4, "targets": ["q_proj", "v_proj"]})
    large = _config(tmp_path, tmp_path, "large", lora={"rank": 20}, batch={"row_tokens": 512})
    assert Limits.of([small, large]) == Limits.of([large])
    assert Limits.of([small, large]).row_tokens == 512
    twice = [
        config.model_copy(update={"fleet": config.fleet.model_copy(update={"runs_at_once": 3})})
        for config in (small, large)
    ]
    assert Limits.of(twice).slots == 2 * large.slots


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model": {"dtype": "bfloat16"}}, "model.dtype"),
        ({"generator": {"max_num_seqs": 7}}, "generator.max_num_seqs"),
        ({"fleet": {"name": "own"}}, "fleet.name"),
        ({"lora": {"rank": 16}, "batch": {"row_tokens": 128}}, None),
    ],
)
def test_what_runs_that_share_a_replica_agree_in(tmp_path: Path, changes: dict, key: str | None) -> None:
    configs = [_config(tmp_path, tmp_path, "a"), _config(tmp_path, tmp_path, "b", **changes)]
    assert disagreement(configs) == key
    if key is not None:
        with pytest.raises(UsageError, match=rf"^{key}: runs that share a replica"):
            require_agreement(configs)


def test_runs_without_a_fleets_name_and_runs_of_one_name_share_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^fleet\.name: "):
        require_agreement([make_config(tmp_path, tmp_path, run) for run in ("a", "b")])
    with pytest.raises(UsageError, match=r"^run: "):
        require_agreement([_config(tmp_path, tmp_path, "a"), _config(tmp_path, tmp_path, "a")])


def _of(learner: StandIn, record: dict[str, Any]) -> set[str]:
    names = (*record["proved"], *record["loaded"], *record["quarantined"])
    return {name for name in names if name.startswith(f"{learner.run}.")}


def _beating(learner: StandIn, until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not until():
        assert time.monotonic() < deadline
        learner.beat()
        time.sleep(0.5)
