"""LEAF: the record, the shard, and everything read from them."""
