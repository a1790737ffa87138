"""All attention mechanisms by name, grouped by family and ordered by year within a family.

A new mechanism needs one file, one line here, test cases and a docs page.
"""

from linformer_cli.errors import unknown_name

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


def find_attention(name: str) -> type[Attention]:
    """The mechanism called `name`; raises `UsageError` with a suggestion for an unknown name."""
    if name not in CATALOGUE:
        raise unknown_name("attention", name, CATALOGUE)
    return CATALOGUE[name]


def fit_attention(name: str, options: AttentionOptions, shape: AttentionShape, width: int) -> Attention:
    """Mechanism `name` for a model of width `width`; a mechanism may replace the sizes of `shape` with its own."""
    mechanism = find_attention(name)
    return mechanism(options, mechanism.fit_shape(options, shape, width))
