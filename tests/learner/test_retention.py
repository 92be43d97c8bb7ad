import jax
import numpy as np

from grpo_jax.adapters.publisher import AdapterSpec, Publisher
from grpo_jax.learner.retention import AdapterRetention, Needed
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordWriter
from tests.learner.tiny import LORA, base_and_lora

SPEC = AdapterSpec("tiny", LORA.rank, LORA.alpha, LORA.rslora, LORA.scale, "some/model", "d" * 64)


def publisher(run):
    tokens, logprobs = np.arange(8), -np.ones(7)
    pub = Publisher(run, SPEC, 1, window=3, canary_tokens=tokens, to_host=jax.device_get)
    tree = base_and_lora()[1]

    def publish(version):
        pub.submit(version, version, jax.tree.map(lambda x: x * (1 + version), tree), logprobs)
        assert pub.flush(30)
        return pub.newest.name

    return pub, publish


def oldest(pub):
    return min(v for v, name in pub.lineage.items() if name in pub.named)


def adapters(run):
    return {key.split("/")[1] for key in run.list(layout.ADAPTERS)}


def test_five_hundred_publishes_leave_as_few_objects_as_five(tmp_path):
    root = Bucket(str(tmp_path))
    run = root.child("tiny")
    pub, publish = publisher(run)
    retention = AdapterRetention(root, run, "tiny", silent_s=60)
    counts = []
    for version in range(500):
        publish(version)
        retention.collect(Needed(pub.named, oldest(pub)))
        counts.append(len(run.list()))
    assert set(counts[5:]) == {counts[5]}
    assert adapters(run) == {pub.lineage[v] for v in (0, 497, 498, 499)}
    assert retention.deleted == 496
    pub.close()


def test_what_a_live_replica_lists_stays_until_it_lists_it_no_more(tmp_path):
    root = Bucket(str(tmp_path))
    run = root.child("tiny")
    pub, publish = publisher(run)
    retention = AdapterRetention(root, run, "fleet", silent_s=60)
    names = [publish(version) for version in range(6)]
    heartbeat = RecordWriter(root, layout.replica("fleet", "r0"), 1)
    heartbeat.write({"loaded": [names[1]], "proved": [names[2]]})
    assert retention.collect(Needed(pub.named, oldest(pub))) == []
    heartbeat.write({"loaded": [names[2]], "proved": []})
    assert retention.collect(Needed(pub.named, oldest(pub))) == [names[1]]
    heartbeat.write({"loaded": [], "proved": []})
    assert retention.collect(Needed(pub.named, oldest(pub))) == [names[2]]
    pub.close()


def test_a_silent_replica_holds_nothing_back(tmp_path):
    root = Bucket(str(tmp_path))
    pub, publish = publisher(root.child("tiny"))
    retention = AdapterRetention(root, root.child("tiny"), "fleet", silent_s=0.0)
    names = [publish(version) for version in range(5)]
    RecordWriter(root, layout.replica("fleet", "r0"), 1).write({"loaded": [names[1]]})
    retention.collect(Needed(pub.named, oldest(pub)))
    assert retention.collect(Needed(pub.named, oldest(pub))) == []
    assert adapters(root.child("tiny")) == {names[v] for v in (0, 2, 3, 4)}
    pub.close()


def test_what_a_restart_would_ask_for_and_other_runs_and_lineages_above_stay(tmp_path):
    root = Bucket(str(tmp_path))
    run = root.child("tiny")
    pub, publish = publisher(run)
    names = [publish(version) for version in range(6)]
    run.put("adapters/tiny.v000007.0123abcd/adapter_model.safetensors", b"being uploaded by somebody")
    run.put("adapters/something else/file", b"not ours")
    retention = AdapterRetention(root, run, "fleet", silent_s=60)
    assert retention.collect(Needed({*pub.named, names[2]}, oldest(pub))) == [names[1]]
    assert {"tiny.v000007.0123abcd", "something else", names[2]} <= adapters(run)
    pub.close()


def test_a_bucket_that_does_not_list_the_fleet_deletes_nothing(tmp_path, monkeypatch):
    root = Bucket(str(tmp_path))
    run = root.child("tiny")
    pub, publish = publisher(run)
    for version in range(6):
        publish(version)
    retention = AdapterRetention(root, run, "fleet", silent_s=60)
    before = run.list()
    listing = Bucket.list

    def fail(self, prefix=""):
        if prefix.startswith("fleets"):
            raise OSError("503")
        return listing(self, prefix)

    monkeypatch.setattr(Bucket, "list", fail)
    try:
        retention.collect(Needed(pub.named, oldest(pub)))
    except OSError:
        pass
    assert run.list() == before
    pub.close()
