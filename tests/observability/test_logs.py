import io
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_jax.observability.logs import configure_logging, mask_secrets
from grpo_jax.proxy.tokens import CLIENT_TOKEN_VARIABLE, TOKEN_VARIABLE

log = logging.getLogger("tests.logs")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in [h for h in root.handlers if h not in handlers]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    logging.captureWarnings(False)


def test_a_line_has_time_role_and_level(tmp_path: Path) -> None:
    configure_logging("generator-0 100%", tmp_path / "logs" / "generator.log")
    log.info("loaded %s", "v1")
    line = (tmp_path / "logs" / "generator.log").read_text()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z generator-0 100% INFO tests\.logs: loaded v1\n", line)


def test_without_a_path_it_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("proxy", None)
    log.warning("careful")
    captured = capsys.readouterr()
    assert "proxy WARNING tests.logs: careful" in captured.err
    assert captured.out == ""


def test_a_display_that_redirects_stderr_gets_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    configure_logging("run", None)
    redirected = io.StringIO()
    monkeypatch.setattr("sys.stderr", redirected)
    log.warning("careful")
    assert redirected.getvalue().endswith("careful\n")


def test_secrets_are_masked_in_messages_arguments_and_tracebacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "hf_correcthorse")
    monkeypatch.setenv(CLIENT_TOKEN_VARIABLE, "open-sesame")
    monkeypatch.setenv("aws_secret_access", "battery/staple")
    monkeypatch.setenv("MY_PASSWORD_FILE", "hf_correcthorse-and-more")
    configure_logging("worker", tmp_path / "log")

    def inner() -> None:
        raise RuntimeError("401 for Bearer hf_correcthorse")

    try:
        inner()
    except RuntimeError:
        log.exception("asking with %s", "battery/staple")
    log.info("hf_correcthorse-and-more")
    log.info("asked with Bearer %s", "open-sesame")
    text = (tmp_path / "log").read_text()
    assert "401 for Bearer ***" in text
    assert "asking with ***" in text
    assert "asked with Bearer ***" in text
    for secret in ("hf_correcthorse", "battery", "and-more", "sesame"):
        assert secret not in text


def test_short_and_ordinary_values_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("SOME_DIRECTORY", "/a/long/directory")
    assert mask_secrets("false in /a/long/directory") == "false in /a/long/directory"


def test_configuring_again_does_not_double_the_lines(tmp_path: Path) -> None:
    configure_logging("learner", tmp_path / "first")
    configure_logging("learner", tmp_path / "second")
    log.info("once")
    assert (tmp_path / "first").read_text() == ""
    assert (tmp_path / "second").read_text().count("once") == 1
