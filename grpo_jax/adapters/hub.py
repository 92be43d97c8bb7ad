"""Uploads a folder as a model repository of the Hugging Face Hub."""

from pathlib import Path

from huggingface_hub.utils import HFValidationError, validate_repo_id

from grpo_jax.errors import UsageError
from grpo_jax.observability.logs import mask_secrets
from grpo_jax.storage.scrub import scrubbed

PREFIX = "hub:"


def repository(target: str) -> str:
    """OWNER/NAME of `hub:OWNER/NAME`; UsageError if it is none."""
    name = target.removeprefix(PREFIX)
    try:
        validate_repo_id(name)
    except HFValidationError:
        name = ""
    if name.count("/") != 1:
        raise UsageError(f"--to: {target!r} names no repository; it is {PREFIX}OWNER/NAME")
    return name


def check_token() -> None:
    """UsageError if there is no token to upload with; asks nobody."""
    from huggingface_hub import get_token

    if not get_token():
        raise UsageError("the Hub wants a token with the right to write: set HF_TOKEN, or log in with `hf auth login`")


def push(folder: Path, name: str, *, public: bool, message: str) -> str:
    """Uploads the files of `folder` into the repository `name` in one commit; returns its address.

    A repository that does not exist yet is made, private unless `public`; that of one which exists stays as it is.

    Raises:
      UsageError: no token, or the Hub refuses; one sentence.
    """
    from huggingface_hub import HfApi

    check_token()
    api = HfApi(library_name="grpo_jax")
    try:
        url = api.create_repo(name, private=not public, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message=message)
    # The client passes on what its HTTP and storage layers raise, which share no base class of their own.
    except Exception as error:
        told = mask_secrets(scrubbed(str(error))).strip().splitlines() or [type(error).__name__]
        raise UsageError(f"the Hub did not take {name}: {told[0][:300]}") from None
    return str(url)
