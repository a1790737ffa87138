"""Data sets (`images`), images as sequences of values (`sequence`), and the order of training (`batches`).

Nothing is re-exported here: `sequence` imports torch, and help pages that list the data sets must not wait for it.
"""
