"""`lintx demo`: a page that runs a model in the browser."""

from pathlib import Path
from typing import Annotated

import typer

from linformer_cli.checkpoint_files import DEFAULT_CHECKPOINT, find_shipped
from linformer_cli.errors import LintxError, UsageError
from linformer_cli.files import require_writable, write_folder
from . import options
from .config_options import option, with_fields
from .output import info


@with_fields
def demo(
    checkpoints: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CHECKPOINT]...",
            help="Runs, checkpoint folders or shipped models, which the page lists. Default: mnist-deep sprites.",
        ),
    ] = None,
    port: int = option(0, "Port of the page. 0 is a free one.", min=0, max=65535),
    browser: bool = option(True, "Open the page in the browser."),
    build: Path | None = option(
        None, "Write the files of the page to this new folder, for any web host, and stop.", metavar="FOLDER"
    ),
    quiet: options.Quiet = False,
) -> None:
    """Show models in the browser.

    Examples:

    - `lintx demo`
    - `lintx demo runs/first --port 8000 --no-browser`
    - `lintx demo mnist-deep sprites --build site`

    On the page, the model completes what you draw, redraws what you erase, draws samples, shows its state, and races
    softmax attention. The page runs on your machine, and ends with Ctrl-C.
    """
    from linformer_cli.demo.server import DemoServer
    from linformer_cli.demo.site import build_sites

    if build is not None:
        if build.exists():
            raise UsageError(f"'{build}' exists already; name another folder")
        require_writable(build)
    # Without names, a folder that is called `sprites` is not meant.
    shipped = {name: find_shipped(name) for name in (DEFAULT_CHECKPOINT, "sprites")}
    site = build_sites({name: name for name in checkpoints} if checkpoints else shipped)
    if build is not None:
        write_folder(build, {name: file.data for name, file in site.items()})
        info(f"wrote {build}: {len(site)} files, {sum(len(file.data) for file in site.values()):,} bytes")
        return
    try:
        server = DemoServer(site, port)
    except OSError as error:
        raise LintxError(f"port {port} is not available ({error.strerror or error}); choose another --port") from None
    with server:
        # The address is the result of the command, so it is printed even with --quiet.
        print(server.url, flush=True)
        info("the page is open until Ctrl-C")
        if browser:
            import threading
            import webbrowser

            # A browser for the terminal ends only when its user leaves it.
            threading.Thread(target=webbrowser.open, args=(server.url,), daemon=True).start()
        server.serve_forever()
