"""A replica that misbehaves costs time, and never a wrong sample."""

from pathlib import Path

import pytest

from tests.faults.fleet import Weights, fleet_config, marked, run_beside
from tests.faults.replica import REQUEST_FAULTS, Faults
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    folder = tmp_path_factory.mktemp("faults")
    weights = Weights(write_tiny_model(folder / "model"), folder / "adapters")
    # Compiled here, or the first requests would take longer than a request may.
    run_beside(weights, folder / "bucket", Faults(()))
    return weights


def _check(weights: Weights, bucket: Path, faults: Faults) -> None:
    learner, ill = run_beside(weights, bucket, faults)
    config = fleet_config(weights.model_dir, bucket)
    assert set(ill.injected) <= set(faults.kinds)
    assert ill.injected
    assert learner.indices == list(range(config.steps * config.batch.prompts_per_step))
    groups = [group for group, _ in learner.trained]
    assert not any(marked(group) for group in groups)
    assert all(sample.finish_reason == "failed" or len(sample.tokens) for group in groups for sample in group.samples)
    assert max(weights.error(group) for group in groups) < 1e-4
    assert "sound" in {group.provenance.replica for group in groups}


def test_a_run_beside_a_replica_with_faults_at_random(weights: Weights, tmp_path: Path) -> None:
    _check(weights, tmp_path / "bucket", Faults(REQUEST_FAULTS, rate=0.7, seed=1))


@pytest.mark.parametrize("kind", REQUEST_FAULTS)
def test_a_run_beside_a_replica_with_one_fault(weights: Weights, tmp_path: Path, kind: str) -> None:
    _check(weights, tmp_path / "bucket", Faults((kind,)))
