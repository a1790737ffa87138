"""Trains with kernels that were compiled with sanitizers, in a process of its own: `sanitized.py FOLDER build|run`.

`build` compiles the library in FOLDER. `run` needs the sanitizers' libraries in LD_PRELOAD; they end the process at the
first fault.
"""

import sys
from dataclasses import replace
from pathlib import Path

from linformer_cli.native import build, library

# All checks of undefined behaviour, and of addresses.
OPTIONS = (
    *("-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"),
    *("-fno-omit-frame-pointer", "-g1"),
)


def use_sanitizers(folder: Path) -> None:
    """From now on, the library is the one in `folder`, for the fastest instruction set and without the engine."""
    architecture = build.this_machine().architecture
    fastest = replace(library.supported_sets()[-1], level="-O0")
    build.LIBRARIES, build.OPTIONS = folder, (*build.OPTIONS, *OPTIONS)
    build.INSTRUCTION_SETS = {architecture: (fastest,)}
    build.SOURCES = {file: fuses for file, fuses in build.SOURCES.items() if file != "native/runner.cpp"}


def train_everything() -> None:
    """Run every kernel forward and backward: sizes around those of vectors and blocks, NaN, and several threads."""
    import torch
    from attention.test_sums_kernels import DELTA_RULES, FORMS, SIZES, differentiate, draw

    from linformer_cli.attention.catalogue import CATALOGUE
    from linformer_cli.config import ImageShape, ModelConfig
    from linformer_cli.model.pixel_model import PixelModel

    library.load_library()
    torch.set_num_threads(3)
    for form in FORMS:
        # 66 positions are two blocks and a rest, where SIZES has 130. With 600, the threads divide a head's positions.
        sizes = [(66 if size[0] == 130 else size[0], *size[1:]) for size in SIZES if size[0] < 100 or size[0] == 130]
        for number, (length, *widths) in enumerate([*sizes, (600, 8, 9)]):
            for carry in (False, True) if number % 4 == 0 else (number % 2 == 0,):
                inputs = [None if x is None else x.float() for x in draw(form, length, *widths, carry)]
                differentiate(form, inputs)
                if form in ("one decay", "featurewise", *DELTA_RULES):
                    inputs[-2][:, :, length // 2] = -90  # the gradient of a closed gate takes another path
                    differentiate(form, inputs)
                if length > 1:  # where the only position is NaN, nothing depends on the carried sums
                    inputs[1][:, 1, length // 2] = torch.nan
                    differentiate(form, inputs)
    for number, name in enumerate(CATALOGUE):
        rows = 60 if name in ("linear", "performer", "mesa") else 7
        sizes = {"layers": 2, "heads": 1 + number % 3, "width": 21, "head_width": 9, "feed_forward": 19, "dropout": 0.1}
        image = ImageShape(height=rows, width=10, levels=16)
        norm, activation = (("pre", "gelu"), ("post", "relu"))[number % 2]
        changes = {"attention": name, "norm": norm, "activation": activation, "image": image}
        torch.manual_seed(number)
        model = PixelModel(ModelConfig.model_validate(sizes | changes))
        values = torch.randint(0, 16, (3, image.positions))
        for half in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                model.nats(values).mean().backward()
        with torch.no_grad():
            next(model.blocks.parameters()).fill_(torch.nan)
        model.nats(values).mean().backward()


if __name__ == "__main__":
    use_sanitizers(Path(sys.argv[1]))
    if sys.argv[2] == "build":
        outcome = build.build_libraries(build.this_machine(), Path(sys.argv[1]))
        assert not outcome.problems, outcome.problems
    else:
        train_everything()
