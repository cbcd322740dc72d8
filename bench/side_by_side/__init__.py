"""The parts of a benchmark that runs one job with two libraries. Each side runs in a process of its own."""
