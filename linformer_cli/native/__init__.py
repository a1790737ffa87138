"""C++ for the CPU, compiled on first use: what the sampling engine and the attentions share."""
