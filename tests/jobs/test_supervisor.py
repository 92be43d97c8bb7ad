"""The supervisor with processes of a few lines in place of the roles: restarts, hangs, the end of a run."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grpo_jax.config.load import parse_config
from grpo_jax.config.schema import Config
from grpo_jax.errors import EXIT_RESUMABLE, RunFailed, UsageError
from grpo_jax.generator.stoppage import is_stopped
from grpo_jax.jobs import local, restarts
from grpo_jax.jobs.local import Stop, Supervisor
from grpo_jax.jobs.processes import Process, stop_all
from grpo_jax.jobs.restarts import EARN_S, Restarts

_SLEEPS = "import time\nwhile True: time.sleep(0.05)"
_SAVES = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep({seconds}), open({file!r}, "w").close(), sys.exit(75)))
print("ready", flush=True)
while True: time.sleep(0.05)
"""


def make_config(bucket: Path, **local_keys) -> Config:
    return parse_config(
        {
            "run": "toy",
            "bucket": str(bucket),
            "model": {"source": "none"},
            "task": {"source": "experiments.tasks.addition:one_digit"},
            "rewards": [{"source": "tests.plugins:even_first_token"}],
            "local": {"hung_s": 60.0, **local_keys},
        },
        "test",
    )


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Supervisor]]:
    """Makes supervisors whose roles run the given code, or only sleep."""
    monkeypatch.setattr(restarts, "_BACK_OFF_S", (0.01,))
    monkeypatch.setattr(local, "_STOP_S", 1.0)
    made: list[Supervisor] = []

    def make(codes: dict[str, str], **local_keys) -> Supervisor:
        subject = Supervisor(make_config(tmp_path / "bucket", **local_keys), tmp_path / "run")
        for role in subject.roles:
            role.argv = [sys.executable, "-c", textwrap.dedent(codes.get(role.name, _SLEEPS))]
        made.append(subject)
        subject.start()
        return subject

    yield make
    for subject in made:
        stop = threading.Event()
        stop.set()
        subject.stop(stop)


def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def role(subject: Supervisor, name: str) -> local.Role:
    return next(role for role in subject.roles if role.name == name)


def polled(subject: Supervisor, condition: Callable[[], object]) -> None:
    until(lambda: subject.poll() or condition())


# ---- the budget


def test_a_role_that_dies_at_once_again_and_again_is_not_started_for_ever() -> None:
    budget = Restarts(most=5)
    pauses = [budget.ended(lived_s=1.0, steps=0) for _ in range(6)]
    assert pauses[-1] is None
    assert None not in pauses[:-1]
    assert pauses[:-1] == sorted(pauses[:-1])


def test_a_run_that_gets_on_may_crash_every_hour_for_ever() -> None:
    budget = Restarts(most=2)
    assert None not in [budget.ended(lived_s=3600.0, steps=step) for step in range(1, 1000)]


def test_a_role_that_dies_at_the_same_step_again_and_again_ends_however_long_each_life_is() -> None:
    budget = Restarts(most=3)
    assert [budget.ended(lived_s=3600.0, steps=7) is None for _ in range(4)] == [False, False, False, True]


def test_lives_shorter_than_what_earns_a_restart_spend_the_budget() -> None:
    budget = Restarts(most=3)
    assert [budget.ended(0.9 * EARN_S, step) is None for step in range(1, 5)] == [False, False, False, True]


# ---- roles


def test_a_learner_that_was_taken_over_is_not_started_again(supervisor: Callable[..., Supervisor]) -> None:
    """It would claim the run once more, and two machines would fight for it for ever."""
    subject = supervisor({"learner": "import sys; print('another learner has taken over'); sys.exit(76)"})
    with pytest.raises(RunFailed, match=r"^another learner has taken over$"):
        polled(subject, lambda: False)
    assert role(subject, "learner").restarts.total == 0


def test_a_role_that_always_fails_ends_the_run_with_one_sentence(supervisor) -> None:
    subject = supervisor({"worker": "import sys; print('ValueError: no such file'); sys.exit(1)"}, restarts=2)
    with pytest.raises(RunFailed) as failure:
        polled(subject, lambda: False)
    message = str(failure.value)
    assert "the worker ended with exit code 1: ValueError: no such file" in message
    assert "2 restarts in a row" in message
    assert "\n" not in message


def test_a_wrong_config_is_not_tried_again(supervisor) -> None:
    subject = supervisor({"learner": "import sys; print('steps: wrong'); sys.exit(2)"})
    with pytest.raises(UsageError, match="steps: wrong"):
        polled(subject, lambda: False)


def test_a_killed_role_is_started_again_and_what_killed_it_is_told(supervisor, caplog) -> None:
    subject = supervisor({})
    before = role(subject, "worker").process
    os.kill(before.pid, signal.SIGKILL)
    polled(subject, lambda: role(subject, "worker").process not in (None, before))
    assert "the worker was killed by SIGKILL (out of memory?); it is started again" in caplog.text


def test_a_role_that_leaves_before_the_learner_is_done_comes_back(supervisor, monkeypatch) -> None:
    monkeypatch.setattr(local, "_OVER_S", 0.05)
    subject = supervisor({"generator-0": "pass"})
    first = role(subject, "generator-0").process
    polled(subject, lambda: role(subject, "generator-0").process not in (None, first))


def test_a_stopped_process_is_dead_after_hung_s_and_started_again(supervisor, caplog) -> None:
    subject = supervisor({}, hung_s=0.3)
    before = role(subject, "learner").process
    before.signal(signal.SIGSTOP)
    polled(subject, lambda: role(subject, "learner").process not in (None, before))
    assert before.poll() == -signal.SIGKILL
    assert "the learner hangs: a signal stopped it" in caplog.text


def test_a_command_that_cannot_be_started_is_tried_again_and_then_ends_the_run(supervisor) -> None:
    subject = supervisor({}, restarts=2)
    worker = role(subject, "worker")
    worker.argv = ["/no/such/program"]
    os.kill(worker.process.pid, signal.SIGKILL)
    with pytest.raises(RunFailed, match="the worker cannot be started"):
        polled(subject, lambda: False)


# ---- the end


def test_the_learner_has_longer_than_the_others_for_its_end(supervisor, tmp_path) -> None:
    saved = tmp_path / "saved"
    subject = supervisor({"learner": _SAVES.format(seconds=2.5, file=str(saved))}, stop_s=60.0)
    ready(subject, "learner")
    assert subject.stop()
    assert saved.exists()
    assert role(subject, "learner").process.poll() == EXIT_RESUMABLE
    assert role(subject, "worker").process.poll() == -signal.SIGTERM


def test_a_learner_that_does_not_end_in_its_time_is_killed_and_that_is_told(supervisor, tmp_path) -> None:
    subject = supervisor({"learner": _SAVES.format(seconds=300, file=str(tmp_path / "saved"))}, stop_s=1.5)
    ready(subject, "learner")
    assert not subject.stop()
    assert role(subject, "learner").process.poll() == -signal.SIGKILL


def test_a_second_signal_stops_at_once(supervisor, tmp_path) -> None:
    subject = supervisor({"learner": _SAVES.format(seconds=300, file=str(tmp_path / "saved"))}, stop_s=300)
    stop = Stop()
    ready(subject, "learner")
    stop.signalled()
    assert stop.is_set()
    assert not stop.at_once.is_set()
    threading.Timer(0.5, stop.signalled).start()
    assert not subject.stop(stop.at_once)  # the test's own time limit is shorter than 300 s


def test_a_stopped_process_is_woken_to_leave(tmp_path) -> None:
    process = Process([sys.executable, "-c", _SAVES.format(seconds=0, file=str(tmp_path / "saved"))], tmp_path / "log")
    until(lambda: "ready" in (tmp_path / "log").read_text())
    process.signal(signal.SIGSTOP)
    until(lambda: is_stopped(process.pid))
    stop_all([process], 60.0)
    assert process.poll() == EXIT_RESUMABLE


_PARENT = """
import sys, time
from pathlib import Path
from grpo_jax.jobs.processes import Process
child = Process([sys.executable, "-c", sys.argv[1]], Path(sys.argv[2]))
print(child.pid, flush=True)
time.sleep(600)
"""
_CHILD = """
from grpo_jax.jobs.processes import leave_with_parent
import time
leave_with_parent(1.0)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux to be woken")
def test_a_stopped_role_does_not_outlive_a_killed_supervisor(tmp_path) -> None:
    log = tmp_path / "log"
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, _CHILD, str(log)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        until(lambda: log.exists() and "ready" in log.read_text())
        os.kill(child, signal.SIGSTOP)
        until(lambda: is_stopped(child))
        parent.kill()
        parent.wait()
        until(lambda: not lives(child))
    finally:
        parent.kill()
        if lives(child):
            os.kill(child, signal.SIGKILL)


def ready(subject: Supervisor, name: str) -> None:
    until(lambda: "ready" in (subject.logs / f"{name}.log").read_text())


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
