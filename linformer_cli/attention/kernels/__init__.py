"""Compiled forms of `attend`, including gradients. The reference form in plain torch defines the result of each."""
