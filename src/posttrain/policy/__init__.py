"""One rank of the policy: the model, its packed forward pass, its losses and its optimizer."""
