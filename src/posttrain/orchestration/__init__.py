"""Where ranks run: in this process, or as Ray actors. The algorithms cannot tell the difference."""
