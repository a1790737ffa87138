"""The engine and other modules of the browser demo, run in node."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from linformer_cli.demo.build import ENGINE, FOLDER

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="the engine of the demo is run with node")
# Calls the function in place of %s with the file names in the first argument (JSON) and a function that opens a file.
START = """
import { readFileSync } from "node:fs";
import { Runner, startEngine } from "./engine.js";
import { findDrawing, frameDrawing } from "./photo.js";
const engine = await startEngine(readFileSync("engine.wasm"));
const runs = (%s)(JSON.parse(process.argv[2]), (name, batch) => new Runner(engine, readFileSync(name), batch));
process.stdout.write(JSON.stringify(runs));
"""


class Node:
    """Runs JavaScript functions with the modules of the demo, which are copied to a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for file in (ENGINE, *FOLDER.glob("*.js")):
            shutil.copy(file, folder)
        (folder / "package.json").write_text('{"type": "module"}')

    def run(self, function: str, files: Sequence[bytes]) -> object:
        """Call a JavaScript function with names of files and `open`. Raises `CalledProcessError` if it fails."""
        names = [f"{number}.lintx" for number in range(len(files))]
        for name, data in zip(names, files, strict=True):
            (self.folder / name).write_bytes(data)
        (self.folder / "run.mjs").write_text(START % function)
        command = [str(NODE), "run.mjs", json.dumps(names)]
        return json.loads(subprocess.run(command, cwd=self.folder, check=True, capture_output=True).stdout)
