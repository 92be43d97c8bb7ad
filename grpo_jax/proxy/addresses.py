"""Which URLs a replica may have, and which of them may be sent the fleet's token."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from yarl import URL

_HOST = re.compile(r"[A-Za-z0-9._~:%-]+")


def replica_url(text: str) -> URL:
    """The base address of a replica, without a trailing `/` or `/v1`. ValueError never quotes the URL.

    User names are refused: they would be sent along as credentials and shown by `/fleet`.
    """
    try:
        url = URL(text)
    except ValueError:
        raise ValueError("not a URL") from None
    if url.scheme not in ("http", "https") or not url.raw_host:
        raise ValueError("expected http://host[:port] or https://host[:port]")
    if not _HOST.fullmatch(url.raw_host):
        raise ValueError("a host with characters that no host has")
    if url.raw_user is not None or url.raw_password is not None:
        raise ValueError("a URL with a user name or a password is refused")
    if url.raw_query_string or url.raw_fragment:
        raise ValueError("a URL with a query or a fragment is refused")
    return url.with_path(url.raw_path.rstrip("/").removesuffix("/v1"), encoded=True)


def may_be_sent_token(url: URL, allowed_hosts: Sequence[str]) -> bool:
    """Only over https, and only to a host that matches one of the globs."""
    host = (url.raw_host or "").lower()
    return url.scheme == "https" and any(fnmatchcase(host, pattern.lower()) for pattern in allowed_hosts)
