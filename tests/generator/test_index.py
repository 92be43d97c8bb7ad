"""Which directories the index lets a server take: those of proved policies inside the folder, and no other."""

import json
from pathlib import Path

import pytest

from grpo_jax.generator.index import INDEX, found, indexed, run_folder, write_index

NAME, OTHER = "r.v000001.0123abcd", "r.v000002.0123abcd"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "adapters"
    for name in (NAME, OTHER):
        (folder / name).mkdir(parents=True)
    return folder


def test_what_is_written_is_found_and_nothing_else(folder):
    assert indexed(folder, NAME) is None
    write_index(folder, [NAME])
    assert indexed(folder, NAME) == str(folder / NAME)
    assert indexed(folder, OTHER) is None
    write_index(folder, [OTHER])
    assert indexed(folder, NAME) is None
    assert {path.name for path in folder.iterdir()} == {NAME, OTHER, INDEX}


def test_each_run_has_an_index_of_its_own(tmp_path):
    other = "another-run.v000001.0123abcd"
    for run, name in (("r", NAME), ("another-run", other)):
        (run_folder(tmp_path, run) / name).mkdir(parents=True)
        write_index(run_folder(tmp_path, run), [NAME, other])
    assert found(tmp_path, NAME) == str(tmp_path / "r" / NAME)
    assert found(tmp_path, other) == str(tmp_path / "another-run" / other)
    assert found(tmp_path, "nobody.v000001.0123abcd") is None
    assert found(tmp_path, "../r") is None


def test_a_directory_that_is_gone_or_a_link_is_not_given(folder, tmp_path):
    write_index(folder, [NAME, OTHER])
    (folder / NAME).rmdir()
    (folder / OTHER).rmdir()
    (tmp_path / "elsewhere").mkdir()
    (folder / OTHER).symlink_to(tmp_path / "elsewhere")
    assert indexed(folder, NAME) is None
    assert indexed(folder, OTHER) is None


@pytest.mark.parametrize(
    "content",
    [
        {"../x": "{folder}/../x"},
        {"x": "{folder}/x"},
        {NAME: "{folder}/" + OTHER},
        {NAME: "{folder}"},
        {NAME: "{folder}/../outside/" + NAME},
        {NAME: 5},
        {NAME: None},
        [NAME],
        "r",
        5,
    ],
)
def test_a_forged_or_broken_index_gives_nothing(folder, tmp_path, content):
    for path in (tmp_path / "x", folder / "x", tmp_path / "outside" / NAME):
        path.mkdir(parents=True)
    (folder / INDEX).write_text(json.dumps(content).replace("{folder}", str(folder)))
    for name in ("../x", "x", NAME, "", "a/b", f"{NAME}/../{OTHER}"):
        assert indexed(folder, name) is None


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"null"])
def test_a_torn_index_gives_nothing(folder, data):
    (folder / INDEX).write_bytes(data)
    assert indexed(folder, NAME) is None
