"""The chaos suite finds what it is there to find, and a short one passes."""

import json
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from experiments.chaos.growth import WARM_UP_S, Growth
from experiments.chaos.parts import Held
from experiments.chaos.relay import Relay
from experiments.chaos.sightings import Committed
from experiments.chaos.verdict import Verdict, judge
from grpo_jax.observability.metrics import MetricsLog
from grpo_jax.storage import layout
from grpo_jax.storage.batches import write_batch
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordWriter
from tests.storage.objects import group

STEPS = 3
IDS = [str(group(index).id) for index in range(2 * STEPS)]


class Run:
    """The store of a run of three steps with two groups of one sample each, and its observer."""

    def __init__(self, folder: Path):
        self.store, self.run_dir = folder / "bucket", folder / "run"
        self.bucket = Bucket(str(self.store)).child("toy")
        self.committed = Committed(self.bucket)
        self.drops: dict[str, str] = {}
        self.metrics = MetricsLog(self.run_dir, self.bucket)
        for index in range(2 * STEPS):
            self.commit(index)
        self.state = RecordWriter(self.bucket, layout.LEARNER_STATE, 1)

    def commit(self, index: int, attempt: int = 0) -> str:
        made = group(index, attempt)
        self.bucket.put(layout.rollout("w0", str(made.id)), made.to_bytes())
        return str(made.id)

    def record(self, step: int, groups: list[str], life: int = 1) -> None:
        write_batch(self.bucket, step, life, groups=groups, files=[], version=step, drops=self.drops)

    def train(self, step: int, groups: list[str], life: int = 1) -> None:
        self.record(step, groups, life)
        self.metrics.append({"step": step, "batch/samples": len(groups), "batch/unscorable": 0})

    def ended(self) -> Verdict:
        self.state.write({"step": STEPS, "phase": "done", "drops": sorted(self.drops.items())})
        RecordWriter(self.bucket, layout.RUN, 1).write({"status": "finished", "error": None})
        self.committed.look()
        return judge(self.store, self.run_dir, "toy", STEPS, 0, self.committed)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def sound(run: Run) -> None:
    for step in range(STEPS):
        run.train(step, IDS[2 * step : 2 * step + 2])


def test_nothing_is_found_in_a_sound_run(run: Run) -> None:
    sound(run)
    verdict = run.ended()
    assert verdict.final_step_ok, verdict.why
    assert (verdict.trained_twice, verdict.lost_groups, verdict.lost_samples, verdict.rewritten) == (0, 0, 0, 0)
    assert (verdict.generated, verdict.trained, verdict.on_offer, verdict.files) == (6, 6, 0, 0)


def twice(run: Run) -> None:
    run.train(0, IDS[:2])
    run.train(1, IDS[1:3])
    run.train(2, IDS[4:])


def rewritten(run: Run) -> None:
    sound(run)
    run.committed.look()
    made = group(0)
    run.bucket.put(layout.rollout("w0", IDS[0]), replace(made, prompt_tokens=made.prompt_tokens + 1).to_bytes())


def recorded_anew(run: Run) -> None:
    sound(run)
    run.committed.look()
    run.record(1, IDS[:2])


def uncounted(run: Run) -> None:
    run.train(0, IDS[:2])
    run.train(1, IDS[2:4])
    run.record(2, IDS[4:])
    run.metrics.append({"step": 2, "batch/samples": 1, "batch/unscorable": 0})


def cut_short(run: Run) -> None:
    run.train(0, IDS[:2])
    run.train(1, IDS[2:4])


@pytest.mark.parametrize(
    ("happens", "finds"),
    [
        (twice, lambda v: v.trained_twice == 1),
        (rewritten, lambda v: v.rewritten == 1),
        (recorded_anew, lambda v: v.rewritten == 1),
        (uncounted, lambda v: v.lost_samples == 1),
        (cut_short, lambda v: not v.final_step_ok and v.on_offer == 2),
    ],
)
def test_what_is_wrong_is_found(run: Run, happens: Callable[[Run], None], finds: Callable[[Verdict], bool]) -> None:
    happens(run)
    assert finds(run.ended())


def test_a_group_that_vanishes_is_lost_unless_it_was_dropped_with_a_reason(run: Run) -> None:
    sound(run)
    extra = run.commit(7)
    run.committed.look()
    run.bucket.delete(layout.rollout("w0", extra))
    assert run.ended().lost_groups == 1
    run.drops[extra] = "stale"
    verdict = run.ended()
    assert verdict.lost_groups == 0
    assert verdict.drops == {"stale": 1}


def test_a_batch_of_a_life_that_was_given_up_is_not_trained_twice(run: Run) -> None:
    run.record(2, IDS[2:4], life=1)  # and then life 2 went on after step 0
    run.train(0, IDS[:2])
    run.train(1, IDS[2:4], life=2)
    run.train(2, IDS[4:], life=2)
    verdict = run.ended()
    assert verdict.trained_twice == 0
    assert verdict.final_step_ok, verdict.why


def test_growth_is_the_slope_within_lives_and_not_between_them() -> None:
    growth = Growth(window_s=10.0)
    for life, offset in enumerate((100, 5000, 900)):
        for t in range(0, 200, 2):
            warm = 300 if t < WARM_UP_S else 0
            growth.note("learner", life, Held(offset + 2 * t + warm, 7, 3), now=1000.0 * life + t)
    assert growth.slopes("rss")["learner"] == (pytest.approx(120.0), pytest.approx(0.0, abs=1e-9))
    assert growth.slopes("descriptors")["learner"] == (0.0, 0.0)
    assert growth.watched_s()["learner"] == pytest.approx(3 * 90.0)


def test_what_comes_and_goes_within_a_step_is_no_growth() -> None:
    growth = Growth(window_s=20.0)
    rng = np.random.default_rng(0)
    for t in range(400):
        in_a_step = 600 * rng.random() if t % 7 else 0
        growth.note("learner", 1, Held(int(1000 + in_a_step), 7, 3), now=float(t))
    growth.note("proxy", 2, Held(9, 7, 3), now=0.0)
    assert growth.slopes("rss") == {"learner": (pytest.approx(0.0), pytest.approx(0.0))}


def test_the_error_of_a_slope_is_that_of_least_squares() -> None:
    growth, rng = Growth(window_s=1.0), np.random.default_rng(1)
    y = rng.integers(0, 1000, 200)
    for t in range(200):
        growth.note("worker", 1, Held(int(y[t]), 7, 3), now=float(t))
    (slope, error), t = growth.slopes("rss")["worker"], np.arange(100, 199)
    (expected, _), covariance = np.polyfit(t, y[t], 1, cov=True)
    assert slope == pytest.approx(60 * expected)
    assert error == pytest.approx(60 * covariance[0, 0] ** 0.5)


class _Slow(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        threading.Event().wait(float(self.path.strip("/")))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None:
        return


def test_the_relay_hands_on_until_it_breaks() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    relay = Relay(server.server_address[1], mean_s=0.01, seed=1)
    try:
        relay.breaking = False
        assert opener.open(f"{relay.url}/0.5", timeout=60).read() == b"ok"
        relay.breaking = True
        with pytest.raises((OSError, socket.timeout)):
            opener.open(f"{relay.url}/30", timeout=60)
        assert relay.broken == 1
    finally:
        relay.close()
        server.shutdown()
        server.server_close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_minute_of_chaos() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "experiments.chaos",
            "--minutes",
            "0.4",
            "--steps",
            "14",
            "--seed",
            "1",
            "--every",
            "4",
            "--json",
        ],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"},
        capture_output=True,
        text=True,
        timeout=850,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["kills"] >= 2, done.stdout
    assert result["final_step_ok"], done.stdout
    assert (result["trained_twice"], result["lost"], result["rewritten"], result["orphans"]) == (0, 0, 0, 0), (
        done.stdout
    )
