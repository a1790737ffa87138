"""Bidirectional forms against other libraries, with copied weights; a test is skipped if its library is missing."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tolerances import FLOAT64, assert_agree
from torch import Tensor, nn

from linformer_cli.attention.base import Attention, AttentionShape
from linformer_cli.model.mixers import build_attention

BATCH, LENGTH, WIDTH = 2, 48, 8


def build(name: str, heads: int, options: dict[str, Any]) -> Attention:
    torch.manual_seed(5)
    shape = AttentionShape(heads, WIDTH, WIDTH, positions=LENGTH, row=8)
    return build_attention(name, options, shape).double().eval()


def draw(heads: int, batch: int = BATCH) -> Tensor:
    generator = torch.Generator().manual_seed(6)
    return torch.randn(batch, LENGTH, heads * WIDTH, generator=generator, dtype=torch.float64)


def project(layer: Any, names: tuple[str, ...], x: Tensor, heads: int) -> list[Tensor]:
    """Apply the projections of a layer and split each result into heads."""
    return [getattr(layer, name)(x).unflatten(-1, (heads, WIDTH)).transpose(1, 2) for name in names]


def join_heads(y: Tensor) -> Tensor:
    return y.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("lengths", [None, [LENGTH, 32]])
def test_nystromformer(lengths: list[int] | None) -> None:
    pytest.importorskip("transformers")
    from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

    # The peer scales the initial inverse by one maximum over the batch and all heads, so each sequence has one head.
    config = SimpleNamespace(
        **{"hidden_size": WIDTH, "num_attention_heads": 1, "num_landmarks": 8, "segment_means_seq_len": LENGTH},
        **{"conv_kernel_size": 5, "inv_coeff_init_option": False, "attention_probs_dropout_prob": 0.0},
    )
    peer = NystromformerSelfAttention(config).double().eval()
    mechanism = build("nystrom", 1, {"landmarks": 8, "kernel": 5})
    mechanism.convolution.weight.data = peer.conv.weight.data.flatten(1)
    x = draw(1)
    inputs = project(peer, ("query", "key", "value"), x, 1)
    found = join_heads(mechanism.attend_all(*inputs, None if lengths is None else torch.tensor(lengths)))
    for image, length in enumerate(lengths or [LENGTH] * BATCH):
        peer.seq_len = length
        assert_agree(found[image : image + 1, :length], peer(x[image : image + 1, :length])[0], FLOAT64)


@pytest.mark.parametrize("rounds", [1, 3])
def test_reformer(rounds: int) -> None:
    pytest.importorskip("transformers")
    from transformers import ReformerConfig
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    heads, buckets, chunk, seed = 2, 8, 6, 3
    config = ReformerConfig(
        **{"hidden_size": heads * WIDTH, "num_attention_heads": heads, "attention_head_size": WIDTH},
        **{"num_buckets": buckets, "num_hashes": rounds, "lsh_attn_chunk_length": chunk, "hash_seed": seed},
        **{"lsh_num_chunks_before": 1, "lsh_num_chunks_after": 0, "is_decoder": False},
        lsh_attention_probs_dropout_prob=0.0,
    )
    peer = LSHSelfAttention(config).double().eval()
    mechanism = build("lsh", heads, {"rounds": rounds, "buckets": buckets, "window": chunk})
    torch.manual_seed(seed)
    mechanism.rotations = torch.randn(heads, WIDTH, rounds, buckets // 2, dtype=torch.float64)
    x = draw(heads)
    q, v = project(peer, ("query_key", "value"), x, heads)
    # The scores of the peer are not divided by sqrt(K). It adds 1e-6 to the mean squares of keys.
    found = mechanism.attend_all(q * math.sqrt(WIDTH), q * math.sqrt(WIDTH), v)
    expected = peer(x)
    outputs = expected.hidden_states.unflatten(-1, (heads, WIDTH)).transpose(1, 2)
    # In the peer, the first chunk of a round sees the last chunk of another round.
    slots = expected.buckets.argsort(dim=-1, stable=True).argsort(dim=-1)
    same = (slots >= (chunk if rounds > 1 else 0)).all(dim=2)
    assert same.float().mean() > 0.5
    assert_agree(found[same], outputs[same], 1e-5)


@pytest.mark.parametrize("count", [0, 3])
def test_longformer(count: int) -> None:
    pytest.importorskip("transformers")
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    heads, window, lengths = 2, 5, torch.tensor([LENGTH, 30])
    sizes = {"hidden_size": heads * WIDTH, "num_attention_heads": heads, "num_hidden_layers": 1}
    config = LongformerConfig(attention_window=[2 * (window - 1)], attention_probs_dropout_prob=0.0, **sizes)
    peer = LongformerSelfAttention(config, layer_id=0).double().eval()
    # Here, global positions have no projections of their own.
    for name in ("query", "key", "value"):
        getattr(peer, f"{name}_global").load_state_dict(getattr(peer, name).state_dict())
    mechanism = build("longformer", heads, {"window": window, "globals": count, "dilation": 1})
    x = draw(heads)
    place = torch.arange(LENGTH)
    is_padding, is_global = place >= lengths.unsqueeze(1), (place < count).expand(BATCH, -1)
    mask = torch.zeros(BATCH, LENGTH, dtype=torch.float64).masked_fill(is_padding, -1e4).masked_fill(is_global, 1e4)
    expected = peer(
        x,
        attention_mask=mask,
        is_index_masked=is_padding,
        is_index_global_attn=is_global,
        is_global_attn=count > 0,
    )[0]
    found = join_heads(mechanism.attend_all(*project(peer, ("query", "key", "value"), x, heads), lengths))
    # The peer computes the softmax in float32.
    for image, length in enumerate(lengths.tolist()):
        assert_agree(found[image, :length], expected[image, :length], 1e-5)


def test_bigbird() -> None:
    """In the peer, the first and the last block are global; here, the first two are."""
    pytest.importorskip("transformers")
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    heads, block = 2, 4
    config = BigBirdConfig(
        **{"hidden_size": heads * WIDTH, "num_attention_heads": heads, "block_size": block, "num_random_blocks": 1},
        **{"max_position_embeddings": LENGTH},
    )
    peer = BigBirdBlockSparseAttention(config).double().eval()
    x = draw(heads)
    masks = BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(BATCH, LENGTH, dtype=torch.float64), block)
    blocked, band, from_mask, to_mask = masks
    # These zeros hide the random blocks, which the peer draws in its own way.
    expected = peer(x, band, from_mask, to_mask, torch.zeros_like(blocked), torch.zeros_like(blocked))[0]
    mechanism = build("bigbird", heads, {"block": block, "globals": 2, "random": 0})
    place = torch.arange(LENGTH)
    order = torch.cat([place[:block], place[-block:], place[block:-block]])
    found = mechanism.attend_all(*project(peer, ("query", "key", "value"), x[:, order], heads))
    assert_agree(join_heads(found), expected[:, order], FLOAT64)


def fast_transformers(name: str) -> type[nn.Module]:
    module = pytest.importorskip(f"fast_transformers.attention.{name}_attention")
    kind: type[nn.Module] = getattr(module, f"{name.capitalize()}Attention")
    return kind


@pytest.mark.parametrize(("name", "peer_name"), [("softmax", "full"), ("linear", "linear")])
def test_fast_transformers(name: str, peer_name: str) -> None:
    heads, lengths = 2, torch.tensor([LENGTH, 31])
    kind = fast_transformers(peer_name)
    masking = pytest.importorskip("fast_transformers.masking")
    peer = (kind(softmax_temp=None, attention_dropout=0.0) if peer_name == "full" else kind(WIDTH)).double().eval()
    mechanism = build(name, heads, {})
    q, k, v = (draw(heads).unflatten(-1, (heads, WIDTH)) * scale for scale in (1.0, -0.5, 2.0))
    masks = masking.FullMask(LENGTH), masking.LengthMask(lengths, LENGTH), masking.LengthMask(lengths, LENGTH)
    expected = peer(q, k, v, *masks)
    found = mechanism.attend_all(*(x.transpose(1, 2) for x in (q, k, v)), lengths).transpose(1, 2)
    for image, length in enumerate(lengths.tolist()):
        # The peer adds 1e-6 to the denominator.
        assert_agree(found[image, :length], expected[image, :length], 1e-6)
