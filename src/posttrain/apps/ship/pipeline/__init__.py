"""From labelled traces to a canary in stages. Each is cached by a hash of its inputs and resumes after a kill."""
