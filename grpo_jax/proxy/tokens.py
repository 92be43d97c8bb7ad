"""Bearer tokens from the environment: the fleet's, towards replicas, and the clients', towards the proxy."""

import hmac
import os
import re

from grpo_jax.errors import UsageError

TOKEN_VARIABLE = "GRPO_JAX_TOKEN"
CLIENT_TOKEN_VARIABLE = "GRPO_JAX_CLIENT_TOKEN"

_TOKEN = re.compile(r"[\x21-\x7e]+")


def read_token(variable: str) -> str | None:
    """None if the variable is not set or empty. UsageError, without the value, if it cannot stand in a header."""
    token = os.environ.get(variable, "").strip()
    if token and _TOKEN.fullmatch(token) is None:
        raise UsageError(f"{variable}: a token consists of printable ASCII characters without spaces")
    return token or None


def carries(header: str | None, token: str) -> bool:
    """Whether an Authorization header carries exactly this token; takes as long for any wrong one."""
    scheme, _, value = (header or "").partition(" ")
    given = value.strip().encode(errors="surrogateescape")
    return hmac.compare_digest(given, token.encode()) and scheme.lower() == "bearer"
