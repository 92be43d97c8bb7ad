"""What a launch asks of the Hub, and what it decides, without a Hub."""

import importlib.metadata
import io
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from grpo_jax.config.jobs import Jobs
from grpo_jax.config.schema import Config
from grpo_jax.errors import UsageError
from grpo_jax.jobs import launch_start
from grpo_jax.jobs.hub_logs import JobLogs
from grpo_jax.jobs.launch_package import build_files, build_wheel
from grpo_jax.jobs.launch_show import print_plan
from grpo_jax.jobs.launch_spec import (
    LEARNER,
    Launch,
    Target,
    bucket_at,
    labels_of,
    role_config,
    secret_values,
    slots,
    spec_of,
)
from grpo_jax.jobs.launch_state import Desired, LaunchState
from grpo_jax.jobs.preflight import look_at_config, token_problems
from grpo_jax.storage.bucket import Bucket
from tests.jobs.harness import tiny_config

TOKEN = "hf_atokenthatnobodymaysee"
LAUNCH = Launch("ab12", "tiny/launch/files/0123", "grpo_jax-0.1.0-py3-none-any.whl", labels_of("b", "tiny"))


def config_of(run: str = "tiny", **jobs: Any) -> Config:
    raw = tiny_config(Path("/models/tiny"), "hf://buckets/someone/bucket/folder", run=run, jobs=jobs)
    return Config.model_validate({**raw, "generator": {"replicas": 2}})


def test_no_spec_holds_the_value_of_a_secret() -> None:
    config = config_of(learner={"secrets": ["JUDGE_KEY"], "env": ["CITY"]})
    environ = {"HF_TOKEN": TOKEN, "JUDGE_KEY": "sk-alsosecret", "CITY": "Bern"}
    specs = [spec_of(config, slot, LAUNCH, environ) for slot in slots(2)]
    assert TOKEN not in repr(specs)
    assert "sk-alsosecret" not in repr(specs)
    learner = specs[-1]
    assert learner.env["CITY"] == "Bern"
    assert secret_values(learner, environ, TOKEN) == {
        "HF_TOKEN": TOKEN,
        "GRPO_JAX_TOKEN": TOKEN,
        "JUDGE_KEY": "sk-alsosecret",
    }
    assert secret_values(learner, {**environ, "GRPO_JAX_TOKEN": "other"}, TOKEN)["GRPO_JAX_TOKEN"] == "other"


def test_a_variable_that_is_not_set_is_named() -> None:
    config = config_of(generator={"env": ["NOT_SET"]}, learner={"secrets": ["NEITHER"]})
    with pytest.raises(UsageError, match=r"jobs\.generator\.env: NOT_SET"):
        spec_of(config, "generator-0", LAUNCH, {})
    assert any("NEITHER" in problem for problem in look_at_config(config, {}).problems)


@pytest.mark.parametrize("run", ["a", "0_" + "x" * 61, "a-b_c" + "-" * 58])
def test_labels_groups_and_aliases_are_what_the_hub_admits(run: str) -> None:
    config = config_of(run, network="group")
    launch = replace(LAUNCH, labels=Target.run(config).labels)
    seen = set()
    for slot in slots(12):
        spec = spec_of(config, slot, launch, {})
        for text in (*spec.labels, *spec.labels.values()):
            assert re.fullmatch(r"[A-Za-z0-9_-]{1,100}", text), text
        assert re.fullmatch(r"[a-z0-9-]{1,46}", spec.network_group or "")
        assert all(re.fullmatch(r"[a-z0-9-]{1,34}", alias) for alias in spec.network_aliases)
        seen.update(spec.network_aliases)
        again = spec_of(config, slot, launch, {})
        assert spec.network_aliases != again.network_aliases or slot == LEARNER
    assert len(seen) == 12


def test_runs_of_one_name_in_two_buckets_have_other_labels() -> None:
    assert labels_of("hf://buckets/a/b", "r") == labels_of("hf://buckets/a/b/", "r")
    assert labels_of("hf://buckets/a/b", "r") != labels_of("hf://buckets/a/c", "r")


def test_only_generators_are_exposed_and_only_the_learner_holds_the_fleets_token() -> None:
    specs = {slot: spec_of(config_of(), slot, LAUNCH, {}) for slot in slots(1)}
    assert specs["generator-0"].expose == [8000]
    assert specs[LEARNER].expose == []
    assert "GRPO_JAX_TOKEN" not in specs["generator-0"].secrets
    grouped = spec_of(config_of(network="group"), "generator-0", LAUNCH, {})
    assert grouped.expose == []


def test_the_learner_may_send_its_token_to_exposed_ports_and_starts_no_generator() -> None:
    config = config_of().model_copy(update={"fleet": config_of().fleet.model_copy(update={"allowed_hosts": ["b.org"]})})
    learner = role_config(config, LEARNER)
    assert learner.fleet.allowed_hosts == ["b.org", "*.hf.jobs"]
    assert learner.generator.replicas == 0
    grouped = role_config(config_of(network="group"), LEARNER)
    assert grouped.fleet.allowed_hosts == []


def test_a_mounted_bucket_is_a_volume_and_no_url() -> None:
    mounted = spec_of(config_of(mount=True), LEARNER, LAUNCH, {})
    assert mounted.mount == bucket_at("hf://buckets/someone/bucket/folder")
    assert mounted.env["GRPO_JAX_BUCKET"] == "/bucket"
    plain = spec_of(config_of(), LEARNER, LAUNCH, {})
    assert plain.mount is None
    assert plain.env["GRPO_JAX_BUCKET"] == "hf://buckets/someone/bucket/folder"


@pytest.mark.parametrize("url", ["runs", "gs://bucket/runs", "hf://buckets/someone", "hf://someone/x/y"])
def test_a_bucket_that_jobs_cannot_share_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="bucket"):
        bucket_at(url)


@pytest.mark.parametrize(
    ("section", "word"),
    [
        ({"learner": {"image": "python"}}, "tag"),
        ({"generator": {"image": "vllm/vllm-openai:latest"}}, "latest"),
        ({"learner": {"env": ["WANDB_API_KEY"]}}, "secrets"),
        ({"learner": {"secrets": ["HF_TOKEN"]}}, "launcher"),
        ({"learner": {"timeout": "long"}}, "90m"),
    ],
)
def test_sections_that_are_refused(section: dict, word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        Jobs.model_validate(section)


def test_the_plan_shows_names_and_prices(capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(prices={"l4x1": 0.8, "a100-large": 2.5}, learner={"secrets": ["JUDGE_KEY"]})
    print_plan(Target.run(config), {"JUDGE_KEY": "sk-alsosecret", "HF_TOKEN": TOKEN})
    text = capsys.readouterr().out
    assert "sk-alsosecret" not in text
    assert "JUDGE_KEY" in text
    assert text.endswith("all jobs, an hour: 4.10 USD\n")
    print_plan(Target.run(config_of(prices={"l4x1": 0.8})), {})
    assert "unknown" in capsys.readouterr().out.splitlines()[-1]


def test_the_wheel_is_the_package_and_the_same_each_time(tmp_path: Path) -> None:
    name, data = build_wheel()
    assert build_wheel() == (name, data)
    (tmp_path / name).write_bytes(data)
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet", "--target", "site", name]
    subprocess.run(pip, cwd=tmp_path, check=True, timeout=120)
    program = (
        "import importlib.metadata as m, grpo_jax.cli\n"
        "print(grpo_jax.__file__, m.version('grpo_jax'))\n"
        "print(*(e.name for e in m.entry_points(group='vllm.general_plugins')))"
    )
    environ = {"PYTHONPATH": str(tmp_path / "site"), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    where, version, *plugins = done.stdout.split()
    assert where == str(tmp_path / "site/grpo_jax/__init__.py")
    assert version == name.split("-")[1]
    assert "grpo_jax" in plugins


def test_the_users_code_goes_along_and_nothing_hidden(tmp_path: Path) -> None:
    for name in ("rewards/one.py", "rewards/.env", "rewards/__pycache__/one.pyc", "other/two.py", "tasks.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    plugins = {"rewards": [{"source": "rewards.one:f"}], "task": {"source": "tasks:g"}}
    raw = tiny_config(Path("/m"), "hf://buckets/someone/bucket", **plugins)
    first = build_files([Config.model_validate(raw)], tmp_path)
    assert sorted(zipfile.ZipFile(io.BytesIO(first.contents["code.zip"])).namelist()) == ["rewards/one.py", "tasks.py"]
    (tmp_path / "tasks.py").write_text("changed")
    assert build_files([Config.model_validate(raw)], tmp_path).folder != first.folder
    outside = Config.model_validate({**raw, "jobs": {"code": ["../elsewhere"]}})
    with pytest.raises(UsageError, match=r"jobs\.code"):
        build_files([outside], tmp_path)


def test_a_generators_image_keeps_its_packages(tmp_path: Path) -> None:
    """A package of any version stays; only what is not there at all is asked for, and without its dependencies."""
    asked: list[tuple[str, ...]] = []
    wanted = ["numpy>=999", "pydantic", "surely-not-installed-anywhere>=1"]
    # It is not installed here either, so what it needs in its turn cannot be looked up.
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        launch_start.complete(wanted, lambda *words: asked.append(words), keep=True)
    assert asked == [("--no-deps", "surely-not-installed-anywhere>=1")]


def test_extras_that_name_their_own_package_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "toy_package-1.0.dist-info"
    info.mkdir()
    lines = ["always>=1", 'small>2 ; extra == "a"', 'Toy.Package[a] ; extra == "b"', 'never ; python_version < "3"']
    head = "Metadata-Version: 2.1\nName: toy_package\nVersion: 1.0\n"
    (info / "METADATA").write_text(head + "".join(f"Requires-Dist: {line}\n" for line in lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert launch_start.requirements("toy_package", set()) == ["always>=1"]
    assert launch_start.requirements("toy_package", {"b"}) == ["always>=1", "small>2"]


def test_a_learners_image_gets_what_is_too_old_as_well() -> None:
    asked: list[tuple[str, ...]] = []
    launch_start.complete(["numpy>=999", "pydantic"], lambda *words: asked.append(words), keep=False)
    assert asked == [("--upgrade", "numpy>=999")]
    asked.clear()
    launch_start.complete(["numpy", "pydantic>=2"], lambda *words: asked.append(words), keep=False)
    assert asked == []


def test_a_replica_is_named_by_its_slot_and_job_and_says_where_it_is_reached(tmp_path: Path) -> None:
    environ = {
        **spec_of(config_of(), "generator-1", LAUNCH, {}).env,
        "JOB_ID": "687fb701029421ae5549d998",
    }
    words = launch_start.role_arguments(environ, ["a.json", "b.json"], "work")
    assert [words[i + 1] for i, word in enumerate(words) if word == "--config"] == ["a.json", "b.json"]
    assert words[words.index("--url") + 1] == "https://687fb701029421ae5549d998--8000.hf.jobs"
    assert words[words.index("--id") + 1] == "generator-1-687fb701029421ae5549d998"
    grouped = spec_of(config_of(network="group"), "generator-1", LAUNCH, {})
    words = launch_start.role_arguments({**grouped.env, "HF_NETWORK_GROUP_PREFIX": "p-"}, ["a.json"], "work")
    assert words[words.index("--url") + 1] == f"http://p-{grouped.network_aliases[0]}:8000"


def test_desired_and_launcher_are_records_that_the_newest_writer_owns(tmp_path: Path) -> None:
    run = Bucket(str(tmp_path)).child("tiny")
    config = config_of()
    first, second = LaunchState(run), LaunchState(run)
    assert first.launch() is None
    first.write_launch([config], LAUNCH)
    assert second.launch() == ((config,), LAUNCH)
    first.want(Desired("running", 2))
    second.want(Desired("cancelled", 2))
    first.want(Desired("running", 3))
    assert second.desired() == Desired("running", 3)
    first.claim()
    assert first.beat()
    assert second.attached()
    second.claim()
    assert not first.beat()
    first.leave()
    assert LaunchState(run).attached()
    second.leave()
    assert not LaunchState(run).attached()


def test_each_line_of_a_log_is_shown_once_however_often_the_stream_breaks() -> None:
    lines = [f"line {i}" for i in range(7)]
    breaks = iter([0, 3, 3])
    seen: list[str] = []

    def logs(job_id: str, follow: bool) -> Iterator[str]:
        """Of a job that ends when its stream breaks for the last time: the client then takes that for its end."""
        until = next(breaks, 5) if follow else len(lines)
        yield from lines[:until]
        if until < 5:
            raise ConnectionError("lost")

    followed = JobLogs(logs, lambda slot, line: seen.append(f"{slot} {line}"), first_wait_s=0.01)
    followed.follow("job", "learner", from_start=True)
    followed.wait("job", 60)
    assert seen == [f"learner {line}" for line in lines]
    assert followed.last_line("job") == "line 6"


def _me(role: str, permissions: list[str] | None = None) -> dict[str, Any]:
    token: dict[str, Any] = {"role": role}
    if permissions is not None:
        entity = {"type": "user", "name": "someone"}
        token["fineGrained"] = {"global": [], "scoped": [{"entity": entity, "permissions": permissions}]}
    return {"name": "someone", "orgs": [{"name": "lab"}], "auth": {"accessToken": token}}


@pytest.mark.parametrize(
    ("me", "owner", "words"),
    [
        (_me("write"), "someone", []),
        (_me("write"), "lab", []),
        (_me("write"), "stranger", ["jobs.namespace", "bucket"]),
        (_me("read"), "someone", ["read"]),
        (_me("fineGrained", ["job.write", "repo.write"]), "someone", []),
        (_me("fineGrained", ["repo.write"]), "someone", ["job.write"]),
        (_me("fineGrained", []), "someone", ["job.write", "repo.write"]),
        ({"name": "someone"}, "someone", []),
    ],
)
def test_a_token_is_judged_by_what_the_hub_says_of_it(me: dict, owner: str, words: list[str]) -> None:
    problems = token_problems(me, owner, owner)
    assert len(problems) == len(words)
    assert all(word in problem for word, problem in zip(words, problems, strict=True))


def test_a_generator_environment_with_a_secret_is_refused() -> None:
    config = config_of()
    told = config.model_copy(update={"generator": config.generator.model_copy(update={"env": {"JUDGE_KEY": "x"}})})
    assert any("JUDGE_KEY" in problem for problem in look_at_config(told, {}).problems)
    assert look_at_config(config, {}).problems == []
