"""How ranks share the work: the mesh of ranks, FSDP, and ranks that share layers (tensor) or rows (context)."""
