"""`lintx compare`: one run and one row of figures per mechanism, all with the same images and network settings."""
