"""Hatchling's hooks: they compile the libraries and describe the package when it is installed or a wheel is built."""

import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface


class LibrariesHook(BuildHookInterface[Any]):
    """Adds a library for each instruction set. Without a compiler, the package is pure Python."""

    def dependencies(self) -> list[str]:
        """Return zig's compiler, where the system has none or the wheel is for another system."""
        build = _import_build(self.root)
        return [] if build.find_system_compiler() and not os.environ.get(build.TARGET_VARIABLE) else ["ziglang"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build = _import_build(self.root)
        name = os.environ.get(build.TARGET_VARIABLE)
        target = build.TARGETS[name] if name else build.this_machine()
        outcome = build.build_libraries(target, build.LIBRARIES / name if name else build.LIBRARIES)
        for problem in outcome.problems:
            self.app.display_warning(f"lintx: {problem}; what is not compiled runs in plain torch, which is slower")
        if outcome.libraries and version != "editable":  # an editable package finds them in the checkout
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{target.tag}"
            included = {str(file): f"linformer_cli/native/libraries/{file.name}" for file in outcome.libraries}
            build_data["force_include"].update(included)


class ReadmeHook(MetadataHookInterface):
    """Makes relative addresses in README.md absolute, because a package index has no other files of the repository."""

    def update(self, metadata: dict[str, Any]) -> None:
        text, place = Path(self.root, "README.md").read_text(encoding="utf-8"), metadata["urls"]["Repository"]
        text = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\1{place}/raw/main/", text)
        text = re.sub(r"(\]\()(?!https?:|#)", rf"\1{place}/blob/main/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def _import_build(root: str) -> ModuleType:
    """Return build.py of the package in the folder `root`, which is not installed yet."""
    sys.path.insert(0, root)
    from linformer_cli.native import build

    return build
