"""`lintx check`: are the two executions of this very model equal?"""

from typing import Annotated

import typer

from linformer_cli.errors import DisagreementError
from linformer_cli.report.tables import Column

from . import options
from .output import print_json, print_records, talk
from .session import open_session


def check(
    checkpoint: options.CheckpointArgument = None,
    images: Annotated[int, typer.Option("-n", "--count", min=1, help="Images to step through.")] = 2,
    positions: Annotated[
        int | None, typer.Option("--positions", min=2, help="Only this many; default all.", show_default=False)
    ] = None,
    seed: options.Seed = 0,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Prove that both executions agree.

    On real weights, over the full length: parallel and step form are equal, and nothing looks ahead. Steps through
    images that the model draws itself, in float64 and float32, and compares with the parallel pass, with the parallel
    pass in blocks, and with later values changed. Ends with exit code 1 where anything disagrees.

    Examples:

    - `lintx check`
    - `lintx check runs/first --json`
    """
    session = open_session(checkpoint, "cpu", "fp32")

    from linformer_cli.evaluation.agreement import measure_agreement

    agreement = measure_agreement(session.model, images, positions, seed)
    # A damaged step gives infinite errors, for which JSON has no number.
    rows = [
        {
            "name": row.name,
            "error": row.error if row.error < float("inf") else None,
            "tolerance": row.tolerance,
            "passed": row.passed,
        }
        for row in agreement.rows
    ]
    sizes = {"state_bytes": agreement.state_bytes, "predicted_state_bytes": agreement.predicted_state_bytes}
    if json:
        counts = {"images": agreement.images, "positions": agreement.positions}
        print_json({**session.record, "passed": agreement.passed, **counts, "rows": rows, **sizes})
    else:
        columns = (
            Column("name", "comparison"),
            Column("error", "largest error", format=".2e"),
            Column("tolerance", "allowed", format=".0e"),
            Column("passed", "passed"),
        )
        print_records(rows, columns, "table")
    if not agreement.passed:
        raise DisagreementError(
            f"the executions of '{session.checkpoint.path}' disagree: {agreement.describe_failure()}"
        )
    talk(f"passed: {agreement.images} images of {agreement.positions} positions, {agreement.state_bytes:,} state bytes")
