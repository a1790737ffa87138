"""`lintx train`: train a pixel model, or go on with a run."""

import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linformer_cli.errors import UsageError

from . import options
from .output import print_facts, print_json, talk
from .progress import TrainingDisplay

if TYPE_CHECKING:
    from linformer_cli.checkpoint import Checkpoint
    from linformer_cli.config import DataConfig, RunConfig
    from linformer_cli.data.images import ImageSet
    from linformer_cli.training.loop import Trainer
    from linformer_cli.training.run_folder import RunFolder

RUNS = Path("runs")


class OptimizerName(StrEnum):
    ADAMW = "adamw"
    RADAM = "radam"


class ScheduleName(StrEnum):
    COSINE = "cosine"
    CONSTANT = "constant"


_LENGTH, _MODEL, _TRAINING, _RUN = "Length (one of them)", "Model", "Training", "Run"


def _option(*names: str, panel: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False, **more)


def train(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="The run to go on with, for --resume.")] = None,
    data: Annotated[
        str | None,
        _option(
            "--data",
            panel=_RUN,
            help="mnist (default), fashion-mnist, cifar10, array:DIR, folder:PATH or glyphs.",
            metavar="NAME",
        ),
    ] = None,
    data_dir: options.DataDir = None,
    image_size: options.ImageSize = None,
    channels: options.Channels = None,
    out: Annotated[
        Path | None,
        _option("--out", panel=_RUN, help="The run's folder; default a new one in runs/.", metavar="FOLDER"),
    ] = None,
    resume: Annotated[
        bool, _option("--resume", panel=_RUN, help="Go on with RUN, or with the newest in runs/, exactly as it was.")
    ] = False,
    init_from: Annotated[
        str | None,
        _option(
            "--init-from",
            panel=_RUN,
            help="Begin with the weights of a run, checkpoint or shipped model that fit; also its network and data.",
            metavar="CHECKPOINT",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        _option("--config", panel=_RUN, help="TOML with [model], [data], [train]; flags win.", metavar="FILE"),
    ] = None,
    dry_run: Annotated[
        bool,
        _option("--dry-run", panel=_RUN, help="Print the resolved settings, sizes and one timed step; train nothing."),
    ] = False,
    steps: Annotated[int | None, _option("--steps", panel=_LENGTH, min=1, help="Optimizer steps.")] = None,
    epochs: Annotated[
        float | None, _option("--epochs", panel=_LENGTH, help="Passes over the training images; the default is 3.")
    ] = None,
    max_time: Annotated[
        str | None, _option("--max-time", panel=_LENGTH, help="Such as 10m or 1h30m; goes on counting after --resume.")
    ] = None,
    preset: Annotated[
        str | None, _option("--preset", panel=_MODEL, help="mnist-small (default), mnist-paper, cifar10-paper, tiny.")
    ] = None,
    attention: Annotated[str | None, _option("--attention", panel=_MODEL, help="See lintx attentions.")] = None,
    attention_option: Annotated[
        list[str] | None,
        _option(
            "--attention-option", panel=_MODEL, help="An option of the attention; repeatable.", metavar="KEY=VALUE"
        ),
    ] = None,
    context_name: Annotated[
        str | None, _option("--context", panel=_MODEL, help="Known values a position sees: previous or neighbours.")
    ] = None,
    head: Annotated[str | None, _option("--head", panel=_MODEL, help="categorical or mixture.")] = None,
    layers: Annotated[int | None, _option("--layers", panel=_MODEL, help="Blocks.")] = None,
    heads: Annotated[int | None, _option("--heads", panel=_MODEL, help="Attention heads.")] = None,
    width: Annotated[int | None, _option("--width", panel=_MODEL, help="Width of the residual stream.")] = None,
    batch: Annotated[int | None, _option("--batch", panel=_TRAINING, help="Images at once; default 16.")] = None,
    accumulation: Annotated[
        int | None, _option("--accumulation", panel=_TRAINING, help="Batches added up for one step; default 1.")
    ] = None,
    optimizer: Annotated[OptimizerName | None, _option("--optimizer", panel=_TRAINING, help="Default adamw.")] = None,
    learning_rate: Annotated[
        float | None, _option("--learning-rate", "--lr", panel=_TRAINING, help="The highest; default 0.002.")
    ] = None,
    schedule: Annotated[
        ScheduleName | None, _option("--schedule", panel=_TRAINING, help="After warm-up; default cosine.")
    ] = None,
    warmup_steps: Annotated[
        int | None, _option("--warmup-steps", panel=_TRAINING, help="Linear warm-up; default 100.")
    ] = None,
    weight_decay: Annotated[
        float | None, _option("--weight-decay", panel=_TRAINING, help="On matrices only; default 0.05.")
    ] = None,
    clip: Annotated[
        float | None, _option("--clip", panel=_TRAINING, help="Largest gradient norm; 0 for none; default 1.")
    ] = None,
    ema: Annotated[
        float | None, _option("--ema", panel=_TRAINING, help="Decay of averaged weights, such as 0.999; default none.")
    ] = None,
    seed: Annotated[int | None, _option("--seed", panel=_TRAINING, help="Of weights and order; default 0.")] = None,
    device: Annotated[
        str | None, _option("--device", panel=_TRAINING, help="auto, cpu, cuda, cuda:INDEX or mps.")
    ] = None,
    precision: Annotated[
        options.PrecisionName | None,
        _option("--precision", panel=_TRAINING, help="auto: bf16 autocast where the hardware multiplies bf16."),
    ] = None,
    evaluate_every: Annotated[
        int | None, _option("--evaluate-every", panel=_TRAINING, help="Steps between validations; default 500.")
    ] = None,
    sample_every: Annotated[
        int | None, _option("--sample-every", panel=_TRAINING, help="Steps between sample grids; 0 never; default 500.")
    ] = None,
    save_every: Annotated[
        int | None, _option("--save-every", panel=_TRAINING, help="Steps between saves; default 200.")
    ] = None,
    keep_last: Annotated[
        int | None, _option("--keep-last", panel=_TRAINING, help="How many of the newest saves stay; default 1.")
    ] = None,
    checkpoint: Annotated[
        str | None, _option("--checkpoint", "-c", panel=_RUN, help="The same as --resume RUN.", metavar="RUN")
    ] = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Train a model, or go on with a run.

    Bare, it means `--data mnist --preset mnist-small` into a new folder in runs/.

    A run's folder holds config.toml (everything resolved), metrics.csv, samples/, last/ (for --resume) and best/ (by
    validation). Flags win over --config, that over the preset, that over defaults. The first Ctrl-C or SIGTERM
    finishes the step, saves, and prints how to go on; a second leaves at once.

    Examples:

    - `lintx train --data mnist --data-dir DIR --preset mnist-small --max-time 10m --out runs/first`
    - `lintx train --data glyphs --preset tiny --steps 200`
    - `lintx train --attention softmax --dry-run`
    - `lintx train --resume runs/first --max-time 1h`
    - `lintx train --init-from runs/first --attention softmax --out runs/moved`
    """
    given_train = _given(
        steps=steps,
        epochs=epochs,
        max_time=None if max_time is None else options.parse_duration(max_time),
        batch=batch,
        accumulation=accumulation,
        optimizer=optimizer and optimizer.value,
        learning_rate=learning_rate,
        schedule=schedule and schedule.value,
        warmup_steps=warmup_steps,
        weight_decay=weight_decay,
        clip=clip,
        ema=ema,
        seed=seed,
        device=device,
        precision=precision and precision.value,
        evaluate_every=evaluate_every,
        sample_every=sample_every,
        save_every=save_every,
        keep_last=keep_last,
    )
    given_model = _given(attention=attention, context=context_name, head=head, layers=layers, heads=heads, width=width)
    if attention_option:
        given_model["attention_options"] = options.parse_pairs(attention_option, "--attention-option")
    given_data = _given(name=data, data_dir=data_dir, image_size=image_size, channels=channels)
    if checkpoint is not None:
        run, resume = options.one_checkpoint(run, checkpoint), True
    if run is not None and not resume:
        raise UsageError(f"unexpected '{run}'; to go on with that run: lintx train --resume {run}")

    from linformer_cli.training.run_folder import RunFolder
    from linformer_cli.training.settings import find_source, merge_settings

    source = None
    if resume:
        folder = RunFolder(Path(run) if run is not None else _newest_run())
        changed = {
            **given_model,
            **_given(data=data, image_size=image_size, channels=channels, preset=preset, out=out, config=config),
            **_given(init_from=init_from),
        }
        settings = _extend(folder.read_config(), given_train, changed, data_dir)
        images = _load_images(settings.data)
    else:
        source = find_source(init_from, config)
        merged = merge_settings(config, preset, given_model, given_data, given_train, source)
        folder = RunFolder(out if out is not None else _new_run(merged.preset))
        images = _load_images(merged.data_config)
        settings = merged.build(images[0].shape)
    trainer = _build_trainer(settings, folder, *images)
    if source is not None:
        _take_over(trainer, source)
    if dry_run:
        _dry_run(trainer, json)
        return
    if not resume:
        folder.create(settings)
    with folder.lock():
        if resume:
            trainer.resume()
            folder.write_config(settings)
        talk(f"training in {folder.path} from step {trainer.progress.step}")
        _run(trainer, folder, json)


def _given(**values: Any) -> dict[str, Any]:
    """What was given on the command line."""
    return {key: value for key, value in values.items() if value is not None}


def _load_images(data: "DataConfig") -> "tuple[ImageSet, ImageSet]":
    """The training and the validation images."""
    from linformer_cli.data.images import load_images

    train = load_images(data.name, "train", data.data_dir, data.image_size, data.channels)
    validation = load_images(data.name, "validation", data.data_dir, data.image_size, data.channels)
    for note in train.notes:
        talk(f"{data.name}: {note}")
    talk(f"{data.name}: {len(train):,} training and {len(validation):,} validation images")
    return train, validation


def _extend(config: "RunConfig", train: dict[str, Any], changed: dict[str, Any], data_dir: str | None) -> "RunConfig":
    """A resumed run's configuration: another length, device or data folder are all that may change."""
    from linformer_cli.config import TrainConfig, parse_config
    from linformer_cli.training.settings import LENGTHS

    refused = [*changed, *(key for key in train if key not in (*LENGTHS, "device"))]
    if refused:
        flag = "--" + refused[0].replace("_", "-")
        raise UsageError(f"--resume goes on with the run's own settings; drop {flag} or start a new run")
    settings = config.train.model_dump()
    if any(key in train for key in LENGTHS):
        settings |= dict.fromkeys(LENGTHS)
    data = config.data if data_dir is None else config.data.model_copy(update={"data_dir": data_dir})
    return config.model_copy(update={"data": data, "train": parse_config(TrainConfig, {**settings, **train}, "train")})


def _build_trainer(settings: "RunConfig", folder: "RunFolder", train: "ImageSet", validation: "ImageSet") -> "Trainer":
    from linformer_cli.runtime import choose_device, choose_precision
    from linformer_cli.training.loop import Trainer

    device = choose_device(settings.train.device)
    precision = choose_precision(settings.train.precision, device.value, "training")
    talk(f"device {device.value} ({device.reason}), precision {precision.value} ({precision.reason})")
    return Trainer(settings, folder, train, validation, device.value, precision.value)


def _take_over(trainer: "Trainer", source: "Checkpoint") -> None:
    from linformer_cli.checkpoint import load_weights
    from linformer_cli.training.takeover import summarise_names

    moved = trainer.take_over(load_weights(source))
    talk(f"taken over {len(moved.taken)} tensors of {source.path} ({source.info.model.attention} attention)")
    talk(f"new: {summarise_names(moved.new)}")
    talk(f"left: {summarise_names(moved.left)}")


def _run(trainer: "Trainer", folder: "RunFolder", json: bool) -> None:
    from linformer_cli.runtime import catch_signals

    with catch_signals() as stop, TrainingDisplay() as display:
        progress = trainer.run(display, stop)
    talk(f"finished step {progress.step}: validation {progress.validation_bits_per_dim:.4f} bits/dim; try")
    talk(f"lintx sample {folder.path} -n 16 -o samples.png")
    if json:
        result = {
            "run": folder.path,
            "init_from": trainer.config.init_from,
            "attention": trainer.config.model.attention,
            "engine": "parallel",
            "precision": "bf16" if trainer.autocast else "fp32",
            "device": trainer.device,
            "batch": trainer.config.train.batch,
            "steps": progress.step,
            "images": progress.images_seen,
            "elapsed_seconds": progress.elapsed_seconds,
            "bits_per_dim": progress.validation_bits_per_dim,
            "standard_error": progress.validation_standard_error,
            "best_bits_per_dim": progress.best_bits_per_dim,
        }
        print_json(result)


def _dry_run(trainer: "Trainer", json: bool) -> None:
    """What a run would be: its configuration, sizes, memory and the time of one step."""
    import tomli_w

    from linformer_cli.report.terminal import format_bytes
    from linformer_cli.runtime import measure_peak_memory

    seconds = trainer.time_one_step()
    settings = trainer.config.train
    images = settings.batch * settings.accumulation
    facts = {
        "parameters": trainer.model.parameter_count(),
        "state_bytes": trainer.model.state_bytes(1),
        "peak_memory_bytes": measure_peak_memory(trainer.device),
        "seconds_per_step": seconds,
        "images_per_second": images / seconds,
    }
    if json:
        print_json({"config": trainer.config, **facts})
        return
    print(tomli_w.dumps(trainer.config.model_dump(exclude_none=True)))
    print_facts(
        {
            "parameters": f"{facts['parameters']:,}",
            "state": f"{format_bytes(facts['state_bytes'])} an image while sampling",
            "memory": f"{format_bytes(facts['peak_memory_bytes'])} at the peak of one step",
            "one step": f"{seconds:.3g} s, {facts['images_per_second']:.3g} images/s",
        }
    )


def _new_run(preset: str) -> Path:
    """A folder in runs/ that does not exist yet, named by date and preset."""
    base = RUNS / f"{datetime.datetime.now():%Y-%m-%d-%H%M%S}-{preset}"
    numbered = (base.with_name(f"{base.name}-{number}") for number in range(2, 1000))
    return next(path for path in (base, *numbered) if not path.exists())


def _newest_run() -> Path:
    found = sorted(RUNS.glob("*/config.toml"), key=lambda file: file.stat().st_mtime)
    if not found:
        raise UsageError(f"there is no run in '{RUNS}' to go on with; name one: lintx train --resume FOLDER")
    return found[-1].parent
