"""`lintx bench speech`: speech recognition with different attentions, and transcribing with a trained model."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from linformer_cli.errors import UsageError
from linformer_cli.files import require_writable
from linformer_cli.report.tables import list_columns
from linformer_cli.system.signals import StopRequest
from . import options
from .config_options import count, duration, option, several, with_fields
from .output import info, print_json, print_records, warn, write_plot
from .reports import choose_place, run_and_show

if TYPE_CHECKING:
    from linformer_cli.bench.speech_report import SpeechReport

_MODELS = "models"
_FOR_TRANSCRIBING = ("names", "out", "transcribe", "plot", "json")  # the other options are only for measuring


@dataclass(frozen=True, kw_only=True)
class SpeechOptions:
    names: str | None = several(
        None,
        "Encoders: bi-lstm, or mechanisms such as linear,lsh:rounds=1. Default: those of the "
        "paper. With --transcribe: the encoder to use, by default the one with the lowest "
        "error rate.",
        "--attention",
    )
    data: str = option("fsdd", "fsdd (spoken digits), or speech:DIR, a folder with WAV files and transcripts.tsv.")
    data_dir: options.DataDir = None
    budget: float = duration("20m", "Time for the whole benchmark.")
    preset: Literal["small", "paper"] = option("small", "Size of the encoders; paper is for a GPU.")
    seeds: int = option(3, "Trainings of each encoder; each holds out other speakers.", min=1, max=100)
    epochs: int | None = count(None, "Epochs of each training. Default: as many as the budget allows.")
    strings: int = count(128, "Strings of digits in an epoch.")
    lengths: str = several("400,800,1600,3200,6400", "Frames of 10 ms at which training steps are timed, or none.")
    out: Path = option(Path("bench-speech"), "Folder for speech.json, speech.md, the figures and the trained encoders.")
    transcribe: Path | None = option(
        None, "Only print the symbols of this WAV file with their times, by an encoder in --out.", metavar="FILE"
    )
    plot: Path | None = option(
        None,
        "Plot the curves (.png or .svg); with --transcribe, the spectrogram with the "
        "symbols (default: FILE.png in --out).",
    )
    device: options.Device = "auto"
    style: options.Style = "table"
    json: options.Json = False


@with_fields
def speech(context: typer.Context, asked: SpeechOptions) -> None:
    """Compare attentions in speech recognition.

    Examples:

    - `lintx bench speech --attention softmax,linear,linear:feature_map=relu --seeds 1 --plot curves.png`
    - `lintx bench speech --data speech:recordings --epochs 30`
    - `lintx bench speech --transcribe call.wav`

    Repeats table 3 of Katharopoulos 2020 with other data: the phoneme error rate (PER) and the time of an epoch of a
    bidirectional LSTM, softmax, LSH with 4 rounds and linear attention, on strings of spoken digits instead of WSJ: do
    not compare error rates with the published ones. Results are written every two minutes, at the end, and after
    Ctrl-C. Needs `pip install '.[speech]'`.
    """
    if asked.transcribe is not None:
        _refuse_unused(context)
    frames = [] if asked.lengths == "none" else options.parse_sizes(asked.lengths, "--lengths")
    options.require_plots(asked.plot)
    if asked.transcribe is not None:
        _transcribe(asked, asked.transcribe)
        return
    require_writable(asked.out / "speech.json")

    from linformer_cli.bench.speech import METHODS, SpeechBench, SpeechSettings, parse_methods
    from linformer_cli.bench.speech_report import describe_progress
    from linformer_cli.speech.corpus import load_corpus
    from linformer_cli.system.environment import import_extra
    from linformer_cli.units import format_duration

    variants = parse_methods(METHODS if asked.names is None else asked.names.split(","))
    for package in ("soundfile", "jiwer"):
        import_extra(package, "speech")
    corpus = load_corpus(asked.data, asked.data_dir)
    place = choose_place(asked.device, f", about {format_duration(asked.budget)}")
    info(corpus.title)
    for note in corpus.notes:
        info(note)
    sizes = asked.preset, asked.seeds, asked.epochs, asked.strings
    settings = SpeechSettings(asked.budget, *sizes, lengths=frames, device=place)
    pictures: dict[str, Any] = {}

    def run(stop: StopRequest) -> "SpeechReport":
        def show(rows: Any) -> None:
            info(describe_progress(rows))

        bench = SpeechBench(corpus, variants, settings, show, lambda report: report.write(asked.out, "speech"), stop)
        report = bench.run()
        bench.save_models(asked.out / _MODELS)
        if report.has_figures:
            info(f"wrote {asked.out}")
        if (draw := report.show("md").plots.get("curves")) is not None:
            pictures["plot"] = draw
        return report

    run_and_show(asked.style, asked.json, run, {"plot": asked.plot}, None, pictures)


def _refuse_unused(context: typer.Context) -> None:
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name not in _FOR_TRANSCRIBING and source is not None and source.name == "COMMANDLINE":
            flag = parameter.opts[0]
            raise UsageError(f"{flag} is for measuring, and --transcribe measures nothing; drop {flag}")


def _transcribe(asked: SpeechOptions, file: Path) -> None:
    picture, name = asked.plot or asked.out / f"{file.stem}.png", asked.names
    require_writable(picture)

    from linformer_cli.bench import speech_report
    from linformer_cli.bench.speech import parse_methods
    from linformer_cli.speech.saved import Heard, choose_recogniser, transcribe
    from linformer_cli.speech.waves import read_wave

    if asked.plot is None and file.stem in speech_report.FIGURES:
        raise UsageError(f"'{picture}' is a figure of the report; name another file with --plot")
    if name is not None:
        with contextlib.suppress(UsageError):  # of a name that was given with NAME=lsh:rounds=1
            name = parse_methods([name])[0].label
    recogniser = choose_recogniser(asked.out / _MODELS, name)
    wave = read_wave(file, recogniser.rate)
    if wave.file_rate != wave.rate:
        info(f"resampled from {wave.file_rate:,} to {wave.rate:,} Hz, the rate of the training data")
    transcript = transcribe(recogniser, wave)
    described = f"{recogniser.name}, PER {recogniser.error_rate:.1%} on {', '.join(recogniser.held_out)}"
    info(f"encoder {described}; {recogniser.title}")
    if wave.is_silent:
        warn(f"'{file}' is silent, so it has no symbols")
    text = " ".join(one.symbol for one in transcript.symbols)
    if asked.json:
        print_json({"file": file, "text": text, "model": described, "symbols": transcript.symbols, "plot": picture})
    else:
        print(text)
        if transcript.symbols:
            print_records(transcript.symbols, list_columns(Heard), "table")
    write_plot(picture, lambda kind: speech_report.render_transcript(transcript, f"{file.name} ({described})", kind))
