"""Who is taken for dead, and who is said to wait for whom, by the records that a run writes."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_jax.config.schema import Config
from grpo_jax.jobs.waits import View, state_of, waits
from grpo_jax.jobs.watchdog import Watchdog
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordWriter
from tests.jobs.test_supervisor import make_config

HUNG_S, STUCK_S = 60.0, 600.0
NOBODY = 2**22 + 1
"""A process number that Linux never gives: nobody has stopped it."""
V1 = "toy.v000001.0123abcd"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Scene:
    """A watchdog, its clock, and the parts that write into its bucket."""

    def __init__(self, folder: Path, faults: str = ""):
        self.folder = folder
        self.bucket = Bucket(str(folder))
        self.config = make_config(folder, hung_s=HUNG_S, stuck_s=STUCK_S)
        if faults:
            self.config = self.config.model_copy(update={"bucket": f"faulty:{faults}:{folder}"})
        self.clock = Clock()
        self.dog = Watchdog(self.config, "http://127.0.0.1:1", self.clock)
        self.writers: dict[str, RecordWriter] = {}
        self.incarnation = 1

    def begin(self, *roles: str) -> None:
        self.dog.look()
        for role in roles:
            self.dog.begins(role)

    def write(self, key: str, **body: Any) -> None:
        bucket = self.bucket if key.startswith("fleets/") else self.bucket.child("toy")
        self.writers.setdefault(key, RecordWriter(bucket, key, self.incarnation)).write(body)

    def learner(self, step: int = 0, phase: str = "training", **body: Any) -> None:
        self.write(layout.LEARNER_STATE, step=step, phase=phase, **body)

    def passes(self, seconds: float, every_s: float = 5.0) -> None:
        for _ in range(int(seconds / every_s)):
            self.clock.now += every_s
            self.dog.look()

    def dead(self, role: str = "learner") -> str | None:
        return self.dog.dead(role, NOBODY)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "bucket")


def test_a_part_that_was_heard_and_falls_silent_is_dead(scene: Scene) -> None:
    scene.begin("learner")
    scene.passes(5)
    scene.learner()
    scene.passes(HUNG_S - 5)
    assert scene.dead() is None
    scene.passes(15)
    assert "no sign of life" in str(scene.dead())


def test_a_part_that_writes_is_never_dead_whatever_it_does(scene: Scene) -> None:
    scene.begin("learner")
    for _ in range(20):
        scene.learner(phase="starting")
        scene.passes(HUNG_S / 2)
        assert scene.dead() is None


def test_before_its_first_sign_a_part_may_load_for_minutes_and_an_earlier_life_gives_none(
    scene: Scene,
) -> None:
    scene.learner(step=3)
    scene.begin("learner")
    scene.passes(5 * HUNG_S)
    assert scene.dead() is None
    scene.passes(10 * HUNG_S)
    assert scene.dead() is not None


def test_a_new_life_has_its_own_time_and_the_last_words_of_the_one_before_are_no_sign_of_it(scene: Scene) -> None:
    scene.begin("learner")
    scene.passes(5)
    scene.learner()
    scene.passes(2 * HUNG_S)
    assert scene.dead() is not None
    scene.dog.begins("learner")
    scene.learner()  # of the earlier life
    scene.passes(2 * HUNG_S)
    assert scene.dead() is None
    scene.writers.clear()
    scene.incarnation = 2
    scene.learner()
    scene.passes(2 * HUNG_S)
    assert scene.dead() is not None


def test_nobody_is_to_blame_while_the_bucket_is_gone_nor_just_after(scene: Scene, caplog) -> None:
    scene.begin("learner")
    scene.passes(5)
    scene.learner()
    scene.passes(10)
    folder = scene.folder
    folder.rename(folder.with_name("away"))
    folder.write_text("no directory")  # every verb fails at once
    scene.passes(10 * HUNG_S, every_s=10)
    assert scene.dead() is None
    assert caplog.text.count("everything waits for the bucket") == 1
    assert scene.dog.waits
    folder.unlink()
    folder.with_name("away").rename(folder)
    scene.passes(HUNG_S / 2)
    assert scene.dead() is None
    assert "the bucket works again" in caplog.text
    scene.passes(HUNG_S)
    assert scene.dead() is not None


def test_nobody_is_to_blame_while_the_bucket_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_jax.jobs.watchdog._LIMITS", replace(_limits(), total_s=0.2))
    scene = Scene(tmp_path / "bucket", faults="full=1")
    scene.begin("learner")
    scene.passes(5)
    scene.learner()  # not through the faulty store
    scene.passes(3 * HUNG_S)
    assert scene.dead() is None


def _limits() -> Any:
    from grpo_jax.jobs import watchdog

    return watchdog._LIMITS


def test_a_machine_that_slept_accuses_nobody(scene: Scene) -> None:
    scene.begin("learner")
    scene.passes(5)
    scene.learner()
    scene.passes(5)
    scene.passes(3600, every_s=3600)
    assert scene.dead() is None


# ---- stuck


def test_a_run_without_a_step_for_long_says_once_who_waits(scene: Scene, caplog) -> None:
    scene.begin("learner")
    for step in range(5):
        beats(scene, 40, step=step)
    beats(scene, STUCK_S - 60)
    assert scene.dog.waits == ()
    beats(scene, STUCK_S)
    assert "the learner waits for 2 groups of step 5" in scene.dog.waits
    assert caplog.text.count("no step for") == 1
    scene.learner(step=5)
    scene.passes(5)
    assert scene.dog.waits == ()
    assert "gets on again: 5 steps are done" in caplog.text
    beats(scene, 2 * STUCK_S, step=5)
    assert caplog.text.count("no step for") == 2


def beats(scene: Scene, seconds: float, step: int = 4, **body: Any) -> None:
    """The learner lives and gets nowhere. What changes with each beat is numbers only."""
    for i in range(int(seconds / 20)):
        scene.learner(step=step, doing_s=20.0 * i, waits_for="2 groups of step 5", **body)
        scene.passes(20, every_s=10)


def test_the_first_compilation_and_the_first_model_may_take_any_time(scene: Scene, caplog) -> None:
    scene.begin("learner")
    for _ in range(int(3 * STUCK_S / 20)):
        scene.learner(phase="starting")
        scene.passes(20, every_s=10)
    for _ in range(int(3 * STUCK_S / 20)):
        scene.learner()
        scene.write(layout.replica("toy", "local-0"), state="starting", restarts=0)
        scene.passes(20, every_s=10)
    assert "no step" not in caplog.text


def test_steps_that_take_long_are_no_standstill(scene: Scene, caplog) -> None:
    scene.begin("learner")
    for step in (1, 2):
        beats(scene, 2 * STUCK_S, step=step)
    caplog.clear()
    scene.learner(step=3)
    scene.passes(5)
    caplog.clear()
    beats(scene, 4 * STUCK_S, step=3)
    assert "no step for" not in caplog.text


# ---- who waits for whom

CONFIG: Config = make_config(Path("bucket"), stuck_s=STUCK_S)
SOUND = View(
    CONFIG,
    learner={"step": 4, "phase": "training", "version": 4, "doing": "waiting for groups"},
    policy={"current": V1, "window": [V1], "probe": "toy.probe.00000000"},
    workers={"worker-0.json": {"inflight_samples": 16, "inflight_groups": 2, "live": 40}},
    replicas={"local-0.json": {"state": "ready", "proved": [V1], "engine": "vllm"}},
)
REPLICA = SOUND.replicas["local-0.json"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "the learner is waiting for groups, step 5 of 100"),
        ({"learner": {**SOUND.learner, "waits_for": "2 groups of step 5"}}, "the learner waits for 2 groups of step 5"),
        ({"learner": {}}, "the learner has not written its state"),
        ({"silent_s": {layout.LEARNER_STATE: 90.0}}, "the learner has been silent for 90 s"),
        ({"learner": {**SOUND.learner, "phase": "starting", "doing": "loading"}}, "the learner is loading"),
        ({}, "the worker waits for 16 completions"),
        ({"workers": {}}, "no worker has written its state"),
        ({"workers": {"worker-0.json": {"inflight_groups": 2}}}, "rewards, or for the bucket to take 2 groups"),
        ({"workers": {"worker-0.json": {"live": 800}}}, "the worker has sampled all groups"),
        ({"workers": {"worker-0.json": {"live": 48}}}, "the worker waits for the learner's next policy"),
        ({"workers": {"worker-0.json": {"live": 3}}}, "the worker waits for a policy"),
        ({"proxy_error": "Connection refused"}, "the proxy does not answer: Connection refused"),
        ({"policy": {}}, "no policy has been published"),
        ({"replicas": {}}, "no generator has written its heartbeat"),
        ({"replicas": {"local-0.json": {**REPLICA, "proved": []}}}, f"the proxy has no replica that has proved {V1}"),
        ({"replicas": {"local-0.json": {**REPLICA, "proved": []}}}, f"generator local-0 has not proved {V1}"),
        (
            {"replicas": {"local-0.json": {**REPLICA, "state": "starting"}}},
            "generator local-0 waits for vLLM to answer",
        ),
        (
            {"replicas": {"local-0.json": {**REPLICA, "state": "starting", "error": "the server was killed"}}},
            "vLLM to answer: the server was killed",
        ),
        (
            {"replicas": {"local-0.json": {**REPLICA, "proved": [], "quarantined": {V1: "the canary differs"}}}},
            f"generator local-0 refuses {V1}: the canary differs",
        ),
        ({"silent_s": {layout.replica("toy", "local-0"): 90.0}}, "generator local-0 has been silent for 90 s"),
    ],
)
def test_who_waits_for_whom_is_told_from_the_records(changes: dict[str, Any], said: str) -> None:
    assert any(said in phrase for phrase in waits(replace(SOUND, **changes)))


def test_states_that_differ_in_numbers_only_are_the_same() -> None:
    assert state_of(waits(SOUND)) == state_of(waits(replace(SOUND, learner={**SOUND.learner, "step": 77})))
    assert state_of(waits(SOUND)) != state_of(waits(replace(SOUND, workers={})))


def test_records_are_forgotten_with_their_files(scene: Scene) -> None:
    scene.begin("learner")
    scene.learner()
    scene.write(layout.replica("toy", "local-0"), state="ready", proved=[])
    scene.passes(5)
    shutil.rmtree(scene.folder / "fleets")
    beats(scene, STUCK_S + 50)
    assert "no generator has written its heartbeat" in scene.dog.waits
