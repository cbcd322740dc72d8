"""The algorithms, one file each. They know roles and values: no engine, no transport, no device."""
