"""The algorithms, one file each. They depend on roles and types only, not on engines, transports or devices."""
