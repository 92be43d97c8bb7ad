import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from grpo_jax.observability.metrics import FILE, Mean, MetricsLog, MetricsTail, read_metrics, segment_key
from grpo_jax.storage.bucket import Bucket


def steps_of(source: Path | Bucket) -> list[int]:
    return [r["step"] for r in read_metrics(source)]


def life(run_dir: Path, bucket: Bucket, start: int, end: int, mark: str, sync_at: int | None = None) -> None:
    """One life of a learner: resumes at `start`, finishes the steps before `end`, is killed; its lines carry `mark`."""
    log = MetricsLog.resume(run_dir, bucket, start)
    for step in range(start, end):
        log.append({"step": step, "life": mark})
        if step + 1 == sync_at:
            log.sync()


class TestMean:
    def test_is_the_same_however_it_is_split(self) -> None:
        values, weights = np.array([2.0] * 100 + [0.5] * 900), np.ones(1000)
        parts = [Mean.of(values[i:j], weights[i:j]) for i, j in ((0, 100), (100, 350), (350, 1000))]
        assert sum(parts, Mean()).value == pytest.approx(Mean.of(values).value, rel=1e-12)
        assert sum(parts, Mean()).value == pytest.approx(0.65)  # and not 1.25, the mean of means

    def test_a_nan_of_weight_zero_does_not_count(self) -> None:
        assert Mean.of([np.nan, 3.0, np.inf, 1.0], [0, 1, 0, 3]) == Mean(6.0, 4.0)

    def test_of_nothing_is_nan(self) -> None:
        assert math.isnan((Mean() + Mean.of([1.0], [0.0])).value)

    def test_shapes_must_agree(self) -> None:
        with pytest.raises(ValueError, match="shape"):
            Mean.of([1.0, 2.0], [1.0])


class TestAppend:
    def test_what_is_not_finite_is_left_out_and_never_null(self, tmp_path: Path, root: Bucket) -> None:
        log = MetricsLog(tmp_path, root)
        log.append({"step": 0, "a": np.nan, "b": np.float32(np.inf), "c": None, "d": -np.inf, "e": np.float32(0.5)})
        text = (tmp_path / "metrics.jsonl").read_text()  # before any close: each line is written at once
        assert json.loads(text) == {"step": 0, "e": 0.5}
        assert "null" not in text
        assert "NaN" not in text

    def test_scalars_of_any_library_become_json(self, tmp_path: Path, root: Bucket) -> None:
        record = {"step": np.int64(3), "x": np.ones(()), "n": np.int32(2), "ok": np.bool_(True), "text": "a\nb"}
        MetricsLog(tmp_path, root, 3).append(record)
        assert read_metrics(tmp_path) == [{"step": 3, "x": 1.0, "n": 2, "ok": True, "text": "a\nb"}]

    @pytest.mark.parametrize("step", [4, 3, None, 7.5])
    def test_steps_only_go_forward(self, tmp_path: Path, root: Bucket, step: float | None) -> None:
        log = MetricsLog(tmp_path, root, 4)
        log.append({"step": 4})
        with pytest.raises(ValueError, match="after step 4"):
            log.append({"step": step})

    @pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the size of files")
    def test_a_line_that_a_full_disk_did_not_take_can_be_appended_again(self, tmp_path: Path, root: Bucket) -> None:
        import resource

        log = MetricsLog(tmp_path, root)
        log.append({"step": 0})
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        # A part of the line fits.
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / FILE).stat().st_size + 7, hard))
        try:
            for _ in range(2):
                with pytest.raises(OSError, match="too large"):
                    log.append({"step": 1})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert (tmp_path / FILE).read_text() == '{"step": 0}\n'
        log.append({"step": 1})
        assert steps_of(tmp_path) == [0, 1]

    def test_an_array_is_no_metric(self, tmp_path: Path, root: Bucket) -> None:
        with pytest.raises(TypeError, match="'curve'"):
            MetricsLog(tmp_path, root).append({"step": 0, "curve": [1.0, 2.0]})


class TestResume:
    def test_the_bucket_and_the_file_tell_the_same_story(self, tmp_path: Path, root: Bucket) -> None:
        life(tmp_path, root, 0, 9, "first", sync_at=5)
        log = MetricsLog.resume(tmp_path, root, 5)
        assert steps_of(tmp_path) == [0, 1, 2, 3, 4]
        for step in range(5, 8):
            log.append({"step": step, "life": "second"})
        log.close()
        assert read_metrics(tmp_path) == read_metrics(root)
        assert [r["life"] for r in read_metrics(root)] == ["first"] * 5 + ["second"] * 3
        assert root.list("learner") == [segment_key(0), segment_key(5)]

    def test_a_lost_file_is_rebuilt(self, tmp_path: Path, root: Bucket) -> None:
        life(tmp_path / "here", root, 0, 6, "first", sync_at=6)
        MetricsLog.resume(tmp_path / "elsewhere", root, 4).close()
        assert read_metrics(tmp_path / "elsewhere") == read_metrics(tmp_path / "here")[:4]

    def test_a_cache_that_another_machine_has_overtaken_is_corrected(self, tmp_path: Path, root: Bucket) -> None:
        life(tmp_path / "here", root, 0, 9, "first", sync_at=5)
        life(tmp_path / "there", root, 5, 10, "second", sync_at=10)
        MetricsLog.resume(tmp_path / "here", root, 8).close()
        assert [r["life"] for r in read_metrics(tmp_path / "here")] == ["first"] * 5 + ["second"] * 3

    def test_a_later_segment_wins_from_its_first_step(self, tmp_path: Path, root: Bucket) -> None:
        root.put(segment_key(0), b"".join(b'{"step": %d, "life": 1}\n' % t for t in range(8)))
        root.put(segment_key(3), b'{"step": 3, "life": 2}\n{"step": 4, "life": 2}\n')
        assert [(r["step"], r["life"]) for r in read_metrics(root)] == [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2)]

    def test_a_life_that_was_killed_before_its_first_sync_already_ends_the_one_before(
        self, tmp_path: Path, root: Bucket
    ) -> None:
        life(tmp_path / "here", root, 0, 9, "first", sync_at=9)
        life(tmp_path / "here", root, 5, 7, "second")
        assert steps_of(root) == [0, 1, 2, 3, 4]

    def test_the_late_write_of_an_older_life_changes_nothing(self, tmp_path: Path, root: Bucket) -> None:
        older = MetricsLog.resume(tmp_path / "older", root, 0, 1)
        older.append({"step": 0, "life": 1})
        older.append({"step": 1, "life": 1})
        older.sync()
        newer = MetricsLog.resume(tmp_path / "newer", root, 1, 2)
        newer.append({"step": 1, "life": 2})
        newer.close()
        older.append({"step": 2, "life": 1})
        older.close()
        assert [(r["step"], r["life"]) for r in read_metrics(root)] == [(0, 1), (1, 2)]

    def test_a_resume_from_an_older_checkpoint_deletes_later_segments(self, tmp_path: Path, root: Bucket) -> None:
        life(tmp_path, root, 0, 10, "first", sync_at=10)
        life(tmp_path, root, 10, 15, "second", sync_at=15)
        life(tmp_path, root, 5, 12, "third", sync_at=12)
        assert [r["life"] for r in read_metrics(root)] == ["first"] * 5 + ["third"] * 7
        assert read_metrics(tmp_path) == read_metrics(root)

    def test_a_fresh_log_forgets_a_file_that_lies_there(self, tmp_path: Path, root: Bucket) -> None:
        (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward": 1}\n')
        MetricsLog(tmp_path, root)
        assert read_metrics(tmp_path) == []


class TestTornLines:
    def test_are_left_out(self, tmp_path: Path) -> None:
        (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n[1]\n{"reward": 1}\n{"step": 1}\n{"step": 2, "rew')
        assert steps_of(tmp_path) == [0, 1]

    def test_do_not_glue_to_the_next_line_after_a_resume(self, tmp_path: Path, root: Bucket) -> None:
        (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n{"step": 1, "rew')
        log = MetricsLog.resume(tmp_path, root, 1)
        log.append({"step": 1, "reward": 0.5})
        assert read_metrics(tmp_path) == [{"step": 0}, {"step": 1, "reward": 0.5}]

    def test_nothing_there_is_no_error(self, tmp_path: Path, root: Bucket) -> None:
        assert read_metrics(tmp_path) == []
        assert read_metrics(root) == []


class TestTail:
    def test_hands_on_each_line_once_and_only_when_it_is_complete(self, tmp_path: Path) -> None:
        tail, path = MetricsTail(tmp_path), tmp_path / "metrics.jsonl"
        assert tail.poll() == []
        path.write_bytes(b'{"step": 0}\n{"step"')
        assert [r["step"] for r in tail.poll()] == [0]
        assert tail.poll() == []
        with path.open("ab") as file:
            file.write(b': 1}\n{"step": 2}\n')
        assert [r["step"] for r in tail.poll()] == [1, 2]

    def test_after_a_resume_only_what_differs_is_news(self, tmp_path: Path, root: Bucket) -> None:
        life(tmp_path, root, 0, 6, "first", sync_at=4)
        tail = MetricsTail(tmp_path)
        assert len(tail.poll()) == 6
        life(tmp_path, root, 4, 5, "second")
        assert tail.poll() == [{"step": 4, "life": "second"}]
        assert sorted(tail.records) == [0, 1, 2, 3, 4]

    def test_a_file_that_starts_again_from_nothing(self, tmp_path: Path, root: Bucket) -> None:
        life(tmp_path, root, 0, 3, "first")
        tail = MetricsTail(tmp_path)
        tail.poll()
        log = MetricsLog(tmp_path, root)
        assert (tail.poll(), tail.records) == ([], {})
        log.append({"step": 0, "life": "second"})
        assert tail.poll() == [{"step": 0, "life": "second"}]

    def test_a_file_that_was_replaced_by_a_longer_one_is_read_anew(self, tmp_path: Path, root: Bucket) -> None:
        life(tmp_path, root, 0, 3, "first", sync_at=3)
        tail = MetricsTail(tmp_path)
        tail.poll()
        life(tmp_path, root, 1, 9, "second")
        assert [(r["step"], r["life"]) for r in tail.poll()] == [(t, "second") for t in range(1, 9)]
        assert tail.records[0]["life"] == "first"
