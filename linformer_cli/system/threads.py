"""How OpenMP threads wait for each other."""

import os


def limit_spinning() -> None:
    """Let waiting threads of GNU OpenMP sleep sooner than by default, unless the environment sets this itself.

    Call it before torch is loaded. On a busy machine, a spinning thread can occupy the core that another thread needs.
    On such a machine, sampling one image took two to seven times as long as on an idle one. With this setting, it took
    twice as long. On an idle machine, the setting made no measurable difference to sampling or training.
    """
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        os.environ["GOMP_SPINCOUNT"] = "10000"
