"""Tests that files of earlier versions and of other machines decode to the same images."""

import base64
import hashlib
import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from machine import needs_library
from PIL import Image

from linformer_cli.checkpoint import load_model
from linformer_cli.codec.coder import Coder, identify_program
from linformer_cli.codec.pack import PackedFile, digest_values

pytest.importorskip("constriction")
pytestmark = needs_library
# Three images that mnist-deep drew, in two blocks. If this file no longer decodes, the engine's results or the format
# have changed: increase SEMANTICS or FORMAT, and replace the file. A new checkpoint mnist-deep needs a new file, too.
GOLDEN = """
TElOVFhQQUsBAVYAAAAxJcVqNGJ+1Hj2/L6gacZlrUno83JYJbM5CpcFLxoSqgABHByAAgIDCgBtbmlzdC1kZWVw6AAAAGNOE3LIAAAAx+hQtIGu
hdGxQEpFeDOK4EBjqarweh2cYxKCNc8PL1kmUO0fqFZ40a1Ak6vY7VWyfD5mB/gK2tlb26Ip7KAG2ByttgK4NFe6sFWjfPSxyIhXD3PcbZC/D0YS
h5MWrw2dWExRop1aUeBSw+TuPTHfcXTuPkRpvUXAFpukuBGqjb9qoSjW6dJZMES1YXwtDX/zycfjfg7d4xJyAH/zYXxbOD1R3qAlzHIAMooiAAfB
kzIkbmX4DPcePQORjt+jlDqRKt0hkY5Z6n1BCYg7NiqhqhDjuL7VZN9GA+mt5dXNJfU=
"""
VALUES = "5905547cd805de8b30d3bb59b085f1e27405db953c9e0900f081d831d664ecfb"


@pytest.mark.smoke
def test_a_file_of_an_earlier_version_decodes(instruction_set) -> None:
    model = load_model("mnist-deep")
    packed = PackedFile(io.BytesIO(base64.b64decode(GOLDEN)))
    packed.require_program(identify_program(model), "mnist-deep")
    coder = Coder(model)
    blocks = list(packed.read_blocks(coder, 500, lambda done: None))
    assert digest_values(iter(blocks)).hex() == VALUES and all(block.fault is None for block in blocks)


@pytest.mark.slow
def test_another_process_decodes_it_with_other_settings(tmp_path: Path) -> None:
    """The process knows the file and the model. Its threads and batch size differ."""
    (tmp_path / "x.lintx").write_bytes(base64.b64decode(GOLDEN))
    command = [sys.executable, "-m", "linformer_cli", "decompress", "x.lintx", "-o", "out", "--batch", "1000"]
    environment = os.environ | {"OMP_NUM_THREADS": "3"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=300)
    images = [np.asarray(Image.open(tmp_path / "out" / f"{index:05d}.png")) for index in range(3)]
    assert hashlib.sha256(np.stack(images).tobytes()).hexdigest() == VALUES
