"""A script that compiles the Triton kernels for a GPU without using one.

It prints the name of every kernel and its shared memory in bytes.
"""

import inspect
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from linformer_cli.attention.kernels import triton_linear, triton_steps
from linformer_cli.native.constants import COMPILED_MAPS

WIDTHS = {"C": 32, "V": 32}
SUMS = {**WIDTHS, "SIZE": triton_linear.CHUNK, "PRECISION": "tf32"}
# These tensors have the model's type. All other tensors are float32, except the integer `steps`; `scale` is a number.
_HALF = {"q", "k", "v", "g", "y", "grad_q", "grad_k", "grad_v", "keys", "values"}
_NUMBERS = {"H", "T", "segments", "chunks"}


def compile_for(kernel: Any, constants: dict[str, Any], capability: int, **options: Any) -> Any:
    """Compile `kernel` for bfloat16 inputs."""
    signature: dict[str, str] = {}
    fixed: dict[tuple[int], Any] = {}
    for place, name in enumerate(inspect.signature(kernel.fn).parameters):
        if name in constants:
            signature[name], fixed[(place,)] = "constexpr", constants[name]
        elif name in _NUMBERS or name.endswith(("_image", "_head", "_position")):
            signature[name] = "i32"
        elif name == "scale":
            signature[name] = "fp32"
        else:
            signature[name] = "*i64" if name == "steps" else "*bf16" if name in _HALF else "*fp32"
    source = ASTSource(kernel, signature, fixed)
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": True, **options}
    )


def main() -> None:
    sums = ("_sum_kernel", "_forward_kernel", "_backward_queries_kernel", "_backward_keys_kernel")
    kernels = [(getattr(triton_linear, name), SUMS, {"num_warps": 4, "num_stages": 1}) for name in sums]
    kernels += [(triton_steps._step_folded_kernel, {**WIDTHS, "FOLD": fold}, {"num_warps": 1}) for fold in (1, 8)]
    rows = triton_steps.BLOCK_ELEMENTS // WIDTHS["C"]
    kernels.append((triton_steps._step_cache_kernel, {**WIDTHS, "ROWS": rows}, {"num_warps": triton_steps.WARPS}))
    for kernel, constants, options in kernels:
        compiled = compile_for(kernel, {"MAP": COMPILED_MAPS["elu"], **constants}, 90, **options)
        assert compiled.asm["cubin"]
        sys.stdout.write(f"{kernel.fn.__name__} {compiled.metadata.shared}\n")


if __name__ == "__main__":
    main()
