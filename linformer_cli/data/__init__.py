"""Data sets, images as sequences of values, and the order of training. Help pages read this file without torch."""

from typing import Literal, get_args

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
# Whether to bring drawings into the frame of the training images.
Framing = Literal["auto", "none"]
