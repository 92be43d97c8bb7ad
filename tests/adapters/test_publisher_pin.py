"""What a publisher keeps loaded beside the window, and how a checkpoint learns of the version being published."""

import threading

from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordReader
from tests.adapters.test_publisher import LOGPROBS, lora, publisher


def test_a_pinned_policy_stays_in_the_window_as_its_last(tmp_path):
    run = Bucket(str(tmp_path))
    pub = publisher(run, pin=lambda version, lineage: lineage[0] if version < 4 else None)
    windows = []
    for version in range(5):
        pub.submit(version, version, lora(1 + version), LOGPROBS)
        assert pub.flush(30)
        pointer = RecordReader(run, "policy.json").read()
        windows.append([int(name.split(".v")[1][:6]) for name in pointer["window"]])
        assert pointer["current"] == pub.current == pointer["window"][0]
    assert windows == [[0], [1, 0], [2, 1, 0], [3, 2, 0], [4, 3]]
    assert pub.paced == {pub.lineage[3], pub.lineage[4]}
    pub.close()


def test_a_version_that_is_being_published_is_waited_for(tmp_path, monkeypatch):
    gate, put = threading.Event(), Bucket.put

    def gated(self, key, data):
        gate.wait(60)
        put(self, key, data)

    monkeypatch.setattr(Bucket, "put", gated)
    pub = publisher(Bucket(str(tmp_path)))
    pub.submit(3, 3, lora(), LOGPROBS)
    pub.settle(3, timeout_s=0.0)
    assert 3 not in pub.lineage
    gate.set()
    pub.settle(3, timeout_s=60)
    assert 3 in pub.lineage
    pub.settle(2, timeout_s=60)  # one that was skipped will never be there
    pub.close()
