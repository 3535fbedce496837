"""The memory that a plan takes, and the cuts that fit into what is given."""
