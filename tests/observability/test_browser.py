"""The report in headless Chromium: no error, no request, nothing wider than the window, in both colour schemes."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from grpo_jax.observability.report import build_report
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import canonical_json
from tests.observability import synthetic
from tests.observability.browser import chromium, look

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="no Chromium is installed (Debian: apt-get install chromium)"),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run with everything in it, and with names and words that are too long for any line."""
    folder = tmp_path_factory.mktemp("run")
    run = synthetic.write_run(Bucket(str(folder / "bucket")), folder, steps=30, error="x" * 400)
    synthetic.SpoolWriter(run, "w0").write(
        synthetic.group(990, 29, synthetic.T0, synthetic.T0 + 2, "a-replica-with-a-long-name-" * 3, "w" * 3000, 1.0)
    )
    run.put("evaluations/long.json", canonical_json({"policy": synthetic.policy(5), "split": "s" * 80, "reward": 0.5}))
    for version in (10, 20):
        between = {"policy": synthetic.policy(version), "split": "eval", "reward": 0.02 * version, "samples": 4}
        run.put(layout.evaluation(between["policy"], "eval"), canonical_json({**between, "pass_at": {"4": 0.9}}))
    bad = [[f"rollouts/w0/{'g' * 60}.safetensors", "its checksum is wrong " + "y" * 200]]
    synthetic.RecordWriter(run, layout.LEARNER_STATE, 2).write(
        {"step": 30, "drops": [], "quarantined": bad, "quarantined_total": 4}
    )
    return build_report(folder, run).html_path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 700, 360])
def test_the_report(report: Path, width: int, dark: bool) -> None:
    seen = look(report, width=width, dark=dark)
    assert seen.errors == []
    assert [url for url in seen.requests if not url.startswith("data:")] == [report.as_uri()]
    assert seen.too_wide == []
    assert seen.page_width <= width
    for expected in (
        "toy",
        "Timeline",
        "Bottleneck",
        "Reward and its parts",
        "Entropy",
        "Replicas",
        "Groups in quarantine",
        "Samples",
        "steps: 30",
    ):
        assert expected in seen.text, expected
    pixels = np.asarray(Image.open(io.BytesIO(seen.png)).convert("RGB"))
    assert pixels.shape[1] == width
    assert (pixels[2, 2].mean() < 60) == dark


def test_the_browser_itself_would_tell(tmp_path: Path) -> None:
    """The checks above can fail."""
    page = tmp_path / "bad.html"
    page.write_text(
        "<div style='width:3000px'>wide</div><img src='http://127.0.0.1:9/x.png'><script>undefinedName()</script>"
    )
    seen = look(page, width=800, dark=False)
    assert seen.too_wide
    assert seen.page_width > 800
    assert "http://127.0.0.1:9/x.png" in seen.requests
    assert any("undefinedName" in error or "Uncaught" in error for error in seen.errors)
