"""Small models in which every weight affects the output."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from machine import HAS_LIBRARY, NO_LIBRARY

from linformer_cli.config import ImageShape, ModelConfig
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.native.library import has_library, reference_only

BuildConfig = Callable[..., ModelConfig]
BuildModel = Callable[..., PixelModel]


@pytest.fixture(scope="session")
def build_config() -> BuildConfig:
    """Provides `build_config(attention="linear", size=(height, width, channels), levels=256, **network settings)`."""

    def build(
        attention: str = "linear", size: tuple[int, int, Any] = (4, 5, 1), levels: int = 256, **changes: Any
    ) -> ModelConfig:
        network = {"layers": 2, "heads": 2, "width": 16, "head_width": 6, "feed_forward": 24, "mixtures": 3}
        options = {"linear": {"chunk": 7}, "flash": {"chunk": 7, "z_width": 6}, "gau": {"z_width": 6}}.get(
            attention, {}
        )
        image = ImageShape(height=size[0], width=size[1], channels=size[2], levels=levels)
        return ModelConfig(
            **{**network, "attention": attention, "attention_options": options, "image": image, **changes}
        )

    return build


@pytest.fixture(scope="session")
def build_model(build_config: BuildConfig) -> BuildModel:
    """Provides `build_model(dtype, seed, **for build_config)`; no weight is 0 or 1, and predictions are not uniform."""

    def build(dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> PixelModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = PixelModel(build_config(**changes))
            model.head.projection.weight.data.mul_(10)
            for parameter in model.parameters():
                parameter.data.add_(0.1 * torch.randn_like(parameter))
        return model.to(dtype).eval()

    return build


@pytest.fixture(params=["compiled", "reference"])
def form(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the test with the compiled form and with the reference form."""
    if request.param == "compiled":
        if not HAS_LIBRARY:
            pytest.skip(NO_LIBRARY)
        assert has_library()
        yield
    else:
        with reference_only():
            yield
