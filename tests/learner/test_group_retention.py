"""What is deleted from the spool, and that nobody is misled by it."""

import pytest

from grpo_jax.learner.group_retention import GroupRetention
from grpo_jax.rollouts.admission import Admission
from grpo_jax.rollouts.worker import _tickets
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket, BucketError
from grpo_jax.storage.deleted import deleted_ids
from grpo_jax.storage.records import seal
from grpo_jax.storage.spool import SpoolReader, SpoolWriter, group_ids
from tests.storage.objects import group


@pytest.fixture
def run(tmp_path):
    run = Bucket(str(tmp_path))
    for index in range(10):
        SpoolWriter(run, f"w{index % 2}").write(group(index))
    SpoolWriter(run, "w0").write(group(2, attempt=1))
    return run


def id_of(index, attempt=0):
    return str(group(index, attempt).id)


SETTLED = {id_of(0): 0, id_of(1): 0, id_of(2): 1, id_of(2, 1): 2, id_of(3): 2}


def there(run):
    return {key.rpartition("/")[2].removesuffix(".safetensors") for key in run.list(layout.ROLLOUTS)}


def test_only_what_is_settled_is_deleted_and_the_ids_stay_known(run):
    before = set(group_ids(run))
    assert len(GroupRetention(run, 1, 0.0, dict).collect(SETTLED)) == 5
    assert there(run) == before - set(SETTLED)
    assert set(deleted_ids(run)) == set(SETTLED)
    assert set(group_ids(run)) == before
    assert [g.id.index for g in SpoolReader(run).poll()] == [4, 6, 8, 5, 7, 9]


def test_a_worker_that_starts_anew_draws_none_of_them_again(run):
    def restored():
        admission = Admission(max_staleness=5, groups_per_version=4, total=100, max_redraws=3)
        admission.restore(_tickets(group_ids(run)), {})
        return admission.live, admission.start(0)

    before = restored()
    GroupRetention(run, 1, 0.0, dict).collect(SETTLED)
    assert restored() == before


def test_a_size_keeps_the_newest_of_what_could_go(run):
    sizes = {key: len(run.read(key)) for key in run.list(layout.ROLLOUTS)}
    keep_gb = (sum(sizes.values()) - 2.5 * max(sizes.values())) / 1e9
    gone = GroupRetention(run, 1, keep_gb, lambda: sizes).collect(SETTLED)
    assert [key.rpartition("/")[2] for key in gone] == [f"{name}.safetensors" for name in list(SETTLED)[:3]]
    assert GroupRetention(run, 1, keep_gb, lambda: sizes).collect(SETTLED) == []
    assert len(there(run)) == 8


def test_a_deletion_that_stops_half_way_is_on_the_list_and_made_up_for(run, monkeypatch):
    retention, delete, calls = GroupRetention(run, 1, 0.0, dict), Bucket.delete, []

    def fail(self, key):
        calls.append(key)
        if len(calls) == 3:
            raise BucketError("503")
        delete(self, key)

    monkeypatch.setattr(Bucket, "delete", fail)
    before = set(group_ids(run))
    with pytest.raises(BucketError):
        retention.collect(SETTLED)
    assert set(group_ids(run)) == before
    retention.collect(SETTLED)
    assert not set(SETTLED) & there(run)
    # A later life, which knows all that was trained, says all of it again.
    GroupRetention(run, 2, 0.0, dict).collect({**SETTLED, id_of(4): 3})
    assert set(deleted_ids(run)) == {*SETTLED, id_of(4)}


@pytest.mark.parametrize("groups", [None, [[0, 0, 0, 10**15]], [[0, 0, 5, 1]], [["x"]], [[0, 0, "a", "b"]], "abc"])
def test_a_list_that_is_none_is_an_error_and_not_a_hang(run, groups):
    run.replace(layout.DELETED, seal({"groups": groups}, 1, 1))
    with pytest.raises(BucketError, match=r"learner/deleted.json in .* is no list of groups"):
        deleted_ids(run)
