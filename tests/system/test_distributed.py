"""Tests a team of processes from within one process; training/test_processes.py tests real teams."""

import os
import signal
import sys

import pytest
import torch
from loops import loop_over

from linformer_cli.cli.app import main
from linformer_cli.cli.output import info, is_quiet, set_quiet, warn
from linformer_cli.errors import UsageError
from linformer_cli.system.distributed import ALONE, ProcessLost, Team, end_process, join_team, notice_loss, process_rank

TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def pretend(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("missing", [None, *TORCHRUN])
def test_a_process_has_a_rank_only_if_all_variables_of_torchrun_are_set(monkeypatch, missing) -> None:
    pretend(monkeypatch, **{name: value for name, value in TORCHRUN.items() if name != missing})
    assert process_rank() == (2 if missing in (None, "LOCAL_RANK") else 0)


WRONG = [("WORLD_SIZE", "x"), ("WORLD_SIZE", "0"), ("RANK", "-1"), ("RANK", "4"), ("LOCAL_RANK", "1.5")]
WRONG += [("MASTER_PORT", "65536"), ("MASTER_PORT", "9" * 5000)]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_wrong_variables_of_torchrun_give_a_one_line_error(monkeypatch, capsys, raises_one_line, name, value) -> None:
    pretend(monkeypatch, **{**TORCHRUN, name: value})
    warn("a message")  # this does not check the variables
    assert capsys.readouterr().err == "a message\n"
    fault = "RANK must be less than WORLD_SIZE" if value in "04" else f"{name} must be a whole number"
    with raises_one_line(UsageError, fault, "torchrun"), join_team():
        pass


def test_torchrun_with_one_process_gives_a_single_process(monkeypatch) -> None:
    pretend(monkeypatch, **{**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"})
    with join_team() as team:
        assert team is ALONE


@loop_over("count", [1, 2, 3, 8])
@loop_over("things", [0, 1, 5, 8, 17])
def test_shares_are_even_and_cover_every_item_once(count, things) -> None:
    shares = [Team(rank, count).share(things) for rank in range(count)]
    assert [thing for share in shares for thing in share] == list(range(things))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_each_of_several_processes_uses_its_own_gpu(monkeypatch, raises_one_line) -> None:
    taken: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: "Pretended")
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for wanted in ("auto", "cuda"):
        assert Team(5, 8, local_rank=1).choose_device(wanted).value == "cuda:1"
    assert taken == ["cuda:1"] * 2
    assert Team(5, 8, local_rank=1).choose_device("cpu").value == "cpu"
    with raises_one_line(UsageError, "the last CUDA device of this machine is cuda:1"):
        Team(2, 3, local_rank=2).choose_device("cuda")
    with raises_one_line(UsageError, "cannot share 'cuda:0'", "--device cuda"):
        Team(1, 2, local_rank=1).choose_device("cuda:0")


def test_only_rank_0_prints_messages_and_errors_name_other_ranks(monkeypatch, capsys) -> None:
    set_quiet(False)
    pretend(monkeypatch, **TORCHRUN)
    info("nothing")
    warn("Error: broken")
    assert is_quiet() and capsys.readouterr().err == "process 2: Error: broken\n"
    monkeypatch.setenv("RANK", "0")
    info("something")
    assert not is_quiet() and capsys.readouterr().err == "something\n"


def test_only_lost_connections_are_reported_as_a_lost_process(monkeypatch, raises_one_line) -> None:
    pretend(monkeypatch, **TORCHRUN)
    deaf: list[tuple[object, object]] = []
    monkeypatch.setattr(signal, "signal", lambda *arguments: deaf.append(arguments))
    errors = (
        RuntimeError("[third_party/gloo/pair.cc:1] Connection closed"),
        torch.distributed.DistNetworkError("gone"),
    )
    for error in errors:
        with raises_one_line(ProcessLost, "another of the 4 processes has ended; try again"), notice_loss("try again"):
            raise error
    assert deaf == [(signal.SIGTERM, signal.SIG_IGN)] * 2
    with pytest.raises(RuntimeError, match="sizes"), notice_loss("try again"):
        raise RuntimeError("sizes do not match")
    pretend(monkeypatch)
    with pytest.raises(RuntimeError, match="gloo"), notice_loss("try again"):
        raise RuntimeError("gloo")
    assert len(deaf) == 2


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["train", "--steps", "no"], 2)])
def test_a_process_of_a_team_ends_immediately_and_a_single_process_ends_normally(monkeypatch, capsys, arguments, code):
    ended: list[int] = []

    def leave(number: int) -> None:
        ended.append(number)
        raise KeyError  # the real os._exit does not return

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(sys, "argv", ["lintx", *arguments])
    pretend(monkeypatch)
    with pytest.raises(SystemExit) as usual:
        main()
    assert (usual.value.code, ended) == (code, [])
    pretend(monkeypatch, **TORCHRUN)
    with pytest.raises(KeyError):
        main()
    assert ended == [code]
    with pytest.raises(KeyError):
        end_process(7)
    assert ended == [code, 7]
