"""Reference for Nystrom attention, computed with T x T weights for every landmark. It uses no code from the package."""

import math

import torch
from attention.inputs import Case, Inputs, Tensors
from torch import Tensor


def landmark_inverse(queries: Tensor, keys: Tensor, iterations: int) -> Tensor:
    """Return Z [H, m, m], the result of `iterations` Newton steps for the inverse of A = softmax(q~ k~^T / sqrt(K))."""
    a = (queries @ keys.transpose(-1, -2) / math.sqrt(queries.shape[-1])).softmax(-1)
    column, row = a.abs().sum(-2).max(-1).values, a.abs().sum(-1).max(-1).values
    z, one = a.transpose(-1, -2) / (column * row)[:, None, None], torch.eye(a.shape[-1], dtype=a.dtype)
    for _ in range(iterations):
        z = 0.25 * z @ (13 * one - a @ z @ (15 * one - a @ z @ (7 * one - a @ z)))
    return z


def landmark_averages(queries: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return b [B, H, T, m, V]: the softmax average of v_j over j <= t for each t and landmark."""
    scores = torch.einsum("hmk,bhjk->bhmj", queries, k) / math.sqrt(k.shape[-1])
    future = torch.ones(k.shape[2], k.shape[2]).triu(1) == 1
    weights = scores.unsqueeze(2).masked_fill(future[:, None, :], -math.inf).softmax(-1)
    return weights @ v.unsqueeze(2)


def convolve(v: Tensor, weight: Tensor) -> Tensor:
    """Return the sum over j of w[kernel - 1 - (t - j)] v_j; w is [H, kernel], and weights outside its range are 0."""
    length, kernel = v.shape[2], weight.shape[1]
    matrix = torch.zeros(len(weight), length, length, dtype=v.dtype)
    for distance in range(min(kernel, length)):
        band = torch.ones(length - distance, dtype=v.dtype).diag(-distance)
        matrix = matrix + weight[:, kernel - 1 - distance, None, None] * band
    return matrix @ v


def nystrom(x: Inputs, tensors: Tensors, iterations: int) -> Tensor:
    queries, keys = tensors["landmark_queries"], tensors["landmark_keys"]
    f = (x.q @ keys.transpose(-1, -2) / math.sqrt(x.q.shape[-1])).softmax(-1)
    b = landmark_averages(queries, x.k, x.v)
    y = ((f @ landmark_inverse(queries, keys, iterations)).unsqueeze(-2) @ b).squeeze(-2)
    weight = tensors.get("convolution.weight")
    return y if weight is None else y + convolve(x.v, weight)


def segment_means(x: Tensor, landmarks: int) -> Tensor:
    """Return [B, H, m, K]; x is cut at t m / T for the segment of position t."""
    length = x.shape[2]
    m = min(landmarks, length)
    segments = [[t for t in range(length) if t * m // length == i] for i in range(m)]
    return torch.stack([x[:, :, rows].mean(2) for rows in segments], dim=2)


def convolve_all(v: Tensor, weight: Tensor) -> Tensor:
    """Return the sum over i of w_i v_{t - kernel // 2 + i}; v outside the sequence is 0."""
    length, kernel = v.shape[2], weight.shape[1]
    padded = torch.nn.functional.pad(v, (0, 0, kernel // 2, kernel))
    return sum(weight[:, i, None, None] * padded[:, :, i : i + length] for i in range(kernel))


def nystrom_all(x: Inputs, tensors: Tensors, iterations: int, landmarks: int) -> Tensor:
    queries, keys = segment_means(x.q, landmarks), segment_means(x.k, landmarks)
    f = (x.q @ keys.transpose(-1, -2) / math.sqrt(x.q.shape[-1])).softmax(-1)
    b = (queries @ x.k.transpose(-1, -2) / math.sqrt(x.q.shape[-1])).softmax(-1) @ x.v
    inverses = [landmark_inverse(*of_image, iterations) for of_image in zip(queries, keys, strict=True)]
    y = f @ torch.stack(inverses) @ b
    weight = tensors.get("convolution.weight")
    return y if weight is None else y + convolve_all(x.v, weight)


def nystrom_case(iterations: int = 6, **options: int) -> Case:
    return Case(
        "nystrom",
        options | {"iterations": iterations},
        lambda x, tensors: nystrom(x, tensors, iterations),
        oracle_all=lambda x, tensors: nystrom_all(x, tensors, iterations, options["landmarks"]),
    )


CASES = {
    "nystrom": nystrom_case(landmarks=4, kernel=5, chunk=16),
    "nystrom-no-convolution": nystrom_case(landmarks=3, kernel=0, chunk=8),
    "nystrom-long-kernel": nystrom_case(iterations=3, landmarks=1, kernel=40, chunk=1),
}
