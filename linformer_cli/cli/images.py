"""Images loaded for a command, with notes about them on stderr."""

from typing import TYPE_CHECKING

from linformer_cli.system.distributed import ALONE, Team

from .output import info

if TYPE_CHECKING:
    from linformer_cli.config import DataConfig, ImageShape
    from linformer_cli.data import Split
    from linformer_cli.data.images import ImageSet


def load_training_images(data: "DataConfig", team: Team = ALONE) -> "tuple[ImageSet, ImageSet]":
    """Load the training and validation images for one process of `team`. Print how many there are."""
    from linformer_cli.data.images import load_for_training

    with team.leader_first():  # the leader may download the images
        train, validation = load_for_training(data)
    _show_notes(train)
    info(f"{data.name}: {len(train):,} training and {len(validation):,} validation {data.words.items}")
    return train, validation


def load_images_to_fit(name: str, split: "Split", data_dir: str | None, wanted: "ImageShape") -> "ImageSet":
    """Load one split of the data set `name`. Raises `UsageError` if its images do not have the size `wanted`."""
    from linformer_cli.data.images import fit_size, load_images

    images = load_images(name, split, data_dir, **fit_size(name, wanted))
    _show_notes(images)
    images.require_shape(wanted)
    return images


def _show_notes(images: "ImageSet") -> None:
    for note in images.notes:
        info(f"{images.name}: {note}")
