"""The memory that a plan takes, and cuts that fit into a bound."""
