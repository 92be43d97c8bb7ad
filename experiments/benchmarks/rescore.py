"""How far are the sampler's log-probabilities from the learner's? `python -m experiments.benchmarks.rescore RUN`

Scores all samples of a finished run again, in the run's dtype, under the adapter that each of them names. The run must
have kept them: `retention.adapters=all`. The last line is JSON: tokens, mean and max of |log π − log μ|.
"""

import argparse
import json

import numpy as np

from grpo_jax.adapters.manifest import AdapterError
from grpo_jax.config.load import parse_config
from grpo_jax.jobs.run import place
from grpo_jax.learner.rescore import rescore
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordReader
from grpo_jax.storage.spool import SpoolReader


def main() -> None:
    parser = argparse.ArgumentParser(description="Scores the samples of a run again under their own adapters.")
    parser.add_argument("run", help="a run directory")
    arguments = parser.parse_args()
    run = Bucket(arguments.run)
    record = RecordReader(run, layout.RUN).read()
    if record is None:
        raise SystemExit(f"{arguments.run} is not a run")
    config, _ = place(parse_config(record["config"], layout.RUN), arguments.run)
    try:
        scored = rescore(config, SpoolReader(run).poll())
    except AdapterError as error:
        raise SystemExit(f"{error}; a run to be scored again has to keep them: retention.adapters=all") from None
    for policy in scored:
        delta = policy.delta
        print(f"{policy.policy}  norm {policy.norm:7.3f}  {len(delta):5d} tokens", end="")
        print(f"  mean {delta.mean():.2e}  max {delta.max():.2e}")
    delta = np.concatenate([policy.delta for policy in scored])
    print(json.dumps({"tokens": len(delta), "mean": float(delta.mean()), "max": float(delta.max())}))


if __name__ == "__main__":
    main()
