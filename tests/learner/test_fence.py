import threading

import pytest

from grpo_jax.learner.fence import (
    FencedBucket,
    TakenOver,
    check_incarnation,
    claim_incarnation,
    delete_claims,
    incarnations,
)
from grpo_jax.storage.bucket import Bucket


@pytest.fixture
def run(tmp_path):
    return Bucket(str(tmp_path / "run"))


def test_each_claim_is_a_higher_one_and_stops_the_others(run):
    first = claim_incarnation(run)
    check_incarnation(run, first)
    second = claim_incarnation(run)
    assert (first, second) == (1, 2)
    check_incarnation(run, second)
    with pytest.raises(TakenOver, match=r"another learner \(incarnation 2\) has taken over .* incarnation 1 stops"):
        check_incarnation(run, first)


def test_claims_made_side_by_side_are_all_different(run):
    found, gate = [], threading.Barrier(6)

    def claim():
        gate.wait()
        found.append(claim_incarnation(run))

    threads = [threading.Thread(target=claim) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 6
    check_incarnation(run, max(found))


def test_two_that_have_claimed_the_same_both_stop(run):
    claim_incarnation(run)
    run.put("incarnations/000001.0123abcd.json", b"{}")  # whose listing was too old to show the other
    with pytest.raises(TakenOver):
        check_incarnation(run, 1)


def test_what_is_no_claim_does_not_count(run):
    run.put("incarnations/notes.txt", b"")
    run.put("incarnations/000007.json", b"")
    assert incarnations(run) == [7]
    assert claim_incarnation(run) == 8


def test_a_run_that_starts_anew_is_above_whatever_may_still_be_alive(run):
    for _ in range(3):
        frozen = claim_incarnation(run)
    run.put("incarnations/000002.last.run.json", b"{}")
    delete_claims(run)
    assert incarnations(run) == [frozen]
    assert len(run.list()) == 1
    check_incarnation(run, claim_incarnation(run))
    with pytest.raises(TakenOver):
        check_incarnation(run, frozen)


@pytest.mark.parametrize(
    "change",
    [
        lambda bucket: bucket.put("a", b"late"),
        lambda bucket: bucket.replace("a", b"late"),
        lambda bucket: bucket.delete("a"),
        lambda bucket: bucket.delete_folder("folder"),
        lambda bucket: bucket.child("folder").put("b", b"late"),
    ],
)
@pytest.mark.parametrize("kind", ["directory", "memory"])
def test_behind_the_fence_nothing_is_written_or_deleted_once_another_has_taken_over(
    tmp_path, change, kind, monkeypatch
):
    monkeypatch.setattr("grpo_jax.learner.fence._REMOTE_LOOK_S", 0.0)
    run = Bucket(str(tmp_path) if kind == "directory" else f"memory://{tmp_path}/{id(change)}")
    fenced = FencedBucket(run, claim_incarnation(run))
    fenced.put("a", b"1")
    fenced.put("folder/b", b"2")
    claim_incarnation(run)
    before = {key: run.read(key) for key in run.list()}
    with pytest.raises(TakenOver):
        change(fenced)
    assert {key: run.read(key) for key in run.list()} == before
    assert fenced.read("a") == b"1"
