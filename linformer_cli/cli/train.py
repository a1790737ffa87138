"""`lintx train`: train a pixel model, or go on with a run."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from linformer_cli.errors import UsageError
from linformer_cli.system.distributed import join_team, notice_loss

from . import options
from .images import load_training_images
from .output import print_facts, print_json, talk
from .progress import TrainingDisplay

if TYPE_CHECKING:
    from linformer_cli.checkpoint import Checkpoint
    from linformer_cli.config import RunConfig
    from linformer_cli.data.images import ImageSet
    from linformer_cli.system.distributed import Team
    from linformer_cli.training.loop import Trainer
    from linformer_cli.training.run_folder import RunFolder


def _options_of(panel: str) -> Callable[..., Any]:
    return functools.partial(typer.Option, rich_help_panel=panel, show_default=False)


_for_length, _for_model = _options_of("Length (one of them)"), _options_of("Model")
_for_training, _for_run = _options_of("Training"), _options_of("Run")


def train(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="The run to go on with, for --resume.")] = None,
    data: Annotated[
        str | None,
        _for_run(
            "--data",
            help="mnist, fashion-mnist, cifar10, array:DIR, folder:PATH or glyphs; default that of the preset, "
            "cifar10 for cifar10-paper and else mnist.",
            metavar="NAME",
        ),
    ] = None,
    data_dir: options.DataDir = None,
    image_size: options.ImageSize = None,
    channels: options.Channels = None,
    out: Annotated[
        Path | None, _for_run("--out", help="The run's folder; default a new one in runs/.", metavar="FOLDER")
    ] = None,
    resume: Annotated[
        bool, _for_run("--resume", help="Go on with RUN, or with the newest in runs/, exactly as it was.")
    ] = False,
    init_from: Annotated[
        str | None,
        _for_run(
            "--init-from",
            help="Begin with the weights of a run, checkpoint or shipped model that fit; also its network and data.",
            metavar="CHECKPOINT",
        ),
    ] = None,
    config: Annotated[
        Path | None, _for_run("--config", help="TOML with [model], [data], [train]; flags win.", metavar="FILE")
    ] = None,
    classes: Annotated[
        bool | None,
        _for_run("--classes/--no-classes", help="Tell the model the class of each image; default that of --init-from."),
    ] = None,
    dry_run: Annotated[
        bool, _for_run("--dry-run", help="Print the resolved settings, sizes and one timed step; train nothing.")
    ] = False,
    steps: Annotated[int | None, _for_length("--steps", min=1, help="Optimizer steps.")] = None,
    epochs: Annotated[
        float | None, _for_length("--epochs", help="Passes over the training images; the default is 3.")
    ] = None,
    max_time: Annotated[
        str | None, _for_length("--max-time", help="Such as 10m or 1h30m; goes on counting after --resume.")
    ] = None,
    preset: Annotated[
        str | None,
        _for_model(
            "--preset",
            help="mnist-wide (default), mnist-small, mnist-paper, cifar10-paper, tiny.",
            autocompletion=options.complete_preset,
        ),
    ] = None,
    attention: Annotated[str | None, _for_model("--attention", help="See lintx attentions.")] = None,
    attention_option: Annotated[
        list[str] | None,
        _for_model("--attention-option", help="An option of the attention; repeatable.", metavar="KEY=VALUE"),
    ] = None,
    context_name: Annotated[
        Literal["previous", "neighbours", "wide", "hashed"] | None,
        _for_model("--context", help="Known values that a position sees; default that of the preset."),
    ] = None,
    head: Annotated[
        Literal["categorical", "mixture"] | None,
        _for_model("--head", help="The distribution of a value; default that of the preset."),
    ] = None,
    layers: Annotated[int | None, _for_model("--layers", help="Blocks.")] = None,
    heads: Annotated[int | None, _for_model("--heads", help="Attention heads.")] = None,
    width: Annotated[int | None, _for_model("--width", help="Width of the residual stream.")] = None,
    batch: Annotated[int | None, _for_training("--batch", help="Images at once; default 16.")] = None,
    accumulation: Annotated[
        int | None, _for_training("--accumulation", help="Batches added up for one step; default 1.")
    ] = None,
    shift: Annotated[
        int | None,
        _for_training("--shift", min=0, help="Move each image by up to so many pixels, anew each time; default 0."),
    ] = None,
    optimizer: Annotated[
        Literal["adamw", "radam", "muon"] | None,
        _for_training(
            "--optimizer", help="Default that of the preset; muon is for hidden matrices, with adamw for the rest."
        ),
    ] = None,
    learning_rate: Annotated[
        float | None,
        _for_training(
            "--learning-rate", "--lr", help="The highest; default that of the preset, else 0.002, with muon 0.008."
        ),
    ] = None,
    schedule: Annotated[
        Literal["cosine", "trapezoid", "constant"] | None,
        _for_training(
            "--schedule",
            help="After warm-up; default that of the preset, else cosine; trapezoid falls in the last quarter.",
        ),
    ] = None,
    warmup_steps: Annotated[
        int | None, _for_training("--warmup-steps", help="Linear warm-up; default that of the preset, else 100.")
    ] = None,
    weight_decay: Annotated[
        float | None, _for_training("--weight-decay", help="On matrices only; default that of the preset, else 0.05.")
    ] = None,
    clip: Annotated[float | None, _for_training("--clip", help="Largest gradient norm; 0 for none; default 1.")] = None,
    ema: Annotated[
        float | None, _for_training("--ema", help="Decay of averaged weights, such as 0.999; default none.")
    ] = None,
    seed: Annotated[int | None, _for_training("--seed", help="Of weights and order; default 0.")] = None,
    device: Annotated[str | None, _for_training("--device", help="auto, cpu, cuda, cuda:INDEX or mps.")] = None,
    precision: Annotated[
        options.PrecisionName | None,
        _for_training("--precision", help="auto: bf16 autocast where the hardware multiplies bf16."),
    ] = None,
    evaluate_every: Annotated[
        int | None, _for_training("--evaluate-every", help="Steps between validations; default 500.")
    ] = None,
    sample_every: Annotated[
        int | None, _for_training("--sample-every", help="Steps between sample grids; 0 never; default 500.")
    ] = None,
    save_every: Annotated[int | None, _for_training("--save-every", help="Steps between saves; default 200.")] = None,
    keep_last: Annotated[
        int | None, _for_training("--keep-last", help="How many of the newest saves stay; default 1.")
    ] = None,
    checkpoint: Annotated[
        str | None, _for_run("--checkpoint", "-c", help="The same as --resume RUN.", metavar="RUN")
    ] = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Train a model, or go on with a run.

    Bare, it means `--data mnist --preset mnist-wide` into a new folder in runs/.

    A run's folder holds config.toml (everything resolved but the device), metrics.csv, samples/, last/ (for --resume)
    and best/ (by validation). Flags win over --config, that over the preset, that over defaults. The first Ctrl-C or
    SIGTERM finishes the step, saves, and prints how to go on; a second leaves at once.

    `torchrun --nproc-per-node N -m linformer_cli train ...` shares every batch out among N processes. A run goes on
    with any number of them.

    Examples:

    - `lintx train --data mnist --data-dir DIR --max-time 10m --out runs/first`
    - `lintx train --data glyphs --preset tiny --steps 200`
    - `lintx train --attention softmax --dry-run`
    - `lintx train --data mnist --classes --optimizer muon --shift 1`
    - `lintx train --resume runs/first --max-time 1h`
    - `lintx train --init-from runs/first --attention softmax --out runs/moved`
    """
    given_train = _given(
        steps=steps,
        epochs=epochs,
        max_time=None if max_time is None else options.parse_duration(max_time),
        batch=batch,
        accumulation=accumulation,
        shift=shift,
        optimizer=optimizer,
        learning_rate=learning_rate,
        schedule=schedule,
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
    given_model = _given(
        **{"attention": attention, "context": context_name, "head": head},
        **{"layers": layers, "heads": heads, "width": width},
    )
    given_data = _given(name=data, data_dir=data_dir, image_size=image_size, channels=channels, labels=classes)
    if checkpoint is not None:
        run, resume = options.one_checkpoint(run, checkpoint), True
    if run is not None and not resume:
        raise UsageError(f"unexpected '{run}'; to go on with that run: lintx train --resume {run}")

    from linformer_cli.training.run_folder import RUNS, RunFolder, claim_run, find_newest_run
    from linformer_cli.training.settings import extend_settings, find_source, merge_settings

    with join_team() as team:
        source = None
        if resume:
            folder = RunFolder(Path(run) if run is not None else team.from_leader(find_newest_run))
            changed = {
                **given_model,
                **_given(attention_option=attention_option, data=data, image_size=image_size, channels=channels),
                **_given(preset=preset, out=out, config=config, init_from=init_from, classes=classes),
            }
            settings = extend_settings(folder.read_config(), given_train, changed, data_dir)
            images = load_training_images(settings.data, team)
        else:
            if attention_option:
                given_model["attention_options"] = options.parse_pairs(attention_option, "--attention-option")
            source = find_source(init_from, config)
            merged = merge_settings(config, preset, given_model, given_data, given_train, source)
            folder = RunFolder(out if out is not None else RUNS)
            merged.check()
            images = load_training_images(merged.data_config, team)
            settings = merged.build(images[0].shape, images[0].classes)
        trainer = _build_trainer(settings, folder, images, team)
        if source is not None:
            _take_over(trainer, source)
        if dry_run:
            _dry_run(trainer, json)
            return
        if not resume and out is None:  # only now: what is refused leaves no folder
            trainer.folder = folder = RunFolder(team.from_leader(lambda: claim_run(merged.preset)))
        advice = f"what was saved is whole; go on with: lintx train --resume '{folder.path}'"
        with notice_loss(advice), _hold(folder, None if resume else trainer.config) if team.leads else nullcontext():
            if resume:
                trainer.resume()
                if team.leads:
                    folder.write_config(trainer.config)
            talk(f"training in {folder.path} from step {trainer.progress.step}")
            _run(trainer, folder, json)


@contextmanager
def _hold(folder: "RunFolder", new: "RunConfig | None") -> Iterator[None]:
    """The folder for this process alone; made for the run `new`, if there is one."""
    if new is not None:
        folder.create(new)
    with folder.lock():
        yield


def _given(**values: Any) -> dict[str, Any]:
    """What was given on the command line."""
    return {key: value for key, value in values.items() if value is not None}


def _build_trainer(
    settings: "RunConfig", folder: "RunFolder", images: "tuple[ImageSet, ImageSet]", team: "Team"
) -> "Trainer":
    from linformer_cli.system.device import choose_precision, torch_dtype
    from linformer_cli.training.loop import Trainer

    device = team.choose_device(settings.train.device)
    precision = choose_precision(settings.train.precision, device.value, "training")
    talk(f"device {device.value} ({device.reason}), precision {precision.value} ({precision.reason})")
    trainer = Trainer(settings, folder, images, device.value, precision.value, team)
    if team.count > 1:
        talk(f"{team.count} processes, each with its share of every {settings.train.batch} images")
    if trainer.model.is_compiled(torch_dtype(precision.value)):
        talk("attention in kernels compiled for this processor")
    if settings.model.classes:
        talk(
            f"the model is told the class of each image, one of {settings.model.classes}; its bits/dim are those given "
            f"the class: {settings.model.class_bits_per_dim:.4f} more may be held against a model without"
        )
    return trainer


def _take_over(trainer: "Trainer", source: "Checkpoint") -> None:
    from linformer_cli.checkpoint import load_weights
    from linformer_cli.training.takeover import summarise_names

    moved = trainer.take_over(load_weights(source))
    talk(f"taken over {len(moved.taken)} tensors of {source.path} ({source.info.model.attention} attention)")
    talk(f"new: {summarise_names(moved.new)}")
    talk(f"left: {summarise_names(moved.left)}")


def _run(trainer: "Trainer", folder: "RunFolder", json: bool) -> None:
    from linformer_cli.system.signals import catch_signals

    began = trainer.progress.step
    with catch_signals() as stop, TrainingDisplay() as display:
        progress = trainer.run(display, stop)
    if progress.step == began:
        talk("nothing was left to train; a longer --steps, --epochs or --max-time goes on")
    talk(f"finished step {progress.step}: validation {progress.validation_bits_per_dim:.4f} bits/dim; try")
    talk(f"lintx sample {folder.path} -n 16 -o samples.png")
    if json and trainer.team.leads:
        result = {
            "run": folder.path,
            "init_from": trainer.config.init_from,
            "attention": trainer.config.model.attention,
            "engine": "parallel",
            "precision": "bf16" if trainer.autocast else "fp32",
            "device": trainer.device,
            "batch": trainer.config.train.batch,
            "processes": trainer.team.count,
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

    from linformer_cli.system.memory import measure_peak_memory
    from linformer_cli.units import format_bytes

    seconds = trainer.time_one_step()
    if not trainer.team.leads:
        return
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
