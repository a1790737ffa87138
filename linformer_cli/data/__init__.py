"""Data sets (`images`), images as sequences of values (`sequence`), and the order of training (`batches`).

This file imports none of these modules, so that help pages can list splits and fits without importing numpy or torch.
"""

from typing import Literal, get_args

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
# Whether to bring drawings into the frame of the training images.
Framing = Literal["auto", "none"]
