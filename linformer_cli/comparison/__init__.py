"""`lintx compare`: one run and one row of figures per mechanism, with equal images and model sizes."""
