"""Running shards in other processes and on other machines."""
