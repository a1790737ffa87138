"""All attention mechanisms by name, grouped by family and ordered by year within a family.

A new mechanism needs one file, one line here, test cases and a docs page. Those from outside the package follow.
"""

from collections.abc import Iterable, Mapping

from linformer_cli.errors import UsageError, unknown_name
from . import plugins
from .base import Attention, AttentionOptions, AttentionShape
from .bigbird import BigbirdAttention
from .deltanet import DeltanetAttention
from .flash import FlashAttention
from .gau import GauAttention
from .gdn2 import Gdn2Attention
from .gla import GlaAttention
from .linear import LinearAttention
from .linformer import LinformerAttention
from .log_linear import LogLinearAttention
from .logsparse import LogsparseAttention
from .long_short import LongShortAttention
from .longformer import LongformerAttention
from .lsh import LshAttention
from .mamba import MambaAttention
from .mesa import MesaAttention
from .mlstm import MlstmAttention
from .nystrom import NystromAttention
from .performer import PerformerAttention
from .probsparse import ProbsparseAttention
from .retention import RetentionAttention
from .rfa import RfaAttention
from .rwkv7 import Rwkv7Attention
from .single_head import SingleHeadAttention
from .softmax import SoftmaxAttention
from .sparse import SparseAttention

CATALOGUE: dict[str, type[Attention]] = {
    mechanism.name: mechanism
    for mechanism in (
        SoftmaxAttention,
        SingleHeadAttention,
        LinearAttention,
        PerformerAttention,
        RfaAttention,
        RetentionAttention,
        GlaAttention,
        DeltanetAttention,
        MlstmAttention,
        Rwkv7Attention,
        MesaAttention,
        LogLinearAttention,
        MambaAttention,
        Gdn2Attention,
        LshAttention,
        LinformerAttention,
        NystromAttention,
        LongformerAttention,
        BigbirdAttention,
        LongShortAttention,
        SparseAttention,
        LogsparseAttention,
        ProbsparseAttention,
        GauAttention,
        FlashAttention,
    )
}


def add_mechanisms(mechanisms: Iterable[type[Attention]]) -> None:
    """Make mechanisms known to every command. Raises `UsageError` if another one has the name of one of them."""
    for one in mechanisms:
        if CATALOGUE.setdefault(one.name, one) is not one:
            raise UsageError(f"{one.__module__}: there already is a mechanism '{one.name}'; choose another name")


def list_attentions() -> Mapping[str, type[Attention]]:
    """All mechanisms by name: those of this package, then those from outside. Raises what `plugins` raises."""
    add_mechanisms((*plugins.read_files(), *plugins.read_packages()))
    return CATALOGUE


def find_attention(name: str, others: Iterable[str] = ()) -> type[Attention]:
    """The mechanism called `name`. Raises `UsageError` for an unknown name; `others` may be suggested, too."""
    add_mechanisms(plugins.read_files())
    if name not in CATALOGUE and name not in list_attentions():
        error = unknown_name("attention", name, [*CATALOGUE, *others])
        raise UsageError(f"{error} (if it is your own: --plugin FILE.py)")
    return CATALOGUE[name]


def fit_attention(name: str, options: AttentionOptions, shape: AttentionShape, width: int) -> Attention:
    """Mechanism `name` for a model of width `width`; a mechanism may replace the sizes of `shape` with its own."""
    mechanism = find_attention(name)
    return mechanism(options, mechanism.fit_shape(options, shape, width))
