"""Landmarks of bidirectional Nystrom attention: the means of queries and keys over segments of a sequence."""

import torch
from torch import Tensor


def segment_weights(lengths: Tensor, positions: int, landmarks: int) -> Tensor:
    """Weights [B, 1, landmarks, positions], in float64, that average each segment of sequences of `lengths` [B].

    A sequence of n positions has m = min(landmarks, n) segments, and position t belongs to segment t m / n, rounded
    down. The weights of other segments are 0.
    """
    n = lengths.unsqueeze(1)
    place = torch.arange(positions, device=lengths.device)
    segment = torch.where(place < n, place * n.clamp(max=landmarks) // n, landmarks)
    members = (segment.unsqueeze(1) == torch.arange(landmarks, device=lengths.device).unsqueeze(1)).unsqueeze(1)
    return members / members.sum(dim=-1, keepdim=True).clamp(min=1).double()
