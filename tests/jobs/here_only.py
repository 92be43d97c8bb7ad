"""A reward whose module can be imported where a run is launched, and not in a job."""

import os

from tests.plugins import even_first_token

if "JOB_ID" in os.environ:
    raise ImportError("no library of this name: here_only")

__all__ = ["even_first_token"]
