"""Compiled forms of what `attend` computes, gradients included. The textbook of each, in plain torch, defines it."""
