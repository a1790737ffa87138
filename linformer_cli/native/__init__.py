"""C++ for the CPU, compiled on first use: what parts of the sampling engine and of the attentions share."""
