"""A script that compiles the Triton kernels for GPUs of compute capability 8.0 and 9.0 without using one.

It prints the name of every kernel and its shared memory in bytes.
"""

import inspect
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from linformer_cli.attention.kernels import triton_ahead, triton_linear, triton_steps
from linformer_cli.native.constants import COMPILED_MAPS

WIDTHS = {"C": 32, "V": 32}
SUMS = {**WIDTHS, "SIZE": triton_linear.CHUNK, "PRECISION": "tf32"}
# These tensors have the model's type. All other tensors are float32, except those below.
_HALF = {"q", "k", "v", "g", "y", "grad_q", "grad_k", "grad_v", "keys", "values", "decay", "bias", "erase", "write"}
_HALF |= {"read", "gate", "x", "weight", "residual", "x_gain", "x_shift", "residual_gain", "residual_shift"}
# Whole numbers on the device, and numbers of other types.
_COUNTS = {"steps", "kept", "drawn", "tokens", "line", "counts", "place"}
_OTHERS = {"finite": "*i1", "numbers": "*fp64", "uniforms": "*fp64", "recent": "*i16"}
_NUMBERS = {"H", "T", "C", "V", "B", "K", "N", "segments", "chunks", "reach", "above"}
_REAL_NUMBERS = {"scale", "power", "most_erased", "most_written", "floor", "epsilon"}
# A step of `gdn2`, one of `rwkv7`, and two products of a block.
_RAW = {"DECAY": "gate", "ERASES": True, "READS": False, "RAW": True, "NORMALISED": True, "GATED": True}
_GIVEN = {"DECAY": "log", "ERASES": True, "READS": True, "RAW": False, "NORMALISED": False, "GATED": False}
_TILE = {"ROWS": 16, "COLUMNS": 32, "SIZE": 64, "PRECISION": "tf32"}
_BEFORE = {"NORM": True, "RESIDUAL": False, "RESIDUAL_NORM": False, "ACTIVATION": "gelu"}
_AFTER = {"NORM": False, "RESIDUAL": True, "RESIDUAL_NORM": True, "ACTIVATION": "none"}


def compile_for(kernel: Any, constants: dict[str, Any], capability: int, **options: Any) -> Any:
    """Compile `kernel` for bfloat16 inputs."""
    signature: dict[str, str] = {}
    fixed: dict[tuple[int], Any] = {}
    for place, name in enumerate(inspect.signature(kernel.fn).parameters):
        if name in constants:
            signature[name], fixed[(place,)] = "constexpr", constants[name]
        elif name in _NUMBERS or name.endswith(("_image", "_head", "_position", "_step")):
            signature[name] = "i32"
        elif name in _REAL_NUMBERS:
            signature[name] = "fp32"
        else:
            kind = "*i64" if name in _COUNTS else "*bf16" if name in _HALF else "*fp32"
            signature[name] = _OTHERS.get(name, kind)
    source = ASTSource(kernel, signature, fixed)
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": True, **options}
    )


def main() -> None:
    sums = ("_sum_kernel", "_forward_kernel", "_backward_queries_kernel", "_backward_keys_kernel")
    kernels = [(getattr(triton_linear, name), SUMS, {"num_warps": 4, "num_stages": 1}) for name in sums]
    kernels += [(triton_steps._step_folded_kernel, {**WIDTHS, "FOLD": fold}, {"num_warps": 1}) for fold in (1, 8)]
    rows = triton_steps.BLOCK_ELEMENTS // WIDTHS["C"]
    for parts in (1, 4):
        cache = {**WIDTHS, "ROWS": rows, "PARTS": parts}
        kernels.append((triton_steps._step_cache_kernel, cache, {"num_warps": triton_steps.WARPS}))
    kernels.append((triton_steps._join_parts_kernel, {"V": 32, "PARTS": 4}, {"num_warps": 1}))
    for form in (_RAW, _GIVEN):
        kernels.append((triton_steps._step_sums_kernel, {"FEATURES": 32, "CHANNELS": 64, **form}, {"num_warps": 2}))
    for form in (_BEFORE, _AFTER):
        kernels.append((triton_steps._project_kernel, {**_TILE, **form}, {"num_warps": 4}))
    for rows in (1, 16):
        ahead = {**WIDTHS, "ROWS": rows, "ROOM": 16}
        kernels.append((triton_ahead._step_ahead_kernel, ahead, {"num_warps": 2}))
    for images in (1, 2):
        kept = {"IMAGES": images, "ROWS": 16, "REACH": 128}
        kernels.append((triton_ahead._keep_rows_kernel, kept, {"num_warps": 1}))
    for kernel, constants, options in kernels:
        for capability in (80, 90):
            if kernel in (triton_steps._step_sums_kernel, triton_steps._project_kernel):
                constants["EARLY"] = options["launch_pdl"] = capability >= 90
            compiled = compile_for(kernel, {"MAP": COMPILED_MAPS["elu"], **constants}, capability, **options)
            assert compiled.asm["cubin"]
            code = compiled.asm["ptx"]
            assert ("griddepcontrol.wait" in code) == ("griddepcontrol.launch" in code) == constants.get("EARLY", False)
            # The previous kernel writes what this one loads.
            assert code.find("griddepcontrol.wait") < min(code.find("ld.global"), code.find("st.global"))
            sys.stdout.write(f"{kernel.fn.__name__} {compiled.metadata.shared}\n")


if __name__ == "__main__":
    main()
