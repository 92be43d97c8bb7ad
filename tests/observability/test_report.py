import base64
import builtins
import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from grpo_jax.errors import UsageError
from grpo_jax.observability.curves import Chart, Line, _figure, charts
from grpo_jax.observability.plot import _label, draw
from grpo_jax.observability.report import Report, build_report
from grpo_jax.observability.rundata import RunData, load_run
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordWriter, canonical_json
from tests.observability import synthetic

_VOID = {"meta", "source", "img"}


class Page(HTMLParser):
    """Checks that tags are balanced; collects the text, the tags and the attributes."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.text, self.tags, self.links = "", set(), []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value for name, value in attrs if name in ("src", "srcset", "href") and value]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def read(report: Report) -> Page:
    return Page(report.html_path.read_text(encoding="utf-8"))


def decoded(link: str) -> np.ndarray:
    """The pixels of a data URL. [height, width, 3]."""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(link.partition(",")[2]))).convert("RGB"))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the page: a dot instead of the picture."""
    dot = io.BytesIO()
    Image.new("RGB", (1, 1)).save(dot, "PNG")
    monkeypatch.setattr("grpo_jax.observability.report.draw", lambda run, theme: dot.getvalue())


@pytest.mark.usefixtures("quick")
def test_a_finished_run(root: Bucket, tmp_path: Path) -> None:
    report = build_report(tmp_path, synthetic.write_run(root, tmp_path))
    page = read(report)
    for expected in (
        "toy", "finished", "org/tiny", "0.17 → 0.94", "0.28 → 0.74", "10 of 10", "4 s", "2 stale, 1 invalid", "12,345",
        "1,234 (10 %)", "9 s of 41 s (22 %)", "canary differs by 0.8", "Learner waiting for rollouts", "25 %",
        report.summary["verdict"], synthetic.policy(10), "Step 0", "Step 9", "expected 4", "python", "3.11.7",
    ):  # fmt: skip
        assert expected in page.text, expected
    assert report.headline == (
        "10 of 10 steps, training reward 0.28 → 0.74, held-out reward 0.17 → 0.94, 4 s a step, overlap 22 %"
    )
    assert "svg" in page.tags
    assert "Not there" not in page.text


@pytest.mark.usefixtures("quick")
def test_evaluations_in_between_and_pass_at_k(root: Bucket, tmp_path: Path) -> None:
    run = synthetic.write_run(root, tmp_path)
    between = {"policy": synthetic.policy(5), "split": "eval", "reward": 0.5, "pass_at": {"1": 0.5, "4": 0.625}}
    run.put(layout.evaluation(synthetic.policy(5), "eval"), canonical_json(between))
    report = build_report(tmp_path, run)
    page = read(report)
    table = page.text[page.text.index("Unscorable") - 200 :]
    assert table.index(synthetic.policy(0)) < table.index(synthetic.policy(5)) < table.index(synthetic.policy(10))
    for expected in ("pass@4", "Held-out pass@4, base and trained", "0.59 → 0.97", "0.62"):
        assert expected in page.text, expected
    # pass@1 of rewards that are 0 or 1 is their mean: one line of the two is drawn.
    (chart,) = [chart for chart in charts(load_run(tmp_path, run)) if chart.title == "Evaluation"]
    assert [line.label for line in chart.lines] == ["mean reward", "pass@4"]
    assert chart.lines[0].points == [(0.0, 0.171875), (5.0, 0.5), (10.0, 0.9375)]
    assert report.summary["held_out_pass_at"]["4"] == (0.5859375, 0.96875)


def test_of_many_lags_the_ones_that_a_run_trains_on_are_drawn() -> None:
    lags = [Line(f"lag {k}", [(float(k), 1.0)]) for k in range(16)]
    chart = Chart("by lag", [*lags, Line("lag 16", [(float(step), 2.0) for step in range(16, 85)])], logarithmic=True)
    assert [line.label for line in chart.drawn] == ["lag 0", "lag 1", "lag 2", "lag 3", "lag 4", "lag 16"]
    html = _figure(chart)
    assert "lag 16" in html
    assert "and 11 more" in html


@pytest.mark.usefixtures("quick")
def test_what_went_wrong_is_counted_and_shown(root: Bucket, tmp_path: Path) -> None:
    run = synthetic.write_run(root, tmp_path)
    reason = "its checksum <b>differs</b>"
    RecordWriter(run, layout.LEARNER_STATE, 7).write(
        {"step": 10, "drops": [], "quarantined": [["rollouts/w0/x.safetensors", reason]], "quarantined_total": 3}
    )
    page = read(build_report(tmp_path, run))
    cells = page.text.split("\n")
    for name, value in (
        ("Groups in quarantine", "3"),
        ("Starts of the learner, of the worker", "7, 1"),
        ("Restarts of replicas", "1"),
        ("rollouts/w0/x.safetensors", reason),
    ):
        assert cells[cells.index(name) + 1] == value
    assert "And 2 before these." in page.text
    proofs = [cells[cells.index(replica, cells.index("Proofs")) + 4 :][:3] for replica in ("r0", "r1")]
    assert proofs == [["20", "0", "0"], ["21", "3", "1"]]  # proofs, refused, restarts


@pytest.mark.usefixtures("quick")
def test_the_parts_of_a_sample_s_reward_are_shown_if_there_are_several(root: Bucket, tmp_path: Path) -> None:
    run = root.child(synthetic.RUN)
    made = synthetic.group(0, 0, synthetic.T0, synthetic.T0 + 1, reward=1.5)
    parts = {"right": 1.0, "style": None, "style/short": 0.5}
    samples = (replace(made.samples[0], reward_parts=parts), *made.samples[1:])
    synthetic.SpoolWriter(run, "w0").write(replace(made, samples=samples))
    synthetic.SpoolWriter(run, "w0").write(synthetic.group(1, 0, synthetic.T0, synthetic.T0 + 1, reward=0.25))
    text = read(build_report(tmp_path, run)).text
    assert "right 1.00, style –, style/short 0.50" in text
    assert "last_integer" not in text


@pytest.mark.usefixtures("quick")
def test_a_completion_cannot_write_html(root: Bucket, tmp_path: Path) -> None:
    page = read(build_report(tmp_path, synthetic.write_run(root, tmp_path)))
    assert "script" not in page.tags
    assert "<script>alert(1)</script> & 4" in page.text


@pytest.mark.usefixtures("quick")
def test_nor_can_a_replica_or_an_error(root: Bucket, tmp_path: Path) -> None:
    run = synthetic.write_run(root, tmp_path, status="failed", error="<img src=x onerror=alert(1)>")
    synthetic.SpoolWriter(run, "w0").write(synthetic.group(99, 0, synthetic.T0, synthetic.T0 + 1, "<b>r9</b>"))
    page = read(build_report(tmp_path, run))
    assert "<img src=x onerror=alert(1)>" in page.text
    assert "<b>r9</b>: groups in flight" in page.text
    assert all(link.startswith("data:image/png;base64,") for link in page.links)


@pytest.mark.usefixtures("quick")
def test_it_needs_no_network_and_hides_credentials(root: Bucket, tmp_path: Path) -> None:
    report = build_report(tmp_path, synthetic.write_run(root, tmp_path))
    html = report.html_path.read_text(encoding="utf-8")
    assert all(link.startswith("data:image/png;base64,") for link in read(report).links)
    assert not re.search(r"@import|url\(|https?:", html)
    assert "hf_abcdefgh" not in html
    assert "OMP_NUM_THREADS: &#x27;2&#x27;" in html


@pytest.mark.usefixtures("quick")
def test_a_run_that_is_not_finished_says_what_is_missing(root: Bucket, tmp_path: Path) -> None:
    run = root.child(synthetic.RUN)
    synthetic.write_metrics(run, tmp_path, 1)
    report = build_report(tmp_path, run)
    page = read(report)
    for expected in (
        "The run's record (run.json) is not there.",
        "The spool holds no groups.",
        "No rollout worker has left a record.",
        "Too little is recorded",
        "1 of –",
    ):
        assert expected in page.text, expected


@pytest.mark.usefixtures("quick")
def test_a_run_that_failed_before_its_first_step(root: Bucket, tmp_path: Path) -> None:
    synthetic.write_records(root, 10, status="failed", error="the generator ended with exit code 1")
    page = read(build_report(tmp_path, root.child(synthetic.RUN)))
    assert "failed" in page.text
    assert "the generator ended with exit code 1" in page.text
    assert "No step has been finished: there are no metrics." in page.text


@pytest.mark.usefixtures("quick")
def test_without_batch_records_the_oldest_and_newest_groups_are_shown(root: Bucket, tmp_path: Path) -> None:
    run = synthetic.write_run(root, tmp_path, steps=4)
    run.delete_folder(layout.BATCHES)
    page = read(build_report(tmp_path, run))
    assert page.text.index("Sampled first") < page.text.index("problem-0 ") < page.text.index("Sampled last")
    assert "problem-15 " in page.text


@pytest.mark.usefixtures("quick")
def test_prompts_are_shown_when_they_can_be_decoded(root: Bucket, tmp_path: Path) -> None:
    run = synthetic.write_run(root, tmp_path, steps=2)
    page = read(build_report(tmp_path, run, decode=lambda tokens: f"prompt of {list(tokens)}"))
    assert "prompt of [1, 2, 3, 4, 5]" in page.text


def test_no_run_at_all_is_a_usage_error(root: Bucket, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run has left anything here"):
        build_report(tmp_path, root.child("nobody"))
    assert list(tmp_path.glob("*.html")) == []


def test_the_picture_is_beside_the_page_and_in_it(tmp_path: Path) -> None:
    report = build_report(tmp_path, synthetic.write_run(Bucket(str(tmp_path / "bucket")), tmp_path))
    assert report.png_path == tmp_path / "reward.png"
    png = report.png_path.read_bytes()
    light, dark = sorted((decoded(link) for link in read(report).links), key=lambda image: -int(image[0, 0, 0]))
    assert light.shape == dark.shape == (1080, 1800, 3)
    assert light[0, 0].tolist() == [255, 255, 255]
    assert dark[0, 0].max() < 60
    assert 0.005 < (light != 255).any(axis=2).mean() < 0.5  # something is drawn, most is paper
    assert base64.b64encode(png).decode() in report.html_path.read_text(encoding="utf-8")


def test_a_picture_of_nothing_or_of_one_step() -> None:
    for run in (RunData("toy"), RunData("toy", metrics=[synthetic.record(0)]), RunData("toy", metrics=[{"step": 3}])):
        assert Image.open(io.BytesIO(draw(run))).size == (1800, 1080)


def test_without_matplotlib_there_is_a_page_without_a_picture(
    root: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    run = synthetic.write_run(root, tmp_path, steps=2)
    monkeypatch.setattr(builtins, "__import__", refuse)
    report = build_report(tmp_path, run)
    assert report.png_path is None
    assert "matplotlib is not installed" in read(report).text


def test_the_labels_of_lines_that_meet_do_not_overlap() -> None:
    ax = Figure().subplots()
    ax.plot([0, 1], [0.0, 1.0])
    _label(ax, [(0.5, "a", "k"), (0.5, "b", "k"), (0.51, "two\nlines", "k"), (0.9, "c", "k")])
    ys = {text.get_text(): text.get_position()[1] for text in ax.texts}
    assert ys["b"] - ys["a"] > 0.07
    assert ys["two\nlines"] - ys["b"] > 0.1
    assert ys["c"] - ys["two\nlines"] > 0.1
