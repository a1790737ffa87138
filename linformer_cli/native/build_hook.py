"""Hatchling's hook: compiles the libraries when the package is installed or a wheel is built."""

import os
import sys
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class LibrariesHook(BuildHookInterface[Any]):
    """Adds a library for each instruction set. Without a compiler, the package is pure Python."""

    def dependencies(self) -> list[str]:
        """zig's compiler, where the system has none or the wheel is for another system."""
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


def _import_build(root: str) -> ModuleType:
    """Return build.py of the package in the folder `root`, which is not installed yet."""
    sys.path.insert(0, root)
    from linformer_cli.native import build

    return build
