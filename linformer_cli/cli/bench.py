"""`lintx bench`: the group of benchmark commands. It has no options, because they would hide those of the commands."""

import typer

from .groups import LazyGroup


class _Benchmarks(LazyGroup):
    table = {
        "sample": ("bench_speed.sample", "Measure images/s of sampling."),
        "train": ("bench_speed.train", "Measure images/s of whole training steps."),
        "attention": ("bench_speed.attention", "Measure how time and memory grow with T."),
        "codec": ("bench_quality.codec", "Measure size and speed of compression."),
        "quality": ("bench_quality.quality", "Compare samples with test images."),
        "copy": ("bench_copy.copy", "Measure how fast models learn to copy."),
        "recall": ("bench_copy.recall", "Measure how much models recall."),
        "paper": ("bench_paper.paper", "Repeat the figures of Katharopoulos 2020."),
        "speech": ("bench_speech.speech", "Compare attentions in speech recognition."),
        "gpu": ("bench_speed.gpu", "Check and measure a GPU."),
        "approximation": ("bench_quality.approximation", "Measure the errors of random features."),
    }


app = typer.Typer(
    cls=_Benchmarks,
    help="""Measure speed, memory and quality.

    Examples:

    - `lintx bench sample --checkpoint runs/first --batch 1,64`
    - `lintx bench train --preset mnist-paper`
    - `lintx bench paper --budget 10m`

    Speeds come with their spread and a description of the machine. A mechanism whose parallel and step forms disagree
    is not timed.
    """,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
