"""The arithmetic and memory traffic of a model, counted from its layers."""

import torch
from torch import nn

from linformer_cli.model.compile_step import compile_step
from linformer_cli.model.mixers import find_mixer
from linformer_cli.model.pixel_model import PixelModel

# A backward pass adds two products per weight matrix: one for the gradient of its input, one for its own gradient.
TRAINING_FACTOR = 3
WHAT_IS_COUNTED = (
    "products with the weights of linear layers and LSTM cells, each once per position; the products inside attention "
    "and short convolutions are not counted, so that all mechanisms of one size are compared over the same work"
)


def list_products(model: nn.Module) -> list[tuple[int, int]]:
    """List (inputs, outputs) of every product of a vector with a weight matrix."""
    shapes = []
    for module in model.modules():
        if isinstance(module, nn.Linear) and getattr(module, "per_position", True):
            shapes.append((module.in_features, module.out_features))
        elif isinstance(module, nn.LSTM):
            shapes += [(module.input_size, 4 * module.hidden_size), (module.hidden_size, 4 * module.hidden_size)]
    return shapes


def count_product_flops(model: nn.Module) -> int:
    """Count the FLOPs of the matrix products of one position in a forward pass. A multiply-add counts as two.

    If blocks step over pixels, this is the mean over the channels of a pixel.
    """
    total = sum_flops(model)
    if isinstance(model, PixelModel):
        shared = sum_flops(model.embedding) + sum_flops(model.blocks)
        total += shared // model.embedding.stride - shared
    return total


def sum_flops(module: nn.Module) -> int:
    """Count the FLOPs of every product of `list_products` once."""
    return sum(2 * inputs * outputs for inputs, outputs in list_products(module))


def count_rerun_positions(positions: int) -> int:
    """Count the positions that a re-run reads for a whole image: 1 for the first value, up to T for the last."""
    return positions * (positions + 1) // 2


def count_state_bytes(model: PixelModel, batch: int, products: torch.dtype | None = None) -> int:
    """Return the bytes of the state of `batch` images, for matrix products of this type (None: the model's type).

    Raises `NoProgram` if the model has no program for these products.
    """
    return model.state_bytes(batch) if products is None else compile_step(model, products=products).state_bytes(batch)


def state_traffic_bytes(model: PixelModel, batch: int, products: torch.dtype | None = None) -> int | None:
    """Return the bytes of state that a step reads and writes, averaged over an image, or None if they are unknown.

    The mechanism declares its share of the state. Weights and activations are not counted. If blocks step over pixels,
    this is the mean over the channels of a pixel.
    """
    share = find_mixer(model.config.attention).count_state_traffic(model.config.block_image.positions)
    whole = count_state_bytes(model, batch, products) // model.embedding.stride
    return None if share is None else round(share * whole)
