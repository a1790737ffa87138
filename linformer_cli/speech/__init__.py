"""Speech recognition with CTC: recordings, features, encoders, training, decoding and the error rate."""
