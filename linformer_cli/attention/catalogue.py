"""All attention mechanisms by name. A new one needs one file, its name here, test cases and a docs page."""

import importlib
from collections.abc import Iterable, Mapping

from linformer_cli.errors import UsageError, unknown_name
from . import plugins
from .base import Attention, AttentionOptions, AttentionShape

# By family, and by year within a family. The key, the file and the class of a mechanism share one name.
_NAMES = (
    "softmax single_head linear performer rfa retention gla deltanet mlstm rwkv7 mesa log_linear mamba gdn2 lsh "
    "linformer nystrom longformer bigbird long_short sparse logsparse probsparse gau flash"
)


def _import_mechanism(name: str) -> type[Attention]:
    """Return `LongShortAttention` of long_short.py for `long_short`."""
    return getattr(importlib.import_module(f".{name}", __package__), f"{name.title().replace('_', '')}Attention")


CATALOGUE = {name: _import_mechanism(name) for name in _NAMES.split()}


def add_mechanisms(mechanisms: Iterable[type[Attention]]) -> None:
    """Make mechanisms known to every command. Raises `UsageError` if another one has the name of one of them."""
    for one in mechanisms:
        if CATALOGUE.setdefault(one.name, one) is not one:
            raise UsageError(f"{one.__module__}: there already is a mechanism '{one.name}'; choose another name")


def list_attentions() -> Mapping[str, type[Attention]]:
    """Return all mechanisms by name: those of this package, then those from outside. Raises what `plugins` raises."""
    add_mechanisms((*plugins.read_files(), *plugins.read_packages()))
    return CATALOGUE


def find_attention(name: str, others: Iterable[str] = ()) -> type[Attention]:
    """Return the mechanism called `name`. Raises `UsageError` for an unknown name; `others` may be suggested, too."""
    add_mechanisms(plugins.read_files())
    if name not in CATALOGUE and name not in list_attentions():
        error = unknown_name("attention", name, [*CATALOGUE, *others])
        raise UsageError(f"{error} (if it is your own: --plugin FILE.py)")
    return CATALOGUE[name]


def fit_attention(name: str, options: AttentionOptions, shape: AttentionShape, width: int) -> Attention:
    """Mechanism `name` for a model of width `width`; a mechanism may replace the sizes of `shape` with its own."""
    mechanism = find_attention(name)
    return mechanism(options, mechanism.fit_shape(options, shape, width))
