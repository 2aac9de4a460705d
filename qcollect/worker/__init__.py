"""Inside each rank: where tensors are seen, which are wanted, and how they are saved."""
