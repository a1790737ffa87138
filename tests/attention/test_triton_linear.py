"""Compares linear attention in Triton with its reference form, on a GPU or in Triton's interpreter."""

from collections.abc import Iterator

import pytest
import torch
from loops import first_fast, loop_over
from machine import NO_TRITON, TRITON_DEVICE
from tolerances import BFLOAT16, assert_agree, assert_all_agree
from torch import Tensor

from linformer_cli.attention.base import AttentionShape
from linformer_cli.attention.linear import LinearAttention, LinearOptions, LinearState
from linformer_cli.native import gpu
from linformer_cli.native.library import reference_only

pytest.importorskip("triton", reason=NO_TRITON)
from linformer_cli.attention.kernels import triton_linear as kernels
from linformer_cli.native import triton_probe

# The two forms add a few hundred float32 products in different orders.
FLOAT32 = 2e-5


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use few programs (enough for two segments), because the interpreter runs programs one after another."""
    monkeypatch.setattr(kernels, "WANTED_PROGRAMS", 5)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(TRITON_DEVICE).requires_grad_()


def draw_inputs(length: int, key_width: int, value_width: int, carry: bool, batch: int = 2) -> list[Tensor]:
    """Draw q, k, v and, if `carry` is true, s and z for `batch` images and 2 heads."""
    widths = (key_width, key_width, value_width)
    inputs = [draw(batch, 2, length, width, seed=seed) for seed, width in enumerate(widths)]
    if carry:
        inputs += [draw(batch, 2, key_width, value_width, seed=3)]
        inputs += [draw(batch, 2, key_width, seed=4).detach().abs().requires_grad_()]
    return inputs


def plain(feature_map: str, inputs: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, *carried = inputs
    shape = AttentionShape(heads=2, key_width=q.shape[3], value_width=v.shape[3], positions=784, row=28)
    attention = LinearAttention(LinearOptions.model_validate({"feature_map": feature_map}), shape)
    with reference_only():
        y, state = attention.attend(q, k, v, LinearState(*carried) if carried else None)
    return y, *state


def compiled(feature_map: str, inputs: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, *carried = inputs
    s, z = carried or (None, None)
    return kernels.attend(q, k, v, s, z, feature_map)


# Lengths are near multiples of a chunk (64) and of a segment (several chunks); 70 and 200 end inside a chunk.
@pytest.mark.parametrize(
    ("length", "key_width", "value_width", "carry", "feature_map"),
    first_fast(
        [
            *((1, 16, 16, True, "elu"), (63, 16, 16, False, "relu"), (64, 16, 16, True, "elu")),
            *((70, 16, 32, True, "relu"), (200, 32, 16, True, "elu"), (200, 32, 32, False, "relu")),
            *((*sizes, True, name) for sizes in ((257, 16, 16), (65, 64, 64)) for name in ("elu", "relu")),
        ],
        count=5,
    ),
)
def test_results_match_the_reference_form(length, key_width, value_width, carry, feature_map) -> None:
    inputs = draw_inputs(length, key_width, value_width, carry)
    sizes = [(length, value_width), (key_width, value_width), (key_width,)]
    gradients = [draw(2, 2, *size, seed=seed).detach() for seed, size in enumerate(sizes, 5)]
    found, expected = (
        [*outputs, *torch.autograd.grad(outputs, inputs, gradients)]
        for outputs in (compiled(feature_map, inputs), plain(feature_map, inputs))
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        assert_agree(ours, theirs, FLOAT32)


@pytest.mark.parametrize("used", [0, 1, 2])
def test_unused_outputs_have_no_gradient(used: int) -> None:
    """Each case uses one of the output, s and z."""
    inputs = draw_inputs(130, 16, 16, carry=True, batch=1)
    found, expected = (
        torch.autograd.grad(form("elu", inputs)[used].square().sum(), inputs, allow_unused=True)
        for form in (compiled, plain)
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert ours is not None
        assert_agree(ours, torch.zeros_like(ours) if theirs is None else theirs, FLOAT32)


def test_queries_without_weight_give_zero() -> None:
    q, k, v = draw_inputs(70, 16, 16, carry=False)
    with torch.no_grad():
        q[:, :, 5] = -1.0
        k[:, :, :3] = -1.0
    y, *_ = compiled("relu", [q, k, v])
    assert not y[:, :, [0, 1, 2, 5]].any()
    gradients = torch.autograd.grad(y.sum(), [q, k, v])
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
    assert not gradients[0][:, :, [0, 1, 2, 5]].any()


def test_inputs_and_gradients_may_have_any_strides() -> None:
    """Inputs are views of a projection, one head broadcast to all heads, and tensors with a strided last dimension."""
    dense = [part.detach() for part in draw_inputs(70, 16, 16, carry=False, batch=1)]
    expected = compiled("elu", dense)[0]
    projected = torch.cat([part.transpose(1, 2).flatten(2) for part in dense], dim=-1)
    views = [part.unflatten(-1, (2, 16)).transpose(1, 2) for part in projected.split(32, dim=-1)]
    spread = [torch.stack([part, part + 1], dim=-1)[..., 0] for part in dense]
    for inputs in (views, spread):
        assert torch.equal(compiled("elu", inputs)[0], expected)
    shared = [part[:, :1].expand(1, 2, 70, 16) for part in dense]
    assert torch.equal(compiled("elu", shared)[0], compiled("elu", [part.contiguous() for part in shared])[0])
    leaves = [part.clone().requires_grad_() for part in dense]
    y = compiled("elu", leaves)[0]
    for gradient in (
        torch.ones_like(y[:1, :1, :1, :1]).expand_as(y),
        torch.rand_like(y.permute(3, 2, 1, 0)).permute(3, 2, 1, 0),
    ):
        found = torch.autograd.grad(y, leaves, gradient, retain_graph=True)
        wanted = torch.autograd.grad(y, leaves, gradient.contiguous(), retain_graph=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))


@pytest.mark.parametrize("feature_map", first_fast(["elu", "relu"]))
def test_bfloat16_inputs_have_float32_sums(feature_map: str) -> None:
    exact = [part.detach().bfloat16() for part in draw_inputs(130, 16, 16, carry=False, batch=1)]
    weights = draw(1, 2, 130, 16, seed=8).detach().bfloat16()
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        inputs = [part.to(dtype).requires_grad_() for part in exact]
        y, s, z = compiled(feature_map, inputs)
        assert y.dtype == dtype and s.dtype == z.dtype == torch.float32
        results.append([y, s, z, *torch.autograd.grad(y, inputs, weights.to(dtype))])
    assert_all_agree(*results, BFLOAT16)


def test_outputs_do_not_depend_on_later_positions_or_other_heads() -> None:
    inputs = [part.detach() for part in draw_inputs(200, 16, 16, carry=False)]
    y = compiled("elu", inputs)[0]
    changed = [part.clone() for part in inputs]
    for part in changed:
        part[0, 0, 100:] = 30.0
    again = compiled("elu", changed)[0]
    assert torch.equal(again[0, 0, :100], y[0, 0, :100]) and torch.equal(again[0, 1], y[0, 1])
    assert torch.equal(again[1], y[1]) and not torch.equal(again[0, 0, 100:], y[0, 0, 100:])


@pytest.mark.parametrize("scale", first_fast([30.0, 10.0]))
def test_hard_inputs_give_finite_results(scale: float) -> None:
    q, k, v = (part.detach() for part in draw_inputs(130, 16, 16, carry=False, batch=1))
    for inputs in ([q, scale * k, v], [scale * q, scale * k, v], [-q.abs(), -scale * k.abs(), v]):
        leaves = [part.clone().requires_grad_() for part in inputs]
        y = compiled("elu", leaves)[0]
        assert_agree(y, plain("elu", leaves)[0], 1e-4)
        assert all(bool(torch.isfinite(part).all()) for part in torch.autograd.grad(y.sum(), leaves))


@pytest.fixture
def fresh() -> Iterator[None]:
    """Clears the cached answers of `triton_refusal`."""
    gpu.triton_refusal.cache_clear()
    yield
    gpu.triton_refusal.cache_clear()


@loop_over("batch", [1, 3, 1000])
@loop_over("length", [1, 64, 65, 784, 3072, 100_000])
def test_segments_cover_all_positions_once(monkeypatch, batch: int, length: int) -> None:
    monkeypatch.setattr(kernels, "WANTED_PROGRAMS", 256)
    segments, chunks = kernels.cut_into_segments(batch, 8, length)
    assert (segments - 1) * chunks * kernels.CHUNK < length <= segments * chunks * kernels.CHUNK
    assert segments == 1 or batch * 8 * (segments - 1) < 256


@pytest.mark.parametrize(
    ("feature_map", "key_width", "value_width", "dtype", "serves"),
    [
        *(("elu", 32, 64, torch.float32, True), ("relu", 16, 16, torch.bfloat16, True)),
        *(("elu", 32, 32, dtype, False) for dtype in (torch.float64, torch.float16)),
        *(("elu", *widths, torch.float32, False) for widths in ((24, 32), (32, 128))),
        ("poly2", 32, 32, torch.float32, False),
    ],
)
def test_supported_inputs_use_the_compiled_form(feature_map, key_width, value_width, dtype, serves, fresh) -> None:
    shape = AttentionShape(heads=2, key_width=key_width, value_width=value_width, positions=784, row=28)
    attention = LinearAttention(LinearOptions.model_validate({"feature_map": feature_map}), shape)
    on_card = torch.device("cuda")
    if torch.version.cuda is not None:
        assert attention.is_compiled(on_card, dtype) == serves
    with reference_only():
        assert not attention.is_compiled(on_card, dtype)


def test_without_triton_there_are_no_triton_kernels(monkeypatch, fresh) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not gpu.has_triton(torch.device("cuda"))


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch has no CUDA")
@pytest.mark.parametrize(
    ("capability", "failure", "reason"),
    [
        ((9, 0), None, None),
        ((7, 5), None, "this GPU is too old"),
        ((9, 0), RuntimeError("Failed to find C compiler\nmore"), "here: RuntimeError: Failed to find C compiler"),
    ],
)
def test_triton_kernels_need_a_gpu_that_can_run_them(monkeypatch, fresh, capability, failure, reason) -> None:
    def run_kernel(device: torch.device) -> None:
        if failure is not None:
            raise failure

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(triton_probe, "run_kernel", run_kernel)
    found = gpu.triton_refusal(torch.device("cuda"))
    assert found is None if reason is None else reason in str(found) and "more" not in str(found)


def test_the_cpu_does_not_use_triton_kernels() -> None:
    assert not gpu.has_triton(torch.device("cpu"))
