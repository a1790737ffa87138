"""Images and bytes as compressed files: an exact engine predicts each value, and an entropy coder stores it."""
