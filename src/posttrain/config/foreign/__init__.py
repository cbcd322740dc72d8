"""Names of NeMo RL and NeMo-Aligner that config files may use: data in YAML beside this file, and what reads it."""
