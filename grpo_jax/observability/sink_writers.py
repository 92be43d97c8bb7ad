"""TensorBoard, trackio and Weights & Biases as sinks; each imports its package when it is opened."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from grpo_jax.observability.sinks import RunInfo, Sink


class TensorBoard:
    """Event files in `<run>/tensorboard`. What an earlier life wrote from `first_step` on is not shown any more."""

    def __init__(self, info: RunInfo):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        folder = info.folder / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder), flush_secs=5)
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(self._event(wall_time=time.time(), step=info.first_step, session_log=start))
        if info.first_step == 0:
            self._writer.add_event(self._text("config", yaml.safe_dump(info.config, sort_keys=False)))

    def log(self, record: Mapping[str, Any]) -> None:
        values = [
            self._summary.Value(tag=key, simple_value=float(value))
            for key, value in record.items()
            if _shown(key, value)
        ]
        when = record.get("time/finished", time.time())
        self._writer.add_event(self._event(wall_time=when, step=record["step"], summary=self._summary(value=values)))

    def close(self) -> None:
        self._writer.close()

    def _text(self, tag: str, text: str) -> Any:
        from tensorboard.compat.proto import tensor_pb2, types_pb2
        from tensorboard.plugins.text.metadata import create_summary_metadata

        tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[f"```\n{text}\n```".encode()])
        metadata = create_summary_metadata(display_name=tag, description="")
        value = self._summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)
        return self._event(wall_time=time.time(), step=0, summary=self._summary(value=[value]))


class Trackio:
    """A local trackio project, or one in a Space, which is made private; a run goes on under its id."""

    def __init__(self, info: RunInfo):
        import trackio

        where: dict[str, Any] = {"space_id": info.space, "private": True} if info.space else {}
        self._run = trackio.init(
            project=info.project,
            name=info.id,
            config=info.config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
            **where,
        )

    def log(self, record: Mapping[str, Any]) -> None:
        self._run.log({key: value for key, value in record.items() if _shown(key, value)}, step=record["step"])

    def close(self) -> None:
        self._run.finish()


class WeightsAndBiases:
    """A run under its id; `WANDB_MODE`, `WANDB_ENTITY` and the other variables of wandb count as always."""

    def __init__(self, info: RunInfo):
        import wandb

        self._run = wandb.init(
            project=info.project,
            id=info.id,
            name=info.name,
            config=info.config,
            dir=str(info.folder),
            resume="allow",
            save_code=False,
            settings=wandb.Settings(console="off", x_disable_stats=True, disable_git=True, x_disable_meta=True),
        )
        # Steps that a resume repeats lie below wandb's own counter, which would drop them.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, record: Mapping[str, Any]) -> None:
        self._run.log({key: value for key, value in record.items() if key == "step" or _shown(key, value)})

    def close(self) -> None:
        self._run.finish()


def _shown(key: str, value: Any) -> bool:
    """Numbers, but no times of day: those are for the timeline."""
    return key != "step" and not key.startswith("time/") and isinstance(value, int | float)


OPENERS: dict[str, Callable[[RunInfo], Sink]] = {
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": WeightsAndBiases,
}
