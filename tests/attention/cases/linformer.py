"""Reference for Linformer: every query scores every key and every projected row. It uses no code from the package."""

import math

import torch
from attention.inputs import Case, Inputs, Tensors
from torch import Tensor

SHARES = ("none", "heads", "heads_keys_values")


def linformer(x: Inputs, key_projection: Tensor, value_projection: Tensor) -> Tensor:
    """Take one softmax over the projected rows of earlier blocks and the keys of the query's block.

    Projections are [H or 1, rank, block].
    """
    rank, block = key_projection.shape[-2:]
    place = torch.arange(x.v.shape[2])
    keys, values, visible = [x.k], [x.v], [(place <= place[:, None]) & (place // block == place[:, None] // block)]
    for index in range(len(place) // block):
        own = slice(index * block, (index + 1) * block)
        keys.append(torch.einsum("hrn,bhnk->bhrk", key_projection.expand(x.k.shape[1], -1, -1), x.k[:, :, own]))
        values.append(torch.einsum("hrn,bhnv->bhrv", value_projection.expand(x.v.shape[1], -1, -1), x.v[:, :, own]))
        visible.append((place >= own.stop)[:, None].expand(-1, rank))
    scores = x.q @ torch.cat(keys, dim=2).transpose(-1, -2) / math.sqrt(x.q.shape[-1])
    weights = scores.masked_fill(~torch.cat(visible, dim=1), -math.inf).softmax(dim=-1)
    return weights @ torch.cat(values, dim=2)


def linformer_all(x: Inputs, key_projection: Tensor, value_projection: Tensor) -> Tensor:
    """Project the sequence by block-diagonal matrices, whose last columns are cut off."""
    length = x.v.shape[2]
    blocks = -(-length // key_projection.shape[-1])
    heads, one = x.k.shape[1], torch.eye(blocks, dtype=x.k.dtype)
    rows = []
    for part, projection in ((x.k, key_projection), (x.v, value_projection)):
        whole = torch.stack([torch.kron(one, of_head)[:, :length] for of_head in projection])
        rows.append(whole.expand(heads, -1, -1) @ part)
    return (x.q @ rows[0].transpose(-1, -2) / math.sqrt(x.q.shape[-1])).softmax(-1) @ rows[1]


def linformer_case(block: int, rank: int, share: str = "none") -> Case:
    def projections(tensors: Tensors) -> tuple[Tensor, Tensor]:
        keys = tensors["key_projection"]
        return keys, keys if share == "heads_keys_values" else tensors["value_projection"]

    return Case(
        "linformer",
        {"block": block, "rank": rank, "share": share},
        lambda x, tensors: linformer(x, *projections(tensors)),
        oracle_all=lambda x, tensors: linformer_all(x, *projections(tensors)),
    )


CASES = {f"linformer-{share}": linformer_case(16, 3, share) for share in SHARES} | {
    "linformer-odd-block": linformer_case(7, 2),
    "linformer-full-rank": linformer_case(5, 5),
    "linformer-single-positions": linformer_case(1, 1),
}
