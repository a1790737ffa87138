"""The phonemes of the ten digits."""

# The first pronunciation of each word in the CMU Pronouncing Dictionary (github.com/cmusphinx/cmudict), in ARPAbet
# without stress.
LEXICON: dict[str, tuple[str, ...]] = {
    "zero": ("Z", "IH", "R", "OW"),
    "one": ("W", "AH", "N"),
    "two": ("T", "UW"),
    "three": ("TH", "R", "IY"),
    "four": ("F", "AO", "R"),
    "five": ("F", "AY", "V"),
    "six": ("S", "IH", "K", "S"),
    "seven": ("S", "EH", "V", "AH", "N"),
    "eight": ("EY", "T"),
    "nine": ("N", "AY", "N"),
}
DIGITS = tuple(LEXICON)
