"""A plan as a folder: tasks of an array job run it, with no client."""
