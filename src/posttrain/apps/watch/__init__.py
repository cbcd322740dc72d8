"""`posttrain watch`: run folders in the browser. Reads files, writes none."""

MIN_TOKEN_CHARACTERS = 16
