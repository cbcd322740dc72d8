"""Everything a person sees of a run: its folder of plain files, the console, the HTML report."""
