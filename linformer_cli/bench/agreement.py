"""Nothing is timed whose parallel and step executions disagree."""

import torch

from linformer_cli.errors import DisagreementError
from linformer_cli.evaluation.agreement import measure_agreement
from linformer_cli.model.pixel_model import PixelModel

from .models import BenchModel

# How much of the sequence is compared before anything is timed, and over how many layers of an untrained model.
CHECKED_POSITIONS = 96
CHECKED_LAYERS = 2


def require_agreement(model: PixelModel) -> None:
    """Raises `DisagreementError` where the two executions of the model's mechanism disagree: it is not timed then."""
    agreement = measure_agreement(model, positions=CHECKED_POSITIONS)
    if not agreement.passed:
        raise DisagreementError(
            f"'{model.config.attention}' is not timed: {agreement.describe_failure()}; see lintx check"
        )


def require_model_agrees(subject: BenchModel) -> None:
    """As `require_agreement`, over the first layers only where the model was not trained."""
    model = subject.model
    if not subject.trained and model.config.layers > CHECKED_LAYERS:
        # Its layers are alike, and the float64 copy of a deep one takes longer than what is timed.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = PixelModel(model.config.model_copy(update={"layers": CHECKED_LAYERS})).eval()
    require_agreement(model)
