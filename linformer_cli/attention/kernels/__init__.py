"""Compiled forms of `attend`, gradients included. Each has a textbook form in plain torch, which defines it."""
