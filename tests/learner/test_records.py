import pytest

from grpo_jax.errors import RunFailed
from grpo_jax.learner.records import persist


def test_a_bucket_that_never_works_again_ends_the_run_in_one_sentence(monkeypatch):
    monkeypatch.setattr("grpo_jax.learner.records._RETRY_S", 0.0)

    def fail():
        raise OSError("503")

    with pytest.raises(RunFailed, match="reading the spool has failed for 0 s: 503"):
        persist("reading the spool", fail, lambda: None, give_up_s=0.0)
