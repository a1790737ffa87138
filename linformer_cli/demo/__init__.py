"""The browser demo: a page that runs a model with the C++ engine, compiled to WebAssembly."""
