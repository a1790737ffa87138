"""Images: where they come from, how they become sequences, and in which order training meets them.

Import from the modules: `images` (data sets by name), `sequence` (image <-> values) and `batches` (order). Nothing is
re-exported here: `sequence` imports torch, and a help text that lists the data sets must not wait for it.
"""
