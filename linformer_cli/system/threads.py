"""How OpenMP threads wait for each other."""

import os


def limit_spinning() -> None:
    """Let waiting threads of GNU OpenMP sleep sooner than by default, unless the environment sets this itself.

    Call it before torch is loaded. On a busy machine, a thread that spins for milliseconds occupies the core that the
    thread it waits for needs: sampling one image took two to seven times as long as on an idle machine, and twice as
    long with this setting. On an idle machine no difference was measured, in sampling or in training.
    """
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        os.environ["GOMP_SPINCOUNT"] = "10000"
