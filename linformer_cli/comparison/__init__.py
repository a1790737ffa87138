"""`lintx compare`: one run for every mechanism, on the same images at the same size, and one row of figures each."""
