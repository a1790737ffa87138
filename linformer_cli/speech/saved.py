"""A trained encoder as one safetensors file, with what is needed to transcribe a recording."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from linformer_cli.documents import parse_json
from linformer_cli.errors import CheckpointError, UsageError
from linformer_cli.files import write_file
from linformer_cli.model.pixel_model import expected_weights
from linformer_cli.report.tables import Shown
from .ctc_task import decode_greedily
from .encoder import Encoder, EncoderSettings, build_encoder
from .waves import HOP_SECONDS, Wave, log_mel, normalise

_FORMAT = "lintx-speech-1"


@dataclass(frozen=True)
class Recogniser:
    """A trained encoder, its symbols and sample rate, and its `error_rate` on the speakers that were `held_out`."""

    name: str
    attention: str
    options: Mapping[str, Any]
    encoder: Encoder
    alphabet: tuple[str, ...]
    rate: int
    title: str
    held_out: tuple[str, ...]
    error_rate: float


@dataclass(frozen=True)
class Heard:
    """A symbol, its start and end in seconds, and the mean probability of its positions."""

    symbol: Annotated[str, Shown("symbol")]
    start_seconds: Annotated[float, Shown("start", ".2f", "s")]
    end_seconds: Annotated[float, Shown("end", ".2f", "s")]
    probability: Annotated[float, Shown("probability", ".2f")]


@dataclass(frozen=True)
class Transcript:
    """The symbols of a recording in order, and its log-mel features [T, 40] before normalisation."""

    symbols: tuple[Heard, ...]
    features: Tensor
    hop_seconds: float = HOP_SECONDS


def save_recogniser(path: Path, recogniser: Recogniser) -> None:
    about = {
        field.name: getattr(recogniser, field.name)
        for field in dataclasses.fields(recogniser)
        if field.name != "encoder"
    }
    about["settings"] = dataclasses.asdict(recogniser.encoder.settings)
    weights = {name: tensor.contiguous().cpu() for name, tensor in recogniser.encoder.state_dict().items()}
    write_file(path, save(weights, {"format": _FORMAT, "about": json.dumps(about)}))


def load_recogniser(path: Path) -> Recogniser:
    """Read a recogniser. Raises `CheckpointError` if the file is missing, damaged or something else."""
    try:
        with safe_open(str(path), framework="pt") as opened:
            metadata = opened.metadata() or {}
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # it is not a mapping
        if metadata.get("format") != _FORMAT:
            raise ValueError(f"its format is not {_FORMAT}")
        about = parse_json(metadata["about"])
        if not isinstance(about, dict):
            raise ValueError("it does not describe an encoder")
        settings = EncoderSettings(**about.pop("settings"))
        about |= {key: tuple(about[key]) for key in ("alphabet", "held_out")}

        def build() -> Encoder:
            return build_encoder(about["attention"], about["options"], settings, len(about["alphabet"]))

        # Compare shapes before allocating memory, because damaged settings may ask for any amount.
        expected = {name: weight.shape for name, weight in expected_weights(build).items()}
        if expected != {name: weight.shape for name, weight in weights.items()}:
            raise ValueError("its weights do not fit its settings")
        encoder = build()
        encoder.load_state_dict(weights)
        return Recogniser(encoder=encoder.eval(), **about)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError, UsageError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"'{path}' is not a model of lintx bench speech ({reason}); train it again") from None


def choose_recogniser(folder: Path, name: str | None) -> Recogniser:
    """Load the recogniser `name`, or the one with the lowest error rate. Raises `CheckpointError` if there is none."""
    files = sorted(folder.glob("*.safetensors"))
    if name is not None:
        files = [file for file in files if file.stem == name]
    if not files:
        wanted = "no trained encoder" if name is None else f"no trained encoder '{name}'"
        raise CheckpointError(f"{wanted} in '{folder}'; run lintx bench speech first, or give its folder with --out")
    return min(map(load_recogniser, files), key=lambda one: one.error_rate)


@torch.no_grad()
def transcribe(recogniser: Recogniser, wave: Wave) -> Transcript:
    """Decode a recording greedily. `wave` must have the recogniser's rate. A silent recording has no symbols."""
    features = log_mel(wave.samples, wave.rate)
    if wave.is_silent:
        return Transcript((), features)
    found, _ = recogniser.encoder(normalise(features).unsqueeze(0), torch.tensor([len(features)]))
    step = recogniser.encoder.settings.stack * HOP_SECONDS
    heard = [
        Heard(
            recogniser.alphabet[symbol - 1],
            start * step,
            min(end * step, wave.seconds),
            float(found[0, start:end, symbol].exp().mean()),
        )
        for symbol, start, end in decode_greedily(found[0])
    ]
    return Transcript(tuple(heard), features)
