"""Figures that Katharopoulos 2020 published for its models, for comparison with our measurements."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from linformer_cli.config import OptionValue
from linformer_cli.report.tables import Shown

# The paper names a P40 for training on CIFAR-10, a GTX 1080 Ti for time and memory, but none for these tables.
_HARDWARE = {
    "images_per_second": "an unnamed GPU, at the batch that fits it",
    "seconds_per_image_cpu": "an unnamed CPU",
    "seconds_per_image_gpu": "an unnamed GPU",
}


@dataclass(frozen=True, kw_only=True)
class Source:
    source: str = "Katharopoulos 2020, arXiv 2006.16236, tables 1, 2, 4 and 5"
    hardware: Mapping[str, str] = field(default_factory=lambda: _HARDWARE)


@dataclass(frozen=True)
class Published(Source):
    """The figures of one method on one data set. Unlike ours, `bits_per_dim` omits an image's first value."""

    bits_per_dim: Annotated[float, Shown("published bits/dim", "g")]
    images_per_second: Annotated[float, Shown("published images/s", "g")]
    seconds_per_image_cpu: Annotated[float, Shown("published s/image", "g")]
    seconds_per_image_gpu: float


# The keys are (preset, method). In the paper, softmax-rerun and lsh read the whole prefix again for every value.
PUBLISHED: dict[tuple[str, str], Published] = {
    ("mnist-paper", "softmax-rerun"): Published(0.621, 0.45, 72.6, 10.2),
    ("mnist-paper", "softmax-cached"): Published(0.621, 7.56, 7.4, 10.4),
    ("mnist-paper", "lsh-1"): Published(0.745, 0.68, 46.0, 19.2),
    ("mnist-paper", "lsh-4"): Published(0.676, 0.27, 112.0, 55.8),
    ("mnist-paper", "linear"): Published(0.644, 142.8, 5.5, 7.3),
    ("cifar10-paper", "softmax-rerun"): Published(3.47, 0.004, 8651.4, 300.1),
    ("cifar10-paper", "softmax-cached"): Published(3.47, 0.32, 71.9, 70.4),
    ("cifar10-paper", "lsh-1"): Published(3.39, 0.015, 2318.9, 221.6),
    ("cifar10-paper", "lsh-4"): Published(3.51, 0.005, 5263.7, 683.9),
    ("cifar10-paper", "linear"): Published(3.40, 17.85, 45.1, 61.3),
}


def _name_method(attention: str, options: Mapping[str, OptionValue]) -> str:
    if attention == "lsh":
        return f"lsh-{options.get('rounds')}"
    return "" if attention == "linear" and options.get("feature_map", "elu") != "elu" else attention


def find_published(
    preset: str | None, attention: str, options: Mapping[str, OptionValue], engine: str
) -> Published | None:
    """Find the paper's figures for the method of one of our rows, or None."""
    method = _name_method(attention, options)
    if method == "softmax":
        method = "softmax-rerun" if engine == "rerun" else "softmax-cached"
    return PUBLISHED.get((preset or "", method))


@dataclass(frozen=True)
class PublishedSpeech:
    """The figures of one method in speech recognition. The error rate is a share: 0.0808 for 8.08 %."""

    error_rate: Annotated[float, Shown("published PER, WSJ", ".2%")]
    seconds_per_epoch: Annotated[float, Shown("published s/epoch", ",.0f")]
    data: str = "WSJ, 80 hours"
    source: str = "Katharopoulos 2020, arXiv 2006.16236, table 3"
    hardware: str = "an unnamed GPU"


PUBLISHED_SPEECH = {
    "bi-lstm": PublishedSpeech(0.1094, 1047.0),
    "softmax": PublishedSpeech(0.0512, 2711.0),
    "lsh-4": PublishedSpeech(0.0933, 2250.0),
    "linear": PublishedSpeech(0.0808, 824.0),
}


def find_published_speech(attention: str, options: Mapping[str, OptionValue]) -> PublishedSpeech | None:
    """Find the paper's figures for speech recognition with a method, or None."""
    return PUBLISHED_SPEECH.get(_name_method(attention, options))


@dataclass(frozen=True)
class PublishedSize:
    """The bits/dim that a paper reports for the test images of a data set with all 256 levels."""

    method: Annotated[str, Shown("published", names=True)]
    bits_per_dim: Annotated[float, Shown("bits/dim", ".2f")]
    source: Annotated[str, Shown("source")]


_CIRCUITS = "Dang 2022, arXiv 2211.12551"
# By data set, the lowest first.
PUBLISHED_SIZES: dict[str, tuple[PublishedSize, ...]] = {
    "mnist": (
        PublishedSize("Sparse PC", 1.14, _CIRCUITS),
        PublishedSize("HCLT", 1.20, _CIRCUITS),
        PublishedSize("Bit-Swap", 1.27, _CIRCUITS),
        PublishedSize("BB-ANS", 1.39, _CIRCUITS),
        PublishedSize("IDF", 1.90, _CIRCUITS),
    ),
    "fashion-mnist": (PublishedSize("Sparse PC", 3.27, _CIRCUITS),),
    "cifar10": (PublishedSize("NeLLoC", 3.22, "Zhang 2021, arXiv 2109.02639"),),
}
