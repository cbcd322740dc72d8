"""From labelled traces to a canary, stage after stage: each cached by what it reads, each able to go on after a kill."""
