"""An agent keeps its server alive, follows the window, goes when the run is over, and leaves nothing behind."""

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from grpo_jax.generator.index import run_folder
from grpo_jax.storage import layout
from tests.generator.agents import alive, wait_until_gone

pytestmark = pytest.mark.slow


def test_a_killed_server_is_restarted_and_its_policies_proved_again(learner, start_agent):
    v0 = learner.start()
    v1 = learner.publish(1, learner.version(1))
    learner.point(v1, v0)
    agent = start_agent()
    agent.proved(v0, v1)
    first = agent.server_pids()
    assert first
    for pid in first:
        os.kill(pid, signal.SIGKILL)
    record = agent.wait_for(lambda r: r["restarts"] == 1 and {v0, v1} <= set(r["proved"]))
    assert record["quarantined"] == {}
    wait_until_gone(first)
    assert agent.server_pids()


def test_a_late_replica_without_v0_proves_the_window(learner, start_agent):
    v0 = learner.start()
    names = [learner.publish(i, learner.version(i)) for i in (1, 2, 3)]
    learner.bucket.delete_folder(f"{layout.ADAPTERS}/{v0}")
    learner.point(*reversed(names))
    agent = start_agent()
    assert agent.proved(*names)["quarantined"] == {}


def test_files_go_after_the_name_was_unloaded(learner, start_agent):
    v0 = learner.start()
    agent = start_agent()
    agent.proved(v0)
    window = [v0]
    for i in range(1, 5):  # one more than the slots
        window = [learner.publish(i, learner.version(i)), *window][:3]
        learner.point(*window)
        agent.proved(window[0])
    agent.wait_for(lambda r: v0 not in r["loaded"] and set(window) <= set(r["proved"]))
    deadline = time.monotonic() + 30
    adapters = run_folder(agent.work_dir / "adapters", learner.run)
    while (adapters / v0).exists() or (adapters / learner.probe).exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert {path.name for path in adapters.iterdir() if path.is_dir()} == set(agent.heartbeat()["loaded"])


@pytest.fixture
def temporary(monkeypatch):
    """The folder for temporary files; its path is short, as vLLM's sockets need it."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as name:
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


def test_sigterm_ends_everything_with_75(learner, start_agent, temporary):
    v0 = learner.start()
    agent = start_agent()
    agent.proved(v0)
    server = agent.server_pids()
    assert list(temporary.glob("grpo_jax-*"))
    agent.signal(signal.SIGTERM)
    assert agent.exit_code() == 75
    assert not [pid for pid in server if alive(pid)]
    assert not agent.heartbeat_exists()
    assert not list(temporary.glob("grpo_jax-*"))


def test_the_end_of_the_run_leaves_no_temporary_files(learner, start_agent, temporary):
    agent = start_agent()
    agent.proved(learner.start())
    learner.begin(status="finished")
    assert agent.exit_code() == 0
    assert not list(temporary.glob("grpo_jax-*"))


def test_sigkill_of_the_agent_takes_the_server_along(learner, start_agent):
    v0 = learner.start()
    agent = start_agent()
    agent.proved(v0)
    server = agent.server_pids()
    assert server
    agent.signal(signal.SIGKILL)
    wait_until_gone(server)


def test_the_end_of_the_run_ends_the_agent_with_0(learner, start_agent):
    v0 = learner.start()
    agent = start_agent()
    agent.proved(v0)
    server = agent.server_pids()
    learner.begin(status="finished")
    assert agent.exit_code() == 0
    assert not [pid for pid in server if alive(pid)]
    assert not agent.heartbeat_exists()


def test_a_silent_learner_ends_the_agent_with_0(learner, start_agent):
    learner.start()
    agent = start_agent(fleet={"idle_exit_s": 1.5})
    assert agent.exit_code(60) == 0
