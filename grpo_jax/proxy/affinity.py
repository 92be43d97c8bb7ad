"""Which replica has seen the beginning of a prompt: chains of block hashes, and a bounded memory of where they went.

Replicas keep the prefixes that they have computed, by blocks, for each policy apart. A prompt here is cut in the same
way: the hash of each block is chained to that of the block before it, so one number stands for a whole prefix. The
content alone tells which prefixes are common; where a prefix went is kept under its hash seeded with the policy's name.
"""

import json
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

BLOCK_TOKENS = 16
BLOCK_BYTES = 64  # of text: about what BLOCK_TOKENS tokens are
MAX_BLOCKS = 256  # what follows them counts as one block more
# A prefix that goes on in more ways than this is a common one (a system prompt), not one prompt's own.
FAN_OUT = 16
MAX_PREFIXES = 65_536
_MAX_HOLDERS = 16

Chain = tuple[int, ...]


def prompt_chain(prompt: object) -> Chain:
    """Hashes of a prompt's prefixes, the shortest first; the last is that of the whole, its partial block included.

    `prompt` is a text, a list of token ids or a list of chat messages, as in a request. Anything else (a batch of
    prompts, nonsense) has no prefixes. Hashes hold within one process.
    """
    size = BLOCK_BYTES
    if isinstance(prompt, str):
        data = prompt.encode(errors="surrogatepass")
    elif not isinstance(prompt, list) or not prompt:
        return ()
    elif isinstance(prompt[0], dict):
        try:
            data = json.dumps(prompt, sort_keys=True, separators=(",", ":")).encode()
        except (RecursionError, TypeError, ValueError):
            return ()
    else:
        try:
            ids = array("q", prompt)
        except (TypeError, OverflowError):
            return ()
        data, size = ids.tobytes(), BLOCK_TOKENS * ids.itemsize
    cut = min(len(data), MAX_BLOCKS * size)
    blocks = [data[start : start + size] for start in range(0, cut, size)]
    if len(data) > cut:
        blocks.append(data[cut:])
    chain, before = [], size
    for block in blocks:
        before = hash((before, block))
        chain.append(before)
    return tuple(chain)


@dataclass(slots=True)
class _Prefix:
    shorter: int | None  # the prefix that is one block shorter
    continuations: int = 0


class Affinity:
    """Remembers the prefixes of the last prompts and who was sent them. Replicas are numbers of the caller's choice.

    Both memories forget what was used longest ago; longer prefixes before the shorter ones that they continue.
    """

    def __init__(self, max_prefixes: int = MAX_PREFIXES):
        self._max = max_prefixes
        self._prefixes: OrderedDict[int, _Prefix] = OrderedDict()
        self._holders: OrderedDict[int, dict[int, None]] = OrderedDict()  # seeded hash → replicas, the last used last

    def __len__(self) -> int:
        return max(len(self._prefixes), len(self._holders))

    def levels(self, chain: Chain, policies: Iterable[str]) -> Iterator[list[tuple[str, int]]]:
        """(policy, replica) of those who were sent a prefix, from the longest prefix on, as far as it is not common."""
        for prefix in reversed(chain):
            known = self._prefixes.get(prefix)
            if known is not None and known.continuations > FAN_OUT:
                return
            yield [(policy, id) for policy in policies for id in self._holders.get(hash((policy, prefix)), ())]

    def note(self, chain: Chain, policy: str, replica: int) -> tuple[bool, bool]:
        """Notes that a prompt goes to `replica`. Was all of it sent to anyone before, and to this one?"""
        if not chain:
            return False, False
        self._note_content(chain)
        sent = self._holders.get(hash((policy, chain[-1])), {})
        before = bool(sent), replica in sent
        for prefix in reversed(chain):
            seeded = hash((policy, prefix))
            holders = self._holders.get(seeded)
            if holders is None:
                self._holders[seeded] = {replica: None}
                continue
            self._holders.move_to_end(seeded)
            holders.pop(replica, None)
            holders[replica] = None
            if len(holders) > _MAX_HOLDERS:
                del holders[next(iter(holders))]
        while len(self._holders) > self._max:
            self._holders.popitem(last=False)
        return before

    def _note_content(self, chain: Chain) -> None:
        prefixes, shorter = self._prefixes, None
        for prefix in chain:
            if prefix not in prefixes:
                prefixes[prefix] = _Prefix(shorter)
                if shorter is not None:
                    prefixes[shorter].continuations += 1
            shorter = prefix
        for prefix in reversed(chain):
            prefixes.move_to_end(prefix)
        while len(prefixes) > self._max:
            _, gone = prefixes.popitem(last=False)
            if gone.shorter is not None and gone.shorter in prefixes:
                prefixes[gone.shorter].continuations -= 1
