"""`lintx info`: the model, data and training of a checkpoint."""

from . import options
from .output import print_facts, print_json


def info(checkpoint: options.CheckpointArgument = None, json: options.Json = False) -> None:
    """Describe a checkpoint.

    Examples:

    - `lintx info runs/first`
    - `lintx info mnist-deep --json`

    Shows its model, data, training and sizes.
    """
    from linformer_cli.checkpoint import load_weights, read_checkpoint
    from linformer_cli.units import WINDOWS, format_bits, format_bytes, format_duration

    found = read_checkpoint(checkpoint)
    model = load_weights(found)
    details, training = found.info, found.info.training
    sizes = {"parameters": model.parameter_count(), "state_bytes": model.state_bytes(1)}
    if json:
        print_json({"checkpoint": found.name, **details.model_dump(), **sizes})
        return
    network, image, words = details.model, details.model.image, details.data.words
    size = f"{image.height} x {image.width} x {image.channels}, {image.kind}, T = {image.positions}"
    named = f": {', '.join(details.data.class_names)}" if details.data.class_names else ""
    facts = {
        "checkpoint": found.name,
        "attention": f"{network.attention} {network.attention_options or ''}".strip(),
        "network": f"{network.layers} layers, {network.heads} heads of {network.head_width}, width {network.width}, "
        f"{network.feed_forward_kind} feed-forward {network.feed_forward}, {network.norm}-norm, "
        f"{network.context} context, {network.head} head",
        words.items: f"{image.positions:,} bytes" if words is WINDOWS else size,
        "classes": f"{network.classes}, {'optional' if network.optional_class else 'the model is conditional'}{named}"
        if network.classes
        else "none",
        "parameters": f"{sizes['parameters']:,}",
        "state": f"{format_bytes(sizes['state_bytes'])} per {words.item} after {image.positions} positions",
        "trained on": f"{details.data.name}, {training.images_seen:,} {words.items} in {training.step:,} steps, "
        f"{format_duration(training.elapsed_seconds)}",
        "weights": f"sha256 {found.digest}",
    }
    if training.validation_bits_per_dim is not None:
        bits = format_bits(training.validation_bits_per_dim, training.validation_standard_error)
        given = ", given the class" if network.required_classes else ""
        facts["validation"] = f"{bits} {words.bits}, {training.validation_images} {words.items}{given}"
    print_facts(facts)
