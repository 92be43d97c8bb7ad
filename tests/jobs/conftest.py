import pytest

from tests.jobs.harness import Command, tiny_config
from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def finished(tiny_model, tmp_path_factory):
    """A run from start to end: its folder, the answer of the command, and the processes alive after it."""
    folder = tmp_path_factory.mktemp("finished")
    command = Command(tiny_config(tiny_model, folder / "bucket"), folder)
    answer = command.wait()
    return folder, answer, command.processes()
