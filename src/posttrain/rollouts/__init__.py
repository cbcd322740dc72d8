"""Where groups come from: fresh, recorded, several turns, dynamic sampling. Used by training, validation and evaluation."""
