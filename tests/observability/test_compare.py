"""Several runs side by side: numbers against a hand calculation, and the page, the picture and the table of them."""

import csv
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from grpo_jax import cli
from grpo_jax.config.sweep import Sweep, Variant
from grpo_jax.errors import UsageError
from grpo_jax.observability import compare_page
from grpo_jax.observability.compare import Numbers, as_csv, compare, numbers_of
from grpo_jax.observability.compare_page import headline, render, write_comparison
from grpo_jax.observability.compare_plot import curve, draw_comparison, heat_values
from grpo_jax.observability.members import Member, members_of_runs, members_of_sweep, write_index
from grpo_jax.observability.metrics import MetricsLog
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordWriter
from tests.observability import synthetic
from tests.observability.test_report import Page

REWARDS = [0.1, 0.5, 0.9, 0.7, 0.8, 1.0, 0.6]


def member(
    rewards: list[float], settings: dict[str, Any] | None = None, seed: int = 0, status: str = "finished"
) -> Member:
    metrics = [
        {"step": t, "reward": r, "perf/step_s": 10.0 + t, "batch/samples": 64.0, "sample/staleness_mean": 1.5}
        for t, r in enumerate(rewards)
    ]
    return Member(f"run-{seed}", settings or {}, seed, status, f"{len(rewards)} of 7 steps", metrics, 0.75)


def test_the_numbers_of_a_run_are_those_counted_by_hand() -> None:
    assert numbers_of(member(REWARDS), 0.8) == Numbers(
        final=pytest.approx((0.9 + 0.7 + 0.8 + 1.0 + 0.6) / 5),
        held_out=0.75,
        steps_to_target=3,
        samples_to_target=192.0,
        seconds_to_target=33.0,
        below=pytest.approx(0.5),  # 0.7 and 0.6 of 0.7, 0.8, 1.0, 0.6
        drop=pytest.approx(0.4),  # from 1.0 to 0.6
        step_s=13.0,
        staleness=1.5,
    )


@pytest.mark.parametrize("target", [1.5, None])
def test_a_target_that_is_not_reached_leaves_what_is_measured_by_it_unknown(target: float | None) -> None:
    numbers = numbers_of(member(REWARDS), target)
    unknown = (numbers.steps_to_target, numbers.samples_to_target, numbers.seconds_to_target, numbers.below)
    assert unknown == (None,) * 4
    assert numbers.drop == pytest.approx(0.4)


def test_a_target_reached_in_the_last_step_says_nothing_of_stability() -> None:
    assert numbers_of(member([0.1, 0.9]), 0.9).below is None


def test_a_run_without_steps_has_no_numbers() -> None:
    assert all(value is None for name, value in vars(numbers_of(member([]), 0.5)).items() if name != "held_out")


def two_factors() -> list[Member]:
    return [
        member([0.1, level, level], {"optimizer.learning_rate": rate, "lora.rank": rank}, seed)
        for rate in (1e-3, 1e-4)
        for rank, level in ((8, 0.4), (32, 0.8))
        for seed in (0, 1)
    ]


def test_seeds_are_averaged_and_the_target_is_the_same_for_all_settings() -> None:
    comparison = compare("x", [member([0.2] * 5, {"a": 1}, 0), member([0.4] * 5, {"a": 1}, 1), member([1.0], {"a": 2})])
    first, second = comparison.groups
    assert first.final.mean == pytest.approx(0.3)
    assert first.final.std == pytest.approx(math.sqrt(2 * 0.1**2))
    assert (second.final.std, second.final.count) == (None, 1)
    assert comparison.target == pytest.approx(0.9)
    assert compare("x", two_factors(), target=0.25).target == 0.25
    negative = compare("x", [member([-2.0], {"a": 1})])
    assert negative.target == pytest.approx(-2.2)  # below the best, not above it


def test_only_finished_runs_count_in_the_numbers_and_all_in_the_curves() -> None:
    members = [member([0.0, 0.4], {"a": 1}, 0), member([1.0], {"a": 1}, 1, status="failed")]
    (group,) = compare("x", members).groups
    assert (group.finished, len(group.members)) == (1, 2)
    assert group.final.mean == pytest.approx(0.2)
    steps, mean, low, high = curve(group)
    assert steps.tolist() == [0, 1]
    assert mean.tolist() == [0.5, 0.4]
    assert (low.tolist(), high.tolist()) == ([0.0, 0.4], [1.0, 0.4])


def test_a_heat_map_has_a_cell_for_each_pair_in_the_order_of_the_values() -> None:
    members = [
        m for m in two_factors() if not (m.settings["lora.rank"] == 8 and m.settings["optimizer.learning_rate"] == 1e-3)
    ]
    comparison = compare("x", members)
    assert comparison.is_grid
    (row, column), values = heat_values(comparison)
    assert (row, column) == ("optimizer.learning_rate", "lora.rank")
    assert comparison.factors == {"optimizer.learning_rate": [1e-4, 1e-3], "lora.rank": [8, 32]}
    assert values == pytest.approx(np.array([[0.3, 1.7 / 3], [np.nan, 1.7 / 3]]), nan_ok=True)


def test_the_csv_has_a_line_for_each_run_finished_or_not() -> None:
    comparison = compare(
        "x", [*two_factors(), member([0.5], {"optimizer.learning_rate": 1e-4, "lora.rank": 8}, 2, "failed")]
    )
    rows = list(csv.DictReader(io.StringIO(as_csv(comparison))))
    assert len(rows) == 9
    assert [row["lora.rank"] for row in rows] == ["8", "8", "32", "32", "8", "8", "8", "32", "32"]
    assert (rows[6]["status"], rows[6]["final"], rows[6]["steps"]) == ("failed", "0.5", "1")
    assert float(rows[2]["final"]) == pytest.approx(1.7 / 3, rel=1e-4)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the page: a dot instead of the picture."""
    out = io.BytesIO()
    Image.new("RGB", (1, 1)).save(out, "png")
    monkeypatch.setattr(compare_page, "draw_comparison", lambda *_: out.getvalue())
    monkeypatch.setattr("grpo_jax.observability.report.draw", lambda *_: out.getvalue())


def test_the_page_says_which_runs_are_not_finished_and_asks_the_network_for_nothing() -> None:
    members = [
        *two_factors(),
        Member("late", {"optimizer.learning_rate": 1e-4, "lora.rank": 8}, 2, "not started", "0 of 7 steps", []),
        Member("<ill>", {"optimizer.learning_rate": 1e-4, "lora.rank": 8}, 3, "failed", "no <b>room</b> (1 of 7)", []),
    ]
    page = Page(render(compare("a <title>", members), []))
    assert "late: not started, 0 of 7 steps" in page.text
    assert "<ill>: failed, no <b>room</b> (1 of 7)" in page.text
    assert "8 of 10 runs are finished" in page.text
    assert "2 of 4" in page.text
    assert not [link for link in page.links if not link.startswith("data:")]
    assert "script" not in page.tags


def test_runs_none_of_which_is_finished_can_be_looked_at_all_the_same() -> None:
    comparison = compare("x", [member([0.3], {"a": 1}, status="running"), member([], {"a": 2}, status="not started")])
    assert comparison.target is None
    assert headline(comparison) == "0 of 2 runs are finished"
    assert "no target" in Page(render(comparison, [])).text
    assert draw_comparison(comparison)


@pytest.mark.parametrize("settings", [1, 2, 14])
def test_the_picture_shows_one_factor_two_and_more_than_fit(settings: int) -> None:
    many = [member([0.1, 0.1 * i], {"a": i, "b": i % 3, "c": i % 2}) for i in range(settings)]
    for members in (two_factors(), many):
        image = np.asarray(Image.open(io.BytesIO(draw_comparison(compare("x", members)))).convert("RGB"))
        assert image.std() > 5  # something is drawn


def test_no_runs_are_nothing_to_compare() -> None:
    with pytest.raises(UsageError, match="there are no runs"):
        compare("x", [])


def write_run(root: Bucket, name: str, rewards: list[float], **config: Any) -> Bucket:
    run = root.child(name)
    log = MetricsLog(run.local_path(), run)
    for t, reward in enumerate(rewards):
        log.append({"step": t, "reward": reward})
    log.close()
    body = {"run": name, "status": "finished", "error": None, "config": {**synthetic.CONFIG, "run": name, **config}}
    RecordWriter(run, layout.RUN, 1).write(body)
    return run


def test_the_settings_of_loose_runs_are_the_keys_in_which_their_configs_differ(tmp_path: Path) -> None:
    root = Bucket(str(tmp_path))
    runs = [
        write_run(root, "a", [0.1], lora={"rank": 1}, seed=0, steps=3),
        write_run(root, "b", [0.2], lora={"rank": 8}, seed=0),
        write_run(root, "c", [0.3], lora={"rank": 8}, seed=1),
    ]
    assert [(m.settings, m.seed) for m in members_of_runs(runs)] == [
        ({"lora.rank": 1}, 0), ({"lora.rank": 8}, 0), ({"lora.rank": 8}, 1),
    ]  # fmt: skip
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="empty: no run has left anything here"):
        members_of_runs([*runs, root.child("empty")])


def test_what_follows_from_another_key_is_no_factor_of_its_own(tmp_path: Path) -> None:
    root = Bucket(str(tmp_path))
    runs = [
        write_run(
            root, f"r{k}", [0.1], staleness={"exactly": k}, max_staleness=k,
            algorithm={"preset": preset, "loss": loss, "loss_args": {}},
        )
        for k, preset, loss in ((0, "grpo", "ppo_clip"), (4, "gspo", "gspo"))
    ]  # fmt: skip
    assert [m.settings for m in members_of_runs(runs)] == [
        {"algorithm.preset": "grpo", "staleness.exactly": 0},
        {"algorithm.preset": "gspo", "staleness.exactly": 4},
    ]


def test_a_sweep_s_folder_knows_the_runs_that_have_not_begun(tmp_path: Path) -> None:
    from grpo_jax.config.load import parse_config

    def config(name: str) -> Any:
        raw = {"run": name, "model": {"source": "m"}, "task": {"source": "a:b"}, "rewards": [{"source": "a:b"}]}
        return parse_config({**raw, "steps": 9}, "test")

    folder = Bucket(str(tmp_path))
    settings = [{"z": 1, "a": "x"}, {"z": 2, "a": "x"}]
    variants = [Variant("", s, config(n)) for s, n in zip(settings, ("one", "two"), strict=True)]
    write_index(folder, Sweep("study", str(tmp_path), variants))
    write_run(folder, "one", [0.5] * 3, steps=9)
    found = members_of_sweep(folder)
    assert found is not None
    name, members = found
    assert (name, [(m.run, m.status, m.note) for m in members]) == (
        "study",
        [("one", "finished", "3 of 9 steps"), ("two", "not started", "0 of 9 steps")],
    )
    assert list(members[0].settings) == ["z", "a"]
    assert members_of_sweep(folder.child("one")) is None

    def after(**settings: dict[str, Any]) -> list[str]:
        write_index(folder, Sweep("study", str(tmp_path), [Variant("", s, config(n)) for n, s in settings.items()]))
        found = members_of_sweep(folder)
        assert found is not None
        return [member.run for member in found[1]]

    assert after(three={"z": 3, "a": "x"}) == ["one", "three"], "two has left the sweep without ever having begun"
    assert after(three={"z": 3, "a": "x"}, two={"z": 2, "a": "x"}) == ["one", "three", "two"]
    assert after(four={"b": 1}) == ["four"], "what has other factors cannot be compared"
    folder.replace("sweep.json", b"{")
    with pytest.raises(UsageError, match=r"sweep\.json is no record of a sweep"):
        members_of_sweep(folder)


@pytest.mark.usefixtures("quick")
def test_the_command_compares_several_runs_and_reports_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = Bucket(str(tmp_path / "runs"))
    runs = [str(write_run(root, name, [0.1, 0.9], lora={"rank": r}).local_path()) for name, r in (("a", 1), ("b", 8))]
    assert cli.main(["report", *runs, "--to", str(tmp_path / "out"), "--target", "0.5"]) == 0
    out = capsys.readouterr().out
    assert out.count("report: ") == 2
    assert "2 of 2 runs are finished" in out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "comparison.csv", "comparison.html", "comparison.png",
    ]  # fmt: skip
    assert "target 0.5" in (tmp_path / "out" / "comparison.html").read_text()


def test_without_matplotlib_there_is_a_page_without_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> bytes:
        raise ImportError

    monkeypatch.setattr(compare_page, "draw_comparison", missing)
    written = write_comparison(compare("x", two_factors()), tmp_path)
    assert written.png_path is None
    assert "<img" not in written.html_path.read_text()


def test_the_command_says_so_when_there_is_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path / "nowhere")]) == 2
    assert "no run has left anything here" in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()
