"""Where ranks run: in this process, or as Ray actors. Algorithms are independent of this choice."""
