"""Whole runs as jobs of a Hub on loopback: real processes, the real client, the reference engine on a tiny model."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from grpo_jax.observability.metrics import read_metrics
from grpo_jax.storage.bucket import Bucket
from tests.fakes.hub import FakeHub, Fault
from tests.jobs.harness import trained_groups, wait_for
from tests.jobs.hub_harness import API_KEY, TOKEN, HubPlace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def place(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubPlace]:
    folder = tmp_path_factory.mktemp("launch")
    with FakeHub(folder / "hub", token=TOKEN) as server:
        place = HubPlace(server, folder, tiny_model)
        yield place
        for command in place.commands:
            command.end()


@dataclass(frozen=True)
class Ended:
    """A run that has ended, as it lies in its bucket, and how the command that saw its end did."""

    run: str
    view: Path
    code: int
    text: str
    steps: int


@pytest.fixture(scope="module")
def endured(place: HubPlace) -> Iterator[Ended]:
    """Over the API and exposed ports: a machine of each role is taken away, the Hub stumbles, streams of logs break."""
    run, steps = "endured", 6
    place.server.faults += [
        Fault("POST /api/buckets/someone/endured$", 500),
        Fault("POST /api/jobs/someone$", 500, skip=1, late=True),
        Fault("POST /api/jobs/someone$", 503),
        Fault("GET /api/jobs/someone$", 429, times=2, headers={"Retry-After": "1"}),
    ]
    place.server.jobs.broken_streams = 3
    rewards, gate = place.gated(run, 4)
    command = place.call("launch", str(place.config(run, steps=steps, rewards=rewards)))
    with place.view(run) as view:
        place.until_step(view, 1, command)
        place.server.jobs.preempt(place.running(run, "generator-0").id)
        place.until_step(view, 3, command)
        place.server.jobs.preempt(place.running(run, "learner").id)
        gate.touch()
        code = command.wait()
    with place.view(run) as view:
        yield Ended(run, view, code, command.text, steps)


@pytest.fixture(scope="module")
def carried(place: HubPlace) -> Iterator[Ended]:
    """In a mounted bucket and a network group: launched and left, scaled up and down, and attached to again, twice.

    The first of these launchers is killed. One generator's machine never comes.
    """
    run, steps = "carried", 4
    place.server.jobs.never_starts = lambda spec: spec["labels"].get("grpo-jax-slot") == "generator-1"
    rewards, gate = place.gated(run, 2)
    jobs = {"mount": True, "network": "group"}
    left = place.call("launch", str(place.config(run, steps=steps, rewards=rewards, jobs=jobs)), "--detach")
    assert left.wait(120) == 0, left.text
    with place.view(run) as view:
        place.until_step(view, 1)
        url = f"hf://buckets/someone/{run}/runs/{run}"
        for generators in (3, 1):
            scaled = place.call("launch", "--scale", f"generators={generators}", url)
            assert scaled.wait(120) == 0, scaled.text
            assert len(place.billing(run)) == 1 + generators
            if generators == 3:
                place.running(run, "generator-2")
        killed = place.call("launch", "--attach", url)
        killed.says("generator-0 | ")
        killed.process.kill()
        assert len(place.billing(run)) == 2, "jobs do not need their launcher"
        attached = place.call("launch", "--attach", url)
        attached.says("generator-0 | ")
        gate.touch()
        code = attached.wait()
    place.server.jobs.never_starts = lambda spec: False
    with place.view(run) as view:
        yield Ended(run, view, code, attached.text, steps)


@pytest.fixture(params=["endured", "carried"])
def ended(request: pytest.FixtureRequest) -> Ended:
    return request.getfixturevalue(request.param)


def test_the_final_step_is_reached_and_no_group_was_trained_twice(place: HubPlace, ended: Ended) -> None:
    assert ended.code == 0, f"{ended.text}\n{place.logs(ended.run)}"
    assert json.loads((ended.view / "run.json").read_text())["status"] == "finished"
    assert [record["step"] for record in read_metrics(Bucket(str(ended.view)))] == list(range(ended.steps))
    trained = trained_groups(ended.view)
    assert len(trained) == len(set(trained)) == 2 * ended.steps
    assert "finished" in ended.text


def test_nothing_is_left_billing_and_no_process_is_left(place: HubPlace, ended: Ended) -> None:
    assert place.billing(ended.run) == []
    wait_for(lambda: not place.server.jobs.leftovers(), 60, "the end of all processes")


def test_no_secret_is_told_to_anybody(place: HubPlace, ended: Ended) -> None:
    told = place.told(ended.view)
    assert len(told) > 20
    assert [where for where, text in told.items() if TOKEN in text or API_KEY in text] == []
    assert all(job.spec["secrets"]["HF_TOKEN"] == TOKEN for job in place.jobs(ended.run))
    (learner, *_) = place.jobs(ended.run, "learner")
    assert learner.spec["secrets"]["JUDGE_API_KEY"] == API_KEY


def test_the_bucket_was_made_private(place: HubPlace, ended: Ended) -> None:
    assert place.server.buckets.created[f"someone/{ended.run}"]["visibility"] == "private"


def test_a_machine_that_is_taken_away_is_replaced_and_no_slot_is_filled_twice(place: HubPlace, endured: Ended) -> None:
    stages = {
        slot: [job.stage for job in place.jobs(endured.run, slot)] for slot in ("learner", "generator-0", "generator-1")
    }
    assert stages["learner"] == ["ERROR", "COMPLETED"]
    assert stages["generator-0"][0] == "ERROR"
    # At the end of the run the launcher may cancel what is about to leave by itself.
    assert stages["generator-0"][1:] in (["COMPLETED"], ["CANCELED"])
    assert stages["generator-1"] in (["COMPLETED"], ["CANCELED"])


def test_the_faults_that_were_ordered_have_happened(place: HubPlace, endured: Ended) -> None:
    assert [fault for fault in place.server.faults if fault.times] == []
    assert place.server.jobs.broken_streams == 0


def test_the_logs_of_all_roles_are_followed_once_each_with_their_slot(place: HubPlace, endured: Ended) -> None:
    shown = Counter(line.rstrip() for line in endured.text.splitlines())
    for slot in ("learner", "generator-0", "generator-1"):
        jobs = place.jobs(endured.run, slot)
        written = Counter(text.rstrip() for job in jobs for _, text in job.log if not text.startswith("====="))
        assert {text: n for text, n in written.items() if shown[f"{slot} | {text}"] > n} == {}
        # Of a machine that was taken away the last lines may never have been sent.
        whole = {text.rstrip() for job in jobs if job.message is None for _, text in job.log[1:] if text.strip()}
        assert whole
        assert {text for text in whole if not shown[f"{slot} | {text}"]} == set()


def test_replicas_were_asked_with_the_token_and_over_https_only(place: HubPlace, endured: Ended) -> None:
    heartbeats = [json.loads(path.read_text()) for path in endured.view.parent.rglob("fleets/*/replicas/*.json")]
    urls = {heartbeat["url"] for heartbeat in heartbeats}
    assert all(url.startswith(place.server.jobs.exposed.url) for url in urls)
    assert place.server.jobs.exposed.refused == 0


def test_a_generator_that_never_starts_costs_no_step_and_is_cancelled(place: HubPlace, carried: Ended) -> None:
    (waiting,) = place.jobs(carried.run, "generator-1")
    assert (waiting.attempts, waiting.stage) == (0, "CANCELED")


def test_a_fleet_is_scaled_up_and_down_during_the_run(place: HubPlace, carried: Ended) -> None:
    (more,) = place.jobs(carried.run, "generator-2")
    assert (more.attempts, more.stage) == (1, "CANCELED")
    (first,) = place.jobs(carried.run, "generator-0")
    assert first.stage in ("COMPLETED", "CANCELED")


def test_status_of_a_run_that_is_over(place: HubPlace, endured: Ended) -> None:
    status = place.call("status", f"hf://buckets/someone/{endured.run}/runs/{endured.run}")
    assert status.wait(120) == 0, status.text
    assert f"{endured.steps}/{endured.steps}" in status.text
    assert "RUNNING" not in status.text
    assert "ready" not in status.text  # the last word of a machine that was taken away
    assert "USD" in status.text


def test_a_finished_run_is_not_launched_again(place: HubPlace, endured: Ended) -> None:
    before = set(place.server.jobs.all)
    again = place.call("launch", str(place.folder / f"{endured.run}.yaml"))
    assert again.wait(120) == 0, again.text
    assert set(place.server.jobs.all) == before
