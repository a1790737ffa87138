import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run_command, run_script
from loops import first_fast, loop_over
from typer.main import get_command, get_group

from linformer_cli.__main__ import drop_impossible_sizes
from linformer_cli.cli.app import app, main
from linformer_cli.cli.bench import app as benchmarks

COMMANDS = ["train", "sample", "complete", "eval", "score", "check", "bench", "compare"]
COMMANDS += ["plot", "attentions", "info", "export", "demo", "env"]
SEEDED = ["sample", "check", "bench copy", "bench approximation"]
BENCHES = [f"bench {name}" for name in get_group(benchmarks).commands]
ROOT = Path(__file__).parents[2]


@pytest.mark.smoke
def test_help_needs_no_torch():
    """One process prints the page without a command, then those of the commands."""
    pages = [[], *(command.split() for command in COMMANDS + BENCHES)]
    script = (
        "import sys; from linformer_cli.cli.app import main\n"
        f"for arguments in {pages}:\n"
        "    sys.argv = ['lintx', *arguments, '--help']\n"
        "    try: main()\n"
        "    except SystemExit as ended: assert not ended.code\n"
        "    slow = ['torch', 'torchvision', 'matplotlib', *([] if arguments else ['numpy', 'pydantic'])]\n"
        "    slow = [name for name in slow if name in sys.modules]\n"
        "    assert not slow, (arguments, slow)"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("Usage") == len(pages)


@loop_over("command", COMMANDS + BENCHES)
def test_every_help_page_has_examples(lintx, command):
    outcome = lintx(*command.split(), "--help")
    assert outcome.code == 0
    assert f"lintx {command}" in outcome.stdout
    assert "Examples" in outcome.stdout


def test_the_summaries_of_a_group_are_those_of_its_commands():
    group = get_command(app)
    for each in (group, group.get_command(None, "bench")):
        for name, command in each.commands.items():
            assert each.get_command(None, name).help.splitlines()[0] == command.help


@pytest.mark.parametrize("command", ["sample", "eval", "check", "info", "export"])
def test_commands_on_a_model_take_the_checkpoint_only_as_an_argument(lintx, command):
    text = lintx(command, "--help").stdout
    assert "CHECKPOINT" in text and "--checkpoint" not in text


def test_without_a_command_lintx_shows_how_to_start_and_bench_its_help(lintx):
    start, bench = lintx(), lintx("bench")
    assert start.code == bench.code == 2 and start.stderr == bench.stderr == ""
    assert len([line for line in start.stdout.splitlines() if line.startswith("  lintx ")]) == 4
    assert bench.stdout.strip() == lintx("bench", "--help").stdout.strip()


def test_shell_completion_offers_commands_and_values_without_loading_torch():
    expected = {
        "lintx tr": {"train"},
        "lintx bench sa": {"sample"},
        "lintx train --optimizer ": {"adamw", "radam", "muon"},
        "lintx train --preset mnist": {"mnist-small", "mnist-wide", "mnist-paper"},
    }
    script = (
        "import os, sys; from linformer_cli.cli.app import main\n"
        "sys.argv, os.environ['_LINTX_COMPLETE'] = ['lintx'], 'complete_bash'\n"
        f"for line in {[*expected]}:\n"
        "    words = line.split(' ')\n"
        "    os.environ.update(COMP_WORDS='\\n'.join(words), COMP_CWORD=str(len(words) - 1))\n"
        "    try: main()\n"
        "    except SystemExit: print('.')\n"
        "assert 'torch' not in sys.modules"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert [set(words.split()) for words in finished.stdout.split(".")] == [*expected.values(), set()]


def test_python_dash_m_starts_the_same_command():
    arguments = [sys.executable, "-m", "linformer_cli", "--version"]
    finished = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=ROOT)
    assert finished.stdout.startswith("lintx ")


def test_the_reference_is_up_to_date(tmp_path):
    """If a help page changes, regenerate the reference as described in CONTRIBUTING.md."""
    made = tmp_path / "cli.md"
    arguments = ["typer", "linformer_cli.cli.app", "utils", "docs", "--name", "lintx", "--output", str(made)]
    subprocess.run([sys.executable, "-m", *arguments], capture_output=True, check=True, cwd=ROOT)
    assert made.read_text(encoding="utf-8") == (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")


@loop_over(
    ("arguments", "code", "message"),
    [
        (["smaple"], 2, "Did you mean 'sample'?"),
        (["sample", "--tempratur", "1"], 2, "No such option: --tempratur"),
        (["sample", "nosuch"], 2, "unknown checkpoint 'nosuch'"),
        (["sample", "no/such"], 1, "no checkpoint at 'no/such'"),
        (["sample", "--temperature", "inf"], 2, "--temperature must be above 0 and finite, found inf"),
        (["sample", "--device", "tpu"], 2, "unknown device 'tpu'"),
        (["sample", "-o", "-", "--json"], 2, "both write to stdout"),
        (["sample", "-o", "grid.jpg"], 2, "-o writes a PNG, found 'grid.jpg'; give it a name that ends in .png"),
        (["complete", "x.png", "--gif", "x.webp"], 2, "--gif writes a GIF"),
        (["complete", "x.png", "-o", "-"], 2, "-o cannot write to stdout; give it the name of a file"),
        (["complete"], 2, "Missing argument"),
        (["complete", "x.png", "y.png", "--keep", "left:5px"], 2, "found 'left:5px'"),
        (["bench", "smaple"], 2, "Did you mean 'sample'?"),
        (["bench", "--repeats", "2", "sample"], 2, "No such option: --repeats"),
        (["bench", "sample", "--batch", "1,x"], 2, "--batch takes whole numbers above 0 separated by commas"),
        (["bench", "sample", "--preset", "mnist-papr"], 2, "did you mean 'mnist-paper'?"),
        (["bench", "sample", "--preset", "tiny", "--checkpoint", "mnist-deep"], 2, "both name a network"),
        (["bench", "sample", "--image-size", "16"], 2, "--image-size is for --preset"),
        (["bench", "sample", "--preset", "tiny", "--image-size", "16,x"], 2, "--image-size takes whole numbers"),
        (["bench", "sample", "--preset", "tiny", "--image-size", "5000"], 2, "can have at most 1,048,576 values"),
        (["bench", "sample", "--preset", "tiny", "--attention", "linaer"], 2, "did you mean 'linear'?"),
        (["bench", "sample", "--attention", "sofmax"], 2, "unknown attention 'sofmax'"),
        (["bench", "copy", "--plot", "copy.pdf"], 2, ".png or .svg"),
        (["bench", "copy", "--budget", "soon"], 2, "is not a time"),
        (["bench", "copy", "--length", "4"], 2, "at least 8"),
        (["bench", "copy", "--width", "30"], 2, "a multiple of 8"),
        (["bench", "paper", "--runs", "nowhere/at-all"], 1, "no checkpoint at 'nowhere/at-all'"),
        (["bench", "attention", "--positions", "0"], 2, "--positions takes whole numbers above 0 separated by commas"),
        (["bench", "attention", "--attention", "linear:chnk=3"], 2, "did you mean 'chunk'?"),
        (["bench", "attention", "--attention", "linear,linear"], 2, "'linear' is given twice"),
        (["bench", "approximation", "--norms", "1,-1"], 2, "--norms takes numbers above 0"),
        (["bench", "approximation", "--features", "x"], 2, "--features takes whole numbers"),
        (["bench", "approximation", "--maps", "positve"], 2, "'positve' does not estimate softmax"),
        (["train", "--preset", "mnist-smal"], 2, "did you mean 'mnist-small'?"),
        # The data set does not exist either, but the attention is checked first.
        (["train", "--data", "array:nowhere", "--attention", "linaer"], 2, "did you mean 'linear'?"),
        (["train", "--data", "array:nowhere", "--attention-option", "chunk=x"], 2, "chunk"),
        (["train", "--data", "array:nowhere", "--batch", "0"], 2, "Invalid value for '--batch'"),
        (["train", "--data", "array:nowhere", "--steps", "1", "--epochs", "1"], 2, "set the length by steps or epochs"),
        (["train", "--data", "glyphs", "--attention-option", "chunk"], 2, "KEY=VALUE"),
        (["train", "--data", "glyphs", "--attention-option", "features=8"], 2, "is for feature_map 'learned'"),
        (["train", "--data", "mnsit"], 2, "did you mean 'mnist'?"),
        (["train", "--max-time", "soon"], 2, "'soon' is not a time"),
        (["train", "--config", "nosuch.toml"], 2, "no configuration at 'nosuch.toml'"),
        (["train", "somewhere"], 2, "no folder 'somewhere'"),
        (["train", "--resume", "nosuch"], 1, "not a run folder"),
        (["eval", "--data", "array:nosuch"], 1, "nosuch"),
        (["compare", "--attention", "linaer"], 2, "did you mean 'linear'?"),
        (["attentions", "linaer"], 2, "did you mean 'linear'?"),
        (["attentions", "--checkpoint", "mnist-deep", "--heads", "2"], 2, "--checkpoint sets the sizes"),
        (["plot", "nowhere", "--grids", "3"], 2, "--grids needs --samples FILE"),
        (["bench", "approximation", "--norms", "1,9"], 2, "norms above 7.92"),
        (["sample", "--scale", "1000"], 2, "less than or equal to 64"),
        *(([*words.split(), "--seed", str(2**63)], 2, "--seed") for words in SEEDED),
        *((["bench", "copy", option, "0"], 2, option) for option in ("--length", "--width")),
        *((["sample", "-n", "1", *given], 2, "--files is empty") for given in (["--files", ""], ["--files="])),
        (["train", "--data", "glyphs", "--out", ""], 2, "--out is empty"),
        (["export", "mnist-deep", ""], 2, "OUT is empty"),
        (["plot", ""], 2, "RUNS is empty"),
    ],
)
def test_a_mistake_gives_a_one_line_error_and_an_exit_code(lintx, tmp_path, monkeypatch, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    outcome = lintx(*arguments)
    errors = [line for line in outcome.stderr.splitlines() if line.startswith("Error: ")]
    assert outcome.code == code, outcome.stderr
    assert len(errors) == 1 and message in errors[0]
    assert "Traceback" not in outcome.stderr and outcome.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "advice"),
    [
        (["sample", "-n", "3"], "; try a smaller --batch"),
        (["bench", "sample"], "; try a smaller --batch"),
        (["check", "train"], ""),
        (["info"], ""),
    ],
)
def test_a_smaller_batch_is_advised_only_where_there_is_one(lintx, monkeypatch, command, advice):
    def run_out(*_arguments, **_options):
        raise MemoryError

    monkeypatch.setattr("typer.Typer.__call__", run_out)
    outcome = lintx(*command)
    assert (outcome.code, outcome.stderr) == (1, f"Error: out of memory{advice}\n")


def test_an_error_keeps_its_exit_code_if_stderr_is_closed(monkeypatch):
    """For example, Ctrl-C in a pipe also ends the process that reads stderr."""

    def refuse(_message):
        raise BrokenPipeError

    monkeypatch.setattr("linformer_cli.cli.app.warn", refuse)
    monkeypatch.setattr(sys, "argv", ["lintx", "info", "nosuch"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2


def run_in_shell(command, **environment):
    line = f"{shlex.quote(sys.executable)} -m linformer_cli {command}"
    return subprocess.run(
        line, shell=True, capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="the test closes streams in a shell")
def test_closed_streams_cause_no_traceback_and_no_mixed_output():
    assert "Traceback" not in run_in_shell("attentions --json <&- >&-").stderr
    silent = run_in_shell("attentions 2>&-")  # a test of `lintx attentions` finds this advice in stderr
    assert silent.returncode == 0 and "lintx attentions NAME" not in silent.stdout
    wrong = run_in_shell("info nosuch 2>&-")
    assert (wrong.returncode, wrong.stdout) == (2, "")


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_behind_stdout_gives_a_one_line_error():
    assert run_command("info", "nosuch", stderr="/dev/full")[0] == 2
    code, _, errors = run_command("attentions", "--json", stdout="/dev/full")
    assert (code, errors) == (1, "Error: No space left on device\n")


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="the test prepares the surroundings in a shell")
@loop_over(
    ("before", "arguments", "message"),
    [
        ("ulimit -v 1500000;", "info mnist-deep", "a library cannot be loaded: "),
        ("TORCH_LOGS=nonsense", "info mnist-deep", "a library cannot be loaded: Invalid log settings"),
        ("mkdir gone; cd gone; rmdir ../gone;", "info mnist-deep", "the working folder was deleted"),
        ("env -u HOME", "--install-completion", "set HOME"),
    ],
)
def test_surroundings_that_a_library_cannot_bear_give_a_one_line_error(tmp_path, before, arguments, message):
    line = f"{before} PYTHONPATH={ROOT} {shlex.quote(sys.executable)} -m linformer_cli {arguments}"
    ended = subprocess.run(line, shell=True, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (1, "", 1), ended.stderr
    assert message in ended.stderr


@loop_over("size", ["0", "-5", "5", "x", "99999999999"])
def test_impossible_sizes_of_the_terminal_are_ignored(monkeypatch, size):
    monkeypatch.setattr(os, "environ", {"COLUMNS": size, "LINES": size, "TERMINAL_WIDTH": size, "HOME": "/"})
    drop_impossible_sizes()
    assert os.environ == {"HOME": "/"}


@pytest.mark.parametrize("encoding", first_fast(["ascii", "latin-1"]))
def test_help_can_be_printed_in_any_encoding_and_at_an_impossible_width(encoding):
    page = run_in_shell("train --help", PYTHONIOENCODING=encoding, COLUMNS="0", TERMINAL_WIDTH="x")
    assert (page.returncode, page.stderr) == (0, "")
    assert "? lintx train --data mnist" in page.stdout  # the ? replaces a bullet


@pytest.mark.parametrize(
    ("module", "name", "code"),
    first_fast([("typer", "SIGINT", 130), ("torch", "SIGTERM", 143), ("torch", "SIGINT", 130)], count=2),
)
def test_a_signal_during_an_import_prints_no_traceback(tmp_path, module, name, code):
    """Compiled modules may raise another exception in place of the signal's. The fake module in this test does so."""
    text = (
        "import signal\n"
        "try:\n"
        f"    signal.raise_signal(signal.{name})\n"
        "except BaseException:\n"
        "    raise RuntimeError('initialisation failed')\n"
    )
    (tmp_path / f"{module}.py").write_text(text)
    ended = subprocess.run(
        [sys.executable, "-m", "linformer_cli", "sample", "-o", str(tmp_path / "x.png")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        # Background jobs of a shell, and their children, ignore Ctrl-C by default.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == code
    assert "Traceback" not in ended.stderr and len(ended.stderr.splitlines()) <= 1


@pytest.mark.parametrize(("name", "code"), first_fast([("SIGINT", 130), ("SIGTERM", 143)]))
def test_a_signal_during_shutdown_prints_no_traceback(name, code):
    script = (
        "import atexit, signal, sys\n"
        "from linformer_cli.__main__ import main\n"
        f"atexit.register(signal.raise_signal, signal.{name})\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.argv = ['lintx', '--version']\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (code, "")


@pytest.mark.parametrize("when", ["reporting", "computing"])
def test_ctrl_c_during_an_error_or_compiled_code_prints_no_traceback(when):
    """Ctrl-C arrives while an error is reported, or in compiled code that turns it into another error."""
    script = (
        "import signal, sys\n"
        "from linformer_cli import __main__\n"
        "from linformer_cli.cli import app\n"
        "def interrupt(*_):\n"
        "    try:\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "    except KeyboardInterrupt:\n"
        f"        if {when!r} == 'reporting': raise\n"
        "        raise RuntimeError('was interrupted')\n"
        f"if {when!r} == 'reporting': app.warn = interrupt\n"
        "else: app.app = lambda **_: interrupt()\n"
        "sys.argv = ['lintx', 'info', 'nosuch']\n"
        "__main__.main()\n"
    )
    assert run_script(script) == (130, b"", "" if when == "reporting" else "Stopped\n")


@pytest.mark.smoke
def test_ctrl_c_prints_stopped_and_exits_with_130(lintx, monkeypatch, tmp_path):
    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr("linformer_cli.cli.session.open_session", interrupted)
    outcome = lintx("sample", "-o", tmp_path / "x.png")
    assert (outcome.code, outcome.stdout, outcome.stderr) == (130, "", "Stopped\n")
    assert list(tmp_path.iterdir()) == []
