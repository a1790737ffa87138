"""Numbers that Python and C++ share. They are written in constants.h, which says what they mean."""

import re
from pathlib import Path

_TEXT = re.sub(r"//.*", "", Path(__file__).with_name("constants.h").read_text(encoding="utf-8"))
_NUMBERS = {name: int(value, 0) for name, value in re.findall(r"(\w+) = (\w+)\b", _TEXT)}


def _read_names(enum: str) -> dict[str, int]:
    """Return the numbers of an enum by their names in options and programs, such as `elu` for ELU_MAP."""
    (body,) = re.findall(rf"enum {enum} {{(.*?)}}", _TEXT, re.DOTALL)
    return {name.removesuffix("_MAP").lower(): _NUMBERS[name] for name in re.findall(r"(\w+) =", body)}


ACTIVATIONS, FORMATS, STEP_MAPS = map(_read_names, ("Activation", "Format", "FeatureMap"))
COMPILED_MAPS = {name: STEP_MAPS[name] for name in ("elu", "relu")}

DIFFERENCE_SCALE = _NUMBERS["DIFFERENCE_SCALE"]
LEFT_PLACE, UP_PLACE = _NUMBERS["LEFT_PLACE"], _NUMBERS["UP_PLACE"]
LANES, TILE_ROWS = _NUMBERS["LANES"], _NUMBERS["TILE_ROWS"]
MOST_LEVELS, LARGEST_GUIDANCE = _NUMBERS["MOST_LEVELS"], _NUMBERS["LARGEST_GUIDANCE"]
BUFFERS, INTEGERS, REALS = (_NUMBERS[name] for name in ("BUFFERS", "INTEGERS", "REALS"))
ROW_WIDTH = _NUMBERS["ROW_WIDTH"]
TABLE_ROWS = tuple(_NUMBERS[name] for name in ("PAIR_ROWS", "TRIPLE_ROWS", "QUADRUPLE_ROWS"))
PAIR_BASE = _NUMBERS["PAIR_BASE"]
HASH_BASE, HASH_MULTIPLIER, HASH_MASK = (_NUMBERS[f"HASH_{name}"] for name in ("BASE", "MULTIPLIER", "MASK"))
HASH_SHIFT, HASH_LAST_SHIFT = _NUMBERS["HASH_SHIFT"], _NUMBERS["HASH_LAST_SHIFT"]
