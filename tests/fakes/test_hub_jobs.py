"""The fake Hub's jobs, as the real client sees them."""

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import HfApi, Volume
from huggingface_hub.errors import HfHubHTTPError, JobNotFoundError

from grpo_jax.generator.process import free_port
from tests.fakes.hub import FakeHub, Fault
from tests.jobs.harness import wait_for

TOKEN = "hf_tokenofthefakehubsjobs"
SECRET = "sesame-open-up"


class Hub:
    def __init__(self, server: FakeHub):
        self.server, self.api = server, HfApi(endpoint=server.url, token=TOKEN)

    def run(self, *command: str, **more):
        spec = {"image": "python:3.12", "flavor": "cpu-basic", "namespace": "someone", **more}
        return self.api.run_job(command=list(command), **spec).id

    def python(self, program: str, **more):
        return self.run("python", "-u", "-c", program, **more)

    def end(self, job: str) -> tuple[str, str | None]:
        """The stage and message that a job ends with."""
        info = self.api.wait_for_job(job_id=job, namespace="someone", timeout=60, poll_interval=0.05)
        return info.status.stage, info.status.message

    def logs(self, job: str, **more) -> list[str]:
        return list(self.api.fetch_job_logs(job_id=job, namespace="someone", **more))

    def reaches(self, job: str, stage: str) -> None:
        wait_for(lambda: self.server.jobs.all[job].stage == stage, 60, stage)

    def says(self, job: str, text: str) -> None:
        wait_for(lambda: text in self.server.jobs.all[job].log_text(), 60, text)

    def bucket(self, name: str) -> str:
        self.api.create_bucket(f"someone/{name}", private=True)
        return f"someone/{name}"

    def put(self, bucket: str, **files: bytes) -> None:
        self.api.batch_bucket_files(bucket, add=[(data, key) for key, data in files.items()])

    def files(self, bucket: str) -> set[str]:
        return {entry.path for entry in self.api.list_bucket_tree(bucket, recursive=True) if entry.type == "file"}


@pytest.fixture(scope="module")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    with FakeHub(tmp_path_factory.mktemp("hub"), token=TOKEN, page_size=3) as server:
        yield server
    assert server.jobs.leftovers() == {}


@pytest.fixture
def hub(_server: FakeHub) -> Iterator[Hub]:
    yield Hub(_server)
    _server.faults.clear()
    _server.jobs.never_starts = lambda spec: False
    _server.jobs.access, _server.jobs.grace_s = "write", 5.0
    for job in _server.jobs.billing():
        HfApi(endpoint=_server.url, token=TOKEN).cancel_job(job_id=job.id, namespace="someone")
    wait_for(lambda: not _server.jobs.leftovers(), 60, "the end of all processes")


def test_a_job_runs_to_its_end_and_its_log_is_kept(hub: Hub) -> None:
    job = hub.python("print('one'); print('two')", labels={"run": "r"}, env={"X": "1"})
    assert hub.end(job) == ("COMPLETED", None)
    assert hub.logs(job) == hub.logs(job, follow=True) == ["one", "two"]
    assert hub.logs(job, tail=1) == ["two"]
    info = hub.api.inspect_job(job_id=job, namespace="someone")
    assert info.started_at is not None
    assert info.created_at <= info.started_at <= info.finished_at
    assert info.environment == {"X": "1"}


def test_a_job_that_fails_says_with_what(hub: Hub) -> None:
    assert hub.end(hub.python("import nothing_of_the_kind")) == (
        "ERROR",
        "Job failed with exit code: 1. Reason: Error",
    )
    assert hub.end(hub.run("no-such-command"))[0] == "ERROR"
    assert hub.end(hub.python("import time; time.sleep(60)", timeout=1)) == ("ERROR", "Job timeout")


def test_a_log_is_followed_over_streams_that_break(hub: Hub) -> None:
    hub.server.jobs.broken_streams = 2
    # The client asks no more for what is missing once the job has ended, so this one waits for the last break.
    job = hub.python("import os, time\nprint(0)\nwhile not os.path.exists('go'): time.sleep(0.05)\nprint(1)")
    with ThreadPoolExecutor(1) as pool:
        followed = pool.submit(hub.logs, job, follow=True)
        wait_for(lambda: hub.server.jobs.broken_streams == 0, 60, "two breaks")
        (hub.server.jobs.all[job].folder / "1" / "go").touch()
        assert followed.result(60) == ["0", "1"]


def test_a_job_sees_its_own_environment_only(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_LAUNCHING_SHELL", "1")
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    job = hub.python(program, env={"MINE": "2"}, secrets={"PASSWORD": SECRET})
    hub.end(job)
    environment = json.loads(hub.logs(job)[0])
    assert environment["MINE"] == "2"
    assert environment["PASSWORD"] == SECRET
    assert environment["JOB_ID"] == job
    assert environment["HF_ENDPOINT"] == hub.server.url
    assert "OF_THE_LAUNCHING_SHELL" not in environment
    described = hub.api.inspect_job(job_id=job, namespace="someone")
    assert set(described.secrets) == {"PASSWORD"}
    assert SECRET not in str(described)
    where = [place for place, text in hub.server.jobs.texts() if SECRET in text]
    assert where == [f"log of {job}"]  # which says it on purpose, and is how a test would find out


def test_what_a_job_installs_stays_in_it_and_the_project_is_not_there_before(hub: Hub, tmp_path: Path) -> None:
    wheel = _wheel(tmp_path, "a_new_package")
    program = f"""
import subprocess, sys, importlib.util
assert importlib.util.find_spec("numpy") is not None
assert importlib.util.find_spec("grpo_jax") is None
subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", {str(wheel)!r}], check=True)
subprocess.run([sys.executable, "-c", "import a_new_package"], check=True)
"""
    job = hub.python(program)
    assert hub.end(job)[0] == "COMPLETED", hub.server.jobs.all[job].log_text()
    assert hub.end(hub.python("import a_new_package"))[0] == "ERROR"


def test_jobs_are_listed_by_stage_and_label_over_pages(hub: Hub) -> None:
    jobs = {hub.python("import time; time.sleep(60)", labels={"run": "listed", "i": str(i)}) for i in range(4)}
    ended = hub.python("", labels={"run": "listed", "i": "4"})
    hub.end(ended)
    for job in jobs:
        hub.reaches(job, "RUNNING")

    def found(**query) -> set[str]:
        return {job.id for job in hub.api.list_jobs(namespace="someone", **query)}

    assert found(labels={"run": "listed"}) == {*jobs, ended}
    assert found(labels={"run": "listed"}, status=["RUNNING", "SCHEDULING"]) == jobs
    assert found(labels={"run": "listed", "i": "4"}, status="COMPLETED") == {ended}
    assert found(labels={"run": "other"}) == set()


def test_a_cancelled_job_ends_with_all_that_it_started(hub: Hub) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    job = hub.python(
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True); "
        "print('up', flush=True); import time, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    )
    hub.says(job, "up")
    wait_for(lambda: len(hub.server.jobs.leftovers()) >= 3, 60, "the children")
    hub.server.jobs.grace_s = 0.5
    hub.api.cancel_job(job_id=job, namespace="someone")
    assert hub.end(job)[0] == "CANCELED"
    wait_for(lambda: hub.server.jobs.leftovers() == {}, 60, "the end of its processes")
    hub.api.cancel_job(job_id=job, namespace="someone")


def test_a_job_can_stay_in_scheduling_and_be_cancelled_there(hub: Hub) -> None:
    hub.server.jobs.never_starts = lambda spec: spec["labels"].get("role") == "generator"
    stuck = hub.python("print('ran')", labels={"role": "generator"})
    assert hub.end(hub.python("", labels={"role": "learner"}))[0] == "COMPLETED"
    assert hub.api.inspect_job(job_id=stuck, namespace="someone").status.stage == "SCHEDULING"
    assert [job.id for job in hub.server.jobs.billing()] == [stuck]
    hub.api.cancel_job(job_id=stuck, namespace="someone")
    assert hub.end(stuck)[0] == "CANCELED"
    hub.server.jobs.never_starts = lambda spec: False
    assert hub.logs(stuck, follow=True) == []


def test_a_preempted_job_fails_or_starts_again_under_its_id(hub: Hub) -> None:
    program = "import time; print('up'); time.sleep(600)"
    once, twice = hub.python(program), hub.python(program, attempts=2)
    for job in (once, twice):
        hub.says(job, "up")
        hub.server.jobs.preempt(job)
    assert hub.end(once) == ("ERROR", "Job was preempted")
    wait_for(lambda: hub.server.jobs.all[twice].log_text().count("up") == 2, 60, "the second attempt")
    assert hub.server.jobs.all[twice].stage == "RUNNING"


def test_a_mounted_bucket_and_the_api_show_the_same_objects(hub: Hub) -> None:
    bucket = hub.bucket("mounted")
    hub.put(bucket, **{"a/given.txt": b"given", "a/gone.txt": b"x"})
    program = """
import os, time
root = "/grpo-bucket"
print(open(f"{root}/a/given.txt").read())
os.makedirs(f"{root}/b", exist_ok=True)
open(f"{root}/b/made.bin", "wb").write(bytes(300000))
open(f"{root}/record.json", "w").write("1")
for i in range(200):  # as whoever wants them to appear whole writes files
    open(f"{root}/.temporary", "w").write(str(i))
    os.replace(f"{root}/.temporary", f"{root}/renamed")
    time.sleep(0.01)
os.unlink(f"{root}/a/gone.txt")
while not os.path.exists(f"{root}/a/later.txt"): time.sleep(0.05)
print(open(f"{root}/a/later.txt").read())
open(f"{root}/record.json", "w").write("22")
"""
    volume = Volume(type="bucket", source=bucket, mount_path="/grpo-bucket")
    job = hub.python(program, volumes=[volume])
    wait_for(lambda: {"b/made.bin", "record.json"} <= hub.files(bucket), 60, "what the job wrote")
    wait_for(lambda: "a/gone.txt" not in hub.files(bucket), 60, "what the job deleted")
    hub.put(bucket, **{"a/later.txt": b"from the other side"})
    assert hub.end(job)[0] == "COMPLETED", hub.server.jobs.all[job].log_text()
    assert hub.logs(job) == ["given", "from the other side"]
    assert hub.files(bucket) == {"a/given.txt", "a/later.txt", "b/made.bin", "record.json", "renamed"}
    reader = "import os; print(open('/data/record.json').read(), os.path.getsize('/data/b/made.bin'))"
    again = hub.python(reader, volumes=[Volume(type="bucket", source=bucket, mount_path="/data", read_only=True)])
    assert hub.end(again)[0] == "COMPLETED"
    assert hub.logs(again) == ["22 300000"]


def test_a_folder_of_a_bucket_is_mounted_and_a_read_only_mount_takes_nothing_back(hub: Hub) -> None:
    bucket = hub.bucket("folders")
    hub.put(bucket, **{"runs/x": b"1", "other/y": b"2"})
    volume = Volume(type="bucket", source=bucket, mount_path="/data", path="runs", read_only=True)
    job = hub.python("import os; print(os.listdir('/data')); open('/data/new', 'w')", volumes=[volume])
    assert hub.end(job)[0] == "COMPLETED"
    assert hub.logs(job) == ["['x']"]
    assert hub.files(bucket) == {"runs/x", "other/y"}


def test_an_exposed_port_is_reached_over_https_with_the_token_only(hub: Hub) -> None:
    (job, other) = (
        hub.run("python", "-m", "http.server", "8000", "--bind", "0.0.0.0", expose=[8000], env={"URL": _PUBLIC})
        for _ in range(2)
    )
    (url,) = hub.api.inspect_job(job_id=job, namespace="someone").status.expose_urls
    tls = ssl.create_default_context(cafile=str(hub.server.jobs.exposed.certificate))

    def get(token: str | None) -> int:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            with urllib.request.urlopen(urllib.request.Request(url, headers=headers), context=tls) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    wait_for(lambda: get(TOKEN) == 200, 60, "the server behind the port")
    assert get(None) == get("hf_other") == 401
    assert url.startswith("https://")
    hub.reaches(other, "RUNNING")
    hub.api.cancel_job(job_id=job, namespace="someone")
    hub.end(job)
    assert get(TOKEN) == 404


def test_addresses_of_a_container_stand_for_this_machine(hub: Hub) -> None:
    program = "import os; print(os.environ['URL']); print(os.environ['PEER']); print(os.environ['HOST'])"
    env = {"URL": _PUBLIC, "PEER": "http://{HF_NETWORK_GROUP_PREFIX}g0:8000", "HOST": "0.0.0.0"}
    job = hub.python(program, env=env, network_group="g", network_aliases=["g0"])
    hub.end(job)
    port = hub.server.jobs.all[job].ports[8000]
    exposed = hub.server.jobs.exposed.url
    assert hub.logs(job) == [f"{exposed}/{{JOB_ID}}/{{PORT}}", f"http://127.0.0.1:{port}", "127.0.0.1"]
    assert hub.api.inspect_job(job_id=job, namespace="someone").environment == env


@pytest.mark.parametrize("status", [401, 429, 500])
def test_faults_are_made_to_order(hub: Hub, status: int) -> None:
    hub.server.faults.append(Fault("POST /api/jobs/someone$", status, times=2))
    for _ in range(2):
        with pytest.raises(HfHubHTTPError) as error:
            hub.python("")
        assert error.value.response.status_code == status
    assert hub.end(hub.python(""))[0] == "COMPLETED"


def test_what_the_hub_refuses(hub: Hub) -> None:
    def status(call) -> int:
        with pytest.raises(HfHubHTTPError) as error:
            call()
        return error.value.response.status_code

    missing = Volume(type="bucket", source="someone/nothing", mount_path="/x")
    assert status(lambda: hub.python("", flavor="abacus")) == 400
    assert status(lambda: hub.python("", labels={"run": "with space"})) == 400
    assert status(lambda: hub.python("", volumes=[missing])) == 404
    assert status(lambda: hub.python("", namespace="somebody-else")) == 403
    for access in ("read", ["repo.write"]):
        hub.server.jobs.access = access
        assert status(lambda: hub.python("")) == 403
    stranger = HfApi(endpoint=hub.server.url, token="hf_expired")
    assert status(lambda: stranger.whoami()) == 401
    with pytest.raises(JobNotFoundError):
        hub.api.inspect_job(job_id="0" * 24, namespace="someone")


def test_who_one_is_and_what_hardware_there_is(hub: Hub) -> None:
    assert hub.api.whoami()["auth"]["accessToken"]["role"] == "write"
    hub.server.jobs.access = ["job.write"]
    scoped = hub.api.whoami()["auth"]["accessToken"]["fineGrained"]["scoped"]
    assert [scope["permissions"] for scope in scoped] == [["job.write"]]
    hardware = {each.name: each for each in hub.api.list_jobs_hardware()}
    assert hardware["cpu-basic"].accelerator is None
    assert hardware["a10g-small"].accelerator.vram == "24 GB"


def test_it_is_known_how_a_bucket_was_made(hub: Hub) -> None:
    assert hub.server.buckets.created[hub.bucket("made")] == {"visibility": "private"}


def test_a_hub_on_the_port_of_an_earlier_one_is_sent_everything_again(tmp_path: Path) -> None:
    """The client keeps in its cache what it has uploaded to an address, and uploads it there no more."""
    port = free_port("127.0.0.1")
    for life in ("first", "second"):
        with FakeHub(tmp_path / life, token=TOKEN, port=port) as server:
            hub = Hub(server)
            bucket = hub.bucket("same")
            hub.put(bucket, a=b"the same bytes")
            volume = Volume(type="bucket", source=bucket, mount_path="/data", read_only=True)
            job = hub.python("print(open('/data/a').read())", volumes=[volume])
            assert hub.end(job) == ("COMPLETED", None)
            assert hub.logs(job) == ["the same bytes"]


_PUBLIC = "https://{JOB_ID}--{PORT}.hf.jobs"


def _wheel(folder: Path, name: str) -> Path:
    """A wheel with one empty module, as pip wants it."""
    import zipfile

    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path
