"""Tests of memory that is reused, returned, measured or exhausted."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from loops import loop_over

from linformer_cli.system import memory
from linformer_cli.system.memory import allocate_zeros, is_out_of_memory, measure_peak_memory


def test_peak_memory_is_counted_in_bytes() -> None:
    ballast = torch.ones(8_000_000)  # 32 MB, actually written
    peak = measure_peak_memory("cpu")
    assert ballast.numel() * 4 < peak < 2**40


def read_flags(address: int) -> list[str]:
    """Read the kernel's flags of the mapping that contains an address."""
    regions = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]
    for region in regions:
        first, end = (int(text, 16) for text in region.split()[0].split("-"))
        if first <= address < end:
            return re.findall(r"^VmFlags:(.*)$", region, flags=re.MULTILINE)[0].split()
    raise AssertionError("no mapping contains this address")


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no pages of 2 MiB for programs"
)
def test_large_zeros_ask_for_large_pages() -> None:
    large = allocate_zeros((2**21,), torch.float32)
    assert "hg" in read_flags(large.data_ptr() + 2**22)


def test_small_pages_are_used_if_the_system_refuses_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **named: object) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(memory.mmap, "mmap", refuse)
    zeros = allocate_zeros((2**21,), torch.float32)
    assert zeros.shape == (2**21,) and not zeros.any()
    with pytest.raises(RuntimeError) as caught:
        allocate_zeros((2**50,), torch.float32)
    assert is_out_of_memory(caught.value)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
def test_freed_memory_is_reused_until_it_is_returned_unless_the_environment_configures_malloc() -> None:
    """Counts the page faults of five blocks of 40 MB that are allocated after five others were freed.

    Then it measures the resident memory with one block, after freeing it, and after returning its memory.
    """
    script = (
        "import resource\n"
        "from linformer_cli.system.memory import give_back_freed_memory, keep_freed_memory\n"
        "keep_freed_memory()\n"
        "def count():\n"
        "    for _ in range(5): bytearray(b'x') * 40_000_000\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "def resident():\n"
        "    return int(open('/proc/self/statm').read().split()[1]) // 256\n"
        "seen = [-count() + count()]\n"
        "held = [bytearray(b'x') * 40_000_000, bytearray(4000)]\n"
        "seen.append(resident())\n"
        "del held[0]\n"
        "seen.append(resident())\n"
        "give_back_freed_memory()\n"
        "print(*seen, resident())\n"
    )
    bare = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    (faults, full, kept, given_back), (usual, *_) = (
        map(
            int, subprocess.run([sys.executable, "-c", script], capture_output=True, env=env, check=True).stdout.split()
        )
        for env in (bare, {**bare, "MALLOC_ARENA_TEST": "8"})
    )
    assert faults < 12_500 and usual > 47_500
    assert kept > full - 4 and given_back < full - 34


@loop_over(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"), True),
        (RuntimeError("Invalid buffer size: 16.00 GiB"), True),
        (RuntimeError("could not create a primitive"), True),
        (RuntimeError("could not create a primitive descriptor for a matmul primitive"), False),
        (RuntimeError("shapes do not fit"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_is_distinguished_from_other_errors(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) == expected
