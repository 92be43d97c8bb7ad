"""Records, adapters, groups and checkpoints on buckets that misbehave, with each fault alone and with all of them."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from grpo_jax.adapters.manifest import download_adapter, read_manifest
from grpo_jax.adapters.publisher import upload_adapter
from grpo_jax.rollouts.sample import Group
from grpo_jax.storage.bucket import Bucket, Limits
from grpo_jax.storage.records import RecordReader, RecordWriter
from grpo_jax.storage.spool import SpoolReader, SpoolWriter
from tests.storage.objects import adapter, group, insist

LANDED_S = 1.1  # by then all writes have landed that were held back
LIMITS = Limits(attempt_s=10.0, total_s=30.0)
ALONE = {
    "delay": "delay=0.02",
    "late": "late=0.4",
    "stale_list": "stale_list=0.4",
    "torn": "torn=0.5",
    "reorder": "reorder=0.4",
    "error": "error=0.3",
    "denied": "denied=0.3",
    "full": "full=0.3",
}
MIXED = "delay=0.01,late=0.3,stale_list=0.3,torn=0.1,reorder=0.1,error=0.1,denied=0.1,full=0.1"
FAULTS = [pytest.param(f"seed=1,{fault}", id=name) for name, fault in ALONE.items()] + [
    pytest.param(f"seed={seed},{MIXED}", id=f"mixed-{seed}") for seed in range(3)
]
MIXED_ONLY = [pytest.param(f"seed={seed},{MIXED}", id=f"mixed-{seed}") for seed in (7, 8)]


@pytest.fixture
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Bucket]:
    """Opens the bucket once more: each time another reader."""
    return lambda: Bucket(f"faulty:{request.param}:{tmp_path / 'bucket'}", LIMITS)


@contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[threading.Event]:
    """Runs `work` in a thread; yields what is set when it is done. Its error is raised at the end."""
    done, errors = threading.Event(), []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
        done.set()

    thread = threading.Thread(target=run)
    thread.start()
    yield done
    thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("opened", FAULTS, indirect=True)
def test_a_record_never_goes_back_and_ends_at_its_last_value(opened: Callable[[], Bucket]) -> None:
    writer, reader, last = RecordWriter(opened(), "a/r.json", 1), RecordReader(opened(), "a/r.json"), 25

    def write() -> None:
        for value in range(last + 1):
            insist(lambda value=value: writer.write({"value": value}))  # type: ignore[misc]
            time.sleep(0.01)

    seen = [-1]
    with meanwhile(write) as done:
        end = None
        while end is None or time.monotonic() < end:
            if (record := insist(reader.read)) is not None:
                seen.append(record["value"])
            if end is None and done.is_set():
                end = time.monotonic() + LANDED_S
            time.sleep(0.002)
    assert seen == sorted(seen)

    def value_of(reader: RecordReader) -> int | None:
        insist(writer.confirm)
        record = insist(reader.read)
        return None if record is None else record["value"]

    newcomer = RecordReader(opened(), "a/r.json")
    assert insist(lambda: value_of(newcomer), lambda value: value == last) == last
    assert insist(lambda: value_of(reader), lambda value: value == last) == last


@pytest.mark.parametrize("opened", FAULTS, indirect=True)
def test_an_adapter_comes_over_whole_or_not_at_all(opened: Callable[[], Bucket], tmp_path: Path) -> None:
    published = [adapter(version) for version in range(4)]
    here, there = opened(), opened()

    def upload() -> None:
        for manifest, files in published:
            insist(lambda manifest=manifest, files=files: upload_adapter(here, manifest, files))  # type: ignore[misc]

    def download(name: str) -> Path:
        return download_adapter(there, read_manifest(there, name), tmp_path)

    with meanwhile(upload):
        for manifest, files in published:
            folder = insist(lambda manifest=manifest: download(manifest.name))  # type: ignore[misc]
            assert {file: (folder / file).read_bytes() for file in files} == files


@pytest.mark.parametrize("opened", FAULTS, indirect=True)
def test_each_group_is_delivered_exactly_once(opened: Callable[[], Bucket]) -> None:
    writer, reader, count = SpoolWriter(opened(), "w0"), SpoolReader(opened()), 20
    delivered: list[Group] = []

    def write() -> None:
        for index in range(count):
            insist(lambda index=index: writer.write(group(index)))  # type: ignore[misc]

    with meanwhile(write):
        insist(lambda: delivered.extend(reader.poll()), lambda _: len(delivered) >= count)
    for _ in range(5):
        insist(lambda: delivered.extend(reader.poll()))
    assert sorted(g.id.index for g in delivered) == list(range(count))
    assert reader.rejected == {}


@pytest.mark.slow
@pytest.mark.parametrize("opened", MIXED_ONLY, indirect=True)
def test_a_checkpoint_comes_back_bit_for_bit(opened: Callable[[], Bucket]) -> None:
    jax, np = pytest.importorskip("jax"), pytest.importorskip("numpy")
    from grpo_jax.learner.checkpoint import Checkpointer
    from tests.learner.tiny import base_and_lora, make_step

    first = make_step().init(base_and_lora()[1])
    second = first.replace(lora=jax.tree.map(lambda x: x + 1, first.lora))
    checkpointer = Checkpointer(opened(), keep=2)

    def save(step: int, state: object) -> None:
        checkpointer.save(step, state, {"lineage": {"5": "a"}})  # type: ignore[arg-type]
        checkpointer.wait()

    for step, state in ((5, first), (10, second)):
        insist(lambda step=step, state=state: save(step, state))  # type: ignore[misc]
    reader = Checkpointer(opened(), keep=2)
    found = insist(lambda: reader.restore_newest(first), lambda found: found is not None and found[1]["step"] == 10)
    assert found is not None
    assert found[1] == {"step": 10, "lineage": {"5": "a"}}
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found[0].lora), jax.device_get(second.lora))
