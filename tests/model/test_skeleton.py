"""Tests that a model built without weights takes no memory and equals the full model once it has weights."""

import torch
from loops import loop_over

from linformer_cli.model.mixers import list_mixers
from linformer_cli.model.pixel_model import PixelModel, build_skeleton, expected_weights

every_network = loop_over("changes", [{}, {"embedding": "paper", "context": "hashed", "head": "mixture", "classes": 3}])
every_mixer = loop_over("attention", list_mixers())


@every_mixer
@every_network
def test_a_filled_skeleton_equals_the_model(build_config, attention, changes) -> None:
    config = build_config(attention, **changes)
    model, skeleton = PixelModel(config), build_skeleton(config)
    assert all(parameter.is_meta for parameter in skeleton.head.parameters())
    skeleton.load_state_dict({key: tensor.clone() for key, tensor in model.state_dict().items()}, assign=True)
    ours, theirs = ({**dict(each.named_parameters()), **dict(each.named_buffers())} for each in (skeleton, model))
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert torch.equal(ours[key], tensor) and ours[key].requires_grad == tensor.requires_grad, key
    values = torch.zeros(1, config.image.positions, dtype=torch.int64)
    labels = values[:, 0] if config.classes else None
    assert torch.equal(skeleton.eval().nats(values, labels), model.eval().nats(values, labels))


@every_mixer
@every_network
def test_expected_weights_have_shapes_but_no_memory(build_config, attention, changes) -> None:
    config = build_config(attention, **changes)
    expected, weights = expected_weights(lambda: PixelModel(config)), PixelModel(config).state_dict()
    assert {key: (x.shape, x.dtype) for key, x in expected.items()} == {
        key: (x.shape, x.dtype) for key, x in weights.items()
    }
    assert all(tensor.is_meta for tensor in expected.values())
