"""Programs over the arrays of devices: compiling them, and running one at a time."""
