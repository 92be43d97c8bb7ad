"""Launches that go wrong, or are stopped: what they leave behind costs nothing, and one sentence says why."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.hub import FakeHub, Fault
from tests.jobs.harness import wait_for
from tests.jobs.hub_harness import API_KEY, TOKEN, HubPlace, Launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def _place(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubPlace]:
    folder = tmp_path_factory.mktemp("launch-failures")
    with FakeHub(folder / "hub", token=TOKEN) as server:
        yield HubPlace(server, folder, tiny_model)


@pytest.fixture
def place(_place: HubPlace) -> Iterator[HubPlace]:
    yield _place
    server = _place.server
    for command in _place.commands:
        command.end()
    server.faults.clear()
    server.token, server.jobs.access = TOKEN, "write"
    server.jobs.never_starts = lambda spec: False
    for job in server.jobs.billing():
        _place.api.cancel_job(job_id=job.id, namespace="someone")
    wait_for(lambda: not server.jobs.leftovers(), 60, "the end of all processes")


def _nothing_ever_starts(place: HubPlace) -> None:
    place.server.jobs.never_starts = lambda spec: True


def _waiting(place: HubPlace, run: str, command: Launch) -> None:
    """Until all three jobs are there, and the command follows them."""

    def there() -> bool:
        assert command.process.poll() is None, command.text
        return len(place.billing(run)) == 3

    wait_for(there, 120, "three jobs")
    for job in place.jobs(run):
        command.says(job.id)


def _stages(place: HubPlace, run: str) -> set[str]:
    return {job.stage for job in place.jobs(run)}


def _one_sentence(command: Launch) -> str:
    """What a command that has refused says, which must be nothing but that."""
    lines = [line for line in command.text.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("grpo-jax: ")]
    assert said, command.text
    assert "Traceback" not in command.text
    assert TOKEN not in command.text
    return "\n".join(said)


def test_an_expired_token_is_found_before_anything_is_made(place: HubPlace) -> None:
    place.server.token = "hf_thenewone"
    command = place.call("launch", str(place.config("expired")))
    assert command.wait(120) == 2
    assert "token" in _one_sentence(command)
    assert not place.server.buckets.exists("someone/expired")
    assert place.jobs("expired") == []


@pytest.mark.parametrize("access", ["read", ["repo.write"]], ids=["read", "without-jobs"])
def test_a_token_that_may_not_start_jobs_is_found_before_anything_is_made(place: HubPlace, access) -> None:
    place.server.jobs.access = access
    command = place.call("launch", str(place.config("weak")))
    assert command.wait(120) == 2
    assert "token" in _one_sentence(command)
    assert place.jobs("weak") == []


def test_hardware_that_is_not_offered_is_named(place: HubPlace) -> None:
    jobs = {"generator": {"flavor": "cpu-basic"}, "learner": {"flavor": "h200"}}
    command = place.call("launch", str(place.config("hardware", jobs=jobs)))
    assert command.wait(120) == 2
    assert "h200" in _one_sentence(command)
    assert place.jobs("hardware") == []


def test_a_secret_that_is_not_set_is_named(place: HubPlace) -> None:
    jobs = {"learner": {"flavor": "cpu-basic", "secrets": ["NOT_SET_ANYWHERE"]}}
    command = place.call("launch", str(place.config("unset", jobs=jobs)))
    assert command.wait(120) == 2
    assert "NOT_SET_ANYWHERE" in _one_sentence(command)
    assert place.jobs("unset") == []


def test_a_launch_that_fails_half_way_leaves_nothing_billing(place: HubPlace) -> None:
    _nothing_ever_starts(place)
    place.server.faults.append(Fault("POST /api/jobs/someone$", 402, times=1000, skip=1))
    command = place.call("launch", str(place.config("half")))
    assert command.wait(120) == 1
    _one_sentence(command)
    assert _stages(place, "half") == {"CANCELED"}


def test_a_job_that_fails_at_its_imports_ends_the_run_and_is_quoted(place: HubPlace, tmp_path: Path) -> None:
    reward = {"source": "tests.jobs.here_only:even_first_token"}
    config = place.config("imports", rewards=[reward], jobs={"restarts": 0})
    command = place.call("launch", str(config))
    assert command.wait(300) == 1, command.text
    assert "here_only" in command.text
    _one_sentence(command)
    assert place.billing("imports") == []
    wait_for(lambda: not place.server.jobs.leftovers(), 60, "the end of all processes")


def test_a_generator_more_that_the_hub_refuses_costs_the_others_nothing(place: HubPlace) -> None:
    _nothing_ever_starts(place)
    config = str(place.config("refused"))
    command = place.call("launch", config, "--on-interrupt", "detach")
    _waiting(place, "refused", command)
    place.server.faults.append(Fault("POST /api/jobs/someone$", 402, times=1000))
    assert place.call("launch", "--scale", "generators=3", config).wait(120) == 0
    command.says("HTTP 402")
    assert command.process.poll() is None
    command.interrupt()
    assert command.wait(120) == 75, command.text
    assert _stages(place, "refused") == {"SCHEDULING"}


def test_a_job_that_resists_keeps_no_other_from_its_end(place: HubPlace) -> None:
    _nothing_ever_starts(place)
    config = str(place.config("resisting"))
    command = place.call("launch", config, "--on-interrupt", "detach")
    _waiting(place, "resisting", command)
    command.interrupt()
    assert command.wait(120) == 75, command.text
    first, *others = place.jobs("resisting")
    place.server.faults.append(Fault(f"POST /api/jobs/someone/{first.id}/cancel$", 500, times=100_000))
    cancel = place.call("cancel", config)
    wait_for(lambda: {job.stage for job in others} == {"CANCELED"}, 60, "the end of the others")
    assert first.stage == "SCHEDULING"
    place.server.faults.clear()
    assert cancel.wait(120) == 0, cancel.text
    assert first.stage == "CANCELED"


@pytest.mark.parametrize(("choice", "stage"), [("cancel", "CANCELED"), ("detach", "SCHEDULING"), ("ask", "SCHEDULING")])
def test_ctrl_c_does_what_on_interrupt_says(place: HubPlace, choice: str, stage: str) -> None:
    _nothing_ever_starts(place)
    run = f"interrupted-{choice}"
    command = place.call("launch", str(place.config(run)), "--on-interrupt", choice)
    _waiting(place, run, command)
    command.interrupt()
    assert command.wait(120) == 75, command.text
    assert _stages(place, run) == {stage}


@pytest.mark.parametrize(("answer", "stage"), [("c", "CANCELED"), ("d", "SCHEDULING")])
def test_ctrl_c_on_a_terminal_asks(place: HubPlace, answer: str, stage: str) -> None:
    _nothing_ever_starts(place)
    run = f"asked-{answer}"
    command = place.call("launch", str(place.config(run)), terminal=True)
    _waiting(place, run, command)
    command.interrupt()
    command.says("cancel")
    command.type(f"{answer}\n")
    assert command.wait(120) == 75, command.text
    assert _stages(place, run) == {stage}


def test_jobs_that_have_not_started_are_cancelled_and_stay_so(place: HubPlace) -> None:
    _nothing_ever_starts(place)
    config = str(place.config("scheduled"))
    left = place.call("launch", config, "--detach")
    assert left.wait(120) == 0, left.text
    assert _stages(place, "scheduled") == {"SCHEDULING"}
    cancelled = place.call("cancel", config)
    assert cancelled.wait(120) == 0, cancelled.text
    assert _stages(place, "scheduled") == {"CANCELED"}
    assert all(job.attempts == 0 for job in place.jobs("scheduled"))


def test_an_attached_launch_notices_that_somebody_else_has_cancelled(place: HubPlace) -> None:
    _nothing_ever_starts(place)
    config = str(place.config("elsewhere"))
    command = place.call("launch", config)
    _waiting(place, "elsewhere", command)
    cancelled = place.call("cancel", "hf://buckets/someone/elsewhere/runs/elsewhere")
    assert cancelled.wait(120) == 0, cancelled.text
    assert command.wait(120) == 75, command.text
    assert _stages(place, "elsewhere") == {"CANCELED"}
    assert len(place.jobs("elsewhere")) == 3


def test_a_token_that_expires_under_an_attached_launch_is_said(place: HubPlace) -> None:
    _nothing_ever_starts(place)
    command = place.call("launch", str(place.config("midway")))
    _waiting(place, "midway", command)
    place.server.faults.append(Fault("/api/jobs/", 401, times=10**6))
    assert command.wait(200) == 1, command.text
    assert "token" in _one_sentence(command)


def test_a_dry_run_says_what_it_would_start_and_starts_nothing(place: HubPlace) -> None:
    command = place.call("launch", str(place.config("dry", jobs={"prices": {"cpu-basic": 0.5}})), "--dry-run")
    assert command.wait(120) == 0, command.text
    for word in ("learner", "generator-0", "generator-1", "python:3.12-slim", "vllm/vllm-openai", "cpu-basic"):
        assert word in command.text, word
    assert TOKEN not in command.text
    assert API_KEY not in command.text
    assert not place.server.buckets.exists("someone/dry")
    assert place.jobs("dry") == []
    assert all(method == "GET" for method, path in place.server.requests if "/dry" in path)
