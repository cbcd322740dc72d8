"""The algorithms, one file each. They use roles and values alone: no engine, no transport, no device."""
