"""`lintx check`: how closely the parallel and the step form of a model agree."""

from linformer_cli.errors import DisagreementError, UsageError
from linformer_cli.report.tables import list_columns
from . import options
from .config_options import option, with_fields
from .output import info, print_json, print_records
from .session import open_session

_MOST_IMAGES = 10_000  # all images are stepped at once in float64, so memory limits their number


@with_fields
def check(
    checkpoint: options.CheckpointArgument = None,
    images: int = option(2, "Number of images.", "-n", "--count", min=1, max=_MOST_IMAGES),
    positions: int | None = option(None, "Number of positions. Default: all.", min=2),
    mechanism: str | None = option(
        None,
        "Check a mechanism instead: its name, as in lsh:rounds=1, or its class as FILE.py:CLASS or MODULE:CLASS.",
        metavar="NAME",
    ),
    seed: options.Seed = 0,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Measure how closely two forms agree.

    Examples:

    - `lintx check`
    - `lintx check runs/first --json`
    - `lintx check --mechanism mine.py:MyAttention`

    Compares the predictions of the step form, on images that the model draws, with those of the parallel form, in
    float64 and in float32. Also checks that reading an image in blocks does not change the predictions, and that later
    values do not change earlier ones. The exit code is 1 if an error exceeds its tolerance.

    With --mechanism, checks the contract of one mechanism with random inputs, and compares it with its method
    `oracle(q, k, v, extra)` if it has one.
    """
    if mechanism is not None:
        if checkpoint is not None:
            raise UsageError("--mechanism checks a mechanism without a model; drop the checkpoint")
        _check_mechanism(mechanism, json)
        return
    session = open_session(checkpoint, "cpu", "fp32")

    from linformer_cli.evaluation.agreement import AgreementRow, measure_agreement

    agreement = measure_agreement(session.model, images, positions, seed)
    if json:
        print_json({**session.record, "passed": agreement.passed, **vars(agreement)})
    else:
        print_records(agreement.rows, list_columns(AgreementRow), "table")
    if not agreement.passed:
        why = agreement.describe_failure()
        raise DisagreementError(f"the parallel and step forms of '{session.checkpoint.name}' disagree: {why}")
    sizes = f"{agreement.images} {session.checkpoint.info.data.words.items} of {agreement.positions} positions"
    info(f"passed: {sizes}, {agreement.state_bytes:,} state bytes")


def _check_mechanism(name: str, json: bool) -> None:
    from linformer_cli.attention.catalogue import add_mechanisms
    from linformer_cli.attention.plugins import read_class
    from linformer_cli.evaluation.agreement import AgreementRow
    from linformer_cli.evaluation.contract import build_mechanism, measure_contract
    from linformer_cli.model.mixers import parse_variant

    if ":" in name and "=" not in name:
        found = read_class(name)
        add_mechanisms([found])
        name = found.name
    variant = parse_variant(name)
    rows = measure_contract(build_mechanism(variant))
    failed = [row.name for row in rows if not row.passed]
    if json:
        print_json({**variant.described, "passed": not failed, "rows": rows})
    else:
        print_records(rows, list_columns(AgreementRow), "table")
    for row in rows:
        if row.where:
            info(f"{row.name}: {row.where}")
    if failed:
        why = ", ".join(failed)
        raise DisagreementError(f"'{variant.label}' breaks the contract in {len(failed)} of {len(rows)} checks: {why}")
    info(f"passed: {len(rows)} checks of '{variant.label}'")
