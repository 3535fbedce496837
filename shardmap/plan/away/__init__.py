"""Shards in other processes and on other machines, which read and write themselves."""
