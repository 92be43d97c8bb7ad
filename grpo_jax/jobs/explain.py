"""`grpo-jax explain`: one sample, from its prompt to what it weighed."""

import json

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from grpo_jax.errors import EXIT_DONE
from grpo_jax.jobs.local import default_environment
from grpo_jax.jobs.show import run_decoder
from grpo_jax.observability.explain import explain, lines
from grpo_jax.storage.bucket import Bucket


def explain_sample(bucket: Bucket, sample_id: str, *, as_json: bool = False) -> int:
    """Prints what is on record of a sample of the run whose prefix is `bucket`; UsageError if there is none."""
    default_environment()
    told = explain(bucket, sample_id, run_decoder(bucket))
    if as_json:
        print(json.dumps(told, indent=1))
        return EXIT_DONE
    table = Table(Column("", no_wrap=True), Column("", overflow="fold"), show_header=False, box=None)
    for name, value in lines(told):
        table.add_row(Text(name), Text(value))
    Console().print(table)
    return EXIT_DONE
