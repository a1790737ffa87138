"""On a device, a training step waits for one flag: the loss and the gradients are finite. Here the CPU is a device."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from loops import first_fast
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import TRAIN, VALIDATION
from waiting import Recorder

from linformer_cli.attention.tensors import HOSTS, defer_checks, may_check
from linformer_cli.errors import TrainingError
from linformer_cli.model.mixers import list_mixers
from linformer_cli.native.library import reference_only
from linformer_cli.sampling.engines.cuda import Graphs
from linformer_cli.training.learner import Learner
from linformer_cli.training.pixel_task import PixelTask, Teachers

# Operations whose result the host must know before it can go on.
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal")


@pytest.fixture(autouse=True)
def _cpu_is_a_device() -> Iterator[None]:
    HOSTS.discard("cpu")
    with reference_only():
        yield
    HOSTS.add("cpu")


class _NeverWaits(TorchDispatchMode):
    """Fails if a number is read, except from the single integers that count positions."""

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        is_count = arguments and isinstance(arguments[0], torch.Tensor) and arguments[0].dtype == torch.int64
        if operation._schema.name.removeprefix("aten::") in WAITING:
            assert is_count and arguments[0].dim() == 0, operation
        return operation(*arguments, **(named or {}))


def build_task(configure: Any, graph: bool = False, **model: Any) -> PixelTask:
    config = configure(model=model, clip=1.0, accumulation=2, graph=graph)
    return PixelTask(config, (TRAIN, VALIDATION), "cpu", "fp32")


@pytest.mark.parametrize("name", list_mixers())
def test_a_training_step_waits_only_at_its_end(configure, name: str) -> None:
    learner = Learner(build_task(configure, attention=name, attention_options={}))
    learner.train_step()  # constants and random blocks are copied once
    with _NeverWaits():
        assert math.isfinite(learner.train_step().nats)


def test_teachers_never_wait(build_tiny_model) -> None:
    teachers = [build_tiny_model(classes=3, optional_class=True), build_tiny_model()]
    with _NeverWaits(), defer_checks():
        assert Teachers(teachers).predict(torch.randint(16, (2, 64)), torch.tensor([3, 1])).shape == (2, 64, 16)


def test_a_step_that_is_not_finite_is_repeated_with_checks(configure, monkeypatch) -> None:
    expected = Learner(build_task(configure, dropout=0.0)).train_step()
    task, checked = build_task(configure, dropout=0.0), []
    measure = task.measure_loss

    def measure_loss(batch: Any) -> Any:
        checked.append(may_check(torch.device("cpu")))
        loss, nats = measure(batch)
        return (loss, nats) if checked[-1] else (loss * math.nan, nats)

    monkeypatch.setattr(task, "measure_loss", measure_loss)
    assert Learner(task).train_step() == expected
    assert checked == [False, False, True, True]


def test_a_damaged_step_is_refused_and_changes_nothing(configure) -> None:
    task = build_task(configure)
    with torch.no_grad():
        task.model.norm.weight[0] = math.nan
    before = {key: x.clone() for key, x in task.model.state_dict().items()}
    with pytest.raises(TrainingError, match="NaN or infinite at step 0"):
        Learner(task).train_step()
    assert all(torch.equal(x, before[key]) or key == "norm.weight" for key, x in task.model.state_dict().items())


# torch's LSTM on CPUs saves nothing for its backward pass in a replay, which is without gradients.
OTHERS = [name for name in list_mixers() if name not in ("linear", "lstm")]


@pytest.mark.parametrize("name", first_fast(["linear", *OTHERS]))
def test_replayed_passes_take_the_same_steps(configure, monkeypatch, name: str) -> None:
    """The third and later steps replay recorded operations, which know no Python, and read other batches."""

    def record(graphs: Graphs, work: Callable[[], None]) -> Recorder:
        recorded.append(Recorder())
        with recorded[-1]:
            work()
        return recorded[-1]

    recorded: list[Recorder] = []
    monkeypatch.setattr(Graphs, "record", record)
    # The recorder cannot repeat a random choice.
    changes = {"dropout": 0.0, "attention": name, "attention_options": {}}
    plain, replayed = (Learner(build_task(configure, graph=graph, **changes)) for graph in (False, True))
    replayed._recorded._graphs = Graphs(torch.device("cuda"))
    for number in range(6):
        expected, found = plain.train_step(), replayed.train_step()
        assert math.isclose(found.nats, expected.nats, rel_tol=1e-5), number
        assert math.isclose(found.gradient_norm, expected.gradient_norm, rel_tol=1e-3), number
        if number == 3:  # other passes set new gradients
            replayed._run_passes([replayed.task.load_batch(0, replayed.rows) for _ in range(2)])
    assert len(recorded) == 1
