"""Files that other processes may read at any moment: whole or not at all, bounded, locked, and without credentials."""
