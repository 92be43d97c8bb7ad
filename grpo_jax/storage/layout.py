"""Where everything lies. Run keys are relative to `<bucket>/<run>/`, fleet keys to `<bucket>/`."""

RUN = "run.json"
POLICY = "policy.json"
LEARNER_STATE = "learner/state.json"
ADAPTERS = "adapters"
ROLLOUTS = "rollouts"
WORKERS = "workers"
BATCHES = "batches"
CHECKPOINTS = "checkpoints"
INCARNATIONS = "incarnations"
EVALUATIONS = "evaluations"
METRICS = "learner"
DELETED = "learner/deleted.json"
LAUNCH = "launch"

# All that a run consists of; the files after policy.json are there only when the bucket is a directory.
RUN_FOLDERS = (
    ADAPTERS,
    ROLLOUTS,
    WORKERS,
    BATCHES,
    CHECKPOINTS,
    INCARNATIONS,
    EVALUATIONS,
    METRICS,
    "logs",
    "generators",
    LAUNCH,
)
RUN_FILES = (RUN, POLICY, "config.json", "metrics.jsonl", "report.html", "reward.png")

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
MANIFEST = "manifest.json"

# Why a group that is sound and fresh is not trained: all its rewards are equal, and its prompt is not drawn again.
ZERO_VARIANCE = "zero_variance"


def adapter(name: str, file: str) -> str:
    return f"{ADAPTERS}/{name}/{file}"


def rollout(worker: str, group: str) -> str:
    return f"{ROLLOUTS}/{worker}/{group}.safetensors"


def worker_state(worker: str) -> str:
    return f"{WORKERS}/{worker}.json"


def batch(step: int, incarnation: int = 0) -> str:
    """The record of a step by one life of the learner; 0: of a run whose steps had one record each."""
    life = f".{incarnation:06d}" if incarnation else ""
    return f"{BATCHES}/{step:06d}{life}.json"


def checkpoint(step: int, file: str) -> str:
    return f"{CHECKPOINTS}/{step:06d}/{file}"


def evaluation(policy: str, split: str) -> str:
    return f"{EVALUATIONS}/{policy}.{split}.json"


def last_word(incarnation: int, record: str) -> str:
    """What one of a run's records held when this life of the learner had finished the run."""
    return f"{INCARNATIONS}/{incarnation:06d}.last.{record.rpartition('/')[2]}"


def replicas(fleet: str) -> str:
    return f"fleets/{fleet}/replicas"


def replica(fleet: str, replica_id: str) -> str:
    return f"{replicas(fleet)}/{replica_id}.json"
