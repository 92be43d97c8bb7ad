"""A config without what is secret in it, for whoever it is shown or sent to."""

import re
from typing import Any

from grpo_jax.observability.logs import is_secret_name, mask_secrets
from grpo_jax.storage.scrub import scrubbed

_MASK = "***"
_PLAIN = re.compile(r"-?\d+(\.\d+)?|true|false", re.IGNORECASE)


def scrubbed_config(node: Any) -> Any:
    """A copy in which no text is a secret.

    Masked are: texts under a key that is named like a secret (token, key, secret, password), and after a flag that is;
    under `env` all values but numbers and booleans; credentials in URLs; values of this process's environment variables
    that are named like secrets. Numbers stay: `row_tokens: 256` is none.
    """
    return _scrubbed(node, secret=False, env=False)


def _scrubbed(node: Any, secret: bool, env: bool) -> Any:
    if isinstance(node, dict):
        return {
            key: _scrubbed(value, secret or is_secret_name(str(key)), env or key == "env")
            for key, value in node.items()
        }
    if isinstance(node, list | tuple):
        return [
            _scrubbed(value, secret or (index > 0 and _is_secret_flag(node[index - 1])), env)
            for index, value in enumerate(node)
        ]
    if not isinstance(node, str):
        return node
    if secret or (env and not _PLAIN.fullmatch(node)):
        return _MASK if node else node
    flag, equals, _ = node.partition("=")
    if equals and _is_secret_flag(flag):
        return f"{flag}={_MASK}"
    return mask_secrets(scrubbed(node))


def _is_secret_flag(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("-") and "=" not in value and is_secret_name(value)
