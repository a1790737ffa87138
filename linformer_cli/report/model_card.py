"""The model card, README.md in every checkpoint folder."""

from linformer_cli.checkpoint_files import CheckpointInfo
from linformer_cli.config import Origin
from linformer_cli.units import WINDOWS, format_bits


def render_card(name: str, info: CheckpointInfo, parameters: int, mixing: str) -> str:
    """Render the model card of a checkpoint in Markdown."""
    model, training, words = info.model, info.training, info.data.words
    size = f"{model.image.height} x {model.image.width} x {model.image.channels}"
    if words is WINDOWS:
        size = f"{model.image.positions:,} bytes"
    lines = [
        f"# {name}",
        "",
        f"A lintx {'byte' if words is WINDOWS else 'pixel'} model: {mixing}, {model.layers} layers of width "
        f"{model.width}, {parameters:,} parameters, {words.items} of {size}"
        f"{f', conditional on one of {model.classes} classes' if model.classes else ''}"
        f"{' or on none' if model.optional_class else ''}.",
        "",
        f"- Trained on {info.data.name}: {training.images_seen:,} {words.items} in {training.step:,} steps, "
        f"{training.elapsed_seconds:,.0f} seconds.",
    ]
    if training.init_from is not None:
        lines.append(f"- Initialised from {_describe(training.init_from)}.")
    lines += [f"- Distilled from {_describe(teacher)}." for teacher in training.distill_from]
    if training.validation_bits_per_dim is not None:
        lines.append(
            f"- Validation: {format_bits(training.validation_bits_per_dim, training.validation_standard_error)} "
            f"{words.bits} over {training.validation_images} {words.items}, including the first value of each "
            f"{words.item}{', given the class' if model.required_classes else ''}."
        )
    return "\n".join([*lines, f"- Written by lintx {info.lintx_version}.", ""])


def _describe(origin: Origin) -> str:
    return f"{origin.checkpoint} ({origin.attention} attention, {origin.step:,} steps, sha256 {origin.weights_sha256})"
