"""How the threads of the processor wait for each other."""

import os


def limit_spinning() -> None:
    """Let waiting threads of OpenMP (GNU's) sleep sooner than by default, unless the environment says otherwise.

    To be called before torch is loaded. A thread that spins for milliseconds takes the core from the very thread that
    it waits for, as soon as anything else runs: one image then took two to seven times as long as on a quiet machine,
    with this twice as long. Where nothing else runs no difference was measured, in sampling or in training.
    """
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        os.environ["GOMP_SPINCOUNT"] = "10000"
