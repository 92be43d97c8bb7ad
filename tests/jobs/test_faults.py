"""Whole runs on a bucket and beside a replica that misbehave: they take longer, and that is all."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from grpo_jax.config.load import load_config
from grpo_jax.learner.rescore import rescore
from grpo_jax.rollouts.sample import Group
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.spool import SpoolReader
from tests.faults.replica import MARK, REQUEST_FAULTS, WRONG_POLICY, Faults
from tests.jobs.harness import Command, FaultyGenerator, FleetWatch, metrics, tiny_config, trained_groups, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BUCKET_FAULTS = (
    "delay=0.4", "late=1.5", "stale_list=2", "torn=0.5", "reorder=0.5", "error=0.3", "denied=0.2", "full=0.4",
)  # fmt: skip
_PROMPTS = 2
_AT_A_TIME = 4


@pytest.fixture(scope="module", autouse=True)
def _quick_to_compile():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
        yield


@dataclass(frozen=True)
class Ended:
    """A run that has ended. `store` is the directory behind its bucket, where nothing is wrong."""

    store: Path
    run_dir: Path
    watch: FleetWatch

    def groups(self) -> list[Group]:
        spool = SpoolReader(Bucket(str(self.store / "tiny")))
        groups = spool.poll()
        assert spool.rejected == {}
        return groups


def _run(model: Path, folder: Path, faulty_bucket: str, replica: Faults | None, **changes) -> Ended:
    """One whole run with a sound replica and, if there are faults for it, another one.

    Args:
        faulty_bucket: the faults of the bucket, as its URL has them; empty for none.
    """
    folder.mkdir(exist_ok=True)
    store, run_dir = folder / "bucket", folder / "run" / "tiny"
    bucket = f"faulty:{faulty_bucket}:{store}" if faulty_bucket else str(store)
    arguments = ("--dir", str(run_dir)) if faulty_bucket else ()
    if not faulty_bucket:
        run_dir = store / "tiny"
    config = tiny_config(model, bucket, **{"rollouts__request_timeout_s": 3.0, **changes})
    ill: FaultyGenerator | None = None
    with FleetWatch(store, "tiny") as watch:
        command = Command(config, folder, *arguments)
        try:
            if replica is not None:
                resolved = wait_for(lambda: (run_dir / "config.json").is_file() and run_dir / "config.json")
                ill = FaultyGenerator(resolved, folder / "ill", replica)
            code, _, err = command.wait(600)
            assert code == 0, f"{err}\n{_logs(run_dir)}"
        finally:
            command.end()
            ill_code = 0 if ill is None else ill.end(30)
    assert command.processes() == {}
    assert ill_code == 0, "the agent of the faulty replica did not leave with the run"
    return Ended(store, run_dir, watch)


def _logs(run_dir: Path) -> str:
    return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in (run_dir / "logs").glob("*.log"))


def _check(ended: Ended, steps: int) -> None:
    """All that has to be true of a run, whatever went wrong on the way."""
    assert [record["step"] for record in metrics(ended.run_dir)] == list(range(steps))
    assert json.loads((ended.store / "tiny/run.json").read_text())["status"] == "finished"
    trained = trained_groups(ended.store / "tiny")
    assert len(trained) == len(set(trained)) == steps * _PROMPTS
    groups = ended.groups()
    assert set(trained) <= {str(group.id) for group in groups}
    for group in groups:
        assert group.provenance.policy in ended.watch.proved[group.provenance.replica]
        assert not any(MARK in sample.text for sample in group.samples)
    config = load_config(ended.run_dir / "config.json", [f"bucket={ended.store}"])
    delta = np.concatenate([policy.delta for policy in rescore(config, groups)])
    assert delta.max() < 1e-3


def test_beside_a_replica_with_every_fault(tiny_model, tmp_path):
    count_file = tmp_path / "faults.json"
    faults = Faults((*REQUEST_FAULTS, WRONG_POLICY), rate=0.5, seed=3, count_file=str(count_file))
    ended = _run(tiny_model, tmp_path, "", faults, steps=10)
    _check(ended, 10)
    assert sum(count for kind, count in faults.counts().items() if kind != WRONG_POLICY) >= 3
    assert faults.counts()[WRONG_POLICY]
    assert any("canary" in reason for reason in ended.watch.quarantined["ill"].values())


@pytest.fixture(scope="module")
def short_runs(tiny_model, tmp_path_factory):
    """Fault of the bucket → a future run. Each waits more than it computes, so some are made at a time."""
    folder = tmp_path_factory.mktemp("bucket-faults")
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        yield {
            fault: pool.submit(
                _run, tiny_model, folder / fault, f"seed=1,{fault}", None, steps=2, evaluation__samples=0
            )
            for fault in BUCKET_FAULTS
        }


@pytest.mark.parametrize("fault", BUCKET_FAULTS)
def test_on_a_bucket_with_one_fault(short_runs, fault):
    _check(short_runs[fault].result(), 2)


def test_on_a_bucket_with_every_fault_and_beside_a_replica_with_every_fault(tiny_model, tmp_path):
    bucket = "seed=2,delay=0.1,late=0.5,stale_list=0.5,torn=0.1,reorder=0.1,error=0.1,denied=0.05,full=0.1"
    faults = Faults((*REQUEST_FAULTS, WRONG_POLICY), rate=0.6, seed=5, count_file=str(tmp_path / "faults.json"))
    ended = _run(tiny_model, tmp_path, bucket, faults, steps=5)
    _check(ended, 5)
    assert faults.counts()
