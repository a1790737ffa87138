"""`lintx bench`: the group of benchmark commands. It has no options, because they would hide those of the commands."""

import typer

from . import (
    bench_approximation,
    bench_attention,
    bench_codec,
    bench_copy,
    bench_gpu,
    bench_paper,
    bench_quality,
    bench_sample,
    bench_speech,
    bench_train,
)

app = typer.Typer(
    help="""Measure speed, memory and quality.

    Speeds come with their spread and a description of the machine. A mechanism whose parallel and step forms disagree
    is not timed.

    Examples:

    - `lintx bench sample --checkpoint runs/first --batch 1,64`
    - `lintx bench train --preset mnist-paper`
    - `lintx bench attention --positions 1024,4096`
    - `lintx bench codec --picture bits.png`
    - `lintx bench quality --image nearest.png`
    - `lintx bench copy --budget 10m --plot copy.png`
    - `lintx bench approximation --plot errors.svg`
    - `lintx bench paper --budget 10m`
    - `lintx bench speech --budget 20m`
    - `lintx bench gpu --out gpu.json`
    """,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("sample")(bench_sample.sample)
app.command("train")(bench_train.train)
app.command("attention")(bench_attention.attention)
app.command("codec")(bench_codec.codec)
app.command("quality")(bench_quality.quality)
app.command("copy")(bench_copy.copy)
app.command("paper")(bench_paper.paper)
app.command("speech")(bench_speech.speech)
app.command("gpu")(bench_gpu.gpu)
app.command("approximation")(bench_approximation.approximation)
