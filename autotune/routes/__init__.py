"""Ways to run the attention call. One file a kernel family; ``base`` is the protocol they share."""
