"""Makes one training group: problem, completions, scores, provenance."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence

import numpy as np

from grpo_jax.config.schema import Config
from grpo_jax.errors import UsageError
from grpo_jax.rollouts.admission import Ticket
from grpo_jax.rollouts.client import Client, PolicyGone, RequestError, RequestFailed
from grpo_jax.rollouts.drawing import Draw, Drawer
from grpo_jax.rollouts.sample import Group, GroupId, Provenance, prompt_digest
from grpo_jax.rollouts.seeds import sampling_seed
from grpo_jax.rollouts.tasks import Problem, problem_at
from grpo_jax.rollouts.tokenizer import Prompts
from grpo_jax.storage.records import canonical_json

log = logging.getLogger(__name__)

_ASK_AGAIN_S = 0.5


class GroupDropped(Exception):
    """A group that cannot be trained. `tokens` were generated for it in vain."""

    def __init__(self, reason: str, tokens: int = 0):
        super().__init__(reason)
        self.tokens = tokens


class GroupMaker:
    def __init__(
        self,
        config: Config,
        problems: Sequence[Problem],
        prompts: Prompts,
        client: Client,
        drawer: Drawer,
        verifiers: Mapping[str, str] | None = None,
    ):
        """`verifiers`: see `Provenance`."""
        self._config, self._problems, self._prompts = config, problems, prompts
        self._client, self._drawer, self._verifiers = client, drawer, dict(verifiers or {})

    async def make(self, ticket: Ticket, policy: str, started_at: float) -> Group:
        """The group of `ticket`, sampled under `policy`.

        Should that be retired meanwhile, a newer one takes its place, unless the staleness is to be exact.

        Whatever goes wrong with this group alone raises GroupDropped. UsageError: its prompt does not fit in a row.
        """
        try:
            epoch, problem = problem_at(self._problems, self._config.seed, ticket.index)
            prompt = self._prompts.tokens(problem)
            group_id = GroupId(epoch, ticket.index, ticket.attempt)
            draw = await self._draw(problem, prompt, policy, self._seed(group_id))
        except RequestError as error:
            raise GroupDropped(str(error)) from None
        except UsageError:
            raise
        except Exception as error:
            log.exception("the group of data index %d failed", ticket.index)
            raise GroupDropped(f"{error!r:.300}") from None
        self._check_scorable(draw)
        try:
            group = self._group(group_id, problem, prompt, draw, started_at)
            return Group.from_bytes(group.to_bytes())  # what a reader would refuse is not written
        except Exception as error:
            log.exception("group %s cannot be written", group_id)
            raise GroupDropped(f"{error!r:.300}", draw.answer.generated_tokens) from None

    async def _draw(self, problem: Problem, prompt: Sequence[int], policy: str, seed: int) -> Draw:
        deadline = None
        while True:
            try:
                return await self._drawer.draw(problem, prompt, policy, self._config.batch.group_size, seed)
            except PolicyGone as gone:
                now = time.monotonic()
                deadline = deadline or now + self._config.rollouts.retry_deadline_s
                if now > deadline:
                    raise RequestFailed(f"each policy that was named was gone at once: {gone}") from None
            named = policy
            if self._config.staleness is None:
                policy, _ = await self._client.current_policy()
            if policy == named:
                await asyncio.sleep(_ASK_AGAIN_S)
            else:
                log.info("%s is no longer served; a group is started again under %s", named, policy)

    def _check_scorable(self, draw: Draw) -> None:
        needed = self._config.rollouts.min_valid
        if draw.scorable < needed:
            why = f": {draw.failures[0]}" if draw.failures else ""
            raise GroupDropped(
                f"{draw.scorable} of {len(draw.samples)} samples are scorable, {needed} are needed{why}",
                draw.answer.generated_tokens,
            )

    def _group(
        self, group_id: GroupId, problem: Problem, prompt: Sequence[int], draw: Draw, started_at: float
    ) -> Group:
        sampling = self._config.sampling
        provenance = Provenance(
            policy=draw.answer.policy,
            replica=draw.answer.replica,
            problem_id=str(problem.id),
            seed=self._seed(group_id),
            sampler={
                "temperature": sampling.temperature,
                "max_tokens": sampling.max_tokens,
                "stop": list(sampling.stop),
            },
            started_at=started_at,
            finished_at=time.time(),
            answer=_for_the_record(problem.answer),
            failures=draw.failures,
            prompt_digest=prompt_digest(prompt),
            verifiers=self._verifiers,
        )
        return Group(group_id, np.array(prompt, np.int32), draw.samples, provenance)

    def _seed(self, group_id: GroupId) -> int:
        return sampling_seed(self._config.run, self._config.seed, str(group_id))


def _for_the_record(answer: object) -> object:
    """The answer if JSON can hold it, else its repr: rewards may be given objects, a file may not."""
    try:
        canonical_json(answer)
    except (TypeError, ValueError, RecursionError):
        return repr(answer)
    return answer
