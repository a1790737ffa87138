"""C++ for the CPU, compiled on first use, that the sampling engine and the attentions share."""
