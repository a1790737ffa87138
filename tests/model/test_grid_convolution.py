"""The convolution over the grid against its definition on pictures, split anywhere, compiled and in plain torch."""

import itertools
from pathlib import Path

import pytest
import torch
from tolerances import FLOAT64, assert_agree
from torch import Tensor

from linformer_cli.attention.base import fork_state, measure_state_bytes
from linformer_cli.config import ImageShape
from linformer_cli.model.grid_convolution import SOURCE, GridConvolution, list_taps

GREY, COLOUR, NARROW = (
    ImageShape(height=5, width=6),
    ImageShape(height=3, width=3, channels=3),
    ImageShape(height=4, width=2),
)
CASES = [
    (image, rows, side, width)
    for image in (GREY, COLOUR, NARROW)
    for rows, side, width in [(3, 2, 5), (1, 3, 16), (2, 0, 3), (2, 9, 150)]
]
every_case = pytest.mark.parametrize(("image", "rows", "side", "width"), CASES)


@pytest.fixture
def source() -> Path:
    return SOURCE


def build(image: ImageShape, rows: int, side: int, width: int) -> tuple[GridConvolution, Tensor]:
    torch.manual_seed(0)
    convolution = GridConvolution(image, rows, side, width).double()
    torch.nn.init.normal_(convolution.weight)
    return convolution, torch.randn(2, image.positions, width, dtype=torch.float64, requires_grad=True)


def define(convolution: GridConvolution, x: Tensor, image: ImageShape, rows: int, side: int) -> Tensor:
    """Place by place of the picture: what is known around each, times the weight of that place, in the taps' order."""
    row = image.values_per_row
    side *= image.channels
    offsets = [(up, left) for up in range(rows) for left in range(side, -side - 1, -1) if abs(left) < row]
    offsets = [(up, left) for up, left in offsets if up > 0 or left > 0]
    picture = x.unflatten(1, (image.height, row))
    y = picture.clone()
    for (tap, (up, left)), place in itertools.product(
        enumerate(offsets), itertools.product(range(image.height), range(row))
    ):
        line, column = place[0] - up, place[1] - left
        if line >= 0 and 0 <= column < row:
            y[:, place[0], place[1]] += convolution.weight[tap] * picture[:, line, column]
    return y.flatten(1, 2)


@every_case
def test_it_is_its_definition_with_its_gradients(form, image, rows, side, width) -> None:
    convolution, x = build(image, rows, side, width)
    y, _ = convolution.attend(x, None)
    expected = define(convolution, x, image, rows, side)
    assert_agree(y, expected, FLOAT64)
    gradient = torch.randn_like(y)
    for mine, other in zip(
        *(torch.autograd.grad(z, (x, convolution.weight), gradient) for z in (y, expected)), strict=True
    ):
        assert_agree(mine, other, FLOAT64)


@every_case
@pytest.mark.parametrize("cuts", [[1], [3, 4], [2, 5, 6]])
def test_blocks_and_steps_give_what_the_whole_gives(form, image, rows, side, width, cuts: list[int]) -> None:
    convolution, x = build(image, rows, side, width)
    whole, end = convolution.attend(x, None)
    state, parts = None, []
    for part in x.tensor_split(cuts, dim=1):
        y, state = convolution.attend(part, state)
        parts.append(y)
    assert_agree(torch.cat(parts, dim=1), whole, FLOAT64)
    gradient = torch.randn_like(whole)
    for mine, other in zip(
        *(torch.autograd.grad(z, (x, convolution.weight), gradient) for z in (torch.cat(parts, dim=1), whole)),
        strict=True,
    ):
        assert_agree(mine, other, FLOAT64)
    first = x.detach()[:, : cuts[0]]
    stepped = convolution.attend(first, convolution.init_state(2, x.device, x.dtype))[1]
    outputs = []
    for x_t in x.detach()[:, cuts[0] :].unbind(dim=1):
        y_t, stepped = convolution.step(x_t, stepped)
        outputs.append(y_t)
    assert_agree(torch.stack(outputs, dim=1), whole[:, cuts[0] :].detach(), FLOAT64)
    assert state is not None
    for held in (state, end, stepped):
        assert_agree(held.recent.detach(), end.recent.detach(), FLOAT64)
        assert int(held.position) == image.positions
        assert measure_state_bytes(held) == convolution.state_bytes(2, torch.float64)


@every_case
def test_nothing_is_seen_before_it_is_known(form, image, rows, side, width) -> None:
    convolution, x = build(image, rows, side, width)
    before, _ = convolution.attend(x, None)
    place = image.positions // 2
    changed = x.detach().clone()
    changed[:, place] *= 30
    after, _ = convolution.attend(changed, None)
    assert torch.equal(after[:, :place], before[:, :place]) and not torch.equal(after[:, place], before[:, place])


def test_a_step_leaves_a_fork_alone(form) -> None:
    convolution, x = build(GREY, 3, 2, 5)
    _, state = convolution.attend(x.detach()[:, :9], None)
    other = fork_state(state)
    convolution.step(x.detach()[:, 9], state)
    again, _ = convolution.attend(x[:, 9:], other)
    assert_agree(again, convolution.attend(x, None)[0][:, 9:], FLOAT64)


def test_the_state_does_not_grow_with_the_image() -> None:
    reaches = {GridConvolution(ImageShape(height=height, width=8), 3, 2, 4).reach for height in (4, 400)}
    assert reaches == {2 * 8 + 2}


def test_a_tap_is_a_place_in_the_picture() -> None:
    assert list_taps(GREY, 2, 1).tolist() == [[1, 1], [7, 1], [6, 0], [5, -1]]
    assert list_taps(COLOUR, 1, 1).tolist() == [[3, 3], [2, 2], [1, 1]]
