"""`lintx bench speech`: speech recognition with different attentions."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from linformer_cli.files import require_writable
from linformer_cli.system.signals import StopRequest
from . import options
from .config_options import count, duration, option, several, with_fields
from .output import info
from .reports import choose_place, run_and_show

if TYPE_CHECKING:
    from linformer_cli.bench.speech_report import SpeechReport


@dataclass(frozen=True, kw_only=True)
class SpeechOptions:
    names: str | None = several(
        None,
        "Encoders: bi-lstm, or mechanisms such as linear,lsh:rounds=1. Default: those of the paper.",
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
    out: Path = option(Path("bench-speech"), "Folder for speech.json, speech.md and the figures.")
    plot: Path | None = option(None, "Plot the curves (.png or .svg).")
    device: options.Device = "auto"
    style: options.Style = "table"
    json: options.Json = False


@with_fields
def speech(asked: SpeechOptions) -> None:
    """Compare attentions in speech recognition.

    Examples:

    - `lintx bench speech --attention softmax,linear,linear:feature_map=relu --seeds 1 --plot curves.png`
    - `lintx bench speech --data speech:recordings --epochs 30`

    Repeats table 3 of Katharopoulos 2020 with other data: the phoneme error rate (PER) and the time of an epoch of a
    bidirectional LSTM, softmax, LSH with 4 rounds and linear attention, on strings of spoken digits instead of WSJ: do
    not compare error rates with the published ones. Results are written every two minutes, at the end, and after
    Ctrl-C. Needs `pip install '.[speech]'`.
    """
    frames = [] if asked.lengths == "none" else options.parse_sizes(asked.lengths, "--lengths")
    options.require_plots(asked.plot)
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
        if report.has_figures:
            info(f"wrote {asked.out}")
        if (draw := report.show("md").plots.get("curves")) is not None:
            pictures["plot"] = draw
        return report

    run_and_show(asked.style, asked.json, run, {"plot": asked.plot}, None, pictures)
