"""The policy's part of a checkpoint: what is in it, its files, and copying it while training continues."""
