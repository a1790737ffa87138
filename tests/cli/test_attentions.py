"""Tests of `lintx attentions`: the list, and the details of one mechanism."""

import pytest
import torch

from linformer_cli.checkpoint import save_checkpoint
from linformer_cli.config import ImageShape
from linformer_cli.model.mixers import find_mixer, list_mixers


@pytest.mark.smoke
def test_the_list_describes_every_mechanism(lintx):
    document = lintx("attentions", "--positions", 100, "--heads", 2, "--head-width", 16, "--json").document
    rows = {row["attention"]: row for row in document["rows"]}
    assert {"softmax", "linear"} <= rows.keys()
    assert rows["linear"]["options"]["chunk"]["default"] == 64
    assert (rows["linear"]["memory"], rows["softmax"]["memory"]) == ("constant", "growing")
    assert rows["linear"]["bidirectional"] and not rows["mamba"]["bidirectional"]
    # The state of linear has s and z of two heads; the state of softmax has keys and values of 100 positions.
    assert rows["linear"]["state_bytes"] == 2 * 16 * 17 * 4
    assert 100 * 2 * 2 * 16 * 4 <= rows["softmax"]["state_bytes"] < 100 * 2 * 2 * 16 * 4 + 100
    assert lintx("attentions", "linear", "--head-width", 4096, "--json").document["state_bytes"] == 8 * 4096 * 4097 * 4
    for style in ("md", "csv"):
        text = lintx("attentions", "--format", style).stdout
        assert "arXiv 2006.16236" in text and "feature_map=elu" in text
        assert ("33,792" if style == "md" else "33792") in text


def test_the_list_fits_a_narrow_terminal(lintx, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    outcome = lintx("attentions")
    lines = outcome.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    # No word is cut: every name appears in both tables, and every source appears in full.
    words = outcome.stdout.split()
    for name, mixer in ((name, find_mixer(name)) for name in list_mixers()):
        assert words.count(name) >= 2
        assert mixer.source.split()[-1] in words
    assert "feature_map=elu," in words and "33,792" in words
    assert "lintx attentions NAME" in outcome.stderr


def test_details_of_one_mechanism_include_its_formula_and_options(lintx, run_folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = lintx("attentions", "linear", "--checkpoint", run_folder).stdout
    assert "y_t = phi(q_t) s_t" in text and "T = 100, 2 heads of 16" in text
    assert "elu, relu, poly2," in text and "positions per chunk" in text
    document = lintx("attentions", "linear", "--json").document
    assert document["attention"] == "linear" and "phi(k_t) v_t^T" in document["description"]
    assert document["options"]["feature_map"] == {
        "default": "elu",
        "values": "elu, relu, poly2, taylor2, learned",
        "description": "phi, the map of queries and keys",
    }
    assert document["options"]["features"]["values"] == "int"
    assert "no options" in lintx("attentions", "softmax").stdout
    assert lintx("attentions", "linear", "--format", "csv").stdout.splitlines()[1].startswith("feature_map,elu,")


def test_state_bytes_use_the_row_length_of_a_checkpoint(lintx, build_tiny_model, tiny_info, tmp_path):
    """The images are in colour and not square."""
    image = ImageShape(height=4, width=8, channels=3)
    model = build_tiny_model(image=image, attention="long_short", attention_options={})
    save_checkpoint(tmp_path, model, tiny_info.model_copy(update={"model": model.config}))
    found = lintx("attentions", "long_short", "--checkpoint", tmp_path, "--json").document
    assert found["state_bytes"] == model.blocks[0].state_bytes(1, image.positions, torch.float32)


def test_gated_mechanisms_and_the_baseline_are_listed(lintx, run_folder):
    rows = {row["attention"]: row for row in lintx("attentions", "--json").document["rows"]}
    assert {"softmax", "linear", "gau", "flash"} <= rows.keys()
    assert rows["gau"]["state_bytes"] == 784 * (128 + 2 * 256) * 4 + 8
    assert list(rows)[-2:] == ["lstm", "none"] and rows["lstm"]["family"] == "recurrent baseline"
    assert list(rows["lstm"]["options"]) == ["hidden"]
    # A transformer block with 8 heads of 32 has 789,760 parameters; the closest LSTM block (hidden = 311) has 788,220.
    assert rows["lstm"]["state_bytes"] == 2 * 311 * 4
    assert (rows["none"]["state_bytes"], rows["none"]["options"]) == (0, {})
    of_model = lintx("attentions", "--checkpoint", run_folder, "--json").document["rows"]
    assert next(row for row in of_model if row["attention"] == "gau")["state_bytes"] == 100 * (128 + 2 * 32) * 4 + 8
