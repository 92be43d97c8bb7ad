import json

import pytest
from yarl import URL

from grpo_jax.proxy.addresses import may_be_sent_token, replica_url
from grpo_jax.proxy.answers import ReplicaFault, judge
from tests.proxy.harness import V0, V1
from tests.proxy.replica import completion, openai_error


def test_a_completion_under_the_right_name_is_an_answer() -> None:
    assert judge(200, json.dumps(completion(V0)).encode(), V0)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_an_error_of_the_request_passes_only_as_an_openai_object(status: int) -> None:
    assert not judge(status, openai_error("too long").encode(), V0)
    for body in (b'{"detail": "no"}', b'{"error": "no"}', b'{"error": {}}', b"<html>", b""):
        with pytest.raises(ReplicaFault) as fault:
            judge(status, body, V0)
        assert not fault.value.policy_only


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"null",
        b"{}",
        json.dumps(completion(V0, choices=[])).encode(),
        json.dumps(completion(V0, choices={"0": {}})).encode(),
        json.dumps(completion(V1)).encode(),
        json.dumps(completion("smollm2")).encode(),
        json.dumps(completion(V0)).encode()[:-1],
        json.dumps(completion(V0)).encode().replace(b'"index": 0', b'"index": NaN'),
        openai_error("200 with an error").encode(),
        b"[" * 200_000,
        b"\xff\xfe",
    ],
)
def test_what_is_no_completion_of_the_policy_is_a_fault(body: bytes) -> None:
    with pytest.raises(ReplicaFault) as fault:
        judge(200, body, V0)
    assert not fault.value.policy_only


@pytest.mark.parametrize("status", [301, 401, 403, 408, 429, 500, 502, 503])
def test_other_statuses_are_faults_of_the_replica(status: int) -> None:
    with pytest.raises(ReplicaFault, match=str(status)) as fault:
        judge(status, openai_error("secret text of the request").encode(), V0)
    assert not fault.value.policy_only
    assert "secret" not in str(fault.value)


def test_a_404_denies_the_policy_only_if_a_model_server_says_so() -> None:
    with pytest.raises(ReplicaFault) as fault:
        judge(404, openai_error("no such model").encode(), V0)
    assert fault.value.policy_only
    with pytest.raises(ReplicaFault) as fault:  # a gateway in front of a server that is gone
        judge(404, b"<html>not found</html>", V0)
    assert not fault.value.policy_only


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000/"),
        ("https://job--8000.hf.jobs", "https://job--8000.hf.jobs/"),
        ("https://gateway.example/replica/3/v1", "https://gateway.example/replica/3"),
    ],
)
def test_addresses_of_replicas(text: str, url: str) -> None:
    assert replica_url(text) == URL(url)


@pytest.mark.parametrize(
    "text",
    ["", "127.0.0.1:8000", "file:///etc/passwd", "ftp://a", "http://", "http://u:hunter2@a", "http://hunter2@a",
     "http://a?token=hunter2", "http://a#hunter2", "http://[::1", "http://a:hunter2",
     "http://[fe80::1%é]:80", "http://a\0b:80"],
)  # fmt: skip
def test_other_addresses_are_refused_without_being_quoted(text: str) -> None:
    with pytest.raises(ValueError, match=r"URL|expected http|a host with") as error:
        replica_url(text)
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://job--8000.hf.jobs", True),
        ("https://JOB--8000.HF.jobs", True),
        ("http://job--8000.hf.jobs", False),
        ("https://hf.jobs.evil.example", False),
        ("https://evil.example/x.hf.jobs", False),
        ("https://127.0.0.1", False),
    ],
)
def test_the_token_goes_to_listed_https_hosts_only(url: str, allowed: bool) -> None:
    assert may_be_sent_token(URL(url), ["*.hf.jobs"]) == allowed
    assert not may_be_sent_token(URL(url), [])


@pytest.mark.parametrize("logprobs", [[], [-1.0], [-1.0, -2.0, -3.0]])
def test_another_number_of_log_probabilities_than_of_tokens_is_a_fault(logprobs: list[float]) -> None:
    choice = {"index": 0, "text": "12", "token_ids": [1, 2], "logprobs": {"token_logprobs": logprobs}}
    with pytest.raises(ReplicaFault, match="another number"):
        judge(200, json.dumps(completion(V0, choices=[choice])).encode(), V0)


def test_what_was_not_asked_for_is_not_missed() -> None:
    for logprobs in (None, {"token_logprobs": [-1.0, -2.0]}, {"content": []}):
        choice = {"index": 0, "text": "12", "token_ids": None, "logprobs": logprobs}
        body = json.dumps(completion(V0, choices=[choice])).encode()
        assert judge(200, body, V0)
        with pytest.raises(ReplicaFault, match="without token ids"):
            judge(200, body, V0, with_tokens=True)
