"""Server processes: stopped as a whole, restarted, given up with the reason."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from grpo_jax.errors import RunFailed, UsageError
from grpo_jax.generator import supervisor
from grpo_jax.generator.agent import run_generator
from grpo_jax.generator.lifeline import PARENT_PID
from grpo_jax.generator.process import ServerProcess, free_port, is_free, last_error_line
from grpo_jax.generator.stoppage import family
from grpo_jax.generator.supervisor import Supervisor
from grpo_jax.generator.vllm import Command
from tests.generator.agents import alive, wait_until_gone
from tests.generator.settings import make_config

# Starts a child, prints both pids, and (with "deaf") listens to no SIGTERM.
_FAMILY = """
import os, signal, subprocess, sys, time
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
deaf_child = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf_child])
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""
# Answers /health on the port it is given, until a file appears.
_HEALTHY = """
import http.server, os, sys, threading, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
while not os.path.exists(sys.argv[2]):
    time.sleep(0.02)
os._exit(3)
"""


def _command(code: str, *arguments: str) -> Command:
    return Command((sys.executable, "-c", code, *arguments), dict(os.environ))


@pytest.mark.parametrize("mode", ["polite", "deaf"])
def test_stop_ends_the_server_and_what_it_started(tmp_path, mode):
    log = tmp_path / "log"

    async def run() -> list[int]:
        process = await ServerProcess.start(_command(_FAMILY, mode), log)
        while len(log.read_text().split()) < 2:
            await asyncio.sleep(0.02)
        await process.stop(grace_s=0.3)
        return [int(pid) for pid in log.read_text().split()]

    assert not [pid for pid in asyncio.run(run()) if alive(pid)]


_LEAVES_FILES = """
import pathlib, tempfile, time
pathlib.Path(tempfile.gettempdir(), "left").write_text("")
print(tempfile.gettempdir(), flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("parent", ["", "x" * 80])
def test_temporary_files_of_a_server_go_with_it_and_leave_room_for_the_paths_of_sockets(tmp_path, monkeypatch, parent):
    log, folder = tmp_path / "log", tmp_path / parent
    folder.mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))

    async def run() -> Path:
        process = await ServerProcess.start(_command(_LEAVES_FILES), log)
        while not log.read_text():
            await asyncio.sleep(0.02)
        place = Path(log.read_text().strip())
        assert (place / "left").exists()
        await process.stop()
        return place

    place = asyncio.run(run())
    assert len(str(place)) + 37 <= 107
    assert not place.parent.exists()


def test_the_death_of_a_starter_is_noticed_even_before_the_server_asks_for_it():
    code = "from grpo_jax.generator.lifeline import *; die_with_parent(parent_pid_from_environment()); print('alive')"
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, PARENT_PID: "1"}, capture_output=True, text=True, check=False
    )
    assert run.returncode == -signal.SIGKILL
    assert run.stdout == ""


_FORKS = """
import os, sys, threading, time
from grpo_jax.generator.lifeline import let_forked_die_too

def fork(name, *names):
    if os.fork() == 0:
        os.write(1, f"{name} {os.getpid()}\\n".encode())
        if names:
            fork(*names)
        time.sleep(300)

let_forked_die_too()
thread = threading.Thread(target=fork, args=("of a thread",))
thread.start()
thread.join()
fork("child", "grandchild")
time.sleep(300)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the kernel of Linux")
def test_what_is_forked_from_the_main_thread_dies_with_its_parent_and_no_earlier():
    with subprocess.Popen([sys.executable, "-c", _FORKS], stdout=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline().rpartition(" ") for _ in range(3)]
        pids = {name: int(pid) for name, _, pid in lines}
        try:
            assert all(map(alive, pids.values())), "the thread has ended, the main one has not"
            process.kill()
            wait_until_gone([pids["child"], pids["grandchild"]])
            assert alive(pids["of a thread"])
        finally:
            os.kill(pids["of a thread"], signal.SIGKILL)


def test_free_ports_are_free_and_taken_ones_are_not():
    port = free_port("127.0.0.1")
    assert is_free("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", port)):
        assert not is_free("127.0.0.1", port)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("INFO fine\nValueError: too long\nINFO shutting down\n", "ValueError: too long"),
        ("prog: error: unrecognized arguments: --x\n", "prog: error: unrecognized arguments: --x"),
        ("one\ntwo\n\n", "two"),
        ("", "the log is empty"),
    ],
)
def test_the_line_that_names_the_error_is_quoted(tmp_path, text, line):
    (tmp_path / "log").write_text(text)
    assert last_error_line(tmp_path / "log") == line


def test_no_log_is_an_empty_log(tmp_path):
    assert last_error_line(tmp_path / "none") == "the log is empty"


def _supervisor(tmp_path: Path, session: aiohttp.ClientSession, code: str, **settings) -> Supervisor:
    def command(port: int, start: int) -> Command:
        return _command(code, str(port), str(tmp_path / f"die-{start}"))

    settings = {"host": "127.0.0.1", "port": 0, "start_timeout_s": 60.0} | settings
    return Supervisor(command, tmp_path / "server.log", session, **settings)


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def test_a_server_that_dies_is_started_again_on_the_same_port(tmp_path):
    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            subject = _supervisor(tmp_path, session, _HEALTHY)
            task = asyncio.create_task(subject.run())
            for start in range(3):
                await _until(lambda start=start: subject.life > start)
                ports.append(subject.port)
                assert subject.restarts == start
                (tmp_path / f"die-{start}").touch()
            await _until(lambda: subject.error is not None)
            assert "the server ended with exit code 3" in str(subject.error)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    ports: list[int] = []
    asyncio.run(run())
    assert len(set(ports)) == 1
    assert is_free("127.0.0.1", ports[0])


_WITH_CHILD = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print(child.pid, flush=True)
{_HEALTHY}
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells who is stopped")
@pytest.mark.parametrize("who", [0, 1])
def test_a_server_of_which_a_process_is_stopped_for_good_is_started_again(tmp_path, who):
    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            subject = _supervisor(tmp_path, session, _WITH_CHILD, hung_s=0.4)
            task = asyncio.create_task(subject.run())
            await _until(lambda: subject.life == 1)
            child = int((tmp_path / "server.log").read_text())
            server = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
            assert family(server) == [server, child]
            os.kill((server, child)[who], signal.SIGSTOP)
            await _until(lambda: subject.life == 2)
            assert not alive(server)
            assert not alive(child)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_a_port_that_is_taken_is_not_mistaken_for_our_server(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "_FIRST_PAUSE_S", 0.01)

    async def run(port: int) -> None:
        async with aiohttp.ClientSession() as session:
            subject = _supervisor(tmp_path, session, _HEALTHY, port=port)
            with pytest.raises(RunFailed):
                await subject.run()
            assert f"port {port} is taken" in str(subject.error)
            assert subject.life == 0

    with socket.create_server(("127.0.0.1", 0)) as other:
        asyncio.run(run(other.getsockname()[1]))


def test_a_server_that_never_gets_ready_is_given_up(tmp_path):
    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            subject = _supervisor(
                tmp_path, session, "import time; print('still loading'); time.sleep(60)", start_timeout_s=0.5
            )
            with pytest.raises(RunFailed, match=r"not ready after 0 s.*server\.log: (still loading|the log is empty)"):
                await subject.run()

    asyncio.run(run())


def test_five_failed_starts_end_the_agent_with_the_log_and_its_error(tmp_path, tiny_dir, monkeypatch):
    monkeypatch.setattr(supervisor, "_FIRST_PAUSE_S", 0.01)
    config = make_config(tmp_path / "bucket", tiny_dir, generator={"extra_args": ["--no-such-flag"]})
    with pytest.raises(RunFailed) as failure:
        run_generator([config], "r0", tmp_path / "work")
    message = str(failure.value)
    assert "did not start in 5 attempts" in message
    assert str(tmp_path / "work" / "reference-r0.log") in message
    assert "unrecognized arguments: --no-such-flag" in message


def test_a_model_that_does_not_exist_is_a_usage_error(tmp_path, tiny_dir):
    config = make_config(tmp_path / "bucket", tmp_path / "nowhere" / "at" / "all")
    with pytest.raises(UsageError, match="neither an existing directory"):
        run_generator([config], "r0", tmp_path / "work")


def test_a_wildcard_host_needs_an_address_for_others(tmp_path, tiny_dir):
    config = make_config(tmp_path / "bucket", tiny_dir, generator={"host": "0.0.0.0"})
    with pytest.raises(UsageError, match="wildcard"):
        run_generator([config], "r0", tmp_path / "work")
