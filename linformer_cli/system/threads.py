"""How OpenMP threads wait for each other."""

import os


def limit_spinning() -> None:
    """Let waiting threads of GNU OpenMP sleep sooner than by default, unless the environment sets this itself.

    Call it before torch is loaded. On a busy machine, a spinning thread can occupy the core that another thread
    needs. Sampling one image took two to seven times as long there as on an idle machine, and twice as long with this
    setting. On an idle machine no difference was measured, in sampling or in training.
    """
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        os.environ["GOMP_SPINCOUNT"] = "10000"
