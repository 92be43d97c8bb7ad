"""The runs of a sweep as jobs of a Hub on loopback: learners one after the other, one fleet of generators for all."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_jax.config.sweep import expand
from grpo_jax.jobs.huggingface import going_on
from grpo_jax.jobs.launch_commands import targets_of
from grpo_jax.jobs.launch_package import build_files
from grpo_jax.jobs.launch_show import print_plan
from grpo_jax.jobs.launch_spec import LEARNER, Launch, Target, slots, spec_of
from grpo_jax.observability.metrics import read_metrics
from grpo_jax.storage.bucket import Bucket
from tests.fakes.hub import FakeHub
from tests.jobs.harness import tiny_config, wait_for
from tests.jobs.hub_harness import API_KEY, TOKEN, HubPlace
from tests.jobs.test_launch_unit_fleet import job


def _sweep(section: dict[str, Any], **changes: Any):
    raw = tiny_config(Path("/models/tiny"), "hf://buckets/someone/bucket", run="study", **changes)
    return expand(raw, section, "study.yaml")


def _targets(section: dict[str, Any], **changes: Any) -> list[Target]:
    sweep = _sweep(section, **changes)
    return targets_of(sweep, sweep.variants)


def test_runs_that_differ_in_what_is_learned_share_a_fleet() -> None:
    grid = {"lora.rank": [1, 32], "algorithm.preset": ["grpo", "gspo"], "max_staleness": [1, 4]}
    (target,) = _targets({"grid": grid, "seeds": [0, 1]})
    assert len(target.configs) == 16
    assert {config.fleet_name for config in target.configs} == {"study"}
    assert (target.bucket, target.name, target.is_sweep) == ("hf://buckets/someone/bucket", "study", True)


def test_runs_with_other_servers_or_jobs_are_launched_apart() -> None:
    variants = {"a": {}, "b": {"model": {"dtype": "bfloat16"}}, "c": {"jobs": {"port": 8001}}, "d": {"steps": 9}}
    assert [[c.run for c in target.configs] for target in _targets({"variants": variants})] == [
        ["study-a", "study-d"],
        ["study-b"],
        ["study-c"],
    ]


def test_a_fleet_that_has_a_name_keeps_it() -> None:
    (target,) = _targets({"seeds": [0, 1]}, fleet={"name": "mine"})
    assert {config.fleet_name for config in target.configs} == {"mine"}


def test_generators_know_all_runs_and_a_learner_its_own(tmp_path: Path) -> None:
    (target,) = _targets({"seeds": [0, 1]}, jobs={"code": []})
    files = build_files(target.configs, tmp_path).contents
    launch = Launch("ab12", "launch/files/0123", "grpo_jax", target.labels)
    for config in target.configs:
        specs = {slot: spec_of(config, slot, launch, {}) for slot in slots(1)}
        assert all(target.labels.items() <= spec.labels.items() for spec in specs.values())
        assert specs[LEARNER].labels["grpo-jax-run"] == config.run
        assert "grpo-jax-run" not in specs["generator-0"].labels
        named = {slot: json.loads(files[spec.env["GRPO_JAX_CONFIG"]]) for slot, spec in specs.items()}
        assert [each["run"] for each in named[LEARNER]] == [config.run]
        assert [each["run"] for each in named["generator-0"]] == ["study-s0", "study-s1"]


def test_the_plan_of_a_sweep_counts_its_generators_once(capsys: pytest.CaptureFixture[str]) -> None:
    (target,) = _targets({"seeds": [0, 1, 2]}, jobs={"prices": {"l4x1": 0.8, "a100-large": 2.5}})
    print_plan(target, {})
    text = capsys.readouterr().out
    assert text.count("\ngenerator-0\n") + text.startswith("generator-0\n") == 1
    assert "study-s0, study-s1, study-s2" in text
    assert text.endswith("all jobs, an hour: 3.30 USD\n")


def test_whoever_is_attached_goes_on_from_the_run_whose_learner_is_live() -> None:
    (target,) = _targets({"seeds": [0, 1, 2]})
    jobs = [
        replace(job(LEARNER, stage, id=run), run=run)
        for run, stage in (("study-s0", "COMPLETED"), ("study-s1", "RUNNING"))
    ]
    assert going_on(target, [job("generator-0"), *jobs]) == 1
    assert going_on(target, [job("generator-0"), jobs[0]]) is None


@dataclass(frozen=True)
class Swept:
    place: HubPlace
    text: str
    code: int
    view: Path
    config: Path

    def jobs(self, slot: str) -> list[str]:
        return [each.stage for each in self.place.jobs("study", slot)]


@pytest.fixture(scope="module")
def swept(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swept]:
    """Three runs, of which the second fails at its imports; a generator's machine is taken away in the third."""
    folder = tmp_path_factory.mktemp("launch-sweep")
    with FakeHub(folder / "hub", token=TOKEN) as server:
        place = HubPlace(server, folder, tiny_model)
        rewards, gate = place.gated("study", 2)
        config = place.config("study", steps=2, evaluation={"samples": 0}, jobs={"restarts": 1})
        raw = yaml.safe_load(config.read_text())
        raw["sweep"] = {
            "variants": {
                "a": {},
                "b": {"rewards": [{"source": "tests.jobs.here_only:even_first_token"}]},
                "c": {"rewards": rewards, "steps": 5, "lora": {"rank": 16}},
            }
        }
        config.write_text(yaml.safe_dump(raw))
        command = place.call("launch", str(config))
        with place.view("study") as view:
            root = view  # runs/study
            place.until_step(root / "study-c", 1, command)
            place.server.jobs.preempt(place.running("study", "generator-0").id)
            wait_for(lambda: len(place.jobs("study", "generator-0")) == 2, 120, "another generator")
            gate.touch()
            code = command.wait()
        with place.view("study") as view:
            yield Swept(place, command.text, code, view, config)
        for each in place.commands:
            each.end()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_run_comes_to_its_end_and_one_that_fails_keeps_no_other_from_it(swept: Swept) -> None:
    assert swept.code == 1, f"{swept.text}\n{swept.place.logs('study')}"
    for run, steps in (("study-a", 2), ("study-c", 5)):
        assert json.loads((swept.view / run / "run.json").read_text())["status"] == "finished"
        assert [record["step"] for record in read_metrics(Bucket(str(swept.view / run)))] == list(range(steps))
    assert "study-b: the learner's job ended as ERROR" in swept.text
    assert "1 of 3 runs failed: study-b" in swept.text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_fleet_is_started_once_and_nothing_is_left_of_it(swept: Swept) -> None:
    assert swept.jobs(LEARNER) == ["COMPLETED", "ERROR", "COMPLETED"], swept.text
    assert len(swept.jobs("generator-0")) == 2, "one, and one in the place of the machine that was taken away"
    assert len(swept.jobs("generator-1")) == 1
    assert swept.place.billing("study") == []
    wait_for(lambda: not swept.place.server.jobs.leftovers(), 60, "the end of all processes")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_secret_of_a_sweep_is_told_to_anybody(swept: Swept) -> None:
    told = swept.place.told(swept.view)
    assert [where for where, text in told.items() if TOKEN in text or API_KEY in text] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_status_speaks_of_the_sweep_and_not_of_one_of_its_runs(swept: Swept) -> None:
    url = "hf://buckets/someone/study/runs/study"
    for name in (url, str(swept.config)):
        status = swept.place.call("status", name)
        assert status.wait(120) == 0, status.text
        assert "run study-a: finished, step 2/2" in status.text
        assert "run study-c: finished, step 5/5" in status.text
    one = swept.place.call("status", f"{url}/study-a")
    assert one.wait(120) == 2
    assert "study-a is a run of the sweep" in one.text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_has_finished_is_not_launched_again(swept: Swept) -> None:
    before = len(swept.place.jobs("study"))
    again = swept.place.call("launch", str(swept.config), "--only", "a", "--only", "c")
    assert again.wait(120) == 0, again.text
    assert "all runs have finished" in again.text
    assert len(swept.place.jobs("study")) == before
