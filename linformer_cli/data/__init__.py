"""Data sets (`images`), images as sequences of values (`sequence`), and the order of training (`batches`).

The functions of these modules are not imported here, because help pages need the names of splits and fits, but neither
numpy nor torch.
"""

from typing import Literal, get_args

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
# Ways to fit an image whose aspect ratio differs from the model's.
Fit = Literal["crop", "pad", "stretch"]
