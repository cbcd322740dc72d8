"""Models by whatever name a user gives them: find, fetch, load."""
