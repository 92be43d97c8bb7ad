import uuid
from pathlib import Path

import pytest

from grpo_jax.storage.bucket import Bucket


@pytest.fixture(params=["file", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Bucket:
    """An empty bucket, once as a directory and once as an object store."""
    if request.param == "file":
        return Bucket(str(tmp_path / "bucket"))
    return Bucket(f"memory://{uuid.uuid4().hex}")
