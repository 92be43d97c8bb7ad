"""Generators of this machine that outlive a run: the runs of a sweep share them as far as they can."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from grpo_jax.config.schema import Config
from grpo_jax.errors import EXIT_DONE, EXIT_USAGE, RunFailed
from grpo_jax.generator.process import told_exit
from grpo_jax.generator.runs import in_fleet, sharing
from grpo_jax.generator.stoppage import Stoppage
from grpo_jax.jobs.keeper import Keeper, Role, last_line
from grpo_jax.jobs.processes import role_command, stop_all
from grpo_jax.jobs.restarts import Restarts
from grpo_jax.jobs.watchdog import LOCAL_REPLICA
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket, BucketError, Limits
from grpo_jax.storage.records import Record, RecordReader

_STOP_S = 5.5
_LOOK_S = 1.0
# The learner writes its state every second: as long as it is seen to do so, the bucket is not what keeps others silent.
_ALIVE_S = 5.0
_AGAIN_S = 20.0
_LIMITS = Limits(attempt_s=5.0, total_s=5.0)


class Fleets:
    """One shared fleet after the other, each from the first run that it serves to the last."""

    def __init__(self, configs: Sequence[Config], name: str, folder: Path):
        """
        Args:
          configs: of the runs that are to come.
          name: of the sweep, and of its fleets where the configs name none.
          folder: local, for logs and adapters.
        """
        named = [in_fleet(config, name) for config in configs]
        groups = [group for group in sharing(named) if len(group) > 1 and group[0].generator.replicas]
        self._group_of = {config.run: group for group in groups for config in group}
        self._folder = folder
        self._fleet: SharedFleet | None = None

    def enter(self, config: Config) -> tuple[Config, "SharedFleet | None"]:
        """The config with which a run has to be run now, and the fleet that serves it; None: its own generators."""
        group = self._group_of.get(config.run)
        if self._fleet is not None and self._fleet.configs is not group:
            self.close()
        if group is None:
            return config, None
        if self._fleet is None:
            self._fleet = SharedFleet(group, self._folder)
            self._fleet.start()
        shared = next(each for each in group if each.run == config.run)
        self._fleet.serves(shared)
        alone = shared.generator.model_copy(update={"replicas": 0})
        return shared.model_copy(update={"generator": alone}), self._fleet

    def close(self) -> None:
        """Nothing of them is left running."""
        if self._fleet is not None:
            self._fleet.stop()
            self._fleet = None


class SharedFleet:
    """`generator.replicas` agents for several runs. They are watched as those of a single run are."""

    def __init__(self, configs: Sequence[Config], folder: Path):
        """`configs` agree (see `generator.runs`)."""
        self.configs, first = configs, configs[0]
        place = folder / "generators"
        place.mkdir(parents=True, exist_ok=True)
        words = []
        for config in configs:
            path = place / f"{config.run}.json"
            path.write_text(json.dumps(config.model_dump(mode="json"), indent=2) + "\n")
            words += ["--config", str(path)]
        bucket = Bucket(first.bucket, _LIMITS)
        self._learners = [RecordReader(bucket.child(config.run), layout.LEARNER_STATE) for config in configs]
        self._hung_s, self._looked_at, self._looks = first.local.hung_s, 0.0, False
        self._serving = self._learners[0]
        self._heartbeats: dict[str, RecordReader] = {}
        self._stoppages: dict[str, Stoppage] = {}
        roles = []
        for i in range(first.generator.replicas):
            name, id = f"generator-{i}", LOCAL_REPLICA.format(i)
            argv = role_command("generator", *words, "--id", id, "--dir", str(place / str(i)))
            cpus = first.local.generator_cpus[i] if i < len(first.local.generator_cpus) else ()
            roles.append(Role(name, argv, place / f"{name}.log", Restarts(first.local.restarts), cpus=cpus))
            self._heartbeats[name] = RecordReader(bucket, layout.replica(first.fleet_name, id))
        self._keeper = Keeper(roles, self._hangs, self._steps, self._begins)

    def start(self) -> None:
        self._keeper.start()

    def serves(self, config: Config) -> None:
        """From now on this run is the one that goes on."""
        self._serving = self._learners[self.configs.index(config)]

    def poll(self) -> None:
        """To be called often. RunFailed if an agent cannot be kept alive."""
        self._looks = time.monotonic() - self._looked_at >= _LOOK_S
        if self._looks:
            self._looked_at = time.monotonic()
            _look(self._serving)
        for role, code in self._keeper.ended():
            if code == EXIT_USAGE:
                raise RunFailed(last_line(role.log))
            if code == EXIT_DONE:  # it has found the runs over
                self._keeper.rest(role, _AGAIN_S)
            else:
                self._keeper.again(role, f"{role.title} {told_exit(code)}: {last_line(role.log)}")

    def stop(self) -> None:
        stop_all(list(self._keeper.processes.values()), _STOP_S)

    def _begins(self, role: Role) -> None:
        self._stoppages[role.name] = Stoppage()

    def _hangs(self, role: Role) -> str | None:
        if not self._looks or role.process is None:
            return None
        if (why := self._stoppages[role.name].reason([role.process.pid], self._hung_s)) is not None:
            return why
        heartbeat = self._heartbeats[role.name]
        _look(heartbeat)
        silent_s = min(heartbeat.silent_s(), time.monotonic() - role.began)
        if silent_s < self._hung_s or self._serving.silent_s() > _ALIVE_S:
            return None
        return f"its heartbeat has not changed for {silent_s:.0f} s"

    def _steps(self) -> int:
        return sum(int((_look(reader) or {}).get("step", 0)) for reader in self._learners)


def _look(reader: RecordReader) -> Record | None:
    """The newest value that is known."""
    try:
        return reader.read()
    except BucketError:
        return None
