"""The command line: thin calls into the other packages, imported lazily."""
