"""Compiles the recurrent step of a model to a program; see `native/program.py`."""

import torch

from linformer_cli.native.constants import MOST_LEVELS
from linformer_cli.native.program import Builder, Kind, NoProgram, Program
from linformer_cli.native.program_file import Images, encode_program
from .heads import MixtureHead
from .pixel_model import PixelModel


def compile_step(model: PixelModel, window: int = 1, products: torch.dtype | None = None) -> Program:
    """Compile one step of `model`, for up to `window` positions in a pass. Raises `NoProgram` if that is impossible.

    `products` is the type of the inputs and weights of matrix products: float32, bfloat16 or int8 (None: the model's).
    Cached keys and values are bfloat16, unless products are float32. Everything else is float32.
    """
    if model.dtype not in (torch.float32, torch.bfloat16):
        raise NoProgram("it does not support float64")
    if model.config.mixtures > MOST_LEVELS:
        raise NoProgram(f"it supports mixtures up to {MOST_LEVELS}")
    if model.channels is not None or not all(block.looks_ahead for block in model.typed_blocks):
        window = 1
    products = products or model.dtype
    builder = Builder(products, model.config.width, window)
    recent, label = model.embedding.emit(builder)
    states = []
    for index, block in enumerate(model.typed_blocks):
        first = len(builder.buffers)
        block.emit(builder, str(index) if window > 1 else "")
        states.append(tuple(n for n in range(first, len(builder.buffers)) if builder.buffers[n].kind == Kind.STATE))
    stride, blocks, pixel = 1, 0, -1
    if model.channels is not None:
        pixel = builder.keep()
        stride, blocks = model.embedding.stride, len(builder.operations)
        slots = model.channels.emit(builder, recent, pixel)
    # A mean of a mixture must be exact to a fraction of a level.
    sensitive = isinstance(model.head, MixtureHead)
    output = builder.project(model.head.projection, builder.norm(model.norm), "output", sensitive=sensitive)
    if model.channels is not None and isinstance(model.head, MixtureHead):
        model.channels.emit_predictions(builder, recent, slots, output, model.head.mixtures)
    parts = tuple(builder.buffers), tuple(builder.operations)
    return Program(products, window, *parts, recent, label, output, tuple(states), stride, blocks, pixel)


def describe_images(model: PixelModel) -> Images:
    head, shape = model.head, model.config.image
    sizes = shape.channels, shape.height, shape.width, shape.levels, model.config.classes
    if isinstance(head, MixtureHead):
        return Images(*sizes, head.mixtures, head.log_scale_bounds)
    return Images(*sizes, palette=shape.colours)


def encode_model(model: PixelModel, window: int, products: torch.dtype | None = None) -> bytes:
    """Encode a program file that draws the images of `model`; see `compile_step` and native/program_file.py."""
    return encode_program(compile_step(model, window, products), describe_images(model))
