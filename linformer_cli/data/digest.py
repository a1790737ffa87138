"""What a run remembers of its images, so that it notices when they have changed."""

import hashlib
from collections.abc import Iterable

import numpy as np

from linformer_cli.documents import Config
from .images import ImageSet

# At most this many images of a split are compared, evenly spaced. It bounds the time that a run takes to begin.
_MOST_IMAGES = 2**16


class SplitDigest(Config):
    """The images of a split, as they are after decoding, in hexadecimal digits.

    images: does not depend on the order of the images
    order: of the images
    classes: which image has which class
    """

    count: int
    images: str
    order: str
    classes: str


class DataDigest(Config):
    """The training and the validation images of a run."""

    training: SplitDigest
    validation: SplitDigest

    def describe_changes(self, now: "DataDigest") -> str:
        """Say how the images of `now` differ from these, or return an empty text."""
        before, after = (self.training, self.validation), (now.training, now.validation)
        if [split.images for split in before] != [split.images for split in after]:
            if _add(split.images for split in before) == _add(split.images for split in after):
                return "images have moved between training and validation, as after renaming files"
            return f"some of the {before[0].count:,} training and {before[1].count:,} validation images were replaced"
        if [split.classes for split in before] != [split.classes for split in after]:
            return "images have other classes, as after renaming folders"
        return "" if self == now else "the images are in another order, as after renaming files"


def digest_data(training: ImageSet, validation: ImageSet) -> DataDigest:
    return DataDigest(training=_digest(training), validation=_digest(validation))


def _digest(found: ImageSet) -> SplitDigest:
    chosen = np.arange(0, len(found), -(-len(found) // _MOST_IMAGES))
    images, classes = [], []
    for places in np.split(chosen, range(1024, len(chosen), 1024)):
        labels = np.full(len(places), -1) if found.labels is None else found.labels[places]
        for image, label in zip(found.images[places], labels, strict=True):
            images.append(_hash(image.tobytes()))
            classes.append(_hash(f"{images[-1]} {label}".encode()))
    order = _hash(" ".join(images).encode())
    return SplitDigest(count=len(found), images=_add(images), order=order, classes=_add(classes))


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _add(hashes: Iterable[str]) -> str:
    return f"{sum(int(one, 16) for one in hashes) % 2**64:016x}"
