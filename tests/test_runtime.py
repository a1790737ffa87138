"""The machine as the package sees it: devices, precision, signals; nothing at import."""

import json
import os
import platform
import signal
import subprocess
import sys

import pytest
import torch

from linformer_cli.errors import Interrupted, UsageError
from linformer_cli.runtime import (
    StopRequest,
    catch_signals,
    choose_device,
    choose_precision,
    describe_environment,
    is_out_of_memory,
    limit_spinning,
    measure_peak_memory,
    torch_dtype,
)


def pretend(monkeypatch: pytest.MonkeyPatch, cards: int = 0, metal: bool = False) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cards > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: "Pretended")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: metal)


# Devices


@pytest.mark.parametrize(("cards", "metal", "chosen"), [(0, False, "cpu"), (0, True, "mps"), (2, True, "cuda")])
def test_auto_takes_the_fastest_there_is(monkeypatch, cards, metal, chosen) -> None:
    pretend(monkeypatch, cards, metal)
    choice = choose_device("auto")
    assert choice.value == chosen
    assert choice.reason


def test_a_device_that_is_there_is_taken_as_asked_for(monkeypatch) -> None:
    pretend(monkeypatch, cards=2, metal=True)
    for wanted in ("cpu", "cuda", "cuda:0", "cuda:1", "mps"):
        assert choose_device(wanted).value == wanted


@pytest.mark.parametrize("wanted", ["gpu", "", "CUDA", "cpu:0", "cpu:", "cuda:", "cuda:x", "cuda:-1", "mps:0"])
def test_an_unknown_device_is_refused_with_the_known_ones(monkeypatch, raises_one_line, wanted) -> None:
    pretend(monkeypatch, cards=2, metal=True)
    with raises_one_line(UsageError, f"unknown device '{wanted}'", "auto, cpu, cuda, cuda:INDEX, mps"):
        choose_device(wanted)


def test_a_device_that_is_not_there_is_refused_with_what_to_do(monkeypatch, raises_one_line) -> None:
    pretend(monkeypatch)
    for wanted in ("cuda", "cuda:0"):
        with raises_one_line(UsageError, "no CUDA device", "--device cpu"):
            choose_device(wanted)
    with raises_one_line(UsageError, "no Apple GPU", "--device cpu"):
        choose_device("mps")
    pretend(monkeypatch, cards=2)
    with raises_one_line(UsageError, "'cuda:2'", "only 2 CUDA devices"):
        choose_device("cuda:2")


# Precision


def test_a_precision_that_was_asked_for_is_taken() -> None:
    for wanted in ("fp32", "bf16"):
        for purpose in ("training", "sampling"):
            assert choose_precision(wanted, "cpu", purpose).value == wanted


def test_auto_samples_in_fp32_everywhere(monkeypatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True, raising=False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    for device in ("cpu", "cuda", "mps"):
        assert choose_precision("auto", device, "sampling").value == "fp32"


@pytest.mark.parametrize(("supported", "chosen"), [(True, "bf16"), (False, "fp32")])
def test_auto_trains_in_bf16_where_the_hardware_multiplies_it(monkeypatch, supported, chosen) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported, raising=False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: supported)
    assert choose_precision("auto", "cpu", "training").value == chosen
    assert choose_precision("auto", "cuda:1", "training").value == chosen
    assert choose_precision("auto", "mps", "training").value == "fp32"


def test_precisions_have_torch_types() -> None:
    found = [torch_dtype(name) for name in ("fp32", "bf16", "fp64")]
    assert found == [torch.float32, torch.bfloat16, torch.float64]


# The environment


def test_the_environment_is_plain_values(monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    environment = json.loads(json.dumps(describe_environment()))
    assert environment["threads"] == 3
    assert environment["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert environment["versions"]["python"] == sys.version.split()[0]
    assert {"processor", "cores", "cpu_bf16", "gpus", "mps", "platform"} <= set(environment)


def test_peak_memory_is_counted_in_bytes() -> None:
    ballast = torch.ones(8_000_000)  # 32 MB that are really touched
    peak = measure_peak_memory("cpu")
    assert ballast.numel() * 4 < peak < 2**40


# Signals


def test_an_unset_request_stops_nothing() -> None:
    StopRequest().raise_if_set("never")


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_set_request_ends_the_command_as_shells_expect(number, exit_code) -> None:
    with pytest.raises(Interrupted, match=r"^saved at step 3\Z") as error:
        StopRequest(int(number)).raise_if_set("saved at step 3")
    assert error.value.exit_code == exit_code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_only_sets_the_request(number) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with catch_signals() as request:
        assert request.signal_number is None
        signal.raise_signal(number)
        assert request.signal_number == number
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_the_handlers_are_restored_after_an_error_too() -> None:
    def mine(number: int, frame: object) -> None:
        raise AssertionError("not while signals are caught")

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with pytest.raises(KeyError), catch_signals() as request:
            signal.raise_signal(signal.SIGTERM)
            assert request.signal_number == signal.SIGTERM
            raise KeyError
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_second_signal_ends_the_process_at_once() -> None:
    script = """
import signal
from linformer_cli.runtime import catch_signals
with catch_signals() as request:
    signal.raise_signal(signal.SIGINT)
    print("first", request.signal_number, flush=True)
    signal.raise_signal(signal.SIGTERM)
    print("not reached", flush=True)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "first 2\n"
    assert ended.returncode == -signal.SIGTERM
    assert ended.stderr == ""


# Imports


def test_configurations_need_no_torch() -> None:
    modules = ("config", "presets", "errors", "runtime")
    script = "; ".join(
        ["import sys", *(f"import linformer_cli.{name}" for name in modules), "sys.exit('torch' in sys.modules)"]
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def test_drawing_an_image_does_not_load_torchs_compiler() -> None:
    """It takes seconds, as long as torch itself, which one image then waits for."""
    script = (
        "import sys, linformer_cli\n"
        "linformer_cli.sample_images(linformer_cli.load_model('mnist-wide'), count=1)\n"
        "sys.exit(', '.join({'torch._dynamo', 'torch._inductor', 'sympy'} & sys.modules.keys()) or None)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_sleep_soon_unless_the_environment_decides(monkeypatch, given, expected) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "x")  # so that what is set is undone
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    limit_spinning()
    assert os.environ.get("GOMP_SPINCOUNT") == expected


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
def test_freed_memory_is_kept_unless_the_environment_decides() -> None:
    """Pages that twenty arrays of 40 MB need anew, after as many others were freed."""
    script = (
        "import resource, torch\n"
        "from linformer_cli.runtime import keep_freed_memory\n"
        "keep_freed_memory()\n"
        "def count(times):\n"
        "    for _ in range(times): torch.ones(10_000_000)\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "print(-count(20) + count(20))\n"
    )
    bare = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    kept, given_back = (
        int(subprocess.run([sys.executable, "-c", script], capture_output=True, env=env, check=True).stdout)
        for env in (bare, {**bare, "MALLOC_ARENA_TEST": "8"})
    )
    assert kept < 50_000 and given_back > 190_000


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
def test_kept_memory_can_be_given_back() -> None:
    """Resident MiB with an array of 400 MB behind which a small one lies, then without it, then given back."""
    script = (
        "import torch\n"
        "from linformer_cli.runtime import give_back_freed_memory, keep_freed_memory\n"
        "keep_freed_memory()\n"
        "def resident():\n"
        "    return int(open('/proc/self/statm').read().split()[1]) // 256\n"
        "held = [torch.ones(100_000_000), torch.ones(1000)]\n"
        "seen = [resident()]\n"
        "del held[0]\n"
        "seen.append(resident())\n"
        "give_back_freed_memory()\n"
        "print(*seen, resident())\n"
    )
    bare = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, env=bare, check=True).stdout
    full, kept, given_back = map(int, found.split())
    assert kept > full - 40 and given_back < full - 340


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"), True),
        (RuntimeError("Invalid buffer size: 16.00 GiB"), True),
        (RuntimeError("shapes do not fit"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_memory_that_runs_out_is_told_from_other_faults(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) == expected
