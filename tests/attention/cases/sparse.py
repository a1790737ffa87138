"""Reference for sparse attention, computed with T x T masks. It uses no code from the package."""

import functools
import math
from typing import Any

import torch
from attention.inputs import Case, Inputs
from torch import Tensor


def strided_parts(length: int, stride: int) -> tuple[Tensor, Tensor]:
    distance = (torch.arange(length).unsqueeze(1) - torch.arange(length)).abs()
    return distance < stride, distance % stride == 0


def fixed_parts(length: int, stride: int, summary: int) -> tuple[Tensor, Tensor]:
    position = torch.arange(length)
    own_block = (position // stride).unsqueeze(1) == position // stride
    return own_block, (position % stride >= stride - summary).expand(length, -1)


def sparse(x: Inputs, parts: tuple[Tensor, Tensor], heads: str, causal: bool = True) -> Tensor:
    """Take the softmax over the positions that each head sees.

    With merged heads, each head sees both parts of the pattern; otherwise the heads alternate between the two parts.
    Every query also sees its own position.
    """
    length, count = x.q.shape[2], x.q.shape[1]
    each = [parts[0] | parts[1]] * count if heads == "merged" else [parts[head % 2] for head in range(count)]
    seen = torch.stack(each)
    seen = (seen.tril() if causal else seen) | torch.eye(length, dtype=torch.bool)
    scores = x.q @ x.k.transpose(-1, -2) / math.sqrt(x.q.shape[-1])
    return scores.masked_fill(~seen, -math.inf).softmax(-1) @ x.v


def sparse_case(heads: str, stride: int | None, summary: int | None = None, count: int = 2) -> Case:
    def oracle(x: Inputs, _: Any, causal: bool = True) -> Tensor:
        size = x.q.shape[2], stride or 28
        return sparse(x, fixed_parts(*size, summary) if summary else strided_parts(*size), heads, causal)

    options: dict[str, Any] = {"pattern": "fixed" if summary else "strided", "heads": heads}
    given = {"stride": stride, "summary": summary}
    options |= {name: value for name, value in given.items() if value is not None}
    oracle_all = functools.partial(oracle, causal=False)
    return Case("sparse", options, oracle, heads=count, oracle_all=oracle_all)


CASES = {
    "sparse-strided": sparse_case("merged", 11),
    "sparse-strided-split": sparse_case("split", 11, count=3),
    "sparse-fixed": sparse_case("merged", 12, summary=3),
    "sparse-fixed-split": sparse_case("split", 12, summary=3, count=3),
    # The strides are the default (one row of 28), the smallest useful one and the largest useful one.
    "sparse-row": sparse_case("merged", None),
    "sparse-stride-1": sparse_case("merged", 1),
    "sparse-one-block": sparse_case("split", 200, summary=2),
}
