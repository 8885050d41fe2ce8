"""The Hugging Face hub: a repository's name to a local folder."""

from __future__ import annotations

import re
from pathlib import Path

from pagefleet.weights.files import CheckpointError

_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")
_WANTED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_UNWANTED = ("*/*", "consolidated*")  # other formats of the same weights


def is_repository(model: str) -> bool:
    """Whether a name that is no local path could be one on the hub."""
    return _REPOSITORY.fullmatch(model) is not None and not model.startswith(".") and not model.endswith(".gguf")


def download(repository: str, revision: str | None) -> Path:
    """The folder of a snapshot, downloaded unless it is in the cache; CheckpointError with the way out."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{repository!r} is no local path, and loading it from the Hugging Face hub needs the package "
            "huggingface_hub; install it, or give the path of a folder or .gguf file"
        ) from error
    try:
        found = snapshot_download(
            repository, revision=revision, allow_patterns=list(_WANTED), ignore_patterns=list(_UNWANTED)
        )
    except Exception as error:  # several HTTP libraries' errors, none of them documented
        at = f" at revision {revision!r}" if revision else ""
        raise CheckpointError(
            f"{repository!r} is no local path, and the Hugging Face hub did not give it{at}: "
            f"{type(error).__name__}: {error}. Without a network, give the path of a folder or .gguf file"
        ) from error
    return Path(found)
