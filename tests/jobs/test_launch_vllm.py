"""SmolLM2 on two real vLLM servers, each a job of a Hub on loopback: a whole sweep by the command that a user gives."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from grpo_jax.cache import cache_dir
from grpo_jax.config.load import load_config
from grpo_jax.generator.vllm import vllm_version
from grpo_jax.observability.metrics import read_metrics
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.spool import SpoolReader
from tests.fakes.hub import FakeHub
from tests.jobs.harness import REPO, trained_groups, wait_for
from tests.jobs.hub_harness import API_KEY, TOKEN, HubPlace

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed"),
    pytest.mark.timeout(1500),
]

OVERRIDES = {
    "run": "served",
    "bucket": "hf://buckets/someone/served/runs",
    "steps": 2,
    "batch.prompts_per_step": 2,
    "batch.group_size": 4,
    "generator.replicas": 2,
    "generator.kv_cache_memory_gb": 0.25,
    "jobs.backend": "huggingface",
    "jobs.learner.flavor": "cpu-basic",
    "jobs.generator.flavor": "cpu-basic",
    "fleet.allowed_hosts": '["127.0.0.1"]',
    "evaluation.samples": 0,
}


@pytest.fixture(scope="module")
def place(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubPlace]:
    folder = tmp_path_factory.mktemp("launch-vllm")
    with FakeHub(folder / "hub", token=TOKEN) as server:
        place = HubPlace(server, folder, smollm2_dir)
        server.jobs.image_env["GRPO_JAX_CACHE"] = str(cache_dir())  # where the converted model is
        yield place
        for command in place.commands:
            command.end()


def test_two_runs_on_the_same_two_vllm_servers_reach_their_ends_and_leave_nothing(place: HubPlace) -> None:
    overrides = [f"{key}={value}" for key, value in OVERRIDES.items()]
    config = place.folder / "served.yaml"
    raw = load_config(REPO / "configs/quickstart.yaml", overrides).model_dump(mode="json")
    config.write_text(yaml.safe_dump({**raw, "sweep": {"variants": {"first": {}, "second": {"steps": 1}}}}))
    command = place.call("launch", str(config), "--no-compile")
    assert command.wait(1400) == 0, f"{command.text[-3000:]}\n{place.logs('served')}"
    with place.view("served") as view:
        for name, steps in (("first", 2), ("second", 1)):
            run = view / f"served-{name}"
            assert [record["step"] for record in read_metrics(Bucket(str(run)))] == list(range(steps))
            trained = trained_groups(run)
            assert len(trained) == len(set(trained)) == 2 * steps
            groups = SpoolReader(Bucket(str(run))).poll()
            assert {group.provenance.policy.partition(".")[0] for group in groups} == {f"served-{name}"}
            # Both were proved, or the proxy would not have asked them; with so few groups one may have got none.
            slots = {group.provenance.replica.rsplit("-", 1)[0] for group in groups}
            assert slots <= {"generator-0", "generator-1"}
        told = place.told(view)
    assert [where for where, text in told.items() if TOKEN in text or API_KEY in text] == []
    for slot in ("generator-0", "generator-1"):
        (job,) = place.jobs("served", slot)
        log = job.log_text()
        assert "proved served-first.v00000" in log, slot
        assert "serving served-second from now on" in log, slot
        assert log.count("the server is ready") == 1, slot
    assert place.billing("served") == []
    wait_for(lambda: not place.server.jobs.leftovers(), 60, "the end of all processes")
