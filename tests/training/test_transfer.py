"""Tests of copying weights from one model to another. Tensors that match are copied, and all others are listed."""

from collections.abc import Callable
from typing import ClassVar

import pytest
import torch

from linformer_cli.attention.catalogue import CATALOGUE
from linformer_cli.attention.linear import LinearAttention
from linformer_cli.config import ImageShape
from linformer_cli.errors import CheckpointError
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.training.transfer import summarise_names, transfer_weights

INPUT = "blocks.0.attention.input.weight"
ROWS = 16  # 2 heads of 8


class SharedAttention(LinearAttention):
    """A mechanism with a shared projection of queries and keys, and with two extra scalars."""

    name: ClassVar[str] = "shared"
    shared_query_key: ClassVar[bool] = True
    extra_per_head = 2
    extra_bias = 5.0


class OtherExtraAttention(LinearAttention):
    """A mechanism whose two extra scalars have a different meaning from those of `SharedAttention`."""

    name: ClassVar[str] = "other"
    extra_per_head = 2


@pytest.fixture(autouse=True)
def mechanisms(monkeypatch: pytest.MonkeyPatch) -> None:
    for mechanism in (SharedAttention, OtherExtraAttention):
        monkeypatch.setitem(CATALOGUE, mechanism.name, mechanism)


@pytest.fixture
def pair(build_tiny_model) -> Callable[..., tuple[PixelModel, PixelModel]]:
    """Provides `pair(source, model, **changes)`, which builds a source and a model; `changes` apply to the model."""

    def build(source: str, model: str, **changes) -> tuple[PixelModel, PixelModel]:
        return build_tiny_model(1, attention=model, **changes), build_tiny_model(2, attention=source)

    return build


def test_classes_are_copied_between_models_that_need_a_class_and_others(build_tiny_model) -> None:
    table = "embedding.classes.weight"
    models = [build_tiny_model(seed, classes=3, optional_class=optional) for seed, optional in enumerate((False, True))]
    for source, model, new, left in (
        (*models, (f"{table}[no class]",), ()),
        (*models[::-1], (), (f"{table}[no class]",)),
    ):
        before, given = model.state_dict()[table].clone(), source.state_dict()[table]
        moved = transfer_weights(model, source)
        assert f"{table}[class]" in moved.copied and (moved.new, moved.left) == (new, left)
        found = model.state_dict()[table]
        assert torch.equal(found[:3], given[:3]) and torch.equal(found[3:], before[3:])
        model.load_state_dict(build_tiny_model(7, classes=3, optional_class=bool(new)).state_dict())
    same = transfer_weights(models[1], build_tiny_model(5, classes=3, optional_class=True))
    assert table in same.copied and not same.new


def test_new_classes_do_not_change_the_predictions(build_tiny_model) -> None:
    source, model = build_tiny_model(1), build_tiny_model(2, classes=3, optional_class=True)
    moved = transfer_weights(model, source)
    assert moved.new == ("embedding.classes.weight",) and not moved.left
    values = torch.randint(0, source.config.image.levels, (4, source.config.image.positions))
    labels = torch.arange(4)
    with torch.no_grad():
        assert torch.equal(model.nats(values, labels), source.nats(values))


def copy_of(model: PixelModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(("source", "target"), [("softmax", "linear"), ("linear", "softmax"), ("linear", "linear")])
def test_all_tensors_are_copied_between_mechanisms_with_the_same_tensors(pair, source, target) -> None:
    model, origin = pair(source, target)
    moved = transfer_weights(model, origin)
    assert set(moved.copied) == set(origin.state_dict()) and moved.new == moved.left == ()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, origin.state_dict()[name]), name
    # The values are copied, so training does not change the source.
    before = copy_of(origin)
    for parameter in model.parameters():
        parameter.data.add_(1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in origin.state_dict().items())


def test_the_projection_of_queries_becomes_the_shared_projection(pair) -> None:
    model, origin = pair("linear", "shared")
    before = copy_of(model)
    moved = transfer_weights(model, origin)
    ours, theirs = model.state_dict(), origin.state_dict()
    for kind in ("weight", "bias"):
        name = f"blocks.1.attention.input.{kind}"
        assert torch.equal(ours[name][:ROWS], theirs[name][:ROWS])
        assert torch.equal(ours[name][ROWS : 2 * ROWS], theirs[name][2 * ROWS :])
        assert torch.equal(ours[name][2 * ROWS :], before[name][2 * ROWS :])
        assert {f"{name}[qk]", f"{name}[v]"} <= set(moved.copied)
        assert f"{name}[extra of shared]" in moved.new and f"{name}[k]" in moved.left
    assert (ours["blocks.0.attention.input.bias"][2 * ROWS :] == 5).all()
    assert not {INPUT, f"{INPUT}[q]"} & {*moved.copied, *moved.new, *moved.left}


def test_a_shared_projection_becomes_the_projections_of_queries_and_keys(pair) -> None:
    model, origin = pair("shared", "linear")
    moved = transfer_weights(model, origin)
    ours, theirs = model.state_dict()[INPUT], origin.state_dict()[INPUT]
    assert torch.equal(ours, torch.cat([theirs[:ROWS], theirs[:ROWS], theirs[ROWS : 2 * ROWS]]))
    assert moved.new == ()
    assert moved.left == tuple(
        f"blocks.{block}.attention.input.{kind}[extra of shared]" for block in (0, 1) for kind in ("bias", "weight")
    )


def test_extra_scalars_are_copied_only_to_the_same_mechanism(pair) -> None:
    model, origin = pair("other", "shared")
    moved = transfer_weights(model, origin)
    assert f"{INPUT}[extra of shared]" in moved.new and f"{INPUT}[extra of other]" in moved.left
    model, origin = pair("other", "other")
    assert transfer_weights(model, origin).new == ()
    assert torch.equal(model.state_dict()[INPUT], origin.state_dict()[INPUT])


def test_tensors_whose_sizes_do_not_fit_are_named(pair) -> None:
    model, origin = pair("linear", "linear", layers=4, feed_forward=24, head="mixture")
    before = copy_of(model)
    moved = transfer_weights(model, origin)
    assert {"embedding.values", "norm.weight", INPUT, "blocks.2.feed_forward.output.bias"} <= set(moved.copied)
    assert {"blocks.3.attention.input.weight", "blocks.0.feed_forward.input.weight", "head.projection.bias"} <= set(
        moved.new
    )
    assert "head.projection.weight" in moved.left and "blocks.1.feed_forward.input.weight" in moved.left
    for name in moved.new:
        if name.startswith(("blocks.1.", "blocks.3.")) and ".output." in name:
            continue  # in new blocks, these are zero
        assert torch.equal(model.state_dict()[name], before[name])
    assert len(moved.copied) + len(moved.new) == len(before)
    assert len(moved.copied) + len(moved.left) == len(origin.state_dict())


@pytest.mark.parametrize("attention", ["linear", "gau", "lstm"])
def test_a_deeper_model_starts_with_the_output_of_its_source(pair, attention) -> None:
    model, origin = pair(attention, attention, layers=5)
    moved = transfer_weights(model, origin)
    assert {name.split(".")[1] for name in moved.copied if name.startswith("blocks.")} == {"0", "2"}
    assert {name.split(".")[1] for name in moved.new} == {"1", "3", "4"} and moved.left == ()
    tokens = torch.randint(0, 16, (2, 64))
    with torch.no_grad():
        assert torch.equal(model.attend(tokens)[0], origin.attend(tokens)[0])
    # The new blocks can learn, because only the ends of their branches are zero.
    model.train().attend(tokens)[0].square().sum().backward()
    for block in model.blocks:
        assert all(last.weight.grad.abs().max() > 0 for last in block.branch_ends())


def test_a_shallower_model_copies_the_first_blocks(pair) -> None:
    model, origin = pair("linear", "linear", layers=1)
    moved = transfer_weights(model, origin)
    assert torch.equal(model.state_dict()[INPUT], origin.state_dict()[INPUT]) and moved.new == ()
    assert moved.left and all(name.startswith("blocks.1.") for name in moved.left)


def test_a_projection_without_a_fitting_part_is_not_split(pair) -> None:
    model, origin = pair("linear", "shared", width=24)
    moved = transfer_weights(model, origin)
    assert INPUT in moved.new and INPUT in moved.left
    # The bias does not depend on the width.
    assert "blocks.0.attention.input.bias[qk]" in moved.copied


def test_a_source_without_fitting_tensors_gives_a_one_line_error(pair, raises_one_line) -> None:
    changes = {"width": 24, "heads": 3, "feed_forward": 40, "head": "mixture"}
    model, origin = pair("linear", "linear", **changes)
    before = copy_of(model)
    with raises_one_line(CheckpointError, "none of the", "tensors", "fits"):
        transfer_weights(model, origin)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_names_of_tensors_are_summarised_per_block() -> None:
    names = [f"blocks.{block}.a.b" for block in (0, 1, 2, 10, 11, 4)] + ["blocks.3.c", "norm.weight"]
    assert summarise_names(names) == "blocks.0-2,4,10-11.a.b, blocks.3.c, norm.weight"
    assert summarise_names([]) == "none"


def test_positions_of_another_size_are_interpolated(build_tiny_model) -> None:
    source = build_tiny_model(1)
    image = source.config.image
    larger = image.model_copy(update={"height": 2 * image.height - 1})
    model = build_tiny_model(0, image=larger)
    moved = transfer_weights(model, source)
    assert "embedding.row.weight" in moved.copied and not moved.new
    torch.testing.assert_close(model.embedding.row.weight[::2], source.embedding.row.weight)
    between = (source.embedding.row.weight[:-1] + source.embedding.row.weight[1:]) / 2
    torch.testing.assert_close(model.embedding.row.weight[1::2], between)


def test_numbers_of_another_palette_are_not_copied(build_tiny_model) -> None:
    models = []
    for seed, colour in enumerate(("#ff0000", "#00ff00")):
        size = {"height": 4, "width": 4, "levels": 2, "palette": ("#00000000", colour)}
        models.append(build_tiny_model(seed, image=ImageShape(**size)))
    moved = transfer_weights(*models)
    assert {"embedding.values", "head.projection.weight", "head.projection.bias"} <= set(moved.new)
    assert "embedding.row.weight" in moved.copied
