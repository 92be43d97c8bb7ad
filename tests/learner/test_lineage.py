"""A learner that resumes has to know the policies of the groups that lie in the spool before it judges them."""

from types import SimpleNamespace

from grpo_jax.learner.ledger import Ledger
from grpo_jax.learner.loop import Learner
from grpo_jax.storage.bucket import Bucket
from tests.adapters.test_publisher import LOGPROBS, lora, publisher
from tests.learner.test_ledger import group


def published(run: Bucket, versions: range) -> dict[int, str]:
    """version → name, as the life before has published them."""
    names = {}
    for version in versions:
        pub = publisher(run)
        pub.submit(version, version, lora(1 + version), LOGPROBS)
        assert pub.flush(30)
        names[version] = pub.newest.name
        pub.close()
    return names


def test_no_group_of_a_version_that_is_still_being_published_is_foreign(tmp_path) -> None:
    """In a replay versions follow each other faster than a slow bucket takes them."""
    names = published(Bucket(str(tmp_path / "before")), range(4))
    pub = publisher(Bucket(f"faulty:slow=0.3:{tmp_path}/now"))
    ledger = Ledger(max_staleness=3)
    ledger.offer([group(v, v, policy=names[v]) for v in range(4)])
    flushed = []
    learner = Learner.__new__(Learner)
    learner._parts = SimpleNamespace(publisher=pub)
    learner._life = SimpleNamespace(ledger=ledger, flush=lambda pub, what: flushed.append(pub.flush(60)))
    for version in range(4):
        learner._await_named(version - 1)
        pub.submit(version, version, lora(1 + version), LOGPROBS)
    learner._await_named(3)
    ledger.sweep(3, pub.lineage)
    assert ledger.drops == {}
    assert pub.lineage == names
    assert pub.skipped == 0
    # What nobody has sampled from is not waited for.
    flushed.clear()
    pub.submit(4, 4, lora(5), LOGPROBS)
    learner._await_named(4)
    assert flushed == []
    pub.close()
