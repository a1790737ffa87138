"""`lintx env`: the machine and versions that results depend on."""

from . import options
from .output import print_facts, print_json


def env(json: options.Json = False) -> None:
    """Describe the machine and the versions.

    Examples:

    - `lintx env --json`

    Lists versions, processor, threads, GPUs, and the device and training precision that `auto` selects.
    """
    import torch

    from linformer_cli.checkpoint_files import shipped_checkpoints
    from linformer_cli.native.gpu import triton_refusal
    from linformer_cli.native.library import describe_library
    from linformer_cli.probe import choose_precision
    from linformer_cli.system.device import choose_device
    from linformer_cli.system.environment import describe_environment

    device = choose_device("auto")
    facts = describe_environment()
    facts["auto_device"] = f"{device.value} ({device.reason})"
    choice = choose_precision("auto", device.value)
    facts["auto_precision_training"] = f"{choice.value} ({choice.reason})"
    facts["native_library"] = describe_library()
    facts["triton_kernels"] = triton_refusal(torch.device(device.value)) or "available"
    facts["shipped_checkpoints"] = {name: str(path) for name, path in shipped_checkpoints().items()}
    if json:
        print_json(facts)
        return
    versions = facts.pop("versions")
    shipped = facts.pop("shipped_checkpoints")
    print_facts({**versions, **facts, **{f"checkpoint {name}": path for name, path in shipped.items()}})
