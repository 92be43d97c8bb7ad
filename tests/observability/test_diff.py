from pathlib import Path

import pytest

from grpo_jax.errors import UsageError
from grpo_jax.observability.diff import compare_runs
from grpo_jax.observability.metrics import MetricsLog
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordReader, RecordWriter
from tests.observability import synthetic


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Bucket, Bucket]:
    """Two equal runs in two buckets."""
    return tuple(  # type: ignore[return-value]
        synthetic.write_run(Bucket(str(tmp_path / name)), tmp_path / name / synthetic.RUN) for name in ("a", "b")
    )


def rewrite(run: Bucket, **changes: object) -> None:
    record = RecordReader(run, layout.RUN).read()
    assert record is not None
    RecordWriter(run, layout.RUN, 2).write({**record, **changes})


def row(text: str, start: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"{start} ")]
    return line.removeprefix(start).split()


def test_equal_runs(pair: tuple[Bucket, Bucket]) -> None:
    text = compare_runs(*pair)
    assert "config: no difference" in text
    assert "versions: no difference" in text
    assert text.endswith("the metrics of all 10 common steps are equal")


def test_config_and_versions_side_by_side(pair: tuple[Bucket, Bucket]) -> None:
    config = {**synthetic.CONFIG, "steps": 10, "lora": {"rank": 32, "alpha": 8.0}, "bucket": "elsewhere"}
    rewrite(pair[1], config=config, versions={"python": "3.11.7", "jax": "0.12.0"})
    text = compare_runs(*pair)
    assert row(text, "lora.rank") == ["8", "32"]
    assert row(text, "lora.alpha") == ["(none)", "8.0"]
    assert row(text, "jax") == ["0.10.2", "0.12.0"]
    assert "python" not in text
    assert "elsewhere" not in text


def test_no_secret_of_a_config_is_shown(pair: tuple[Bucket, Bucket]) -> None:
    config = {**synthetic.CONFIG, "generator": {"env": {"HF_TOKEN": "hf_zyxwvuts", "OMP_NUM_THREADS": "4"}}}
    rewrite(pair[1], config={**config, "steps": 10})
    text = compare_runs(*pair)
    assert row(text, "generator.env.OMP_NUM_THREADS") == ["2", "4"]
    assert "hf_" not in text


def test_the_first_step_at_which_they_part_is_not_one_of_the_clock(pair: tuple[Bucket, Bucket], tmp_path: Path) -> None:
    folder = tmp_path / "b" / synthetic.RUN
    log = MetricsLog.resume(folder, pair[1], 6)
    for step in range(6, 9):
        log.append(
            {
                **synthetic.record(step),
                "perf/step_s": 9.0,
                "time/finished": 1.0,
                **({"reward": 0.125} if step > 6 else {}),
            }
        )
    log.close()
    text = compare_runs(*pair)
    assert "the metrics part at step 7: reward 0.744 and 0.125" in text
    assert row(text, "steps") == ["10", "9"]
    assert row(text, "perf/step_s") == ["4", "7"]  # of steps 4 to 8


def test_a_run_that_is_not_there(tmp_path: Path, pair: tuple[Bucket, Bucket]) -> None:
    with pytest.raises(UsageError, match="no run has left anything here"):
        compare_runs(pair[0], Bucket(str(tmp_path / "c" / "toy")))
