"""Tests of mechanisms with options: command line entries and row names."""

import pytest
from loops import loop_over

from linformer_cli.attention.catalogue import CATALOGUE
from linformer_cli.errors import UsageError
from linformer_cli.model.mixers import list_variants, parse_variant, parse_variants


@pytest.mark.parametrize(
    ("entry", "label", "options"),
    [
        ("linear", "linear", {"feature_map": "elu", "chunk": 64}),
        ("linear:chunk=16", "linear-16", {"feature_map": "elu", "chunk": 16}),
        (
            "linear:feature_map=learned:features=8",
            "linear-learned-8",
            {"feature_map": "learned", "features": 8, "chunk": 64},
        ),
        ("mine=linear:feature_map=relu", "mine", {"feature_map": "relu", "chunk": 64}),
        ("exact=softmax", "exact", {}),
    ],
)
def test_an_entry_is_a_mechanism_with_all_its_options(entry, label, options) -> None:
    variant = parse_variant(entry)
    assert (variant.label, variant.options) == (label, options)
    assert variant.attention in CATALOGUE


def test_without_entries_the_whole_catalogue_is_listed() -> None:
    assert [variant.label for variant in list_variants()] == list(CATALOGUE)
    assert [variant.label for variant in list_variants(baselines=True)] == [*CATALOGUE, "lstm", "none"]


def test_a_baseline_is_accepted_only_for_whole_models() -> None:
    (variant,) = parse_variants(["small=lstm:hidden=7"], baselines=True)
    assert (variant.label, variant.attention, variant.options) == ("small", "lstm", {"hidden": 7})
    with pytest.raises(UsageError, match="unknown attention 'lstm'"):
        parse_variants(["lstm"])


@loop_over(
    ("entries", "part"),
    [
        *((["linaer"], "did you mean 'linear'?"), ([""], "unknown attention ''")),
        *((["linear:chnk=1"], "did you mean 'chunk'?"), (["linear:chunk=0"], "chunk")),
        *(([entry], ":KEY=VALUE") for entry in ("linear:chunk", "linear:=2")),
        (["linear:chunk=1:chunk=2"], "each once"),
        *(([entry], "cannot be a name") for entry in ("=linear", "../up=linear", ".=linear")),
        (["linear", "softmax", " linear"], "'linear' is given twice"),
        (["a=linear", "a=softmax"], "'a' is given twice"),
    ],
)
def test_invalid_entries_give_a_one_line_error(entries, part, raises_one_line) -> None:
    with raises_one_line(UsageError, part):
        parse_variants(entries)
