"""Text of stores without what is secret in it: URLs may carry credentials, and clients quote URLs in their errors."""

import re

_SECRETS = (
    (re.compile(r"(?<=://)[^/@\s]+(?=@)"), "***"),
    (
        re.compile(r"(?i)([?&][^=&\s]*(?:token|key|secret|sig|signature|password|credential)[^=&\s]*=)[^&\s'\"]+"),
        r"\1***",
    ),
    (re.compile(r"(?i)\b(bearer\s+)[^\s'\"]+"), r"\1***"),
    (re.compile(r"\bhf_[A-Za-z0-9]{8,}"), "hf_***"),
)


def scrubbed(text: str) -> str:
    """`text` with user names and passwords of URLs, signatures of queries and bearer tokens masked."""
    for pattern, mask in _SECRETS:
        text = pattern.sub(mask, text)
    return text
