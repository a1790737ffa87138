"""`lintx train`: train a model, or resume a run."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from linformer_cli.config import LENGTHS, LOOK_SETTINGS, DataConfig, NetworkConfig, TrainConfig
from linformer_cli.errors import UsageError
from linformer_cli.files import require_writable
from linformer_cli.presets import BYTES_PRESET, COLOUR_PRESET, DEFAULT_PRESET, FEW_PICTURES, PRESETS
from linformer_cli.system.distributed import join_team, notice_loss
from linformer_cli.units import WINDOWS, count_words, format_duration
from . import options
from .config_options import Fields, argument, option, several, with_fields
from .display import TrainingDisplay
from .output import info, print_facts, print_json, warn
from .session import load_training_images

if TYPE_CHECKING:
    from linformer_cli.checkpoint import Checkpoint
    from linformer_cli.config import RunConfig
    from linformer_cli.data.images import ImageSet
    from linformer_cli.system.distributed import Team
    from linformer_cli.training.loop import Trainer
    from linformer_cli.training.pixel_task import PixelTask
    from linformer_cli.training.run_folder import RunFolder
    from linformer_cli.training.settings import Given, Settings


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    run: str | None = argument("PICTURES", "A folder of pictures; with --resume, the run.", None)
    data: str | None = option(
        None, "Data set: mnist, fashion-mnist, cifar10, array:DIR, folder:PATH, bytes:PATH or glyphs.", metavar="NAME"
    )
    data_dir: options.DataDir = None
    window_length: options.WindowLength = None
    classes: bool | None = option(
        None,
        "Condition the model on the class of each image. Default: as in --init-from, or "
        "on if a folder of pictures names classes.",
        "--classes/--no-classes",
    )
    out: Path | None = option(None, "Folder of the new run. Default: a dated folder in runs/.", metavar="FOLDER")
    resume: bool = option(False, "Resume a run (default: the newest in runs/).", "--resume")
    accept_changed_data: bool = option(False, "With --resume: continue with changed images.", "--accept-changed-data")
    init_from: str | None = option(
        None,
        "Start from the weights, network and data set of a run, checkpoint or shipped model.",
        metavar="CHECKPOINT",
    )
    distill_from: list[str] | None = option(
        None,
        "Also learn from the predictions of this run, checkpoint or shipped model; repeatable.",
        metavar="CHECKPOINT",
    )
    config: Path | None = option(None, "TOML file with [model], [data], [train]; options override it.", metavar="FILE")
    log: str | None = several(None, "Also log to tensorboard, wandb or both. Give it again with --resume.")
    dry_run: bool = option(False, "Print settings, sizes and the time of a step, then stop.", "--dry-run")
    quiet: options.Quiet = False
    json: options.Json = False
    length: Annotated[dict[str, Any], Fields(TrainConfig, "Length of training", only=LENGTHS)]
    pictures: Annotated[dict[str, Any], Fields(DataConfig, "Pictures", only=LOOK_SETTINGS)]
    preset: str | None = option(
        None,
        f"Network and training settings: {', '.join(PRESETS)}. Default: {DEFAULT_PRESET}, "
        f"{COLOUR_PRESET} for cifar10 and photographs in colour, or {BYTES_PRESET} for bytes.",
        autocompletion=lambda: list(PRESETS),
        rich_help_panel="Model",
    )
    network: Annotated[dict[str, Any], Fields(NetworkConfig, "Model")]
    training: Annotated[dict[str, Any], Fields(TrainConfig, "Training", without=LENGTHS)]


@with_fields
def train(asked: TrainOptions) -> None:
    """Train a model, or resume a run.

    Examples:

    - `lintx train pictures/`
    - `lintx train --data mnist --data-dir DIR --max-time 10m --out runs/first`
    - `lintx train --data glyphs --preset tiny --steps 200`
    - `lintx train --attention softmax --dry-run`
    - `lintx train --data mnist --classes --optimizer muon --shift 1`
    - `lintx train --data bytes:book.txt --max-time 10m`
    - `lintx train --resume runs/first --max-time 1h`
    - `lintx train --init-from runs/first --attention softmax --out runs/moved`
    - `lintx train --preset mnist-small --distill-from mnist-deep`

    `lintx train PICTURES` trains on a folder of pictures, such as sprites, icons or photographs. It chooses a network
    for them, and the length: 8 epochs, at most 15 minutes, or less if validation stops improving. Without arguments, it
    trains `mnist-wide` on MNIST.

    The folder of a run holds config.toml (all settings), metrics.csv, samples/, last/ (the newest save) and best/ (the
    best validation). Options override --config, which overrides the preset. Ctrl-C or SIGTERM saves and ends; a second
    one ends at once.

    `torchrun --nproc-per-node N -m linformer_cli train ...` divides every batch among N processes.
    """
    if asked.run is not None and not asked.resume:
        asked = replace(asked, data=_name_pictures(asked.run, asked.data))
    if asked.accept_changed_data and not asked.resume:
        raise UsageError("--accept-changed-data is for --resume; drop it")
    logs = []
    if asked.log is not None:  # before any work, because a package may be missing
        from linformer_cli.training.logs import LOG_NAMES, find_logs

        logs = find_logs(options.parse_names(asked.log, "log", LOG_NAMES))
    with join_team(warn) as team:
        trainer = _resume(asked, team) if asked.resume else _begin(asked, team)
        if asked.dry_run:
            _dry_run(trainer, asked.json)
            return
        if not asked.resume and asked.out is None:  # created this late, so that a refused command leaves no folder
            from linformer_cli.training.run_folder import RunFolder, claim_run

            trainer.folder = RunFolder(team.from_leader(lambda: claim_run(str(trainer.task.config.preset))))
        folder = trainer.folder
        assert folder is not None
        advice = f"the last save is intact; continue with: lintx train --resume '{folder.path}'"
        with notice_loss(advice), ExitStack() as stack:
            if team.leads:
                if not asked.resume:
                    folder.create(trainer.task.config)
                stack.enter_context(folder.lock())
            if asked.resume:
                if note := trainer.resume(asked.accept_changed_data):
                    info(note)
                if team.leads:
                    folder.write_config(trainer.task.config)
            if team.leads:
                trainer.logs = [log(folder.path, trainer.task.config, trainer.progress.step) for log in logs]
                for log in trainer.logs:
                    stack.callback(log.close)
            info(f"training in {folder.path} from step {trainer.progress.step}")
            _run(trainer, folder.path, asked.json)


def _name_pictures(argument: str, data: str | None) -> str:
    folder = Path(argument)
    if not folder.is_dir():
        raise UsageError(f"there is no folder '{argument}'; name a folder of pictures, or a data set with --data")
    if not argument or (folder / "config.toml").is_file():
        hint = f"name a folder of pictures or, to resume a run: lintx train --resume {argument}"
        raise UsageError(f"unexpected argument '{argument}'; {hint}")
    if data is not None:
        raise UsageError(f"'{argument}' and --data {data} are two data sets; name one")
    from linformer_cli.data.images import name_folder

    return name_folder(argument)


def _read_given(asked: TrainOptions) -> "Given":
    from linformer_cli.training.settings import Given

    given = {"name": asked.data, "data_dir": asked.data_dir, "length": asked.window_length, "labels": asked.classes}
    data = {**options.without_none(given), **asked.pictures}
    return Given(asked.preset, asked.network, data, {**asked.length, **asked.training})


def _resume(asked: TrainOptions, team: "Team") -> "Trainer[PixelTask]":
    """Return the trainer of the run to resume. Its images are read as before."""
    from linformer_cli.checkpoint import read_checkpoint
    from linformer_cli.data.look import Look
    from linformer_cli.training.run_folder import RunFolder, find_newest_run
    from linformer_cli.training.settings import extend_settings

    folder = RunFolder(Path(asked.run) if asked.run is not None else team.from_leader(find_newest_run))
    others = {name: getattr(asked, name) for name in ("out", "config", "init_from", "distill_from")}
    settings = extend_settings(folder.read_config(), _read_given(asked), options.without_none(others))
    look = None if folder.is_untouched else Look.of(read_checkpoint(folder.last).info)
    return _build_trainer(settings, folder, load_training_images(settings.data, team, look), team)


def _begin(asked: TrainOptions, team: "Team") -> "Trainer[PixelTask]":
    """Return the trainer of a new run. Its folder is created later."""
    from linformer_cli.training.run_folder import RUNS, RunFolder
    from linformer_cli.training.settings import Pictures, find_source, find_teachers, merge_settings

    source = find_source(asked.init_from, asked.config)
    teachers = find_teachers(asked.distill_from or [], asked.config)
    if "distill_share" in asked.training and not teachers:
        raise UsageError("--distill-share needs a teacher; name one with --distill-from, or drop it")
    merged = merge_settings(_read_given(asked), asked.config, source)
    folder = RunFolder(asked.out if asked.out is not None else RUNS)
    if not asked.dry_run:  # this is checked first, because loading the images may take long
        if asked.out is not None:
            folder.refuse_if_taken()
        require_writable(folder.config_file)
    images = load_training_images(merged.data, team, merged.look)
    shape, classes = images[0].shape, images[0].classes
    if asked.run is not None or merged.data.name.startswith("folder:"):
        pictures = Pictures(shape, classes, len(images[0]))
        merged = merge_settings(_read_given(asked), asked.config, source, pictures=pictures)
        _explain_choice(merged, pictures.count)
    return _build_trainer(merged.build(shape, classes, teachers), folder, images, team, source)


def _explain_choice(settings: "Settings", count: int) -> None:
    train = settings.train
    lengths = [f"{getattr(train, name):g} {name}" for name in ("steps", "epochs") if getattr(train, name) is not None]
    if train.max_time is not None:
        lengths.append(format_duration(train.max_time))
    classes = f", classes hidden for {train.hide_class:g} (--no-classes: none)" if settings.data.labels else ""
    patience = f"; ends after {train.patience} validations in a row without a better one (--patience)"
    limits = f"at most {' or '.join(lengths)}{patience if train.patience else ''}"
    decay = f"--weight-decay {train.weight_decay:g}"
    info(f"chosen: --preset {settings.preset}, --batch {train.batch}, {decay}, {limits}{classes}")
    if count < FEW_PICTURES:
        hint = "compare samples with training images by lintx sample --nearest"
        info(f"{count_words(count, 'training image')}: expect rough shapes and, if trained for longer, copies; {hint}")


def _build_trainer(
    settings: "RunConfig",
    folder: "RunFolder",
    images: "tuple[ImageSet, ImageSet]",
    team: "Team",
    source: "Checkpoint | None" = None,
) -> "Trainer[PixelTask]":
    from linformer_cli.probe import choose_precision
    from linformer_cli.system.device import torch_dtype
    from linformer_cli.training.loop import Trainer
    from linformer_cli.training.pixel_task import PixelTask

    device = team.choose_device(settings.train.device)
    sizes = settings.model.width, settings.model.feed_forward
    precision = team.from_leader(lambda: choose_precision(settings.train.precision, device.value, *sizes))
    info(f"device {device.value} ({device.reason}), precision {precision.value} ({precision.reason})")
    task = PixelTask(settings, images, device.value, precision.value)
    if settings.train.graph and (team.count > 1 or not device.value.startswith("cuda")):
        where = f"{team.count} processes" if team.count > 1 else f"device {device.value}"
        warn(f"--graph is for one process with a CUDA device, found {where}; training without a graph")
    if team.count > 1:
        info(f"{team.count} processes, each with its share of every {settings.train.batch} {settings.data.words.items}")
    if task.model.is_compiled(torch_dtype(precision.value)):
        info("attention uses compiled kernels")
    if settings.distill_from:
        teachers = " and ".join(teacher.checkpoint for teacher in settings.distill_from)
        info(f"learning from {teachers}: their predictions have weight {settings.train.distill_share:g} in the loss")
    if settings.model.optional_class:
        hidden = f"hidden for {settings.train.hide_class:.3g} of the training images"
        info(f"{settings.model.classes} classes, {hidden}: validation measures bits/dim without a class")
    elif settings.model.classes:
        hint = f"add {settings.model.class_bits_per_dim:.4f} to compare with an unconditional model"
        info(f"conditioned on {settings.model.classes} classes: bits/dim assume that the class is known; {hint}")
    if source is not None:
        _transfer(task, source)
    return Trainer(task, folder, team)


def _transfer(task: "PixelTask", source: "Checkpoint") -> None:
    from linformer_cli.checkpoint import load_weights
    from linformer_cli.training.transfer import summarise_names

    moved = task.transfer(load_weights(source))
    info(f"copied {len(moved.copied)} tensors from {source.path} ({source.info.model.attention} attention)")
    info(f"newly initialised: {summarise_names(moved.new)}")
    info(f"not copied: {summarise_names(moved.left)}")


def _run(trainer: "Trainer[PixelTask]", path: Path, json: bool) -> None:
    from linformer_cli.system.signals import catch_signals

    began, task = trainer.progress.step, trainer.task
    words = task.words
    with catch_signals() as stop, TrainingDisplay(words=words) as display:
        progress = trainer.run(display, stop)
    if progress.step == began:
        info("no step was left to train; give a larger --steps, --epochs or --max-time")
    if trainer.has_lost_patience:
        hint = "best/ has the best weights, and --resume continues with --patience 0"
        info(f"ended early: {progress.worse_validations} validations without a better one; {hint}")
    elif trainer.share_without_time < 1:
        info(f"ended by --max-time, {trainer.share_without_time:.0%} of the way to --steps or --epochs")
    if trainer.peak_learning_rate:
        info(f"peak learning rate {trainer.peak_learning_rate:.3g}")
    info(f"finished step {progress.step}: validation {progress.validation_bits_per_dim:.4f} {words.bits}; try")
    info(f"lintx sample {path}{'' if words is WINDOWS else ' -n 16 -o samples.png'}")
    copying = None
    if task.config.data.name.startswith(("folder:", "array:")) and task.drawn is not None and trainer.team.leads:
        from linformer_cli.evaluation.nearest import measure_copying

        copying, _ = measure_copying(task.drawn, task.training, task.validation, task.config.model.image)
        info(copying.describe())
    if json and trainer.team.leads:
        result = {
            "run": path,
            "init_from": task.config.init_from,
            "distill_from": task.config.distill_from,
            "attention": task.config.model.attention,
            "engine": "parallel",
            "precision": "bf16" if task.autocast else "fp32",
            "device": task.device,
            "batch": task.config.train.batch,
            "processes": trainer.team.count,
            "steps": progress.step,
            "images": progress.images_seen,
            "elapsed_seconds": progress.elapsed_seconds,
            "bits_per_dim": progress.validation_bits_per_dim,
            "standard_error": progress.validation_standard_error,
            "best_bits_per_dim": progress.best_bits_per_dim,
            "copying": copying,
        }
        print_json(result)


def _dry_run(trainer: "Trainer[PixelTask]", json: bool) -> None:
    import tomli_w

    from linformer_cli.system.memory import measure_peak_memory
    from linformer_cli.units import format_bytes

    seconds = trainer.time_one_step()
    if not trainer.team.leads:
        return
    task, settings = trainer.task, trainer.task.settings
    images = settings.batch * settings.accumulation
    facts = {
        "parameters": task.model.parameter_count(),
        "state_bytes": task.model.state_bytes(1),
        "peak_memory_bytes": measure_peak_memory(task.device),
        "seconds_per_step": seconds,
        "images_per_second": images / seconds,
    }
    if json:
        print_json({"config": task.config, **facts})
        return
    print(tomli_w.dumps(task.config.model_dump(exclude_none=True)))
    print_facts(
        {
            "parameters": f"{facts['parameters']:,}",
            "state": f"{format_bytes(facts['state_bytes'])} per {task.words.item} while sampling",
            "memory": f"{format_bytes(facts['peak_memory_bytes'])} at the peak of one step",
            "one step": f"{seconds:.3g} s, {facts['images_per_second']:.3g} {task.words.items}/s",
        }
    )
