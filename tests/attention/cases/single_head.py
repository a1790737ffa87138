"""Reference for single-head attention, computed with T x T weights. It uses no code from the package."""

import math

import torch
from attention.inputs import Case, Inputs, Tensors
from torch import Tensor, nn


def single_head(x: Inputs, tensors: Tensors) -> Tensor:
    """Gate queries, keys and values separately, as in the source's code."""
    mean, variance = x.q.mean(-1, keepdim=True), x.q.var(-1, keepdim=True, correction=0)
    q = (x.q - mean) / (variance + 1e-5).sqrt() * tensors["query_norm.weight"] + tensors["query_norm.bias"]
    c, f = (tensors["value_gate.weight"] @ tensors["value_gate.start"].sigmoid() + tensors["value_gate.bias"]).chunk(2)
    q, k = q * tensors["query_gate"].sigmoid(), x.k * tensors["key_gate"].sigmoid()
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -math.inf).softmax(-1) @ (x.k * (f.sigmoid() * c.tanh()))


def fill_parameters(mechanism: nn.Module) -> None:
    """Make all parameters differ, and the value gate large enough to affect the result."""
    generator = torch.Generator().manual_seed(4)
    for parameter in mechanism.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = parameter.data + noise


CASES = {
    "single_head": Case("single_head", {}, single_head, heads=1, prepare=fill_parameters, keeps_pairs="after a prefix"),
}
