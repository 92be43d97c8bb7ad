"""An agent, and the learner that it serves: each test publishes the next version."""

from pathlib import Path
from typing import Any

from tests.generator.agents import AgentProcess
from tests.generator.settings import LORA, make_config
from tests.generator.stand_in import StandIn


class Served:
    def __init__(self, folder: Path, model_dir: Path, *, versions: int = 1, **sections: Any):
        """versions: that are there before the agent starts; `window` holds the last three of them at most."""
        self.learner = StandIn(str(folder / "bucket"), "tiny", model_dir, LORA)
        names = [self.learner.start()]
        self.v0, self._next = names[0], 1
        while self._next < versions:
            names.append(self.publish(self.tree()))
        self.learner.point(*names[:-4:-1])
        self.good = names[-1]
        config = make_config(folder / "bucket", model_dir, **sections)
        self.dtype = config.model.dtype
        self.agent = AgentProcess(config, "r0", folder)
        self.joined: dict[str, Any] = {}
        """The heartbeat that first proved the window, where a fixture waited for it."""

    @property
    def following(self) -> int:
        """The version that is published next."""
        return self._next

    @property
    def url(self) -> str:
        return self.agent.heartbeat()["url"]

    def tree(self) -> Any:
        """Of the next version."""
        return self.learner.version(self._next)

    def publish(self, tree: Any, **wrong: Any) -> str:
        self._next += 1
        return self.learner.publish(self._next - 1, tree, **wrong)

    def next(self, tree: Any, **wrong: Any) -> str:
        """Publishes the next version, and points to it and to the last good one."""
        name = self.publish(tree, **wrong)
        self.learner.point(name, self.good)
        return name
