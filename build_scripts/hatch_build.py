"""Packs compiled kernels into the wheel, where there are any; hatchling runs it for each wheel.

Nothing is compiled here: a wheel is built in an isolated environment, and the kernels want the torch that will run
them. Without a library the wheel is pure and serves every platform; with one, the platform it was built on.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))
from native import digest_sources, read_manifest

LIBRARY = "kernels/pagefleet_kernels/_cpu.so"
SOURCES = "kernels/csrc/cpu"


class KernelHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """`version` is "editable" for an install that runs from the checkout: it finds the library where it is."""
        library, sources = Path(self.root, LIBRARY), Path(self.root, SOURCES)
        if version == "editable" or not library.is_file():
            return
        manifest = read_manifest(library)
        if manifest.get("sources") != digest_sources(sources) or manifest.get("sanitizer"):
            raise RuntimeError(
                f"{LIBRARY} was not built from these sources: run python build_scripts/cpu.py again, or delete it to "
                "have a wheel without kernels"
            )
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["artifacts"] += [f"/{LIBRARY}", f"/{Path(LIBRARY).with_suffix('.json')}"]
