"""Data sets (`images`), images as sequences of values (`sequence`), and the order of training (`batches`).

The functions of these modules are not imported here: help pages need the names of splits and fits, but neither numpy
nor torch.
"""

from typing import Literal, get_args

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
# How to fit an image of another aspect ratio.
Fit = Literal["crop", "pad", "stretch"]
