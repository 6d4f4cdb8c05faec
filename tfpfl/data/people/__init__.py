"""Data of real people: every person is a client. `catalog` has their list; `load_source` reads them by name."""
