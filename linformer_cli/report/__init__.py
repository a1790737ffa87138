"""Tables, plots, image grids and terminal previews. Nothing here prints."""
