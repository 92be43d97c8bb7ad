"""What the records of evaluations say, for the report and for dashboards."""

from collections.abc import Sequence
from typing import Any

from grpo_jax.adapters.names import parse_policy
from grpo_jax.observability import format as f
from grpo_jax.observability.metrics import Metrics

Evaluation = dict[str, Any]


def step_of(evaluation: Evaluation, sync_every: int) -> int:
    """The step after which the policy was published."""
    return (parse_policy(evaluation["policy"]).version or 0) * sync_every


def passed_at(evaluation: Evaluation) -> dict[int, float]:
    """pass@k by k, as far as it could be estimated."""
    return {int(k): value for k, value in (evaluation.get("pass_at") or {}).items() if value is not None}


def dashboard_record(evaluation: Evaluation, sync_every: int) -> Metrics:
    """As metrics of the step that was evaluated."""
    numbers = {
        "eval/reward": evaluation["reward"],
        **{f"eval/rewards/{label}": value for label, value in evaluation.get("rewards", {}).items()},
        **{f"eval/pass@{k}": value for k, value in passed_at(evaluation).items()},
    }
    known = {key: value for key, value in numbers.items() if value is not None}
    return {"step": step_of(evaluation, sync_every), **known}


def evaluation_rows(evaluations: Sequence[Evaluation], sync_every: int) -> tuple[list[str], list[list[str]]]:
    """(head, rows) of a table, one row for each evaluation in the order given."""
    labels = sorted({label for e in evaluations for label in e.get("rewards", {})})
    ks = sorted({k for e in evaluations for k in passed_at(e)})
    head = ["Step", "Policy", "Split", "Problems", "Samples each", "Mean reward", *(f"pass@{k}" for k in ks), *labels]
    rows = [
        [
            f.number(step_of(e, sync_every)),
            e["policy"],
            e["split"],
            f.number(e.get("problems")),
            f.number(e.get("samples")),
            f.reward(e["reward"]),
            *(f.reward(passed_at(e).get(k)) for k in ks),
            *(f.reward(e.get("rewards", {}).get(label)) for label in labels),
            f.number(e.get("unscorable")),
        ]
        for e in evaluations
    ]
    return [*head, "Unscorable"], rows
