"""What takes a stage of its own, and cuts that begin inside of a graph."""
