"""Compiled forms of `attend`, including gradients. The textbook form in plain torch defines the result of each."""
