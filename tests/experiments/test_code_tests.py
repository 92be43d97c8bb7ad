"""Code by its tests, in the real sandbox: what passes, what fails, and what a program cannot do."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.rewards import sandbox
from experiments.rewards.code_tests import passes_tests
from experiments.rewards.sandbox import Limits, Outcome, protections, run_python
from grpo_jax.rollouts.rewards import Completion

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox is Linux's")

DOUBLE = "def double(x):\n    return 2 * x\n"
TESTS = ["assert double(2) == 4", "assert double(-1) == -2"]
QUICK = Limits(cpu_s=1, wall_s=8.0, memory_mb=256, file_mb=1, processes=8)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the sandbox makes its directories: any user may go there, as to /tmp."""
    with tempfile.TemporaryDirectory(prefix="tests-of-the-sandbox-") as name:
        Path(name).chmod(0o755)
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def reward(text: str, tests: Any = TESTS, **args: Any) -> dict[str, float | None]:
    return passes_tests(Completion(text, [], "p", tests, {}, "stop"), **args)


def fenced(code: str) -> str:
    return f"<think>```python\nraise\n```</think>Here it is:\n```python\n{code}\n```\nDone."


def run(source: str, **limits: Any) -> Outcome:
    return run_python(source, limits=Limits(**{**QUICK.__dict__, **limits}))


@pytest.mark.parametrize("text", [DOUBLE, fenced(DOUBLE), fenced("print('noise', flush=True)\n" + DOUBLE)])
def test_right_code_passes_however_it_is_wrapped(text: str) -> None:
    assert reward(text) == {"reward": 1.0, "passed": 1.0}


def test_half_right_code_passes_half_of_the_tests() -> None:
    code = "def double(x):\n    return 4\n"
    assert reward(code) == {"reward": 0.0, "passed": 0.5}
    assert reward(code, partial=True) == {"reward": 0.5, "passed": 0.5}


@pytest.mark.parametrize(
    "code",
    [
        "def double(x): return 3 * x",
        "this is no code",
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        "import sys\nfor _ in TESTS: print('passed 2', file=sys.__stdout__)",
        "import __main__ as m; print(m.job['word'], len(m.job['tests']), file=m.report, flush=True)",
        "import __main__ as m, os\nfor name in dir(m): print(getattr(m, name), 2, file=os.fdopen(1, 'w'), flush=True)",
        "while True: pass",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    ],
)
def test_code_that_is_wrong_or_only_leaves_early_passes_nothing(code: str) -> None:
    assert reward(code, cpu_s=1) == {"reward": 0.0, "passed": 0.0}


def test_a_test_that_never_ends_does_not_take_back_those_before_it() -> None:
    tests = [TESTS[0], "while True: pass", TESTS[1]]
    assert reward(DOUBLE, tests, cpu_s=1, partial=True) == {"reward": 1 / 3, "passed": 1 / 3}


def test_programs_are_compared_by_what_they_print() -> None:
    code = "n = int(input())\nprint('\\n'.join(str(i) for i in range(n)))"
    tests = [{"input": "2\n", "output": "0\n1"}, {"input": "1", "output": "0 "}]
    assert reward(code, tests) == {"reward": 1.0, "passed": 1.0}
    assert reward(code, {"inputs": ["2", "1"], "outputs": ["0 1", "7"]}, partial=True)["passed"] == 0.5
    assert reward(code, '[{"input": "0", "output": ""}]')["reward"] == 1.0


def test_tests_and_setup_may_be_metadata() -> None:
    metadata = {"test_list": TESTS, "before": "import math"}
    found = passes_tests(
        Completion("def double(x): return math.prod((2, x))", [], "p", "no test", metadata, "stop"),
        tests="test_list",
        setup="before",
    )
    assert found["reward"] == 1.0


def test_a_problem_without_tests_is_not_scorable_and_bad_tests_are_found_beforehand() -> None:
    with pytest.raises(ValueError, match="no tests"):
        reward(DOUBLE, [])
    check = passes_tests.check_answer  # type: ignore[attr-defined]
    assert check(TESTS) is None
    assert check(TESTS[0]) is None
    assert "no Python" in check(["assert ("])
    assert "neither" in check([{"in": 1}])


# ---- the sandbox


def test_a_program_has_its_input_its_packages_and_an_empty_directory() -> None:
    found = run_python("import os, sys, numpy\nprint(sys.stdin.read(), os.listdir('.'), numpy.int8(3))", "in")
    assert (found.ended, found.stdout) == ("exit 0", "in [] 3\n")


@pytest.mark.parametrize(
    ("source", "ended"),
    [
        ("while True: pass", "SIGKILL"),  # of CPU seconds
        ("raise SystemExit(3)", "exit 3"),
        ("import os; os.abort()", "SIGABRT"),
        ("bytearray(10**10)", "exit 1"),
    ],
)
def test_how_a_program_ends(source: str, ended: str) -> None:
    assert run(source).ended == ended


def test_a_program_that_waits_is_stopped() -> None:
    assert run("import time; time.sleep(600)", wall_s=0.5).ended == "timeout"


def test_memory_and_files_have_limits() -> None:
    assert "MemoryError" in run("x = [0] * 10**9").stderr
    found = run("f = open('big', 'wb')\nfor _ in range(100): f.write(bytes(10**6))")
    assert "File too large" in found.stderr
    assert len(run("while True: print('x' * 10_000)").stdout) <= 1 << 20


def test_nothing_of_our_environment_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    source = (
        "import glob, os, sys\n"
        "print(dict(os.environ), sys.path)\n"
        "for path in glob.glob('/proc/*/environ'):\n"
        "    try: print(open(path).read())\n"
        "    except OSError: pass\n"
    )
    found = run(source)
    assert found.ended == "exit 0"
    assert "secretsecret" not in found.stdout
    assert "/nowhere" not in found.stdout
    if protections()["files"]:
        assert run("import os; print(os.listdir('/proc'))").stdout == "[]\n"


def test_files_of_the_home_are_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not protections()["files"]:
        pytest.skip("no namespaces here")
    home = folder / "home"
    home.mkdir()
    (home / "token").write_text("hf_secretsecret")
    source = f"import os; print(os.listdir({str(home)!r}))"
    assert run(source).stdout == "['token']\n"
    monkeypatch.setenv("HOME", str(home))
    assert run(source).stdout == "[]\n"
    # What lies in the home and is needed stays there.
    monkeypatch.setenv("HOME", str(folder))
    assert run("import os; print(os.listdir('.'))").stdout == "[]\n"


def test_there_is_no_network() -> None:
    if not protections()["network"]:
        pytest.skip("no namespaces here")
    source = "import socket\ns = socket.socket()\ns.settimeout(2)\ns.connect(('127.0.0.1', 9))"
    assert "Network is unreachable" in run(source).stderr


def test_a_fork_bomb_hits_its_limit(folder: Path) -> None:
    if not protections()["processes"]:
        pytest.skip("processes cannot be limited here")
    source = (
        "import os, time\n"
        "count = 0\n"
        "try:\n"
        "    while True:\n"
        "        if os.fork() == 0: time.sleep(600)\n"
        "        count += 1\n"
        "except BlockingIOError: print(count)\n"
    )
    found = run(source)
    assert 0 < int(found.stdout) < 64
    assert _alive(str(folder)) == []


def test_what_leaves_its_session_is_killed_all_the_same(folder: Path) -> None:
    source = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0: time.sleep(600)\n"
        "    os._exit(0)\n"
        "print('left')\n"
    )
    assert run(source).stdout == "left\n"
    assert _alive(str(folder)) == []


def test_without_namespaces_the_other_limits_hold_and_what_is_open_is_said(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    child = tmp_path / "child.py"
    source = sandbox._CHILD.read_text()
    child.write_text(source.replace("in_namespaces = _unshare()", "in_namespaces = False"))
    assert child.read_text() != source
    monkeypatch.setattr(sandbox, "_CHILD", child)
    protections.cache_clear()
    try:
        found = protections()
    finally:
        protections.cache_clear()
    assert (found["network"], found["files"]) == (False, False)
    assert "cannot restrict a program's network, files" in caplog.text
    assert run("while True: pass").ended == "SIGKILL"
    assert run("import time; time.sleep(600)", wall_s=0.5).ended == "timeout"
    left = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\nprint('left')"
    assert run(left).stdout == "left\n"
    assert _alive(str(folder)) == []


def test_a_killed_starter_leaves_nothing_behind(folder: Path) -> None:
    program = "from experiments.rewards.sandbox import *\nrun_python('import time; time.sleep(600)')"
    starter = subprocess.Popen(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[2], env={**os.environ, "TMPDIR": str(folder)}
    )
    while not list(folder.glob("*/stdout")):
        assert starter.poll() is None
    starter.kill()
    starter.wait()
    deadline = time.monotonic() + 60
    while _alive(str(folder)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _alive(word: str) -> list[str]:
    """Command lines of living processes with the word in them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in command and path.parent.name != str(os.getpid()):
            found.append(command)
    return found
