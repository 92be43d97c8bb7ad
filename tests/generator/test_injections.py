"""Every way to serve a wrong policy is injected, on every engine, and ends in a quarantine that says why."""

from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest

from tests.generator.calls import prompt_logprobs
from tests.generator.injections import FAULTS, MISTAKES, other_base
from tests.generator.served import Served
from tests.generator.settings import VLLM_START_S

ENGINES = (
    "reference-float32",
    pytest.param("vllm-float32", marks=pytest.mark.slow),
    pytest.param("vllm-bfloat16", marks=pytest.mark.slow),
)
# A replica that ignores the keys serves the base; one that reads them more strictly refuses to load.
UNPROVED = "serves the base|does not load it|does not reproduce the probe"


@pytest.fixture(scope="module", params=ENGINES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    engine, _, dtype = request.param.partition("-")
    if request.param == "vllm-float32":
        yield request.getfixturevalue("vllm_agent")
        return
    model_dir = request.getfixturevalue("tiny_dir" if engine == "reference" else "vllm_model_dir")
    generator = {"engine": engine, "start_timeout_s": VLLM_START_S}
    served = Served(tmp_path_factory.mktemp(request.param), model_dir, model={"dtype": dtype}, generator=generator)
    try:
        served.agent.proved(served.good, wait_s=VLLM_START_S)
        yield served
    finally:
        served.agent.end()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_adapter_is_quarantined_and_the_others_are_served(served, fault):
    before = served.agent.heartbeat()["refused_total"]
    name = FAULTS[fault].publish(served, served.tree())
    assert FAULTS[fault].reason in served.agent.quarantined(name)
    record = served.agent.proved(served.good)
    assert name not in record["proved"]
    assert name not in record["loaded"]
    assert record["refused_total"] > before


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_same_mistake_in_probe_and_policies_proves_nothing(served, mistake):
    learner, right, tree, make = served.learner, served.learner.probe, served.tree(), MISTAKES[mistake]
    probe = learner.version(7000 + list(MISTAKES).index(mistake), size=0.3)
    with other_base(learner) if make is None else nullcontext():
        learner.probe = learner.publish(None, probe, files=make(learner, probe) if make else None)
        name = served.next(tree, files=make(learner, tree) if make else None)
    try:
        reason = served.agent.quarantined(learner.probe)
        assert any(expected in reason for expected in UNPROVED.split("|"))
        assert reason in served.agent.quarantined(name)
        record = served.agent.wait_for(lambda r: not r["proved"])
        assert not {name, learner.probe} & set(record["loaded"])
    finally:
        learner.probe = right
        learner.point(served.good)
        served.agent.proved(served.good)


def test_a_right_adapter_is_proved_and_the_base_is_what_it_was(served):
    # As far from the base as training takes it: bfloat16's rounding grows with that, and the others are much further.
    served.good = served.next(served.learner.version(served.following, size=0.02))
    assert served.agent.proved(served.good)["quarantined"] == {}
    tokens = served.learner.tokens.tolist()
    expected = served.learner.logprobs(served.learner.version(1000, size=0.0))
    measured = prompt_logprobs(served.url, "base", tokens)
    assert np.abs(np.subtract(measured, expected)).mean() < (5e-4 if served.dtype == "float32" else 0.15)
