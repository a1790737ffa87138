"""The check before any timing: a mechanism whose parallel and step forms disagree is not timed."""

from linformer_cli.errors import DisagreementError
from linformer_cli.evaluation.agreement import measure_agreement
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.system.seeding import seeded

from .models import BenchModel

# The check compares this many positions. In an untrained model, it compares only this many layers.
CHECKED_POSITIONS = 96
CHECKED_LAYERS = 2


def require_agreement(model: PixelModel) -> None:
    """Raise `DisagreementError` if the parallel and the step form of the model disagree."""
    agreement = measure_agreement(model, positions=CHECKED_POSITIONS)
    if not agreement.passed:
        raise DisagreementError(
            f"'{model.config.attention}' is not timed: {agreement.describe_failure()}; see lintx check"
        )


def require_model_agrees(timed: BenchModel) -> None:
    """Check a model with `require_agreement`. If it is untrained, only its first layers are checked."""
    model = timed.model
    if not timed.trained and model.config.layers > CHECKED_LAYERS:
        # All layers of an untrained model have the same structure. Comparing all layers of a deep model in float64
        # would take longer than timing the model.
        with seeded(0):
            model = PixelModel(model.config.model_copy(update={"layers": CHECKED_LAYERS})).eval()
    require_agreement(model)
