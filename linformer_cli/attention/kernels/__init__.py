"""Compiled forms of `attend`, gradients included. The textbook form of each, in plain torch, defines the result."""
