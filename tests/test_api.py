"""Tests of the Python interface that the examples of docs/guide/python.md leave out."""

import numpy as np
import pytest
import torch
from loops import loop_over
from PIL import Image

import linformer_cli
from linformer_cli import build_layer, complete, evaluate, load_model, load_picture, score, to_picture, train
from linformer_cli.attention.catalogue import list_attentions
from linformer_cli.cli.session import open_session
from linformer_cli.config import ImageShape
from linformer_cli.data.glyphs import draw_glyphs
from linformer_cli.errors import UsageError
from linformer_cli.sampling.decode import Sampler

IMAGES, LABELS = draw_glyphs("train", 8, 0, 40)
CONFIG = {"preset": "tiny", "train": {"steps": 2, "batch": 4}}


def test_every_name_can_be_imported() -> None:
    for name in linformer_cli.__all__:
        assert getattr(linformer_cli, name)
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        linformer_cli.trian  # noqa: B018


def test_a_run_of_python_is_one_of_the_command_line(tmp_path) -> None:
    steps = []
    config = CONFIG | {"model": {"attention": "gla"}, "data": {"image_size": [8, 8]}}
    model = train(config, "glyphs", on_step=lambda progress, step: steps.append(progress.step), out=tmp_path / "run")
    assert steps == [1, 2]
    opened = open_session(str(tmp_path / "run"), "cpu", "fp32").model
    assert opened.config == model.config and model.config.attention == "gla"
    assert all((one == other).all() for one, other in zip(opened.parameters(), model.parameters(), strict=True))
    with pytest.raises(UsageError, match="exists already"):
        train(CONFIG, "glyphs", out=tmp_path / "run")


def test_a_folder_of_pictures_is_trained_read_and_shown(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LINTX_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "icons").mkdir()
    for number in range(8):
        icon = Image.new("RGB", (8, 8), (200, 30, 30))
        icon.paste((20, 20, 220), (0, 0, 4, number + 1))
        icon.save(tmp_path / "icons" / f"{number}.png")
    (tmp_path / "icons" / "broken.png").touch()
    with pytest.warns(UserWarning, match=r"1 file skipped: .*broken.png"):
        train(CONFIG, "icons", out="run")
    model = load_model("run")
    image = load_picture(model, "icons/3.png")
    assert image.shape == (8, 8, 1) and image.max() == 1
    shown = to_picture(model, image).convert("RGB")
    assert shown.tobytes() == Image.open("icons/3.png").tobytes()
    grid = np.asarray(to_picture(model, np.stack([image, image])))
    assert {(200, 30, 30), (20, 20, 220)} <= set(map(tuple, grid.reshape(-1, 3).tolist()))


def test_labels_make_a_model_of_classes() -> None:
    model = train(CONFIG, IMAGES, LABELS)
    assert model.config.classes == LABELS.max() + 1
    bits, each = evaluate(model, IMAGES, LABELS), score(model, IMAGES, LABELS)
    assert bits.bits_per_dim == pytest.approx(each.mean()) and each.shape == (40,)
    kept = np.zeros((8, 8), bool)
    kept[:, 4:] = True  # not the first values
    drawn = complete(model, IMAGES[0], kept, count=2, label=int(LABELS[0]), particles=4)
    assert (drawn[:, :, 4:] == IMAGES[0, :, 4:]).all()
    other, same = (
        complete(Sampler(model, seed), IMAGES[0], kept, count=2, label=int(LABELS[0]), particles=4) for seed in (1, 0)
    )
    assert (same == drawn).all() and (other != drawn).any()


@loop_over(
    "call, message",
    [
        (lambda: train({"modle": {}}, IMAGES), "unknown key 'modle'"),
        (lambda: train({"train": {"stesp": 1}}, IMAGES), "did you mean 'steps'"),
        (lambda: train(CONFIG, IMAGES[0]), "images must be uint8 [N, H, W, C]"),
        (lambda: train(CONFIG, IMAGES, LABELS[1:]), "int64 [40], found int64 [39]"),
        (lambda: train(CONFIG, IMAGES, np.array(["cat"] * 40)), "numbers of classes"),
        (lambda: build_layer("linear", 30, 4, positions=10), "multiple of 4 heads, found 30"),
        (lambda: build_layer("gau", 32, 2, positions=10), "'gau' needs a block of its own"),
        (lambda: build_layer("single_head", 32, 2, positions=10), "'single_head' needs a block of its own"),
        (lambda: build_layer("linaer", 32, 2, positions=10), "did you mean 'linear'"),
    ],
)
def test_wrong_arguments_give_one_line(call, message, raises_one_line) -> None:
    with raises_one_line(UsageError, message):
        call()


def test_images_of_another_size_are_refused(build_tiny_model, raises_one_line) -> None:
    model = build_tiny_model()
    with raises_one_line(UsageError, "the model is for images of 8 x 8 x 1"):
        evaluate(model, IMAGES[:, :4])
    with raises_one_line(UsageError, "the image must be [8, 8, 1] and kept [8, 8]"):
        complete(model, IMAGES[0], np.ones((8, 4), bool))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch._dynamo, about what it does not trace
@loop_over("name", ["softmax", "linear", "gla"])
def test_layers_can_be_compiled(name) -> None:
    layer, x = build_layer(name, 32, 2, positions=64), torch.randn(2, 64, 32)
    assert torch.equal(torch.compile(layer, backend="eager")(x), layer(x))


@pytest.mark.slow
@loop_over("name", sorted(set(list_attentions()) - {"probsparse"}))
def test_models_can_be_exported(name, build_tiny_model) -> None:
    options = {"attention_options": {"iterations": 1}} if name == "mesa" else {}  # each is traced on its own
    shape = ImageShape(height=2, width=3, channels=1)
    model = build_tiny_model(attention=name, image=shape, layers=1, heads=1, width=4, feed_forward=4, **options)
    tokens = torch.arange(6).unsqueeze(0)
    attend = torch.nn.Module()
    attend.model, attend.forward = model, lambda tokens: model.attend(tokens)[0]
    with torch.no_grad():
        exported = torch.export.export(attend, (tokens,), strict=False).module()
        torch.testing.assert_close(exported(tokens), model.attend(tokens)[0])
