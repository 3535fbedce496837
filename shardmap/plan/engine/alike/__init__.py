"""Which shards of a stage are alike: walked once, for all of them."""
